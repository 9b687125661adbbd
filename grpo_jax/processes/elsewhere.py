"""Whether another process has ended, too early, the work that all processes do side by side.

Processes that sample for minutes do not wait for each other. The one that fails, or is asked to
stop, announces it in the key-value store; the others look there now and then, and end their work.
"""

import itertools
import time
from typing import Any

from grpo_jax import processes
from grpo_jax.processes import roles, store

LOOK_S = 0.5  # time between two looks.

_numbers = itertools.count()  # all processes begin the same works in the same order.


class Elsewhere:
  """One work of all processes; true when another one has ended it early, or `stop` is true."""

  def __init__(self, stop: Any = False):
    """Begins a work.

    Args:
      stop: Flag of this process; see `interrupts.Flag`.
    """
    self._stop = stop
    self._key = f"grpo_jax/ended_early/{next(_numbers)}"
    self._looked_at = time.monotonic()
    self.is_over = False  # whether another process has ended it.

  def __bool__(self) -> bool:
    return bool(self._stop) or self._is_over()

  def announce(self) -> None:
    """Has the other processes end the work too."""
    roles.client().key_value_set(self._key, str(processes.index()), allow_overwrite=True)

  def forget(self) -> None:
    """Removes the announcement; called once all processes have ended the work."""
    if processes.is_main():
      roles.client().key_value_delete(self._key)

  def _is_over(self) -> bool:
    if not self.is_over and time.monotonic() - self._looked_at >= LOOK_S:
      self.is_over = _has(self._key)
      self._looked_at = time.monotonic()
    return self.is_over


def _has(key: str) -> bool:
  try:
    return bool(roles.client().key_value_try_get(key))
  except Exception as error:  # jaxlib has no public class for what its client raises.
    if "NOT_FOUND" in str(error):
      return False
    raise processes.ProcessesError(
      f"{processes.named()}: no answer from process 0: {store.first_line(error)}"
    ) from error
