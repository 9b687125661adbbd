"""Groups as they finish: order, seeds, and what is left after every way to end early."""

import asyncio
import contextlib
import dataclasses
import gc
import random
import threading
import time

import numpy as np
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.environments.base import SingleTurn, StepResult
from grpo_jax.interrupts import Stopped
from grpo_jax.rollouts import evaluation, rollout, stream
from grpo_jax.rollouts.failures import TooManyFailures
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.rollout import AttemptLimits, StepPrompt
from grpo_jax.rollouts.turn_sampling import request_seed
from grpo_jax.types import Prompt

SAMPLING = SamplingParams(max_tokens=16, stop_ids=(END,))
GROUP = 2


def prompts(*texts: str, step: int = 0, **fields) -> list[StepPrompt]:
  return [
    StepPrompt(
      Prompt(f"set:{step}:{text}", TOKENIZER.encode(text), "env", text=text, **fields), step
    )
    for text in texts
  ]


def groups(engine, factory, wanted, **overrides):
  settings = {"group_size": GROUP, "sampling": SAMPLING, "seed": 3, **overrides}
  return rollout.groups(engine, {"env": factory}, wanted, TOKENIZER, **settings)


def scored(prompt: Prompt) -> SingleTurn:
  return SingleTurn(lambda p, text: float(len(text)), prompt)


@pytest.fixture
def loop():
  with LoopThread() as loop:
    yield loop


@pytest.fixture(autouse=True)
def nothing_left(caplog, small_heap):
  """No task is destroyed while it is pending, no thread of an environment stays."""
  before = set(threading.enumerate())
  yield
  gc.collect()
  assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
  assert left_threads(before) == []


def left_threads(before: set[threading.Thread]) -> list[str]:
  """Returns the names of new threads of ours that are still there after a moment."""
  names = ("rollout", "environment")
  deadline = time.monotonic() + 5
  while True:
    left = [t.name for t in threading.enumerate() if t.name in names and t not in before]
    if not left or time.monotonic() > deadline:
      return left
    time.sleep(0.005)


async def tasks_left() -> int:
  return len(asyncio.all_tasks()) - 1


class Stepwise(ScriptedEngine):
  """Answers a request when its prompt is released; notes which requests were left."""

  def __init__(self, answer=lambda r: "ab"):
    super().__init__(answer)
    self.released: set[str] = set()
    self.left: list[str] = []
    self.is_closed = False

  def release(self, text: str = "") -> None:
    self.released.add(text)

  async def generate(self, requests, *, on_progress=None):
    self.calls.append(list(requests))
    waiting = list(requests)
    try:
      while waiting:
        ready = [r for r in waiting if TOKENIZER.decode(r.prompt_ids)[0] in self.released]
        for request in ready:
          waiting.remove(request)
          yield self._generation(request)
        await asyncio.sleep(0.001)
    finally:
      self.left = [request.request_id for request in waiting]
      self.is_closed = True


@pytest.mark.long
def test_a_group_comes_when_its_last_attempt_is_scored_while_others_are_sampled(loop):
  engine = Stepwise()
  found = loop.iterate(groups(engine, scored, prompts("a", "b", "c")))
  order = []
  for text in "cab":
    engine.release(text)
    ordinal, group = next(found)
    order.append(ordinal)
    assert group.prompt.text == text and group.rewards.tolist() == [2.0, 2.0]
  assert order == [2, 0, 1] and list(found) == []


def test_a_group_waits_for_its_slowest_attempt_only(loop):
  gate = threading.Event()

  def reward(prompt, text):
    if prompt.text == "a" and text == "1":
      gate.wait(20)
    return 1.0

  engine = ScriptedEngine(lambda r: r.request_id.split("#")[1][0])
  factory = lambda prompt: SingleTurn(reward, prompt)
  found = loop.iterate(groups(engine, factory, prompts("a", "b")))
  assert next(found).ordinal == 1
  gate.set()
  assert next(found).ordinal == 0


@pytest.mark.parametrize("schedule", ["rounds", "free"])
def test_collect_is_the_groups_in_the_order_of_the_prompts(loop, schedule):
  wanted = prompts("x", "yyy", "zz", "v" * 15, step=7)  # the last has no room.

  def made(reverse):
    return {
      "engine": ScriptedEngine(lambda r: f"{r.seed % 1000:03d}", reverse=reverse),
      "environments": {"env": Talking},
      "tokenizer": TOKENIZER,
      "group_size": 3,
      "sampling": SAMPLING,
      "seed": 3,
      "limits": AttemptLimits(max_turns=4, max_tokens=15, max_error_share=0.5),
      "schedule": schedule,
    }

  found = list(loop.iterate(rollout.groups(prompts=wanted, **made(reverse=True))))
  assert found[0].ordinal == 3  # failed at once.
  assert sorted(each.ordinal for each in found) == [0, 1, 2, 3]
  plain = [each.prompt for each in wanted]
  expected = rollout.collect_sync(prompts=plain, step=7, **made(reverse=False))
  assert shown(rollout.in_order(found)) == shown(expected)
  assert [g.prompt.text for g in expected] == ["x", "yyy", "zz", "v" * 15]


