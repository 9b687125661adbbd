"""Threads of calls that were given up. Python cannot end a thread, so their number is bounded."""

import logging
import threading
import time

MOST = 64  # threads of one tool or environment that may hang; after that it is refused.
WINDING_UP_S = 1.0  # time in which a thread ends that was asked to.

_log = logging.getLogger(__name__)


class Hanging:
  """The threads of one tool or environment that still run although nobody waits for them."""

  def __init__(self):
    self._lock = threading.Lock()  # guards all below.
    self._left: dict[threading.Thread, float] = {}  # with the time from which on it hangs.
    self._has_warned = False

  def leave(self, thread: threading.Thread, *, after_s: float = 0.0) -> None:
    """Records that nobody waits for a thread any more.

    Args:
      thread: Thread that may have ended already.
      after_s: Time after which it hangs if it still runs, in seconds.
    """
    with self._lock:
      self._left[thread] = time.monotonic() + after_s

  def count(self) -> int:
    """Returns how many threads hang now. Calls that return after all no longer count."""
    now = time.monotonic()
    with self._lock:
      self._left = {thread: since for thread, since in self._left.items() if thread.is_alive()}
      return sum(since <= now for since in self._left.values())

  def refusal(self, owner: str) -> str:
    """Returns why no further call is made; "" if one can be made. The first refusal is logged.

    Args:
      owner: Name of the tool or environment, for the message.
    """
    count = self.count()
    if count < MOST:
      return ""
    reason = f"{owner} is not called: {count} earlier calls of it still hang"
    with self._lock:
      is_first, self._has_warned = not self._has_warned, True
    if is_first:
      _log.warning(
        "%s, and Python cannot end their threads; it is called again once fewer than %d hang",
        *(reason, MOST),
      )
    return reason
