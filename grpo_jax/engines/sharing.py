"""The host's side of shared prompts: which rows attend to which pages together. Pure.

One function for each form of the cache; see `cache_forms`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.engines import ring_cache
from grpo_jax.engines.sampler_inputs import Readers, Tiles

# Keys and rows of the completions that have a row; of their prompts by key the pages, the number of
# tokens in them and the position of the first of these.
Rows = Sequence[tuple[bytes, int]]
Prompts = Mapping[bytes, tuple[Sequence[int], int, int]]


def most_users(form: str, group: int) -> int | None:
  """Returns how many rows can read the same pages; None: any number."""
  return group if form == "rows" else None


def of_rows(form: str, *arguments: Any, **sizes: int) -> Tiles | Readers:
  """Returns `tiles` or `readers`, by form."""
  made = {"ring": tiles, "rows": readers}
  return made[form](*arguments, **sizes)


def tiles(
  active: Rows, prompts: Prompts, *, count: int, group: int, table: int, page: int, pages: int
) -> Tiles:
  """Returns the tiles of `count` rows; their prompts have at most `table` pages."""
  del page, pages
  size = ring_cache.max_tiles(count, group)
  made = Tiles(
    places=np.full(count, -1, np.int32),
    rows=np.zeros((size, group), np.int32),
    pages=np.zeros((size, table), np.int32),
    lengths=np.zeros(size, np.int32),
  )
  for tile, members in enumerate(shared(active, group)):
    listed, length, _ = prompts[members[0][0]]
    made.pages[tile, : len(listed)] = listed
    made.lengths[tile] = length
    for number, (_, row) in enumerate(members):
      made.places[row] = tile * group + number
      made.rows[tile, number] = row
  return made


def shared(active: Rows, group: int) -> list[list[tuple[bytes, int]]]:
  """Returns the rows that share their prompts, at most `group` in a tile, at least two."""
  if group == 1:
    return []
  found = [
    members[start : start + group]
    for members in _by_prompt(active)
    for start in range(0, len(members), group)
  ]
  return [tile for tile in found if len(tile) > 1]


def readers(
  active: Rows, prompts: Prompts, *, count: int, group: int, table: int, page: int, pages: int
) -> Readers:
  """Returns the readers of `pages` pages of `page` tokens, at most `group` of each.

  Raises:
    ValueError: More rows than `group` have the same key.
  """
  made = Readers(
    rows=np.zeros((pages, group), np.int32),
    starts=np.zeros(pages, np.int32),
    lengths=np.zeros(pages, np.int32),
    places=np.full((count, table), -1, np.int32),
  )
  for members in _by_prompt(active):
    if len(members) > group:
      raise ValueError(f"{len(members)} rows read the same pages, which have room for {group}")
    listed, length, start = prompts[members[0][0]]
    for number, at in enumerate(listed):
      made.rows[at, : len(members)] = [row for _, row in members]
      made.starts[at] = start + number * page
      made.lengths[at] = min(length - number * page, page)
      for place, (_, row) in enumerate(members):
        made.places[row, number] = at * group + place
  return made


def _by_prompt(active: Rows) -> list[list[tuple[bytes, int]]]:
  found: dict[bytes, list[tuple[bytes, int]]] = {}
  for key, row in active:
    found.setdefault(key, []).append((key, row))
  return list(found.values())
