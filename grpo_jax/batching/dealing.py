"""Which places of a row each of several devices has, so that attention is balanced. Pure, NumPy.

A row is cut in chunks of equal length, and each device gets as many of them as the others. A chunk
costs as many tiles of keys as any of its queries sees: few for the tokens of a prompt, more the
longer a completion is. The heaviest chunks are dealt first, each to the device with the least work
that still has room (longest processing time first). For one long sequence this pairs early chunks
with late ones, as is usual; for packed trees it follows their tiles.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from grpo_jax.batching.attended import TILE
from grpo_jax.types import Batch

# Chunks that a device has of a row, the first number with which they are long enough; shorter ones
# than the tiles of attention would leave fewer tiles out.
_CHUNKS = (8, 4)
_LEAST_CHUNK = 256


def chunks_of(row_tokens: int, parts: int) -> int | None:
  """Returns in how many chunks a row is cut; None if it cannot be divided evenly among the devices.

  Args:
    row_tokens: Number of places of the row.
    parts: Number of devices among which they are divided.
  """
  if row_tokens % parts:
    return None
  own = row_tokens // parts
  for each in _CHUNKS:
    if own % each == 0 and own // each >= _LEAST_CHUNK:
      return parts * each
  return parts * (2 if own % 2 == 0 else 1)


def dealt(
  batch: Batch, parts: int, *, windows: Sequence[tuple[int | None, float]] = ((None, 1.0),)
) -> tuple[Batch, Float[np.ndarray, "B parts"]]:
  """Deals the places of all rows of a batch out to devices.

  Args:
    batch: Batch on the host.
    parts: Number of devices, which divides T.
    windows: Windows of the layers, as in `order`.

  Returns:
    The batch with an order; live tiles of each device in each row.
  """
  rows = zip(np.asarray(batch.segment_ids), np.asarray(batch.branch_ids), strict=True)
  orders, work = zip(*(order(*row, parts, windows=windows) for row in rows), strict=True)
  return dataclasses.replace(batch, order=np.stack(orders)), np.stack(work)


def order(
  segment_ids: Int[np.ndarray, " T"],
  branch_ids: Int[np.ndarray, " T"],
  parts: int,
  *,
  windows: Sequence[tuple[int | None, float]] = ((None, 1.0),),
) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " parts"]]:
  """Deals the places of a row out to devices.

  Args:
    segment_ids: Segment of each place; 0 is padding.
    branch_ids: Branch of each place; 0 is the prompt.
    parts: Number of devices, which divides T.
    windows: Windows of the layers, each with its share of the layers, as in `packing.Cost`.

  Returns:
    Place of each slot, those of the first device first and each device's in ascending order; live
    tiles of each device, on average over the layers.
  """
  length = len(segment_ids)
  count = chunks_of(length, parts)
  assert count is not None, f"{length} places cannot be divided in {parts} parts"
  until = _until(segment_ids, branch_ids)
  work = sum(share * _live(until, count, window).sum(1) for window, share in windows)
  work = np.asarray(work, np.float64)
  load, mine = np.zeros(parts), [[] for _ in range(parts)]
  for chunk in np.argsort(-work, kind="stable"):
    open_ = [part for part in range(parts) if len(mine[part]) < count // parts]
    part = min(open_, key=lambda each: (load[each], each))
    mine[part].append(int(chunk))
    load[part] += work[chunk]
  places = np.arange(length, dtype=np.int32).reshape(count, -1)
  return places[[chunk for each in mine for chunk in sorted(each)]].reshape(-1), load


def _until(
  segment_ids: Int[np.ndarray, " T"], branch_ids: Int[np.ndarray, " T"]
) -> Int[np.ndarray, " T"]:
  """Returns the place after the last token that sees each; as `grpo_kernels.attention.visible`."""
  length = len(segment_ids)
  new_segment = np.append(segment_ids[1:] != segment_ids[:-1], True)
  new_branch = new_segment | np.append(branch_ids[1:] != branch_ids[:-1], True)

  def following(is_last: Bool[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
    ends = np.where(is_last, np.arange(1, length + 1), length)
    return np.minimum.accumulate(ends[::-1])[::-1]

  until = np.where(branch_ids == 0, following(new_segment), following(new_branch))
  return np.where(segment_ids == 0, 0, until)


def _live(
  until: Int[np.ndarray, " T"], chunks: int, window: int | None
) -> Bool[np.ndarray, "chunks tiles"]:
  """Returns the tiles of keys that any query of each chunk sees.

  A window is taken to end by places, which is too early for the prompt of a later completion.
  """
  length = len(until)
  tile = min(TILE, length // chunks)
  starts = np.arange(0, length, tile)
  last = np.maximum.reduceat(until, starts)
  if window is not None:
    last = np.minimum(last, starts + tile - 1 + window)
  first_query = np.arange(chunks)[:, None] * (length // chunks)
  last_query = first_query + length // chunks - 1
  return (starts[None] <= last_query) & (last[None] > np.maximum(first_query, starts[None]))
