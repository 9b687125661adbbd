"""A run that is killed with SIGKILL and started again ends as one that was never killed.

One whose groups are learned from in the order in which they finish does not repeat, and learns
from every prompt once. It is killed at random moments: GRPO_JAX_KILLS of them, 3 by default, which
follow from GRPO_JAX_SEED. If GRPO_JAX_KILLS is set, a run that samples ahead is, too.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from grpo_jax import metrics
from grpo_jax.models import loading, tiny
from tests import quick_compilation, several

STEPS = 6
SURPLUS = "dynamic_sampling/from_surplus"
KILLS = int(os.environ.get("GRPO_JAX_KILLS", "3"))
EPOCHS = max(8, KILLS)  # of 4 steps each, so that the run lasts that long.
SEED = int(os.environ.get("GRPO_JAX_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 60 * KILLS)]

# Each run has as much as its form can have of what a checkpoint must restore.
SETTINGS = {
  # That samples and learns in turn: an adapter on a rounded base, which its sampler keeps apart;
  # several optimizer steps a batch, with a KL; steps that begin with groups that are left
  # over from the step before.
  "in_turn": """
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels_of_some"}}
  config.model.lora.rank = 4
  config.model.lora.base_dtype = "int8"
  config.learn.epochs = 2
  config.learn.minibatches = 2
  config.dynamic_sampling.enabled = True
  config.dynamic_sampling.prompts_per_round = 5
  config.shaping.overlong_buffer_tokens = 4
  config.loss.kl_coef = 0.01
""",
  # That samples the next step's groups while it learns: all weights, of several optimizer steps a
  # batch, with a KL.
  "ahead": """
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  config.rollout.max_staleness = 1
  config.learn.minibatches = 2
  config.loss.kl_coef = 0.01
  config.loss.importance_correction = "token"
""",
}


# That learns from whatever has finished, up to two steps ahead, until the data end.
IN_FLIGHT = """
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  config.total_steps = 1000
  config.rollout.max_staleness = 2
  config.evaluation.every_steps = 0
  config.evaluation.at_start = False
  config.loss.kl_coef = 0.0
  config.loss.importance_correction = "token"
"""


@pytest.fixture(scope="module", params=SETTINGS)
def command(tmp_path_factory, request):
  """Returns the command of a run with shuffled data, by run folder."""
  return command_of(SETTINGS[request.param], tmp_path_factory.mktemp("input"))


def command_of(settings, folder):
  """Returns the command of a run with these settings, by run folder."""
  model = tiny.write(folder / "model")
  rows = folder / "rows.jsonl"
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(11)]
  rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
  held_out = folder / "held_out.jsonl"
  other = [{"problem": f"{i} - {i}", "expected_answer": "0"} for i in range(4)]
  held_out.write_text("".join(json.dumps(line) + "\n" for line in other))
  config = folder / "config.py"
  config.write_text(
    f"""
import configs.base

def get_config():
  config = configs.base.get_config()
  config.total_steps = {STEPS}
  config.model.path = {str(model)!r}
  config.model.compute_dtype = "float32"
  config.data.path = {str(rows)!r}
  config.evaluation.data.path = {str(held_out)!r}
  config.data.environment = "own"
  config.rollout.prompts_per_step = 3
  config.rollout.group_size = 6
  config.sampling.max_tokens = 12
  config.rollout.max_tokens = 96
  config.batching.row_tokens = 256
  config.batching.row_buckets = (256,)  # one shape of a batch: a start traces 18 programs, not 32.
  config.batching.microbatch_tokens = 256
  config.engine.max_rows = 8
  config.learn.report_kl_every_steps = 0
  config.optim.learning_rate = 1e-3
  config.evaluation.every_steps = 3
  config.evaluation.num_prompts = 4
  config.checkpoint.every_steps = 2
  config.checkpoint.keep_last = 3
{settings}
  return config
