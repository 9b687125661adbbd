"""Requests in flight: queued, sent to a server, sent elsewhere if it fails, delivered once.

A request leaves the queue only for a server that accepts requests, and returns to it whenever
no complete answer arrives. So no request is lost; and because each delivery comes from one answer,
none is answered twice. Everything here runs in one event loop.
"""

import asyncio
import dataclasses
import functools
import itertools
import uuid
from collections.abc import Sequence

from grpo_jax.engines import sglang_messages
from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.engines.generate_call import GenerateCall
from grpo_jax.engines.load_balancing import LoadBalancer
from grpo_jax.engines.routed_experts import WrongExperts
from grpo_jax.engines.scheduling import prompt_key
from grpo_jax.engines.server import FleetError, Server
from grpo_jax.engines.sglang_messages import Garbled
from grpo_jax.http.failures import Overloaded, Refused, Unanswered
from grpo_jax.http.retries import doubling
from grpo_jax.types import ExpertShape

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # pauses of a job whose server is overloaded.


@dataclasses.dataclass(eq=False)
class CompletionJob:
  """The content of one HTTP request: one completion."""

  request: GenerationRequest
  call: GenerateCall
  attempts: int = 0

  @property
  def group(self) -> object:
    return self.request.group or prompt_key(self.request)


@dataclasses.dataclass(frozen=True)
class _Running:
  """An attempt in flight."""

  job: CompletionJob
  index: int  # of the server.
  version: int | None  # of the weights that it was sent for.


