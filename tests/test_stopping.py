"""What ends a run before its time, and what is on the disk afterwards; see docs/stopping.md."""

import hashlib
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax import checkpointing, main, manifest, metrics, train
from grpo_jax.engines import jax_sampler
from grpo_jax.models import loading, tiny
from tests import rewards

pytestmark = pytest.mark.usefixtures("one_device")

COMPLETIONS = 4  # of a step.


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  """The flags of a run of four steps on a tiny model."""
  folder = tmp_path_factory.mktemp("input")
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(8)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = folder / "config.py"
  config.write_text(
    "import configs.base\n\n\ndef get_config():\n  config = configs.base.get_config()\n"
    "  config.environments = {'own': {'module': 'function', 'path': 'tests.rewards.vowels'}}\n"
    "  return config\n"
  )
  return {
    "config": config,
    "config.total_steps": 4,
    "config.model.path": tiny.write(folder / "model"),
    "config.model.compute_dtype": "float32",
    "config.data.path": folder / "rows.jsonl",
    "config.data.environment": "own",
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.rollout.max_tokens": 64,
    "config.sampling.max_tokens": 4,
    "config.batching.row_tokens": 128,
    "config.loss.kl_coef": 0.0,
    "config.evaluation.every_steps": 2,
    "config.evaluation.num_prompts": 2,
    "config.evaluation.at_start": False,
    "config.checkpoint.every_steps": 0,
    "config.logging.tensorboard": False,
  }


@pytest.fixture
def arguments(settings, tmp_path):
  def make(folder="run", **overrides):
    named = {f"config.{name.replace('__', '.')}": value for name, value in overrides.items()}
    flags = {**settings, "workdir": tmp_path / folder, **named}
    return [f"--{name}={value}" for name, value in flags.items()]

  return make


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed")
  assert main.main([f"--{n}={v}" for n, v in {**settings, "workdir": folder}.items()]) == 0
  return folder


def told(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [metrics.reproducible(json.loads(line)) for line in lines]


def checkpoints_of(workdir):
  whole = [p for p in (workdir / "checkpoints").glob("step_*") if manifest.damage(p) is None]
  return sorted(int(path.name.removeprefix("step_")) for path in whole)


def assert_same_end(workdir, expected):
  assert told(workdir) == told(expected)
  pairs = zip(
    jax.tree.leaves(loading.load(workdir / "export").params),
    jax.tree.leaves(loading.load(expected / "export").params),
    strict=True,
  )
  for mine, theirs in pairs:
    np.testing.assert_array_equal(mine, theirs)


def when_called(monkeypatch, number, act):
  """Has `act` run in the `number`-th call of the reward function, in the thread of that call."""
  calls = []
  vowels = rewards.vowels

  def reward(prompt, completion, info):
    calls.append(completion)
    if len(calls) == number:
      act()
    return vowels(prompt, completion, info)

  monkeypatch.setattr(rewards, "vowels", reward)


def test_sigterm_while_a_rollout_is_scored_saves_at_once_and_the_run_ends_bit_for_bit(
  arguments, undisturbed, tmp_path, monkeypatch, capfd
):
  asked = []

  def ask_and_dawdle():
    asked.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

  with monkeypatch.context() as patch:
    when_called(patch, COMPLETIONS + 2, ask_and_dawdle)  # in the second step.
    assert main.main(arguments()) == 143
  assert time.monotonic() - asked[0] < 10, "scoring takes a minute, and must not be waited for"
  assert checkpoints_of(tmp_path / "run") == [1]
  assert [line["step"] for line in told(tmp_path / "run")] == [0]
  assert "the checkpoint of step 1 is complete" in capfd.readouterr().err
  assert not [t.name for t in threading.enumerate() if t.name == "rollout"]
  assert main.main(arguments()) == 0
  assert_same_end(tmp_path / "run", undisturbed)


def test_sigterm_in_an_evaluation_repeats_it_when_the_run_continues(
  arguments, undisturbed, tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    # After two steps of training come the completions of the first evaluation.
    act = lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))
    when_called(patch, 2 * COMPLETIONS + 2, act)
    assert main.main(arguments()) == 143
  assert checkpoints_of(tmp_path / "run") == [2]
  assert main.main(arguments()) == 0
  assert_same_end(tmp_path / "run", undisturbed)


def test_keyboard_interrupt_in_a_notebook_saves_what_was_learned(
  arguments, undisturbed, tmp_path, monkeypatch
):
  from grpo_jax import command_line

  with monkeypatch.context() as patch:
    act = lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60))
    when_called(patch, 3 * COMPLETIONS, act)  # in the evaluation after the second step.
    with pytest.raises(KeyboardInterrupt):
      command = command_line.parse(arguments())
      train.train(command.config, tmp_path / "run")
  assert checkpoints_of(tmp_path / "run") == [2]
  assert main.main(arguments()) == 0
  assert_same_end(tmp_path / "run", undisturbed)


def test_a_save_starts_while_the_main_thread_computes(arguments, tmp_path, monkeypatch):
  """A signal's handler would run only when the computation returns; a thread does not wait."""
  seen = []

  def compute_long():
    """Stands in for gradients: seconds in C, which no signal interrupts."""
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)
    seen.extend(checkpoints_of(tmp_path / "run"))

  release = jax_sampler.JaxSampler.release
  calls = []

  def in_the_second_step(self):
    calls.append(1)
    if len(calls) == 2:
      compute_long()
    release(self)

  monkeypatch.setattr(jax_sampler.JaxSampler, "release", in_the_second_step)
  assert main.main(arguments()) == 143
  assert seen == [1], "the checkpoint is whole before the main thread looks at anything"


def test_no_checkpoint_can_be_saved_between_an_update_and_what_is_told_of_it(tmp_path):
  from grpo_jax.keeper import Keeper, Standing
  from grpo_jax.types import TrainState

  state = lambda step: TrainState(jax.numpy.asarray(step, jax.numpy.int32), {"w": np.ones(2)}, {})
  with checkpointing.open(tmp_path / "checkpoints", keep_last=None) as checkpoints:
    with Keeper(checkpoints, Standing(state(1), {}, 0, {})) as keeper:
      keeper.consume()
      saving = threading.Thread(target=keeper.save)
      saving.start()
      saving.join(0.2)
      assert saving.is_alive() and checkpoints.steps() == []
      keeper.hold(Standing(state(2), {}, 0, {}))
      saving.join(20)
  assert checkpoints_of(tmp_path) == [2]


def test_a_failure_in_the_middle_of_an_update_saves_nothing_and_is_what_is_raised(tmp_path):
  from grpo_jax.keeper import Keeper, Standing
  from grpo_jax.types import TrainState

  state = TrainState(jax.numpy.asarray(3, jax.numpy.int32), {"w": np.ones(2)}, {})
  with checkpointing.open(tmp_path / "checkpoints") as checkpoints:
    with pytest.raises(MemoryError), Keeper(checkpoints, Standing(state, {}, 0, {})) as keeper:
      keeper.consume()
      raise MemoryError
    assert checkpoints.steps() == []
