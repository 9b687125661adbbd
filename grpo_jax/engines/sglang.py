"""SGLang servers as an engine: launched or found, given new weights after every step.

caller's event loop          the engine's own thread and event loop           HTTP
generate(requests) ────────► Dispatcher ── Placement ── Client ─────────────► /generate
load_weights(params) ──────► Fleet ── one task a server ── Client ──────────► /update_weights…

Adapters are loaded beside each other, by names of their own: nothing is paused, and completions in
flight end with the adapter that they began with.

If a run has several processes, each of them launches servers of its own and samples on these;
servers that were found running are divided among them.
"""

import concurrent.futures
import dataclasses
import logging
import math
import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import AUTOMATIC, Attention
from jaxtyping import Float

from grpo_jax import processes, registry
from grpo_jax.compilation import precision
from grpo_jax.engines import (
  base,
  merge_rounding,
  multihost,
  probe,
  scheduling,
  served_adapter,
  sglang_servers,
  transfer,
)
from grpo_jax.engines.dispatch import CompletionJob, Dispatcher
from grpo_jax.engines.fleet import Fleet
from grpo_jax.engines.generate_call import GenerateCall
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.server import Adapter, FleetOptions, WeightsVersion
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.http.background import BackgroundLoop
from grpo_jax.interrupts import Stopped
from grpo_jax.models import leaves, lora, safetensors
from grpo_jax.models.config import ModelConfig
from grpo_jax.processes import exchanges

_log = logging.getLogger(__name__)


