"""Sequences of numbers that share their beginnings, which are kept once. Pure.

The prompts of a conversation grow from turn to turn. Kept one by one, their size is quadratic in
the number of turns; as a tree of what they have in common (a radix tree), it is that of the text.
"""

import dataclasses
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Int

V = TypeVar("V")


@dataclasses.dataclass(eq=False, slots=True)
class Kept(Generic[V]):
  """A sequence in the tree: all numbers from the root to here."""

  own: Int[np.ndarray, " own"]  # the numbers after those of the parent.
  parent: "Kept[V] | None"
  values: list[V] = dataclasses.field(default_factory=list)  # of this whole sequence.
  children: "dict[int, Kept[V]]" = dataclasses.field(default_factory=dict)  # by first number.

  @property
  def whole(self) -> Int[np.ndarray, " whole"]:
    """All numbers of the sequence."""
    parts, node = [], self
    while node is not None:
      parts.append(node.own)
      node = node.parent
    return np.concatenate(parts[::-1])


class Prefixes(Generic[V]):
  """Sequences with values."""

  def __init__(self):
    self._root: Kept[V] = Kept(np.zeros(0, np.int32), None)

  def longest(self, ids: Int[np.ndarray, " whole"]) -> V | None:
    """Returns the first value of the longest kept sequence with which these numbers begin."""
    found = [node.values[0] for node in self._along(ids) if node.values]
    return found[-1] if found else None

  def add(
    self, ids: Int[np.ndarray, " more"], value: V, *, after: Kept[V] | None = None
  ) -> Kept[V]:
    """Keeps a sequence with a value.

    Args:
      ids: Numbers of the sequence, without those of `after`.
      value: Its value.
      after: Kept sequence with which it begins; None: none is known.
    """
    place = 0
    for node in self._along(ids, after):
      place += 0 if node is after else len(node.own)
    if place < len(ids):
      node = self._with_branch(node, ids[place:])
    node.values.append(value)
    return node

  def remove(self, node: Kept[V], value: V) -> None:
    """Removes a value of a sequence, and what no other sequence needs."""
    node.values.remove(value)
    while node.parent is not None and not node.values and not node.children:
      del node.parent.children[int(node.own[0])]
      node = node.parent

  def _along(
    self, ids: Int[np.ndarray, " more"], after: Kept[V] | None = None
  ) -> Iterator[Kept[V]]:
    """Yields the kept sequences with which these numbers begin, shortest first.

    Args:
      ids: Numbers after those of `after`.
      after: Kept sequence that is yielded first; None: the empty one.
    """
    node, place = after or self._root, 0
    while node is not None:
      yield node
      child = node.children.get(int(ids[place])) if place < len(ids) else None
      if child is not None and not np.array_equal(ids[place : place + len(child.own)], child.own):
        return
      node, place = child, place + (0 if child is None else len(child.own))

  def _with_branch(self, node: Kept[V], rest: Int[np.ndarray, " rest"]) -> Kept[V]:
    """Adds numbers after a sequence; splits a child that begins with some of them."""
    child = node.children.get(int(rest[0]))
    if child is not None:
      length = min(len(rest), len(child.own))
      same = int(np.argmin(np.append(rest[:length] == child.own[:length], False)))
      middle = Kept(child.own[:same], node)
      node.children[int(rest[0])] = middle
      middle.children[int(child.own[same])] = child
      child.own, child.parent = child.own[same:], middle
      node, rest = middle, rest[same:]
      if not len(rest):
        return node
    made = Kept(rest.copy(), node)  # a copy, because `rest` is a view of the whole prompt.
    node.children[int(rest[0])] = made
    return made
