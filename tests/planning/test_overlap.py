"""The model of engine and trainer, against times worked out by hand."""

import itertools
import math

import numpy as np
import pytest

from grpo_jax.planning import overlap
from grpo_jax.planning.overlap import Form, Times

SYNCHRONOUS = Form(max_staleness=0)
AHEAD = Form(max_staleness=1)
ONE = Times(sample=1.0, learn=1.0, sync=1.0)
EQUAL = [[[10] * 4] * 4]


def forecast(times, lengths, form, **options):
  return overlap.forecast(times, lengths, form, **{"rows": 16, "row_cost": 0.0, **options})


@pytest.mark.parametrize(
  "sample, learn, sync",
  [(60.0, 40.0, 2.0), (40.0, 60.0, 2.0), (50.0, 50.0, 0.0), (5.0, 0.0, 1.0), (3.0, 300.0, 9.0)],
)
def test_with_equal_lengths_the_longer_of_the_two_takes_all_the_time(sample, learn, sync):
  times = Times(sample=sample, learn=learn, sync=sync)
  assert times.synchronous == sample + learn + sync
  assert times.one_ahead == max(sample, learn) + sync
  alone = forecast(times, EQUAL, SYNCHRONOUS)
  assert alone.step_s == pytest.approx(sample + learn + sync)
  assert alone.engine_idle_share == pytest.approx((learn + sync) / (sample + learn + sync))
  assert alone.trainer_idle_share == pytest.approx((sample + sync) / (sample + learn + sync))
  for form in overlap.FORMS:
    found = forecast(times, EQUAL, form)
    together = max(sample, learn) + sync
    assert found.step_s == pytest.approx(together), form
    assert found.engine_idle_share == pytest.approx(1 - sample / together)
    assert found.trainer_idle_share == pytest.approx(1 - learn / together)


@pytest.mark.parametrize("order", ["prompt", "finished"])
def test_a_long_completion_is_waited_for_k_steps_later(order):
  """Groups of one completion, 10, 10, 10 and 40 tokens a step, on 4 rows, and 20 s of learning.

  Alone, a step samples for 40 s: one token a second. In flight the last group begins 10 s after its
  block was admitted, since one of the rows still has the long completion of the block before, and
  ends 50 s after. The step that learns from it was k steps later, so k + 1 steps take at least the
  20 s of learning before the block was admitted, and 50. The rows would be full with 17.5 s a step.
  """
  lengths = [[[10], [10], [10], [40]]]
  times = Times(sample=40.0, learn=20.0, sync=0.0)
  seconds = lambda form: forecast(times, lengths, form, rows=4, steps=400).step_s
  assert seconds(SYNCHRONOUS) == pytest.approx(60)
  assert seconds(AHEAD) == pytest.approx(40)
  for k in (1, 2, 4):
    form = Form(max_staleness=k, order=order, in_flight_updates=True)
    assert seconds(form) == pytest.approx(max(70 / (k + 1), 20), rel=2e-3), k


@pytest.mark.parametrize("k", [1, 2])
def test_without_updates_in_flight_a_larger_staleness_has_no_use(k):
  """Blocks of 60 and of 20 s in turn, and 40 s of learning: steps take 60 and 40 s.

  In flight with k = 2 the engine samples on while the trainer learns, and both are always busy.
  """
  lengths, times = [[[60]], [[20]]], Times(sample=40.0, learn=40.0, sync=0.0)
  assert forecast(times, lengths, Form(max_staleness=k), rows=1).step_s == pytest.approx(50)
  in_flight = Form(max_staleness=2, in_flight_updates=True)
  assert forecast(times, lengths, in_flight, rows=1).step_s == pytest.approx(40, rel=0.03)


def test_a_longer_row_of_fewer_completions_costs_its_fixed_time():
  """2 completions of 10 and 30 tokens with c = 1: 10 tokens at 1 + 2, then 20 at 1 + 1: 70 units.

  Then 3 a row of them on one row: 10 + 30 tokens at 1 + 1 = 80 units.
  """
  lengths = [[[10, 30]]]
  times = Times(sample=70.0, learn=0.0, sync=0.0)
  assert forecast(times, lengths, SYNCHRONOUS, rows=2, row_cost=1.0).step_s == pytest.approx(70)
  decoder = overlap._Decoder(rows=2, row_cost=1.0, token_s=1.0)
  decoder.submit([0], [[10, 30]])
  assert decoder.run(30.0) == [] and decoder.until_a_group() == [0]
  assert decoder.now == pytest.approx(70) and decoder.busy_s == pytest.approx(70)
  alone = overlap._Decoder(rows=1, row_cost=1.0, token_s=1.0)
  alone.submit([0], [[10, 30]])
  alone.until_a_group()
  assert alone.now == pytest.approx(80)


