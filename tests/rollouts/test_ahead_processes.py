"""Sampling ahead in several processes: each has a share, and all take the same groups."""

import threading
import time

import pytest

from grpo_jax import processes
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import exchanges
from tests import side_by_side
from tests.rollouts.shuffled import Shuffled, number_of, opened


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
  monkeypatch.setattr(exchanges, "LOOK_S", 0.01)


def numbers(taken):
  return [[number_of(each) for each in groups] for groups in taken]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_all_processes_take_the_same_groups_and_each_attempts_its_share(k, count):
  submitted: dict[int, list[int]] = {}

  def run(index):
    attempts = Shuffled(index)
    made = opened(attempts, per_step=4, max_staleness=k, count=30)
    taken, step = [], 0
    while groups := made.take(step):
      taken.append(groups)
      made.settle()
      step += 1
      attempts.version = step
      made.state()
    submitted[index] = attempts.submitted
    return numbers(taken)

  found = side_by_side.Room(count).run(run)
  assert found[0] == found[1] == found[-1]
  assert sorted(n for groups in found[0] for n in groups) == list(range(30))
  assert sorted(n for own in submitted.values() for n in own) == list(range(30))
  if count == 2:
    assert submitted[0] == [*range(0, 30, 2)]
  if k == 1:
    assert found[0] == [[*range(i, min(i + 4, 30))] for i in range(0, 30, 4)]


class Blocking(Shuffled):
  """Attempts whose slow groups finish when the test says so, and all others in the first wait."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.gate = threading.Event()

  def wait(self, stop=False):
    while not self._ready and self._going and {*self._going} <= self._slow:
      if self.gate.wait(0.01):
        break
      if stop:
        raise Stopped
    super().wait(stop)
    while {*self._going} - self._slow:
      self.finish_one()


def test_a_step_does_not_wait_for_groups_that_it_does_not_take():
  """Process 1 has only groups of later steps under way; process 0 has the ones that are needed."""
  gates = []

  def run(index):
    attempts = Blocking(index, slow={5, 7}) if index else Shuffled(index)
    if index:
      gates.append(attempts.gate)
    made = opened(attempts, per_step=4, max_staleness=1)
    first = numbers([made.take(0)])
    if index == 0:
      for gate in gates:
        gate.set()
    return first

  began = time.monotonic()
  assert side_by_side.Room(2).run(run) == [[[0, 1, 2, 3]]] * 2
  assert time.monotonic() - began < 10


class Failing(Shuffled):
  def wait(self, stop=False):
    raise LookupError("the engine of process 1 is lost")


@pytest.mark.parametrize("when", ["drawing", "before_the_update", "after_the_update"])
def test_a_failure_of_one_process_ends_all_of_them(when):
  def run(index):
    attempts = Shuffled(index, slow=range(4, 8))
    made = opened(attempts, per_step=4, max_staleness=1)
    if when != "drawing":
      made.take(0)
    if index == 1:
      attempts.__class__ = Failing
    if when == "drawing":
      made.take(0)
    elif when == "before_the_update":
      made.settle(has_learned=False)
    else:
      made.settle(has_learned=True)
      made.state()  # is saved by all.
      made.take(1)

  here, there = side_by_side.Room(2).run(run)
  assert isinstance(here, processes.OtherProcessError) and "process 1 is lost" in str(here)
  assert isinstance(there, LookupError)


def test_a_stop_on_one_process_stops_all():
  def run(index):
    stop = [1] if index else []
    attempts = Blocking(index, slow=range(100))
    opened(attempts, per_step=4, max_staleness=1, stop=stop).take(0)

  assert [type(each) for each in side_by_side.Room(2).run(run)] == [Stopped] * 2


def test_a_run_continues_with_another_number_of_processes():
  def begun(index):
    attempts = Shuffled(index)
    made = opened(attempts, per_step=3, max_staleness=2)
    taken = numbers([made.take(0)])
    attempts.version = 1
    return taken, made.state()

  def continued(state):
    def run(index):
      attempts = Shuffled(7 + index, version=1)
      options = {"max_staleness": 2, "count": 20}
      made, taken, step = opened(attempts, per_step=3, state=state, **options), [], 1
      while groups := made.take(step):
        taken.append(groups)
        attempts.version = step = step + 1
      return numbers(taken)

    return run

  (first, state), (_, same) = side_by_side.Room(2).run(begun)
  assert state == same
  for count in (1, 3):
    rest = side_by_side.Room(count).run(continued(state))
    assert rest[0] == rest[-1]
    learned = [n for groups in [*first, *rest[0]] for n in groups]
    assert sorted(learned) == list(range(20)), (first, rest[0], state["ahead"]["waiting"])
