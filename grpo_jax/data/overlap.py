"""Counts the evaluation prompts that are also in the training data."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.data.loaders import Loader
from grpo_jax.data.prompts import Dataset

LONGEST_S = 5.0  # after which no further training row is compared.


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
  """How much of an evaluation set is also in the training data.

  Attributes:
    prompts: Number of prompts of the set.
    shared: Number of these that are in the training data, by what they ask.
    same: Number of these whose whole row is there, of the same place, seed or content.
    compared: Number of training rows that were compared.
    is_complete: Whether these are all rows of the training data, or all that the run reads.
    by_chance: Whether a task has drawn all that is shared again, from other seeds.
  """

  prompts: int
  shared: int
  same: int
  compared: int
  is_complete: bool
  by_chance: bool

  @property
  def is_trained(self) -> bool:
    """Whether nothing of the set is held out."""
    return 0 < self.prompts == self.same


def count(
  loaders: Sequence[Loader],
  held_out: Mapping[str, Dataset],
  *,
  limit: int,
  reads: int,
  longest_s: float = LONGEST_S,
) -> dict[str, Overlap]:
  """Compares the rows of evaluation sets with those of the training data.

  Two rows are the same prompt if they ask the same, apart from white space; see `Dataset.question`.
  All training rows are compared, in the order in which the run reads them, until `longest_s` have
  passed. Of a task that draws its rows from seeds, only those that the run can read are compared,
  and those of equal seeds: any number of rows could be drawn, and some are equal by chance.

  Args:
    loaders: Loaders of the training data; they do not move.
    held_out: Evaluation sets by name.
    limit: Number of rows of each set that are evaluated.
    reads: Number of prompts that the run takes, at most.
    longest_s: Longest time of the comparison, in seconds.

  Returns:
    The overlap of each set, by its name.
  """
  deadline = time.monotonic() + longest_s
  asked = {name: _asked(dataset, limit) for name, dataset in held_out.items()}
  wanted = {digest for rows in asked.values() for digests in rows.values() for digest in digests}
  found: dict[bytes, bool] = {}  # digest → whether it was only seen in rows that a task draws.
  compared, is_complete = 0, True
  for dataset, row in _read(loaders, reads) if wanted else ():
    if len(found) == len(wanted):
      break
    if time.monotonic() > deadline:
      is_complete = False
      break
    compared += 1
    for digest in wanted.intersection(_digests(dataset, dataset.part.source_row(row)) or ()):
      found[digest] = found.get(digest, True) and _seeds(dataset) is not None
  trained = [dataset for loader in loaders for dataset in loader.datasets]
  overlaps = {}
  for name, rows in asked.items():
    same = {row for row, (_, whole) in rows.items() if found.get(whole) is False}
    same |= _same_place(held_out[name], rows, trained)
    shared = same | {row for row, (question, _) in rows.items() if question in found}
    overlaps[name] = Overlap(
      prompts=len(rows),
      shared=len(shared),
      same=len(same),
      compared=compared,
      is_complete=is_complete,
      by_chance=bool(shared) and not same and all(found[rows[row][0]] for row in shared),
    )
  return overlaps


def _asked(dataset: Dataset, limit: int) -> dict[int, tuple[bytes, bytes]]:
  """Returns the digests of the rows of a set that are evaluated and can be read, by number."""
  rows = (dataset.part.source_row(row) for row in range(min(limit, dataset.part.rows)))
  found = {row: _digests(dataset, row) for row in rows}
  return {row: digests for row, digests in found.items() if digests is not None}


def _same_place(
  dataset: Dataset, asked: Mapping[int, tuple[bytes, bytes]], trained: Sequence[Dataset]
) -> set[int]:
  """Returns the rows of a set that are rows of the training data, by their places or seeds."""
  found = set()
  for row, digests in asked.items():
    for each in trained:
      number = _counterpart(dataset, row, each)
      if number is not None and each.part.takes(number) and _digests(each, number) == digests:
        found.add(row)
  return found


def _counterpart(dataset: Dataset, row: int, trained: Dataset) -> int | None:
  """Returns the number of the training row of equal seed or place; None: there is none."""
  seeds, others = _seeds(dataset), _seeds(trained)
  if seeds is not None and others is not None:
    return others.index(seeds[row]) if seeds[row] in others else None
  if (seeds, others) != (None, None) or row >= len(trained.source):
    return None
  return row if dataset.source.where(row) == trained.source.where(row) else None


def _seeds(dataset: Dataset) -> range | None:
  """Returns the seeds of the rows of a task that draws them; None: it is another source."""
  return getattr(dataset.source, "seeds", None)


def _read(loaders: Sequence[Loader], reads: int) -> Iterator[tuple[Dataset, int]]:
  """Yields the training rows that are compared: the dataset, and the number of the row in it."""
  for loader in loaders:
    for position, (dataset, row) in enumerate(loader.begins_with()):
      if position < reads or _seeds(dataset) is None:
        yield dataset, row


def _digests(dataset: Dataset, number: int) -> tuple[bytes, bytes] | None:
  """Returns the digests of a row of the source; None if the row cannot be read.

  They are of what the row asks, and of what makes it the same row.
  """
  with contextlib.suppress(Exception):  # a broken row is reported where it is used.
    asked, whole = dataset.question(number)
    return _digest(asked), _digest(whole)
  return None


def _digest(value: Any) -> bytes:
  text = json.dumps(_normal(value), sort_keys=True, default=str)
  return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _normal(value: Any) -> Any:
  """Returns a JSON value whose strings have single blanks in place of all white space."""
  if isinstance(value, str):
    return " ".join(value.split())
  if isinstance(value, Mapping):
    return {str(key): _normal(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [_normal(each) for each in value]
  return value
