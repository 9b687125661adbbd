"""SGLang servers as an engine: launched or found, given new weights after every step.

caller's event loop          the engine's own thread and event loop           HTTP
generate(requests) ────────► Dispatcher ── Placement ── Client ─────────────► /generate
load_weights(params) ──────► Fleet ── one task a server ── Client ──────────► /update_weights…
"""

import asyncio
import dataclasses
import math
import os
import pathlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from grpo_jax.compilation import precision
from grpo_jax.engines import base, probe, scheduling, server_process, transfer
from grpo_jax.engines.calls import Call
from grpo_jax.engines.dispatch import Dispatcher, Job
from grpo_jax.engines.fleet import Fleet
from grpo_jax.engines.server import Options, Weights
from grpo_jax.engines.server_process import LaunchOptions
from grpo_jax.engines.sglang_client import Timeouts
from grpo_jax.http import redaction
from grpo_jax.models import leaves
from grpo_jax.models.config import ModelConfig

# Keeps TF32 out of the servers' float32 products: of NVIDIA's libraries, and of Triton's kernels,
# which round to it by default, SGLang's deterministic products and its attention among them.
_EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}


class SGLangEngine:
  """Samples on SGLang servers; see `base.Engine`."""

  def __init__(
    self,
    config: ModelConfig,
    options: Options,
    *,
    folders: transfer.WeightFolders,
    compute_dtype: Any = jnp.float32,
    product_dtype: Any = None,
    matmul_precision: str | None = None,
    num_valid_tokens: int | None = None,
    max_rows: int = 64,
    requests: str = "completion",
    seeded: bool = True,
    max_attempts: int = 5,
    release_memory: bool = False,
    router: str | None = None,
  ):
    """Makes the engine and begins to bring up its servers; `load_weights` waits for them.

    Args:
      config: of the model.
      options: of the fleet.
      folders: where every version of the weights is written; closed with the engine.
      compute_dtype: of the trainer.
      product_dtype: of the trainer; see `products.Products`. The servers round on their own.
      matmul_precision: of the trainer's float32 products; see `precision.resolve`.
      num_valid_tokens: ids of the probe are below.
      max_rows: HTTP requests under way at each server; more wait here.
      requests: "completion": an HTTP request for each; "group": one for all completions of a
        group, which come back together.
      seeded: whether the servers honour seeds (--enable-deterministic-inference).
      max_attempts: of a request that servers answer wrongly.
      release_memory: have the servers give their memory back during updates.
      router: address of an SGLang router, to which generation goes instead.
    """
    self._config = config
    self._by_group = requests == "group"
    self._seeded = seeded
    self._release_memory = release_memory
    self._probe = probe.Probe(
      config,
      compute_dtype=compute_dtype,
      product_dtype=product_dtype,
      matmul_precision=matmul_precision,
      num_valid_tokens=num_valid_tokens or config.vocab_size,
    )
    self._folders = folders
    self._dispatcher = Dispatcher(
      servers=len(options.addresses) or options.servers,
      in_flight=max_rows,
      max_attempts=max_attempts,
      vocab_size=config.vocab_size,
      seeded=seeded,
    )
    self._fleet = Fleet(options, self._dispatcher)
    self._version = -1
    self._folder: pathlib.Path | None = None  # of that version.
    self._times: dict[str, float] = {}
    self._is_closed = False
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
    self._thread.start()
    self._run(self._start(router))

  @property
  def weight_version(self) -> int:
    """Version that the servers were proven to have; -1 before any were sent."""
    return self._version

  def load_weights(self, params: Any, *, version: int) -> None:
    """Writes the weights, has all servers load them, and proves that they did.

    Args:
      params: the trainer's tree, sharded or not.
      version: what tokens sampled from now on carry.

    Raises:
      TransferError: they could not be written.
      FleetError: what cannot be healed; with the last lines of a server's log.
      WrongWeights: a server computes with other weights.
      RuntimeError: the engine was closed.
    """
    self._check_open()
    began = time.perf_counter()
    folder = self._folders.write(params, version=version)
    written = time.perf_counter()
    weights = Weights(version, folder, self._probe.ids, self._probe.logprobs(params))
    self._run(self._fleet.publish(weights))
    if self._version < 0:
      print(f"SGLang is ready: {', '.join(self._fleet.addresses)}", flush=True)
    previous, self._folder, self._version = self._folder, folder, version
    if previous is not None:
      self._folders.discard(previous)
    self._times = {
      "engine/export_s": written - began,
      "engine/load_s": time.perf_counter() - written,
    }

  def release(self) -> None:
    """Has the servers give their memory back, if they share the trainer's devices."""
    if self._release_memory:
      self._run(self._fleet.sleep())

  def generate(
    self,
    requests: Sequence[base.GenerationRequest],
    *,
    on_progress: base.OnProgress | None = None,
  ) -> AsyncIterator[base.Generation]:
    """Yields one generation for each request as they finish; see `base.Engine.generate`.

    Raises:
      ValueError: at once: requests that cannot be served.
      RuntimeError: no weights were loaded, or the engine was closed.
      FleetError: from the iteration: a server refused a request, or none can be had.
    """
    base.check_requests(
      requests,
      vocab_size=self._config.vocab_size,
      max_length=self._config.max_position_embeddings,
      can_decode=True,  # servers have the tokenizer.
    )
    if self._seeded and any(r.sampling.min_p > 0 for r in requests):
      raise ValueError(
        "SGLang cannot sample with min_p and seeds (it ends on the first such request):"
        " engine.sglang.deterministic=False, or min_p=0"
      )
    self._check_open()
    if self._version < 0:
      raise RuntimeError("load_weights must be called before generate")
    return self._stream(scheduling.grouped_by_prompt(requests), on_progress)

  def metrics(self) -> dict[str, float]:
    """Returns figures of the newest sync, and counts since the engine was made."""
    return {
      **self._times,
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
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()
    self._folders.close()

  def __enter__(self) -> "SGLangEngine":
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()

  async def _start(self, router: str | None) -> None:
    await self._fleet.start()
    if router is not None:
      self._dispatcher.router = self._fleet.client(router)

  async def _stop(self) -> None:
    self._dispatcher.failed(RuntimeError("the engine was closed"))
    await self._fleet.close()

  def _check_open(self) -> None:
    if self._is_closed:
      raise RuntimeError("the engine was closed")

  def _run(self, coroutine: Any) -> Any:
    """Runs a coroutine in the engine's loop and waits for it; Ctrl-C ends the waiting."""
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

  async def _stream(
    self, requests: Sequence[base.GenerationRequest], on_progress: base.OnProgress | None
  ) -> AsyncIterator[base.Generation]:
    if not requests:
      return
    self._check_open()
    call = Call(requests, on_progress)
    jobs = [Job(part, call) for part in self._parts(requests)]
    self._loop.call_soon_threadsafe(self._dispatcher.submit, jobs)
    stream = call.stream()
    try:
      async for generation in stream:
        yield generation
    finally:
      await stream.aclose()
      if not self._is_closed:
        self._loop.call_soon_threadsafe(self._dispatcher.leave, call)

  def _parts(
    self, requests: Sequence[base.GenerationRequest]
  ) -> list[Sequence[base.GenerationRequest]]:
    """Returns what goes into one HTTP request each."""
    if not self._by_group:
      return [[request] for request in requests]
    groups: dict[bytes, list[base.GenerationRequest]] = {}
    for request in requests:
      groups.setdefault(scheduling.prompt_key(request), []).append(request)
    return list(groups.values())


def make(
  config: ModelConfig,
  *,
  source_directory: str | pathlib.Path,
  workdir: str | pathlib.Path,
  decode: Any = None,
  compute_dtype: Any = "float32",
  product_dtype: str | None = None,
  matmul_precision: str | None = None,
  num_valid_tokens: int | None = None,
  max_rows: int = 64,
  addresses: Sequence[str] = (),
  router: str | None = None,
  servers: int = 1,
  python: str = ".venv-sglang/bin/python",
  arguments: Sequence[str] = (),
  command: Sequence[str] | None = None,
  environment: Mapping[str, str] | None = None,
  device: str | None = None,
  gpus: Sequence[int] = (),
  gpus_per_server: int = 1,
  host: str = "127.0.0.1",
  port: int | None = None,
  deterministic: bool = True,
  requests: str = "completion",
  weights_folder: str | None = None,
  release_memory: bool = False,
  probe_tolerance: float | None = None,
  start_timeout_s: float = 600.0,
  request_timeout_s: float = 1800.0,
  control_timeout_s: float = 300.0,
  health_timeout_s: float = 60.0,
  health_every_s: float = 15.0,
  max_restarts: int = 3,
  max_attempts: int = 5,
) -> SGLangEngine:
  """Makes an `SGLangEngine`; what `engines.make("sglang", ...)` calls.

  The options are those of `engine.sglang` in configs/base.py, which explains them. The key of the
  servers' API is taken from the environment, GRPO_JAX_SGLANG_API_KEY, and appears nowhere else;
  without it, servers that are launched get a random one.

  Raises:
    ValueError: options that cannot work together.
    ServerError: there is no server environment, or a port is taken.
  """
  del decode  # the servers have the tokenizer.
  for refusal in server_process.refusals(
    addresses=addresses,
    router=router,
    arguments=arguments,
    command=command,
    environment=environment or {},
  ):
    raise ValueError(refusal)
  if config.layer_kinds:
    raise ValueError(
      "this model has sliding windows or layers without rotary embeddings, and SGLang is not known"
      " to compute these as the trainer does (its Qwen2 ignores windows):"
      " use engine.name='jax_sampler'"
    )
  if servers < 1 or max_rows < 1:
    raise ValueError(f"servers and max_rows must be at least 1, got {servers} and {max_rows}")
  if requests not in ("completion", "group"):
    raise ValueError(f"requests must be 'completion' or 'group', got {requests!r}")
  dtype = jnp.dtype(compute_dtype)
  products = precision.resolve(matmul_precision, dtype) or dtype.name
  workdir = pathlib.Path(workdir)
  key = _key(is_launched=not addresses)
  launch = None
  if not addresses:
    launch = LaunchOptions(
      python=pathlib.Path(python),
      log_folder=workdir / "servers",
      device=device or ("cuda" if pathlib.Path("/dev/nvidia0").exists() else "cpu"),
      arguments=(*(["--enable-memory-saver"] if release_memory else []), *arguments),
      command=tuple(command) if command else None,
      environment=variables(products, environment or {}),
      host=host,
      port=port,
      gpus=tuple(gpus),
      gpus_per_server=gpus_per_server,
      dtype=dtype.name,
      max_running=max_rows,
      context_length=config.max_position_embeddings,
      deterministic=deterministic,
    )
    server_process.check(launch, servers=servers, api_key=key or "")
    print(f"starting SGLang ({servers} x {launch.device}), logs: {launch.log_folder}", flush=True)
  elements = sum(math.prod(tensor.shape) for tensor in leaves.stored(config))
  folders = transfer.WeightFolders(
    pathlib.Path(weights_folder).resolve()
    if weights_folder
    else transfer.fast_folder(elements * dtype.itemsize, otherwise=workdir / "weights"),
    config,
    source_directory=pathlib.Path(source_directory),
    dtype=dtype,
  )
  options = Options(
    addresses=tuple(addresses),
    servers=servers,
    launch=dataclasses.replace(launch, scratch=(folders.folder,)) if launch else None,
    model_path=str(source_directory),
    key=key,
    timeouts=Timeouts(
      generate_s=request_timeout_s, control_s=control_timeout_s, health_s=health_timeout_s
    ),
    start_timeout_s=start_timeout_s,
    health_every_s=health_every_s,
    max_restarts=max_restarts,
    probe_tolerance=probe.TOLERANCES[products] if probe_tolerance is None else probe_tolerance,
  )
  return SGLangEngine(
    config,
    options,
    folders=folders,
    compute_dtype=dtype,
    product_dtype=product_dtype,
    matmul_precision=matmul_precision,
    num_valid_tokens=num_valid_tokens,
    max_rows=max_rows,
    requests=requests,
    seeded=deterministic,
    max_attempts=max_attempts,
    release_memory=release_memory,
    router=router,
  )


def variables(products: str, own: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment variables of servers that are launched.

  Args:
    products: what the trainer computes matrix products in; see `precision.resolve`.
    own: those that the user asks for, which go before ours.
  """
  return {**(_EXACT if products == "float32" else {}), **own}


def _key(*, is_launched: bool) -> str | None:
  """Returns the key of the servers' API: the environment's, or a new one for new servers.

  Loopback is not a wall between the users of a host, so servers that the run starts always ask for
  a key.

  Raises:
    ValueError: the environment's cannot be sent.
  """
  key = os.environ.get(server_process.API_KEY_VARIABLE, "").strip()
  if key:
    return redaction.check_secret(key, server_process.API_KEY_VARIABLE)
  return secrets.token_urlsafe(32) if is_launched else None
