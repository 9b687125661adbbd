"""The sampler's computation on the device: prefill of prompts, and a loop of decode steps. Pure.

A few programs serve all requests, and their shapes bound how much can be computed. `kv_cache`
describes the cache and has the letters of sizes; `cache_forms` has what differs between CPUs and
accelerators.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from grpo_kernels.attention import parts
from grpo_kernels.attention.parts import Partial
from grpo_kernels.attention.visible import visible
from grpo_kernels.linear_logprobs import reference
from jaxtyping import Array, Float, Int

from grpo_jax.compilation import precision
from grpo_jax.engines import (
  cache_forms,
  cached_attention,
  kv_cache,
  sampler_weights,
  sampling,
  stored_keys,
)
from grpo_jax.engines.kv_cache import Cache
from grpo_jax.engines.sampler_inputs import Pieces, PrefillChunk, ProgramOptions, RowStates
from grpo_jax.engines.sampler_weights import SamplerWeights
from grpo_jax.models import layers, rotary
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.placement import MeshPlacement, attention_partition
from grpo_jax.models.products import Products

_LayerCache = TypeVar("_LayerCache")


# Which experts each of n tokens went through; None: the options ask for no record.
Experts = Int[Array, "n L k"] | None


def prefill(
  weights: SamplerWeights, cache: Cache, chunk: PrefillChunk, options: ProgramOptions
) -> tuple[Cache, Experts]:
  """Computes keys and values of a chunk of prompts and writes them into their pages; see `read`."""
  cache, _, experts = read(weights, cache, chunk, options)
  return cache, experts


def read(
  weights: SamplerWeights, cache: Cache, chunk: PrefillChunk, options: ProgramOptions
) -> tuple[Cache, Float[Array, "n 1 D"], Experts]:
  """Feeds a chunk of prompts to the model, and writes their keys and values into their pages.

  Each token is a row of its own. On a mesh tokens are split as the rows of a batch are, weights are
  gathered, and only queries, keys and values go to all devices: the pages hold the latter there,
  and attention of a chunk is little work.

  Args:
    weights: Weights made by `split_layers`.
    cache: The pages.
    chunk: Tokens of prompts; those without their last token, if only the pages are needed.
    options: Options of the program; static.

  Returns:
    The pages with the keys and values of the chunk; the hidden states after the last layer; the
    experts of its tokens.
  """
  size = cache[0][0].shape[2]
  is_first = jnp.asarray(chunk.segment_ids) == 1
  offsets = chunk.positions % size
  windows = kv_cache.windows(options.config)

  def write(pages, new, window):
    places = chunk.pages[windows.index(window)]
    put = lambda to, new: to.at[places, :, offsets].set(new, mode="drop")
    return kv_cache.placed(jax.tree.map(put, pages, new), options)

  def before(q, kv_heads, pages, first, window):
    tables, past = chunk.past_pages[windows.index(window)], jnp.asarray(chunk.past)
    given = jnp.asarray(tables.pages)[None], tables.local(past)[None], tables.local(first)
    found = _before(q, kv_heads, pages, *given, options)
    return parts.only_where(is_first[None, :, None], found)

  return _read(weights, cache, chunk, write, before, options)


def read_again(
  weights: SamplerWeights, prompts: Cache, own: Cache, pieces: Pieces, options: ProgramOptions
) -> Cache:
  """Computes keys and values of sampled tokens again, in their columns.

  For completions that were begun with other weights: afterwards the caches hold what
  they would if these weights had read every token. Calls must take the tokens of a row in their
  order. On a mesh, tokens are split as in `prefill`.

  Args:
    weights: Weights made by `split_layers`.
    prompts: The pages, already of these weights; read only.
    own: The sampled tokens.
    pieces: Tokens of rows: the last token of the prompt, then sampled tokens without the last.
    options: Options of the program; static.

  Returns:
    `own` with the keys and values of the pieces.
  """
  form, count = cache_forms.of(options), pieces.rows.shape[0]
  windows, prompt_lengths = kv_cache.windows(options.config), jnp.asarray(pieces.prompt_lengths)

  def write(cache, new, window):
    of_rows, pages = cache
    return form.write_again(of_rows, new, pieces, window, options), pages

  def before(q, kv_heads, cache, first, window):
    of_rows, pages = cache
    tables = pieces.pages[windows.index(window)]
    repeats = q.shape[2] // kv_heads
    by_piece = lambda x: None if x is None else x.reshape(count, -1)
    first = by_piece(first)
    asked = parts.by_kv_head(parts.scaled(q.reshape(count, -1, *q.shape[2:]), kv_heads))
    seen = cached_attention.for_queries(tables.local(first), repeats)
    held = jnp.asarray(tables.pages), tables.local(prompt_lengths)
    found = parts.nothing(asked)
    found = cached_attention.over_pages(asked, found, pages, *held, seen, options)
    own_first = None if first is None else first - prompt_lengths[:, None]
    seen = cached_attention.for_queries(own_first, repeats)
    found = form.over_past(asked, found, of_rows, pieces, seen, options)
    found = parts.by_token(found, q.shape[2])
    return parts.Partial(*(x.reshape(1, -1, *x.shape[2:]) for x in found))

  both = list(zip(own, prompts, strict=True))
  written, *_ = _read(weights, both, pieces, write, before, options)
  return [of_rows for of_rows, _ in written]


def _read(
  weights: SamplerWeights,
  cache: Sequence[_LayerCache],
  taken: PrefillChunk | Pieces,
  write: Callable[[_LayerCache, kv_cache.LayerCache, int | None], _LayerCache],
  before: Callable[..., Partial],
  options: ProgramOptions,
) -> tuple[list[_LayerCache], Float[Array, "n 1 D"], Experts]:
  """Feeds many tokens at once to the model, and writes their keys and values into a cache.

  Args:
    weights: Weights made by `split_layers`.
    cache: Cache of each layer, in the form that `write` and `before` take.
    taken: The tokens.
    write: Function (cache of a layer, stored keys and values [n K E], window) → the cache with
      them.
    before: Function (queries [1 n H E], K, cache of a layer, first position that each token sees or
      None, window) → attention to tokens of earlier calls, [1 n H]. With a window, the cache is as
      it was before `write`, which may take the places of tokens that are still seen.
    options: Options of the program; static.

  Returns:
    What the last `write` returned of each layer; the hidden states after the last layer; the
    experts of the tokens.
  """
  products = _prefill_products(options)
  config, positions = options.config, jnp.asarray(taken.positions)
  angles = _angles(positions[:, None], config)
  segment_ids = jnp.asarray(taken.segment_ids)[None]
  settings = {"config": config, "products": products}
  x = layers.embed(weights.embed, jnp.asarray(taken.tokens)[:, None], **settings)
  written, extras = [], []
  attention = dataclasses.replace(options.attention, partition=attention_partition(options.mesh))
  seen = {}
  for window in dict.fromkeys(kind.window for kind in config.kinds):
    of_window = visible(segment_ids, positions=positions[None], window=window)
    seen[window] = attention.prepared(of_window, width=config.head_dim, products=products)
  for i, (own, kind) in enumerate(zip(cache, config.kinds, strict=True)):

    def attend(q, k, v, own=own, window=kind.window):
      everywhere = ("prompts", "places", "kv_heads", "width")
      place = lambda y: products.place(y[None], everywhere)[0]
      new = tuple(jax.tree.map(place, stored_keys.stored(y[:, 0], options)) for y in (k, v))
      unwritten, own = own, write(own, new, window)
      # Tokens of the call are seen as later ones see them, so no result depends on the calls.
      k, v = (stored_keys.read(y, options)[None] for y in new)
      q = q.swapaxes(0, 1)  # one row of all tokens, as the keys and values.
      here = attention.partial(q, k, v, seen[window], products=products)
      read = own if window is None else unwritten
      first = cached_attention.first_seen(positions, window)
      earlier = before(q, k.shape[2], read, first, window)
      found = parts.joined(here, earlier)
      return (found.mixed / found.total[..., None]).swapaxes(0, 1), own

    layer = sampler_weights.layer_params(weights, i, x)
    with precision.scope(options.matmul_precision):
      x, own, of_layer = layers.block(layer, x, *angles[kind.rope], attend, **settings)
    written.append(own)
    extras.append(of_layer)
  return written, x, _experts_in(extras, options)


def _experts_in(extras: Sequence[layers.Extras], options: ProgramOptions) -> Experts:
  """Returns the experts of the tokens [n 1] that went through the layers."""
  if options.experts is None:
    return None
  chosen = [of_layer["experts"][:, 0] for of_layer in extras]
  return jnp.stack(chosen, axis=1).astype(options.experts.dtype)


def _before(
  q: Float[Array, "1 T H E"],
  kv_heads: int,
  pages: kv_cache.LayerCache,
  tables: Int[Array, "1 W"],
  lengths: Int[Array, " 1"],
  first: Int[Array, " T"] | None,
  options: ProgramOptions,
) -> Partial:
  """Returns the attention of a row's tokens to the tokens of pages; [1 T H]."""
  asked = parts.by_kv_head(parts.scaled(q, kv_heads))
  seen = cached_attention.for_queries(
    None if first is None else first[None], q.shape[2] // kv_heads
  )
  found = cached_attention.over_pages(
    asked, parts.nothing(asked), pages, tables, lengths, seen, options
  )
  return parts.by_token(found, q.shape[2])


