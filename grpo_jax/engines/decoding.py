"""The sampler's computation on the device: prefill of prompts, and a loop of decode steps. Pure.

A few programs serve all requests. Their shapes bound how much can be computed; loops inside them,
over the pages of the prompts and over the blocks of sampled tokens, run only as far as needed.

* The keys and values of a prompt are stored once, in pages, for all completions of the prompt. The
  rows of a prompt form tiles, and each page is multiplied with all queries of its tile at once. A
  row that shares its prompt with no other row is in no tile and reads its pages itself.
* The keys and values of sampled tokens are stored in a ring. In every step all rows write to the
  same column, that of the step, so the n tokens of a row are in the last n columns.

The last token of the prompt is the first that a row feeds to the model, so pages hold the prompt
without it.

Layers are unrolled over per-layer arrays: a scan would copy every layer's weights and cache out
of the stacked arrays at every token.

Sizes: R rows of the program, at most as many as the ring has; M blocks of C columns in the ring; N
pages of T tokens; W pages of the longest prompt; A tiles of G rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels import rounding
from grpo_kernels.attention import AUTOMATIC, Attention, parts
from grpo_kernels.attention.parts import Partial
from grpo_kernels.linear_logprobs import reference
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from grpo_jax.compilation import precision
from grpo_jax.engines import sampling
from grpo_jax.models import layers, lora, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.placement import MeshPlacement
from grpo_jax.models.products import (
  Adapters,
  FusedKernels,
  LowRank,
  OutputMajor,
  Products,
  adapters_name,
  joined_name,
)
from grpo_jax.models.quantized import Quantized

# Keys and values of every layer. Pages: [N K T E] each. Ring: [M R K E C] and [M R K C E], because
# products of a single query are sums over columns, which are fastest in these layouts.
Cache = list[tuple[Array, Array]]

# The kernels of a layer that have the same input, as `layers` asks for their products.
_WITH_SAME_INPUT = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))

# Columns of the ring that one round of a loop reads when many tokens attend to them.
_COLUMNS_AT_ONCE = 1024

_Class = TypeVar("_Class")
_LayerCache = TypeVar("_LayerCache")


def _as_tree(cls: type[_Class]) -> type[_Class]:
  """Registers a dataclass as a tree; it is unflattened without type checks of its fields."""
  names = list(cls.__annotations__)

  def flatten(x):
    return [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in names], None

  def unflatten(_, leaves):
    return unchecked(cls, **dict(zip(names, leaves, strict=True)))

  jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
  return cls


def unchecked(cls: type[_Class], **fields: Any) -> _Class:
  """Makes a dataclass whose fields are not type-checked, because they may describe arrays.

  Args:
    cls: Frozen dataclass.
    **fields: Values of all fields.
  """
  made = object.__new__(cls)
  for name, field in fields.items():
    object.__setattr__(made, name, field)
  return made


@_as_tree
@dataclasses.dataclass(frozen=True)
class SamplerWeights:
  """The parameters as the sampler reads them.

  Attributes:
    embed: Embedding; the trainer's own array, or a copy in the compute dtype.
    layers: Parameters of each layer; kernels are transposed and in the compute dtype.
    final_norm: Final norm; the trainer's own array, or a copy.
    head: Head in the compute dtype; the trainer's own array if it has this dtype.
    quantized: Quantised kernels of all layers, [L ...]; the trainer's own arrays. They are read
      and dequantised a layer at a time.
    adapters: `Adapters` of each layer, in the compute dtype; empty if there are none, or if they
      are merged with the kernels.
  """

  embed: Float[Array, "V D"]
  layers: list[layers.LayerParams]
  final_norm: Float[Array, " D"]
  head: Array
  quantized: dict[str, Any] = dataclasses.field(default_factory=dict)
  adapters: list[dict[str, Adapters]] = dataclasses.field(default_factory=list)


@_as_tree
@dataclasses.dataclass(frozen=True)
class RowStates:
  """The state of every row between chunks; built on the host before each chunk."""

  tokens: Int[Array | np.ndarray, " R"]  # next token to feed to the model.
  prompt_lengths: Int[Array | np.ndarray, " R"]  # tokens in the prompt's pages.
  pages: Int[Array | np.ndarray, "R W"]  # the prompt's pages.
  places: Int[Array | np.ndarray, " R"]  # place in the tiles: tile · G + number; -1: in no tile.
  tile_rows: Int[Array | np.ndarray, "A G"]  # row at each place.
  tile_pages: Int[Array | np.ndarray, "A W"]  # pages of the tile's prompt.
  tile_lengths: Int[Array | np.ndarray, " A"]  # tokens in these pages.
  moves: Int[Array | np.ndarray, "R 2"]  # (from, to) of rows to move in the ring first.
  num_moves: Int[Array | np.ndarray, ""]  # number of valid entries of `moves`.
  step: Int[Array | np.ndarray, ""]  # number of the next step, from which its column follows.
  lengths: Int[Array | np.ndarray, " R"]  # tokens in the ring = tokens sampled so far.
  remaining: Int[Array | np.ndarray, " R"]  # tokens that may still be sampled; 0: the row is idle.
  seeds: UInt[Array | np.ndarray, "R 2"]
  temperature: Float[Array | np.ndarray, " R"]
  top_k: Int[Array | np.ndarray, " R"]
  top_p: Float[Array | np.ndarray, " R"]
  min_p: Float[Array | np.ndarray, " R"]
  reports_truncated: Bool[Array | np.ndarray, " R"]  # see `SamplingParams.reports_truncated`.
  stop_ids: Int[Array | np.ndarray, "R n"]  # padded with -1.


@_as_tree
@dataclasses.dataclass(frozen=True)
class PrefillChunk:
  """The n tokens that are prefilled at once, one prompt after another.

  Only the first prompt may have begun in an earlier chunk.
  """

  tokens: Int[Array | np.ndarray, " n"]
  segment_ids: Int[Array | np.ndarray, " n"]  # 1 for the first prompt, then 2, ...; 0 is padding.
  positions: Int[Array | np.ndarray, " n"]
  pages: Int[Array | np.ndarray, " n"]  # page for each token's keys and values; N for padding.
  past_pages: Int[Array | np.ndarray, " W"]  # pages of the first prompt.
  past: Int[Array | np.ndarray, ""]  # tokens of the first prompt in earlier chunks.


@_as_tree
@dataclasses.dataclass(frozen=True)
class Pieces:
  """The n tokens of completions that are read again at once, in S pieces of one row each.

  The pieces of a row follow each other, and only the last of them is padded.
  """

  tokens: Int[Array | np.ndarray, " n"]
  segment_ids: Int[Array | np.ndarray, " n"]  # 1 + row; 0 is padding.
  positions: Int[Array | np.ndarray, " n"]
  steps: Int[Array | np.ndarray, " n"]  # step whose column holds the token; -1: padding.
  rows: Int[Array | np.ndarray, " S"]
  pages: Int[Array | np.ndarray, "S W"]  # pages of the row's prompt.
  prompt_lengths: Int[Array | np.ndarray, " S"]  # tokens in these pages.
  lengths: Int[Array | np.ndarray, " S"]  # tokens of the row in the ring.
  past: Int[Array | np.ndarray, " S"]  # the first of them, which earlier calls have read again.
  step: Int[Array | np.ndarray, ""]  # number of the next decode step.


@dataclasses.dataclass(frozen=True)
class Options:
  """Options that the programs are compiled for, in addition to shapes; hashable.

  Attributes:
    config: Sizes of the model.
    products: Options of the matrix products.
    chunk: Largest number of decode steps of one call.
    num_valid: Number of token ids that may be sampled; see `sampling.sample`.
    report_truncated: Whether all logprobs are of the truncated distribution; see `sampling.sample`.
    group: Number of rows of a tile, G.
    pages_at_once: Number of pages that one round of the loop over pages reads.
    mesh: Mesh of the devices; None: one device.
    head_axis: Mesh axes over which key/value heads are split.
    row_axes: Mesh axes over which rows are split, if their number is divisible.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    attention: Choice of attention within a prefilled chunk.
    unmerged: Whether the adapter of a `LowRank` kernel stays apart from it; False: they are merged.
  """

  config: ModelConfig
  products: Products
  chunk: int
  num_valid: int | None = None
  report_truncated: bool = False
  group: int = 8
  pages_at_once: int = 1
  mesh: Mesh | None = None
  head_axis: Any = None
  row_axes: tuple[str, ...] = ()
  matmul_precision: str | None = None
  attention: Attention = AUTOMATIC
  unmerged: bool = False


def split_layers(params: transformer.Params, options: Options) -> SamplerWeights:
  """Makes the per-layer arrays from the stacked ones, once for every change of weights.

  Kernels are rounded to the compute dtype here and not at every token. The embedding, the final
  norm, a head in the compute dtype and quantised kernels are the trainer's own arrays and not
  copies. A `LowRank` kernel is merged with its adapter, or with `options.unmerged` kept apart.
  """
  dtype = options.products.compute_dtype
  head, _ = transformer.head(params, options.config)
  copied, quantized = _kernels(params, options)
  return SamplerWeights(
    embed=params["embed"],
    layers=_unstack(copied, options.config.num_layers, dtype, options.mesh is None),
    final_norm=params["final_norm"],
    head=head if head.dtype == dtype else head.astype(dtype),
    quantized=quantized,
    adapters=adapters(params, options),
  )


def one_layer(params: transformer.Params, number: Any, options: Options) -> layers.LayerParams:
  """Returns one of the layers that `split_layers` makes; called inside of programs.

  Args:
    params: Parameters, as in `split_layers`.
    number: Number of the layer.
    options: Options of the programs.
  """
  copied, _ = _kernels(params, options)
  one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), copied)
  return _unstack(one, 1, options.products.compute_dtype, options.mesh is None)[0]


def adapters(params: transformer.Params, options: Options) -> list[dict[str, Adapters]]:
  """Returns a copy of the adapters of each layer; empty unless `options.unmerged`.

  Args:
    params: Parameters, some of whose kernels may be `LowRank`.
    options: Options of the programs.
  """
  found = _adapter_arrays(params, options)
  if not found:
    return []
  return _unstack_adapters(found, options.config.num_layers, options.products.compute_dtype)


def _kernels(params: transformer.Params, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the stacked leaves of layers that are copied, and quantised kernels."""
  stack = (lora.base_of(params) if options.unmerged else params)["layers"]
  quantized = {name: x for name, x in stack.items() if isinstance(x, Quantized)}
  return {name: x for name, x in stack.items() if name not in quantized}, quantized


