"""Same as `reference`, by Pallas kernels for NVIDIA's Hopper; scores stay in registers. Pure.

Three kernels (`mosaic_gpu_kernels`), for the output, for dQ and for dK with dV, walk over lists of
the tiles that hold a pair (`mosaic_gpu_tiles`), which are made once for all layers of a microbatch.
What no query sees costs nothing, and memory grows with T: no array has as many elements as a row
has pairs. A fourth kernel adds up the parts of dK and dV.

Weights are rounded to bfloat16 as those of `reference` (`parts.softmax_shift`), the output and the
gradients once when they are written. The backward kernels compute the scores again, so there are 7
products for 5; in return dQ, dK and dV have one owner each and nothing is added atomically.

Limits: bfloat16, heads of 64 or 128, on NVIDIA's Hopper; any number of query heads for a key/value
head. Soft limit, where copies are made: rows are padded to a multiple of 128 tokens.

Where rows are dealt out in parts, the lists are those of a part's queries and of all keys of its
row, and masks read the places of both. dK and dV, which are a part of a sum then, are float32.
Parts were compared in the simulator and compiled for an H100; they were not run on one.

Blocks of one launch for 4 rows of 4096 (prompts of 512 with 16 completions of 512, 12/2 heads of
128): 1536 for the output and for dQ, 352 for dK and dV; 132 run at once. By list
scheduling of their tiles the last of the 352 ends 1.11 times as late as if all multiprocessors were
busy to the end; with one block for each tile of keys (256) it would be 2.46, with one for each
query head (1536) 1.17 and four times the bytes: parts are 128 KiB a block, written and read once,
here 46 MB.

Compiled for an H100 without having one (2026-11-28, jax 0.11.2; `make aot` repeats it): no register
is spilled at the sizes of five models; 168 registers a thread at entry, which become 40 for the
producer and 232 for the consumers; 161, 129 and 130 KiB of shared memory of 227 at heads of 128.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_kernels.attention import core, visible
from grpo_kernels.attention import mosaic_gpu_kernels as kernels
from grpo_kernels.attention import mosaic_gpu_tiles as tiling
from grpo_kernels.attention.core import Settings
from grpo_kernels.attention.mosaic_gpu_blocks import LOG2_E
from grpo_kernels.attention.mosaic_gpu_tiles import Lists, Pieces, Tiles
from grpo_kernels.attention.visible import Visible


class Work(NamedTuple):
  """What the blocks of the kernels visit.

  Attributes:
    forward: Tiles of keys of each tile of queries, for the output.
    dq: The same for dQ.
    dkv: Tiles of queries of each tile of keys, for dK and dV.
  """

  forward: Lists
  dq: Lists
  dkv: Pieces


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The implementation, with tiles by width or with given ones; hashable."""

  tiles: Tiles | None = None  # None: by `mosaic_gpu_tiles.TILES`.

  def prepare(self, seen: Visible, width: int) -> Work:
    """Returns the lists of the three kernels; see `core.Implementation`."""
    tiles, keys = self._tiles(width), seen.until.shape[1]
    queries = keys if seen.places is None else seen.places.queries.shape[1]
    seen = visible.padded(seen._replace(tiles=None), _whole(keys), _whole(queries))
    return Work(
      tiling.lists(seen, tiles.queries, tiles.keys),
      tiling.lists(seen, tiles.queries, tiles.keys_dq),
      tiling.pieces(seen, tiles.queries_dkv, tiles.keys_dkv),
    )

  def forward(
    self,
    settings: Settings,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    v: Float[Array, "B S K E"],
    seen: Visible,
  ) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Returns output (bfloat16) and log-sum-exp; see `core.Implementation`.

    Raises:
      NotImplementedError: Queries are not bfloat16, or their width is not 64 or 128.
    """
    _check(q)
    length, work = q.shape[1], seen.tiles
    seen, (q,), (k, v) = _padded(seen, [q], [k, v])
    found = kernels.forward(settings, self._tiles(q.shape[-1]), work.forward, seen, q, k, v)
    out, log_sum = found
    return out[:, :length], log_sum[..., :length]

  def backward(
    self,
    settings: Settings,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    v: Float[Array, "B S K E"],
    seen: Visible,
    log_sum: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    g: Float[Array, "B T H E"],
  ) -> tuple[Float[Array, "B T H E"], Float[Array, "B S K E"], Float[Array, "B S K E"]]:
    """Returns the cotangents of queries, keys and values in bfloat16; see `core.Implementation`.

    Those of keys and values are float32 for a part of a row: they are added to those of its others.

    Raises:
      NotImplementedError: Queries are not bfloat16, or their width is not 64 or 128.
    """
    _check(q)
    (length, of_keys), work, tiles = (q.shape[1], k.shape[1]), seen.tiles, self._tiles(q.shape[-1])
    seen, (q, g), (k, v) = _padded(seen, [q, g], [k, v])
    missing = ((0, 0), (0, 0), (0, q.shape[1] - length))
    log2_sum, delta = (jnp.pad(x, missing) for x in (log_sum * LOG2_E, delta))
    given = seen, q, k, v, log2_sum, delta, g
    dq = kernels.backward_q(settings, tiles, work.dq, *given)
    parts = kernels.backward_kv(settings, tiles, work.dkv, *given)
    dtype = jnp.bfloat16 if seen.places is None else jnp.float32
    dk, dv = kernels.sums(settings, tiles, work.dkv, parts, dtype)
    return dq[:, :length], dk[:, :of_keys], dv[:, :of_keys]

  def _tiles(self, width: int) -> Tiles:
    return self.tiles or tiling.TILES[width]


def _padded(seen: Visible, queries: list[Array], keys: list[Array]):
  """Returns the visibility, without tiles, and arrays with padding; see `core.padded`."""
  return core.padded(tiling.ROW_MULTIPLE, seen._replace(tiles=None), queries, keys)


def _whole(length: int) -> int:
  """Returns the length of rows with padding up to whole tiles."""
  return -(-length // tiling.ROW_MULTIPLE) * tiling.ROW_MULTIPLE


def _check(q: Array) -> None:
  """Raises NotImplementedError for operands that the kernels do not support."""
  if q.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"mosaic_gpu takes queries in bfloat16, got {q.dtype}: the tensor cores have no float32;"
      " xla_blocked takes float32"
    )
  if q.shape[-1] not in tiling.TILES:
    raise NotImplementedError(
      f"mosaic_gpu takes heads of 64 or 128, got {q.shape[-1]}; xla_blocked takes any"
    )


_default = Kernels()
prepare = _default.prepare
forward = _default.forward
backward = _default.backward