class SGLangEngine:
  """Samples on SGLang servers; see `base.Engine`."""

  def __init__(
    self,
    config: ModelConfig,
    options: SGLangOptions,
    fleet: FleetOptions,
    *,
    folders: transfer.WeightFolders,
    base_folder: pathlib.Path | None = None,
    compute_dtype: Any = jnp.float32,
    product_dtype: Any = None,
    matmul_precision: str | None = None,
    attention: Attention = AUTOMATIC,
    num_valid_tokens: int | None = None,
    max_rows: int = USUAL_ROWS,
    record_experts: bool = False,
  ):
    """Makes the engine and begins to bring up its servers; `load_weights` waits for them.

    Args:
      config: Config of the model.
      options: Options of the user.
      fleet: Options of the fleet, made from them; they say whether servers are given adapters.
      folders: Folders to which every version of the weights is written; closed with the engine.
        All processes of a run have some, and call `load_weights` and `release` alike.
      base_folder: Folder from which servers read the base of the adapters as the trainer has it;
        None: it is written with the first adapter.
      compute_dtype: Dtype of the trainer's matrix products.
      product_dtype: Dtype of the trainer's rounded products; see `products.Products`. The servers
        round in their own way.
      matmul_precision: Precision of the trainer's float32 products; see `precision.resolve`.
      attention: Choice of attention in the trainer's part of the probe; servers have their own.
      num_valid_tokens: Bound of the token ids of the probe.
      max_rows: Largest number of HTTP requests in flight at each server; further ones wait here.
      record_experts: Whether generations have the experts that the servers chose.
    """
    self._config = config
    self._seeded = options.deterministic
    self._release_memory = options.release_memory
    self._probe = probe.Probe(
      config,
      compute_dtype=compute_dtype,
      product_dtype=product_dtype,
      matmul_precision=matmul_precision,
      attention=attention,
      num_valid_tokens=num_valid_tokens or config.vocab_size,
    )
    self._folders = folders
    self._gives_adapters = fleet.adapter is not None
    self._base = base_folder
    self._merged_share = merge_rounding.MergedShare(compute_dtype)
    self._dispatcher = Dispatcher(
      servers=len(fleet.addresses) or fleet.servers,
      in_flight=max_rows,
      max_attempts=options.max_attempts,
      vocab_size=config.vocab_size,
      seeded=options.deterministic,
      experts=config.expert_shape if record_experts else None,
    )
    self._fleet = Fleet(fleet, self._dispatcher)
    self._version = -1
    self._folder: pathlib.Path | None = None  # folder of that version.
    self._sync: dict[str, float] = {}  # what the newest sync took.
    self._reports: list[dict[str, float]] = []  # of all processes, with the newest weights.
    self._is_closed = False
    self._loop = BackgroundLoop("sglang")
    self._run(self._fleet.start())

  @property
  def weight_version(self) -> int:
    """Version that the servers were proven to use; -1 before any weights were sent."""
    return self._version

  def load_weights(self, params: Any, *, version: int) -> None:
    """Writes the weights, has all servers load them, and proves that they did.

    If servers are given adapters, only the adapter is written, and its base with the first one.
    Completions may be under way: they continue with the new weights, and with an adapter they end
    with the one that they began with.

    All processes of a run have to call this alike, and raise alike: an error of one of them names
    it on the others.

    Args:
      params: The trainer's parameters, sharded or not; with an adapter those of `lora.join`.
      version: Version recorded with every token sampled from now on.

    Raises:
      TransferError: The weights could not be written.
      FleetError: The fleet cannot continue; the message has the last lines of a server's log.
      WrongWeights: A server computes with other weights.
      RuntimeError: The engine was closed.
    """
    self._check_open()
    folder, adapter = self._write(params, version)
    weights = WeightsVersion(
      version,
      folder,
      self._probe.ids,
      self._probe.logprobs(params),
      adapter,
      None if adapter else self._folders.changes,
    )
    self._publish(weights)
    if self._version < 0:
      _log.info("SGLang is ready: %s", ", ".join(self._fleet.addresses))
    previous, self._folder, self._version = self._folder, folder, version
    if previous is not None:
      discard = self._folders.discard_adapter if self._gives_adapters else self._folders.discard
      discard(previous)
    self._sync = {**self._folders.written.metrics(), **self._fleet.sync_times()}
    self._reports = processes.exchange(self._report(), what="the metrics of the servers")

  def _write(self, params: Any, version: int) -> tuple[pathlib.Path, Adapter | None]:
    """Writes a version of the weights; returns its folder, and what servers need of an adapter."""
    if not self._gives_adapters:
      self._merged_share.measure(params)
      return self._folders.write(params, version=version), None
    if self._base is None:
      self._base = self._folders.write_base(params)
    folder = self._folders.write_adapter(params, version=version)
    name = served_adapter.name_of(folder)
    return folder, Adapter(name, self._base, base_version=f"base-of-{folder.parent.name}")

  def _publish(self, weights: WeightsVersion) -> None:
    """Has the servers load weights, and proves that they did."""
    what = f"whether the servers have version {weights.version}"
    publish = lambda early: self._run(self._fleet.publish(weights), early)
    multihost.together(publish, what=what)

  def score_given(self, passages: Sequence[Passage]) -> dict[str, list[Float[np.ndarray, " _"]]]:
    """Returns the logprobs of passages at each server of this process; see `base.ScoresGiven`."""
    self._check_open()
    found = self._run(self._fleet.score(passages))
    return {f"server {number}": scores for number, scores in found.items()}

  def release(self) -> None:
    """Has the servers free their memory, if they share the trainer's devices."""
    if not self._release_memory:
      return
    sleep = lambda early: self._run(self._fleet.sleep(), early)
    multihost.together(sleep, what="the memory of the servers")

  def generate(
    self,
    requests: Sequence[base.GenerationRequest],
    *,
    on_progress: base.OnProgress | None = None,
  ) -> AsyncIterator[base.Generation]:
    """Yields one generation for each request as they finish; see `base.Engine.generate`.

    Raises:
      ValueError: A request cannot be served; raised by the call itself.
      RuntimeError: No weights were loaded, or the engine was closed.
      FleetError: A server rejected a request, or none is available; raised by the iteration.
    """
    base.check_requests(
      requests,
      vocab_size=self._config.vocab_size,
      max_length=self._config.context,
      can_decode=True,  # servers have the tokenizer.
    )
    if self._seeded and any(r.sampling.min_p > 0 for r in requests):
      raise ValueError(
        "SGLang cannot sample with min_p and seeds (it ends on the first such request): set"
        " engine.sglang.deterministic=False or min_p=0"
      )
    if any(r.sampling.reports_truncated and r.sampling.top_k < 1 for r in requests):
      raise ValueError(
        "SGLang returns logprobs of the truncated distribution only with top_k: set top_k, or"
        " logprobs='full'"
      )
    self._check_open()
    if self._version < 0:
      raise RuntimeError("load_weights must be called before generate")
    return self._stream(scheduling.grouped_by_prompt(requests), on_progress)

  def metrics(self) -> dict[str, float]:
    """Returns measurements of the newest transfer, and counts since the engine was made.

    Of several processes: the largest times and differences, and the sums of counts up to the newest
    transfer.
    """
    if processes.count() == 1 or not self._reports:
      return self._report()
    counts = ("engine/restarts", "engine/retries")
    return {
      name: (sum if name in counts else max)(report[name] for report in self._reports)
      for name in self._reports[0]
    }

  def _report(self) -> dict[str, float]:
    """Returns the measurements of this process."""
    return {
      **self._sync,
      **self._merged_share.metrics(),
      "mismatch/probe_abs_logprob_max": self._fleet.probe_difference,
      "engine/restarts": float(self._fleet.restarts),
      "engine/retries": float(self._dispatcher.retries),
    }

  def close(self) -> None:
    """Fails the calls in flight, ends the servers that were launched, removes the weights."""
    if self._is_closed:
      return
    self._is_closed = True
    self._run(self._stop())
    self._loop.close()
    self._folders.close()

  def __enter__(self) -> "SGLangEngine":
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()

  async def _stop(self) -> None:
    self._dispatcher.failed(RuntimeError("the engine was closed"))
    await self._fleet.close()

  def _check_open(self) -> None:
    if self._is_closed:
      raise RuntimeError("the engine was closed")

  def _run(self, coroutine: Any, early: Any = False) -> Any:
    """Runs a coroutine in the engine's loop and waits for it; Ctrl-C ends the wait.

    Args:
      coroutine: Work to do.
      early: Flag that becomes true when the result is no longer wanted; looked at if the run has
        several processes.

    Raises:
      Stopped: `early` has become true.
    """
    future = self._loop.submit(coroutine)
    while processes.count() > 1 and not concurrent.futures.wait([future], exchanges.LOOK_S).done:
      if early:
        future.cancel()
        raise Stopped
    return future.result()

  async def _stream(
    self, requests: Sequence[base.GenerationRequest], on_progress: base.OnProgress | None
  ) -> AsyncIterator[base.Generation]:
    if not requests:
      return
    self._check_open()
    call = GenerateCall(requests, on_progress)
    jobs = [CompletionJob(request, call) for request in requests]
    self._loop.call(self._dispatcher.submit, jobs)
    stream = call.stream()
    try:
      async for generation in stream:
        yield generation
    finally:
      await stream.aclose()
      if not self._is_closed:
        self._loop.call(self._dispatcher.leave, call)


