"""The pairs of query and key that attention computes in a row, by its lengths. Pure."""

import itertools
from collections.abc import Iterable, Sequence

# Queries, and keys, of a tile of attention: its kernels skip tiles in which no query sees a key.
TILE = 128


def pairs(pieces: Iterable[tuple[int, Sequence[int]]], window: int | None = None) -> int:
  """Returns how many pairs attention computes: all those of tiles in which any query sees a key.

  A token of a prompt is seen by the tokens after it in its piece, a token of a completion by those
  after it in the completion.

  Args:
    pieces: Number of tokens of a prompt and of each of its completions, in the order of the row.
    window: Number of tokens that a token sees, itself included; None: all.
  """
  if window is not None:
    return TILE * TILE * len(_tiles_in_window(pieces, window))
  last: dict[int, int] = {}  # tile of keys → the last tile of queries that sees any of them.

  def add(start: int, stop: int, until: int) -> None:
    for tile in range(start // TILE, -(-stop // TILE) if stop > start else 0):
      last[tile] = max(last.get(tile, 0), (until - 1) // TILE)

  at = 0
  for prompt, completions in pieces:
    add(at, at + prompt, at + prompt + sum(completions))
    at += prompt
    for length in completions:
      add(at, at + length, at + length)
      at += length
  return TILE * TILE * sum(to - tile + 1 for tile, to in last.items())


def _tiles_in_window(
  pieces: Iterable[tuple[int, Sequence[int]]], window: int
) -> set[tuple[int, int]]:
  """Returns the tiles of (keys, queries) in which any query sees a key; see `pairs`."""
  found: set[tuple[int, int]] = set()

  def add(start: int, stop: int, followers: Sequence[tuple[int, int]]) -> None:
    """Adds the tiles of a run, whose tokens the runs (start, stop) that follow it see, too."""
    for tile in range(start // TILE, -(-stop // TILE) if stop > start else 0):
      unseen = min(stop, (tile + 1) * TILE) - 1 + window  # the first place behind the window.
      seeing = [(tile * TILE, min(stop, unseen))]
      seeing += [(begin, min(end, begin + unseen - stop)) for begin, end in followers]
      for begin, end in seeing:
        queries = range(begin // TILE, -(-end // TILE)) if end > begin else ()
        found.update((tile, query) for query in queries)

  at = 0
  for prompt, completions in pieces:
    begin = at + prompt
    ends = list(itertools.accumulate(completions, initial=begin))
    runs = list(itertools.pairwise(ends))
    add(at, begin, runs)
    for run in runs:
      add(*run, ())
    at = ends[-1]
  return found
