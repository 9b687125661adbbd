"""A thread with an event loop, in which all rollouts of a run are collected.

Ordinary code waits here for coroutines. That also works in a notebook, whose own thread already
runs an event loop.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from grpo_jax.interrupts import Stopped

T = TypeVar("T")

_LOOK_S = 0.1  # time between two looks at the stop flag.
_CANCELS, _CANCEL_S = 3, 0.5  # how often abandoned work is cancelled; the wait after each time.
_END = object()


class LoopThread:
  """Runs coroutines in one event loop for as long as it is open.

      with LoopThread() as loop:
        groups = loop.run(collect(...), stop=stop)

  The thread starts with the first coroutine, so connections and locks that belong to an event
  loop outlive a call. Calls may come from several threads, and then run side by side.

  Ctrl-C in the calling thread, `stop` and an iterator that is left early cancel the work: the
  first cancellation ends it, the next ends what closes it. Work that is still there 1.5 s later
  is left behind in its daemon thread, and the next call gets a new one.
  """

  def __init__(self):
    self._lock = threading.Lock()  # guards all below.
    self._serving: _Serving | None = None
    self._is_closed = False

  def run(self, coroutine: Coroutine[Any, Any, Any], *, stop: Any = False) -> Any:
    """Runs a coroutine to its end and returns its result.

    Args:
      coroutine: Work to do; its exceptions are raised here.
      stop: Flag that becomes true when the result is no longer wanted; see `interrupts.Flag`.

    Raises:
      Stopped: `stop` has become true.
      RuntimeError: The loop is closed, or the caller is a coroutine of this loop.
    """
    job = self.start(coroutine)
    try:
      return _result(job, stop)
    finally:
      self.end(job)

  def iterate(self, items: AsyncIterator[T], *, stop: Any = False) -> Iterator[T]:
    """Yields the items of an asynchronous iterator as they come.

    The work begins when the first item is requested, and continues while the caller uses an
    item. Close the iterator (`contextlib.closing`) if it is not read to its end: that ends the
    work.

    Args:
      items: Iterator to read; its exceptions are raised here, after the items before them.
      stop: Flag that becomes true when no more items are wanted; see `interrupts.Flag`.

    Raises:
      Stopped: `stop` has become true.
      RuntimeError: The loop is closed, or the caller is a coroutine of this loop.
    """
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def read() -> None:
      try:
        async with closed_after(items):
          async for item in items:
            arrived.put(item)
      finally:
        arrived.put(_END)

    job = self.start(read())
    try:
      while (item := _next(arrived, job, stop)) is not _END:
        yield item
      _result(job, stop)
    finally:
      self.end(job)

  def close(self) -> None:
    """Cancels what is left and ends the thread; may be called twice."""
    with self._lock:
      self._is_closed = True
      serving, self._serving = self._serving, None
    if serving is not None:
      serving.stop()
      if not serving.is_current_thread:
        serving.thread.join((_CANCELS + 1) * _CANCEL_S)

  def __enter__(self) -> "LoopThread":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def start(self, coroutine: Coroutine[Any, Any, Any]) -> "LoopTask":
    """Starts a coroutine and returns at once; the loop's thread is started if there is none.

    Raises:
      RuntimeError: The loop is closed, or the caller is a coroutine of this loop.
    """
    with self._lock:
      serving = self._serving
      refusal = ""
      if self._is_closed:
        refusal = "the event loop is closed"
      elif serving is not None and serving.is_current_thread:
        refusal = "a coroutine cannot wait for its own event loop: await the work instead"
      if refusal:
        coroutine.close()
        raise RuntimeError(refusal)
      job = LoopTask(coroutine)
      if serving is None or not serving.submit(job):
        self._serving = _Serving(job)
      return job

  def end(self, job: "LoopTask") -> None:
    """Cancels work that is not done; leaves a loop behind that does not answer."""
    for _ in range(_CANCELS):
      if job.result.done():
        return
      job.ask_to_end()
      if job.serving.is_current_thread:
        return  # the garbage collector closes an iterator, and cannot wait.
      concurrent.futures.wait([job.result], _CANCEL_S)
    if not job.result.done():
      with self._lock:
        if self._serving is job.serving:
          self._serving = None
      job.serving.stop()


@contextlib.asynccontextmanager
async def closed_after(items: AsyncIterator[Any]) -> AsyncIterator[None]:
  """Closes an asynchronous iterator at the end of the block, if it can be closed."""
  try:
    yield
  finally:
    if close := getattr(items, "aclose", None):
      await close()


class LoopTask:
  """A coroutine in the loop; other threads wait for its `result`."""

  serving: "_Serving"  # set by `_Serving.submit`.

  def __init__(self, coroutine: Coroutine[Any, Any, Any]):
    self.result: concurrent.futures.Future[Any] = concurrent.futures.Future()
    self._coroutine = coroutine
    self._task: asyncio.Task[Any] | None = None

  def start(self) -> None:
    """Makes the task; called in the loop."""
    self._task = asyncio.get_running_loop().create_task(self._coroutine)
    self._task.add_done_callback(self._done)

  def ask_to_end(self) -> None:
    """Has the loop cancel the task, without waiting for that."""
    self.serving.call(self._cancel)

  def _cancel(self) -> None:
    """Cancels the task; called in the loop."""
    if self._task is not None:
      self._task.cancel()

  def fail(self, error: BaseException) -> None:
    """Sets an error as the result, if there is none yet; called in the loop's thread."""
    if not self.result.done():
      self.result.set_exception(error)

  def _done(self, task: asyncio.Task[Any]) -> None:
    if task.cancelled():
      self.fail(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
      self.fail(error)
    elif not self.result.done():
      self.result.set_result(task.result())


class _Serving:
  """A running event loop, its thread and the jobs in it."""

  def __init__(self, first: LoopTask):
    self._loop = asyncio.new_event_loop()
    self._lock = threading.Lock()  # guards both below.
    self._is_open = True
    self._jobs: set[LoopTask] = set()
    self.thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
    self.submit(first)
    self.thread.start()

  @property
  def is_current_thread(self) -> bool:
    return threading.current_thread() is self.thread

  def submit(self, job: LoopTask) -> bool:
    """Returns whether the loop takes the job: one that has ended does not."""
    with self._lock:
      if not self._is_open:
        return False
      job.serving = self
      self._jobs.add(job)
      job.result.add_done_callback(lambda _: self._jobs.discard(job))
      self._loop.call_soon_threadsafe(job.start)
      return True

  def call(self, function: Any) -> None:
    """Has the loop call a function, if it still runs."""
    with contextlib.suppress(RuntimeError):  # it is closed.
      self._loop.call_soon_threadsafe(function)

  def stop(self) -> None:
    """Ends the loop, and its thread, as soon as it is free."""
    self.call(self._loop.stop)

  def _serve(self) -> None:
    """Runs in the thread."""
    error: BaseException = RuntimeError("the event loop was closed")
    try:
      self._loop.run_forever()
    except (KeyboardInterrupt, SystemExit) as ended:  # raised by a task, they end the loop.
      error = ended
    finally:
      with self._lock:
        self._is_open = False
        jobs = list(self._jobs)
      for job in jobs:
        job.fail(error)
      self._clear()
      self._loop.close()

  def _clear(self) -> None:
    """Ends the tasks that are left and closes their asynchronous generators."""
    for _ in range(_CANCELS):
      tasks = asyncio.all_tasks(self._loop)
      for task in tasks:
        task.cancel()
      with contextlib.suppress(KeyboardInterrupt, SystemExit):
        if tasks:
          self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
    self._loop.run_until_complete(self._loop.shutdown_asyncgens())


def _result(job: LoopTask, stop: Any) -> Any:
  """Returns the result when it is available; raises Stopped when `stop` has become true."""
  while not concurrent.futures.wait([job.result], _LOOK_S).done:
    if stop:
      raise Stopped
  return job.result.result()


def _next(arrived: "queue.SimpleQueue[Any]", job: LoopTask, stop: Any) -> Any:
  """Returns the next item, or _END; raises Stopped when `stop` has become true."""
  while not stop:
    with contextlib.suppress(queue.Empty):
      return arrived.get(timeout=_LOOK_S)
    if job.result.done() and arrived.empty():
      return _END  # the loop has ended.
  raise Stopped
