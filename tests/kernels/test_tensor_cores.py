"""The model of tensor cores has the errors that a GPU had; the tolerance from it sees faults."""

import functools

import conformance
import numpy as np
import pytest
import tensor_cores

COLUMNS = 1024
widths = pytest.mark.parametrize("width", list(tensor_cores.MEASURED))


@functools.cache
def case(width):
  """Returns one row of hidden states and a head in float64, and the exact logits."""
  hidden, head, _ = conformance.random_case(1, width, COLUMNS, dtype="bfloat16")
  hidden, head = (np.asarray(x.astype("float32"), np.float64) for x in (hidden, head))
  return hidden, head, hidden @ head.T


@functools.cache
def cut(width, step=tensor_cores.STEP, extra_bits=tensor_cores.EXTRA_BITS):
  """Returns the logits as tensor cores sum them up."""
  return tensor_cores.logits_of(*case(width)[:2], step=step, extra_bits=extra_bits)


def slope(width, *how):
  """Returns c of error = -c · logit, by least squares."""
  exact = case(width)[2]
  return -np.sum((cut(width, *how) - exact) * exact) / np.sum(exact**2)


@widths
def test_model_has_the_error_that_was_measured(width):
  assert slope(width) == pytest.approx(tensor_cores.MEASURED[width], rel=0.15)


@pytest.mark.parametrize(("step", "extra_bits"), [(8, 2), (32, 2), (16, 1), (16, 3)])
def test_other_steps_and_bits_do_not(step, extra_bits):
  assert slope(1536) == pytest.approx(tensor_cores.MEASURED[1536], rel=0.1)
  assert slope(1536, step, extra_bits) != pytest.approx(tensor_cores.MEASURED[1536], rel=0.1)


def outputs(logits):
  """Returns logprobs of all columns as targets, and the entropy, from one row of logits."""
  logp = logits[0] - np.logaddexp.reduce(logits[0])
  return logp, -(np.exp(logp) * logp).sum()


@widths
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_tolerance_holds_for_truncated_sums_and_sees_faults(width, temperature):
  exact, found = case(width)[2] / temperature, cut(width) / temperature
  rows = np.broadcast_to(exact, (COLUMNS, COLUMNS))
  allowed, of_entropy = tensor_cores.allowed(
    width, rows, np.arange(COLUMNS), conformance.TOLERANCES
  )
  right, entropy = outputs(exact)

  def agrees(logits, shift=0):
    logprobs, its_entropy = outputs(logits)
    return (np.abs(np.roll(logprobs, shift) - right) <= allowed).all(), (
      abs(its_entropy - entropy) <= of_entropy[0]
    )

  assert agrees(found) == (True, True)
  assert not agrees(found, shift=1)[0], "the logprob of the next column"
  assert agrees(found * 0.999) == (False, False), "another temperature"
  if temperature == 1.0:
    # A column of the mean probability has of 1024 columns what a tile of 128 has of 131,072.
    column = np.argmin(np.abs(right + np.log(COLUMNS)))
    assert not agrees(np.insert(np.delete(found, column, 1), column, -1e30, 1))[0], "a missing tile"
