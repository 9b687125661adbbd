"""One SGLang server of a fleet: started, given weights, proven to use them, checked."""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import pathlib
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from grpo_jax.engines import (
  probe,
  routed_experts,
  served_adapter,
  server_windows,
  sglang_messages,
)
from grpo_jax.engines.base import EngineFailure
from grpo_jax.engines.checksums import Changes, Known
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.server_process import LaunchOptions, ServerProcess
from grpo_jax.engines.sglang_client import Client, Timeouts
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.engines.tensor_check import TensorCheck
from grpo_jax.http.failures import Refused, Unanswered
from grpo_jax.models import lora

_log = logging.getLogger(__name__)

# Metrics of what a server does at a sync, in seconds.
LOAD, FLUSH, PROBE = "perf/sync_load_s", "perf/sync_flush_s", "perf/sync_probe_s"
CHECKSUM = "perf/sync_checksum_s"

_UNREADABLE = (
  ". If it cannot read the folder: engine.sglang.weights_folder has to be a folder that the"
  " servers' hosts see, too"
)
_SCORED_AT_ONCE = 8  # passages, so that a busy server still answers within its time-outs.
_ASK_EVERY_S = 0.25  # time between two health checks of a server that starts.


class FleetError(EngineFailure):
  """The fleet cannot continue: the run has to stop."""


class ServerLost(Exception):
  """A server is dead, hangs, or was restarted by someone else; it has to be replaced."""


@dataclasses.dataclass(frozen=True)
class Adapter:
  """How servers know an adapter, and the weights that it is loaded over."""

  name: str  # unique among all runs and versions; requests name it.
  base: pathlib.Path  # Hugging Face folder of the base.
  base_version: str  # version that servers report of the base; not a number, which means weights.


@dataclasses.dataclass(frozen=True)
class WeightsVersion:
  """One version of the weights, and how to verify that a server has it."""

  version: int
  folder: pathlib.Path
  probe_ids: tuple[int, ...]
  probe_logprobs: Float[np.ndarray | jax.Array, " m"]  # the trainer's, for each id but the first.
  adapter: Adapter | None = None  # if `folder` holds an adapter; None: it holds all weights.
  changes: Changes | None = None  # from the version before; None: not known.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions:
  """Servers of a fleet, and how long it waits for them."""

  addresses: tuple[str, ...] = SGLangOptions.addresses  # running servers; (): launch them.
  first: int = 0  # number of the first one among all servers of the run.
  servers: int = SGLangOptions.servers  # number of servers to launch.
  launch: LaunchOptions | None = None
  model_path: str = ""  # folder that launched servers start from.
  adapter: lora.AdapterOptions | None = None  # if servers are given adapters; None: all weights.
  dtype: str = "float32"  # of the files of weights.
  returns_experts: bool = False  # whether servers have to return the experts that they choose.
  has_windows: bool = False  # whether the model has layers with a sliding window.
  key: str | None = dataclasses.field(default=None, repr=False)  # key of the servers' API.
  timeouts: Timeouts = Timeouts()
  start_timeout_s: float = SGLangOptions.start_timeout_s  # until a server is healthy.
  health_every_s: float = SGLangOptions.health_every_s
  max_restarts: int = SGLangOptions.max_restarts  # per server, in `restart_window_s`.
  restart_window_s: float = 3600.0
  probe_tolerance: float = probe.TOLERANCES["float32"]  # nats.


