"""Groups that are attempted in the background, while the caller does something else."""

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from grpo_jax.interrupts import Stopped
from grpo_jax.rollouts.loop_thread import LoopTask, LoopThread
from grpo_jax.rollouts.rollout import Finished, StepPrompt
from grpo_jax.types import RolloutGroup

_LOOK_S = 0.1  # time between two looks at the stop flag.

# (prompts) -> an asynchronous iterator of their groups as they finish; see `rollout.groups`.
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
      Exception: Attempts failed in a way that ends the run. `arrived` still returns the groups that
        finished before, and raises nothing.
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


@dataclasses.dataclass(eq=False)
class _Part:
  """Prompts that are attempted in one call of `Collect`."""

  numbers: Sequence[int]
  job: LoopTask | None = None  # set when it is started.


class BackgroundAttempts:
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
    self._parts: dict[int, _Part] = {}  # those of the numbers that are not finished.
    # A group and its part; None: the job of the part has ended.
    self._queue: queue.SimpleQueue[tuple[_Part, Arrived | None]] = queue.SimpleQueue()
    self._ready: list[Arrived] = []
    self._failed: list[_Part] = []
    self._busy = _Stopwatch()

  @property
  def in_flight(self) -> int:
    return len(self._parts)

  def submit(self, numbers: Sequence[int], prompts: Sequence[StepPrompt]) -> None:
    parts = [range(len(prompts))] if self._in_turn else [[i] for i in range(len(prompts))]
    for places in parts:
      part = _Part([numbers[i] for i in places])
      self._parts |= dict.fromkeys(part.numbers, part)
      self._busy.begin()
      part.job = self._loop.start(self._attempt(part, [prompts[i] for i in places]))
      part.job.result.add_done_callback(lambda _, part=part: self._ended(part))

  def give_up(self, number: int) -> None:
    self._receive()
    self._ready = [each for each in self._ready if each.number != number]
    if number in self._parts:
      if self._in_turn:
        raise RuntimeError(f"prompt {number} is sampled in one call with others of its block")
      job = self._parts.pop(number).job  # what it still finds is not taken for a later attempt.
      assert job is not None
      self._loop.end(job)

  def arrived(self) -> list[Arrived]:
    self._receive()
    ready, self._ready = self._ready, []
    return ready

  def wait(self, stop: Any = False) -> None:
    while True:
      self._receive()  # a job's groups come before its failure.
      if self._ready or not self._parts:
        return
      if stop:
        raise Stopped
      for part in self._failed:
        if part.job and any(self._parts.get(number) is part for number in part.numbers):
          part.job.result.result()  # raises.
      with contextlib.suppress(queue.Empty):
        self._put(*self._queue.get(timeout=_LOOK_S))

  def now(self) -> float:
    return time.monotonic()

  def busy_s(self) -> float:
    return self._busy.elapsed_s()

  def close(self) -> None:
    jobs = {part.job for part in self._parts.values() if part.job is not None}
    self._parts = {}
    for job in jobs:
      job.ask_to_end()  # all at once, not one after the other.
    for job in jobs:
      self._loop.end(job)

  async def _attempt(self, part: _Part, prompts: Sequence[StepPrompt]) -> None:
    """Attempts the prompts of a part in one call."""
    async with self._turn if self._in_turn else contextlib.nullcontext():
      async with contextlib.aclosing(self._collect(prompts)) as finished:
        each: Finished
        async for each in finished:
          self._queue.put((part, Arrived(part.numbers[each.ordinal], each.group)))

  def _ended(self, part: _Part) -> None:
    """Records that a job has ended; called by the thread of the loop."""
    self._busy.end()
    self._queue.put((part, None))

  def _receive(self) -> None:
    """Takes what has arrived from the queue."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._put(*self._queue.get_nowait())

  def _put(self, part: _Part, arrived: Arrived | None) -> None:
    if arrived is None:
      if part.job is not None and part.job.result.exception() is not None:
        self._failed.append(part)
    elif self._parts.get(arrived.number) is part:
      del self._parts[arrived.number]
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
