"""Numbers of an evaluation, with how far they can be trusted. Pure.

Prompts are what is drawn at random: attempts at one prompt are not independent of each other. Every
number is therefore a mean over prompts of a value per prompt, and its uncertainty follows from how
these values differ.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from grpo_jax.metrics.scored_groups import pass_at_k

Values = Float[np.ndarray, " _"]  # of each prompt.

RESAMPLES = 2000
_AT_ONCE = 4_000_000  # drawn numbers of the bootstrap that are in memory at the same time.


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean over prompts.

  Attributes:
    value: The mean; NaN of no prompts.
    error: Standard error of the mean; NaN of fewer than two prompts.
    low: Lower end of the 95 % bootstrap interval.
    high: Upper end of that interval.
  """

  value: float
  error: float
  low: float
  high: float


def estimate(values: Values, *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
  """Returns the mean of values per prompt, its standard error and a bootstrap interval.

      s / √n,  s² = Σ (xᵢ - x̄)² / (n - 1)

  With one value per prompt that is the standard error clustered by prompt, whatever the number of
  attempts at each.

  Args:
    values: Value of each prompt.
    seed: Random seed of the bootstrap.
    resamples: Number of resamples of the prompts.

  Reference:
    Miller 2024, arXiv:2411.00640, sections 2.1 and 2.2; percentile interval: Efron 1979.
  """
  if not len(values):
    return Estimate(math.nan, math.nan, math.nan, math.nan)
  values = np.asarray(values, np.float64)
  means = resampled_means(values, seed=seed, resamples=resamples)
  low, high = np.quantile(means, (0.025, 0.975))
  return Estimate(float(values.mean()), standard_error(values), float(low), float(high))


def standard_error(values: Values) -> float:
  """Returns the standard error of the mean of values per prompt; NaN of fewer than two."""
  return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def resampled_means(
  values: Values, *, seed: int, resamples: int
) -> Float[np.ndarray, " resamples"]:
  """Returns the means of samples of the prompts, drawn with replacement."""
  rng = np.random.default_rng(seed)
  count = len(values)
  rows = max(1, _AT_ONCE // count)
  parts = [min(rows, resamples - start) for start in range(0, resamples, rows)]
  return np.concatenate(
    [values[rng.integers(0, count, (part, count))].mean(axis=1) for part in parts]
  )


def pass_values(solved: Sequence[int], attempts: Sequence[int], k: int) -> Values:
  """Returns the unbiased estimate of pass@k of each prompt; see `scored_groups.pass_at_k`.

  Args:
    solved: Number of attempts at each prompt that solve it.
    attempts: Number of attempts at each prompt, at least k.
    k: Number of attempts; one of them has to be right.
  """
  known = {pair: pass_at_k(pair[1], pair[0], k) for pair in set(zip(solved, attempts, strict=True))}
  return np.asarray([known[pair] for pair in zip(solved, attempts, strict=True)], np.float64)


def majority_at_k(votes: Sequence[int], right: Sequence[float], unanswered: int, k: int) -> float:
  """Returns the chance that the majority of k attempts is right, drawn from the n of a prompt.

  The k attempts are any of the C(n, k) choices, all equally likely. The answer with the most votes
  among them wins. Of several with equally many, each wins with the same chance. An attempt without
  an answer does not vote; if none of the k votes, the majority is wrong. With k = 1 this is the
  accuracy.

  The mean over all choices is computed exactly: for each right answer i and each number of votes t
  that it may win with, by the generating function of the other answers,

      C(cᵢ, t) Π_{j≠i} (Σ_{s<t} C(cⱼ, s) xˢ + y C(cⱼ, t) xᵗ) (1 + x)ᵘ

  whose coefficient of xᵏ⁻ᵗ yʳ counts the choices in which r other answers have t votes, too.

  Args:
    votes: Number of attempts that gave each answer, cᵢ ≥ 1.
    right: For each answer, the share of its attempts that were judged right, usually 0 or 1.
    unanswered: Number of attempts without an answer, u.
    k: Number of attempts that vote.

  Raises:
    ValueError: The value of k is not between 1 and n.
  """
  attempts = sum(votes) + unanswered
  if not 1 <= k <= attempts:
    raise ValueError(f"maj@k needs 1 <= k <= n, got n={attempts} k={k}")
  favorable = 0.0
  for place, (count, share) in enumerate(zip(votes, right, strict=True)):
    others = [*votes[:place], *votes[place + 1 :]]
    for wins in range(1, min(count, k) + 1) if share else ():
      ways = _ways(others, unanswered, wins=wins, left=k - wins)
      shared = sum(number / (ties + 1) for ties, number in enumerate(ways))
      favorable += share * math.comb(count, wins) * shared
  return favorable / math.comb(attempts, k)


def _ways(others: Sequence[int], unanswered: int, *, wins: int, left: int) -> list[int]:
  """Returns, by the number of ties, how many choices of `left` attempts let no other answer win."""
  most_ties = left // wins
  # ways[s][r]: choices of s attempts in which r answers have `wins` votes.
  ways = [[0] * (most_ties + 1) for _ in range(left + 1)]
  for size in range(min(unanswered, left) + 1):
    ways[size][0] = math.comb(unanswered, size)
  for count in others:
    added = [[0] * (most_ties + 1) for _ in range(left + 1)]
    for taken in range(min(count, wins, left) + 1):
      chosen, is_tie = math.comb(count, taken), taken == wins
      for size in range(left - taken + 1):
        for ties in range(most_ties + 1 - is_tie):
          if ways[size][ties]:
            added[size + taken][ties + is_tie] += chosen * ways[size][ties]
    ways = added
  return ways[left]


@dataclasses.dataclass(frozen=True)
class Paired:
  """The difference of two models on the same prompts: the second minus the first.

  Attributes:
    difference: Mean difference of the values per prompt, its standard error and interval.
    better: Number of prompts on which the second has the larger value.
    worse: Number of prompts on which it has the smaller one.
    p_value: Result of the exact two-sided sign test (McNemar's, where a value is 0 or 1): the
      chance of a split at least as uneven if both were equally good.
  """

  difference: Estimate
  better: int
  worse: int
  p_value: float


def compare(first: Values, second: Values, *, seed: int = 0) -> Paired:
  """Compares two models that attempted the same prompts, in the same order.

  The standard error of the mean difference accounts for prompts that are hard for both; it is
  smaller than that of two independent evaluations if the models agree on what is hard.

  Args:
    first: Value of each prompt for one model.
    second: Value of each prompt for the other one.
    seed: Random seed of the bootstrap.

  Raises:
    ValueError: The numbers of prompts differ.

  Reference:
    Miller 2024, arXiv:2411.00640, section 4.2; McNemar 1947.
  """
  if len(first) != len(second):
    raise ValueError(f"a paired comparison needs the same prompts, got {len(first)}, {len(second)}")
  change = np.asarray(second, np.float64) - np.asarray(first, np.float64)
  better, worse = int((change > 0).sum()), int((change < 0).sum())
  return Paired(estimate(change, seed=seed), better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
  """Returns the p value of the exact two-sided sign test; 1 if nothing differs."""
  count = better + worse
  tail = sum(math.comb(count, i) for i in range(min(better, worse) + 1))
  return min(1.0, 2 * tail / 2**count)