class Talking:
  """Talks for as many turns as the prompt has letters."""

  def __init__(self, prompt: Prompt):
    self._turns = len(prompt.text)
    self._turn = 0

  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    self._turn += 1
    return StepResult(float(self._turn), done=self._turn >= self._turns, observation="<>")

  async def close(self):
    pass


def shown(found):
  """Returns all that was sampled and scored, comparable."""
  return [
    [
      (
        r.completion_ids.tolist(),
        r.behavior_logprobs.tolist(),
        r.loss_mask.tolist(),
        repr(r.reward),
        r.turns,
      )
      for r in group.rollouts
    ]
    for group in found
  ]


# --- seeds ---


def bigrams() -> FakeEngine:
  """Really samples, by the seeds of the requests."""
  return FakeEngine(np.random.default_rng(0).normal(size=(TOKENIZER.vocab_size,) * 2))


def test_completions_depend_on_the_step_that_a_prompt_is_for_and_not_on_when_it_is_sampled(loop):
  """One at a time, all at once in another order, in several calls at the same time."""
  settings = {"limits": AttemptLimits(max_turns=3)}
  steps = [prompts("xyz", "uv", "w", step=step) for step in range(4)]

  def sampled(wanted):
    found = loop.iterate(groups(bigrams(), Talking, wanted, **settings))
    return {each.group.prompt.prompt_id: shown([each.group]) for each in found}

  in_turn: dict = {}
  for wanted in steps:
    in_turn |= sampled(wanted)
  assert len({str(value) for value in in_turn.values()}) == 12  # steps differ.
  assert {name: value for wanted in reversed(steps) for name, value in sampled(wanted).items()} == (
    in_turn
  )
  mixed = [each for wanted in steps for each in wanted]
  random.Random(5).shuffle(mixed)
  assert sampled(mixed) == in_turn

  async def side_by_side():
    engine = bigrams()

    async def one(wanted):
      return [each.group async for each in groups(engine, Talking, wanted, **settings)]

    found = await asyncio.gather(*(one(wanted) for wanted in reversed(steps)))
    return {g.prompt.prompt_id: shown([g]) for of_step in found for g in of_step}

  assert loop.run(side_by_side()) == in_turn
  plain = [each.prompt for each in steps[2]]
  of_step = rollout.collect_sync(
    bigrams(),
    {"env": Talking},
    plain,
    TOKENIZER,
    group_size=GROUP,
    sampling=SAMPLING,
    seed=3,
    step=2,
    **settings,
  )
  assert [shown([group]) for group in of_step] == [in_turn[p.prompt_id] for p in plain]


def test_every_prompt_of_a_call_has_the_seeds_of_its_own_step(loop):
  engine = ScriptedEngine(lambda r: "x")
  wanted = [*prompts("a", step=6), *prompts("b", step=2)]
  list(loop.iterate(groups(engine, scored, wanted)))
  assert [r.seed for r in engine.calls[0]] == [
    request_seed(3, step, f"set:{step}:{text}", number)
    for text, step in (("a", 6), ("b", 2))
    for number in range(GROUP)
  ]


def test_the_sampler_of_a_run_gives_the_prompts_of_a_later_step_their_own_seeds(loop):
  """Ahead of its step or in it: `Sampler(prompts, step)` is what a stream calls."""
  sample = sampler(loop, bigrams())
  steps = {step: [each.prompt for each in prompts("ab", "c", step=step)] for step in range(4)}
  in_turn = {step: shown(sample(of_step, step)) for step, of_step in steps.items()}
  ahead = {step: shown(sample(steps[step], step)) for step in (3, 1, 0, 2)}
  assert ahead == in_turn
  mixed = [StepPrompt(p, step) for step in (2, 0, 3, 1) for p in steps[step]]
  found = rollout.in_order(sample.finished(mixed))
  assert shown(found) == [one for step in (2, 0, 3, 1) for one in in_turn[step]]


