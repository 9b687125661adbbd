"""A decode step's attention of every row to its prompt's pages and to its own columns. Hopper only.

A block has a row and a key/value head. Its producer warpgroup asks the copy engine (TMA) for tiles
of keys and values, first of the pages that the row's table lists, then of the row's own columns,
last the new token, into rings of `_STAGES` slots of shared memory. Its consumer multiplies the
tiles with the r queries of the head (wgmma; what the other rows of its 64 hold is dropped) and
carries a softmax along.

Rows of one prompt read the same pages, which stay in the second-level cache: those of one layer are
some megabytes. So device memory is read about once for each prompt and each row's own tokens, and
no scores are written.

The producer also writes the new token into its column. Nothing waits for that: the token's own tile
comes from where the token was, and its column is not visible in the tile that has it.

The copy engine fills with 0 what lies outside of an array, and drops what would be stored there.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from grpo_kernels.decode_attention.choice import KEYS
from grpo_kernels.hopper import interpreter

_LOG2E = math.log2(math.e)
_ABSENT, _LOWEST = -1e30, -1e29  # a masked score; what the highest begins with.
_QUERIES = 64  # rows of a product of wgmma.
_STAGES = 3


# A function of its own in the program, so that layers share a kernel: lowering one takes seconds.
@functools.partial(jax.jit, static_argnames="interpret")
def attend(
  asked: Float[Array, "R K r E"],
  new: tuple[Array, Array],
  own: tuple[Array, Array],
  pages: tuple[Array, Array],
  tables: Int[Array, "R W"],
  prompt_lengths: Int[Array, " R"],
  lengths: Int[Array, " R"],
  first: Int[Array, " R"],
  *,
  interpret: bool = False,
) -> tuple[Float[Array, "R K r E"], tuple[Array, Array]]:
  """Writes a token of every row, and returns the softmax over the row's keys, times their values.

  Weights are rounded to bfloat16 as in one softmax over all keys; see `parts.softmax_shift`. All
  arrays of queries, keys and values are bfloat16.

  Args:
    asked: Queries divided by √E.
    new: Key and value of the new token, [R K E] each.
    own: Keys and values of the rows' own tokens, [_ K C E] each, in the first columns.
    pages: Pages of the prompts, [N K T E] each.
    tables: Pages of each row's prompt.
    prompt_lengths: Tokens in these pages.
    lengths: Number of own tokens without the new one, less than C; column of the new one.
    first: First position that a row sees, at most its own; 0 or less: all.
    interpret: Whether to run in the interpreter, on a CPU.

  Returns:
    The results; `own` with the new tokens, written in place where the program allows it.
  """
  count, kv_heads, _, width = asked.shape
  body = functools.partial(_body, pages[0].shape[2], width, interpret)
  kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct(asked.shape, jnp.bfloat16),
    grid=(kv_heads, count),
    grid_names=("head", "row"),
    num_threads=2,
    thread_name="warpgroup",
    kernel_name="decode_attention",
    compiler_params=plgpu.CompilerParams(
      approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({"interpret": interpreter()} if interpret else {}),
  )
  scalars = jnp.stack([prompt_lengths, lengths, first]).astype(jnp.int32)
  changed = [jax.new_ref(x) for x in own]
  # One array, which one pass over memory makes. Copies of a token reach outside of the axis of 1.
  packed = jnp.concatenate([asked, *(x[:, :, None] for x in new)], axis=2)[:, :, :, None]
  found = kernel(scalars, tables, packed, *changed, *pages)
  keys, values = (jax.freeze(x) for x in changed)
  return found, (keys, values)


def _body(page: int, width: int, interpret: bool, scalars, tables, packed, *arrays) -> None:
  """The kernel; its arrays are references to own and pages, keys and values, and the result."""
  own, pages, out = arrays[:2], arrays[2:4], arrays[4]
  repeats = out.shape[2]
  head, row = lax.axis_index("head"), lax.axis_index("row")
  places = _Places(page, *(scalars[i, row] for i in range(3)))
  # A start that is not static may reach outside; a multiple of 8 is seen to fit the layout.
  outside = pl.ds(lax.min(row, 0) * 8, _QUERIES)

  def block(q_s, k_s, v_s, new_s, q_in, k_in, v_in, new_in, k_out, v_out):
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _consumer():
      plgpu.copy_gmem_to_smem(packed.at[row, head, outside, 0], q_s, q_in)
      plgpu.barrier_wait(q_in)
      tiles = _Tiles(k_s, v_s, k_in, v_in, k_out, v_out)
      mixed, total = _softmax(tiles, q_s, places, width, interpret)
      q_s[...] = (mixed / _across(total, mixed)).astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(q_s, out.at[row, head, outside])
      plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 1)
    def _producer():
      for i in range(2):
        token = packed.at[row, head, repeats + i, 0]
        plgpu.copy_gmem_to_smem(token, new_s.at[i], new_in.at[i])

      @pl.loop(0, places.tiles)
      def _tiles(i):
        slot = lax.rem(i, _STAGES)
        for number, (to, full, free) in enumerate(((k_s, k_in, k_out), (v_s, v_in, v_out))):

          @pl.when(i >= _STAGES)
          def _wait(free=free):
            plgpu.barrier_wait(free.at[slot])

          new = packed.at[row, head, repeats + number, outside]
          arrays = pages[number], own[number]
          for is_here, source in places.sources(i, tables, row, head, arrays, new):

            @pl.when(is_here)
            def _copy(source=source, to=to, full=full):
              plgpu.copy_gmem_to_smem(source, to.at[slot], full.at[slot])

      for i in range(2):
        plgpu.barrier_wait(new_in.at[i])
        plgpu.copy_smem_to_gmem(new_s.at[i], own[i].at[row, head, places.length])

      # Each phase of a barrier must be awaited: none may be pending when the block ends.
      @pl.loop(lax.max(places.tiles - _STAGES, 0), places.tiles)
      def _drain(i):
        plgpu.barrier_wait(k_out.at[lax.rem(i, _STAGES)])
        plgpu.barrier_wait(v_out.at[lax.rem(i, _STAGES)])

      plgpu.wait_smem_to_gmem(0)

  ring = functools.partial(plgpu.Barrier, num_arrivals=1, num_barriers=_STAGES)
  pl.run_scoped(
    block,
    _shared((_QUERIES, width)),
    _shared((_STAGES, KEYS, width)),
    _shared((_STAGES, KEYS, width)),
    plgpu.SMEM((2, width), jnp.bfloat16),
    plgpu.Barrier(num_arrivals=1),
    ring(),
    ring(),
    plgpu.Barrier(num_arrivals=1, num_barriers=2),
    ring(),
    ring(),
    collective_axes="warpgroup",
  )


class _Places:
  """Where the tiles of a row lie: those of its prompt, of its own tokens, and of the new token."""

  def __init__(self, page: int, prompt: Any, length: Any, first: Any):
    self.page, self.prompt, self.length = page, prompt, length
    self.first = lax.max(first, 0)
    self.own_first = lax.max(self.first - prompt, 0)
    self.skipped = lax.div(lax.min(self.first, prompt), KEYS)
    self.own_skipped = lax.div(self.own_first, KEYS)
    self.of_prompt = lax.div(prompt + (KEYS - 1), KEYS) - self.skipped
    self.before_new = self.of_prompt + lax.div(length + (KEYS - 1), KEYS) - self.own_skipped
    self.tiles = self.before_new + 1

  def sources(self, i: Any, tables: Any, row: Any, head: Any, arrays: Any, new: Any) -> Any:
    """Yields for pages, own and new whether tile number i is there, and the place."""
    pages, own = arrays
    number, of_page = self.skipped + i, self.page // KEYS
    is_prompt, is_new = i < self.of_prompt, i == self.before_new
    # Also where the tile is not, the table is read at one of its places.
    at = jnp.where(is_prompt, lax.div(number, of_page), 0)
    here = pl.ds(KEYS * lax.rem(number, of_page), KEYS)
    yield is_prompt, pages.at[tables[row, at], head, here]
    column = KEYS * (self.own_skipped + i - self.of_prompt)
    is_own = jnp.logical_not(jnp.logical_or(is_prompt, is_new))
    yield is_own, own.at[row, head, pl.ds(column, KEYS)]
    yield is_new, new

  def visible(self, i: Any, scores: Any) -> Any:
    """Returns the scores of tile number i, `_ABSENT` where the row does not see the key."""
    is_prompt, is_new = i < self.of_prompt, i == self.before_new
    own = self.own_skipped + i - self.of_prompt
    start = KEYS * jnp.where(is_prompt, self.skipped + i, jnp.where(is_new, 0, own))
    begin = jnp.where(is_prompt, self.first, jnp.where(is_new, 0, self.own_first))
    end = jnp.where(is_prompt, self.prompt, jnp.where(is_new, 1, self.length))
    layout = plgpu.Layout.WGMMA
    number = start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    return jnp.where((number >= begin) & (number < end), scores, _ABSENT)


class _Tiles:
  """The rings of keys and values, with the barriers on which they arrive and are given back."""

  def __init__(self, keys: Any, values: Any, k_in: Any, v_in: Any, k_out: Any, v_out: Any):
    self.keys, self.values = keys, values
    self.k_in, self.v_in, self.k_out, self.v_out = k_in, v_in, k_out, v_out


def _softmax(tiles: _Tiles, q_s: Any, places: _Places, width: int, interpret: bool) -> Any:
  """Returns the weighted sums [64 E] of all tiles' values and the sums of the weights [64]."""

  def step(i, carry):
    mixed, highest, total = carry
    slot = lax.rem(i, _STAGES)
    plgpu.barrier_wait(tiles.k_in.at[slot])

    def products(ref):
      plgpu.wgmma(ref, q_s, tiles.keys.at[slot].T)
      return ref[...]

    scores = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((_QUERIES, KEYS), jnp.float32))
    plgpu.barrier_arrive(tiles.k_out.at[slot])
    scores = places.visible(i, scores)
    # A multiple of ln 2, so that another shift rounds the weights to the same bits.
    new = jnp.maximum(highest, _whole(jnp.max(scores, axis=1) * _LOG2E))
    weights = jnp.exp2(scores * _LOG2E - _across(new, scores))
    fade = jnp.exp2(highest - new)
    total = total * fade + jnp.sum(weights, axis=1)
    mixed = mixed * _across(fade, mixed)
    weights = weights.astype(jnp.bfloat16)
    plgpu.barrier_wait(tiles.v_in.at[slot])
    if interpret:  # jax 0.11.2's interpreter has no accumulator that begins with a value.
      mixed = mixed + jnp.dot(weights, tiles.values[slot], preferred_element_type=jnp.float32)
    else:
      mix = lambda ref: plgpu.wgmma(ref, weights, tiles.values.at[slot])
      mixed = pl.run_state(mix)(plgpu.WGMMAAccumulatorRef.init(mixed))
    plgpu.barrier_arrive(tiles.v_out.at[slot])
    return mixed, new, total

  of_rows = plgpu.Layout.WGMMA.reduce(1)
  mixed = plgpu.layout_cast(jnp.zeros((_QUERIES, width), jnp.float32), plgpu.Layout.WGMMA)
  highest = plgpu.layout_cast(jnp.full((_QUERIES,), _LOWEST, jnp.float32), of_rows)
  total = plgpu.layout_cast(jnp.zeros((_QUERIES,), jnp.float32), of_rows)
  mixed, _, total = lax.fori_loop(0, places.tiles, step, (mixed, highest, total))
  return mixed, total


def _whole(x: Any) -> Any:
  """Returns a whole number less than 1 away, or the lowest; there is no `ceil` in a kernel."""
  return jnp.maximum(x, -1e9).astype(jnp.int32).astype(jnp.float32)


def _across(of_rows: Any, like: Any) -> Any:
  return lax.broadcast_in_dim(of_rows, like.shape, (0,))


def _shared(shape: tuple[int, ...]) -> Any:
  """Returns shared memory in the layout that wgmma reads without conflicts between banks."""
  layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=layout)
