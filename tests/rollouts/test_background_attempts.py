"""Attempts in the background: what arrives, what is given up, and how failures come out."""

import asyncio
import threading
import time

import numpy as np
import pytest

from grpo_jax.interrupts import Stopped
from grpo_jax.rollouts.background_attempts import Attempts, BackgroundAttempts
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.rollout import Finished, StepPrompt
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def asked(*names):
  return [StepPrompt(Prompt(name, np.array([1]), "env", text=name), 0) for name in names]


def group(prompt, reward=0.0):
  rollout = Rollout(
    completion_ids=np.array([1]),
    loss_mask=np.ones(1, bool),
    behavior_logprobs=np.zeros(1, np.float32),
    weight_versions=np.zeros(1, np.int32),
    finish_reason=FinishReason.STOP,
    reward=reward,
  )
  return RolloutGroup(prompt, (rollout,))


class Collected:
  """Groups that come when the test says so, in the event loop."""

  def __init__(self, ends_late=False):
    self.calls: list[list[str]] = []
    self.closed: list[str] = []
    self._gates: dict[str, list] = {}
    self._ends_late = ends_late

  async def __call__(self, prompts):
    names = [each.prompt.prompt_id for each in prompts]
    self.calls.append(names)
    try:
      for ordinal, each in enumerate(prompts):
        gate = asyncio.get_running_loop().create_future()
        self._gates.setdefault(names[ordinal], []).append((gate, gate.get_loop()))
        try:
          reward = await gate
        except asyncio.CancelledError:
          if not self._ends_late:
            raise
          reward = -1.0  # it had finished before the cancellation reached it.
        yield Finished(ordinal, group(each.prompt, reward))
    finally:
      self.closed += names

  def let(self, name, value=0.0, call=-1):
    """Has a group finish, or fail with an error."""
    self.wait_for(name, call)
    gate, loop = self._gates[name][call]
    if isinstance(value, Exception):
      loop.call_soon_threadsafe(gate.set_exception, value)
    else:
      loop.call_soon_threadsafe(gate.set_result, value)

  def wait_for(self, name, call=-1):
    until = time.monotonic() + 10
    while len(self._gates.get(name, ())) <= max(call, 0) and time.monotonic() < until:
      time.sleep(0.005)


@pytest.fixture
def loop():
  with LoopThread() as opened:
    yield opened


def names_of(arrived):
  return [each.group.prompt.prompt_id for each in arrived]


def test_groups_arrive_as_they_finish(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=False)
  assert isinstance(attempts, Attempts)
  attempts.submit([7, 8, 9], asked("a", "b", "c"))
  collected.let("b")
  attempts.wait()
  assert [each.number for each in attempts.arrived()] == [8] and attempts.in_flight == 2
  collected.let("c")
  collected.let("a")
  attempts.wait()
  found = attempts.arrived()
  while attempts.in_flight:
    attempts.wait()
    found += attempts.arrived()
  assert sorted(names_of(found)) == ["a", "c"]
  attempts.wait()  # nothing is in flight.
  assert attempts.arrived() == []


def test_in_turn_a_block_is_one_call_that_begins_when_the_one_before_has_ended(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=True)
  attempts.submit([0, 1], asked("a", "b"))
  attempts.submit([2], asked("c"))
  collected.let("a")
  attempts.wait()
  assert collected.calls == [["a", "b"]]
  collected.let("b")
  collected.let("c")
  while attempts.in_flight:
    attempts.wait()
    attempts.arrived()
  assert collected.calls == [["a", "b"], ["c"]]


@pytest.mark.parametrize("ends_late", [False, True], ids=["cancelled", "finished_meanwhile"])
def test_what_is_given_up_is_not_taken_for_a_later_attempt_at_the_same_prompt(loop, ends_late):
  collected = Collected(ends_late)
  attempts = BackgroundAttempts(loop, collected, in_turn=False)
  attempts.submit([3], asked("a"))
  collected.wait_for("a")
  attempts.give_up(3)
  assert collected.closed == ["a"] and attempts.in_flight == 0
  attempts.submit([3], asked("a"))
  collected.let("a", 5.0, call=1)
  attempts.wait()
  (only,) = attempts.arrived()
  assert only.group.rollouts[0].reward == 5.0


def test_what_had_finished_and_is_given_up_is_forgotten(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=False)
  attempts.submit([3, 4], asked("a", "b"))
  collected.let("a")
  attempts.wait()
  attempts.give_up(3)
  collected.let("b")
  attempts.wait()
  assert names_of(attempts.arrived()) == ["b"]


def test_a_failure_is_raised_by_waiting_once_what_had_finished_is_taken(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=True)
  attempts.submit([0, 1], asked("a", "b"))
  collected.let("a")
  collected.let("b", LookupError("the engine is lost"))
  while not collected.closed:
    time.sleep(0.005)
  attempts.wait()
  assert names_of(attempts.arrived()) == ["a"]  # raises nothing, and loses nothing.
  for _ in range(2):
    assert attempts.arrived() == []
    with pytest.raises(LookupError, match="the engine is lost"):
      attempts.wait()


def test_a_stop_ends_the_wait_and_not_the_attempts(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=False)
  attempts.submit([0], asked("a"))
  with pytest.raises(Stopped):
    attempts.wait(stop=True)
  collected.let("a")
  attempts.wait()
  assert names_of(attempts.arrived()) == ["a"]


def test_closing_cancels_all_attempts_at_once(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=False)
  attempts.submit(range(40), asked(*(f"p{i}" for i in range(40))))
  collected.wait_for("p39")
  began = time.monotonic()
  attempts.close()
  assert time.monotonic() - began < 5 and len(collected.closed) == 40
  assert attempts.in_flight == 0
  loop.close()
  assert not [each for each in threading.enumerate() if each.name == "rollout"]


def test_time_counts_as_busy_while_something_is_in_flight(loop):
  collected = Collected()
  attempts = BackgroundAttempts(loop, collected, in_turn=False)
  attempts.submit([0, 1], asked("a", "b"))
  time.sleep(0.05)
  for name in ("a", "b"):
    collected.let(name)
  while attempts.in_flight:
    attempts.wait()
    attempts.arrived()
  while len(collected.closed) < 2:
    time.sleep(0.005)
  time.sleep(0.1)
  busy = attempts.busy_s()
  assert busy >= 0.05
  time.sleep(0.05)
  assert attempts.busy_s() == busy
