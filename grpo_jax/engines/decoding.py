"""The sampler's computation on the device: prefill of prompts, and a loop of decode steps. Pure.

A prompt's keys and values stand once, in a slot, for all the completions that continue it; a row
has a cache of its own for what it sampled, and the index of its slot. The last token of the
prompt is the first that a row feeds to the model, so slots hold the prompt without it.

Layers are unrolled over per-layer arrays: a scan would copy every layer's weights and cache out
of the stacked arrays at every token. R rows, S slots, C the length of a row's own cache.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.linear_logprobs import reference
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from grpo_jax import precision
from grpo_jax.engines import sampling
from grpo_jax.models import layers, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import OutputMajor, Products

_MASKED = -1e30

# (keys, values) of every layer: [S K T E] of the prompts, [R K C E] of the rows.
Cache = list[tuple[Array, Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
  """The parameters as the sampler reads them."""

  embed: Float[Array, "V D"]  # the trainer's own array.
  layers: list[layers.LayerParams]  # kernels in the compute dtype, transposed.
  final_norm: Float[Array, " D"]
  head: Array  # in the compute dtype; the trainer's own array if that is float32.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """The state of every row between chunks; made anew on the host for each."""

  tokens: Int[Array | np.ndarray, " R"]  # the next to be fed to the model.
  slots: Int[Array | np.ndarray, " R"]
  prompt_lengths: Int[Array | np.ndarray, " R"]  # tokens of the slot.
  lengths: Int[Array | np.ndarray, " R"]  # tokens of the row's own cache = tokens sampled so far.
  remaining: Int[Array | np.ndarray, " R"]  # tokens that may still be sampled; 0: the row is idle.
  seeds: UInt[Array | np.ndarray, "R 2"]
  temperature: Float[Array | np.ndarray, " R"]
  top_k: Int[Array | np.ndarray, " R"]
  top_p: Float[Array | np.ndarray, " R"]
  min_p: Float[Array | np.ndarray, " R"]
  stop_ids: Int[Array | np.ndarray, "R n"]  # padded with -1.


@dataclasses.dataclass(frozen=True)
class Options:
  """What a decode step is compiled for, beside shapes; hashable."""

  config: ModelConfig
  products: Products
  chunk: int  # decode steps of one call, at most.
  num_valid: int | None  # see `sampling.sample`.
  is_truncated: bool  # some row has top-k, top-p or min-p.
  report_truncated: bool
  mesh: Mesh | None = None
  head_axis: Any = None  # mesh axes over which key/value heads are split.
  row_axes: tuple[str, ...] = ()  # mesh axes over which rows are split, if they can be evenly.
  matmul_precision: str | None = None  # of float32 products; see `precision.resolve`.


def split_layers(params: transformer.Params, options: Options) -> Weights:
  """Makes the per-layer arrays out of the stacked ones, once per change of weights.

  Kernels are rounded to the compute dtype here and not at every token. In float32 the
  embedding, the head and the final norm are the trainer's own arrays and not copies.
  """
  dtype = options.products.compute_dtype
  head, _ = transformer.head(params, options.config)
  return Weights(
    embed=params["embed"],
    layers=_unstack(params["layers"], options.config.num_layers, dtype),
    final_norm=params["final_norm"],
    head=head if head.dtype == dtype else head.astype(dtype),
  )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unstack(stacked: dict[str, Array], num_layers: int, dtype: Any) -> list[layers.LayerParams]:
  def of_layer(x, i):
    # Norms and biases, [L n], stay float32: they are not factors of a product.
    return OutputMajor(x[i].T.astype(dtype)) if x.ndim == 3 else x[i].astype(jnp.float32)

  return [{name: of_layer(x, i) for name, x in stacked.items()} for i in range(num_layers)]


def empty_cache(count: int, length: int, options: Options, *, of_rows: bool = False) -> Cache:
  """Returns a zeroed cache of `count` slots, or rows, each for `length` tokens."""
  config = options.config
  shape = (count, config.num_kv_heads, length, config.head_dim)
  make = lambda: _placed(jnp.zeros(shape, options.products.compute_dtype), options, of_rows=of_rows)
  return [(make(), make()) for _ in range(config.num_layers)]


def resize(
  cache: Cache,
  places: Int[Array, " n"],
  length: int,
  options: Options,
  *,
  of_rows: bool = False,
) -> Cache:
  """Returns the slots, or rows, at `places`, with room for `length` >= the present tokens each."""

  def one(x):
    x = jnp.take(x, places, axis=0)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))
    return _placed(x, options, of_rows=of_rows)

  return jax.tree.map(one, cache)


def prefill(
  weights: Weights,
  cache: Cache,
  tokens: Int[Array, "P T"],
  lengths: Int[Array, " P"],
  slots: Int[Array, " P"],
  options: Options,
) -> Cache:
  """Computes keys and values of prompts and writes them into their slots.

  Args:
    weights: see `split_layers`.
    cache: of the slots, at least T long.
    tokens: prompts less their last token, padded on the right.
    lengths: of the prompts; 0 for a padding row.
    slots: where they go; out of range for a padding row, which is dropped.
    options: static.
  """
  count, length = tokens.shape
  places = jnp.broadcast_to(jnp.arange(length)[None], (count, length))
  segment_ids = (places < lengths[:, None]).astype(jnp.int32)
  cos, sin = layers.rope_angles(places, options.config)
  settings = {"config": options.config, "products": options.products}
  x, written = options.products.look_up(weights.embed, tokens), []
  for layer, (keys, values) in zip(weights.layers, cache, strict=True):

    def attend(q, k, v, keys=keys, values=values):
      def write(to, x):
        x = x.transpose(0, 2, 1, 3).astype(to.dtype)
        return _placed(to.at[slots, :, :length].set(x, mode="drop"), options, of_rows=False)

      attended = layers.packed_attention(q, k, v, segment_ids, products=options.products)
      return attended, (write(keys, k), write(values, v))

    with precision.scope(options.matmul_precision):
      x, extra = layers.block(layer, x, cos, sin, attend, **settings)
    written.append(extra)
  return written


def decode(
  weights: Weights,
  prompts: Cache,
  own: Cache,
  rows: Rows,
  leave_at: Int[Array, ""],
  options: Options,
) -> tuple[Cache, Int[Array, "R chunk"], Float[Array, "R chunk"]]:
  """Runs decode steps until the chunk is full or at most `leave_at` rows are still going.

  Args:
    weights: see `split_layers`.
    prompts: keys and values of the slots; read only.
    own: of the rows; a row of length n holds n tokens, what stands behind them is ignored.
    rows: their state.
    leave_at: 0 goes on until every row has stopped.
    options: static.

  Returns:
    The rows' cache; the sampled tokens, -1 behind the last of each row; their logprobs.
  """
  count = rows.tokens.shape[0]
  start = (
    jnp.int32(0),
    own,
    jnp.asarray(rows.tokens),
    jnp.zeros(count, jnp.int32),
    jnp.asarray(rows.remaining) > 0,
    jnp.full((count, options.chunk), -1, jnp.int32),
    jnp.zeros((count, options.chunk), jnp.float32),
  )

  def goes_on(state):
    i, _, _, _, alive, _, _ = state
    return (i < options.chunk) & (jnp.sum(alive) > leave_at)

  def step(state):
    i, own, tokens, done, alive, sampled, logprobs = state
    lengths = rows.lengths + done
    with precision.scope(options.matmul_precision):
      logits, own = decode_step(weights, prompts, own, tokens, lengths, rows, options)
    drawn, logprob = sampling.sample(
      logits,
      sampling.uniforms(jnp.asarray(rows.seeds), lengths),
      temperature=jnp.asarray(rows.temperature),
      filters=_filters(rows) if options.is_truncated else None,
      num_valid=options.num_valid,
      report_truncated=options.report_truncated,
    )
    sampled = sampled.at[:, i].set(jnp.where(alive, drawn, -1))
    logprobs = logprobs.at[:, i].set(jnp.where(alive, logprob, 0.0))
    done = done + alive
    stopped = jnp.any(drawn[:, None] == rows.stop_ids, axis=1) | (done >= rows.remaining)
    tokens = jnp.where(alive, drawn, tokens)
    return i + 1, own, tokens, done, alive & ~stopped, sampled, logprobs

  _, own, _, _, _, sampled, logprobs = jax.lax.while_loop(goes_on, step, start)
  return own, sampled, logprobs


def decode_step(
  weights: Weights,
  prompts: Cache,
  own: Cache,
  tokens: Int[Array, " R"],
  lengths: Int[Array, " R"],
  rows: Rows,
  options: Options,
) -> tuple[Float[Array, "R V"], Cache]:
  """Feeds one token of every row to the model.

  Args:
    weights: see `split_layers`.
    prompts: of the slots.
    own: of the rows.
    tokens: ids to feed.
    lengths: tokens in the rows' own caches, before this one.
    rows: for what does not change from step to step.
    options: static.

  Returns:
    Logits of the next token, float32; the rows' caches with this token in them.
  """
  positions = jnp.asarray(rows.prompt_lengths) + lengths
  cos, sin = layers.rope_angles(positions[:, None], options.config)
  settings = {"config": options.config, "products": options.products}
  in_prompt = jnp.arange(prompts[0][0].shape[2])[None] < rows.prompt_lengths[:, None]
  in_own = jnp.arange(own[0][0].shape[2])[None] <= lengths[:, None]
  mask = jnp.concatenate([in_prompt, in_own], axis=1)
  x, written = options.products.look_up(weights.embed, tokens[:, None]), []
  for layer, prompt, cache in zip(weights.layers, prompts, own, strict=True):

    def attend(q, k, v, prompt=prompt, cache=cache):
      cache = (_append(cache[0], k, lengths, options), _append(cache[1], v, lengths, options))
      # Tied to q, the gather of a layer's prompts cannot be scheduled long before its use.
      q, slots = jax.lax.optimization_barrier((q, jnp.asarray(rows.slots)))
      prompt = (jnp.take(prompt[0], slots, axis=0), jnp.take(prompt[1], slots, axis=0))
      return attend_in_two(q, prompt, cache, mask, options.products), cache

    x, cache = layers.block(layer, x, cos, sin, attend, **settings)
    written.append(cache)
  x = layers.rms_norm(x, weights.final_norm, options.config.rms_norm_eps)[:, 0]
  layout = "vd" if options.config.tie_embeddings else "dv"
  # The product that the trainer's logprobs are made of, in its precision on every platform.
  logits = reference.dot(x.astype(options.products.compute_dtype), weights.head, head_layout=layout)
  return logits, written


def attend_in_two(
  q: Float[Array, "R 1 H E"],
  prompt: tuple[Array, Array],
  own: tuple[Array, Array],
  mask: Bool[Array, "R S"],
  products: Products,
) -> Float[Array, "R 1 H E"]:
  """Attends to a prompt and to a row's own tokens at once, without joining the two caches.

  The same softmax(q kᵀ / √E) v as `layers.attention`, rounded at the same places: only the scores
  are concatenated.

  Args:
    q: of one token a row.
    prompt: keys and values, [R K T E].
    own: keys and values, [R K C E].
    mask: True where the row may attend, of the T and then the C.
    products: how products are computed.
  """
  rows, _, heads, width = q.shape
  kv_heads, split = prompt[0].shape[1], prompt[0].shape[2]
  grouped = q.reshape(rows, kv_heads, heads // kv_heads, width) * (width**-0.5)
  score = lambda keys: products.contract("bkre,bkse->bkrs", grouped, keys)
  scores = jnp.concatenate([score(prompt[0]), score(own[0])], axis=-1)
  scores = jnp.where(mask[:, None, None], scores, _MASKED)
  highest = jnp.max(scores, axis=-1, keepdims=True)
  weights = jnp.exp(scores - layers.softmax_shift(highest, products))
  total = jnp.sum(weights, axis=-1, keepdims=True)
  mix = lambda w, values: products.contract("bkrs,bkse->bkre", w, values)
  mixed = mix(weights[..., :split], prompt[1]) + mix(weights[..., split:], own[1])
  return (mixed / total).reshape(rows, 1, heads, width)


def _append(
  cache: Float[Array, "R K C E"],
  new: Float[Array, "R 1 K E"],
  lengths: Int[Array, " R"],
  options: Options,
) -> Float[Array, "R K C E"]:
  """Writes one token of each row behind its last; a row that has stopped writes over its end."""
  places = jnp.arange(cache.shape[0])
  last = jnp.minimum(lengths, cache.shape[2] - 1)
  cache = cache.at[places, :, last].set(new[:, 0].astype(cache.dtype))
  return _placed(cache, options, of_rows=True)


def _filters(rows: Rows) -> tuple[Array, Array, Array]:
  return jnp.asarray(rows.top_k), jnp.asarray(rows.top_p), jnp.asarray(rows.min_p)


def _placed(cache: Array, options: Options, *, of_rows: bool) -> Array:
  """Splits a cache over its heads as the key projection is split, and rows over the other axes.

  Slots stand on every device that may have a row of theirs.
  """
  if options.mesh is None:
    return cache
  parts = math.prod(options.mesh.shape[axis] for axis in options.row_axes)
  rows = options.row_axes if of_rows and cache.shape[0] % parts == 0 else None
  sharding = NamedSharding(options.mesh, PartitionSpec(rows, options.head_axis, None, None))
  return jax.lax.with_sharding_constraint(cache, sharding)
