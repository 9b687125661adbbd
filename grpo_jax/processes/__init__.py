"""The processes of a run: how many there are, which one this is, and what they tell each other.

All processes run the same program and make the same decisions. What only one of them can know (a
clock, a file, a failure, what it sampled) is exchanged by the functions of this room, which go
through the key-value store of JAX's coordination service: on the host, with a time-out that names
who is missing. Collectives of devices have neither.

Only the main process writes, prints, claims a folder or decides from clocks. Nothing here starts a
JAX backend or imports JAX: a program without `jax.distributed` is a single process.
"""

import collections
import itertools
import json
import resource
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from grpo_jax.errors import ExpectedFailure
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import waiting
from grpo_jax.processes.waiting import waited_s as waited_s

T = TypeVar("T")

TIMEOUT_S = 300.0  # seconds that one process waits for the others, unless a caller says otherwise.
wait_s = 1800.0  # seconds that one process waits for what takes the others long; set by `start`.

# Numbers of broadcasts; all processes make the same ones in the same order.
_numbers = itertools.count()
# Uses of the names of channels and of the points that all reach; equal on all processes.
_uses: collections.Counter[str] = collections.Counter()


class ProcessesError(ExpectedFailure, TimeoutError):
  """The other processes of a run did not answer in time."""


class DisagreementError(ExpectedFailure, RuntimeError):
  """Something that must be equal on all processes of a run differs."""


class OtherProcessError(ExpectedFailure, RuntimeError):
  """Another process of the run failed; the message names it and has its reason."""


def count() -> int:
  """Returns the number of processes of this run."""
  state = _distributed()
  return 1 if state is None else int(state.num_processes)


def index() -> int:
  """Returns the number of this process, from 0."""
  state = _distributed()
  return 0 if state is None else int(state.process_id)


def is_main() -> bool:
  """Returns whether this process writes, prints and decides for the whole run."""
  return index() == 0


def named() -> str:
  """Returns "process 1 of 2" for messages; "" if there is only one process."""
  return f"process {index()} of {count()}" if count() > 1 else ""


