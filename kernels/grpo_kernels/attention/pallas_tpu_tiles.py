"""Tiles of the Pallas kernels for TPU: their size, the lists of live ones, limits of memory. Pure.

Tiles are square. Their size is 256 by arithmetic, for packed rows with 6 query heads of 128 to a
key/value head: operations of a v5e's matrix units (197 TFLOP/s) and 0.35 µs for each tile, which is
an assumption. Microseconds of one forward pass over a row, and by how much the pairs of live tiles
exceed those of the mask (2026-11-28; completions of lognormal length):

    prompt + completions    T        128            256            512            256 × 512
    190 + 16 × 300          16384    391 (1.77 x)   307 (2.45 x)   419 (4.14 x)   401 (3.67 x)
    512 + 16 × 512          16384    484 (1.09 x)   296 (1.17 x)   275 (1.35 x)   297 (1.35 x)
    450 + 16 × 2800         32768    3901 (1.09 x)  2379 (1.17 x)  2203 (1.34 x)  2316 (1.31 x)

A list has one int32 for each tile that may be live, in SMEM: B n (n + 1) / 2 of them, n = T / 256.
Four rows of 32768 tokens take 129 KiB, one of 131072 takes 513 KiB; more than 640 KiB are refused.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpo_kernels.attention import visible
from grpo_kernels.attention.visible import Visible
from grpo_kernels.implementations import current_chip

LANES = 128
MIB = 1 << 20
SIZE = 256
MOST_ENTRIES = 640 * 1024 // 4  # of a list; SMEM has 1 MiB.

# Bits of an entry: what a kernel does with the tile. A tile that holds no pair has neither of the
# first two; it is visited if nothing else of its row is, so that the row's result is written.
WHOLE, PARTIAL, FIRST, LAST = 1, 2, 4, 8
FLAG_BITS = 4


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Size of the tiles of all kernels."""

  size: int  # queries, and keys, of a tile; a multiple of 128.
  vmem_limit_bytes: int  # memory that the compiler may use.


class Walk(NamedTuple):
  """The tiles that a kernel visits, in order.

  Attributes:
    count: Number of the tiles.
    entries: (row of the batch, tile of queries, tile of keys, flags) of each, packed by `_packed`;
      what is after the first `count` means nothing.
  """

  count: Int[Array, ""]
  entries: Int[Array, " most"]


class Lists(NamedTuple):
  """Walks over the same tiles.

  Attributes:
    by_queries: All tiles of some queries, then of the next.
    by_keys: All tiles of some keys, then of the next.
  """

  by_queries: Walk
  by_keys: Walk


def choose_tiles(
  device_kind: str | None, rows: int, length: int, queries: int | None = None
) -> Tiles:
  """Returns the tiles for packed rows.

  Args:
    device_kind: Value of `jax.Device.device_kind`; None: that of the chip on which this process
      computes. Kinds that are not in `VMEM_LIMITS` get `MODEST_VMEM`.
    rows: Number of rows B.
    length: Number of tokens T of a row.
    queries: Number of them that are queries, in a part of a row; None: all.

  Raises:
    ValueError: The list of tiles does not fit in SMEM.
  """
  size = min(SIZE, round_up(length if queries is None else queries, LANES))
  if entries_of(rows, length, size, queries) > MOST_ENTRIES:
    raise ValueError(
      f"pallas_tpu keeps a list of tiles in SMEM: that of {rows} rows of {length} tokens has more"
      f" than {MOST_ENTRIES} entries"
    )
  kind = current_chip().kind if device_kind is None else device_kind
  return Tiles(size, VMEM_LIMITS.get(kind, MODEST_VMEM))


