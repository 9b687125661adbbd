"""What the tensor cores of Hopper do to a float32 sum, in NumPy, and the tolerance it asks for.

wgmma adds sixteen products of bfloat16 to a float32 sum in one step. It aligns these numbers with
the largest of them, cuts each two bits behind the last bit of a float32, adds what is left
exactly, and cuts the result to a float32. Nothing is rounded to nearest, so every step takes a
little of the sum's size, and the losses add up instead of cancelling.

Error of a logit a of width D, in S = D/16 steps, with A_s the sum after s of them:

    a step loses half a unit in the last place on average    at most 2⁻²⁴ |A_s|, towards 0
    sums that end in a are a·s/S on average                  in all at most 2⁻²⁵ (S + 1) |a|
    of a logprob, log p = a_t - log Σ exp a_v                2⁻²⁵ (S + 1) (|a_t| + Σ p_v |a_v|)
    of an entropy, dH = -Σ p_v (log p_v + H) da_v            2⁻²⁵ (S + 1) Σ p_v |log p_v + H| |a_v|

The mean loss is about half of this bound: a unit is 2⁻²³ of the smallest number that has it and
2⁻²⁴ of the largest, and steps whose products are larger than their sum lose less. The other half
covers what a single logit differs from the mean, five standard deviations of 0.14 · 2⁻²⁴ S σ for
logits of standard deviation σ. A temperature divides logits and errors alike.

How the hardware adds is not documented. It was found here by comparison: see `MEASURED`.
"""

import numpy as np

STEP = 16  # elements of D in one step of a bfloat16 wgmma.
EXTRA_BITS = 2  # behind the last of float32, kept in a step.
# D → c, where error = -c · logit, of every form of the head on an H200 (2026-11-27).
MEASURED = {576: 0.42e-6, 1536: 1.30e-6, 3584: 3.25e-6}


def logits_of(hidden, head, *, step=STEP, extra_bits=EXTRA_BITS):
  """Returns hidden · headᵀ, [N V], as tensor cores sum it up.

  Args:
    hidden: Numbers that bfloat16 has, in float64, [N D].
    head: The same, [V D].
    step: Elements of D that are added at once.
    extra_bits: Bits that are kept in a step behind the last of float32.
  """
  sums = np.zeros((len(hidden), len(head)))
  for at in range(0, hidden.shape[1], step):
    products = hidden[:, None, at : at + step] * head[None, :, at : at + step]
    largest = np.maximum(np.abs(products).max(axis=2), np.abs(sums))
    unit = _unit(largest) * 2.0**-extra_bits
    aligned = np.trunc(products / unit[..., None]).sum(axis=2) + np.trunc(sums / unit)
    sums = aligned * unit
    sums = np.trunc(sums / _unit(sums)) * _unit(sums)
  return sums


def cut_off(width: int) -> float:
  """Returns the share of a logit that its sum may lose: see the error analysis above."""
  return 2.0**-25 * (width / STEP + 1)


def allowed(width: int, logits, targets, tolerances) -> tuple[np.ndarray, np.ndarray]:
  """Returns the allowed errors of logprobs and of entropies, [N] each.

  Args:
    width: Width D.
    logits: Exact logits, divided by the temperature, [N V].
    targets: Token ids.
    tolerances: Tolerances "logprob" and "entropy" of sums that are rounded to nearest.
  """
  logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
  p = np.exp(logp)
  entropy = -(p * logp).sum(axis=1, keepdims=True)
  of_target = np.abs(np.take_along_axis(logits, targets[:, None], axis=1)[:, 0])
  of_logprob = of_target + (p * np.abs(logits)).sum(axis=1)
  of_entropy = (p * np.abs(logp + entropy) * np.abs(logits)).sum(axis=1)
  return (
    tolerances["logprob"] + cut_off(width) * of_logprob,
    tolerances["entropy"] + cut_off(width) * of_entropy,
  )


def _unit(x):
  """Returns the unit in the last place of float32 numbers of this size; the smallest for 0."""
  return 2.0 ** (np.maximum(np.frexp(x)[1] - 1, -126) - 23)
