"""Values that all processes exchange and compare, and work that fails on all if it does on one.

Everything goes through the key-value store of JAX's coordination service.
"""

import collections
import contextlib
import functools
import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from grpo_jax.interrupts import Stopped
from grpo_jax.processes import failures, watchdog
from grpo_jax.processes.failures import (
  DisagreementError,
  OtherProcessError,
  PartedError,
  ProcessesError,
)
from grpo_jax.processes.options import DistributedOptions

# --- the time that this process waits ---


F = TypeVar("F", bound=Callable[..., Any])

_seconds = 0.0
_depth = 0


def counted(function: F) -> F:
  """Adds the time that a function takes to `waited_s`; for functions that wait for the others.

  Only calls on the main thread count, and a call within another one counts once.
  """

  @functools.wraps(function)
  def timed(*arguments: Any, **options: Any) -> Any:
    global _depth, _seconds
    if _depth or threading.current_thread() is not threading.main_thread():
      return function(*arguments, **options)
    _depth, began = 1, time.perf_counter()
    try:
      return function(*arguments, **options)
    finally:
      _depth = 0
      _seconds += time.perf_counter() - began

  return cast(F, timed)


def waited_s() -> float:
  """Returns the seconds that the main thread has waited for other processes so far."""
  return _seconds


# --- the key-value store ---


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
      return watchdog.client().blocking_key_value_get_bytes(key, milliseconds(min(POLL_S, left)))
    except Exception as error:  # jaxlib has no public class for what its client raises.
      if "DEADLINE_EXCEEDED" not in str(error):
        raise ProcessesError(
          f"{watchdog.named()}: no answer from process 0: {first_line(error)}"
        ) from error
    failures.raise_news()
  return None


def is_sent(key: str) -> bool:
  """Returns whether a key has a value; False if process 0 does not answer."""
  try:
    return bool(watchdog.client().key_value_try_get_bytes(key))
  except Exception:
    return False


@contextlib.contextmanager
def awaiting(what: str) -> Iterator[None]:
  """While the block runs, the watchdog knows that this process waits with a time-out of its own."""
  is_main_thread = threading.current_thread() is threading.main_thread()
  current = watchdog.current if is_main_thread else None
  with current.waiting(what) if current else contextlib.nullcontext():
    yield


def milliseconds(seconds: float) -> int:
  """Returns a time-out as the client takes it."""
  return max(1, round(1000 * seconds))


def first_line(error: Exception) -> str:
  """Returns the first line of an error of the `jax.distributed` client."""
  return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- values and work ---


T = TypeVar("T")

TIMEOUT_S = 300.0  # seconds that one process waits for what the main one decides.
# Seconds that one process waits for what takes the others long; set by `start`.
wait_s = DistributedOptions.wait_s

# Numbers of broadcasts; all processes make the same ones in the same order.
_numbers = itertools.count()


@counted
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
  if watchdog.count() == 1:
    return value
  key = f"grpo_jax/broadcast/{next(_numbers)}"
  if watchdog.is_main():
    watchdog.client().key_value_set(key, text)
    return value
  with awaiting(f"what process 0 decides ({key})"):
    sent = received(key, time.monotonic() + timeout_s)
  if sent is None:
    raise ProcessesError(f"waited {timeout_s:g} s for {watchdog.name_of(0)}, which decides ({key})")
  return json.loads(sent)


