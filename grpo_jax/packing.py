"""Which piece goes into which bin, and how big the bins are. Pure, integers only."""

import bisect
import dataclasses
from collections.abc import Sequence

# Attention costs T per place, everything else of a layer about as much as this many places would.
LINEAR_COST_TOKENS = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
  """Of every microbatch: B rows of T tokens, N of which are learned from at most."""

  rows: int
  row_tokens: int
  loss_tokens: int


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
  """Packs pieces into bins: the longest first, each into the fullest bin that has room.

  At most 11/9 of the optimal number of bins, as first-fit-decreasing. Ties are
  broken by index, so the result depends on nothing but the arguments.

  Returns:
    For each bin the indices of its pieces, in the order in which they went in.

  Raises:
    ValueError: a piece is larger than a bin.
  """
  bins: list[list[int]] = []
  free: list[tuple[int, int]] = []  # (room left, bin), sorted.
  for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
    if sizes[i] > capacity:
      raise ValueError(f"a piece of {sizes[i]} tokens does not fit in {capacity}")
    at = bisect.bisect_left(free, (sizes[i], -1))
    if at == len(free):
      bins.append([])
      room, number = capacity, len(bins) - 1
    else:
      room, number = free.pop(at)
    bins[number].append(i)
    bisect.insort(free, (room - sizes[i], number))
  return bins


def bucket(n: int, *, multiple: int = 1, per_octave: int = 4) -> int:
  """Returns the smallest bucket that holds n ≥ 1: multiples of `multiple`, thinning out.

  Between 2ᵏ and 2ᵏ⁺¹ there are at most `per_octave` buckets, so that the number
  of shapes grows with the logarithm of the largest, and waste stays below 1 / per_octave.
  """
  step = max(multiple, (1 << (max(n - 1, 1).bit_length() - 1)) // per_octave)
  step = -(-step // multiple) * multiple
  return -(-n // step) * step


def row_lengths(longest: int, *, multiple: int = 32) -> tuple[int, ...]:
  """Returns the buckets of T up to `longest`, which is one of them."""
  lengths = {min(bucket(n, multiple=multiple), longest) for n in range(multiple, longest, multiple)}
  return tuple(sorted(lengths | {longest}))


def choose_shape(
  sizes: Sequence[Sequence[int]],
  loss_sizes: Sequence[Sequence[int]],
  *,
  candidates: Sequence[int],
  microbatch_tokens: int | None,
  rows_multiple: int,
  pack: bool,
) -> Shape:
  """Chooses the shape of all microbatches that costs least.

      cost(T) = places · (1 + T / 2048), places counting the padding of rows and microbatches

  Args:
    sizes: tokens of each segment, for each optimizer step.
    loss_sizes: those of them that are learned from.
    candidates: row lengths to choose from.
    microbatch_tokens: most places of a microbatch per replica; None: no limit.
    rows_multiple: of which the number of rows is a multiple.
    pack: whether a row may hold several segments.

  Raises:
    ValueError: a segment is longer than every candidate.
  """
  longest = max((n for part in sizes for n in part), default=1)
  fitting = [length for length in sorted(candidates) if length >= longest]
  if not fitting:
    raise ValueError(f"no row length of {tuple(candidates)} holds a segment of {longest} tokens")

  def layout(length: int) -> tuple[float, Shape]:
    packed = [
      best_fit_decreasing(part, length) if pack else [[i] for i in range(len(part))]
      for part in sizes
    ]
    rows = _rows([len(part) for part in packed], length, microbatch_tokens, rows_multiple)
    places = sum(-(-len(part) // rows) * rows * length for part in packed)
    fullest = max(
      (
        sum(loss[i] for i in row)
        for part, loss in zip(packed, loss_sizes, strict=True)
        for row in part
      ),
      default=1,
    )
    # A quarter of T is the step of N: few shapes, and the head is computed for N only.
    quarter = -(-length // 4)
    loss_tokens = min(-(-fullest // quarter) * quarter, length)
    return places * (1 + length / LINEAR_COST_TOKENS), Shape(rows, length, loss_tokens)

  return min((layout(length) for length in fitting), key=lambda costed: costed[0])[1]


def _rows(
  needed: Sequence[int], length: int, microbatch_tokens: int | None, rows_multiple: int
) -> int:
  """Returns B: rows of a microbatch, such that its microbatches are about equally full."""
  if not needed:
    return rows_multiple
  most = max(1, microbatch_tokens // length) if microbatch_tokens else max(needed)
  per_replica = [-(-rows // rows_multiple) for rows in needed]
  balanced = max(-(-rows // -(-rows // most)) for rows in per_replica)
  rounded = bucket(balanced)
  return rows_multiple * (min(rounded, most) if microbatch_tokens else rounded)
