"""The work, the threads and the open environments of an attempt do not grow with their number."""

import asyncio
import itertools
import sys
import threading

import numpy as np
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.environments.base import SingleTurn, StepResult
from grpo_jax.rollouts import rollout
from grpo_jax.rollouts.background_attempts import BackgroundAttempts
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.rollout import AttemptLimits, Finished, collect_sync
from grpo_jax.types import Prompt, RolloutGroup

FEW, MANY = 20, 240


class AtOnce(ScriptedEngine):
  """Yields all generations without a pause, as a server whose batch ends."""

  async def generate(self, requests, *, on_progress=None):
    for request in requests:
      yield self._generation(request)


def prompts(count):
  return [
    Prompt(f"set:0:{i}", TOKENIZER.encode(f"q{i}"), "env", text=f"q{i}") for i in range(count)
  ]


def collected(count, factory, **options):
  return collect_sync(
    AtOnce(lambda request: "x"),
    {"env": factory},
    prompts(count),
    TOKENIZER,
    group_size=1,
    sampling=SamplingParams(max_tokens=16, stop_ids=(END,)),
    seed=3,
    step=5,
    **options,
  )


def calls_of(work):
  """Returns how many Python functions work calls, in all threads; resumed generators count."""
  counted = itertools.count()

  def count(frame, event, arg):
    if event == "call":
      next(counted)

  before = sys.getprofile()
  threading.setprofile(count)
  sys.setprofile(count)
  try:
    work()
  finally:
    sys.setprofile(before)
    threading.setprofile(None)
  return next(counted)


@pytest.mark.long
def test_the_work_of_an_attempt_is_the_same_with_twelve_times_as_many():
  factory = lambda prompt: SingleTurn(lambda *_: 1.0, prompt)
  collected(2, factory)  # imports.
  few, many = (calls_of(lambda count=count: collected(count, factory)) for count in (FEW, MANY))
  assert many < 1.05 * few * MANY / FEW


def test_the_work_of_a_group_in_the_background_is_the_same_with_twelve_times_as_many():
  def received(count):
    may_end: list[asyncio.Event] = []

    async def groups(asked):
      may_end.append(asyncio.Event())
      await may_end[-1].wait()
      yield Finished(0, RolloutGroup(asked[0].prompt, ()))

    async def end_one():
      may_end.pop().set()

    with LoopThread() as loop:
      background = BackgroundAttempts(loop, groups, in_turn=False)
      background.submit(range(count), rollout.for_step(prompts(count), 0))
      for _ in range(count):
        loop.run(end_one())
        background.wait()
        assert len(background.arrived()) == 1
      background.close()

  received(2)
  few, many = (calls_of(lambda count=count: received(count)) for count in (FEW, MANY))
  assert many < 1.05 * few * MANY / FEW


@pytest.mark.parametrize("schedule", rollout.SCHEDULES)
def test_no_more_environments_are_open_than_may_be_called_at_a_time(schedule):
  is_open, most = set(), []

  class Slow:
    def __init__(self, prompt):
      pass

    async def start(self):
      is_open.add(self)
      most.append(len(is_open))

    async def step(self, text, completion_ids, finish_reason):
      await asyncio.sleep(0.001)
      return StepResult(1.0, done=True)

    async def close(self):
      is_open.discard(self)

  before = threading.active_count()
  limits = AttemptLimits(environment_concurrency=4)
  groups = collected(60, Slow, schedule=schedule, limits=limits)
  assert np.mean([group.rewards for group in groups]) == 1.0
  assert max(most) <= 4 and threading.active_count() <= before + 4