def exchange(value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
  """Returns the values of all processes, in their order.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    value: JSON value of this process.
    what: Name of the values, for the message if one does not come: "the sampled groups".
    timeout_s: Seconds to wait for the others; None: `wait_s`.

  Raises:
    ProcessesError: A process did not send its value in time; the message names it.
    OtherProcessError: Another process has failed.
    TypeError: The value cannot be written as JSON.
  """
  return main_channel.exchange(value, what=what, timeout_s=timeout_s)


def agree(value: Any, *, what: str, timeout_s: float | None = None) -> Any:
  """Returns the value, if it is the same on all processes.

  Args:
    value: JSON value of this process.
    what: Name of the value, for the message: "the digest of data/train.jsonl".
    timeout_s: Seconds to wait for the others; None: `wait_s`.

  Raises:
    DisagreementError: The values differ; the message has the value of each process.
    ProcessesError: A process did not send its value in time.
    OtherProcessError: Another process has failed.
  """
  found = exchange(value, what=what, timeout_s=timeout_s)
  if any(each != found[0] for each in found):
    listed = ", ".join(f"process {number}: {each!r}" for number, each in enumerate(found))
    message = f"{what} differs between the processes of this run: {listed}"
    raise failures.of_all(DisagreementError(message))
  return value


def any_of(flag: Any, *, what: str = "whether to stop") -> bool:
  """Returns whether the flag is true on any process."""
  asked = [number for number in exchange(failures.signal_of(flag), what=what) if number]
  failures.raise_own(asked)
  return bool(asked)


def stop_together(stop: Any) -> None:
  """Raises Stopped on all processes if any is asked to stop.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    stop: Flag that becomes true when the run is asked to end.

  Raises:
    Stopped: A process is asked to stop.
  """
  if any_of(stop):
    raise failures.of_all(Stopped())


def together(work: Callable[[], T], *, what: str, timeout_s: float | None = None) -> T:
  """Does what may fail on some processes only, and raises on all processes if it fails on any.

  All processes must make the same calls in the same order, on their main threads. After it, all
  processes are in the same state: a failure found here can be followed by collective work, such as
  a checkpoint.

  Args:
    work: Function without arguments.
    what: Name of the work, for messages: "sampling step 3".
    timeout_s: Seconds to wait for the others once this process is done; None: `wait_s`.

  Returns:
    What `work` returns on this process.

  Raises:
    Exception: What `work` raises on this process.
    Stopped: `work` was stopped on any process.
    OtherProcessError: The work failed on another process.
  """
  return main_channel.together(work, what=what, timeout_s=timeout_s)


def _outcome(failure: BaseException | None) -> dict[str, Any]:
  """Returns what other processes learn of the end of some work."""
  if failure is None:
    return {}
  if isinstance(failure, Stopped | KeyboardInterrupt):
    flag = watchdog.current.flag if watchdog.current else None
    return {"stopped": failures.signal_of(flag) or -1}
  return {"failed": failures.reason(failure), "exit_code": failures.exit_code(failure)}


def _elsewhere(outcomes: list[Mapping[str, Any]]) -> BaseException | None:
  """Returns what ends this process because of the outcomes of all; None if nothing does."""
  for number, outcome in enumerate(outcomes):
    if outcome.get("failed"):
      return OtherProcessError(
        f"{watchdog.name_of(number)}: {outcome['failed']}", outcome["exit_code"]
      )
  asked = [outcome["stopped"] for outcome in outcomes if outcome.get("stopped")]
  failures.raise_own(asked)
  return Stopped() if asked else None


class Channel:
  """The exchanges of one thread. They are numbered apart from those of other threads.

  `exchange` and `together` of this module are of the main threads. A background thread that every
  process has, such as the one that completes checkpoints, makes its exchanges on a channel of its
  own.
  """

  def __init__(self, name: str):
    """Makes a channel.

    Args:
      name: Name of the channel, the same on all processes.
    """
    self._name = new_name(name)
    self.made = 0  # number of exchanges that have begun.

  def exchange(self, value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
    """Does what `processes.exchange` does, on this channel."""
    text = json.dumps(value)  # also with one process, so that mistakes are found there.
    if watchdog.count() == 1:
      return [value]
    return [json.loads(each) for each in self._exchanged(text.encode(), what, timeout_s)]

  def together(self, work: Callable[[], T], *, what: str, timeout_s: float | None = None) -> T:
    """Does what `processes.together` does, on this channel."""
    if watchdog.count() == 1:
      return work()
    failure: BaseException | None = None
    result: Any = None
    try:
      result = work()
    except (Exception, KeyboardInterrupt) as error:
      failure = error
    try:
      outcomes = self.exchange(_outcome(failure), what=what, timeout_s=timeout_s)
    except PartedError:
      if failure is None:
        raise
      raise failure from None  # the others wait for something within `work`.
    if failure is None:
      failure = _elsewhere(outcomes)
    if failure is not None:
      raise failures.of_all(failure, is_same=outcomes[0] == outcomes[watchdog.index()])
    return result

  @counted
  def _exchanged(self, data: bytes, what: str, timeout_s: float | None) -> list[bytes]:
    """Returns the bytes of all processes, through the key-value store."""
    client, me, number = watchdog.client(), watchdog.index(), self.made
    self.made += 1
    began = time.monotonic()
    deadline = began + (wait_s if timeout_s is None else timeout_s)
    found = {me: data}
    place = f"{what}\0".encode()
    with awaiting(what):
      client.key_value_set_bytes(self._key(number, me), zlib.compress(place + data, 1))
      for other in range(watchdog.count()):
        if other == me:
          continue
        sent = received(self._key(number, other), deadline)
        if sent is None:
          raise ProcessesError(self._missing(number, found, what, time.monotonic() - began))
        at, _, found[other] = zlib.decompress(sent).partition(b"\0")
        if at != place[:-1]:
          failures.wait_for_news()
          raise PartedError(
            f"{watchdog.name_of(other)} is at {at.decode()!r}, this process at {what!r}"
          )
    # All have sent this value, so all have read the ones before.
    if number:
      client.key_value_delete(self._key(number - 1, me))
    return [found[other] for other in range(watchdog.count())]

  def _key(self, number: int, process: int) -> str:
    return f"grpo_jax/{self._name}/{number}/{process}"

  def _missing(self, number: int, found: Mapping[int, bytes], what: str, waited: float) -> str:
    """Returns who has not sent a value in time."""
    absent = [other for other in range(watchdog.count()) if other not in found]
    missing = [other for other in absent if not is_sent(self._key(number, other))]
    return f"waited {waited:.0f} s for {what} of {', '.join(map(watchdog.name_of, missing))}"


main_channel = Channel("exchange")  # of the main threads.


# --- points that all processes reach ---


AGREED_S = 120.0  # longest wait for the others after what ends all of them.


@counted
def barrier(name: str, *, timeout_s: float = TIMEOUT_S) -> None:
  """Waits until all processes have reached this barrier.

  Args:
    name: Name of the barrier; each name is used once.
    timeout_s: Seconds to wait for the other processes.

  Raises:
    ProcessesError: A process did not reach it in time.
  """
  if watchdog.count() == 1:
    return
  try:
    watchdog.client().wait_at_barrier(f"grpo_jax/barrier/{name}", milliseconds(timeout_s))
  except Exception as error:
    reason = first_line(error)
    raise ProcessesError(
      f"{watchdog.named()} waited {timeout_s:g} s for the others at {name!r}: {reason}"
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
  text = json.dumps([value, main_channel.made])
  if watchdog.count() == 1:
    return True
  current = watchdog.current
  if current is not None and current.failure is not None and not failures.has_failed:
    return False  # another process failed, alone.
  timeout_s = min(timeout_s, failures.REACH_S) if failures.has_failed else max(timeout_s, AGREED_S)
  client, name = watchdog.client(), new_name(f"reached/{name}")
  try:
    with awaiting(name):
      client.key_value_set(f"grpo_jax/{name}/{watchdog.index()}", text)
      barrier(name, timeout_s=timeout_s)
    keys = [f"grpo_jax/{name}/{number}" for number in range(watchdog.count())]
    sent = [client.blocking_key_value_get(key, 1000) for key in keys]
  except Exception:  # a process has not come, or the coordination service is gone.
    return False
  is_agreed = all(each == text for each in sent)
  if current is not None:
    current.is_agreed = is_agreed
  return is_agreed


# --- work that another process may end early ---
#
# Processes that sample for minutes do not wait for each other. The one that fails, or is asked to
# stop, announces it in the key-value store; the others look there now and then, and end their work.

LOOK_S = 0.5  # time between two looks.

_works = itertools.count()  # all processes begin the same works in the same order.


class EndedEarly:
  """One work of all processes; true when another one has ended it early, or `stop` is true."""

  def __init__(self, stop: Any = False):
    """Begins a work.

    Args:
      stop: Flag of this process; see `interrupts.Flag`.
    """
    self._stop = stop
    self._key = f"grpo_jax/ended_early/{next(_works)}"
    self._looked_at = time.monotonic()
    self.is_over = False  # whether another process has ended it.

  def __bool__(self) -> bool:
    return bool(self._stop) or self._is_over()

  def announce(self) -> None:
    """Has the other processes end the work too."""
    watchdog.client().key_value_set(self._key, str(watchdog.index()), allow_overwrite=True)

  def forget(self) -> None:
    """Removes the announcement; called once all processes have ended the work."""
    if watchdog.is_main():
      watchdog.client().key_value_delete(self._key)

  def _is_over(self) -> bool:
    if not self.is_over and time.monotonic() - self._looked_at >= LOOK_S:
      self.is_over = _is_set(self._key)
      self._looked_at = time.monotonic()
    return self.is_over


def _is_set(key: str) -> bool:
  try:
    return bool(watchdog.client().key_value_try_get(key))
  except Exception as error:  # jaxlib has no public class for what its client raises.
    if "NOT_FOUND" in str(error):
      return False
    raise ProcessesError(
      f"{watchdog.named()}: no answer from process 0: {first_line(error)}"
    ) from error
