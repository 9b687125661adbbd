"""Lines of native code that are kept from standard error, and all others that are not."""

import os
import subprocess
import sys
import threading
from typing import Any

import jax
import pytest

from grpo_jax.compilation import compiling

NOISE = "E0000 cuda_timer.cc:88] Delay kernel timed out: measured time has sub-optimal accuracy.\n"
LINES = f"""
import os, sys
from grpo_jax.compilation import native_lines
native = lambda text: os.write(2, text.encode())
with native_lines.without():
  native({NOISE!r})
  native("E0000 cuda_timer.cc:99] another error\\n")
  print("of Python", file=sys.stderr)
native("after: " + {NOISE!r})
"""
ABORTS = f"""
import os
from grpo_jax.compilation import native_lines
with native_lines.without():
  os.write(2, ({NOISE!r} + "F0000 last words\\n").encode())
  os.abort()
"""


def lines_of(script):
  """Returns the lines of standard error of a program."""
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
  return done.stderr.splitlines()


def test_only_lines_with_all_texts_are_left_out():
  expected = ["E0000 cuda_timer.cc:99] another error", "of Python", f"after: {NOISE.strip()}"]
  assert lines_of(LINES) == expected


def test_the_last_words_of_a_program_that_aborts_arrive():
  assert "F0000 last words" in lines_of(ABORTS)


@pytest.mark.parametrize("platform, is_quiet", [("gpu", True), ("cpu", False)])
def test_compilation_on_a_gpu_leaves_out_lines_of_autotuning(
  platform, is_quiet, monkeypatch, capfd
):
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  entered = threading.Event()

  def job():
    entered.wait(10)
    os.write(2, NOISE.encode() + b"an error\n")

  job.name = "planted"
  jobs: Any = [job]
  with compiling.BackgroundCompiler(jobs, compiling.CompilationMonitor()) as ahead:
    entered.set()
    list(ahead._pending)[0].result()
  err = capfd.readouterr().err
  assert "an error" in err and ("cuda_timer" not in err) == is_quiet