class Server:
  """A server and its state."""

  def __init__(
    self,
    index: int,
    *,
    number: int | None = None,
    adapter: lora.AdapterOptions | None = None,
    dtype: str = "float32",
    returns_experts: bool = False,
    has_windows: bool = False,
  ):
    """Makes the state of a server.

    Args:
      index: Index in the fleet.
      number: Number among all servers of the run, for messages; None: the index.
      adapter: Options of the adapters that it is given; None: it is given all weights.
      dtype: Dtype of the files of weights.
      returns_experts: Whether it has to return the experts that it chooses.
      has_windows: Whether the model has layers with a sliding window.
    """
    self._returns_experts = returns_experts
    self._has_windows = has_windows
    self.tensors = TensorCheck(dtype)
    self.index = index
    self.number = index if number is None else number
    self._options = adapter
    self._is_stale = False  # whether it is paused with keys and values of older weights.
    self.process: ServerProcess | None = None
    self.version: int | None = None  # version of the weights that it was proven to use.
    self.adapter: str | None = None  # name of the adapter of that version.
    self._adapters: dict[int, str] = {}  # names of those that it has, by their versions.
    self._base: pathlib.Path | None = None  # folder of the base that it has; None: not known.
    self._reported: str | None = None  # version that it has to report.
    self.is_up = False  # healthy, so that it can be given weights.
    self.has_been_up = False
    self.is_asleep = False  # its memory was freed.
    self.is_doubted = False  # a request failed there: its health is checked at once.
    self.woken = asyncio.Event()  # set when something has changed.
    self.lost_at: collections.deque[float] = collections.deque()
    self.sync_times: dict[str, float] = dict.fromkeys(
      (LOAD, FLUSH, CHECKSUM, PROBE), 0.0
    )  # of the newest `update`.
    self._client: Client | None = None

  @property
  def client(self) -> Client:
    """Client of the server; available after `bring_up` was called."""
    assert self._client is not None
    return self._client

  @property
  def name(self) -> str:
    return f"server {self.number}" + (f" at {self._client.address}" if self._client else "")

  def doubt(self) -> None:
    """Has its health checked now."""
    self.is_doubted = True
    self.woken.set()

  async def bring_up(
    self,
    process: ServerProcess | None,
    client: Client,
    within_s: float,
    *,
    started_from: pathlib.Path | None = None,
  ) -> None:
    """Waits until a server is healthy, whether it was launched or found running.

    Args:
      process: Process of the server; None if it was found running.
      client: Client of the server.
      within_s: Time after which it counts as lost, in seconds.
      started_from: Folder of the weights that it started with; None: not known.

    Raises:
      ServerLost: The server ended, or did not become healthy in time.
      FleetError: The server cannot be given new weights.
    """
    self.process, self._client = process, client
    end = time.monotonic() + within_s
    while (trouble := await self._trouble()) is not None:
      self.raise_if_ended()
      if time.monotonic() > end:
        raise ServerLost(f"was not healthy within {within_s:g} s ({trouble})")
      await asyncio.sleep(_ASK_EVERY_S)
    if process is None and not await self._answered(client.can_update()):
      raise FleetError(
        f"{self.name} cannot be used for training: it has no /update_weights_from_disk. sglang-jax"
        " never has it; instead of an SGLang router, engine.sglang.addresses names its workers"
      )
    if self._returns_experts or self._has_windows:
      self._check_info(await self._answered(client.server_info()))
    if self._options is not None:
      self._base = started_from
      await self._prepare_for_adapters(self._options)
    else:
      is_ours = process is not None
      await self._answered(self.tensors.prepare(client, name=self.name, is_ours=is_ours))
    self.is_up = self.has_been_up = True

  def _check_info(self, info: Any) -> None:
    """Raises FleetError if a server cannot sample for this run, by what it reports."""
    if self._returns_experts and (why := routed_experts.refusal(info)) is not None:
      raise FleetError(f"{self.name} cannot sample for a run with routing replay: {why}")
    if self._has_windows and (why := server_windows.refusal(info)) is not None:
      raise FleetError(f"{self.name} cannot sample from this model: {why}")

  async def _prepare_for_adapters(self, options: lora.AdapterOptions) -> None:
    """Checks that a server can serve adapters, and drops those that earlier runs left on it.

    Raises:
      ServerLost: The server does not answer.
      FleetError: The server cannot serve the adapters of this run.
    """
    info = await self._answered(self.client.server_info())
    why = served_adapter.refusal(info, options)
    if why is not None:
      needed = " ".join(served_adapter.arguments(options))
      raise FleetError(
        f"{self.name} cannot serve the adapters of this run (model.lora.sync='adapter'): {why}."
        f" Start it with {needed}, or set model.lora.sync='merged'"
      )
    for name in await self._answered(self.client.adapters()):
      if served_adapter.is_name_of_run(name):
        await self._unload(name)

  async def _trouble(self) -> str | None:
    """Returns why the server is not healthy yet; None if it is."""
    try:
      # A killed trainer may have left it paused and busy.
      if self.process is None:
        if self._is_stale:  # it stays paused until the next `update` has cleared its cache.
          await self.client.model_info()
          return None
        await self.client.resume()
        await self.client.abort_all()
      await self.client.health()
    except Unanswered as error:
      return str(error)
    except Refused as error:
      raise FleetError(f"{self.name}: {error}") from error
    return None

  def raise_if_ended(self) -> None:
    """Raises ServerLost if the process has ended."""
    if self.process is not None and not self.process.is_running:
      raise ServerLost(self.process.exit_text())

  async def sleep(self) -> None:
    """Frees its memory on the device until the next `update`.

    The server is paused first: SGLang ends if it has to free memory that a request still uses.
    """
    await self._answered(self.client.pause())
    await self._answered(self.client.release_memory())
    self.is_asleep, self.version = True, None

  async def update(
    self,
    weights: WeightsVersion,
    *,
    tolerance: float,
    reference: Callable[[], Known | None] = lambda: None,
  ) -> float:
    """Loads weights and proves that the server uses them.

    Requests in flight are paused, and continue with the new weights.

    Args:
      weights: Weights to load.
      tolerance: Largest difference of the probe's logprobs from the trainer's, in nats.
      reference: Function that returns the newest checksums of a server with the same options.

    Returns:
      The largest difference of the probe's logprobs from the trainer's, in nats.

    Raises:
      ServerLost: The server does not answer.
      FleetError: The server refuses the weights.
      probe.WrongWeights: The server computes with other weights.
    """
    adapter = weights.adapter
    self.sync_times = dict.fromkeys(self.sync_times, 0.0)
    if adapter is None:
      await self._load(weights.folder, str(weights.version))
      self._reported = str(weights.version)
      with self._timed(CHECKSUM):
        compared = self.tensors.compare(weights.version, weights.changes, reference)
        await self._answered(compared)
    else:
      if self.is_asleep or self._base != adapter.base:
        await self._load(adapter.base, adapter.base_version)
        self._base, self._reported = adapter.base, adapter.base_version
      await self._load_adapter(adapter.name, weights.folder)
      self._adapters[weights.version] = adapter.name
    with self._timed(PROBE):
      difference = await self._prove(weights, tolerance)
    self.version = weights.version
    self.adapter = adapter.name if adapter else None
    return difference

  async def _load(self, folder: pathlib.Path, version: str) -> None:
    """Pauses the server, has it load all weights from a folder, and resumes it."""
    client = self.client
    with self._timed(FLUSH):
      if self.is_asleep:
        await self._answered(client.resume_weights())
      await self._answered(client.pause())
    try:
      with self._timed(LOAD):
        await self._answered(client.load(str(folder), version))
    except FleetError as error:
      if sglang_messages.kept_its_cache(str(error)):  # what is stale may not be used.
        self._is_stale = True
        raise ServerLost(str(error)) from error
      await self._answered(client.resume())  # a server that others use continues as before.
      raise
    self._is_stale = False
    with self._timed(FLUSH):
      if self.is_asleep:
        await self._answered(client.resume_cache())
        self.is_asleep = False
      await self._answered(client.resume())

  @contextlib.contextmanager
  def _timed(self, part: str) -> Iterator[None]:
    """Adds the time that the block takes to a part of the sync."""
    began = time.monotonic()
    yield
    self.sync_times[part] += time.monotonic() - began

  async def _load_adapter(self, name: str, folder: pathlib.Path) -> None:
    """Has the server load an adapter beside those that it has.

    Raises:
      ServerLost: The server does not answer, or could not load this adapter.
      FleetError: The server can load no adapter of this run.
    """
    try:
      with self._timed(LOAD):
        await self.client.load_adapter(name, str(folder))
    except Unanswered as error:
      raise ServerLost(str(error)) from error
    except Refused as error:
      has = await self._answered(self.client.adapters())
      if has.get(name) == str(folder):
        return  # an earlier answer was lost; what is in a folder never changes.
      if sglang_messages.refuses_all_adapters(str(error)):
        raise FleetError(f"{self.name}: {error}{_UNREADABLE}") from error
      raise ServerLost(f"has not loaded the adapter {name}: {error}") from error

  def has_adapters_before(self, version: int) -> bool:
    """Returns whether it has adapters of older versions."""
    return any(each < version for each in self._adapters)

  async def unload_before(self, version: int) -> None:
    """Has it drop the adapters of older versions; no request may use them any more.

    Raises:
      ServerLost: The server does not answer.
    """
    for old in sorted(each for each in self._adapters if each < version):
      await self._unload(self._adapters.pop(old))

  async def _unload(self, name: str) -> None:
    try:
      await self.client.unload_adapter(name)
    except Unanswered as error:
      raise ServerLost(str(error)) from error
    except Refused as error:
      _log.debug("%s: %s", self.name, error)  # it has dropped the adapter itself.

  async def _reported_version(self) -> str | None:
    """Returns the version that the server says it has; None if it does not say."""
    info = await self._answered(self.client.model_info())
    return info.get("weight_version") if isinstance(info, dict) else None

  async def _prove(self, weights: WeightsVersion, tolerance: float) -> float:
    ids = weights.probe_ids
    name = f"probe-{self.number}-{weights.version}-{uuid.uuid4().hex}"
    read = lambda answer: (
      sglang_messages.prompt_logprobs(answer, ids),
      sglang_messages.prompt_version(answer) if weights.adapter is None else None,
    )
    adapter = weights.adapter.name if weights.adapter else None
    body = sglang_messages.prompt_body(ids, name, adapter=adapter)
    limit = sglang_messages.prompt_answer_bytes(ids)
    try:
      found, version = await self._answered(self.client.score(body, read=read, limit=limit))
    except sglang_messages.Garbled as error:
      raise ServerLost(f"answers the probe wrongly: {error}") from error
    if adapter is None and version != weights.version:
      raise probe.WrongWeights(
        f"{self.name} serves version {version} after it was given {weights.version}"
      )
    expected = await asyncio.to_thread(jax.device_get, weights.probe_logprobs)
    return probe.check(found, np.asarray(expected), tolerance=tolerance, what=self.name)

  async def score(self, passages: Sequence[Passage]) -> list[Float[np.ndarray, " _"]]:
    """Returns the logprobs of passages under the weights that it was last proven to use; nats.

    Raises:
      ServerLost: The server does not answer, or has other weights by now.
      FleetError: The server refuses.
    """
    version, adapter, places = self.version, self.adapter, asyncio.Semaphore(_SCORED_AT_ONCE)

    async def one(passage: Passage) -> Float[np.ndarray, " _"]:
      ids, first = passage.tokens.tolist(), passage.first
      name = f"proof-{self.number}-{version}-{uuid.uuid4().hex}"
      body = sglang_messages.prompt_body(ids, name, adapter=adapter, first=first)
      read = lambda answer: (
        sglang_messages.prompt_logprobs(answer, ids, first),
        version if adapter else sglang_messages.prompt_version(answer),
      )
      limit = sglang_messages.prompt_answer_bytes(ids)
      async with places:
        try:
          found, reported = await self._answered(self.client.score(body, read=read, limit=limit))
        except sglang_messages.Garbled as error:
          raise ServerLost(f"answers wrongly: {error}") from error
      if reported != version:
        raise ServerLost(f"serves version {reported}, was given {version}: it was restarted")
      return found

    try:
      async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(passage)) for passage in passages]
    except* (ServerLost, FleetError) as failures:
      raise failures.exceptions[0] from None
    return [task.result() for task in tasks]

  async def check_health(self) -> None:
    """Raises ServerLost unless the server answers and has the weights that it was given."""
    await self._answered(self.client.health())
    version = await self._reported_version()
    if version is not None and self._reported is not None and version != self._reported:
      said = self.client.shown(version)
      raise ServerLost(f"serves weights {said!r}, was given {self._reported}: it was restarted")
    adapter = self.adapter
    if adapter is not None and adapter not in await self._answered(self.client.adapters()):
      raise ServerLost(f"no longer has the adapter {adapter}: it was restarted")

  async def end(self) -> str:
    """Kills the remaining processes, resets the state, and returns the end of the log."""
    self.is_up = self.is_asleep = self.is_doubted = False
    self.version = self.adapter = self._base = self._reported = None
    self.tensors.forget()
    self._adapters.clear()
    process = self.process
    if process is None:
      return ""
    process.kill()
    await asyncio.to_thread(process.wait, 60.0)
    log, self.process = self.log_end(), None
    return log

  def log_end(self) -> str:
    """Returns the last lines of the log, for the end of a message; "" if we did not start it."""
    return f" Its last lines:\n{self.process.last_lines()}" if self.process else ""

  async def _answered(self, call: Coroutine[Any, Any, Any]) -> Any:
    """Returns the answer to a call that a healthy server answers.

    Raises:
      ServerLost: The server does not answer.
      FleetError: The server refuses.
    """
    try:
      return await call
    except Unanswered as error:
      raise ServerLost(str(error)) from error
    except Refused as error:
      raise FleetError(f"{self.name}: {error}{_UNREADABLE}") from error
