"""Points that all processes reach, or do not."""

import json
from typing import Any

from grpo_jax.processes import exchanges, failures, roles, store, waiting, watch
from grpo_jax.processes.failures import ProcessesError

TIMEOUT_S = 300.0  # seconds that one process waits for the others, unless a caller says otherwise.
AGREED_S = 120.0  # longest wait for the others after what ends all of them.


@waiting.counted
def barrier(name: str, *, timeout_s: float = TIMEOUT_S) -> None:
  """Waits until all processes have reached this barrier.

  Args:
    name: Name of the barrier; each name is used once.
    timeout_s: Seconds to wait for the other processes.

  Raises:
    ProcessesError: A process did not reach it in time.
  """
  if roles.count() == 1:
    return
  try:
    roles.client().wait_at_barrier(f"grpo_jax/barrier/{name}", store.milliseconds(timeout_s))
  except Exception as error:
    reason = store.first_line(error)
    raise ProcessesError(
      f"{roles.named()} waited {timeout_s:g} s for the others at {name!r}: {reason}"
    ) from error


def all_reach(name: str, *, timeout_s: float, value: Any = None) -> bool:
  """Returns whether all processes reach this point in time, in the same state.

  For what only all processes can do, such as saving a checkpoint, after a failure that the others
  may not know of. They are in the same state if their values are equal, and if they have made
  the same number of exchanges. A process that comes too late learns it at once.

  Args:
    name: Name of the point.
    timeout_s: Seconds to wait for the others, which may be elsewhere: at most `REACH_S`, if only
      this process has failed; at least `AGREED_S`, if all end.
    value: JSON value that must be equal on all processes.
  """
  text = json.dumps([value, exchanges.main_channel.made])
  if roles.count() == 1:
    return True
  watching = watch.current
  if watching is not None and watching.failure is not None and not failures.has_failed:
    return False  # another process failed, alone.
  timeout_s = min(timeout_s, failures.REACH_S) if failures.has_failed else max(timeout_s, AGREED_S)
  client, name = roles.client(), store.new_name(f"reached/{name}")
  try:
    with store.awaiting(name):
      client.key_value_set(f"grpo_jax/{name}/{roles.index()}", text)
      barrier(name, timeout_s=timeout_s)
    keys = [f"grpo_jax/{name}/{number}" for number in range(roles.count())]
    sent = [client.blocking_key_value_get(key, 1000) for key in keys]
  except Exception:  # a process has not come, or the coordination service is gone.
    return False
  is_agreed = all(each == text for each in sent)
  if watching is not None:
    watching.is_agreed = is_agreed
  return is_agreed