@waiting.counted
def broadcast(value: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
  """Returns the main process's value on every process.

  All processes must make the same calls in the same order.

  Args:
    value: JSON value; ignored on processes other than the main one.
    timeout_s: Seconds to wait for the main process.

  Raises:
    ProcessesError: The main process did not send its value in time.
    TypeError: The value cannot be written as JSON.
  """
  text = json.dumps(value)  # also with one process, so that mistakes are found there.
  if count() == 1:
    return value
  key = f"grpo_jax/broadcast/{next(_numbers)}"
  if is_main():
    _client().key_value_set(key, text)
    return value
  try:
    return json.loads(_client().blocking_key_value_get(key, _milliseconds(timeout_s)))
  except Exception as error:  # jaxlib has no public class for what its client raises.
    raise ProcessesError(
      f"{named()} received nothing from process 0 within {timeout_s:g} s ({key}): {_first(error)}"
    ) from error


def exchange(value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
  """Returns the values of all processes, in their order.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    value: JSON value of this process.
    what: What the processes exchange, for the message if one does not come: "the sampled groups".
    timeout_s: Seconds to wait for the others; None: `wait_s`.

  Raises:
    ProcessesError: A process did not send its value in time; the message names it.
    OtherProcessError: Another process has failed.
    TypeError: The value cannot be written as JSON.
  """
  return _main.exchange(value, what=what, timeout_s=timeout_s)


def agree(value: Any, *, what: str, timeout_s: float | None = None) -> Any:
  """Returns the value, if it is the same on all processes.

  Args:
    value: JSON value of this process.
    what: What must be equal, for the message: "the digest of data/train.jsonl".
    timeout_s: Seconds to wait for the others; None: `wait_s`.

  Raises:
    DisagreementError: The values differ; the message has the value of each process.
    ProcessesError: A process did not send its value in time.
    OtherProcessError: Another process has failed.
  """
  found = exchange(value, what=what, timeout_s=timeout_s)
  if any(each != found[0] for each in found):
    listed = ", ".join(f"process {number}: {each!r}" for number, each in enumerate(found))
    raise DisagreementError(f"{what} differs between the processes of this run: {listed}")
  return value


def any_of(flag: Any, *, what: str = "whether to stop") -> bool:
  """Returns whether the flag is true on any process."""
  return any(exchange(bool(flag), what=what))


def together(work: Callable[[], T], *, what: str, timeout_s: float | None = None) -> T:
  """Does what may fail on some processes only, and raises on all processes if it fails on any.

  All processes must make the same calls in the same order, on their main threads. After it, all
  processes are in the same state: a failure found here can be followed by collective work, such as
  a checkpoint.

  Args:
    work: Function without arguments.
    what: What it does, for messages: "sampling step 3".
    timeout_s: Seconds to wait for the others once this process is done; None: `wait_s`.

  Returns:
    What `work` returns on this process.

  Raises:
    Exception: What `work` raises on this process.
    Stopped: `work` was stopped on any process.
    OtherProcessError: It failed on another process.
  """
  return _main.together(work, what=what, timeout_s=timeout_s)


def _outcome(failure: BaseException | None) -> dict[str, Any]:
  """Returns what other processes are told of the end of some work."""
  if failure is None:
    return {}
  if isinstance(failure, Stopped | KeyboardInterrupt):
    return {"stopped": True}
  is_expected = isinstance(failure, ExpectedFailure)
  reason = str(failure) if is_expected else f"{type(failure).__name__}: {failure}"
  return {"failed": reason, "host": socket.gethostname()}


def _failed_elsewhere(number: int, outcome: Mapping[str, Any]) -> str:
  return f"process {number} of {count()} ({outcome['host']}): {outcome['failed']}"


def _new_name(name: str) -> str:
  """Returns a name that has not been used; all processes must ask for the same ones in order."""
  _uses[name] += 1
  return f"{name}/{_uses[name]}"


class Channel:
  """The exchanges of one thread, which are numbered apart from those of other threads.

  `exchange` and `together` of this module are of the main threads. A background thread that every
  process has, such as the one that completes checkpoints, makes its exchanges on a channel of its
  own.
  """

  def __init__(self, name: str):
    """Makes a channel.

    Args:
      name: Name of the channel, the same on all processes.
    """
    self._name = _new_name(name)
    self.made = 0  # number of exchanges that have begun.

  def exchange(self, value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
    """Does what `processes.exchange` does, on this channel."""
    text = json.dumps(value)  # also with one process, so that mistakes are found there.
    if count() == 1:
      return [value]
    return [json.loads(each) for each in self._exchanged(text.encode(), what, timeout_s)]

  def together(self, work: Callable[[], T], *, what: str, timeout_s: float | None = None) -> T:
    """Does what `processes.together` does, on this channel."""
    if count() == 1:
      return work()
    failure: BaseException | None = None
    result: Any = None
    try:
      result = work()
    except (Exception, KeyboardInterrupt) as error:
      failure = error
    outcomes = self.exchange(_outcome(failure), what=what, timeout_s=timeout_s)
    if failure is not None:
      raise failure
    for number, outcome in enumerate(outcomes):
      if outcome.get("failed"):
        raise OtherProcessError(_failed_elsewhere(number, outcome))
    if any(outcome.get("stopped") for outcome in outcomes):
      raise Stopped
    return result

  @waiting.counted
  def _exchanged(self, data: bytes, what: str, timeout_s: float | None) -> list[bytes]:
    """Returns the bytes of all processes, through the key-value store."""
    client, me, number = _client(), index(), self.made
    self.made += 1
    deadline = time.monotonic() + (wait_s if timeout_s is None else timeout_s)
    client.key_value_set_bytes(self._key(number, me), zlib.compress(data, 1))
    found = {me: data}
    for other in range(count()):
      while other not in found:
        left = deadline - time.monotonic()
        if left <= 0:
          raise ProcessesError(self._missing(number, found, what))
        try:
          sent = client.blocking_key_value_get_bytes(
            self._key(number, other), _milliseconds(min(1, left))
          )
        except Exception as error:  # jaxlib has no public class for what its client raises.
          if "DEADLINE_EXCEEDED" not in str(error):
            raise ProcessesError(f"{named()}: no answer from process 0: {_first(error)}") from error
          continue
        found[other] = zlib.decompress(sent)
    # All have sent this value, so all have read the ones before.
    if number:
      client.key_value_delete(self._key(number - 1, me))
    return [found[other] for other in range(count())]

  def _key(self, number: int, process: int) -> str:
    return f"grpo_jax/{self._name}/{number}/{process}"

  def _missing(self, number: int, found: Mapping[int, bytes], what: str) -> str:
    """Returns who has not sent a value in time."""
    absent = [other for other in range(count()) if other not in found]
    missing = [str(other) for other in absent if not _is_sent(self._key(number, other))]
    noun = "processes" if len(missing) > 1 else "process"
    return f"{named()} waited for {what} of {noun} {', '.join(missing)}"


_main = Channel("exchange")  # of the main threads.


def _is_sent(key: str) -> bool:
  try:
    return bool(_client().key_value_try_get_bytes(key))
  except Exception:
    return False


def all_reach(name: str, *, timeout_s: float, value: Any = None) -> bool:
  """Returns whether all processes reach this point in time, in the same state.

  For what only all processes can do, such as saving a checkpoint, after a failure that the others
  may not know of. They are in the same state if their values are equal, and if they have made
  the same number of exchanges. A process that comes too late is told so at once.

  Args:
    name: Name of the point.
    timeout_s: Seconds to wait for the other processes.
    value: JSON value that must be equal on all processes.
  """
  text = json.dumps([value, _main.made])
  if count() == 1:
    return True
  client, name = _client(), _new_name(f"reached/{name}")
  try:
    client.key_value_set(f"grpo_jax/{name}/{index()}", text)
    barrier(name, timeout_s=timeout_s)
    sent = [client.blocking_key_value_get(f"grpo_jax/{name}/{i}", 1000) for i in range(count())]
  except Exception:  # a process has not come, or the coordination service is gone.
    return False
  return all(each == text for each in sent)


@waiting.counted
def barrier(name: str, *, timeout_s: float = TIMEOUT_S) -> None:
  """Waits until all processes have reached this barrier.

  Args:
    name: Name of the barrier; each name is used once.
    timeout_s: Seconds to wait for the other processes.

  Raises:
    ProcessesError: A process did not reach it in time.
  """
  if count() == 1:
    return
  try:
    _client().wait_at_barrier(f"grpo_jax/barrier/{name}", _milliseconds(timeout_s))
  except Exception as error:
    raise ProcessesError(
      f"{named()} waited {timeout_s:g} s for the others at {name!r}: {_first(error)}"
    ) from error


def allow_open_files(most: int = 65536) -> None:
  """Raises the limit of open files to what the system allows, at most to `most`.

  Every attempt of a conversation has an environment with an event loop, which holds three; the
  usual limit of 1024 is that of about 340 attempts.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _distributed() -> Any:
  """Returns the state of `jax.distributed`; None if it is not running.

  JAX's public functions `process_index` and `process_count` would start a backend.
  """
  jax = sys.modules.get("jax")
  if jax is None or not hasattr(jax, "distributed") or not jax.distributed.is_initialized():
    return None
  from jax._src import distributed

  return distributed.global_state


def _client() -> Any:
  return _distributed().client


def _milliseconds(seconds: float) -> int:
  return max(1, round(1000 * seconds))


def _first(error: Exception) -> str:
  """Returns the first line of an error of the `jax.distributed` client."""
  return (str(error).strip() or type(error).__name__).splitlines()[0]
