"""Keeps lines of native code that say nothing to a user from standard error, by their text.

XLA logs them as errors, in C++, so neither `warnings` nor a level of its log can select them.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

# XLA times kernels while it autotunes; with several compilations at a time, some are timed badly.
AUTOTUNING = ("cuda_timer.cc", "Delay kernel timed out")
# A process, so that the last words of a program that aborts still arrive.
_FILTER = """
import sys
texts = [text.encode() for text in sys.argv[1:]]
for line in sys.stdin.buffer:
  if not all(text in line for text in texts):
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""


@contextlib.contextmanager
def without(texts: Sequence[str] = AUTOTUNING) -> Iterator[None]:
  """Leaves out lines of standard error that contain all of some texts; other lines pass.

  Processes that start meanwhile inherit the filtered standard error, and keep it.

  Args:
    texts: The texts.
  """
  try:
    before = os.dup(2)
  except OSError:  # standard error is closed.
    yield
    return
  reader, writer = os.pipe()
  command = [sys.executable, "-S", "-E", "-c", _FILTER, *texts]
  # In a session of its own, so that Ctrl-C does not end it before the last line. It ends when
  # nothing can write to it any more.
  process = subprocess.Popen(command, stdin=reader, stdout=before, start_new_session=True)
  os.close(reader)
  os.dup2(writer, 2)
  os.close(writer)
  try:
    yield
  finally:
    sys.stderr.flush()
    os.dup2(before, 2)
    os.close(before)
    with contextlib.suppress(subprocess.TimeoutExpired):  # others may still write to it.
      process.wait(1.0)