def sampler(loop, engine, environment=scored, *, sampling=None, limits=None, **fields):
  @contextlib.contextmanager
  def progress(description, total):
    yield lambda count: None

  return stream.RolloutSampler(
    engine=engine,
    environments={"env": environment},
    tokenizer=TOKENIZER,
    group_size=GROUP,
    sampling=sampling or SAMPLING,
    seed=3,
    limits=limits or AttemptLimits(),
    progress=progress,
    loop=loop,
    **fields,
  )


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({}, None),
    ({"top_p": 0.9}, "sampling.top_p=0.9: tokens are sampled from a truncated distribution"),
    ({"top_k": 5, "min_p": 0.1}, "sampling.top_k=5, sampling.min_p=0.1"),
    ({"top_p": 0.9, "logprobs": "truncated"}, None),
  ],
)
def test_training_warns_once_of_what_it_does_not_compute_whatever_the_engine(
  loop, caplog, options, words
):
  sampling = dataclasses.replace(SAMPLING, **options)
  sample = sampler(loop, ScriptedEngine(lambda r: "ab"), sampling=sampling)
  for step in range(2):
    sample([each.prompt for each in prompts("a", step=step)], step)
  assert len(caplog.messages) == (words is not None)
  assert words is None or words in caplog.text


@pytest.mark.parametrize("schedule", rollout.SCHEDULES)
def test_the_schedule_of_a_run_reaches_the_engine(loop, schedule):
  class Talking:
    async def start(self):
      pass

    async def step(self, response, completion_ids, finish_reason):
      return StepResult(reward=1.0, done=response == "a", observation="again")

    async def close(self):
      pass

  engine = ScriptedEngine(lambda r: "ab" if len(r.prompt_ids) < 3 else "a")
  limits = AttemptLimits(max_turns=2)
  sample = sampler(loop, engine, lambda prompt: Talking(), schedule=schedule, limits=limits)
  sample([each.prompt for each in prompts("x", "y")], 0)
  calls = {"rounds": [4, 4], "free": [4, 1, 1, 1, 1]}
  assert [len(call) for call in engine.calls] == calls[schedule]


# --- one thread for a run ---


@pytest.mark.long
def test_a_run_of_steps_and_evaluations_uses_one_thread_and_one_loop(loop):
  places, before = set(), set(threading.enumerate())

  class Placed(ScriptedEngine):
    async def generate(self, requests, *, on_progress=None):
      places.add((asyncio.get_running_loop(), threading.current_thread().name))
      async for generation in super().generate(requests):
        yield generation

  engine = Placed(lambda r: "ab")
  sample = sampler(loop, engine)
  counts = []
  for step in range(50):
    plain = [each.prompt for each in prompts("a", "b", step=step)]
    assert len(sample(plain, step)) == 2
    evaluation.run(
      engine,
      {"env": scored},
      plain,
      TOKENIZER,
      name="heldout",
      group_size=1,
      pass_k=(1,),
      sampling=SAMPLING,
      seed=3,
      loop=loop,
    )
    assert loop.run(tasks_left()) == 0
    counts.append(sum(t.name == "rollout" for t in set(threading.enumerate()) - before))
  assert len(engine.calls) == 100 and len(places) == 1
  assert set(counts) == {1}


# --- what ends it early ---


@pytest.mark.parametrize("schedule", ["rounds", "free"])
def test_closing_early_cancels_the_engine_and_leaves_nothing_running(loop, schedule):
  engine, closed = Stepwise(), []

  class Closing(Talking):
    async def close(self):
      closed.append(1)

  found = loop.iterate(groups(engine, Closing, prompts("a", "bb", "c"), schedule=schedule))
  engine.release("a")
  assert next(found).ordinal == 0
  found.close()
  assert engine.is_closed and len(engine.left) == 2 * GROUP
  assert loop.run(tasks_left()) == 0
  assert len(closed) == GROUP  # of those that had begun.
  assert len(engine.calls) == 1


def test_closing_early_closes_the_environments_of_conversations_under_way(loop):
  opened, closed = [], []

  class Noted(Talking):
    async def start(self):
      opened.append(1)

    async def step(self, *arguments):
      while len(opened) < 2 * GROUP:  # else the first group may end before all are open.
        await asyncio.sleep(0)
      return await super().step(*arguments)

    async def close(self):
      closed.append(1)

  class Second(ScriptedEngine):
    """Answers first turns; second turns of prompt b never."""

    async def generate(self, requests, *, on_progress=None):
      if self.calls:
        self.calls.append(list(requests))
        await asyncio.Event().wait()
      async for generation in super().generate(requests):
        yield generation

  engine = Second(lambda r: "ab")
  settings = {"limits": AttemptLimits(max_turns=2)}
  found = loop.iterate(groups(engine, Noted, prompts("a", "bb"), **settings))
  assert next(found).ordinal == 0
  found.close()
  assert len(opened) == len(closed) == 2 * GROUP
  assert loop.run(tasks_left()) == 0


