"""Attempts by agents become rollouts: every learned token was sampled, everything else was not."""

import asyncio
import dataclasses
import math
import time

import numpy as np
import pytest
from made_agents import (
  SAMPLING,
  TOOL,
  Agents,
  bigrams,
  call_text,
  client_of,
  collected,
  prompts,
  said,
  solved,
  user,
)
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax import environments
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.environments.base import Endpoint, StepResult
from grpo_jax.environments.isolation import IsolatedEnvironment
from grpo_jax.rollouts.failures import TooManyFailures, error_counts
from grpo_jax.rollouts.rollout import AttemptLimits
from grpo_jax.types import FinishReason


class Recording(FakeEngine):
  """Remembers what it sampled, by the tokens before it."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.sampled = {}

  def _complete(self, request):
    generation = super()._complete(request)
    self.sampled.setdefault(request.prompt_ids.tobytes(), []).append(generation)
    return generation


def check_learned(engine, group, rollout):
  """Every stretch of learned tokens is one that was sampled after exactly the tokens before it."""
  ids = np.concatenate([group.prompt.token_ids, rollout.completion_ids]).astype(np.int32)
  start = len(group.prompt.token_ids)
  mask = rollout.loss_mask
  learned = 0
  place = 0
  while place < len(mask):
    if not mask[place]:
      place += 1
      continue
    candidates = engine.sampled[ids[: start + place].tobytes()]
    fits = [
      g
      for g in candidates
      if np.array_equal(g.token_ids, rollout.completion_ids[place : place + len(g.token_ids)])
      and np.array_equal(g.logprobs, rollout.behavior_logprobs[place : place + len(g.token_ids)])
    ]
    assert fits
    end = place + len(fits[0].token_ids)
    assert mask[place:end].all()
    assert (rollout.weight_versions[place:end] == fits[0].weight_versions).all()
    learned += end - place
    place = end
  assert (rollout.behavior_logprobs[~mask] == 0).all()
  assert (rollout.weight_versions[~mask] == -1).all()
  return learned


# --- equality with an ordinary environment ---


class Asks:
  """An ordinary environment of two turns."""

  def __init__(self, prompt):
    self.turn = 0

  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    self.turn += 1
    if self.turn == 2:
      return StepResult(float(len(text)), done=True)
    return StepResult(0.0, done=False, observation="more", observation_role="user")

  async def close(self):
    pass


async def asks(post, prompt):
  """The same as an agent."""
  messages = [*prompt.messages]
  _, first = await post("chat/completions", messages=messages)
  messages += [said(first), user("more")]
  _, second = await post("chat/completions", messages=messages)
  return solved(float(len(said(second)["content"])))


def test_an_agent_has_the_tokens_of_the_same_conversation_with_an_environment():
  found = [
    collected(FakeEngine(bigrams()), environment, prompts("a", "b"), group_size=3)
    for environment in (Asks, Agents(asks))
  ]
  fields = ("completion_ids", "loss_mask", "behavior_logprobs", "weight_versions")
  for one, other in zip(*found, strict=True):
    np.testing.assert_array_equal(one.prompt.token_ids, other.prompt.token_ids)
    for mine, its in zip(one.rollouts, other.rollouts, strict=True):
      for field in fields:
        np.testing.assert_array_equal(getattr(mine, field), getattr(its, field))
      assert mine.reward == its.reward and mine.text == its.text
      assert mine.finish_reason is its.finish_reason is FinishReason.ENV_DONE
      assert mine.turns == its.turns == 2
      sizes = [(turn.sampled_tokens, turn.environment_tokens) for turn in mine.turn_log]
      assert [(t.sampled_tokens, t.environment_tokens) for t in its.turn_log] == sizes
      assert math.isnan(its.turn_log[0].reward) and its.turn_log[1].reward == its.reward


@pytest.mark.parametrize("schedule", ["rounds", "free"])
def test_agents_and_ordinary_environments_share_a_step(schedule):
  ordinary, own = prompts("a", "b")
  tasks = [dataclasses.replace(ordinary, environment="ordinary"), own]
  factories = {"ordinary": Asks, "env": Agents(asks)}
  engine = Recording(bigrams())
  groups = collected(engine, factories, tasks, group_size=2, schedule=schedule)
  assert [group.prompt.environment for group in groups] == ["ordinary", "env"]
  for group in groups:
    for rollout in group.rollouts:
      assert check_learned(engine, group, rollout) == rollout.loss_mask.sum() > 0


# --- 256 conversations ---


async def wanders(post, prompt):
  """Three turns with a tool; some begin again, some ask on the side, some drop a turn."""
  number = int(prompt.messages[0]["content"])
  messages = [user(f"question {number}")]
  for turn in range(3):
    _, answer = await post("chat/completions", messages=messages, temperature=1.0)
    if number % 5 == 1 and turn == 1:
      messages = messages[:1]  # forgets.
    elif number % 5 == 2:
      aside = [post("chat/completions", messages=[user(f"aside {i}")]) for i in range(3)]
      await asyncio.gather(*aside)
    if number % 5 == 3:
      await asyncio.sleep(0.001 * (number % 7))
    messages = [*messages, said(answer), user(f"more {turn}")]
  _, last = await post("chat/completions", messages=messages)
  return solved(float(number), asked=4.0)


MANY = pytest.param("rounds", 32, marks=pytest.mark.slow)  # 256 conversations at a time.


@pytest.mark.parametrize(("schedule", "prompts_of_step"), [MANY, ("rounds", 4), ("free", 4)])
def test_no_token_is_learned_that_was_not_sampled(schedule, prompts_of_step):
  engine, size = Recording(bigrams()), 8 if prompts_of_step == 32 else 3
  tasks = prompts(*map(str, range(prompts_of_step)))
  sampling = dataclasses.replace(SAMPLING, max_tokens=12)
  groups = collected(
    engine, Agents(wanders), tasks, group_size=size, sampling=sampling, schedule=schedule
  )
  learned = sum(check_learned(engine, g, r) for g in groups for r in g.rollouts)
  left_out = sum(r.metrics["endpoint_tokens_left_out"] for g in groups for r in g.rollouts)
  sampled = sum(len(g.token_ids) for each in engine.sampled.values() for g in each)
  assert learned + left_out == sampled and 0 < left_out < learned
  for group in groups:
    number = int(group.prompt.prompt_id.rpartition(":")[2])
    assert not [r.error for r in group.rollouts if r.error]
    assert group.rewards.tolist() == [float(number)] * size
    asides = 9 if number % 5 == 2 else 0
    assert {r.metrics["endpoint_requests"] for r in group.rollouts} == {4.0 + asides}


def test_a_step_repeats_itself():
  def step():
    return collected(
      FakeEngine(bigrams()), Agents(wanders), prompts(*map(str, range(4))), group_size=1
    )

  for one, other in zip(step(), step(), strict=True):
    for mine, its in zip(one.rollouts, other.rollouts, strict=True):
      np.testing.assert_array_equal(mine.completion_ids, its.completion_ids)
      np.testing.assert_array_equal(mine.behavior_logprobs, its.behavior_logprobs)


# --- prompts ---


def with_system(*names):
  """Attempts whose conversations begin with system messages of their own, in this order."""
  left = iter(names)

  async def talk(post, prompt):
    system = {"role": "system", "content": next(left)}
    await post("chat/completions", messages=[system, *prompt.messages])
    return solved()

  return Agents(talk)


def test_the_prompt_of_a_group_is_what_all_attempts_begin_with():
  engine = Recording(bigrams())
  (group,) = collected(engine, with_system("abc", "abd", "a"), prompts("x"), group_size=3)
  assert TOKENIZER.decode(group.prompt.token_ids, skip_special=False) == "<role>system\na"
  assert group.prompt.text == "<role>system\na"
  for rollout in group.rollouts:
    assert check_learned(engine, group, rollout) == rollout.loss_mask.sum() > 0
    assert not rollout.loss_mask[0] and rollout.turns == len(rollout.turn_log) == 1
    ids = np.concatenate([group.prompt.token_ids, rollout.completion_ids])
    whole = TOKENIZER.decode(ids, skip_special=False)
    assert whole.startswith("<role>system\na") and "<role>user\nx<end><role>assistant\n" in whole


def test_an_attempt_that_shares_no_token_with_its_group_fails():
  async def talk(post, prompt):
    await post("completions", prompt=next(left))
    return solved()

  left = iter(["xa", "xb", "y"])
  (group,) = collected(Recording(bigrams()), Agents(talk), prompts("x"), group_size=3)
  assert TOKENIZER.decode(group.prompt.token_ids) == "x"
  assert sorted(r.failure for r in group.rollouts) == ["", "", "other_prompt"]


# --- ends ---


def failing(talk, *, engine=None, limits=None, **fields):
  """Returns the one rollout of an agent."""
  engine = engine or FakeEngine(bigrams())
  limits = limits or AttemptLimits(max_error_share=1.0)
  (group,) = collected(engine, Agents(talk, **fields), prompts("x"), limits=limits)
  return group.rollouts[0]


def test_an_agent_that_raises_costs_its_attempt_and_its_tokens_are_shown():
  async def talk(post, prompt):
    await post("chat/completions", messages=[user("a")])
    raise KeyError("key")

  rollout = failing(talk)
  assert rollout.failure == "KeyError" and math.isnan(rollout.reward)
  assert rollout.loss_mask.any() and math.isnan(rollout.turn_log[0].reward)


def test_an_agent_without_a_completion_fails():
  async def talk(post, prompt):
    return solved()

  rollout = failing(talk)
  assert rollout.failure == "no_completion" and len(rollout.completion_ids) == 0


def test_an_agent_that_takes_too_long_is_cancelled_and_closed():
  events = []

  class Slow:
    def __init__(self, prompt):
      pass

    async def start(self):
      pass

    async def run(self, endpoint):
      async with client_of(endpoint) as post:
        await post("chat/completions", messages=[user("a")])
        try:
          await asyncio.sleep(60)
        finally:
          events.append("cancelled")

    async def close(self):
      events.append("closed")

  begun = time.monotonic()
  limits = AttemptLimits(max_error_share=1.0, agent_timeout_s=0.2)
  (group,) = collected(FakeEngine(bigrams()), Slow, prompts("x"), limits=limits)
  assert group.rollouts[0].failure == "timeout" and events == ["cancelled", "closed"]
  assert time.monotonic() - begun < 10
  limits = AttemptLimits(max_error_share=0.5, agent_timeout_s=0.2)
  with pytest.raises(TooManyFailures, match="no answer within"):
    collected(FakeEngine(bigrams()), Slow, prompts("x"), limits=limits)


def test_a_timeout_of_the_factory_is_that_of_its_agents():
  async def talk(post, prompt):
    await asyncio.sleep(60)

  assert failing(talk, timeout_s=0.1).failure == "timeout"


def test_wrong_results_are_failures():
  async def nothing(post, prompt):
    await post("chat/completions", messages=[user("a")])

  async def nan(post, prompt):
    await post("chat/completions", messages=[user("a")])
    return solved(math.nan)

  assert failing(nothing).failure == "type"
  assert failing(nan).failure == "nan"


LONG = AttemptLimits(max_tokens=120, max_error_share=0.0)


def too_long(is_raised):
  async def talk(post, prompt):
    messages = [user("a")]
    for _ in range(9):
      status, answer = await post("chat/completions", messages=messages)
      if status == 400:
        assert answer["error"]["code"] == "context_length_exceeded"
        if is_raised:
          raise RuntimeError(answer["error"]["message"])
        return solved(0.5)
      messages += [said(answer), user("m" * 20)]

  return talk


@pytest.mark.parametrize(("is_raised", "reward"), [(False, 0.5), (True, 0.0)])
def test_a_conversation_that_is_too_long_ends_as_truncated(is_raised, reward):
  engine = ScriptedEngine(lambda request: "word")
  rollout = failing(too_long(is_raised), engine=engine, limits=LONG)
  assert rollout.is_truncated and rollout.reward == reward and rollout.turns > 1
  whole = len(prompts("x")[0].token_ids) + len(rollout.completion_ids)
  assert whole <= 120


def test_a_completion_that_is_cut_ends_as_truncated():
  async def talk(post, prompt):
    _, answer = await post("chat/completions", messages=[user("a")], max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    return solved()

  assert failing(talk, engine=ScriptedEngine(lambda r: "word")).is_truncated


@pytest.mark.parametrize("schedule", ["rounds", "free"])
def test_an_engine_that_fails_ends_the_step_with_its_error(schedule):
  class Broken(FakeEngine):
    def _complete(self, request):
      raise FloatingPointError("the logits are not finite")

  async def talk(post, prompt):
    for _ in range(3):  # as clients retry.
      await post("chat/completions", messages=[user("a")])
    return solved()

  with pytest.raises(FloatingPointError, match="not finite"):
    collected(Broken(bigrams()), Agents(talk), prompts("a", "b"), schedule=schedule)


@pytest.mark.long
def test_an_agent_with_slow_tools_does_not_hold_up_the_others(monkeypatch):
  monkeypatch.setattr("grpo_jax.rollouts.agents.PATIENCE_S", 0.05)
  ended = []

  async def talk(post, prompt):
    is_slow = prompt.text == "slow"
    await post("chat/completions", messages=[user("a")])
    await asyncio.sleep(0.8 if is_slow else 0.0)
    await post("chat/completions", messages=[user("b")])
    ended.append((prompt.text, time.monotonic()))
    return solved()

  collected(FakeEngine(bigrams()), Agents(talk), prompts("slow", "x", "y"))
  times = dict(ended)
  assert times["slow"] - max(times["x"], times["y"]) > 0.4


def test_tools_of_an_agent_reach_the_template_and_its_calls_are_sampled_tokens():
  texts = iter([call_text("add", a=1), "2"])
  engine = ScriptedEngine(lambda request: next(texts))

  async def talk(post, prompt):
    messages = [*prompt.messages]
    _, answer = await post("chat/completions", messages=messages, tools=[TOOL])
    (call,) = said(answer)["tool_calls"]
    messages += [said(answer), {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    _, answer = await post("chat/completions", messages=messages, tools=[TOOL])
    return solved(float(said(answer)["content"] == "2"))

  rollout = failing(talk, engine=engine)
  learned = TOKENIZER.decode(rollout.completion_ids[rollout.loss_mask])
  assert rollout.reward == 1.0 and learned == call_text("add", a=1) + "2"
  assert TOKENIZER.decode(rollout.completion_ids).count("tool\n2") == 1


# --- declaring agents ---


def test_a_function_that_makes_agents_must_say_so():
  talk = Agents(asks)
  make = lambda prompt: talk(prompt)
  with pytest.raises(ValueError, match="set is_agent = True on the factory"):
    environments.check({"env": make}, prompts("x"))
  (group,) = collected(FakeEngine(bigrams()), make, prompts("x"))
  assert error_counts([group]) == {"rollout/errors/type": 1.0}
  make.is_agent = True
  environments.check({"env": make}, prompts("x"))
  (group,) = collected(FakeEngine(bigrams()), make, prompts("x"))
  assert group.rollouts[0].turns == 2
  step = lambda prompt: Asks(prompt)
  step.is_agent = True
  with pytest.raises(ValueError, match="has step"):
    environments.check({"env": step}, prompts("x"))


# --- the order of requests, and what outlives an attempt ---


def test_rounds_do_not_depend_on_which_agent_asks_first():
  engine = ScriptedEngine(lambda request: "word")
  delays = iter([0.05, 0.0, 0.02])

  async def talk(post, prompt):
    await asyncio.sleep(next(delays, 0.0))
    return await asks(post, prompt)

  collected(engine, Agents(talk), prompts("a"), group_size=3)
  named = [[request.request_id for request in call] for call in engine.calls]
  wanted = [[f"{n}:set:0:0#{n}.{turn}" for n in range(3)] for turn in range(2)]
  assert named == wanted


def test_the_key_of_an_attempt_is_invalid_after_it():
  keys, statuses = [], []

  class Keeps:
    def __init__(self, prompt):
      pass

    async def start(self):
      pass

    async def run(self, endpoint):
      for key in keys:
        async with client_of(dataclasses.replace(endpoint, api_key=key)) as post:
          statuses.append((await post("chat/completions", messages=[user("a")]))[0])
      keys.append(endpoint.api_key)
      async with client_of(endpoint) as post:
        await post("chat/completions", messages=[user("a")])
      return solved()

    async def close(self):
      pass

  limits = AttemptLimits(agent_concurrency=1, max_error_share=0.0)
  (group,) = collected(FakeEngine(bigrams()), Keeps, prompts("x"), group_size=2, limits=limits)
  assert statuses == [401] and {r.turns for r in group.rollouts} == {1}


def test_cancelling_an_attempt_cancels_its_agent():
  events = []

  class Sleeps:
    def __init__(self, prompt):
      pass

    async def start(self):
      pass

    async def run(self, endpoint):
      events.append("asked")
      try:
        await asyncio.sleep(60)
      finally:
        events.append("cancelled")

    async def close(self):
      events.append("closed")

  async def attempt():
    environment = IsolatedEnvironment(Sleeps, prompts("x")[0], timeout_s=5.0)
    await environment.start()
    running = asyncio.create_task(environment.run(Endpoint("", "", ""), timeout_s=60.0))
    async with asyncio.timeout(5):
      while not events:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await environment.close()

  asyncio.run(attempt())
  assert events == ["asked", "cancelled", "closed"]
