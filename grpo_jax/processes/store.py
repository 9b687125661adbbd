"""The key-value store of JAX's coordination service, and what this process waits for there."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

from grpo_jax.processes import failures, roles, watch
from grpo_jax.processes.failures import ProcessesError

POLL_S = 1.0  # time between two looks at what other processes report.

# Uses of the names of channels and of the points that all reach; equal on all processes.
_uses: collections.Counter[str] = collections.Counter()


def new_name(name: str) -> str:
  """Returns a name that has not been used; all processes must ask for the same ones in order."""
  _uses[name] += 1
  return f"{name}/{_uses[name]}"


def received(key: str, deadline: float) -> bytes | None:
  """Returns the value of a key when it is there; None if it is not by the deadline.

  Raises:
    OtherProcessError: Another process has failed.
    Stopped: Another process was asked to stop, and has.
    ProcessesError: Process 0 does not answer.
  """
  while (left := deadline - time.monotonic()) > 0:
    try:
      return roles.client().blocking_key_value_get_bytes(key, milliseconds(min(POLL_S, left)))
    except Exception as error:  # jaxlib has no public class for what its client raises.
      if "DEADLINE_EXCEEDED" not in str(error):
        raise ProcessesError(
          f"{roles.named()}: no answer from process 0: {first_line(error)}"
        ) from error
    failures.raise_news()
  return None


def is_sent(key: str) -> bool:
  """Returns whether a key has a value; False if process 0 does not answer."""
  try:
    return bool(roles.client().key_value_try_get_bytes(key))
  except Exception:
    return False


@contextlib.contextmanager
def awaiting(what: str) -> Iterator[None]:
  """While the block runs, the watch knows that this process waits with a time-out of its own."""
  is_main_thread = threading.current_thread() is threading.main_thread()
  watching = watch.current if is_main_thread else None
  with watching.waiting(what) if watching else contextlib.nullcontext():
    yield


def milliseconds(seconds: float) -> int:
  """Returns a time-out as the client takes it."""
  return max(1, round(1000 * seconds))


def first_line(error: Exception) -> str:
  """Returns the first line of an error of the `jax.distributed` client."""
  return (str(error).strip() or type(error).__name__).splitlines()[0]