def test_an_asynchronous_reader_may_leave_early_too(loop):
  engine = Stepwise()
  engine.release("b")

  async def first():
    async with contextlib.aclosing(groups(engine, scored, prompts("a", "b"))) as found:
      async for each in found:
        return each.ordinal, await tasks_left()

  ordinal, busy = loop.run(first())
  assert ordinal == 1 and busy > 0
  assert engine.is_closed and loop.run(tasks_left()) == 0


def test_an_iterator_that_is_never_read_starts_nothing(loop):
  engine = Stepwise()
  found = loop.iterate(groups(engine, scored, prompts("a")))
  found.close()
  del found
  assert engine.calls == []


def test_too_many_failures_come_after_the_last_group_and_count_all(loop):
  def reward(prompt, text):
    if prompt.text != "b":
      raise KeyError("nothing here")
    return 1.0

  factory = lambda prompt: SingleTurn(reward, prompt)
  found, seen = loop.iterate(groups(ScriptedEngine(lambda r: "x"), factory, prompts(*"abc"))), []
  with pytest.raises(TooManyFailures, match=r"4 of 6 attempts.*'KeyError': 4"):
    for each in found:
      seen.append(each.ordinal)
  assert sorted(seen) == [0, 1, 2]
  assert loop.run(tasks_left()) == 0


def test_an_error_of_the_engine_comes_after_the_groups_that_were_finished(loop):
  class Breaking(ScriptedEngine):
    async def generate(self, requests, *, on_progress=None):
      for request in requests[:GROUP]:
        yield self._generation(request)
      await asyncio.sleep(0.3)  # the first group is scored meanwhile.
      raise OSError("server gone")

  engine, seen = Breaking(lambda r: "x"), []
  with pytest.raises(OSError, match="server gone"):
    for each in loop.iterate(groups(engine, scored, prompts("a", "b"))):
      seen.append(each.ordinal)
  assert seen == [0] and loop.run(tasks_left()) == 0


def test_an_engine_that_answers_a_stranger_is_left_at_once(loop):
  class Confused(Stepwise):
    def _generation(self, request):
      made = super()._generation(request)
      object.__setattr__(made, "request_id", "stranger")
      return made

  engine = Confused()
  engine.release("a")
  with pytest.raises(RuntimeError, match="unknown request 'stranger'"):
    list(loop.iterate(groups(engine, scored, prompts("a", "b"))))
  assert engine.is_closed  # not only when the garbage collector comes by.


@pytest.mark.long
def test_an_environment_that_hangs_costs_its_group_the_time_limit_and_no_other(loop):
  release = threading.Event()

  def reward(prompt, text):
    if prompt.text == "a":
      release.wait(30)
    return 1.0

  limits = AttemptLimits(environment_timeout_s=0.3, max_error_share=0.5)
  factory = lambda prompt: SingleTurn(reward, prompt)
  engine = ScriptedEngine(lambda r: "x")
  found = loop.iterate(groups(engine, factory, prompts("a", "b"), limits=limits))
  assert next(found).ordinal == 1  # does not wait for it.
  ordinal, group = next(found)
  assert ordinal == 0 and np.isnan(group.rewards).all()
  assert list(found) == [] and loop.run(tasks_left()) == 0
  release.set()


@pytest.mark.parametrize("is_scoring", [False, True], ids=["sampling", "scoring"])
def test_a_stop_flag_ends_sampling_and_scoring_within_seconds(loop, is_scoring):
  release, stop = threading.Event(), []

  def reward(prompt, text):
    stop.append("now")
    release.wait(30)
    return 1.0

  class Endless(ScriptedEngine):
    async def generate(self, requests, *, on_progress=None):
      stop.append("now")
      await asyncio.Event().wait()
      yield

  engine = ScriptedEngine(lambda r: "x") if is_scoring else Endless(lambda r: "x")
  factory = lambda prompt: SingleTurn(reward, prompt)
  sample = sampler(loop, engine, factory, stop=stop)
  began = time.monotonic()
  with pytest.raises(Stopped):
    sample([each.prompt for each in prompts("a", "b")], 0)
  assert time.monotonic() - began < 5
  assert loop.run(tasks_left()) == 0
  release.set()


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"group_size": 0}, "group_size must be at least 1, got 0"),
    ({"prompts": prompts("a", "a")}, "repeated: .*set:0:a"),
    ({"environments": {"envs": scored}}, "'env'.*did you mean 'envs'"),
  ],
)
def test_what_cannot_be_right_is_refused_before_anything_runs(overrides, message):
  engine = ScriptedEngine(lambda r: "x")
  settings = {
    "engine": engine,
    "environments": {"env": scored},
    "prompts": prompts("a"),
    "tokenizer": TOKENIZER,
    "group_size": 1,
    "sampling": SAMPLING,
    "seed": 0,
  }
  with pytest.raises(ValueError, match=message):
    rollout.groups(**(settings | overrides))  # by the call itself.
  assert engine.calls == []
