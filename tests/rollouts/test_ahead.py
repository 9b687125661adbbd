"""Sampling ahead with an engine whose clock is simulated: throughput, idle shares, positions."""

import contextlib
import dataclasses
import functools
import json
import random
from typing import Any

import numpy as np
import pytest

from grpo_jax.rollouts import stream
from grpo_jax.rollouts.admission import AdmissionRule
from grpo_jax.rollouts.ahead import AheadSource, is_split, oldest_version
from grpo_jax.types import Prompt, RolloutGroup
from tests.rollouts.clocked import Clocked, rollout

P, G, ROWS = 8, 4, 8


class Numbers:
  """Prompts that are numbered; `records` has what it was told, at which position."""

  def __init__(self, count=10**9, position=0):
    self.count, self.position, self.records = count, position, []

  def take(self, n):
    numbers = range(self.position, min(self.position + n, self.count))
    self.position += len(numbers)
    return [Prompt(str(i), np.array([i]), "none", text=str(i)) for i in numbers]

  def state(self):
    return {"position": self.position}

  def metrics(self):
    return {"data/epoch": self.position / 100}

  def record_metrics(self, step, metrics):
    self.records.append((step, self.position))


@contextlib.contextmanager
def silent(description, total):
  yield lambda count=1: None


def made(
  engine: Clocked,
  *,
  k=1,
  state=(),
  total_steps=10**6,
  count=10**9,
  dynamic=None,
  keep=None,
  block=P,
):
  state = dict(state)
  known = state.get("ahead", {})
  at = lambda position: Numbers(count, position.get("prompts", {}).get("position", 0))
  prompts = at({"prompts": known["next"]} if known else state)
  source = AheadSource(
    prompts,
    engine,
    AdmissionRule(max_staleness=k, groups_per_step=P),
    block=block,
    max_error_share=1.0,
    total_steps=total_steps,
    reopen=at,
    progress=silent,
    state=state,
  )
  options = {} if keep is None else {"keep": keep}
  return stream.OnlineStream(
    source, prompts_per_step=P, dynamic=dynamic, surplus=state.get("surplus", ()), **options
  )


def source_of(made: stream.OnlineStream) -> Numbers:
  """Returns the prompts that a stream reads."""
  source: Any = made._source
  return source._prompts


def train(engine, made, *, steps, learn, sync=0.0, first=0):
  """Runs a loop; returns the time, the numbers and the metrics of each step."""
  found = []
  for step in range(first, first + steps):
    groups = made.take(step)
    engine.work_for(learn)
    made.settle()
    engine.work_for(sync)
    engine.version = step + 1
    made.record_metrics(step, {})
    found.append((engine.now(), groups, made.metrics()))
  return found


def lengths(name, seed=0):
  """Returns the lengths of completions by the number of their prompt."""
  draw = {
    "equal": lambda r: np.full(G, 100),
    "uniform": lambda r: r.integers(1, 200, G),
    "exponential": lambda r: 1 + r.exponential(100, G),
    "lognormal": lambda r: 1 + r.lognormal(4, 0.9, G),
    "heavy": lambda r: 1 + np.minimum(30 * r.pareto(1.2, G), 1500),
    "two kinds": lambda r: np.where(r.random(G) < 0.1, 900, 40),
    "alike in groups": lambda r: np.full(G, 1 + r.exponential(100)),
    "mostly cut": lambda r: np.where(r.random(G) < 0.8, 256, r.integers(1, 256, G)),
    "short": lambda r: r.integers(1, 4, G),
    "one straggler": lambda r: np.where(r.random(G) < 0.01, 700, 50),
  }[name]

  @functools.cache
  def of(number):
    return np.maximum(draw(np.random.default_rng([seed, number])), 1).astype(int).tolist()

  return of


MIXTURES = (
  "equal",
  "uniform",
  "exponential",
  "lognormal",
  "heavy",
  "two kinds",
  "alike in groups",
  "mostly cut",
  "short",
  "one straggler",
)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_step_takes_as_long_as_the_slower_of_sampling_and_learning(name, ratio):
  steps, lengths_of = 60, lengths(name)
  sample = sum(sum(lengths_of(number)) for number in range(steps * P)) / ROWS  # no row is empty.
  engine = Clocked(ROWS, lengths_of)
  ahead = made(engine, k=8, total_steps=steps)
  train(engine, ahead, steps=steps, learn=ratio * sample / steps)
  assert engine.now() == pytest.approx(max(1, ratio) * sample, rel=0.05)


