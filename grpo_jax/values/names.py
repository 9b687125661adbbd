"""Suggests the valid name that a user probably meant. Pure."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str], *, count: int = 1, cutoff: float = 0.5) -> list[str]:
  """Returns the valid names that are most similar to a mistyped one, the most similar first.

  Capital letters do not count: "gsm9k" is near "GSM8K".

  Args:
    name: Name that was given.
    valid: Names that exist.
    count: Largest number of names to return.
    cutoff: Smallest similarity, from 0 to 1, where 1 means equal.
  """
  by_small: dict[str, list[str]] = {}
  for each in valid:
    by_small.setdefault(each.lower(), []).append(each)
  near = difflib.get_close_matches(name.lower(), list(by_small), n=count, cutoff=cutoff)
  return [each for small in near for each in by_small[small]][:count]


def nearest_field(name: str, valid: Iterable[str], *, cutoff: float) -> list[str]:
  """Returns the dotted names that a mistyped one probably means; empty: none is near.

  A similar name in the same section comes first, then the same name in another section, then a
  very similar one there, then any other whose similarity is at least `cutoff`.
  """
  section, _, last = name.rpartition(".")
  valid = list(valid)
  beside = {each.rpartition(".")[2]: each for each in valid if each.rpartition(".")[0] == section}
  similar = nearest(last, {each.rpartition(".")[2] for each in valid}, cutoff=0.85)
  return (
    [beside[each] for each in nearest(last, beside, cutoff=0.6)]
    or _with_last(last, name, valid)
    or [each for one in similar for each in _with_last(one, name, valid)]
    or nearest(name, valid, cutoff=cutoff)
  )


def _with_last(last: str, name: str, valid: Iterable[str]) -> list[str]:
  """Returns the names that end in a last part: the one that is near enough to `name`, or three."""
  found = [each for each in valid if each.rpartition(".")[2] == last]
  return nearest(name, found, cutoff=0.85) or nearest(name, found, count=3, cutoff=0.0)


def did_you_mean(near: Iterable[str]) -> str:
  """Returns " (did you mean 'x' or 'y'?)"; "" if there is no name."""
  meant = " or ".join(map(repr, near))
  return f" (did you mean {meant}?)" if meant else ""


def hint(name: str, valid: Iterable[str]) -> str:
  """Returns " (did you mean 'x'?)" for the valid name nearest to `name`; "" if none is near."""
  return did_you_mean(nearest(name, valid))