def _adapter_arrays(params: transformer.Params, options: Options) -> dict[str, LowRank]:
  """Returns the stacked adapters that stay apart from their kernels, without the kernels."""
  if not options.unmerged:
    return {}
  kernels = {name: x for name, x in params["layers"].items() if isinstance(x, LowRank)}
  return {name: dataclasses.replace(x, base=None) for name, x in kernels.items()}


def described(params: Any, options: Options) -> SamplerWeights:
  """Returns shapes, dtypes and shardings of what `split_layers` returns.

  Args:
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
    options: Options of the programs.
  """
  shapes = jax.eval_shape(lambda params: split_layers(params, options), params)
  num_layers, dtype = options.config.num_layers, options.products.compute_dtype
  copied, quantized = _kernels(params, options)
  found = _adapter_arrays(params, options)
  unstack = _unstack.lower(copied, num_layers, dtype, options.mesh is None)
  parts = [_unstack_adapters.lower(found, num_layers, dtype)] if found else []
  placed = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  shardings = unchecked(
    SamplerWeights,
    embed=params["embed"].sharding,
    layers=unstack.compile().output_shardings,
    final_norm=params["final_norm"].sharding,
    head=params["embed" if options.config.tie_embeddings else "head"].sharding,
    quantized=placed(quantized),
    adapters=parts[0].compile().output_shardings if parts else [],
  )
  place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.tree.map(place, shapes, shardings)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _unstack(
  stacked: dict[str, Any], num_layers: int, dtype: Any, is_joined: bool
) -> list[layers.LayerParams]:
  """Splits the stacked arrays.

  Args:
    stacked: Leaves of all layers; kernels may be `LowRank`, which are merged.
    num_layers: Number of layers.
    dtype: Dtype of the kernels.
    is_joined: Whether the kernels of q, k and v become one array, and those of gate and up another,
      for fewer and larger products. On a mesh each kernel is split by itself.
  """

  def converted(x, i):
    if isinstance(x, LowRank):
      x = lora.merged(jax.tree.map(lambda x: x[i], x))[None]
      i = 0
    # Norms and biases, [L n], stay float32: they are not factors of a product.
    return OutputMajor(x[i].T.astype(dtype)) if x.ndim == 3 else x[i].astype(jnp.float32)

  def layer(i):
    made: dict[str, Any] = {name: converted(x, i) for name, x in stacked.items()}
    for names in _WITH_SAME_INPUT if is_joined else ():
      if len(names) == 1 or not made.keys() >= set(names):
        continue
      kernels = [made.pop(name).array for name in names]
      widths = tuple(kernel.shape[0] for kernel in kernels)
      made[joined_name(names)] = FusedKernels(jnp.concatenate(kernels), widths)
    return made

  return [layer(i) for i in range(num_layers)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unstack_adapters(
  stacked: dict[str, LowRank], num_layers: int, dtype: Any
) -> list[dict[str, Adapters]]:
  """Splits stacked adapters without a base, and joins the A that have the same input."""

  def of_layer(names: Sequence[str], i: int) -> Adapters:
    found = [stacked[name] for name in names]
    # Transposed, as kernels are.
    a = jnp.concatenate([x.a[i].T.astype(dtype) for x in found])
    return Adapters(a, tuple(x.b[i].T.astype(dtype) for x in found), tuple(names), found[0].scale)

  groups = {names: [name for name in names if name in stacked] for names in _WITH_SAME_INPUT}
  return [
    {adapters_name(names): of_layer(own, i) for names, own in groups.items() if own}
    for i in range(num_layers)
  ]


def _layer(weights: SamplerWeights, i: int, x: Array) -> layers.LayerParams:
  """Returns the parameters of a layer.

  Where quantised kernels are read depends on the layer's input, in form only: no number is above
  infinity. Otherwise the compiler may dequantise the kernels of all layers at once, even before the
  loop of the decode steps, which would be a copy of the model in full precision. XLA for CPUs drops
  a barrier before it orders the computation.
  """
  layer = dict(weights.layers[i])
  if weights.adapters:
    layer |= weights.adapters[i]
  if weights.quantized:
    place = i + (x.reshape(-1)[0] > jnp.inf).astype(jnp.int32)
    of_layer = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False)
    layer |= jax.tree.map(of_layer, weights.quantized)
  return layer


