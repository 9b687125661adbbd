"""Same as `reference`, by three Pallas kernels for TPU; scores are in VMEM only. Pure.

The kernels compute the output with its log-sum-exp, dQ, and dK with dV. Each walks over a list of
the tiles of queries × keys that hold a pair. `prepare` makes the lists once for all layers; their
length is a number of the run, and so is the kernels' grid. A kernel reads from the list where its
tile lies, whether the tile needs a mask, and whether it is the first or the last of the result that
is being added up. The mask is computed from `Visible.until`, and from positions only if there is a
window. Nothing is [T T], no two programs add to the same place, and the order is fixed: results are
the same bits every time. dQ apart from dK costs 7 products in place of 5.

A program has all R query heads of one key/value head, so that keys and values are read once for the
group, and dK and dV are summed over it in VMEM.

Scores are in units of ln 2 in the forward pass, and the running maximum is rounded up to a whole
number, as `parts.softmax_shift` does for bfloat16: the factor by which an earlier sum fades is a
power of two, and weights are rounded as in `reference`, whatever the tiles.

Heads are contiguous in the kernels, [B K R T E], because a block of a TPU cannot take some of the
heads of [B T H E]. XLA transposes, and cannot always let the product before it write that layout:
in a layer of Qwen2.5-1.5B (T = 16384, v5e, forward, recomputed and backward) it keeps 5 copies of
queries in bfloat16 and 1 in float32, at most 0.7 GB of about 11. Heads of 64 take the memory of 128
there.

Rows of any T; what tiles do not divide is filled up by copies. `pallas_tpu_tiles` says how tiles
are chosen, and up to which T their list fits. Where rows are dealt out in parts, the queries of a
part have lists of their own, and masks read the places of queries and keys.

Never run on a TPU. Compiled by libtpu 0.0.48.1 and jax 0.11.2 for chips described to it, with
`jax.jit(jax.value_and_grad(...)).lower(...).compile()` of `core.attend`, 2026-11-28; 16384 tokens
in bfloat16, temporary memory of value and gradients besides arguments and results, which is the
transposed copies and the output, in MiB:

    H, K, E       T = 1024 (v5e; v6e)    T = 16384 (v5e; v6e)
    12, 2, 128    179; 185               185; 185
    9, 3, 64      73; 73                 72; 73

libtpu's static schedule (not a timing) of one head of one v5e tile, 256 × 256 × 128, with 6 heads:
328 instruction bundles forward, 393 for dQ, 557 for dK and dV; the matrix units need 256, 384 and
512. With a loop over the heads it was 499, 441 and 738.

In the interpreter (CPU, T = 256, 4 query heads of 64 over 2, 2026-11-28), against float64, relative
by norm: output 3.4e-3, dQ 4.6e-3, dK 4.5e-3, dV 3.2e-3 in bfloat16, where `reference` has 3.0e-3,
4.2e-3, 4.1e-3, 2.8e-3; at most 3.7e-7 in float32.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_kernels.attention import core, visible
from grpo_kernels.attention import pallas_tpu_kernels as kernels
from grpo_kernels.attention import pallas_tpu_tiles as tiling
from grpo_kernels.attention.core import Settings
from grpo_kernels.attention.pallas_tpu_kernels import Rows
from grpo_kernels.attention.pallas_tpu_tiles import Lists, Tiles
from grpo_kernels.attention.visible import Visible


@dataclasses.dataclass(frozen=True)
class PallasTpu:
  """The implementation, for a kind of TPU or with given tiles; hashable."""

  device_kind: str | None = None  # a key of `VMEM_LIMITS`; None: the one of this process.
  tiles: Tiles | None = None  # None: by `choose_tiles`.

  def prepare(self, seen: Visible, width: int) -> Lists:
    """Returns the tiles that the kernels visit; see `core.Implementation`.

    Raises:
      ValueError: The list of tiles does not fit in SMEM.
    """
    del width
    rows, keys = seen.until.shape
    queries = keys if seen.places is None else seen.places.queries.shape[1]
    size = self._tiles(rows, queries, keys).size
    whole = tiling.round_up(keys, size), tiling.round_up(queries, size)
    return tiling.lists(visible.padded(seen, *whole), size)

  def forward(
    self,
    settings: Settings,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B S K E"],
    v: Float[Array, "B S K E"],
    seen: Visible,
  ) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Returns output, in the dtype of q, and log-sum-exp; see `core.Implementation`.

    Raises:
      ValueError: The query heads of a key/value head do not fit in VMEM.
    """
    length, tiles = q.shape[1], self._checked_tiles(q, k)
    seen, (q,), (k, v) = core.padded(tiles.size, seen, [q], [k, v])
    lists: Lists = seen.tiles
    heads = (_by_kv_head(q, k.shape[2]), _heads_first(k), _heads_first(v))
    out, log_sum = kernels.forward(settings, tiles, lists.by_queries, _rows(seen), *heads)
    log_sum = log_sum.reshape(q.shape[0], q.shape[2], -1)
    return _by_token(out)[:, :length], log_sum[..., :length]

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
    """Returns the cotangents, in the dtypes of q, k and v; see `core.Implementation`.

    Raises:
      ValueError: The query heads of a key/value head do not fit in VMEM.
    """
    (length, of_keys), tiles = (q.shape[1], k.shape[1]), self._checked_tiles(q, k)
    kv_heads, whole = k.shape[2], tiling.round_up(length, tiles.size)
    seen, (q, g), (k, v) = core.padded(tiles.size, seen, [q, g], [k, v])
    lists: Lists = seen.tiles
    numbers = tuple(
      jnp.pad(x, ((0, 0), (0, 0), (0, whole - length))).reshape(x.shape[0], kv_heads, -1, whole)
      for x in (log_sum, delta)
    )
    heads = (_by_kv_head(q, kv_heads), _heads_first(k), _heads_first(v), _by_kv_head(g, kv_heads))
    given = (_rows(seen), *heads, *numbers)
    dq = kernels.backward_of_queries(settings, tiles, lists.by_queries, *given)
    dk, dv = kernels.backward_of_keys(settings, tiles, lists.by_keys, *given)
    dq, dk, dv = _by_token(dq), _heads_first(dk), _heads_first(dv)
    return dq[:, :length], dk[:, :of_keys], dv[:, :of_keys]

  def _tiles(self, rows: int, queries: int, keys: int) -> Tiles:
    """Returns the tiles to use for packed rows."""
    return self.tiles or tiling.choose_tiles(self.device_kind, rows, keys, queries)

  def _checked_tiles(self, q: Array, k: Array) -> Tiles:
    """Returns the tiles to use for these arrays, with which the kernels fit in VMEM."""
    rows, length, heads, width = q.shape
    tiles = self._tiles(rows, length, k.shape[1])
    tiling.check_vmem(tiles, heads // k.shape[2], width, q.dtype.itemsize)
    return tiles


def _rows(seen: Visible) -> Rows:
  """Returns what the kernels read about packed rows."""
  of_queries, of_keys = ([], []) if seen.places is None else ([x] for x in seen.places)
  of_keys.append(seen.until)
  if seen.limit is not None:
    assert seen.positions is not None, "a window needs positions"
    of_queries.append(seen.positions)
    of_keys.append(seen.limit)
  stacked = lambda facts: jnp.stack(facts, axis=1) if facts else None
  return Rows(jnp.stack(of_keys, axis=1), stacked(of_queries), seen.places is not None)


def _by_kv_head(x: Float[Array, "B T H E"], kv_heads: int) -> Float[Array, "B K R T E"]:
  """Returns heads of tokens as tokens of heads, by the key/value head that they use."""
  batch, length, heads, width = x.shape
  return _heads_first(x).reshape(batch, kv_heads, heads // kv_heads, length, width)


def _by_token(x: Float[Array, "B K R T E"]) -> Float[Array, "B T H E"]:
  """Returns tokens of heads by key/value head as heads of tokens."""
  batch, kv_heads, repeats, length, width = x.shape
  return _heads_first(x.reshape(batch, kv_heads * repeats, length, width))


def _heads_first(x: Float[Array, "B T n E"]) -> Float[Array, "B n T E"]:
  """Returns heads of tokens as tokens of heads; its own inverse."""
  return x.swapaxes(1, 2)


_default = PallasTpu()
prepare = _default.prepare
forward = _default.forward
backward = _default.backward
