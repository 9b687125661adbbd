"""One loader reads datasets in order; functions take the prompts of a step from several.

Such a function gets all loaders by name and returns the next prompts:

  def dataloader(loaders, *, num_prompts, records, memory, **settings) -> list[Prompt]

`records` are the metrics of past steps, oldest first, each with its "step". `memory` is a
dictionary of the function's own, which is stored in checkpoints: JSON values only. Loaders keep
their own positions. A resumed run therefore continues exactly, if the function depends on nothing
else.
"""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from grpo_jax.data import sources
from grpo_jax.data.prompts import Dataset
from grpo_jax.data.skipped_rows import OnError, SkippedRows
from grpo_jax.types import Prompt

MAX_RECORDS = 32  # number of steps whose metrics a dataloader function sees.
Records = Sequence[Mapping[str, float | int]]
Dataloader = Callable[..., list[Prompt]]


class Loader:
  """Prompts of consecutive datasets, in training order. Its state is one integer."""

  def __init__(
    self,
    datasets: Sequence[Dataset],
    *,
    shuffle: bool,
    seed: int | Sequence[int],
    epochs: int | None,
    on_error: OnError,
    cursor: int = 0,
  ):
    """Positions the loader at a cursor.

    Args:
      datasets: Datasets to read; an epoch has every row of all of them.
      shuffle: Whether every epoch has its own order, over all rows, drawn from seed and
        epoch; otherwise the datasets follow each other in their own order.
      seed: Random seed of the order.
      epochs: Passes over the datasets; None: unlimited.
      on_error: "stop": a broken row raises; "skip": it is counted, logged and skipped.
      cursor: Position to continue at, from an earlier loader with the same settings.

    Raises:
      ValueError: The cursor is outside of the data.
    """
    self.datasets = tuple(datasets)
    self._ends = list(itertools.accumulate(len(dataset) for dataset in datasets))
    rows = grain.MapDataset.range(self._ends[-1])
    # grain adds the epoch to the seed: the seed is hashed, so that seeds 0 and 1 share no order.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    ordered = rows.shuffle(seed=hashed) if shuffle else rows
    self._rows = ordered.repeat(epochs)
    if not 0 <= cursor <= len(self._rows):
      raise ValueError(f"cursor {cursor} is outside of the data: {len(self._rows)} positions")
    self._on_error: OnError = on_error
    self.cursor = cursor  # number of positions passed, skipped rows included.
    self.skipped = SkippedRows()

  def __len__(self) -> int:
    """Returns the number of rows of an epoch."""
    return self._ends[-1]

  @functools.cached_property
  def sample(self) -> str:
    """Fingerprint of the data, from a few sampled rows; detects other data of equal size."""
    hashed = hashlib.blake2b(digest_size=8)
    for dataset in self.datasets:
      hashed.update(sources.sample(dataset.source))
    return hashed.hexdigest()

  @property
  def epoch(self) -> float:
    """Number of passes over the datasets so far."""
    return self.cursor / len(self)

  @property
  def is_over(self) -> bool:
    """Whether all epochs are finished."""
    return self.cursor >= len(self._rows)

  def take(self, n: int) -> list[Prompt]:
    """Takes the next n prompts; fewer, and finally none, when the epochs are finished.

    Raises:
      RowError: A row is broken and `on_error` is "stop".
      ValueError: No prompt of a whole epoch can be used.
    """
    prompts: list[Prompt] = []
    fruitless = 0
    while len(prompts) < n and not self.is_over:
      prompt = self.skipped.guard(self._next_prompt, self._on_error)
      fruitless = 0 if prompt else fruitless + 1
      if prompt:
        prompts.append(prompt)
      elif fruitless >= len(self):
        first = self.datasets[0]
        raise self.skipped.none_left(first.name, first.max_prompt_tokens)
    return prompts

  def begins_with(self) -> Iterator[tuple[Dataset, int]]:
    """Yields the rows of the first epoch in their order, wherever the cursor is: the dataset, and
    the number of the row in it."""
    for position in range(len(self)):
      part, row = self._place(position)
      yield self.datasets[part], row

  def _next_prompt(self) -> Prompt:
    position = self.cursor
    self.cursor += 1
    part, row = self._place(position)
    return self.datasets[part].prompt(row, epoch=position // len(self))

  def _place(self, position: int) -> tuple[int, int]:
    """Returns the number of the dataset that a position reads, and that of the row in it."""
    row = self._rows[position]
    assert row is not None  # None is grain's filtered element; there is no filter here.
    part = bisect.bisect_right(self._ends, row)
    return part, int(row) - (self._ends[part - 1] if part else 0)


def from_the_only_one(
  loaders: Mapping[str, Loader], *, num_prompts: int, records: Records, memory: dict[str, Any]
) -> list[Prompt]:
  """Takes all prompts from a single loader, which may read several datasets as one."""
  del records, memory
  (loader,) = loaders.values()
  return loader.take(num_prompts)


def one_after_the_other(
  loaders: Mapping[str, Loader],
  *,
  num_prompts: int,
  records: Records,
  memory: dict[str, Any],
  num_prompts_per_dataloader: int,
) -> list[Prompt]:
  """Takes a fixed number of prompts from each loader in turn; the next call continues from there.

  Two datasets [a b c d] and [1 … 8], two prompts from each, four a step:
  [a b 1 2], [c d 3 4], [a b 5 6].

  Args:
    loaders: Loaders by name, in the order of the config.
    num_prompts: Number of prompts to return.
    records: Not read.
    memory: The number of prompts taken so far.
    num_prompts_per_dataloader: Number of prompts per turn.
  """
  del records
  order, prompts = list(loaders.values()), []
  taken = memory.setdefault("taken", 0)
  while len(prompts) < num_prompts:
    turn, within = divmod(taken, num_prompts_per_dataloader)
    wanted = min(num_prompts_per_dataloader - within, num_prompts - len(prompts))
    got = order[turn % len(order)].take(wanted)
    prompts += got
    taken += len(got)
    if len(got) < wanted:  # the epochs of that loader are finished.
      break
  memory["taken"] = taken
  return prompts


def by_weight(
  loaders: Mapping[str, Loader],
  *,
  num_prompts: int,
  records: Records,
  memory: dict[str, Any],
  weights: Mapping[str, float | int],
) -> list[Prompt]:
  """Takes every prompt from the loader that is furthest behind its share.

  After n prompts a loader of share w has given w n of them, to within one.

  Args:
    loaders: Loaders by name.
    num_prompts: Number of prompts to return.
    records: Not read.
    memory: Prompts taken so far, by loader; the counts restart if the weights change.
    weights: Weights by loader; shares are weight / sum of weights. 0: never.
  """
  del records
  if memory.get("weights") != weights:
    memory |= {"weights": dict(weights), "given": dict.fromkeys(loaders, 0)}
  given = memory["given"]
  live = [name for name in loaders if weights[name] > 0]
  prompts: list[Prompt] = []
  while len(prompts) < num_prompts:
    name = min(live, key=lambda name: (given[name] + 1) / weights[name])
    got = loaders[name].take(1)
    if not got:  # the epochs of that loader are finished.
      break
    prompts += got
    given[name] += 1
  return prompts
