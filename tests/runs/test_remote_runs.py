"""A run whose folder, model and data are at URLs: killed, and continued on an empty machine."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from grpo_jax import metrics
from grpo_jax.files import manifest
from grpo_jax.models import loading, tiny
from tests import quick_compilation, several
from tests.runs.test_killed_runs import killed_when, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
PROGRAM = """
import os, sys
os.environ["GRPO_JAX_CACHE"] = sys.argv.pop(1)  # as on a machine of its own.
from grpo_jax import main
from grpo_jax.run_folder import url_runs

url_runs.EVERY_S = 0.05
main.console()
"""
CONFIG = """
import configs.base

def get_config():
  config = configs.base.get_config()
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  config.total_steps = %d
  config.model.path = %r
  config.model.compute_dtype = "float32"
  config.data.path = %r
  config.evaluation.data.path = %r
  config.data.environment = "own"
  config.rollout.prompts_per_step = 2
  config.rollout.group_size = 4
  config.sampling.max_tokens = 8
  config.rollout.max_tokens = 96
  config.batching.row_tokens = 256
  config.batching.row_buckets = (256,)
  config.batching.microbatch_tokens = 256
  config.learn.report_kl_every_steps = 0
  config.loss.kl_coef = 0.0
  config.evaluation.every_steps = 3
  config.evaluation.num_prompts = 2
  config.checkpoint.every_steps = 1
  return config
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
  """Returns the command of a run on a machine, which has a cache of its own, in a run folder."""
  folder = tmp_path_factory.mktemp("input")
  tiny.write(folder / "model")
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(11)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  url = f"file://{folder}"
  held_out = [{"problem": f"{i} - {i}", "expected_answer": "0"} for i in range(2)]
  (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
  places = [f"{url}/{name}" for name in ("model", "rows.jsonl", "held_out.jsonl")]
  (folder / "config.py").write_text(CONFIG % (STEPS, *places))
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": quick_compilation.FLAGS,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": several.PYTHONPATH,
  }

  def make(machine, workdir):
    flags = [f"--config={folder / 'config.py'}", f"--workdir={workdir}"]
    words = [sys.executable, "-c", PROGRAM, str(machine), *flags]
    return {"args": words, "cwd": several.ROOT, "env": environment, "stdout": subprocess.DEVNULL}

  return make


@pytest.fixture(scope="module")
def unbroken(command, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("unbroken")
  subprocess.run(**command(tmp_path_factory.mktemp("machine"), workdir), check=True)
  return workdir


def complete(there):
  marks = (there / "checkpoints").glob(f"step_*/{manifest.NAME}")
  return sorted(int(mark.parent.name.removeprefix("step_")) for mark in marks)


def assert_same_end(one, other):
  reported, expected = (
    [metrics.reproducible(json.loads(line)) for line in lines_of(run)] for run in (one, other)
  )
  assert reported == expected
  pairs = zip(
    jax.tree.leaves(loading.load(one / "export").params),
    jax.tree.leaves(loading.load(other / "export").params),
    strict=True,
  )
  for mine, theirs in pairs:
    np.testing.assert_array_equal(mine, theirs)
  names = [sorted(p.name for p in (run / "rollouts").iterdir()) for run in (one, other)]
  assert names[0] == names[1]


def test_a_run_at_a_url_that_was_killed_continues_on_an_empty_machine(command, unbroken, tmp_path):
  there, first, second = (tmp_path / name for name in ("there", "first", "second"))
  url = f"file://{there}"
  process = subprocess.Popen(**command(first, url))
  assert killed_when(process, lambda: len(complete(there)) >= 1)
  newest = max(complete(there))
  assert subprocess.run(**command(second, url)).returncode == 2  # the lock of the first is there.
  (there / "lock.json").unlink()
  process = subprocess.Popen(**command(second, url))
  assert killed_when(process, lambda: max(complete(there)) > newest)
  subprocess.run(**command(second, url), check=True)  # its own lock stops no machine.
  assert_same_end(there, unbroken)
  assert (there / "report.html").is_file() and max(complete(there)) == STEPS


def test_sigterm_ends_with_the_newest_checkpoint_at_the_url(command, tmp_path):
  there = tmp_path / "there"
  process = subprocess.Popen(**command(tmp_path / "machine", f"file://{there}"))
  while process.poll() is None and len(lines_of(there)) < 2:
    pass
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=120) == 143
  assert max(complete(there)) == len(lines_of(there)) and not (there / "lock.json").exists()