class Dispatcher:
  """Sends jobs to the servers that are open; see `fleet.FleetListener`."""

  def __init__(
    self,
    *,
    servers: int,
    in_flight: int,
    max_attempts: int,
    vocab_size: int,
    seeded: bool,
    experts: ExpertShape | None = None,
  ):
    """Makes a dispatcher for servers that are all closed at first.

    Args:
      servers: Number of servers.
      in_flight: Largest number of jobs that one server works on at a time.
      max_attempts: Number of wrong answers to a request after which its call fails.
      vocab_size: Size of the vocabulary; ids must be below it.
      seeded: Whether the servers honour seeds.
      experts: Shape of the experts that the servers return; None: they are not asked for them.
    """
    self._placement = LoadBalancer(range(servers), limit=in_flight)
    for index in range(servers):
      self._placement.close(index)
    self._servers: dict[int, Server] = {}
    self._running: dict[asyncio.Task[None], _Running] = {}
    self._max_attempts = max_attempts
    self._vocab_size = vocab_size
    self._seeded = seeded
    self._experts = experts
    self._prefix = uuid.uuid4().hex[:12]
    self._numbers = itertools.count()
    self._jobs: set[CompletionJob] = set()  # submitted and not yet delivered.
    self._error: Exception | None = None
    self.retries = 0

  def submit(self, jobs: Sequence[CompletionJob]) -> None:
    """Queues jobs."""
    for job in jobs:
      if self._error is not None:
        job.call.fail(self._error)
        continue
      self._jobs.add(job)
      self._placement.add(job.group, job)
    self._send()

  def leave(self, call: GenerateCall) -> None:
    """Drops the jobs that a call still waits for, and cancels them at the servers."""
    if call.is_complete:  # the usual case. Otherwise all jobs of all calls are looked through.
      return
    self._placement.drop(lambda job: job.call is call)
    self._jobs = {job for job in self._jobs if job.call is not call}
    for task, running in self._running.items():
      if running.job.call is call:
        task.cancel()  # SGLang ends a request when its client disconnects.

  def opened(self, server: Server) -> None:
    self._servers[server.index] = server
    self._placement.open(server.index)
    self._send()

  def closed(self, server: Server) -> None:
    """Takes back the jobs that a server works on, for other servers."""
    self._placement.close(server.index)
    for task, running in self._running.items():
      if running.index == server.index:
        task.cancel()
    self._send()

  def failed(self, error: Exception) -> None:
    """Fails all calls, those in flight and later ones."""
    self._error = error
    jobs, self._jobs = self._jobs, set()
    for call in {id(job.call): job.call for job in jobs}.values():
      self.leave(call)
      call.fail(error)

  def oldest(self) -> int | None:
    """Returns the oldest version of the weights that a request in flight uses; None: none does."""
    versions = [each.version for each in self._running.values() if each.version is not None]
    return min(versions, default=None)

  @property
  def in_flight(self) -> int:
    """Number of jobs that all servers work on."""
    return len(self._running)

  def _send(self) -> None:
    """Sends all jobs that can be sent now."""
    while (found := self._placement.next()) is not None:
      index, job = found
      assert isinstance(index, int)
      server = self._servers[index]
      task = asyncio.create_task(self._attempt(job, server, server.version, server.adapter))
      self._running[task] = _Running(job, index, server.version)
      task.add_done_callback(self._finished)

  def _finished(self, task: asyncio.Task[None]) -> None:
    """Frees the place of an attempt; queues its job again if it was not delivered."""
    running = self._running.pop(task)
    job = running.job
    self._placement.done(running.index)
    if not task.cancelled() and (bug := task.exception()) is not None:
      self._drop(job, bug)
    if job in self._jobs:
      self._placement.add(job.group, job)
    self._send()

  async def _attempt(
    self, job: CompletionJob, server: Server, version: int | None, adapter: str | None
  ) -> None:
    """Sends a job to a server and delivers the answer.

    A server that fails is closed until its health has been checked. A server that is overloaded
    stays open; the job waits for a while before it is queued again.

    Args:
      job: Job to send.
      server: Server that answers it.
      version: Version of the weights that the server has now.
      adapter: Name of the adapter of that version; None: the server's weights, whichever they are.
    """
    body = sglang_messages.generate_body(
      job.request,
      f"{self._prefix}-{next(self._numbers)}",
      seeded=self._seeded,
      adapter=adapter,
      has_experts=self._experts is not None,
    )
    read = functools.partial(
      sglang_messages.generation,
      request=job.request,
      vocab_size=self._vocab_size,
      version=version if version is not None else -1,
      is_named=adapter is not None,
      experts=self._experts,
    )
    limit = sglang_messages.answer_bytes(job.request, self._experts)
    try:
      generation = await server.client.generate(body, read=read, limit=limit)
    except Refused as error:
      if adapter is not None and sglang_messages.lacks_adapter(str(error)):
        self._give_back(job, server, error)
        return
      name = job.request.request_id
      self._drop(job, FleetError(f"request {name!r}: {error}.{server.log_end()}"))
    except Overloaded as error:
      self._count_failure(job, server, error)
      own = doubling(job.attempts, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
      await asyncio.sleep(max(own, min(error.retry_after_s, _LONGEST_PAUSE_S)))
    except (Unanswered, Garbled, sglang_messages.Aborted, WrongExperts) as error:
      self._give_back(job, server, error)
    else:
      self._deliver(job, generation)

  def _give_back(self, job: CompletionJob, server: Server, error: Exception) -> None:
    """Closes a server that failed until its health has been checked; its job is sent again."""
    self._count_failure(job, server, error)
    self._placement.close(server.index)
    server.doubt()

  def _count_failure(self, job: CompletionJob, server: Server, error: Exception) -> None:
    """Counts an attempt that failed; drops a job after many attempts."""
    self.retries += 1
    job.attempts += 1
    if job.attempts >= self._max_attempts:
      name = job.request.request_id
      text = f"request {name!r} failed {job.attempts} times; the last: {error}.{server.log_end()}"
      self._drop(job, FleetError(text))

  def _deliver(self, job: CompletionJob, generation: Generation) -> None:
    if job in self._jobs:
      self._jobs.remove(job)
      job.call.deliver(generation)
      job.call.progress(0)

  def _drop(self, job: CompletionJob, error: BaseException) -> None:
    """Fails the call of a job."""
    if job in self._jobs:
      self.leave(job.call)
      job.call.fail(error)
