"""The servers of a run: started, watched, given every version of the weights, replaced.

Each server has one task, which starts it, gives it the newest weights, and watches it until it is
lost; then the task kills and replaces it. A lost server is killed first, so that one that only
hangs cannot come back with old weights. All of this runs in one event loop.
"""

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from grpo_jax.engines import probe
from grpo_jax.engines.checksums import Known
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.server import FleetError, FleetOptions, Server, ServerLost, WeightsVersion
from grpo_jax.engines.server_process import ServerError, ServerProcess
from grpo_jax.engines.sglang_client import Client
from grpo_jax.http.client import JsonClient
from grpo_jax.http.retries import doubling

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25  # time between two checks that a process still runs.
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 1.0, 60.0


@runtime_checkable
class FleetListener(Protocol):
  """The object that sends requests to the servers."""

  def opened(self, server: "Server") -> None:
    """Records that the server takes requests from now on."""

  def closed(self, server: "Server") -> None:
    """Records that the server takes no requests; those in flight there are lost."""

  def failed(self, error: Exception) -> None:
    """Records that the fleet cannot continue."""

  def oldest(self) -> int | None:
    """Returns the oldest version of the weights that a request in flight uses; None: none does."""


class Fleet:
  """All servers of a run. Its methods are called in one event loop."""

  def __init__(self, options: FleetOptions, listener: FleetListener):
    """Makes the fleet; `start` begins its work."""
    self._options = options
    self._listener = listener
    self.servers = [
      Server(
        i,
        number=options.first + i,
        adapter=options.adapter,
        dtype=options.dtype,
        returns_experts=options.returns_experts,
        has_windows=options.has_windows,
      )
      for i in range(len(options.addresses) or options.servers)
    ]
    self._http = JsonClient(key=options.key, connect_s=options.timeouts.connect_s)
    self._tasks: list[asyncio.Task[None]] = []
    self._weights: WeightsVersion | None = None
    self._is_asleep = False
    self._known: Known | None = None  # checksums of a server, of the newest version that one had.
    self._changed = asyncio.Condition()
    self._error: Exception | None = None
    self.restarts = 0
    self.probe_difference = 0.0  # nats; largest of all servers with the newest weights.

  @property
  def addresses(self) -> list[str]:
    """Addresses of the servers that are up."""
    return [server.client.address for server in self.servers if server.is_up]

  def sync_times(self) -> dict[str, float]:
    """Returns the seconds of each part of the newest sync, of the server that took longest."""
    times = [server.sync_times for server in self.servers]
    return {part: max(each[part] for each in times) for part in times[0]}

  async def start(self) -> None:
    """Begins to start all servers; returns at once."""
    self._tasks = [asyncio.create_task(self._keep(server)) for server in self.servers]
    for task in self._tasks:
      task.add_done_callback(self._kept)

  async def publish(self, weights: WeightsVersion) -> None:
    """Gives all servers new weights; returns once each server that is up was proven to use them.

    A server that is lost meanwhile gets them when it is replaced. Waits until all servers have
    been up once, and until at least one is up.

    Raises:
      FleetError: The fleet cannot continue.
      probe.WrongWeights: A server accepted the weights but computes with different ones.
    """
    self._weights, self._is_asleep, self.probe_difference = weights, False, 0.0
    await self._until(self._is_published)

  async def score(self, passages: Sequence[Passage]) -> dict[int, list[Float[np.ndarray, " _"]]]:
    """Returns the logprobs of passages at each server that has the newest weights, by its number.

    A server that does not score them is left out, and its health is checked at once.
    """
    chosen = [s for s in self.servers if s.is_up and not s.is_asleep and self._is_current(s)]
    found = await asyncio.gather(*(s.score(passages) for s in chosen), return_exceptions=True)
    scores = {}
    for server, result in zip(chosen, found, strict=True):
      if isinstance(result, ServerLost | FleetError):
        server.doubt()
      elif isinstance(result, BaseException):
        raise result
      else:
        scores[server.number] = result
    return scores

  async def sleep(self) -> None:
    """Has all servers free their memory until `publish`; nothing may be in flight."""
    self._is_asleep = True
    await self._until(lambda: all(s.is_asleep or not s.is_up for s in self.servers))

  async def close(self) -> None:
    """Stops watching, and ends all servers that were launched."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    processes = [s.process for s in self.servers if s.process is not None]
    for process in processes:
      process.terminate()
    await asyncio.gather(*(asyncio.to_thread(p.wait, 60.0) for p in processes))
    await self._http.close()

  def client(self, address: str) -> Client:
    """Returns a client that shares the fleet's connections and key."""
    return Client(self._http, address, timeouts=self._options.timeouts)

  def _is_published(self) -> bool:
    up = [server for server in self.servers if server.is_up]
    have_been_up = all(server.has_been_up for server in self.servers)
    return have_been_up and bool(up) and all(self._is_current(server) for server in up)

  async def _until(self, holds: Callable[[], bool]) -> None:
    for server in self.servers:
      server.woken.set()
    async with self._changed:
      await self._changed.wait_for(lambda: self._error is not None or holds())
    if self._error is not None:
      raise self._error

  async def _notify(self) -> None:
    async with self._changed:
      self._changed.notify_all()

  async def _keep(self, server: Server) -> None:
    """Starts and replaces a server until the fleet is closed or cannot continue."""
    try:
      while True:
        try:
          await self._bring_up(server)
          await self._serve(server)
        except ServerLost as lost:
          await self._bury(server, str(lost))
    except ServerError as error:
      await self._fail(FleetError(str(error)))
    except (FleetError, probe.WrongWeights) as error:
      await self._fail(error)

  def _kept(self, task: asyncio.Task[None]) -> None:
    """Fails the fleet if the task of a server ended by a bug, so that nobody waits for it."""
    if not task.cancelled() and isinstance(bug := task.exception(), Exception):
      self._tasks.append(asyncio.create_task(self._fail(bug)))

  async def _fail(self, error: Exception) -> None:
    self._error = error
    self._listener.failed(error)
    await self._notify()

  async def _bring_up(self, server: Server) -> None:
    """Launches or finds a server, and waits until it is healthy."""
    while self._is_asleep:  # the trainer uses the memory.
      await asyncio.sleep(_LOOK_EVERY_S)
    options, process = self._options, None
    if options.launch is not None:
      start = asyncio.to_thread(
        ServerProcess.start,
        options.launch,
        index=server.index,
        model_path=options.model_path,
        weight_version=-1,  # not a version of the trainer's.
        api_key=options.key or "",
      )
      starting = asyncio.ensure_future(start)
      try:
        await asyncio.shield(starting)
      finally:  # also if the fleet is closed meanwhile: it ends the process.
        process = server.process = await starting
    address = process.address if process else options.addresses[server.index]
    is_ours = options.launch is not None and options.launch.command is None
    await server.bring_up(
      process,
      self.client(address),
      options.start_timeout_s,
      started_from=pathlib.Path(options.model_path) if is_ours else None,
    )
    await self._notify()

  async def _serve(self, server: Server) -> None:
    """Keeps a healthy server at the newest weights and watches it; only an exception ends it."""
    health: asyncio.Task[None] | None = None
    checked = time.monotonic()
    try:
      while True:
        server.raise_if_ended()
        if health is not None and health.done():
          health.result()
          health, checked = None, time.monotonic()
          if self._is_current(server):
            self._listener.opened(server)
        if self._wants_change(server):
          if health is not None and self._is_asleep:
            await asyncio.wait({health})  # SGLang frees memory only when it is idle.
          elif health is not None:
            health.cancel()
          await self._change(server)
          health, checked = None, time.monotonic()
        await self._unload_unused(server)
        is_due = server.is_doubted or time.monotonic() - checked > self._options.health_every_s
        if health is None and is_due and not server.is_asleep:
          server.is_doubted = False
          health = asyncio.create_task(server.check_health())
          health.add_done_callback(lambda _: server.woken.set())
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(_LOOK_EVERY_S):  # 3.11: wait_for may miss a cancellation.
            await server.woken.wait()
        server.woken.clear()
    finally:
      if health is not None:
        health.cancel()

  def _is_current(self, server: Server) -> bool:
    return self._weights is not None and server.version == self._weights.version

  def _wants_change(self, server: Server) -> bool:
    if self._is_asleep:
      return not server.is_asleep
    return self._weights is not None and not self._is_current(server)

  async def _change(self, server: Server) -> None:
    """Sends a server to sleep, or gives it the newest weights and opens it."""
    if self._is_asleep:
      self._listener.closed(server)
      await server.sleep()
    else:
      assert self._weights is not None  # `_wants_change` checked it.
      options, weights = self._options, self._weights
      difference = await server.update(
        weights, tolerance=options.probe_tolerance, reference=self._reference
      )
      known = server.tensors.known
      if known is not None and known.version == weights.version:
        self._known = known
      self.probe_difference = max(self.probe_difference, difference)
      if self._is_current(server):  # else newer weights came meanwhile.
        self._listener.opened(server)
    await self._notify()

  def _reference(self) -> Known | None:
    """Returns the newest checksums of any server that was launched; other servers may differ."""
    return self._known if self._options.launch is not None else None

  async def _unload_unused(self, server: Server) -> None:
    """Has a server drop old adapters once no request uses them.

    A server that unloads earlier waits for the requests, and loads no new adapter meanwhile.
    """
    newest = self._weights
    if newest is None or not self._is_current(server):
      return
    if not server.has_adapters_before(newest.version):
      return
    in_use = self._listener.oldest()
    oldest = newest.version if in_use is None else min(in_use, newest.version)
    await server.unload_before(oldest)

  async def _bury(self, server: Server, reason: str) -> None:
    """Ends the processes of a lost server, and waits before it is replaced.

    Raises:
      FleetError: The server was lost too often, or could not be started at all.
    """
    self._listener.closed(server)
    log = await server.end()
    await self._notify()
    options, now = self._options, time.monotonic()
    if not server.has_been_up and "address already in use" not in log.lower():
      raise FleetError(f"{server.name} could not be started: {reason}.{log}")
    server.lost_at.append(now)
    while server.lost_at[0] < now - options.restart_window_s:
      server.lost_at.popleft()
    times = len(server.lost_at)
    if times > options.max_restarts:
      raise FleetError(
        f"{server.name} was lost {times} times within {options.restart_window_s:g} s, at most"
        f" {options.max_restarts} are allowed (engine.sglang.max_restarts); the last time:"
        f" {reason}.{log}"
      )
    self.restarts += 1
    wait = doubling(times, first_s=_FIRST_BACKOFF_S, longest_s=_LAST_BACKOFF_S)
    _log.warning("%s is lost: %s; replaced in %g s.%s", server.name, reason, wait, log)
    await asyncio.sleep(wait)