def token_bytes(options: Options) -> int:
  """Returns the bytes of the keys and values of one token."""
  config, dtype = options.config, options.products.compute_dtype
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def empty_ring(blocks: int, rows: int, length: int, options: Options) -> Cache:
  """Returns a ring of zeros: `blocks` blocks of `length` columns, for `rows` rows."""
  config, dtype = options.config, options.products.compute_dtype
  keys = (blocks, rows, config.num_kv_heads, config.head_dim, length)
  values = (*keys[:3], length, config.head_dim)
  make = lambda shape: _placed(jnp.zeros(shape, dtype), options, row_axis=1)
  return [(make(keys), make(values)) for _ in range(config.num_layers)]


def empty_pages(count: int, length: int, options: Options) -> Cache:
  """Returns `count` pages of zeros, each for `length` tokens."""
  config = options.config
  shape = (count, config.num_kv_heads, length, config.head_dim)
  make = lambda: _placed(jnp.zeros(shape, options.products.compute_dtype), options)
  return [(make(), make()) for _ in range(config.num_layers)]


def resize(
  cache: Cache, places: Int[Array, " n"], options: Options, *, row_axis: int | None = None
) -> Cache:
  """Returns the blocks of a ring, or the pages, at `places`."""
  one = lambda x: _placed(jnp.take(x, places, axis=0), options, row_axis=row_axis)
  return jax.tree.map(one, cache)


