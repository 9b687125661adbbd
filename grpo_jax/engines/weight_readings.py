"""Functions that read the sampler's weights between two chunks of decode steps."""

import collections
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from grpo_jax.engines.sampler_inputs import ProgramOptions
from grpo_jax.engines.sampler_weights import SamplerWeights

# Function (weights, options of the programs) that runs in the sampler's thread.
Reading = Callable[[SamplerWeights, ProgramOptions], Any]


class WaitingReadings:
  """The functions that wait, with those who wait for them; the sampler's lock guards it."""

  def __init__(self):
    self._waiting: collections.deque[tuple[Reading, Future[Any]]] = collections.deque()

  def __len__(self) -> int:
    return len(self._waiting)

  def add(self, reading: Reading) -> "Future[Any]":
    """Appends a function; returns what will have its result."""
    found: Future[Any] = Future()
    self._waiting.append((reading, found))
    return found

  def take(self, most: int) -> list[Callable[[SamplerWeights, ProgramOptions], None]]:
    """Removes the first functions, at most `most`; returns ones that pass their results on."""
    count = min(most, len(self._waiting))
    return [functools.partial(_run, *self._waiting.popleft()) for _ in range(count)]

  def fail(self, error: Exception) -> None:
    """Ends all with an error."""
    while self._waiting:
      _, found = self._waiting.popleft()
      if found.set_running_or_notify_cancel():
        found.set_exception(error)


def _run(
  reading: Reading, found: "Future[Any]", weights: SamplerWeights, options: ProgramOptions
) -> None:
  if not found.set_running_or_notify_cancel():  # nobody waits any more.
    return
  try:
    found.set_result(reading(weights, options))
  except Exception as error:  # of the caller's function: it is the caller's to handle.
    found.set_exception(error)
