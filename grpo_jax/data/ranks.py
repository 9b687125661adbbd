"""Converts the ranks of the responses of a group to rewards. Pure.

    p = place of a response, from 0 for the best, by its rank
    linear:      r = 1 - p / (G - 1)             evenly from 1 (best) to 0 (worst)
    reciprocal:  r = 1 / (1 + p)                 1, 1/2, 1/3, ...
    softmax:     r = exp(-p / τ) / Σ exp(-p / τ)  small τ: only the best is rewarded
    top:         r = 1 if p = 0 else 0           the best against all others
    negative:    r = -rank                       the ranks themselves, with their distances

Responses of equal rank always get equal rewards, so that nothing is learned from a tie.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from grpo_jax.registry import choose, function, in_one_line

# (places, places of the worst rank, ranks with the best lowest, temperature) → rewards.
_Mapping = Callable[[np.ndarray, float, np.ndarray, float], np.ndarray]

BEST = ("lowest", "highest")


def places(
  ranks: Float[np.ndarray, " G"] | Sequence[float | int], *, ties: str = "mean"
) -> Float[np.ndarray, " G"]:
  """Returns the place of every response, 0 for the lowest rank.

  Args:
    ranks: Rank of each response; only their order matters.
    ties: Place of responses of equal rank, if b have a lower rank and n are equal:
      "mean" b + (n - 1) / 2, the mean of the places that they occupy; "best" b; "worst"
      b + n - 1; "dense" the number of different lower ranks.

  Raises:
    ValueError: The rule for ties is unknown.
  """
  values = np.asarray(ranks, np.float64)
  return choose("rule for ties", ties, TIES)(values)


def rewards(
  ranks: Float[np.ndarray, " G"] | Sequence[float | int],
  *,
  mapping: str = "linear",
  ties: str = "mean",
  best: str = "lowest",
  temperature: float = 1.0,
) -> Float[np.ndarray, " G"]:
  """Returns the reward of every response of a group.

  Args:
    ranks: Rank of each response, finite.
    mapping: Key of MAPPINGS (see above), or the dotted path of a function that
      gets the ranks [G] and returns rewards [G].
    ties: Rule for ties; see `places`.
    best: Whether rank 1 is better than 2 ("lowest") or worse ("highest").
    temperature: Temperature τ of "softmax", above 0, in places.

  Raises:
    ValueError: A name is unknown, or the function does not return G finite rewards.
  """
  check(mapping=mapping, ties=ties, best=best, temperature=temperature)
  values = np.asarray(ranks, np.float64)
  if "." in mapping:
    return _own(mapping, values)
  ordered = values if best == "lowest" else -values
  place = places(ordered, ties=ties)
  last = len(np.unique(ordered)) - 1 if ties == "dense" else len(ordered) - 1
  return MAPPINGS[mapping](place, float(max(last, 1)), ordered, temperature)


def check(*, mapping: str, ties: str, best: str, temperature: float) -> None:
  """Raises ValueError for options that `rewards` would reject."""
  if "." in mapping:
    function(mapping)
  else:
    choose("mapping of ranks", mapping, MAPPINGS)
  choose("rule for ties", ties, TIES)
  if best not in BEST:
    raise ValueError(f"the best rank is 'lowest' or 'highest', got {best!r}")
  if not temperature > 0:
    raise ValueError(f"the temperature of ranks must be above 0, got {temperature}")


def _own(path: str, ranks: np.ndarray) -> np.ndarray:
  """Calls the user's function and checks its result."""
  with in_one_line(f"offline.rank_reward {path} failed", path):
    result = np.asarray(function(path)(ranks), np.float64)
  if result.shape != ranks.shape or not np.isfinite(result).all():
    raise ValueError(f"{path} must return {len(ranks)} finite rewards for {ranks}, got {result}")
  return result


def _softmax(place: np.ndarray, temperature: float) -> np.ndarray:
  weights = np.exp(-(place - place.min()) / temperature)
  return weights / weights.sum()


def _lower(values: np.ndarray) -> np.ndarray:
  """Returns for each value the number of lower values."""
  return (values[None, :] < values[:, None]).sum(axis=1).astype(np.float64)


def _equal(values: np.ndarray) -> np.ndarray:
  """Returns for each value the number of equal values, itself included."""
  return (values[None, :] == values[:, None]).sum(axis=1).astype(np.float64)


TIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  "mean": lambda values: _lower(values) + (_equal(values) - 1) / 2,
  "best": _lower,
  "worst": lambda values: _lower(values) + _equal(values) - 1,
  "dense": lambda values: np.unique(values, return_inverse=True)[1].astype(np.float64),
}
MAPPINGS: dict[str, _Mapping] = {
  "linear": lambda place, last, ranks, temperature: 1 - place / last,
  "reciprocal": lambda place, last, ranks, temperature: 1 / (1 + place),
  "softmax": lambda place, last, ranks, temperature: _softmax(place, temperature),
  "top": lambda place, last, ranks, temperature: (ranks == ranks.min()).astype(np.float64),
  "negative": lambda place, last, ranks, temperature: -ranks,
}
