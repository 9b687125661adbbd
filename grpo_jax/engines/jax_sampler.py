"""The embedded sampler: in process, on the trainer's own parameters.

A worker thread computes while the caller's event loop scores finished completions. The engine keeps
one thread for its whole life, because malloc reuses freed memory only within the thread.
`continuous_batching.py` forms the batches, `decoding.py` is what runs on the device, and
`weight_sync.py` copies the weights.

Equal seeds give equal completions, whatever else is computed at the same time: random numbers
depend on seed and token index only. What remains is rounding: with another number of rows, sums may
be taken in another order, and then the last bits of a logit change.
"""

import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import AUTOMATIC, Attention
from grpo_kernels.implementations import current_chip
from jaxtyping import Float

from grpo_jax import registry
from grpo_jax.compilation import host_memory, precision
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.engines import (
  base,
  cache_forms,
  given_tokens,
  sampler_inputs,
  sampler_memory,
  sampler_weights,
  scheduling,
  stopping,
)
from grpo_jax.engines.continuous_batching import ContinuousBatcher, Stats
from grpo_jax.engines.generate_call import GenerateCall
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.sampler_programs import Programs, caches
from grpo_jax.engines.weight_readings import Reading, WaitingReadings
from grpo_jax.engines.weight_sync import SyncedWeights, WeightSync
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products

_log = logging.getLogger(__name__)