def _prefill_products(options: ProgramOptions) -> Products:
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
  options: ProgramOptions,
) -> tuple[Cache, Int[Array, "R chunk"], Float[Array, "R chunk"], Int[Array, "R chunk L k"] | None]:
  """Runs decode steps until the chunk is full or at most `leave_at` rows are unfinished.

  Args:
    weights: Weights made by `split_layers`.
    prompts: Keys and values of the pages; read only.
    own: Keys and values of the sampled tokens, whose first R rows are used.
    rows: State of the rows.
    leave_at: Number of unfinished rows at which the loop ends early; 0: when all have stopped.
    options: Options of the program; static.

  Returns:
    `own` with the new tokens; the sampled tokens, with -1 after the last token of each row; their
    logprobs; the experts of the tokens that were fed, each of which is the one before that which
    was sampled.
  """
  count, experts = rows.tokens.shape[0], options.experts
  start = (
    jnp.int32(0),
    cache_forms.of(options).moved(own, rows, options),
    jnp.asarray(rows.tokens),
    jnp.zeros(count, jnp.int32),
    jnp.asarray(rows.remaining) > 0,
    jnp.full((count, options.chunk), -1, jnp.int32),
    jnp.zeros((count, options.chunk), jnp.float32),
    None if experts is None else jnp.asarray(experts.unknown(count, options.chunk)),
  )

  def continues(state):
    i, _, _, _, alive, *_ = state
    return (i < options.chunk) & (jnp.sum(alive) > leave_at)

  def step(state):
    i, own, tokens, done, alive, sampled, logprobs, experts = state
    lengths = rows.lengths + done
    with precision.scope(options.matmul_precision):
      logits, own, chosen = decode_step(weights, prompts, own, tokens, lengths, i, rows, options)
    experts = None if experts is None else experts.at[:, i].set(chosen)
    drawn, logprob = _drawn(logits, lengths, rows, options)
    sampled = sampled.at[:, i].set(jnp.where(alive, drawn, -1))
    logprobs = logprobs.at[:, i].set(jnp.where(alive, logprob, 0.0))
    done = done + alive
    stopped = jnp.any(drawn[:, None] == rows.stop_ids, axis=1) | (done >= rows.remaining)
    tokens = jnp.where(alive, drawn, tokens)
    return i + 1, own, tokens, done, alive & ~stopped, sampled, logprobs, experts

  final = jax.lax.while_loop(continues, step, start)
  _, own, _, _, _, sampled, logprobs, recorded = final
  return own, sampled, logprobs, recorded


