"""Times of several processes: work without waiting, metrics, and the line about a straggler."""

import dataclasses

import pytest

from grpo_jax import metrics
from grpo_jax.metrics import timing
from grpo_jax.run_folder import hosts
from grpo_jax.run_folder.hosts import HostStep, Stragglers


def a_step(sample, *, others=0.0, learn=2.0, assemble=1.0, host="h0", memory=None):
  """What a process measures that samples for some seconds and then waits for the others."""
  wait = max(0.0, others - sample)
  return HostStep(
    host=host,
    step_s=sample + wait + assemble + learn,
    phases={"sample": sample + wait, "assemble": assemble, "learn": learn},
    waits={"step": wait, "sample": wait},
    memory=memory or {"peak_rss_gib": 1.0},
    compilations=0.0,
  )


def steps_of(*samples):
  return [
    a_step(sample, others=max(samples), host=f"h{number}") for number, sample in enumerate(samples)
  ]


def test_work_is_the_step_without_waiting():
  steps = steps_of(4.0, 7.0)
  assert [step.step_s for step in steps] == [10.0, 10.0]
  work = hosts.work_of(steps)
  assert list(work.total) == [7.0, 10.0]
  assert list(work.phases["sample"]) == [4.0, 7.0]


def test_waiting_within_a_phase_of_all_devices_is_not_work():
  """Process 1 packs for 3 s longer; process 0 spends these in the collective of the update."""
  steps = [a_step(4.0, others=4.0, learn=5.0), a_step(4.0, others=4.0, assemble=4.0)]
  assert [step.step_s for step in steps] == [10.0, 10.0]
  assert list(hosts.work_of(steps).total) == [7.0, 10.0]


def test_waiting_between_phases_is_not_work():
  waiting = HostStep("h0", 10.0, {"sample": 4.0}, {"step": 5.0, "sample": 1.0}, {}, 0.0)
  assert list(hosts.work_of([waiting, waiting]).total) == [5.0, 5.0]


def test_metrics_are_in_the_table_and_name_the_slowest():
  found = hosts.metrics_of(
    [
      a_step(4.0, others=7.0, memory={"peak_rss_gib": 2.0, "device_peak_gib": 10.0}),
      a_step(7.0, others=7.0, memory={"peak_rss_gib": 5.0, "device_peak_gib": 11.0}),
    ]
  )
  assert metrics.unknown(found) == []
  assert found["hosts/processes"] == 2.0
  assert found["hosts/slowest"] == 1.0
  assert found["hosts/slowest_excess"] == pytest.approx(3 / 7)
  assert (found["hosts/busy_s_max"], found["hosts/busy_s_min"]) == (10.0, 7.0)
  assert found["hosts/sample_s_median"] == 5.5
  assert found["hosts/wait_share"] == pytest.approx(3 / 20)
  assert found["hosts/peak_rss_gib_max"] == 5.0
  assert found["hosts/device_peak_gib_max"] == 11.0
  assert found["hosts/process/001/busy_s"] == 10.0
  assert found["hosts/process/000/wait_s"] == 3.0
  assert metrics.reproducible(found) == {}


def test_many_processes_have_no_values_of_each():
  found = hosts.metrics_of(steps_of(*[4.0] * 63, 8.0))
  assert not [name for name in found if name.startswith("hosts/process/")]
  assert (found["hosts/processes"], found["hosts/slowest"]) == (64.0, 63.0)
  assert len(found) < 40
  every = hosts.metrics_of(steps_of(*[4.0] * hosts.EACH))
  assert f"hosts/process/{hosts.EACH - 1:03d}/step_s" in every


def said(watch, *rounds):
  """Returns the steps after which a line was shown, and the lines."""
  found = [(step, watch.lines(step, steps_of(*samples))) for step, samples in enumerate(rounds)]
  return [(step, line) for step, lines in found for line in lines]


SLOW, EVEN = (4.0, 7.0), (4.0, 4.0)


def test_a_straggler_is_reported_after_three_steps_once():
  ((step, line),) = said(Stragglers(), *[SLOW] * 6)
  assert step == 2
  assert line == (
    "process 1 of 2 (h1) is slower than the others for 3 steps: in step 2 it worked 10.00 s, the"
    " median of the others 7.00 s (+43%); most of it in sampling and scoring completions: 7.00 s,"
    " the others 4.00 s"
  )


def test_it_is_reported_again_only_after_it_has_recovered():
  steps = [step for step, _ in said(Stragglers(), *[SLOW] * 4, EVEN, *[SLOW] * 4)]
  assert steps == [2, 7]


def test_two_slow_steps_in_a_row_are_not_reported():
  assert said(Stragglers(), SLOW, SLOW, EVEN, SLOW, SLOW, EVEN) == []


def test_the_limit_is_twenty_per_cent():
  at, above = (4.0, 5.4), (4.0, 5.41)  # of 7 s of work: 1.4 s.
  assert said(Stragglers(), *[at] * 3) == []
  assert len(said(Stragglers(), *[above] * 3)) == 1


def test_different_processes_in_turn_are_not_one_straggler():
  assert said(Stragglers(), SLOW, SLOW[::-1], SLOW, SLOW[::-1]) == []


def test_a_fast_process_does_not_make_the_others_slow():
  assert said(Stragglers(), *[(1.0, 4.0, 4.0, 4.0)] * 3) == []


def test_several_stragglers_are_one_line():
  rounds = [(4.0,) * 9 + (9.0, 8.0, 7.0)] * 3
  ((_, line),) = said(Stragglers(), *rounds)
  assert line.startswith("process 9 of 12 (h9) is slower")
  assert line.endswith("; also slow: process 10 (h10), process 11 (h11)")


def test_the_phase_is_the_one_in_which_it_lost_the_time():
  watch = Stragglers()
  slow = [
    a_step(4.0, others=4.0, learn=5.0),
    dataclasses.replace(a_step(4.0, others=4.0, assemble=4.0), host="h1"),
  ]
  lines = [line for step in range(3) for line in watch.lines(step, slow)]
  assert "most of it in packing rows: 4.00 s, the others 1.00 s" in lines[0]


def test_milliseconds_do_not_make_a_straggler():
  tiny = [dataclasses.replace(a_step(0.0), step_s=s, phases={}, waits={}) for s in (0.05, 0.1)]
  watch = Stragglers()
  assert [watch.lines(step, tiny) for step in range(5)] == [[]] * 5


def test_a_timer_separates_work_from_waiting():
  """The rule, end to end, with a fake clock: what process 0 waits is not its work."""
  now, waited = [0.0], [0.0]
  timer = timing.Timer(clock=lambda: now[0], waited=lambda: waited[0])
  with timer.span("step"):
    with timer.span("sample"):
      now[0] += 4.0
      now[0], waited[0] = now[0] + 3.0, waited[0] + 3.0  # an exchange.
    with timer.span("learn"):
      now[0] += 2.0
  assert timer.spans() == {"step": 9.0, "sample": 7.0, "learn": 2.0}
  assert timer.waits() == {"step": 3.0, "sample": 3.0, "learn": 0.0}
  assert timer.collect() == {"time/sample_s": 7.0, "time/learn_s": 2.0, "time/step_s": 9.0}
  assert timer.spans() == timer.waits() == {}
