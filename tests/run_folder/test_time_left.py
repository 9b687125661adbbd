"""The time left of a run: what has been measured, times what is left."""

import math

import pytest

from grpo_jax.building.schedule import Schedule
from grpo_jax.run_folder.time_left import Ahead, TimeLeft

SCHEDULE = Schedule(
  total_steps=10,
  evaluate_at_start=True,
  evaluate_every=4,
  evaluate_at_end=True,
  save_every=5,
  max_skipped=10,
)


class Run:
  """A run whose clock is moved by what it does."""

  def __init__(self, schedule=SCHEDULE, end_s=math.nan):
    self.now = 1000.0
    self.end_s = end_s
    self.left = TimeLeft(schedule.ahead, end_s=lambda: self.end_s, clock=lambda: self.now)

  def step(self, done, took, recording=0.0, **others):
    self.now += took + recording + others.get("checkpoint", 0.0)
    values = {"time/step_s": took, **{f"time/{n}_s": v for n, v in others.items()}}
    self.left.stepped(done, values)
    return self.left.seconds()

  def evaluate(self, done, took):
    self.now += took
    self.left.evaluated(done, {"time/evaluate_s": took})
    return self.left.seconds()


def test_steps_evaluations_checkpoints_and_the_end_count_once_they_are_measured():
  run = Run()
  assert math.isnan(run.evaluate(0, 7.0)), "no step is measured yet"
  assert run.step(1, 100.0) == 9 * 100 + 3 * 7
  run.end_s = 30.0  # a checkpoint was written.
  assert run.step(2, 10.0, recording=1.0) == 8 * 11 + 3 * 7 + 30, "without the first step"
  run.step(3, 11.0)
  assert run.step(4, 11.0) == 6 * 11 + 3 * 7 + 30
  assert run.evaluate(4, 9.0) == 6 * 11 + 2 * 9 + 30
  assert run.step(5, 11.0) == 5 * 11 + 2 * 9 + 30
  assert run.step(6, 11.0, checkpoint=2.0) == 4 * 11 + 2 * 9 + 2 + 30, "of step 5; 10 is left"
  for done in (7, 8):
    run.step(done, 11.0)
  run.evaluate(8, 9.0)
  run.step(9, 11.0)
  assert run.step(10, 11.0) == 9 + 2 + 30
  assert run.evaluate(10, 9.0) == 2 + 30


def test_a_delay_of_one_step_is_not_expected_of_the_others():
  run = Run()
  for done in (1, 2, 3):
    run.step(done, 10.0)
  assert run.step(4, 500.0) == 6 * 10, "a compilation, say"


def test_a_checkpoint_is_not_a_part_of_the_step_that_reports_it():
  run = Run()
  run.step(1, 10.0)
  assert run.step(2, 10.0, checkpoint=5.0) == 8 * 10 + 2 * 5


def test_time_runs_while_a_step_runs_and_waits_where_it_takes_longer():
  run = Run()
  run.step(1, 10.0)
  run.now += 4.0
  assert run.left.seconds() == 9 * 10 - 4
  run.now += 60.0
  assert run.left.seconds() == 8 * 10


def test_a_run_that_continues_expects_what_was_measured_before_until_it_has_its_own():
  run = Run()
  rows = [{"step": 0, "time/evaluate_s": 7.0, "time/step_s": 100.0}]
  rows += [{"step": n, "time/step_s": 20.0, "time/checkpoint_s": None} for n in range(1, 6)]
  run.left.recall(rows, 6)
  assert run.left.seconds() == 4 * 20 + 2 * 7
  assert run.step(7, 50.0) == 3 * 50 + 2 * 7, "another machine"
  assert run.step(8, 40.0) == 2 * 40 + 2 * 7


@pytest.mark.parametrize("every, saves", [(0, 0), (1, 1), (3, 2), (5, 5), (7, 4), (20, 0)])
@pytest.mark.parametrize("at_start, at_end", [(True, True), (False, False), (True, False)])
def test_what_is_ahead_is_what_the_schedule_does(every, saves, at_start, at_end):
  schedule = Schedule(10, at_start, every, at_end, saves, 10)
  for done in range(11):
    for is_evaluated in (False, True):
      expected = Ahead(
        10 - done,
        sum(schedule.evaluates(step) for step in range(done + is_evaluated, 11)),
        sum(schedule.saves(step) for step in range(done, 11) if step),
      )
      assert schedule.ahead(done, is_evaluated=is_evaluated) == expected
