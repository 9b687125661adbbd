"""Groups that are attempted in the background, while the caller does something else."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from grpo_jax.interrupts import Stopped
from grpo_jax.rollouts.collecting import Finished, StepPrompt
from grpo_jax.rollouts.loop_thread import Job, LoopThread
from grpo_jax.types import RolloutGroup

_LOOK_S = 0.1  # time between two looks at the stop flag.

# (prompts) -> an asynchronous iterator of their groups as they finish; see `collecting.groups`.
Collect = Callable[[Sequence[StepPrompt]], Any]


class Arrived(NamedTuple):
  """A group whose attempts are all scored."""

  number: int  # running number of its prompt.
  group: RolloutGroup


@runtime_checkable
class Attempts(Protocol):
  """Attempts in the background. All methods are called by one thread."""

  @property
  def in_flight(self) -> int:
    """Number of groups that are attempted now or wait for that."""
    ...

  def submit(self, numbers: Sequence[int], prompts: Sequence[StepPrompt]) -> None:
    """Begins to attempt a block of prompts with these running numbers."""
    ...

  def give_up(self, number: int) -> None:
    """Ends the attempts at one prompt; if its group has arrived meanwhile, it is forgotten."""
    ...

  def arrived(self) -> list[Arrived]:
    """Returns the groups that have finished since the last call, in the order of finishing."""
    ...

  def wait(self, stop: Any = False) -> None:
    """Waits until a group has finished, or nothing is in flight.

    Raises:
      Stopped: `stop` has become true.
      Exception: Attempts failed in a way that ends the run. Groups that finished before can still
        be had by `arrived`, which raises nothing.
    """
    ...

  def now(self) -> float:
    """Returns the time in seconds, by the clock of the attempts."""
    ...

  def busy_s(self) -> float:
    """Returns for how long something has been in flight, in seconds since the beginning."""
    ...

  def close(self) -> None:
    """Ends all attempts."""
    ...


class Background:
  """Attempts in the event loop of the run; see `Attempts`."""

  def __init__(self, loop: LoopThread, collect: Collect, *, in_turn: bool):
    """Makes attempts of nothing.

    Args:
      loop: Event loop of the run.
      collect: Function that attempts prompts.
      in_turn: Whether a block begins only when the one before it has ended, and is attempted in one
        call. Then what an engine computes side by side does not depend on timing.
    """
    self._loop = loop
    self._collect = collect
    self._in_turn = in_turn
    self._turn = asyncio.Lock()  # first come, first served.
    self._jobs: dict[Job, set[int]] = {}  # with the numbers that are not finished.
    # Groups, with the numbers of their job; None: a job has ended.
    self._queue: queue.SimpleQueue[tuple[set[int], Arrived] | None] = queue.SimpleQueue()
    self._ready: list[Arrived] = []
    self._busy = _Stopwatch()

  @property
  def in_flight(self) -> int:
    return sum(map(len, self._jobs.values()))

  def submit(self, numbers: Sequence[int], prompts: Sequence[StepPrompt]) -> None:
    parts = [range(len(prompts))] if self._in_turn else [[i] for i in range(len(prompts))]
    for part in parts:
      own = [numbers[i] for i in part]
      left = set(own)
      self._busy.begin()
      job = self._loop.start(self._attempt(own, [prompts[i] for i in part], left))
      self._jobs[job] = left
      job.result.add_done_callback(lambda _: self._ended())

  def give_up(self, number: int) -> None:
    self._receive()
    self._ready = [each for each in self._ready if each.number != number]
    for job, left in list(self._jobs.items()):
      if number in left:
        if self._in_turn:
          raise RuntimeError(f"prompt {number} is sampled in one call with others of its block")
        left.clear()  # what still arrives must not be taken for a later attempt.
        self._loop.end(job)

  def arrived(self) -> list[Arrived]:
    self._receive()
    ready, self._ready = self._ready, []
    return ready

  def wait(self, stop: Any = False) -> None:
    while True:
      failed = self._failed()
      self._receive()  # also what a job had finished before it failed.
      if self._ready or not self._jobs:
        return
      if stop:
        raise Stopped
      if failed in self._jobs:
        failed.result.result()  # raises.
      with contextlib.suppress(queue.Empty):
        self._put(self._queue.get(timeout=_LOOK_S))

  def now(self) -> float:
    return time.monotonic()

  def busy_s(self) -> float:
    return self._busy.elapsed_s()

  def close(self) -> None:
    jobs, self._jobs = list(self._jobs), {}
    for job in jobs:
      job.ask_to_end()  # all at once, not one after the other.
    for job in jobs:
      self._loop.end(job)

  async def _attempt(
    self, numbers: Sequence[int], prompts: Sequence[StepPrompt], left: set[int]
  ) -> None:
    """Attempts some prompts in one call; `left` is only passed on."""
    async with self._turn if self._in_turn else contextlib.nullcontext():
      async with contextlib.aclosing(self._collect(prompts)) as finished:
        each: Finished
        async for each in finished:
          self._queue.put((left, Arrived(numbers[each.ordinal], each.group)))

  def _ended(self) -> None:
    """Records that a job has ended; called by the thread of the loop."""
    self._busy.end()
    self._queue.put(None)

  def _receive(self) -> None:
    """Takes what has arrived from the queue."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._put(self._queue.get_nowait())
    self._jobs = {job: own for job, own in self._jobs.items() if own}

  def _failed(self) -> Job | None:
    """Returns a job that has ended with an error."""
    ended = (job for job in self._jobs if job.result.done())
    return next((job for job in ended if job.result.exception() is not None), None)

  def _put(self, item: tuple[set[int], Arrived] | None) -> None:
    if item is None:
      return
    left, arrived = item
    if arrived.number in left:
      left.discard(arrived.number)
      self._ready.append(arrived)


class _Stopwatch:
  """Measures for how long at least one of several things has lasted."""

  def __init__(self):
    self._lock = threading.Lock()  # guards all below.
    self._count = 0
    self._began = 0.0
    self._total = 0.0

  def begin(self) -> None:
    with self._lock:
      if not self._count:
        self._began = time.monotonic()
      self._count += 1

  def end(self) -> None:
    with self._lock:
      self._count -= 1
      if not self._count:
        self._total += time.monotonic() - self._began

  def elapsed_s(self) -> float:
    with self._lock:
      running = time.monotonic() - self._began if self._count else 0.0
      return self._total + running
