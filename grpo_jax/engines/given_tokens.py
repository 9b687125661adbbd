"""Logprobs of tokens that are given, and the most likely tokens in their places.

The sampler's own weights read the tokens in chunks, as a prefill does, so that the logprobs are
those that it samples with. Each sequence is read alone, in chunks that depend on its length only:
its logprobs are the same whatever else is computed.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.linear_logprobs import core
from jaxtyping import Array, Float, Int

from grpo_jax.compilation import precision
from grpo_jax.compilation.programs import Program, abstract
from grpo_jax.engines import decoding, kv_cache, prompt_pages, scheduling
from grpo_jax.engines.base import GivenScores
from grpo_jax.engines.continuous_batching import NonFiniteLogits
from grpo_jax.engines.kv_cache import Cache
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.engines.sampler_inputs import PrefillChunk, ProgramOptions
from grpo_jax.engines.sampler_weights import SamplerWeights
from grpo_jax.engines.scheduling import Slot
from grpo_jax.engines.weight_readings import Reading
from grpo_jax.models import layers

MOST_ALTERNATIVES = 20  # most likely tokens that are found at each place.
_HEAD_TOKENS = 64  # whose logits are in memory at the same time.


@dataclasses.dataclass(frozen=True)
class _Sizes:
  """The sizes of a call, by the form of the sampler's cache."""

  tokens: int  # read at once; more mean more padding of short sequences.
  page: int  # tokens of a page.
  at_once: int  # pages that one round of the loop over pages reads.


_SIZES = {"ring": _Sizes(128, 64, 1), "rows": _Sizes(512, 256, 4)}


@runtime_checkable
class ReadsWeights(Protocol):
  """A sampler that lets others read its weights."""

  def read(self, reading: Reading) -> "Future[Any]":
    """Has a function read the weights between two chunks of decode steps."""
    ...