def test_blocks_in_turn_do_not_share_rows():
  """Two blocks of 10 and 40 tokens in 4 rows end at 40 and 80; together the second ends at 50."""
  ends = []
  for in_turn in (True, False):
    decoder = overlap._Decoder(rows=4, row_cost=0.0, token_s=1.0)
    decoder.in_turn = in_turn
    for block in (range(4), range(4, 8)):
      decoder.submit(block, [[10], [10], [10], [40]])
    found = set()
    while len(found) < 8:
      found.update(decoder.until_a_group())
    ends.append(decoder.now)
  # Not in turn: 10, 10, 10 end at 10, the second block's three 10s at 20, its 40 begins at 20.
  assert ends == [80.0, 60.0]


def test_nothing_is_faster_than_the_trainer_or_an_engine_with_full_rows():
  lengths = overlap.lognormal_lengths(
    steps=6, groups=16, group_size=8, mean=300.0, sigma=0.9, longest=2000, seed=0
  )
  rows, cost = 64, 0.01
  tokens = [sum(map(sum, step)) for step in lengths]
  # One decoding step of full rows takes 1 + 64 c and makes 64 tokens.
  least = np.mean(tokens) / rows * (1 + rows * cost)
  decoder = overlap._Decoder(rows=rows, row_cost=cost, token_s=1.0)
  alone = []
  for step in lengths:
    start = decoder.now
    decoder.submit(range(16), step)
    for _ in range(16):
      decoder.until_a_group()
    alone.append(decoder.now - start)
  full = least / np.mean(alone)  # share of the time of sampling that full rows would take.
  assert 0.3 < full < 0.95
  for learn in (0.0, 0.5, 2.0):
    times = Times(sample=1.0, learn=learn, sync=0.1)
    before = times.one_ahead
    for k in (1, 2, 4):
      form = Form(max_staleness=k, in_flight_updates=True)
      found = forecast(times, lengths, form, rows=rows, row_cost=cost, steps=60)
      assert max(learn, 0.98 * full) + 0.1 <= found.step_s * 1.001 <= 1.05 * before
      before = found.step_s
    if learn < 1:
      assert before == pytest.approx(max(full, learn) + 0.1, rel=0.1)


def test_drawn_lengths_have_the_mean_and_the_limit_that_were_asked_for():
  wide = dict(steps=20, groups=32, group_size=16, longest=100_000, seed=1)
  tokens = np.asarray(overlap.lognormal_lengths(mean=500.0, sigma=0.9, **wide))
  assert tokens.shape == (20, 32, 16) and tokens.min() >= 1
  assert tokens.mean() == pytest.approx(500, rel=0.03)
  assert np.log(tokens).std() == pytest.approx(0.9, rel=0.03)
  equal = overlap.lognormal_lengths(mean=500.0, sigma=0.0, **wide)
  assert {*itertools.chain.from_iterable(itertools.chain.from_iterable(equal))} == {500}
  cut = overlap.lognormal_lengths(mean=500.0, sigma=0.9, **{**wide, "longest": 800})
  assert np.max(cut) == 800


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: Times(sample=0.0, learn=1.0, sync=1.0), "Times.sample must be above 0, got 0.0"),
    (
      lambda: Times(sample=1.0, learn=-1.0, sync=1.0),
      "Times.learn must be finite and at least 0, got",
    ),
    (lambda: Times(sample=1.0, learn=1.0, sync=math.nan), "Times.sync must be finite"),
    (lambda: forecast(ONE, [], AHEAD), "at least one step"),
    (
      lambda: forecast(ONE, [[[1]], [[1], [2]]], AHEAD),
      r"got \[1, 2\] groups",
    ),
    (
      lambda: forecast(ONE, EQUAL, AHEAD, rows=0),
      "got rows=0, steps=40, row_cost=0.0",
    ),
  ],
)
def test_what_cannot_be_simulated_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