def prefill(weights: SamplerWeights, cache: Cache, chunk: PrefillChunk, options: Options) -> Cache:
  """Computes keys and values of a chunk of prompts and writes them into their pages.

  Each token is a row of its own. On a mesh tokens are split as the rows of a batch are, weights are
  gathered, and only keys and values go to all devices, because the pages hold them there.

  Args:
    weights: Weights made by `split_layers`.
    cache: The pages.
    chunk: Tokens of prompts without their last token.
    options: Options of the program; static.

  Returns:
    The pages with the keys and values of the chunk.
  """
  size, dtype = cache[0][0].shape[2], cache[0][0].dtype
  is_first = jnp.asarray(chunk.segment_ids) == 1
  past = (jnp.asarray(chunk.past_pages)[None], jnp.asarray(chunk.past)[None])
  offsets = chunk.positions % size

  def write(pages, k, v):
    def put(to, new):
      to = to.at[chunk.pages, :, offsets].set(new[0].astype(dtype), mode="drop")
      return _placed(to, options)

    return put(pages[0], k), put(pages[1], v)

  def before(q, kv_heads, pages, first):
    found = _before(q, kv_heads, pages, *past, first, options)
    return parts.only_where(is_first[None, :, None], found)

  return _read(weights, cache, chunk, write, before, options)


