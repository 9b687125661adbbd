"""One SGLang server of a fleet: started, given weights, proven to use them, checked."""

import asyncio
import collections
import dataclasses
import pathlib
import time
import uuid
from collections.abc import Coroutine
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from grpo_jax.engines import probe, sglang_messages
from grpo_jax.engines.base import EngineFailure
from grpo_jax.engines.server_process import LaunchOptions, ServerProcess
from grpo_jax.engines.sglang_client import Client, Timeouts
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.http.failures import Refused, Unanswered

_ASK_EVERY_S = 0.25  # time between two health checks of a server that starts.


class FleetError(EngineFailure):
  """The fleet cannot continue: the run has to stop."""


class ServerLost(Exception):
  """A server is dead, hangs, or was restarted by someone else; it has to be replaced."""


@dataclasses.dataclass(frozen=True)
class Weights:
  """One version of the weights, and how to verify that a server has it."""

  version: int
  folder: pathlib.Path
  probe_ids: tuple[int, ...]
  probe_logprobs: Float[np.ndarray | jax.Array, " m"]  # the trainer's, for each id but the first.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Servers of a fleet, and how long it waits for them."""

  addresses: tuple[str, ...] = SGLangOptions.addresses  # running servers; (): launch them.
  controls: bool = True  # whether this process pauses them and loads weights; False: another does.
  is_shared: bool = False  # whether other processes of the run send them requests, too.
  servers: int = SGLangOptions.servers  # number of servers to launch.
  launch: LaunchOptions | None = None
  model_path: str = ""  # folder that launched servers start from.
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
    controls: bool = True,
    is_shared: bool = False,
  ):
    """Makes the state of a server.

    Args:
      index: Index in the fleet.
      number: Number among all servers of the run, for messages; None: the index.
      controls: Whether this process pauses it and loads weights; else another one does.
      is_shared: Whether other processes of the run send it requests, too.
    """
    self.index = index
    self._number = index if number is None else number
    self._controls = controls
    self._is_shared = is_shared
    self.process: ServerProcess | None = None
    self.version: int | None = None  # version of the weights that it was proven to use.
    self.is_up = False  # healthy, so that it can be given weights.
    self.has_been_up = False
    self.is_asleep = False  # its memory was freed.
    self.is_doubted = False  # a request failed there: its health is checked at once.
    self.woken = asyncio.Event()  # set when something has changed.
    self.lost_at: collections.deque[float] = collections.deque()
    self._client: Client | None = None

  @property
  def client(self) -> Client:
    """Client of the server; available after `bring_up` was called."""
    assert self._client is not None
    return self._client

  @property
  def name(self) -> str:
    return f"server {self._number}" + (f" at {self._client.address}" if self._client else "")

  def doubt(self) -> None:
    """Has its health checked now."""
    self.is_doubted = True
    self.woken.set()

  async def bring_up(self, process: ServerProcess | None, client: Client, within_s: float) -> None:
    """Waits until a server is healthy, whether it was launched or found running.

    Args:
      process: Process of the server; None if it was found running.
      client: Client of the server.
      within_s: Time after which it counts as lost, in seconds.

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
    is_given = process is None and self._controls
    if is_given and not await self._answered(client.can_update()):
      raise FleetError(
        f"{self.name} cannot be used for training: it has no /update_weights_from_disk. sglang-jax"
        " never has it; an SGLang router belongs in engine.sglang.router, and its workers in"
        " engine.sglang.addresses"
      )
    self.is_up = self.has_been_up = True

  async def _trouble(self) -> str | None:
    """Returns why the server is not healthy yet; None if it is."""
    try:
      # A killed trainer may have left it paused and busy.
      if self.process is None and self._controls:
        await self.client.resume()
        if not (self._is_shared and self.has_been_up):  # later requests are of this run.
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
    If another process controls the server, this one only leaves it alone.
    """
    if self._controls:
      await self._answered(self.client.pause())
      await self._answered(self.client.release_memory())
    self.is_asleep, self.version = True, None

  async def update(self, weights: Weights, *, tolerance: float) -> float:
    """Loads weights and proves that the server uses them.

    Requests in flight are paused, and continue with the new weights.

    Returns:
      The largest difference of the probe's logprobs from the trainer's, in nats.

    Raises:
      ServerLost: The server does not answer.
      FleetError: The server refuses the weights.
      probe.WrongWeights: The server computes with other weights.
    """
    client = self.client
    if self.is_asleep:
      await self._answered(client.resume_weights())
    await self._answered(client.pause())
    try:
      await self._answered(client.load(str(weights.folder), weights.version))
    except FleetError:
      await self._answered(client.resume())  # a server that others use continues as before.
      raise
    if self.is_asleep:
      await self._answered(client.resume_cache())
      self.is_asleep = False
    await self._answered(client.resume())
    difference = await self._prove(weights, tolerance)
    self.version = weights.version
    return difference

  async def follow(self, weights: Weights, *, tolerance: float, within_s: float) -> float:
    """Waits until another process has loaded weights, and proves that the server uses them.

    Returns:
      The largest difference of the probe's logprobs from the trainer's, in nats.

    Raises:
      ServerLost: The server does not answer, or was not given the weights in time.
      probe.WrongWeights: The server computes with other weights.
    """
    end = time.monotonic() + within_s
    while (serves := await self._reported_version()) not in (None, str(weights.version)):
      if time.monotonic() > end:
        said = self.client.shown(serves)
        raise ServerLost(f"serves weights {said!r}, not {weights.version}, after {within_s:g} s")
      await asyncio.sleep(_ASK_EVERY_S)
    difference = await self._prove(weights, tolerance)
    self.is_asleep, self.version = False, weights.version
    return difference

  async def _reported_version(self) -> str | None:
    """Returns the version that the server says it has; None if it does not say."""
    info = await self._answered(self.client.model_info())
    return info.get("weight_version") if isinstance(info, dict) else None

  async def _prove(self, weights: Weights, tolerance: float) -> float:
    ids = weights.probe_ids
    name = f"probe-{self._number}-{weights.version}-{uuid.uuid4().hex}"
    read = lambda answer: (
      sglang_messages.prompt_logprobs(answer, ids),
      sglang_messages.prompt_version(answer),
    )
    body = sglang_messages.prompt_body(ids, name)
    limit = sglang_messages.prompt_answer_bytes(ids)
    try:
      found, version = await self._answered(self.client.score(body, read=read, limit=limit))
    except sglang_messages.Garbled as error:
      raise ServerLost(f"answers the probe wrongly: {error}") from error
    if version != weights.version:
      raise probe.WrongWeights(
        f"{self.name} serves version {version} after it was given {weights.version}"
      )
    expected = await asyncio.to_thread(jax.device_get, weights.probe_logprobs)
    return probe.check(found, np.asarray(expected), tolerance=tolerance, what=self.name)

  async def check_health(self) -> None:
    """Raises ServerLost unless the server answers and has the weights that it was given."""
    await self._answered(self.client.health())
    version = await self._reported_version()
    if version is not None and self.version is not None and version != str(self.version):
      said = self.client.shown(version)
      raise ServerLost(f"serves weights {said!r}, was given {self.version}: it was restarted")

  async def end(self) -> str:
    """Kills the remaining processes, resets the state, and returns the end of the log."""
    self.is_up = self.is_asleep = self.is_doubted = False
    self.version = None
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
      raise FleetError(
        f"{self.name}: {error}. If it cannot read the folder: engine.sglang.weights_folder has to"
        " be a folder that the servers' hosts see, too"
      ) from error
