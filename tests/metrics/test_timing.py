"""Spans of time: nesting, threads, collection."""

import threading

import pytest

from grpo_jax.metrics import timing


class FakeClock:
  """A clock that is moved by hand."""

  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


def test_a_span_includes_the_spans_inside_it():
  clock = FakeClock()
  timer = timing.Timer(clock)
  with timer.span("step"):
    clock.now += 1.0
    with timer.span("sample"):
      assert timer.open_spans == ("step", "sample")
      clock.now += 2.0
    clock.now += 0.5
  assert timer.open_spans == ()
  assert timer.collect() == {"time/step_s": 3.5, "time/sample_s": 2.0}


def test_spans_of_one_name_add_up_until_they_are_collected():
  clock = FakeClock()
  timer = timing.Timer(clock)
  for seconds in (1.0, 2.0):
    with timer.span("learn"):
      clock.now += seconds
  assert timer.collect() == {"time/learn_s": 3.0}
  assert timer.collect() == {}


def test_a_span_within_itself_is_counted_once():
  clock = FakeClock()
  timer = timing.Timer(clock)
  with timer.span("sample"), timer.span("sample"):
    clock.now += 2.0
  assert timer.collect() == {"time/sample_s": 2.0}


def test_an_open_span_is_reported_after_it_was_closed():
  clock = FakeClock()
  timer = timing.Timer(clock)
  with timer.span("step"):
    clock.now += 1.0
    assert timer.collect() == {}
    clock.now += 1.0
  assert timer.collect() == {"time/step_s": 2.0}


def test_a_span_left_by_an_exception_counts_and_closes():
  clock = FakeClock()
  timer = timing.Timer(clock)
  with pytest.raises(KeyError), timer.span("learn"):
    clock.now += 4.0
    raise KeyError("x")
  assert timer.open_spans == ()
  assert timer.collect() == {"time/learn_s": 4.0}


def test_spans_of_threads_do_not_nest_into_each_other():
  clock = FakeClock()
  timer = timing.Timer(clock)

  def work():
    with timer.span("sample"):  # the main thread holds a span of this name; this is another one.
      pass

  with timer.span("sample"):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    clock.now += 1.0
  assert timer.collect() == {"time/sample_s": 1.0}


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_name_that_would_break_the_metric_is_refused(name):
  with pytest.raises(ValueError, match="no slash"), timing.Timer().span(name):
    pass


def test_peak_memory_is_in_gib_and_holds_what_was_touched():
  block = bytearray(b"\x01") * (256 * 2**20)
  assert len(block) == 256 * 2**20
  assert 0.25 < timing.peak_rss_gib() < 64


def test_shares_of_the_phases_of_a_step_add_up_to_1():
  times = {"time/step_s": 8.0, "time/sample_s": 4.0, "time/learn_s": 3.0, "time/evaluate_s": 50.0}
  expected = {"time/sample_share": 0.5, "time/learn_share": 0.375, "time/other_share": 0.125}
  assert timing.phase_shares(times) == expected
  assert timing.phase_shares({"time/evaluate_s": 1.0}) == {}
