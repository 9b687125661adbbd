"""The pairs of query and key that attention computes in a row, by its lengths. Pure."""

from collections.abc import Iterable, Sequence

# Queries, and keys, of a tile of attention: its kernels skip tiles in which no query sees a key.
TILE = 128


def pairs(pieces: Iterable[tuple[int, Sequence[int]]]) -> int:
  """Returns how many pairs attention computes: all those of tiles in which any query sees a key.

  A token of a prompt is seen by the tokens after it in its piece, a token of a completion by those
  after it in the completion.

  Args:
    pieces: Number of tokens of a prompt and of each of its completions, in the order of the row.
  """
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
