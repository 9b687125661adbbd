"""Calls of many threads as batches: keys apart, sizes, failures, cancelling, the end."""

import threading

import pytest

from grpo_jax.environments.scoring.batcher import Batcher


class Doubler:
  """Doubles numbers; remembers its batches; waits for a gate, so that calls gather."""

  def __init__(self):
    self.gate = threading.Event()
    self.started = threading.Event()
    self.batches = []

  def __call__(self, key, items):
    self.started.set()
    assert self.gate.wait(10)
    self.batches.append((key, list(items)))
    if 13 in items:
      raise ArithmeticError("13")
    return [2 * item for item in items]


@pytest.fixture
def doubler():
  return Doubler()


@pytest.fixture
def batcher(doubler):
  made = Batcher(doubler, key=lambda item: item % 2, max_items=3, wait_s=0.0)
  first = made.submit(100)  # its batch holds the thread while others gather.
  assert doubler.started.wait(10)
  yield made
  doubler.gate.set()
  assert first.result(10) == 200
  made.close()


def test_what_gathers_while_a_batch_runs_is_batched_by_key_and_size(doubler, batcher):
  futures = [batcher.submit(item) for item in (1, 2, 3, 4, 5, 6, 7, 9)]
  doubler.gate.set()
  assert [f.result(10) for f in futures] == [2, 4, 6, 8, 10, 12, 14, 18]
  assert doubler.batches == [(0, [100]), (0, [2, 4, 6]), (1, [1, 3, 5]), (1, [7, 9])]
  assert batcher.counts() == {"calls": 9.0, "batches": 4.0, "failed_batches": 0.0}


def test_a_batch_that_raises_fails_its_own_calls_only(doubler, batcher):
  futures = [batcher.submit(item) for item in (13, 2, 15)]
  doubler.gate.set()
  assert futures[1].result(10) == 4
  for future in (futures[0], futures[2]):
    with pytest.raises(ArithmeticError, match="13"):
      future.result(10)
  assert batcher.submit(8).result(10) == 16
  assert batcher.counts()["failed_batches"] == 1.0


def test_a_cancelled_call_is_not_computed(doubler, batcher):
  kept, given_up = batcher.submit(2), batcher.submit(4)
  assert given_up.cancel()
  doubler.gate.set()
  assert kept.result(10) == 4
  assert doubler.batches[1:] == [(0, [2])]


def test_closing_answers_what_is_queued_and_takes_nothing_more(doubler, batcher):
  queued = batcher.submit(2)
  doubler.gate.set()
  batcher.close()
  assert queued.result(0) == 4
  with pytest.raises(RuntimeError, match="closed"):
    batcher.submit(2)


def test_a_full_batch_does_not_wait():
  batcher = Batcher(lambda key, items: items, key=lambda item: 0, max_items=2, wait_s=3600.0)
  futures = [batcher.submit(item) for item in (1, 2)]
  assert [f.result(10) for f in futures] == [1, 2]
  batcher.close()


def test_senseless_settings_are_refused():
  with pytest.raises(ValueError, match="max_items >= 1"):
    Batcher(lambda key, items: items, key=lambda item: 0, max_items=0, wait_s=0.0)
