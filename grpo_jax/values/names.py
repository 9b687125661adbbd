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
  """Returns the dotted name that a mistyped one probably means, in a list; empty: none is near.

  A similar name in the same section comes first, then the same name in another section, then any
  other whose similarity is at least `cutoff`.
  """
  section, _, last = name.rpartition(".")
  valid = list(valid)
  beside = {each.rpartition(".")[2]: each for each in valid if each.rpartition(".")[0] == section}
  same_last = [each for each in valid if each.rpartition(".")[2] == last]
  return (
    [beside[each] for each in nearest(last, beside, cutoff=0.6)]
    or nearest(name, same_last, cutoff=0.0)
    or nearest(name, valid, cutoff=cutoff)
  )


def hint(name: str, valid: Iterable[str]) -> str:
  """Returns " (did you mean 'x'?)" for the valid name nearest to `name`; "" if none is near."""
  near = nearest(name, valid)
  return f" (did you mean {near[0]!r}?)" if near else ""