def read_again(
  weights: SamplerWeights, prompts: Cache, own: Cache, pieces: Pieces, options: Options
) -> Cache:
  """Computes keys and values of sampled tokens again, in their columns of the ring.

  For completions that were begun with other weights: afterwards the ring and the pages hold what
  they would if these weights had read every token. Calls must take the tokens of a row in their
  order. On a mesh, tokens are split as in `prefill`.

  Args:
    weights: Weights made by `split_layers`.
    prompts: The pages, already of these weights; read only.
    own: The ring.
    pieces: Tokens of rows: the last token of the prompt, then sampled tokens without the last.
    options: Options of the program; static.

  Returns:
    The ring with the keys and values of the pieces.
  """
  blocks, columns = own[0][0].shape[0], own[0][0].shape[-1]
  count, dtype = pieces.rows.shape[0], own[0][0].dtype
  steps, rows = jnp.asarray(pieces.steps), jnp.asarray(pieces.rows)
  # A token of padding goes to a block that does not exist.
  block = jnp.where(steps < 0, blocks, steps // columns % blocks)
  column, row = steps % columns, jnp.repeat(rows, len(pieces.tokens) // count)
  tables, prompt_lengths = jnp.asarray(pieces.pages), jnp.asarray(pieces.prompt_lengths)

  def write(cache, k, v):
    ring, pages = cache
    keys = ring[0].at[block, row, :, :, column].set(k[0].astype(dtype), mode="drop")
    values = ring[1].at[block, row, :, column].set(v[0].astype(dtype), mode="drop")
    place = functools.partial(_placed, options=options, row_axis=1)
    return (place(keys), place(values)), pages

  def before(q, kv_heads, cache, first):
    ring, pages = cache
    repeats = q.shape[2] // kv_heads
    by_piece = lambda x: None if x is None else x.reshape(count, -1)
    first = by_piece(first)
    asked = parts.by_kv_head(parts.scaled(q.reshape(count, -1, *q.shape[2:]), kv_heads))
    seen = _for_queries(first, repeats)
    found = parts.nothing(asked)
    found = _over_pages(asked, found, pages, tables, prompt_lengths, seen, options)
    own_first = None if first is None else first - prompt_lengths[:, None]
    seen = _for_queries(own_first, repeats)
    found = _over_past(asked, found, ring, pieces, seen, options)
    found = parts.by_token(found, q.shape[2])
    return parts.Partial(*(x.reshape(1, -1, *x.shape[2:]) for x in found))

  both = list(zip(own, prompts, strict=True))
  return [ring for ring, _ in _read(weights, both, pieces, write, before, options)]


def _read(
  weights: SamplerWeights,
  cache: Sequence[_LayerCache],
  taken: PrefillChunk | Pieces,
  write: Callable[[_LayerCache, Array, Array], _LayerCache],
  before: Callable[..., Partial],
  options: Options,
) -> list[_LayerCache]:
  """Feeds many tokens at once to the model, and writes their keys and values into a cache.

  Args:
    weights: Weights made by `split_layers`.
    cache: Cache of each layer, in the form that `write` and `before` take.
    taken: The tokens.
    write: Function (cache of a layer, keys, values [1 n K E]) → the cache with them.
    before: Function (queries [1 n H E], K, cache of a layer, first position that each token sees or
      None) → attention to tokens of earlier calls, [1 n H].
    options: Options of the program; static.

  Returns:
    What the last `write` returned of each layer.
  """
  products = _prefill_products(options)
  config, positions = options.config, jnp.asarray(taken.positions)
  angles = _angles(positions[:, None], config)
  segment_ids, dtype = jnp.asarray(taken.segment_ids)[None], options.products.compute_dtype
  settings = {"config": config, "products": products}
  x = layers.embed(weights.embed, jnp.asarray(taken.tokens)[:, None], **settings)
  written = []
  for i, (own, kind) in enumerate(zip(cache, config.kinds, strict=True)):

    def attend(q, k, v, own=own, window=kind.window):
      everywhere = ("prompts", "places", "kv_heads", "width")
      k, v = (products.place(y[:, 0].astype(dtype)[None], everywhere) for y in (k, v))
      own = write(own, k, v)
      q = q.swapaxes(0, 1)  # one row of all tokens, as the keys and values.
      rule = {"positions": positions[None], "window": window}
      here = options.attention.partial(q, k, v, segment_ids, **rule, products=products)
      earlier = before(q, k.shape[2], own, _first_seen(positions, window))
      found = parts.joined(here, earlier)
      return (found.mixed / found.total[..., None]).swapaxes(0, 1), own

    layer = _layer(weights, i, x)
    with precision.scope(options.matmul_precision):
      x, own, _ = layers.block(layer, x, *angles[kind.rope], attend, **settings)
    written.append(own)
  return written


def _before(
  q: Float[Array, "1 T H E"],
  kv_heads: int,
  pages: tuple[Array, Array],
  tables: Int[Array, "1 W"],
  lengths: Int[Array, " 1"],
  first: Int[Array, " T"] | None,
  options: Options,
) -> Partial:
  """Returns the attention of a row's tokens to the tokens of pages; [1 T H]."""
  asked = parts.by_kv_head(parts.scaled(q, kv_heads))
  seen = _for_queries(None if first is None else first[None], q.shape[2] // kv_heads)
  found = _over_pages(asked, parts.nothing(asked), pages, tables, lengths, seen, options)
  return parts.by_token(found, q.shape[2])


def _prefill_products(options: Options) -> Products:
  """Returns how a prefill computes products: it has many tokens, so weights move to them.

  A decode step has few rows, so there the compiler leaves weights where they are and adds up
  partial sums of the rows.
  """
  placement = None if options.mesh is None else MeshPlacement(options.mesh)
  return dataclasses.replace(options.products, placement=placement)


def decode(
  weights: SamplerWeights,
  prompts: Cache,
  own: Cache,
  rows: RowStates,
  leave_at: Int[Array, ""],
  options: Options,
) -> tuple[Cache, Int[Array, "R chunk"], Float[Array, "R chunk"]]:
  """Runs decode steps until the chunk is full or at most `leave_at` rows are unfinished.

  Args:
    weights: Weights made by `split_layers`.
    prompts: Keys and values of the pages; read only.
    own: The ring, whose first R rows are used.
    rows: State of the rows.
    leave_at: Number of unfinished rows at which the loop ends early; 0: when all have stopped.
    options: Options of the program; static.

  Returns:
    The ring; the sampled tokens, with -1 after the last token of each row; their logprobs.
  """
  count = rows.tokens.shape[0]
  start = (
    jnp.int32(0),
    _moved(own, rows),
    jnp.asarray(rows.tokens),
    jnp.zeros(count, jnp.int32),
    jnp.asarray(rows.remaining) > 0,
    jnp.full((count, options.chunk), -1, jnp.int32),
    jnp.zeros((count, options.chunk), jnp.float32),
  )

  def continues(state):
    i, _, _, _, alive, _, _ = state
    return (i < options.chunk) & (jnp.sum(alive) > leave_at)

  def step(state):
    i, own, tokens, done, alive, sampled, logprobs = state
    lengths = rows.lengths + done
    with precision.scope(options.matmul_precision):
      logits, own = decode_step(weights, prompts, own, tokens, lengths, i, rows, options)
    drawn, logprob = _drawn(logits, lengths, rows, options)
    sampled = sampled.at[:, i].set(jnp.where(alive, drawn, -1))
    logprobs = logprobs.at[:, i].set(jnp.where(alive, logprob, 0.0))
    done = done + alive
    stopped = jnp.any(drawn[:, None] == rows.stop_ids, axis=1) | (done >= rows.remaining)
    tokens = jnp.where(alive, drawn, tokens)
    return i + 1, own, tokens, done, alive & ~stopped, sampled, logprobs

  _, own, _, _, _, sampled, logprobs = jax.lax.while_loop(continues, step, start)
  return own, sampled, logprobs


def decode_step(
  weights: SamplerWeights,
  prompts: Cache,
  own: Cache,
  tokens: Int[Array, " R"],
  lengths: Int[Array, " R"],
  number: Int[Array, ""],
  rows: RowStates,
  options: Options,
) -> tuple[Float[Array, "R V"], Cache]:
  """Feeds one token of every row to the model.

  Args:
    weights: Weights made by `split_layers`.
    prompts: The pages.
    own: The ring.
    tokens: Token ids to feed.
    lengths: Number of tokens of each row in the ring, without this one.
    number: Number of the step within its chunk.
    rows: State of the rows before the chunk; only what the steps do not change is read.
    options: Options of the program; static.

  Returns:
    Logits of the next token, float32; the ring with this token in it.
  """
  config, positions = options.config, jnp.asarray(rows.prompt_lengths) + lengths
  angles = _angles(positions[:, None], config)
  settings = {"config": config, "products": options.products}
  step = jnp.asarray(rows.step) + number
  x, written = layers.embed(weights.embed, tokens[:, None], **settings), []
  for i, (pages, ring, kind) in enumerate(zip(prompts, own, config.kinds, strict=True)):

    def attend(q, k, v, pages=pages, ring=ring, window=kind.window):
      heads, width = q.shape[2:]
      ring = _append(ring, k[:, 0], v[:, 0], step, options)
      asked = q.reshape(q.shape[0], k.shape[2], -1, width) * (width**-0.5)
      asked = _placed(asked, options, row_axis=0)
      found = _over_ring(asked, ring, step, lengths, window, options)
      alone = jnp.where(rows.places < 0, rows.prompt_lengths, 0)
      first = _first_seen(positions, window)
      seen = _for_queries(None if first is None else first[:, None], asked.shape[2])
      found = _over_pages(asked, found, pages, jnp.asarray(rows.pages), alone, seen, options)
      found = _over_tiles(asked, found, pages, rows, first, options)
      attended = _placed(found.mixed / found.total[..., None], options, row_axis=0)
      attended = attended.reshape(q.shape[0], 1, heads, width)
      # Split like `o`, which would otherwise be gathered.
      return _prefill_products(options).place(attended, ("rows", "places", "heads", "width")), ring

    layer = _layer(weights, i, x)
    x, ring, _ = layers.block(layer, x, *angles[kind.rope], attend, **settings)
    written.append(ring)
  x = layers.norm(x, weights.final_norm, **settings)[:, 0]
  layout = "vd" if config.tie_embeddings else "dv"
  # The same product as in the trainer's logprobs, in the same precision on every platform.
  logits = reference.dot(x.astype(options.products.compute_dtype), weights.head, head_layout=layout)
  return logits, written


def _drawn(
  logits: Float[Array, "R V"], lengths: Int[Array, " R"], rows: RowStates, options: Options
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
  """Samples a token for every row; filters are computed only if a row has any."""
  filters = (jnp.asarray(rows.top_k), jnp.asarray(rows.top_p), jnp.asarray(rows.min_p))
  uniforms = sampling.uniforms(jnp.asarray(rows.seeds), lengths)
  temperature = jnp.asarray(rows.temperature)
  reports = options.report_truncated or jnp.asarray(rows.reports_truncated)
  draw = lambda filters, reports: sampling.sample(
    logits,
    uniforms,
    temperature=temperature,
    filters=filters,
    num_valid=options.num_valid,
    report_truncated=reports,
  )
  has_filters = (filters[0] > 0) | (filters[1] < 1.0) | (filters[2] > 0.0)
  is_truncated = jnp.any(has_filters & (temperature > 0))
  return jax.lax.cond(
    is_truncated, lambda: draw(filters, reports), lambda: draw(None, options.report_truncated)
  )


def _angles(positions: Int[Array, "B T"], config: ModelConfig) -> dict[int | None, tuple[Any, Any]]:
  """Returns the rotary angles of every table that a layer has; see `layers.rope_angles`."""
  tables = dict.fromkeys(kind.rope for kind in config.kinds)
  return {table: layers.rope_angles(positions, config, table) for table in tables}


def _first_seen(positions: Int[Array, "..."], window: int | None) -> Int[Array, "..."] | None:
  """Returns the first position that each token sees; None: all positions are seen."""
  return None if window is None else positions - (window - 1)


def _for_queries(first: Int[Array, "B n"] | None, repeats: int) -> Int[Array, "B m"] | None:
  """Repeats the first visible position for each query of a key/value head."""
  return None if first is None else jnp.repeat(first, repeats, axis=1)


def tiles_at_once(rows: int, group: int) -> int:
  """Returns how many tiles one round of the loop over tiles computes: enough for about all rows."""
  return 1 << max((rows // group).bit_length() - 1, 0)


def max_tiles(rows: int, group: int) -> int:
  """Returns A, the most tiles that rows can form: a tile has two rows or more."""
  at_once = tiles_at_once(rows, group)
  return -(-max(rows // 2, 1) // at_once) * at_once


def _over_tiles(
  asked: Float[Array, "R K r E"],
  found: Partial,
  pages: tuple[Array, Array],
  rows: RowStates,
  first: Int[Array, " R"] | None,
  options: Options,
) -> Partial:
  """Adds the attention of rows that share their prompts to these prompts.

  Args:
    asked: Scaled queries, r for each key/value head.
    found: Partial softmax over the keys read before.
    pages: Pages of a layer, [N K T E].
    rows: State of the rows; the tiles are read.
    first: First position that each row sees; None: all.
    options: Options of the program; static.

  Returns:
    The partial softmax over the keys read before and those of the tiles.
  """
  if options.group == 1:
    return found
  count, kv_heads, repeats, width = asked.shape
  at_once = tiles_at_once(count, options.group)
  num_places = at_once * options.group
  places = jnp.asarray(rows.places)

  def add_some(i, found):
    part = lambda x, size: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), i * size, size)
    tile_rows = part(rows.tile_rows, at_once)
    tiled = jnp.take(asked, tile_rows.reshape(-1), axis=0)
    tiled = tiled.reshape(at_once, options.group, kv_heads, repeats, width)
    tiled = tiled.transpose(0, 2, 1, 3, 4).reshape(at_once, kv_heads, -1, width)
    tables = part(rows.tile_pages, at_once), part(rows.tile_lengths, at_once)
    seen = _for_queries(None if first is None else jnp.take(first, tile_rows), repeats)
    partial = _over_pages(tiled, parts.nothing(tiled), pages, *tables, seen, options)
    here = places - i * num_places
    is_here = (here >= 0) & (here < num_places) & (places >= 0)

    def by_row(x):
      x = x.reshape(at_once, kv_heads, options.group, repeats, *x.shape[3:]).swapaxes(1, 2)
      x = x.reshape(num_places, kv_heads, repeats, *x.shape[4:])
      return jnp.take(x, jnp.clip(here, 0, num_places - 1), axis=0)

    partial = parts.only_where(is_here[:, None, None], jax.tree.map(by_row, partial))
    return parts.joined(found, partial)

  rounds = (jnp.max(places) + num_places) // num_places  # none if all are -1.
  return jax.lax.fori_loop(0, rounds, add_some, found)


def _over_pages(
  asked: Float[Array, "B K m E"],
  found: Partial,
  pages: tuple[Array, Array],
  tables: Int[Array, "B W"],
  lengths: Int[Array, " B"],
  first: Int[Array, "B m"] | None,
  options: Options,
) -> Partial:
  """Adds attention to the first `lengths` tokens of the pages that `tables` lists.

  Queries see the positions from `first` on; None: all.
  """
  size, at_once = pages[0].shape[2], options.pages_at_once
  inside = jnp.arange(at_once * size).reshape(at_once, size)
  contract = options.products.contract

  def add_some(i, found):
    table = jax.lax.dynamic_slice_in_dim(tables, i * at_once, at_once, axis=1)
    keys, values = (jnp.take(x, table, axis=0) for x in pages)
    place = i * at_once * size + inside
    allowed = place[None] < lengths[:, None, None]
    scores = contract("bkme,bnkpe->bkmnp", asked, keys)
    allowed = allowed[:, None, None]
    if first is not None:
      allowed = allowed & (place[None, None, None] >= first[:, None, :, None, None])
    mask = jnp.broadcast_to(allowed, scores.shape)
    flat = lambda x: x.reshape(*x.shape[:3], at_once * size)
    back = lambda x: x.reshape(*x.shape[:3], at_once, size)
    mix = lambda weights: contract("bkmnp,bnkpe->bkme", back(weights), values)
    return parts.joined(found, parts.softmax(flat(scores), flat(mask), mix, options.products))

  rounds = (jnp.max(lengths) + at_once * size - 1) // (at_once * size)
  return jax.lax.fori_loop(0, rounds, add_some, found)


def _over_ring(
  asked: Float[Array, "R K r E"],
  ring: tuple[Array, Array],
  step: Int[Array, ""],
  lengths: Int[Array, " R"],
  window: int | None,
  options: Options,
) -> Partial:
  """Attends to the last `lengths` + 1 columns of the ring, up to the column of the step.

  With a window, to the last `window` of these.
  """
  count = asked.shape[0]
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  rounded = functools.partial(rounding.rounded, dtype=options.products.compute_dtype)
  queries = rounded(asked)[..., None]

  def attend_to_block(index):
    row_wise = lambda x: x[:count].astype(jnp.float32)[:, :, None]  # [R K 1 ...]
    at = index % blocks
    age = (step - at * columns - jnp.arange(columns)) % (blocks * columns)
    scores = jnp.sum(queries * row_wise(_at(keys, at)), axis=-2)
    allowed = age[None] <= lengths[:, None]
    if window is not None:
      allowed = allowed & (age[None] < window)
    mix = lambda w: jnp.sum(rounded(w)[..., None] * row_wise(_at(values, at)), axis=-2)
    return parts.softmax(scores, allowed[:, None, None], mix, options.products)

  if blocks == 1:
    return attend_to_block(0)
  last = step // columns
  first = jnp.maximum((step - jnp.max(lengths)) // columns, last - blocks + 1)
  merge = lambda index, found: parts.joined(found, attend_to_block(index))
  return jax.lax.fori_loop(first, last + 1, merge, parts.nothing(asked))


def _over_past(
  asked: Float[Array, "S K m E"],
  found: Partial,
  ring: tuple[Array, Array],
  pieces: Pieces,
  first: Int[Array, "S m"] | None,
  options: Options,
) -> Partial:
  """Adds attention to the first `past` tokens of each piece's row in the ring.

  Queries see these tokens from number `first` on; None: all.
  """
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  width = _divisor(columns, at_most=_COLUMNS_AT_ONCE)
  count, contract = blocks * columns // width, options.products.contract
  rows, step = jnp.asarray(pieces.rows), jnp.asarray(pieces.step)
  lengths, past = jnp.asarray(pieces.lengths), jnp.asarray(pieces.past)

  def columns_of(x, at, axis):
    """Returns some columns of the rows of the pieces."""
    x = _at(x, at * width // columns)
    x = jax.lax.dynamic_slice_in_dim(x, at * width % columns, width, axis)
    return jnp.take(x, rows, axis=0)

  def add_some(index, found):
    at = index % count
    age = (step - 1 - at * width - jnp.arange(width)) % (blocks * columns)
    number = lengths[:, None] - 1 - age[None]  # of the row's token in each column.
    allowed = ((number >= 0) & (number < past[:, None]))[:, None, None]
    if first is not None:
      allowed = allowed & (number[:, None, None] >= first[:, None, :, None])
    scores = contract("bkme,bkec->bkmc", asked, columns_of(keys, at, -1))
    mask = jnp.broadcast_to(allowed, scores.shape)
    mix = lambda weights: contract("bkmc,bkce->bkme", weights, columns_of(values, at, -2))
    return parts.joined(found, parts.softmax(scores, mask, mix, options.products))

  last = (step - 1) // width
  oldest = jnp.maximum((step - jnp.max(lengths)) // width, last - count + 1)
  end = jnp.where(jnp.max(past) > 0, last + 1, oldest)
  return jax.lax.fori_loop(oldest, end, add_some, found)


def _divisor(number: int, *, at_most: int) -> int:
  """Returns the largest divisor of a number that is not above a limit."""
  return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)


def _append(
  ring: tuple[Array, Array],
  key: Float[Array, "R K E"],
  value: Float[Array, "R K E"],
  step: Int[Array, ""],
  options: Options,
) -> tuple[Array, Array]:
  """Writes one token of every row into the column of the step."""
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  block, column = step // columns % blocks, step % columns
  write = jax.lax.dynamic_update_slice
  keys = write(keys, key.astype(keys.dtype)[None, ..., None], (block, 0, 0, 0, column))
  values = write(values, value.astype(values.dtype)[None, :, :, None], (block, 0, 0, column, 0))
  return _placed(keys, options, row_axis=1), _placed(values, options, row_axis=1)


def _moved(ring: Cache, rows: RowStates) -> Cache:
  """Moves rows of the ring, one after another."""

  def move(i, ring):
    at, to = jnp.asarray(rows.moves)[i]
    # Not a slice: on a mesh it would bring all rows to every device.
    take = lambda x: jnp.take(x, at[None], axis=1, mode="clip")
    put = lambda x: jax.lax.dynamic_update_slice_in_dim(x, take(x), to, axis=1)
    return jax.tree.map(put, ring)

  return jax.lax.fori_loop(0, jnp.asarray(rows.num_moves), move, ring)


def _at(x: Array, index: Any) -> Array:
  return x[0] if x.shape[0] == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _placed(cache: Array, options: Options, *, row_axis: int | None = None) -> Array:
  """Splits a cache's heads as the key projection is split, and rows over the other mesh axes.

  Queries are split the same way: otherwise the ring would move to them. Pages are copied to every
  device that may have a row of their prompt.
  """
  if options.mesh is None:
    return cache
  parts = math.prod(options.mesh.shape[axis] for axis in options.row_axes)
  if row_axis is None:
    spec = PartitionSpec(None, options.head_axis)
  else:
    is_even = cache.shape[row_axis] % parts == 0
    rows = options.row_axes if is_even else None
    spec = PartitionSpec(*[None] * row_axis, rows, options.head_axis)
  return jax.lax.with_sharding_constraint(cache, NamedSharding(options.mesh, spec))
