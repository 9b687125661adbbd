"""Collects calls of many threads for a moment and runs them as batches, in its own thread."""

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


class Batcher:
  """Turns single calls into batches of similar items.

  Only items of the same key are batched, so that the shape in which an item is computed never
  depends on the other items. While a batch runs, the next one is collected.
  """

  def __init__(
    self,
    run: Callable[[Any, Sequence[Any]], Sequence[Any]],
    *,
    key: Callable[[Any], Any],
    max_items: int,
    wait_s: float,
  ):
    """Starts the thread.

    Args:
      run: Function (key, at most `max_items` items) -> their results in order. Only this thread
        calls it.
      key: Function that returns the sortable key of an item.
      max_items: Largest number of items in a batch.
      wait_s: Longest time that the first item waits for others, in seconds.
    """
    if max_items < 1 or wait_s < 0:
      raise ValueError(f"need max_items >= 1, wait_s >= 0, got {max_items}, {wait_s}")
    self._run = run
    self._key = key
    self._max_items = max_items
    self._wait_s = wait_s
    self._jobs: queue.SimpleQueue[_BatchedCall | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._closed = False
    self._counts = {"calls": 0, "batches": 0, "failed_batches": 0}
    self._thread = threading.Thread(target=self._serve, daemon=True, name="batcher")
    self._thread.start()

  def submit(self, item: Any) -> concurrent.futures.Future[Any]:
    """Queues an item; the future raises what its batch raised."""
    job = _BatchedCall(item)
    with self._lock:
      if self._closed:
        raise RuntimeError("the batcher is closed")
      self._counts["calls"] += 1
      self._jobs.put(job)
    return job.future

  def counts(self) -> dict[str, float]:
    """Returns how many calls, batches and failed batches there were."""
    with self._lock:
      return {name: float(value) for name, value in self._counts.items()}

  def close(self) -> None:
    """Ends the thread after the batches that are queued; later calls do nothing."""
    with self._lock:
      if not self._closed:
        self._closed = True
        self._jobs.put(None)
    self._thread.join()

  def _serve(self) -> None:
    is_open = True
    while is_open:
      jobs, is_open = self._gather()
      waiting = [job for job in jobs if job.future.set_running_or_notify_cancel()]
      waiting.sort(key=lambda job: self._key(job.item))  # stable: first come, first served.
      for key, batch in _batches(waiting, lambda job: self._key(job.item), self._max_items):
        self._finish(key, batch)

  def _gather(self) -> tuple[list["_BatchedCall"], bool]:
    """Waits for a job, then for others; returns them, and False at the end of the queue."""
    jobs: list[_BatchedCall] = []
    deadline = None
    while deadline is None or len(jobs) < self._max_items or not self._jobs.empty():
      rest = None if deadline is None else max(0.0, deadline - time.monotonic())
      try:
        job = self._jobs.get(timeout=rest)
      except queue.Empty:
        break
      if job is None:
        return jobs, False
      jobs.append(job)
      deadline = deadline or time.monotonic() + self._wait_s
    return jobs, True

  def _finish(self, key: Any, batch: Sequence["_BatchedCall"]) -> None:
    with self._lock:
      self._counts["batches"] += 1
    try:
      results = self._run(key, [job.item for job in batch])
      # What a batch raises (e.g. a device out of memory) is passed to the callers of that batch;
      # the thread continues with the others.
    except Exception as error:
      with self._lock:
        self._counts["failed_batches"] += 1
      for job in batch:
        job.future.set_exception(error)
      return
    for job, result in zip(batch, results, strict=True):
      job.future.set_result(result)


class _BatchedCall:
  """One call."""

  def __init__(self, item: Any):
    self.item = item
    self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()


def _batches(jobs: Sequence[_BatchedCall], key: Callable[[_BatchedCall], Any], size: int):
  """Yields (key, jobs) of sorted jobs: jobs with one key, at most `size` at a time."""
  start = 0
  for stop in range(1, len(jobs) + 1):
    is_last = stop == len(jobs) or key(jobs[stop]) != key(jobs[start])
    if is_last or stop - start == size:
      yield key(jobs[start]), jobs[start:stop]
      start = stop