class JaxSampler:
  """Samples on the devices of the parameters, or on others of this process; see `base.Engine`."""

  def __init__(
    self,
    config: ModelConfig,
    *,
    decode: stopping.Decode | None = None,
    compute_dtype: Any = jnp.float32,
    product_dtype: Any = None,
    matmul_precision: str | None = None,
    attention: Attention = AUTOMATIC,
    max_rows: int = USUAL_ROWS,
    max_length: int | None = None,
    chunk_tokens: int = 16,
    num_valid_tokens: int | None = None,
    report_truncated_logprobs: bool = False,
    warn_of_truncation: bool = True,
    copy_weights: bool = False,
    in_flight_updates: bool = False,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    group_size: int = 8,
    long_prompts: int | None = None,
    whole_caches: bool = False,
    has_filters: bool = True,
    unmerged: bool | None = None,
    devices: Sequence[Any] | None = None,
    record_experts: bool = False,
    cache_dtype: str | None = None,
    sampled_bytes: int | None = None,
  ):
    """Makes a sampler without weights; call `load_weights` before `generate`.

    Args:
      config: Sizes of the model.
      decode: Function from token ids to text, for stop strings; None: requests with stop strings
        are rejected.
      compute_dtype: Dtype of products, float32 or bfloat16; the trainer's, so that
        logprobs agree.
      product_dtype: Dtype of q, k, v, gate and up, the trainer's; see `products.Products`.
      matmul_precision: Precision of float32 products, the trainer's; see `precision.resolve`.
        None: "float32" in float32.
      attention: Choice of attention within prompts, that of the trainer.
      max_rows: Largest number of completions decoded at the same time; more wait. It bounds the
        caches' memory.
      max_length: Largest number of tokens of a prompt with its completion; None: the model's
        max_position_embeddings.
      chunk_tokens: Number of decode steps after which the host collects finished completions.
      num_valid_tokens: Number of token ids that may be sampled; later ones are padding of the
        embedding. None: all.
      report_truncated_logprobs: Whether, with top-k, top-p or min-p, all logprobs are of the
        truncated, renormalised distribution that was sampled from. False: as the request's
        `SamplingParams.logprobs` says.
      warn_of_truncation: Whether to warn once when a request has top-k, top-p or min-p, unless
        logprobs are of the truncated distribution.
      copy_weights: Whether to copy the embedding and the head too. Needed if the trainer donates
        or deletes the parameters while this samples (training asynchronously).
      in_flight_updates: Whether weights are meant to be loaded while completions are unfinished or
        requested. `programs` then has what this needs, and until the new weights are complete, the
        old ones stay and sample. False: `load_weights` works all the same, but compiles a
        program, makes completions wait, and frees the old weights first if the sampler is idle.
      prompt_tokens: Tokens of the longest planned prompt. Together with `completion_tokens` it
        fixes the sizes of the caches and so the programs. Longer requests are served too, but
        compile programs of their own. None: sizes follow the requests.
      completion_tokens: Tokens of the longest planned completion.
      group_size: Usual number of completions of a prompt; any number works.
      long_prompts: Prompts of the largest length that find room at the same time; others wait.
        None: one for each group of `group_size` in `max_rows` rows.
      whole_caches: Whether the planned caches may be larger than 4 GiB each, because the caller has
        counted their memory. False: larger ones grow when completions need them.
      has_filters: Whether requests may have top-k, top-p or min-p. On an accelerator such rows have
        programs of their own; False: these are not compiled before they are needed.
      unmerged: Whether the adapter of weights with one stays apart from their base, as in the
        trainer. The base is then copied once, and `load_weights` copies the adapter only. False:
        they are merged in float32 and rounded to the compute dtype. None: apart if that rounding
        loses some of the adapter, or if the base is quantised.
      devices: Devices of this process to sample on, without parameters; the model is split over
        them as by "tensor", and copied there layer by layer. None: those of the parameters.
      record_experts: Whether generations have the experts that their tokens went through; of a
        model without experts there are none.
      cache_dtype: Dtype of stored keys and values, "bfloat16" or "int8"; None: the compute dtype.
      sampled_bytes: Bytes of each device for keys and values of sampled tokens. If all rows need
        more, the youngest completions wait. None: the cache grows as long as memory lasts.
    """
    sampler_memory.check_sizes(config, max_rows, chunk_tokens, num_valid_tokens)
    self._config = config
    self._decode_text = decode
    self._max_rows = max_rows
    self._max_length = max_length or config.context
    self._warn_of_truncation = warn_of_truncation and not report_truncated_logprobs
    self._options = sampler_inputs.ProgramOptions(
      config=config,
      products=Products(compute_dtype, product_dtype),
      chunk=chunk_tokens,
      num_valid=num_valid_tokens,
      report_truncated=report_truncated_logprobs,
      group=max(min(group_size, max_rows), 1),
      form=cache_forms.on_platform(current_chip().platform),
      matmul_precision=precision.resolve(matmul_precision, compute_dtype),
      attention=attention,
      experts=config.expert_shape if record_experts else None,
      cache_dtype=cache_dtype,
    )
    self._sizes = sampler_memory.sizes_for(
      max_rows,
      self._options,
      prompt_tokens,
      completion_tokens,
      long_prompts=long_prompts,
      whole_caches=whole_caches,
      sampled_bytes=sampled_bytes,
    )
    self._in_flight_updates, self._has_filters = in_flight_updates, has_filters
    self._programs = Programs()
    self._devices = None if devices is None else tuple(devices)
    self._weight_sync = WeightSync(
      self._options, unmerged=unmerged, copy_weights=copy_weights, devices=self._devices
    )
    self._session: ContinuousBatcher | None = None  # used by the worker thread while it runs.
    self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jax_sampler")
    self._lock = threading.Lock()  # guards all below.
    self._weights: sampler_weights.SamplerWeights | None = None
    self._sync: dict[str, float] = {}  # what the newest sync took.
    self._version = -1
    self._arrived: list[GenerateCall] = []
    self._readings = WaitingReadings()
    self._in_flight: list[GenerateCall] = []
    self._is_working = False
    self._is_closed = False
    self._given_tokens: given_tokens.GivenTokenScorer | None = None  # None: nothing was scored.
    self.stats = Stats()

  @property
  def weight_version(self) -> int:
    """Version of the weights in use; -1 before any were loaded."""
    return self._version

  def load_weights(self, params: Any, *, version: int) -> None:
    """Samples from these parameters from now on; unfinished completions continue with them.

    A completion continues at its next token, once the keys and values of its prompt and its tokens
    are computed again by the new weights. Each token is marked with the version of the weights that
    sampled it, and its logprob is that of these weights, given all tokens before it. Random numbers
    do not depend on when the weights change.

    Copies the layers (unstacked, in the compute dtype), and in float32 nothing else. The old
    copies are freed first, unless completions are unfinished or `in_flight_updates` is set; then
    both are in memory until the chunk of decode steps that runs has ended. An unmerged sampler
    copies the layers of a base once, and after that only the adapter, which the trainer's updates
    may donate. Parameters that are spread over several processes are copied whole to the devices of
    each; all processes must make this call, on their main threads. A sampler with devices of its
    own reads nothing of the parameters after this call.

    Args:
      params: The trainer's parameters, sharded or not; kernels may be `LowRank`, and their bases
        quantised.
      version: Version recorded with every token sampled from now on.

    Raises:
      RuntimeError: The engine was closed.
    """
    with self._lock:
      self._check_open()
      if not self._in_flight_updates:
        if not self._is_working:
          self._weights = None
        self._begin(self._weight_sync.copied(params), version)
        return
    made = self._weight_sync.copied(params)  # completions continue meanwhile.
    with self._lock:
      self._check_open()
      self._begin(made, version)

  def _begin(self, made: SyncedWeights, version: int) -> None:
    """Samples from these weights from the next chunk on; the lock is held."""
    self._options, self._weights, self._sync = made.options, made.weights, made.metrics()
    self._sizes = self._sizes.within(made.options)
    self._version = version

  def _check_open(self) -> None:
    if self._is_closed:
      raise RuntimeError("the engine was closed")

  def programs(self, params: Any) -> list[CompileJob]:
    """Returns the compilations after which no request within the planned sizes compiles.

    Args:
      params: The trainer's parameters: arrays, or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
      At most ten jobs; an empty list if no sizes were planned.
    """
    if not self._sizes.is_planned:
      return []
    weights, options = self._weight_sync.described(params)
    first = self._weight_sync.jobs(params, options)
    sizes, kinds = self._sizes.within(options), {"has_filters": self._has_filters}
    kinds["reads_again"] = self._in_flight_updates or sizes.loses_rows(options)
    with self._at_home():
      return [*first, *self._programs.jobs(weights, options, sizes, **kinds)]

  def described(self, params: Any) -> tuple[sampler_weights.SamplerWeights, tuple[Any, Any]]:
    """Describes what lies in memory while completions of the planned sizes are sampled.

    Args:
      params: Parameters, as in `programs`.

    Returns:
      Shapes, dtypes and shardings of the weights, some the trainer's own arrays, and of the caches.
    """
    weights, options = self._weight_sync.described(params)
    with self._at_home():
      return weights, caches(options, self._sizes.within(options))

  def later(self, params: Any) -> list[tuple[tuple[Any, Any], list[CompileJob]]]:
    """Describes the longer caches of planned completions; see `Programs.later` and `programs`."""
    weights, options = self._weight_sync.described(params)
    sizes, kinds = self._sizes.within(options), {"has_filters": self._has_filters}
    with self._at_home():
      return self._programs.later(weights, options, sizes, **kinds)

  def _at_home(self) -> contextlib.AbstractContextManager[Any]:
    """Makes arrays without inputs, such as empty caches on one device, where this samples."""
    if self._devices is None:
      return contextlib.nullcontext()
    return jax.default_device(self._devices[0])

  def metrics(self) -> dict[str, float]:
    """Returns what the newest sync took, what it lost of an adapter, and what lacked memory."""
    is_bounded = self._sizes.sampled_bytes is not None or self.stats.preemptions
    preempted = {"engine/preemptions": float(self.stats.preemptions)} if is_bounded else {}
    return {**self._sync, **self._weight_sync.metrics(), **preempted}

  def release(self) -> None:
    """Frees the copies of the weights until the next `load_weights`, and caches except on CPUs.

    The copy of a base is not freed: the next `load_weights` brings an adapter only.

    Raises:
      RuntimeError: Completions are unfinished.
    """
    with self._lock:
      if self._arrived or self._readings or not all(call.is_over for call in self._in_flight):
        raise RuntimeError("weights cannot be released while completions are unfinished")
      self._weights = None
      if current_chip().platform == "cpu":
        host_memory.trim()  # the caches stay: touching fresh memory is slow.
      else:
        self._session = None

  def generate(
    self,
    requests: Sequence[base.GenerationRequest],
    *,
    on_progress: base.OnProgress | None = None,
  ) -> AsyncIterator[base.Generation]:
    """Yields one generation for each request as they finish; see `base.Engine.generate`.

    Nothing is computed before the first iteration, which enters all requests into the queue at
    once. At temperature 0 the reported logprobs are those at temperature 1.

    Raises:
      ValueError: A request cannot be served; raised by the call itself.
      RuntimeError: No weights were loaded, or the engine was closed.
      FloatingPointError: The logits are not finite; raised by the iteration.
    """
    requests = scheduling.grouped_by_prompt(requests)
    base.check_requests(
      requests,
      vocab_size=self._config.vocab_size,
      max_length=self._max_length,
      can_decode=self._decode_text is not None,
      max_completion=self._sizes.longest(self._options),
    )
    with self._lock:
      self._check_ready()
    if self._warn_of_truncation:
      self._warn(requests)
    return self._stream(requests, on_progress)

  def read(self, reading: Reading) -> Future[Any]:
    """Has the weights read something between two chunks; returns what the function returns.

    Args:
      reading: Function (weights, options) that runs in the worker's thread, on the devices of the
        sampler.

    Raises:
      RuntimeError: No weights were loaded, or the engine was closed.
    """
    with self._lock:
      self._check_ready()
      found = self._readings.add(reading)
      self._begin_work()
    return found

  def score_given(self, passages: Sequence[Passage]) -> dict[str, list[Float[np.ndarray, " _"]]]:
    """Returns the logprobs of passages under the weights in use; see `base.ScoresGiven`.

    Compiles a program the first time.

    Raises:
      NonFiniteLogits: The model's logits are not finite.
      RuntimeError: No weights were loaded, or the engine was closed.
    """
    if self._given_tokens is None:
      self._given_tokens = given_tokens.GivenTokenScorer(self, max_length=self._max_length)
    begin = self._given_tokens.begin
    waiting = [begin(p.tokens, np.ones(len(p.tokens) - 1, np.float32)) for p in passages]
    scores = [future.result().logprobs for future in waiting]
    return {"sampler": [s[p.first - 1 :] for s, p in zip(scores, passages, strict=True)]}

  def close(self) -> None:
    """Fails the calls in flight, waits for the worker (one chunk at most), frees the weights."""
    with self._lock:
      self._is_closed = True
    self._executor.shutdown()
    with self._lock:
      self._weights = self._session = None
      self._weight_sync.forget_base()

  def __enter__(self) -> "JaxSampler":
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()

  def _warn(self, requests: Sequence[base.GenerationRequest]) -> None:
    """Warns of the first request whose distribution the trainer may not compute."""
    warnings = (base.mismatch_warning(request.sampling) for request in requests)
    if found := next(filter(None, warnings), None):
      self._warn_of_truncation = False
      _log.warning("%s", found)

  def _check_ready(self) -> None:
    self._check_open()
    if self._weights is None:
      raise RuntimeError("load_weights must be called before generate")

  async def _stream(
    self, requests: Sequence[base.GenerationRequest], on_progress: base.OnProgress | None
  ) -> AsyncIterator[base.Generation]:
    if not requests:
      return
    call = GenerateCall(requests, on_progress)
    with self._lock:
      self._check_ready()
      self._arrived.append(call)
      self._begin_work()
    # Closed explicitly: a caller that leaves the loop early must not compute on until collected.
    stream = call.stream()
    try:
      async for generation in stream:
        yield generation
    finally:
      await stream.aclose()

  def _begin_work(self) -> None:
    """Starts the worker unless it runs; the lock is held."""
    if not self._is_working:
      self._is_working = True
      self._executor.submit(self._work)

  def _work(self) -> None:
    """Runs in the worker thread until nothing is left to do."""
    while True:
      with self._lock:
        arrived, self._arrived = self._arrived, []
        self._in_flight = [c for c in self._in_flight if not c.is_over] + arrived
        if self._is_closed or not (self._in_flight or self._readings):
          self._is_working = False
          closed_upon, self._in_flight = self._in_flight, []
          break
        weights, version, options = self._weights, self._version, self._options
        calls = list(self._in_flight)
        readings = self._readings.take(self._sizes.rows)
      assert weights is not None  # `_check_ready` checked it; only `close` removes them later.
      for reading in readings:
        with self._at_home():
          reading(weights, options)
      if not calls:
        continue
      try:
        session = self._session_for(options)
        with self._at_home():
          self._advance(session, arrived, calls, weights, version)
      # The one boundary where the worker may fail: every caller gets the error, none hangs.
      except Exception as error:
        self._session = None  # its caches may hold what is not finite.
        with self._lock:
          self._in_flight = []
        for call in calls:
          call.fail(error)
    closed = RuntimeError("the engine was closed")
    for call in closed_upon:
      call.fail(closed)
    if self._is_closed:
      self._readings.fail(closed)

  def _session_for(self, options: sampler_inputs.ProgramOptions) -> ContinuousBatcher:
    """Returns the current session; a new one if it is idle and its options have changed."""
    session = self._session
    if session is None or (session.is_idle and session.options != options):
      self._session = session = ContinuousBatcher(
        options,
        sizes=self._sizes,
        decode_text=self._decode_text,
        stats=self.stats,
        programs=self._programs,
      )
    return session

  def _advance(
    self,
    session: ContinuousBatcher,
    arrived: Sequence[GenerateCall],
    calls: Sequence[GenerateCall],
    weights: sampler_weights.SamplerWeights,
    version: int,
  ) -> None:
    """Decodes one chunk and delivers finished generations."""
    for call in arrived:
      session.submit(
        [scheduling.RunningCompletion(r, call, scheduling.prompt_key(r)) for r in call.requests]
      )
    session.drop(lambda call: call.is_left)
    finished = [] if session.is_idle else session.advance(weights, version)
    with self._lock:
      self._sizes = session.sizes_within_memory(self._sizes)
    unfinished = {id(call): session.tokens_of(call) for call in calls}
    if session.is_idle and self._sizes.is_planned:
      session.rest()
    elif session.is_idle:
      self._session = None  # with its caches.
    for call, generation in finished:
      call.deliver(generation)
    for call in calls:
      call.progress(unfinished[id(call)])


def make(
  config: ModelConfig, *, source_directory: Any = None, workdir: Any = None, **settings: Any
) -> JaxSampler:
  """Makes a `JaxSampler` for `engines.make("jax_sampler", ...)`; the folders are not used."""
  del source_directory, workdir
  registry.check_arguments("engine 'jax_sampler'", JaxSampler, settings, usual=["config"])
  return JaxSampler(config, **settings)