def entries_of(rows: int, length: int, size: int, queries: int | None = None) -> int:
  """Returns how many tiles may be live, if all rows were one causal sequence each.

  Args:
    rows: Number of rows B.
    length: Number of tokens T of a row.
    size: Size of a tile.
    queries: Number of queries of a part of a row, which may be any; None: rows are whole.
  """
  count = round_up(length, size) // size
  if queries in (None, length):
    return rows * count * (count + 1) // 2
  return rows * count * (round_up(queries, size) // size)


def lists(seen: Visible, size: int) -> Lists:
  """Returns the tiles that the kernels visit.

  Args:
    seen: Visibility of rows whose T and S the size divides.
    size: Number of queries, and of keys, of a tile.
  """
  live, whole = visible.live_tiles(seen, size, size)
  what = jnp.where(whole, WHOLE, jnp.where(live, PARTIAL, 0))
  if seen.places is None:
    visited = live | jnp.eye(live.shape[1], dtype=bool)[None]
    most = entries_of(live.shape[0], seen.until.shape[1], size)
    return Lists(
      _walk(visited, what, keys_axis=2, most=most), _walk(visited, what, keys_axis=1, most=most)
    )

  def with_each(axis: int) -> Bool[Array, "B n m"]:
    """Returns the live tiles, and the first one along an axis where there is none."""
    is_first = jnp.arange(live.shape[axis]) == 0
    is_first = is_first[None, None] if axis == 2 else is_first[None, :, None]
    return live | (is_first & ~jnp.any(live, axis=axis, keepdims=True))

  return Lists(
    _walk(with_each(2), what, keys_axis=2, most=live.size),
    _walk(with_each(1), what, keys_axis=1, most=live.size),
  )


def _walk(
  visited: Bool[Array, "B n m"], what: Int[Array, "B n m"], *, keys_axis: int, most: int
) -> Walk:
  """Returns the visited tiles in the order in which `keys_axis` is the innermost of the axes."""
  count = visited.shape[keys_axis]
  batch, query, key = jnp.indices(visited.shape, dtype=jnp.int32)
  place = query if keys_axis == 1 else key
  first = jnp.argmax(visited, axis=keys_axis, keepdims=True)
  last = count - 1 - jnp.argmax(jnp.flip(visited, keys_axis), axis=keys_axis, keepdims=True)
  bits = field_bits(max(visited.shape[1:]))
  flags = what + FIRST * (place == first) + LAST * (place == last)
  entries = _packed(batch, query, key, flags.astype(jnp.int32), bits)
  in_order = lambda x: (x.mT if keys_axis == 1 else x).reshape(-1)
  (at,) = jnp.nonzero(in_order(visited), size=most, fill_value=0)
  return Walk(jnp.sum(visited, dtype=jnp.int32), in_order(entries)[at])


def field_bits(count: int) -> int:
  """Returns the bits of the number of a tile of queries, or of keys, in an entry."""
  return max(1, (count - 1).bit_length())


def _packed(batch: Any, query: Any, key: Any, flags: Any, bits: int) -> Any:
  """Returns entries; as many as fit in SMEM have numbers that fit in 31 bits."""
  return (((batch << bits | query) << bits | key) << FLAG_BITS) | flags


def unpacked(entry: Any, bits: int) -> tuple[Any, Any, Any, Any]:
  """Returns (row of the batch, tile of queries, tile of keys, flags) of an entry."""
  flags, entry = entry & ((1 << FLAG_BITS) - 1), entry >> FLAG_BITS
  key, entry = entry & ((1 << bits) - 1), entry >> bits
  return entry >> bits, entry & ((1 << bits) - 1), key, flags


def check_vmem(tiles: Tiles, repeats: int, width: int, itemsize: int) -> None:
  """Raises ValueError if a kernel does not fit in VMEM.

  Args:
    tiles: Tiles of the kernels.
    repeats: Number of query heads of a key/value head.
    width: Width E of a head.
    itemsize: Bytes of a number of the operands.
  """
  taken = vmem_bytes(tiles.size, repeats, width, itemsize)
  if taken > tiles.vmem_limit_bytes:
    raise ValueError(
      f"pallas_tpu keeps all query heads of a key/value head in VMEM: {repeats} of width {width} do"
      f" not fit in {tiles.vmem_limit_bytes // MIB} MiB"
    )


def vmem_bytes(size: int, repeats: int, width: int, itemsize: int) -> int:
  """Returns an upper estimate of the VMEM that the largest kernel, that of dQ, takes."""
  width = round_up(width, LANES)
  of_query = 6 * width * itemsize + 4 * width + 2 * 4 * LANES  # q, g, dQ twice; sum; L and delta.
  of_key = 8 * width * itemsize + 2 * 4 * width + 3 * 4 * LANES  # k, v, dK, dV twice; sums; facts.
  scores = 6 * 4 * size * size  # and what is made of them.
  return size * (repeats * of_query + of_key) + scores


def round_up(size: int, multiple: int) -> int:
  """Returns the smallest positive multiple of `multiple` that is not below `size`."""
  return max(1, -(-size // multiple)) * multiple


# By `jax.Device.device_kind`; VMEM has 128 MiB on v5e and v6e, 64 on v5p and v7x, and XLA keeps the
# rest for its own. Elsewhere: 16 MiB.
MODEST_VMEM = 12 * MIB
VMEM_LIMITS = {
  "TPU v5 lite": 64 * MIB,
  "TPU v5e": 64 * MIB,
  "TPU v6 lite": 64 * MIB,
  "TPU v6e": 64 * MIB,
  "TPU v5": 48 * MIB,
  "TPU v5p": 48 * MIB,
  "TPU7x": 48 * MIB,
}
