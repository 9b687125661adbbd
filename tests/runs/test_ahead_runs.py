"""Whole runs that sample ahead of learning: what repeats, what continues, what is learned from."""

import collections
import json
import threading
import time

import jax
import numpy as np
import pytest

import configs.base
from grpo_jax import metrics, train
from grpo_jax.config import configuration
from grpo_jax.engines import continuous_batching, jax_sampler
from grpo_jax.engines.base import Generation
from grpo_jax.models import loading, tiny
from grpo_jax.types import FinishReason
from tests import dataloaders, rewards
from tests.engines import tiny as tiny_engine
from tests.engines import updates

pytestmark = pytest.mark.usefixtures("one_device")

ROWS = 23
PROMPTS, GROUP = 3, 4
IN_FLIGHT = {"rollout.max_staleness": 2}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  """The settings of a run of four steps on a tiny model, one step ahead."""
  folder = tmp_path_factory.mktemp("input")
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(ROWS)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  held_out = [{"problem": f"{i} - {i}", "expected_answer": "0"} for i in range(4)]
  (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
  return {
    "total_steps": 4,
    "model.path": str(tiny.write(folder / "model")),
    "model.compute_dtype": "float32",
    "data.path": str(folder / "rows.jsonl"),
    "evaluation.data.path": str(folder / "held_out.jsonl"),
    "data.environment": "own",
    "rollout.prompts_per_step": PROMPTS,
    "rollout.group_size": GROUP,
    "rollout.max_tokens": 96,
    "rollout.max_staleness": 1,
    "sampling.max_tokens": 8,
    "engine.max_rows": 8,
    "batching.row_tokens": 128,
    "batching.microbatch_tokens": 128,  # one shape, which is compiled once.
    "loss.kl_coef": 0.0,
    "loss.importance_correction": "token",
    "optim.learning_rate": 1e-2,
    "evaluation.every_steps": 2,
    "evaluation.num_prompts": 4,
    "evaluation.at_start": False,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": None,
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
    "logging.sinks": ("jsonl",),
  }


def start(settings, folder, *, stop=False, reward="variety", **changes):
  config = configs.base.get_config()
  config.environments = {"own": {"module": "function", "path": f"tests.rewards.{reward}"}}
  config.update_from_flattened_dict({**settings, **dotted(changes)})
  train.train(config, folder, stop=stop)
  return folder


def dotted(changes):
  return {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture
def run(settings, tmp_path):
  """Runs in a folder of this name, or continues it; returns the folder."""
  return lambda name="run", **changes: start(settings, tmp_path / name, **changes)


@pytest.fixture(scope="module")
def first(settings, one_device, tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  return start(settings, tmp_path_factory.mktemp("first") / "run")


class StopWhen:
  """A flag that becomes true when a run has learned some steps, and was asked some more times."""

  def __init__(self, workdir, steps, looks=0):
    self._file, self._steps, self._looks = workdir / "metrics.jsonl", steps, looks

  def __bool__(self):
    lines = self._file.read_text().splitlines() if self._file.exists() else []
    if sum("weight_version" in line for line in lines) < self._steps:
      return False
    self._looks -= 1
    return self._looks < 0


def reported(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [metrics.reproducible(json.loads(line)) for line in lines]


def weights(workdir):
  return jax.tree.leaves(loading.load(workdir / "export").params)


def assert_same_end(workdir, expected):
  assert reported(workdir) == reported(expected)
  for mine, theirs in zip(weights(workdir), weights(expected), strict=True):
    np.testing.assert_array_equal(mine, theirs)


def records(workdir):
  files = sorted((workdir / "rollouts").glob("step_*.jsonl"))
  return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def learned_from(workdir):
  """Returns the prompts of each step, from the files of rollouts."""
  found = {}
  for record in records(workdir):
    found.setdefault(record["step"], collections.Counter())[record["prompt_id"]] += 1
  assert all({*counts.values()} <= {GROUP} for counts in found.values())
  return [[*counts] for counts in found.values()]


def assert_each_once(workdir, count=ROWS, steps=None):
  """Checks that the steps have learned from `count` prompts of the first epoch, each once."""
  flat = [name for names in learned_from(workdir) for name in names]
  assert len(flat) == len({*flat}) == count
  assert {name.split(":")[1] for name in flat} == {"0"}
  assert steps is None or len(learned_from(workdir)) == steps


def position(workdir, step):
  info = json.loads((workdir / "checkpoints" / f"step_{step:08d}" / "info.json").read_text())
  return info["extra"]["stream"]


def staleness(workdir):
  return [
    line["rollout/staleness_max"] for line in reported(workdir) if "rollout/staleness_max" in line
  ]


# --- one block after the other: everything repeats ---


@pytest.mark.long
def test_a_run_one_step_ahead_repeats_bit_for_bit_where_it_is_stopped(first, run, tmp_path):
  assert staleness(first) == [0, 1, 1, 1]
  assert_each_once(first, 4 * PROMPTS)
  stored = position(first, 2)
  assert len(stored["ahead"]["ready"]) == PROMPTS  # of the step after it.
  assert position(first, 4)["ahead"]["waiting"] == []  # nothing is sampled for later steps.
  stopped = run("stopped", stop=StopWhen(tmp_path / "stopped", 2, 2))
  assert len([line for line in reported(stopped) if "weight_version" in line]) in (2, 3)
  assert_same_end(run("stopped"), first)


@pytest.mark.long
def test_a_stop_while_groups_under_way_are_waited_for_repeats_the_step(
  first, run, tmp_path, monkeypatch
):
  """The gradients are known, the weights are the old ones: what is saved is exact."""
  asked = []
  variety = rewards.variety

  def slow(prompt, completion, info):
    calls.append(1)
    if len(calls) == 2 * PROMPTS * GROUP + 1:  # of the third block, while step 1 is learned.
      asked.append(1)
      time.sleep(1.0)
    return variety(prompt, completion, info)

  calls = []
  with monkeypatch.context() as patch:
    patch.setattr(rewards, "variety", slow)
    run("stopped", stop=asked)
  assert [line["step"] for line in reported(tmp_path / "stopped")] == [0]
  assert_same_end(run("stopped"), first)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"learn__epochs": 2, "learn__minibatches": 2},
    {"advantages__estimator": "remax"},
    {"model__lora__rank": 4},
    {"model__lora__rank": 4, "model__lora__base_dtype": "int8"},
    {"total_steps": 50, "data__epochs": 1, "evaluation__every_steps": 0},
    {
      "reward": "vowels_of_some",
      "dynamic_sampling__enabled": True,
      "dynamic_sampling__prompts_per_round": 2,
    },
  ],
  ids=[
    "plain",
    "several_updates",
    "greedy",
    "lora",
    "int8",
    "end_of_data",
    "dynamic",
  ],
)
def test_every_kind_of_run_repeats_bit_for_bit_wherever_it_is_stopped(changes, run, tmp_path):
  first = run("first", **changes)
  assert max(staleness(first)) == 1
  for looks in (0, 3) if changes else (0, 1, 4):
    name = f"stopped-{looks}"
    run(name, stop=StopWhen(tmp_path / name, 2, looks), **changes)
    assert_same_end(run(name, **changes), first)
  if "data__epochs" in changes:
    assert_each_once(first, steps=-(-ROWS // PROMPTS))


# --- other options when it continues ---


@pytest.mark.long
def test_a_run_continues_with_other_bounds_and_loses_no_prompt(run, tmp_path):
  """Farther ahead, then synchronously, then ahead with more prompts a step, to the end of data."""
  usual = {"data__epochs": 1, "evaluation__every_steps": 0, "evaluation__at_end": False}
  run(rollout__max_staleness=2, total_steps=2, **usual)
  run(rollout__max_staleness=1, total_steps=3, **usual)
  run(rollout__max_staleness=0, total_steps=4, **usual)
  run(rollout__max_staleness=2, total_steps=5, **usual)
  end = run(rollout__max_staleness=1, total_steps=50, rollout__prompts_per_step=5, **usual)
  assert_each_once(end, steps=5 + 2)
  assert [len(each) for each in learned_from(end)] == [3] * 5 + [5, 3]
  assert max(staleness(end)) <= 2


@pytest.mark.long
def test_prompts_that_others_have_overtaken_are_not_lost_by_a_synchronous_run(run):
  run(total_steps=2, **named(IN_FLIGHT), sampling__max_tokens=2)
  folder = run(total_steps=3, **named(IN_FLIGHT), sampling__max_tokens=2)
  info = folder / "checkpoints" / "step_00000003" / "info.json"
  stored = json.loads(info.read_text())
  waiting = stored["extra"]["stream"]["ahead"]["waiting"]
  blocks = stored["extra"]["stream"]["ahead"]["blocks"]
  assert sum(block["count"] for block in blocks) == len(waiting)  # every block is whole, or:
  with pytest.raises(configuration.ConfigError, match="later ones of the same block have overtak"):
    split(folder, stored)
    run(total_steps=4, rollout__max_staleness=0)


def split(folder, stored):
  """Changes the checkpoint as if a step had taken a part of a block."""
  from grpo_jax.files import manifest

  ahead = stored["extra"]["stream"]["ahead"]
  if not ahead["blocks"]:
    start = stored["extra"]["stream"]["prompts"]
    block = {"first": 9, "count": 3, "index": 3, "state": start, "metrics": {}}
    ahead["blocks"], ahead["waiting"] = [block], [[9, 3], [10, 3]]
  else:
    ahead["waiting"] = ahead["waiting"][1:]
  checkpoint = folder / "checkpoints" / "step_00000003"
  (checkpoint / "info.json").write_text(json.dumps(stored))
  manifest.write(checkpoint)


def named(settings):
  return {key.replace(".", "__"): value for key, value in settings.items()}


# --- in flight, whoever finishes first ---


@pytest.mark.long
def test_every_prompt_of_the_data_is_learned_from_once_in_whatever_order(run, tmp_path):
  options = named({**IN_FLIGHT, "data.epochs": 1, "total_steps": 50})
  run(stop=StopWhen(tmp_path / "run", 2), **options)
  run(stop=StopWhen(tmp_path / "run", 4, 2), **options)
  end = run(**options)
  assert_each_once(end, steps=-(-ROWS // PROMPTS))
  assert max(staleness(end)) <= 2


@pytest.mark.slow
def test_the_records_of_rollouts_have_the_version_that_sampled_each_token(run, monkeypatch):
  """240 completions, some of several versions, against the trainer's scores by those weights."""
  trees, load = {}, jax_sampler.JaxSampler.load_weights

  def kept(self, params, *, version):
    trees[version] = jax.tree.map(np.array, params)
    return load(self, params, version=version)

  advance = continuous_batching.ContinuousBatcher.advance

  def slowly(*arguments):
    time.sleep(0.03)  # so that weights come while completions are under way.
    return advance(*arguments)

  monkeypatch.setattr(continuous_batching.ContinuousBatcher, "advance", slowly)
  monkeypatch.setattr(jax_sampler.JaxSampler, "load_weights", kept)
  changes = {"total_steps": 20, "data.epochs": 3, "learn.report_all_every_steps": 1}
  lengths = {"rollout.max_tokens": 128, "sampling.max_tokens": 64, "evaluation.every_steps": 0}
  folder = run(**named({**IN_FLIGHT, **changes, **lengths}))
  requests, found, steps = [], {}, collections.defaultdict(list)
  for record in records(folder):
    name = f"{record['step']}.{record['group']}.{record['rollout']}"
    requests.append(tiny_engine.request(name, record["prompt_ids"]))
    found[name] = Generation(
      name,
      np.asarray(record["completion_ids"]),
      np.asarray(record["behavior_logprobs"]),
      np.asarray(record["weight_versions"]),
      FinishReason(record["finish_reason"]),
    )
    steps[record["step"]].append(name)
  assert len(found) == 20 * PROMPTS * GROUP
  mixed = [name for name, x in found.items() if len({*x.weight_versions.tolist()}) > 1]
  assert len(mixed) > 20
  model_config = loading.load(folder / "export").config
  in_order = [trees[version] for version in sorted(trees)]
  wanted = updates.trainer_logprobs(model_config, in_order, requests, found)
  assert updates.mismatch(found, wanted) < 1e-4
  lines = [line for line in reported(folder) if "rollout/staleness_max" in line]
  for line, step in zip(lines, sorted(steps), strict=True):
    ages = np.concatenate([step - found[name].weight_versions for name in steps[step]])
    off = np.concatenate([wanted[name][step] - found[name].logprobs for name in steps[step]])
    assert line["rollout/staleness_max"] == ages.max() <= 2 and ages.min() >= 0
    np.testing.assert_allclose(line["rollout/staleness_mean"], ages.mean(), rtol=1e-6)
    share = np.mean([name in mixed for name in steps[step]])
    np.testing.assert_allclose(line["rollout/mixed_versions_share"], share, rtol=1e-6)
    np.testing.assert_allclose(line["all/abs_logprob_mean"], np.abs(off).mean(), atol=2e-5)


# --- curricula ---


@pytest.mark.long
def test_a_curriculum_has_seen_the_steps_before_that_at_which_it_is_asked(run):
  dataloaders.asked_at.clear()
  path = "tests.dataloaders.recording"
  run(data__dataloader=path, rollout__max_staleness=2, total_steps=5)
  # Blocks 0, 1 and 2 are read before step 0, block s + 2 when step s begins.
  assert dataloaders.asked_at[-5:] == [None, None, None, 0, 1]


# --- failures ---


@pytest.mark.long
def test_an_engine_that_fails_in_the_background_ends_the_run_and_loses_no_step(
  first, run, monkeypatch
):
  generate = jax_sampler.JaxSampler.generate
  calls = []

  def failing(self, requests, **options):
    calls.append(len(requests))
    if len(calls) == 3:  # the third block, while the second step is learned.
      raise FloatingPointError("the logits are not finite")
    return generate(self, requests, **options)

  with monkeypatch.context() as patch:
    patch.setattr(jax_sampler.JaxSampler, "generate", failing)
    with pytest.raises(FloatingPointError, match="the logits are not finite"):
      run("failed")
  assert not [each.name for each in threading.enumerate() if each.name == "rollout"]
  failed = run("failed")
  assert_same_end(failed, first)


@pytest.mark.long
def test_a_trainer_that_fails_while_groups_are_in_flight_leaves_no_thread(run, monkeypatch):
  from grpo_jax.run_folder import steps

  def fail(self, record):
    raise MemoryError("the trainer is out of memory")

  monkeypatch.setattr(steps.StepRecorder, "record", fail)
  with pytest.raises(MemoryError, match="the trainer is out of memory"):
    run(**named(IN_FLIGHT))
  assert not [each.name for each in threading.enumerate() if each.name == "rollout"]