def make(
  config: ModelConfig,
  *,
  source_directory: str | pathlib.Path,
  workdir: str | pathlib.Path,
  decode: Any = None,
  compute_dtype: Any = "float32",
  product_dtype: str | None = None,
  matmul_precision: str | None = None,
  attention: Attention = AUTOMATIC,
  num_valid_tokens: int | None = None,
  max_rows: int = USUAL_ROWS,
  adapter: lora.AdapterOptions | None = None,
  record_experts: bool = False,
  **options: Any,
) -> SGLangEngine:
  """Makes an `SGLangEngine`; what `engines.make("sglang", ...)` calls.

  The key of the servers' API is taken from the environment variable GRPO_JAX_SGLANG_API_KEY and
  appears nowhere else; if it is not set, servers that are launched get a random key.

  Args:
    config: Config of the model.
    source_directory: Hugging Face folder of the model.
    workdir: Run folder.
    decode: Not used, since the servers have the tokenizer.
    compute_dtype: Dtype of matrix products.
    product_dtype: Dtype of the trainer's rounded products; see `products.Products`.
    matmul_precision: Precision of the trainer's float32 products; see `precision.resolve`.
    attention: Choice of attention in the trainer's part of the probe.
    num_valid_tokens: Bound of the token ids of the probe; None: the vocabulary of the model.
    max_rows: Number of completions sampled at the same time by each server.
    adapter: Options of the adapter, if the servers are given it apart from its base; None: they are
      given all weights.
    record_experts: Whether generations have the experts that the servers chose.
    **options: Fields of `SGLangOptions`.

  Raises:
    ValueError: Options that do not exist or cannot work together.
    ServerError: The server environment is missing, or a port is taken.
  """
  del decode
  if max_rows < 1:
    raise ValueError(f"max_rows must be at least 1, got {max_rows}")
  registry.check_arguments("engine 'sglang'", SGLangOptions, options)
  chosen = SGLangOptions(**options)
  sglang_servers.refuse(chosen, config)
  sglang_servers.refuse_several_modalities(pathlib.Path(source_directory))
  dtype = jnp.dtype(compute_dtype)
  products = precision.resolve(matmul_precision, dtype) or dtype.name
  returns_experts = record_experts and config.expert_shape is not None
  key = multihost.together(
    lambda _: sglang_servers.api_key(is_launched=not chosen.addresses),
    what="the key of the servers",
  )
  launch = None
  if not chosen.addresses:
    launch = sglang_servers.launch_options(
      chosen,
      pathlib.Path(workdir) / "servers",
      dtype=dtype.name,
      products=products,
      max_rows=max_rows,
      context_length=config.context,
      adapter=adapter,
      returns_experts=returns_experts,
    )
    if adapter is not None:
      sglang_servers.refuse_padded(launch, config)
    sglang_servers.check_launch(launch, chosen.servers, key or "")
    _log.info(
      "starting SGLang (%d x %s), logs: %s", chosen.servers, launch.device, launch.log_folder
    )
  source = pathlib.Path(source_directory)
  base_folder = source if adapter and _is_base(source, adapter, dtype, chosen) else None
  needed = _version_bytes(config, dtype.itemsize, None if base_folder is None else adapter)
  folders = transfer.WeightFolders(
    _weights_folder(chosen, needed, workdir=pathlib.Path(workdir)),
    config,
    source_directory=source,
    dtype=dtype,
  )
  if launch is not None and folders.is_owner:
    launch = dataclasses.replace(launch, scratch=(folders.folder,))
  return SGLangEngine(
    config,
    chosen,
    sglang_servers.fleet_options(
      chosen,
      launch,
      model_path=str(source_directory),
      key=key,
      products=products,
      adapter=adapter,
      dtype=dtype.name,
      returns_experts=returns_experts,
      has_windows=any(kind.window is not None for kind in config.layer_kinds),
    ),
    folders=folders,
    base_folder=base_folder,
    compute_dtype=dtype,
    product_dtype=product_dtype,
    matmul_precision=matmul_precision,
    attention=attention,
    num_valid_tokens=num_valid_tokens,
    max_rows=max_rows,
    record_experts=record_experts,
  )