"""
  )
  # A folder of programs of its own, without a limit: a limited one is never written again once a
  # process was killed between the two files of a program.
  inherited = os.environ.keys() - {"JAX_COMPILATION_CACHE_MAX_SIZE"}

  def make(workdir: pathlib.Path):
    environment = {
      **{name: os.environ[name] for name in inherited},
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": quick_compilation.FLAGS,
      "PYTHONPATH": several.PYTHONPATH,
      "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = [sys.executable, "-m", "grpo_jax.main", f"--config={config}", f"--workdir={workdir}"]
    return {"args": words, "cwd": several.ROOT, "env": environment}

  return make


@pytest.fixture(scope="module")
def unbroken(command, tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("unbroken")
  subprocess.run(**command(workdir), check=True, stdout=subprocess.DEVNULL)
  steps = [json.loads(line) for line in lines_of(workdir)]
  taken = [step[SURPLUS] for step in steps if SURPLUS in step]
  assert not taken or sum(number > 0 for number in taken) > 1
  return workdir


def lines_of(workdir):
  file = workdir / "metrics.jsonl"
  return file.read_text().splitlines() if file.exists() else []


def killed_when(process, reached) -> bool:
  """Kills the process, graders and all, as soon as `reached()`; False if it ended before."""
  while process.poll() is None:
    if reached():
      process.send_signal(signal.SIGKILL)
      process.wait()
      return True
    time.sleep(0.005)
  return False


MOMENTS = {
  "before_the_first_step": lambda run: (run / "config.json").exists(),
  "sampling_the_second_step": lambda run: len(lines_of(run)) >= 1,
  "writing_a_checkpoint": lambda run: any((run / "checkpoints").glob("tmp_step_*")),
  "after_a_checkpoint": lambda run: (run / "checkpoints" / "step_00000002").exists(),
  "ctrl_c": lambda run: len(lines_of(run)) >= 3,
  "in_the_last_steps": lambda run: len(lines_of(run)) >= 5,
  "exporting": lambda run: len(lines_of(run)) >= STEPS + 1,
}


def test_a_run_that_is_stopped_at_every_moment_ends_bit_for_bit_like_an_unbroken_one(
  command, unbroken, tmp_path
):
  for moment, reached in MOMENTS.items():  # each is later than the one before.
    if moment == "ctrl_c":
      interrupt(command(tmp_path), tmp_path, reached)
      continue
    process = subprocess.Popen(**command(tmp_path), stdout=subprocess.DEVNULL)
    was_killed = killed_when(process, lambda reached=reached: reached(tmp_path))
    assert was_killed or moment == "exporting"  # which is over within milliseconds.
  subprocess.run(**command(tmp_path), check=True, stdout=subprocess.DEVNULL)
  assert_same(tmp_path, unbroken)
  learned = prompts_of_steps(tmp_path)
  flat = [name for names in learned for name in names]
  assert len(learned) == STEPS and len(flat) == len({*flat})


def interrupt(command, workdir, reached):
  """Presses Ctrl-C, and checks that the run ends with a checkpoint of all its steps."""
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  # Lines of the process before count only once this one has taken up the file, or lengthened it.
  file = workdir / "metrics.jsonl"
  state = lambda: (file.stat().st_size, file.stat().st_mtime_ns)
  before = state()
  process = subprocess.Popen(**command, **pipes, start_new_session=True)
  while process.poll() is None and (state() == before or not reached(workdir)):
    time.sleep(0.01)
  os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole process group.
  output, errors = process.communicate(timeout=120)
  assert process.returncode == 130
  assert "continues" in output
  assert output.count("SIGINT") == 1 and "Traceback" not in output + errors
  steps = sorted((workdir / "checkpoints").glob("step_*"))
  assert int(steps[-1].name.removeprefix("step_")) >= 3


def assert_same(run, other):
  """Checks that two runs logged and exported the same."""
  found, expected = (
    [metrics.reproducible(json.loads(line)) for line in lines_of(workdir)]
    for workdir in (run, other)
  )
  assert found == expected
  pairs = zip(
    jax.tree.leaves(loading.load(run / "export").params),
    jax.tree.leaves(loading.load(other / "export").params),
    strict=True,
  )
  for mine, theirs in pairs:
    np.testing.assert_array_equal(mine, theirs)


def kill_at_random_moments(command, workdir):
  """Starts a run, kills it `KILLS` times, and lets it end; returns how often it was killed."""
  draw = random.Random(SEED)
  kills = 0
  while True:
    before = len(lines_of(workdir))
    process = subprocess.Popen(**command(workdir), stdout=subprocess.DEVNULL)
    steps, late = draw.randint(0, 2 if KILLS < 10 else 1), draw.uniform(0, 0.5)
    moment = MOMENTS["writing_a_checkpoint"] if draw.random() < 0.3 else None
    reached = lambda m=moment, n=before + steps: m(workdir) if m else len(lines_of(workdir)) > n
    while process.poll() is None and (kills == KILLS or not reached()):
      time.sleep(0.005)
    if process.poll() is not None:
      assert process.returncode == 0
      return kills
    time.sleep(late)
    process.kill()
    process.wait()
    kills += 1


@pytest.mark.skipif(
  "GRPO_JAX_KILLS" not in os.environ,
  reason="killed at every kind of moment above; GRPO_JAX_KILLS=20 looks for others",
)
def test_a_run_ahead_that_is_killed_at_random_moments_ends_like_an_unbroken_one(tmp_path):
  settings = f"{SETTINGS['ahead']}\n  config.total_steps = {6 * KILLS}\n"
  command = command_of(settings, tmp_path)
  kills = kill_at_random_moments(command, tmp_path / "killed")
  print(f"{kills} kills")
  assert kills > 0.6 * KILLS
  subprocess.run(**command(tmp_path / "unbroken"), check=True, stdout=subprocess.DEVNULL)
  assert_same(tmp_path / "killed", tmp_path / "unbroken")
  learned = prompts_of_steps(tmp_path / "killed")
  flat = [name for names in learned for name in names]
  assert len(learned) == 6 * KILLS and len(flat) == len({*flat})


def test_a_run_in_flight_that_is_killed_learns_from_every_prompt_once(tmp_path):
  command = command_of(f"{IN_FLIGHT}\n  config.data.epochs = {EPOCHS}\n", tmp_path)
  workdir = tmp_path / "run"
  kills = kill_at_random_moments(command, workdir)
  found = [json.loads(line) for line in lines_of(workdir)]
  steps = [line for line in found if "weight_version" in line]
  assert [line["step"] for line in steps] == [*range(len(steps))]
  assert all(line.get("rollout/staleness_max", 0) <= 2 for line in steps)
  learned = prompts_of_steps(workdir)
  assert len(learned) == len(steps)
  flat = [name for names in learned for name in names]
  print(f"{kills} kills, {len(steps)} steps")
  expected = {f"{epoch}:{row}" for epoch in range(EPOCHS) for row in range(11)}
  assert len(flat) == len({*flat}) and {name.partition(":")[2] for name in flat} == expected
  for epoch in range(EPOCHS - 1):  # no prompt is left behind.
    of = lambda number: [
      step for step, names in enumerate(learned) if any(f":{number}:" in name for name in names)
    ]
    assert max(of(epoch)) <= min(of(epoch + 1)) + 3


def prompts_of_steps(workdir):
  """Returns the prompts that each step learned from."""
  files = sorted((workdir / "rollouts").glob("step_*.jsonl"))
  names = lambda lines: list(dict.fromkeys(json.loads(line)["prompt_id"] for line in lines))
  return [names(file.read_text().splitlines()) for file in files]
