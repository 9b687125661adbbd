"""Prompts split between processes: the same groups as one process makes, and ends that all share.

The processes are threads here; tests/processes has real ones.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time

import numpy as np
import pytest
from scripted_engine import TOKENIZER

from grpo_jax import processes
from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.environments.base import SingleTurn, StepResult
from grpo_jax.groups import filters, group_bytes
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import bulk, digests, exchanges
from grpo_jax.rollouts import evaluation, group_source, rollout, stream, work_sharing
from grpo_jax.rollouts.failures import TooManyFailures
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.rollout import AttemptLimits
from grpo_jax.types import Prompt
from tests import side_by_side
from tests.groups.test_group_bytes import bits

SAMPLING = SamplingParams(max_tokens=12, stop_ids=(END,))
TABLE = np.random.default_rng(0).normal(size=(TOKENIZER.vocab_size,) * 2)


def prompts(*texts: str, weight: float = 1.0) -> list[Prompt]:
  return [
    Prompt(f"set:0:{i}", TOKENIZER.encode(text), "env", {}, text, weight)
    for i, text in enumerate(texts)
  ]


class Talking:
  """A conversation whose answers depend on the prompt and on what was said."""

  def __init__(self, prompt):
    self.prompt, self.turns = prompt, 0

  async def start(self):
    pass

  async def step(self, response, completion_ids, finish_reason):
    self.turns += 1
    reward = {"letters": float(sum(c.isalpha() for c in response)), "turn": 0.5}
    done = self.turns > len(self.prompt.text) % 3
    return StepResult(reward, done=done, observation="again", metrics={"n": float(self.turns)})

  async def close(self):
    pass


def scored(prompt):
  def reward(prompt, text):
    if "!" in prompt.text:
      raise ValueError("the grader is broken \ud800")
    return float(len(text)) / 3

  return SingleTurn(reward, prompt)


@contextlib.contextmanager
def sampler(environment=scored, *, stop=False, **fields):
  descriptions = []

  @contextlib.contextmanager
  def progress(description, total):
    descriptions.append((description, total))
    yield lambda count: None

  with LoopThread() as loop:
    settings = {
      "group_size": 3,
      "sampling": SAMPLING,
      "seed": 3,
      "limits": AttemptLimits(),
    } | fields
    made = stream.RolloutSampler(
      engine=FakeEngine(TABLE),
      environments={"env": environment},
      tokenizer=TOKENIZER,
      progress=progress,
      loop=loop,
      stop=stop,
      **settings,
    )
    made.engine.descriptions = descriptions
    yield made


TASKS = prompts("a", "bc", "def", "gh", "i!")
KINDS = {
  "one turn": ({"limits": AttemptLimits(max_error_share=0.5)}, scored),
  "rounds": ({"limits": AttemptLimits(max_turns=4)}, Talking),
  "free": ({"limits": AttemptLimits(max_turns=4), "schedule": "free"}, Talking),
  "greedy": ({"with_greedy": True, "limits": AttemptLimits(max_error_share=0.5)}, scored),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_any_number_of_processes_makes_the_groups_of_one(kind, count):
  fields, environment = KINDS[kind]
  with sampler(environment, **fields) as sample:
    alone = sample(TASKS, 5)

  def work(index):
    with sampler(environment, **fields) as sample:
      found = sample(TASKS, 5)
      return found, {request.group for request in sample.engine.requests}

  results = side_by_side.run(count, work)
  for index, (found, asked) in enumerate(results):
    assert bits(found) == bits(alone)
    assert asked == {prompt.prompt_id for prompt in TASKS[index::count]}


def test_what_an_attempt_changes_of_its_prompt_reaches_all_processes():
  """Agents may begin otherwise than they were asked; their prompt is what they began with."""
  tasks = prompts("abc", "de")

  def attempt(own, limits, stop):
    with sampler() as sample:
      groups = rollout.in_order(sample.finished(rollout.for_step(own, 0)))
    cut = [dataclasses.replace(p, token_ids=p.token_ids[:1], text="?") for p in own]
    return [dataclasses.replace(g, prompt=p) for g, p in zip(groups, cut, strict=True)]

  work = lambda _: work_sharing.among_processes(tasks, attempt, limits=AttemptLimits(), what="it")
  for groups in side_by_side.run(2, work):
    assert [(g.prompt.text, len(g.prompt.token_ids)) for g in groups] == [("?", 1), ("?", 1)]


def test_progress_says_that_it_is_of_a_share():
  def work(index):
    with sampler() as sample:
      sample(TASKS[:3], 5)
      return sample.engine.descriptions

  shown = side_by_side.run(2, work)
  assert shown[0] == [("step 5: sampling (share of process 0 of 2)", 6)]
  assert shown[1] == [("step 5: sampling (share of process 1 of 2)", 3)]
  with sampler() as sample:
    sample(TASKS[:3], 5)
    assert sample.engine.descriptions == [("step 5: sampling", 9)]


def test_an_evaluation_of_fewer_prompts_than_processes():
  def evaluated(index=None):
    kept = []
    with LoopThread() as loop:
      metrics = evaluation.run(
        FakeEngine(TABLE),
        {"env": scored},
        TASKS[:2],
        TOKENIZER,
        **{"name": "held", "group_size": 2, "pass_k": (1,), "sampling": SAMPLING, "seed": 3},
        loop=loop,
        on_groups=kept.append,
      )
    return metrics, bits(kept)

  alone = evaluated()
  assert side_by_side.run(3, evaluated) == [alone] * 3


# --- dynamic sampling and curricula ---


class Source:
  """Prompts 0, 1, …, at most `count`; keeps the metrics that it hears."""

  def __init__(self, count=100, broken=None):
    self.count, self.broken, self.position, self.heard = count, broken, 0, []

  def take(self, n):
    first, self.position = self.position, min(self.position + n, self.count)
    if self.broken is not None and first <= self.broken < self.position:
      raise processes.ProcessesError("row 3 is broken")
    found = prompts(*(f"{i} {'x' * (i % 5)}" for i in range(first, self.position)))
    return [dataclasses.replace(p, prompt_id=p.text) for p in found]

  def state(self):
    return {"position": self.position}

  def metrics(self):
    return {"data/epoch": self.position / self.count}

  def record_metrics(self, step, metrics):
    self.heard.append((step, dict(metrics)))


def rounded(prompt):
  return SingleTurn(
    lambda p, text: float(len(text) // 8 if int(p.text.split()[0]) % 2 else 1), prompt
  )


@pytest.mark.long
def test_dynamic_sampling_draws_keeps_and_reports_the_same_on_all_processes():
  def work(index=0):
    source = Source(30)
    with sampler(rounded) as sample:
      made = stream.OnlineStream(
        group_source.SynchronousSource(source, sample),
        prompts_per_step=3,
        dynamic=stream.DynamicSampling(prompts_per_round=5, on_limit="train"),
        keep=lambda groups: filters.apply(groups, drop_no_signal=True),
      )
      found = []
      for step in range(4):
        found.append((made.take(step), made.state(), made.metrics()))
        made.record_metrics(step, {"engine/of_host": float(index), "nan": float("nan")})
    return bits(found), bits(source.heard)

  alone = work()
  assert [each == alone for each in side_by_side.run(2, work)] == [True, True]


def test_a_broken_row_of_one_process_ends_all_and_nothing_is_sampled():
  def work(index):
    with sampler() as sample:
      made = stream.OnlineStream(
        group_source.SynchronousSource(Source(broken=3 if index else None), sample),
        prompts_per_step=4,
      )
      made.take(2)

  first, second = side_by_side.run(2, work)
  assert str(second) == "row 3 is broken"
  assert type(first) is processes.OtherProcessError and str(first).endswith(": row 3 is broken")


@pytest.mark.parametrize("rows", [0, 3, 100])
def test_other_prompts_on_one_process_are_an_error_of_all(rows):
  def work(index):
    source = Source(rows if index else 4)
    with sampler() as sample:
      made = stream.OnlineStream(group_source.SynchronousSource(source, sample), prompts_per_step=5)
      made.take(2)

  for error in side_by_side.run(2, work):
    assert type(error) is processes.DisagreementError
    assert "the prompts of step 2" in str(error)
    assert f"process 1: '{min(rows, 5)} prompts, " in str(error)


# --- failures ---


def test_too_many_failures_are_counted_over_all_processes(caplog):
  """One prompt of four is never scored: all attempts of process 1 of 4, a quarter of all."""
  tasks = prompts("a", "b!", "c", "d")

  def work(share):
    with sampler(limits=AttemptLimits(max_error_share=share)) as sample:
      return sample(tasks, 5)

  with caplog.at_level(logging.WARNING):
    allowed = side_by_side.run(4, lambda _: work(0.25))
  assert [len(groups) for groups in allowed] == [4] * 4
  assert len(caplog.messages) == 1
  assert caplog.messages[0].startswith("process 1 of 4 could not score 3 of its 3 attempts")
  for error in side_by_side.run(4, lambda _: work(0.2)):
    assert type(error) is TooManyFailures
    assert str(error).startswith(
      "3 of 12 attempts could not be scored, more than the allowed share of 0.2"
      " (rollout.max_error_share): {'ValueError': 3} (0 of 3 of process 0, 3 of 3 of process 1,"
    ), error
    assert "the first, set:0:1: ValueError: the grader is broken " in str(error)


def waiting_for(stop, seconds=10.0):
  """Waits until a flag rises, as sampling does; returns how long."""
  began = time.monotonic()
  while time.monotonic() - began < seconds:
    if stop:
      raise Stopped
    time.sleep(0.005)
  raise AssertionError("nobody asked to stop")


@pytest.mark.parametrize("failure", [RuntimeError("the engine is lost"), Stopped()])
def test_a_process_that_fails_or_stops_ends_the_sampling_of_the_others(failure):
  times = []

  def attempt(own, limits, stop):
    if own[0] is TASKS[1]:
      raise failure
    waiting_for(stop)

  def work(index):
    began = time.monotonic()
    try:
      return work_sharing.among_processes(
        TASKS, attempt, limits=AttemptLimits(), what="the groups of step 1"
      )
    finally:
      times.append(time.monotonic() - began)

  room = side_by_side.Room(3)
  results = room.run(work)
  assert results[1] is failure and max(times) < 3
  for other in (results[0], results[2]):
    if isinstance(failure, Stopped):
      assert type(other) is Stopped
    else:
      assert type(other) is processes.OtherProcessError
      assert str(other).endswith("RuntimeError: the engine is lost")
  assert room.store.values == {}  # no key is left behind.


def test_a_stop_of_one_process_reaches_sampling_with_a_real_loop():
  raised = threading.Event()

  class Flag:
    def __bool__(self):
      return raised.is_set()

  class Slow(Talking):
    async def step(self, response, completion_ids, finish_reason):
      raised.set()
      await asyncio.sleep(30)

  def work(index):
    with sampler(Slow, stop=Flag() if index else False) as sample:
      return sample(TASKS, 5)

  began = time.monotonic()
  assert [type(each) for each in side_by_side.run(2, work)] == [Stopped, Stopped]
  assert time.monotonic() - began < 10


def test_work_after_one_that_ended_early_begins_afresh():
  def work(index):
    for number in range(3):
      early = exchanges.EndedEarly()
      if number == 1 and index:
        early.announce()
      processes.together(lambda: None, what="all announced")
      time.sleep(0.05)
      seen = bool(early)
      processes.together(lambda: None, what="all looked")
      assert seen == (number == 1), number
      early.forget()

  assert side_by_side.run(2, work) == [None, None]


# --- the exchange of bytes ---


@pytest.mark.parametrize(
  "lengths", [(0, 0, 0), (3, 0, bulk.SMALL), (bulk.SMALL + 1, 2, 0), (3 * bulk.SMALL, 10**6, 10**6)]
)
def test_bytes_of_any_length_reach_all(monkeypatch, lengths):
  monkeypatch.setattr(bulk, "PIECE", 300_001)
  data = [np.random.default_rng(i).bytes(length) for i, length in enumerate(lengths)]
  room = side_by_side.Room(3)
  for received in room.run(lambda index: bulk.exchange_bytes(data[index], what="it")):
    assert [bytes(each) for each in received] == data
  assert room.store.values == {}


def test_one_process_exchanges_with_nobody():
  assert bulk.exchange_bytes(b"alone", what="it") == [b"alone"]
  bulk.prepare()


@pytest.mark.parametrize("length", [10, 10 * bulk.SMALL])
def test_damage_on_the_way_is_an_error_of_all_that_names_what_and_who(monkeypatch, length):
  data = [np.random.default_rng(i).bytes(length + i) for i in range(2)]
  gathered = bulk._gathered

  def damaged(own, heads):
    received = gathered(own, heads)
    if processes.index() == 1:
      received[0] = bytearray(received[0])
      received[0][7] ^= 1
    return received

  monkeypatch.setattr(bulk, "_gathered", damaged)
  work = lambda index: bulk.exchange_bytes(data[index], what="the groups of step 4")
  first, second = side_by_side.run(2, work)
  assert type(second) is bulk.DamagedError
  assert "the groups of step 4: what process 1 of 2 received from process 0 is not what was" in str(
    second
  )
  assert digests.of_bytes(data[0]) in str(second)
  assert type(first) is processes.OtherProcessError and "process 0 is not what" in str(first)


def test_damaged_groups_are_an_error_of_all(monkeypatch):
  encode = group_bytes.encode
  wrong = lambda groups, own: encode(groups, own) + (b"x" if processes.index() else b"")
  monkeypatch.setattr(group_bytes, "encode", wrong)

  def work(index):
    with sampler() as sample:
      return sample(TASKS[:4], 5)

  for error in side_by_side.run(2, work):
    assert isinstance(error, ValueError) and "1 bytes follow the last array" in str(error)


# --- digests ---


def test_a_digest_is_of_bits_and_of_structure():
  values = [
    [1, 2],
    [[1, 2]],
    [1.0, 2],
    ["1", 2],
    [None],
    [np.float32(-0.0)],
    [np.float32(0.0)],
    [np.zeros(2, np.int32)],
    [np.zeros((2, 1), np.int32)],
    [np.zeros((1, 2), np.int32)],
    [np.zeros(1, np.int64)],
    [{"a": 1}],
    [{"a": 1, "b": 1}],
    [["a", 1]],
    [TASKS[0].token_ids, TASKS[0].text],
  ]
  found = [digests.of_values(each) for each in values]
  assert len(set(found)) == len(values) and {len(each) for each in found} == {2 * digests.SIZE}
  assert found == [digests.of_values(each) for each in values]
  with pytest.raises(TypeError):
    digests.of_values([{1, 2}])


def test_a_batch_that_differs_in_one_bit_is_an_error_that_names_the_step():
  def work(index):
    advantages = [np.asarray([0.0 if index else -0.0, 1.0], np.float32)]
    digests.agree([advantages, None], what="the batch of step 7")

  for error in side_by_side.run(2, work):
    assert type(error) is processes.DisagreementError
    assert str(error).startswith("the digest of the batch of step 7 differs between the processes")