def decode_step(
  weights: SamplerWeights,
  prompts: Cache,
  own: Cache,
  tokens: Int[Array, " R"],
  lengths: Int[Array, " R"],
  number: Int[Array, ""],
  rows: RowStates,
  options: ProgramOptions,
) -> tuple[Float[Array, "R V"], Cache, Experts]:
  """Feeds one token of every row to the model.

  Args:
    weights: Weights made by `split_layers`.
    prompts: The pages.
    own: The sampled tokens.
    tokens: Token ids to feed.
    lengths: Number of tokens of each row in `own`, without this one.
    number: Number of the step within its chunk.
    rows: State of the rows before the chunk; only what the steps do not change is read.
    options: Options of the program; static.

  Returns:
    Logits of the next token, float32; `own` with this token in it; its experts.
  """
  config, form = options.config, cache_forms.of(options)
  products = dataclasses.replace(options.products, every_expert=options.mesh is not None)
  angles = _angles((jnp.asarray(rows.prompt_lengths) + lengths)[:, None], config)
  settings = {"config": config, "products": products}
  at = jnp.asarray(rows.step) + number, lengths, jnp.asarray(rows.prompt_lengths)
  of_layers = kv_cache.by_layer(rows.prompts, config)
  x, written, extras = layers.embed(weights.embed, tokens[:, None], **settings), [], []
  caches = zip(prompts, own, of_layers, config.kinds, strict=True)
  for i, (pages, of_rows, listed, kind) in enumerate(caches):

    def attend(q, k, v, pages=pages, of_rows=of_rows, listed=listed, window=kind.window):
      heads, width = q.shape[2:]
      asked = q.reshape(q.shape[0], k.shape[2], -1, width) * (width**-0.5)
      asked = kv_cache.placed(asked, options, row_axis=0)
      new = asked, k[:, 0], v[:, 0]
      attended, of_rows = form.attend(*new, of_rows, pages, listed, at, window, options)
      attended = kv_cache.placed(attended, options, row_axis=0)
      attended = attended.reshape(q.shape[0], 1, heads, width)
      # Split like `o`, which would otherwise be gathered.
      lies = ("rows", "places", "heads", "width")
      return _prefill_products(options).place(attended, lies), of_rows

    layer = sampler_weights.layer_params(weights, i, x)
    x, of_rows, of_layer = layers.block(layer, x, *angles[kind.rope], attend, **settings)
    written.append(of_rows)
    extras.append(of_layer)
  x = layers.norm(x, weights.final_norm, **settings)[:, 0]
  return logits_of(weights, x, options), written, _experts_in(extras, options)