def _weights_folder(chosen: SGLangOptions, needed: int, *, workdir: pathlib.Path) -> pathlib.Path:
  """Returns where the weights are written: the folder of the user, or a fast one with room."""
  if chosen.weights_folder:
    return pathlib.Path(chosen.weights_folder).resolve()
  return transfer.fast_folder(needed, otherwise=workdir / "weights")


def _version_bytes(config: ModelConfig, itemsize: int, adapter: lora.AdapterOptions | None) -> int:
  """Returns the size of a version in bytes: of an adapter, or of all weights if it is None."""
  if adapter is None:
    return itemsize * sum(math.prod(tensor.shape) for tensor in leaves.stored(config))
  parts = lora.tree(config, adapter).values()
  return itemsize * sum(math.prod(leaf.shape) for part in parts for leaf in part.values())


def _is_base(
  source: pathlib.Path, adapter: lora.AdapterOptions, dtype: Any, chosen: SGLangOptions
) -> bool:
  """Returns whether the model's own folder is the base as the trainer has it.

  The trainer rounds what it reads to `base_dtype`, and then to the compute dtype, which is also
  the servers'. Hosts of servers that were given may not see the folder.
  """
  if chosen.addresses or adapter.base_dtype not in ("float32", "bfloat16"):
    return False
  if adapter.base_dtype in ("float32", dtype.name):
    return True
  base_dtype = jnp.dtype(adapter.base_dtype)
  entries = safetensors.open_folder(source).entries.values() if _has_tensors(source) else ()
  return bool(entries) and all(entry.dtype == base_dtype for entry in entries)


def _has_tensors(folder: pathlib.Path) -> bool:
  return any(folder.glob("*.safetensors"))