class GivenTokenScorer:
  """Scores sequences with the weights of a sampler."""

  def __init__(self, sampler: ReadsWeights, *, max_length: int):
    """Makes a scorer. Nothing is compiled before it is needed.

    Args:
      sampler: Sampler, which reads a sequence between two chunks of decode steps.
      max_length: Tokens of the longest sequence.
    """
    self._sampler = sampler
    self._max_length = max_length
    self._pages: Cache = []
    self._program = Program(_score, name="scoring given tokens", static=["options"])

  async def score(
    self, ids: Int[np.ndarray, " _"], temperatures: Float[np.ndarray, " _"]
  ) -> GivenScores:
    """Scores all tokens of a sequence but the first.

    Args:
      ids: Token ids, at most `max_length`.
      temperatures: Temperature of the logprobs of each token after the first.

    Raises:
      NonFiniteLogits: The model's logits are not finite.
      RuntimeError: The sampler was closed.
    """
    if len(ids) == 1:
      nothing = np.zeros((0, 0), np.float32)
      return GivenScores(np.zeros(0, np.float32), nothing.astype(np.int32), nothing)
    return await asyncio.wrap_future(self.begin(ids, temperatures))

  def begin(
    self, ids: Int[np.ndarray, " _"], temperatures: Float[np.ndarray, " _"]
  ) -> "Future[GivenScores]":
    """Begins to score a sequence of at least two tokens; see `score`."""
    return self._sampler.read(functools.partial(self._read, ids, temperatures))

  def _read(
    self,
    ids: Int[np.ndarray, " _"],
    temperatures: Float[np.ndarray, " _"],
    weights: SamplerWeights,
    options: ProgramOptions,
  ) -> GivenScores:
    """Scores a sequence, in the sampler's thread."""
    sizes, count = _SIZES[options.form], len(ids) - 1
    table = -(-(self._max_length - 1) // sizes.page)
    options = dataclasses.replace(options, pages_at_once=sizes.at_once)
    pools = [_pool(window, table, sizes) for window in kv_cache.windows(options.config)]
    slot = Slot(tuple(tuple(range(pool.needed(count))) for pool in pools), count)
    chunks = scheduling.make_chunks([(ids[:-1], slot)], tokens=sizes.tokens, pools=pools)
    room = -count % sizes.tokens
    by_chunk = lambda x, filler: np.pad(x, (0, room), constant_values=filler).reshape(
      -1, sizes.tokens
    )
    targets = by_chunk(ids[1:].astype(np.int32), 0)
    divisors = by_chunk(temperatures.astype(np.float32), 1.0)
    found = []
    for chunk, *asked in zip(chunks, targets, divisors, strict=True):
      if not self._pages:
        counts = tuple(pool.count for pool in pools)
        self._pages = _empty_pages(counts, sizes.page, options)
        # Ahead, because the pages that the program returns are placed otherwise than empty ones.
        described = abstract((weights, self._pages, chunk, *asked))
        self._program.job(*described, options=options)()
      self._pages, scores = self._program(weights, self._pages, chunk, *asked, options=options)
      found.append(scores)
    return _scores(jax.device_get(found), ids)


def _pool(window: int | None, table: int, sizes: _Sizes) -> Pool:
  """Returns the pages of one sequence in the layers of a window."""
  kept = prompt_pages.table_of(window, table, sizes.page)
  return Pool(window, kept, sizes.page, kept)


def _scores(found: Sequence[tuple[np.ndarray, ...]], ids: Int[np.ndarray, " _"]) -> GivenScores:
  """Joins the scores of the chunks of a sequence."""
  count = len(ids) - 1
  logprobs, top_ids, top_logprobs = (
    np.concatenate(part)[:count] for part in zip(*found, strict=True)
  )
  if not np.isfinite(logprobs).all():
    raise NonFiniteLogits("scoring given tokens: the logits are not finite")
  # The same number, to the last bit, where the token itself is among the most likely.
  is_token = top_ids == ids[1:, None]
  return GivenScores(logprobs, top_ids, np.where(is_token, logprobs[:, None], top_logprobs))


@functools.partial(jax.jit, static_argnames="options", donate_argnames="pages")
def _score(
  weights: SamplerWeights,
  pages: Cache,
  chunk: PrefillChunk,
  targets: Int[Array, " n"],
  temperatures: Float[Array, " n"],
  options: ProgramOptions,
) -> tuple[Cache, tuple[Float[Array, " n"], Int[Array, "n k"], Float[Array, "n k"]]]:
  """Reads a chunk of a sequence, and scores the token after each of its tokens.

  Args:
    weights: Weights made by `split_layers`.
    pages: Keys and values of the sequence's earlier tokens.
    chunk: Tokens of one sequence.
    targets: Token after each of them.
    temperatures: Temperature of the logprobs.
    options: Options of the program; static.

  Returns:
    The pages with the chunk; logprobs of the targets, and the most likely tokens with theirs.
  """
  config, most = options.config, options.num_valid or options.config.vocab_size

  def of_few(asked):
    hidden, targets, temperatures = asked
    logits = decoding.logits_of(weights, hidden, options)
    logits = (logits - jnp.max(logits, axis=1, keepdims=True)) / temperatures[:, None]
    total = jnp.sum(jnp.exp(logits), axis=1)
    at = lambda ids: jnp.take_along_axis(logits, ids, axis=1)
    is_valid = np.arange(logits.shape[1])[None] < most
    _, top = jax.lax.top_k(jnp.where(is_valid, logits, -jnp.inf), min(MOST_ALTERNATIVES, most))
    ids = jnp.concatenate([targets[:, None], top], axis=1)
    found = core.Statistics(jnp.zeros_like(total)[:, None], total[:, None], None, at(ids))
    logprobs, _ = core.outputs(core.Settings(), found)  # computed as in the trainer.
    return logprobs[:, 0], top, logprobs[:, 1:]

  with precision.scope(options.matmul_precision):
    pages, x, _ = decoding.read(weights, pages, chunk, options)
    x = layers.norm(x, weights.final_norm, config=config, products=options.products)[:, 0]
    by_few = lambda x: x.reshape(-1, _HEAD_TOKENS, *x.shape[1:])
    asked = (by_few(x), by_few(jnp.asarray(targets)), by_few(jnp.asarray(temperatures)))
    found = jax.lax.map(of_few, asked)
  return pages, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


_empty_pages = jax.jit(kv_cache.empty_pages, static_argnums=(0, 1, 2))