def logits_of(
  weights: SamplerWeights, hidden: Float[Array, "n D"], options: ProgramOptions
) -> Float[Array, "n V"]:
  """Returns logits of hidden states after the final norm.

  The same product as in the trainer's logprobs, in the same precision on every platform.
  """
  layout = "vd" if options.config.tie_embeddings else "dv"
  hidden = hidden.astype(options.products.compute_dtype)
  return reference.dot(hidden, weights.head, head_layout=layout)


def _drawn(
  logits: Float[Array, "R V"], lengths: Int[Array, " R"], rows: RowStates, options: ProgramOptions
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
  """Samples a token for every row; filters are computed only if a row has any, or may have."""
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
  if options.has_filters is False:
    settings = {"num_valid": options.num_valid, "report_truncated": options.report_truncated}
    return sampling.sample_in_one_pass(logits, uniforms, temperature=temperature, **settings)
  if options.has_filters:
    return draw(filters, reports)
  has_filters = (filters[0] > 0) | (filters[1] < 1.0) | (filters[2] > 0.0)
  is_truncated = jnp.any(has_filters & (temperature > 0))
  return jax.lax.cond(
    is_truncated, lambda: draw(filters, reports), lambda: draw(None, options.report_truncated)
  )


def _angles(positions: Int[Array, "B T"], config: ModelConfig) -> dict[int | None, tuple[Any, Any]]:
  """Returns the rotary angles of every table that a layer has; see `rotary.angles`."""
  tables = dict.fromkeys(kind.rope for kind in config.kinds)
  return {table: rotary.angles(positions, config, table) for table in tables}