@pytest.mark.parametrize(
  ("learn", "sync", "took", "shares"),
  [
    # A step samples for G * P / ROWS * 100 = 400 while the trainer learns, and then waits for it.
    (300, 0, 400, {"trainer_idle": 0.25, "engine_idle": 0, "overlap": 0.75}),
    (500, 100, 600, {"trainer_idle": 0, "engine_idle": 1 / 3, "overlap": 2 / 3}),
  ],
)
def test_shares_of_the_time_are_as_predicted(learn, sync, took, shares):
  engine = Clocked(ROWS, lambda number: [100] * G)
  found = train(engine, made(engine), steps=6, learn=learn, sync=sync)
  assert found[-1][0] - found[-2][0] == took
  measured = found[-1][2]
  assert {name: measured[f"perf/{name}_share"] for name in shares} == pytest.approx(shares)


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 3])
def test_a_run_that_is_broken_anywhere_learns_from_every_prompt_once(k):
  for seed in range(6):
    count, state, learned, step = 150, {}, [], 0
    draw = random.Random(seed)
    while step < 40:
      engine = Clocked(ROWS, lengths("lognormal", seed))
      engine.version = step
      stream_ = made(engine, k=k, count=count, state=state)
      for _ in range(draw.randint(1, 4)):
        groups = stream_.take(step)
        if draw.random() < 0.2:
          break  # killed before the step is learned: the state is the one before it.
        ages = [step - oldest_version(group) for group in groups]
        assert all(0 <= age <= k for age in ages)
        engine.work_for(draw.choice([10, 300, 3000]))
        stream_.settle()
        engine.version = step = step + 1
        learned += [group.prompt.prompt_id for group in groups]
        state = json.loads(json.dumps(stream_.state()))
    assert sorted(map(int, learned)) == list(range(count))
    assert k > 1 or learned == [str(n) for n in range(count)]
    assert not is_split(state)


def test_one_block_after_the_other_is_the_same_however_long_learning_takes():
  def learned(learn):
    engine = Clocked(ROWS, lengths("heavy"))
    found = train(engine, made(engine), steps=8, learn=learn)
    return [[g.prompt.text for g in groups] for _, groups, _ in found], [
      [g.rollouts[0].weight_versions.tolist() for g in groups] for _, groups, _ in found
    ]

  assert learned(0) == learned(10**6)


def test_a_curriculum_has_seen_the_steps_before_the_one_that_reads():
  engine = Clocked(ROWS, lambda number: [10] * G)
  stream_ = made(engine, k=2)
  prompts = source_of(stream_)
  train(engine, stream_, steps=3, learn=5)
  # Blocks 0, 1, 2 are read before step 0; each later one right after another step was recorded.
  assert prompts.records == [(0, 3 * P), (1, 4 * P), (2, 5 * P)]


def test_nothing_is_sampled_for_steps_after_the_last():
  engine = Clocked(ROWS, lambda number: [10] * G)
  stream_ = made(engine, k=3, total_steps=5)
  train(engine, stream_, steps=5, learn=5)
  assert source_of(stream_).position == 5 * P and not engine.in_flight


@pytest.mark.parametrize(
  ("versions", "mask", "greedy", "oldest"),
  [
    ([6, 4, 7], [1, 1, 1], None, 4),
    ([6, 4, 7], [1, 0, 1], None, 6),  # 4 is not learned from.
    ([-1, 5], [1, 1], None, 5),  # the version of the first token is not known.
    ([-1, -1], [1, 1], None, -1),
    ([6, 7], [1, 1], (3, 7), 3),
  ],
)
def test_a_group_is_as_old_as_its_oldest_token_that_is_learned_from(versions, mask, greedy, oldest):
  attempt = dataclasses.replace(
    rollout(9, 9),
    completion_ids=np.arange(len(versions)),
    loss_mask=np.array(mask, bool),
    behavior_logprobs=np.full(len(versions), -1.0, np.float32),
    weight_versions=np.array(versions, np.int32),
  )
  prompt = Prompt("p", np.array([1]), "none")
  group = RolloutGroup(prompt, (attempt,), greedy=rollout(*greedy) if greedy else None)
  assert oldest_version(group) == oldest
