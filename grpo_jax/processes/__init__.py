"""The processes of a run: how many there are, which one this is, and what they exchange.

All processes run the same program and make the same decisions. What only one of them can know (a
clock, a file, a failure, what it sampled) is exchanged by the functions of this room, which go
through the key-value store of JAX's coordination service: on the host, with a time-out that names
who is missing. Collectives of devices have neither.

Only the main process writes, prints, claims a folder or decides from clocks. Nothing here starts a
JAX backend or imports JAX: a program without `jax.distributed` is a single process.
"""

import collections
import contextlib
import itertools
import json
import resource
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from grpo_jax.errors import ExpectedFailure
from grpo_jax.interrupts import Flag, Stopped
from grpo_jax.processes import waiting, watch
from grpo_jax.processes.waiting import waited_s as waited_s
from grpo_jax.processes.watch import Failure

T = TypeVar("T")
Raised = TypeVar("Raised", bound=BaseException)

TIMEOUT_S = 300.0  # seconds that one process waits for the others, unless a caller says otherwise.
wait_s = 1800.0  # seconds that one process waits for what takes the others long; set by `start`.

LOOK_S = 0.1  # time between two looks at the news, if a process is not where it should be.
POLL_S = 1.0  # time between two looks at what other processes report.
REACH_S = 4.0  # longest wait for the others after a failure that they may not have.
AGREED_S = 120.0  # longest wait for the others after what ends all of them.

_has_failed = False  # this process, and not all at the same place.

# Numbers of broadcasts; all processes make the same ones in the same order.
_numbers = itertools.count()
# Uses of the names of channels and of the points that all reach; equal on all processes.
_uses: collections.Counter[str] = collections.Counter()


class ProcessesError(ExpectedFailure, TimeoutError):
  """The other processes of a run did not answer in time."""


class DisagreementError(ExpectedFailure, RuntimeError):
  """Something that must be equal on all processes of a run differs."""


class PartedError(DisagreementError):
  """The processes do not exchange the same thing: one of them has left the common way."""


class OtherProcessError(ExpectedFailure, RuntimeError):
  """Another process of the run failed; the message names it and has its reason.

  The exit code is that of the process that failed.
  """

  def __init__(self, message: str, exit_code: int = 1):
    """Makes an error.

    Args:
      message: Name of the process that failed, with its reason.
      exit_code: Exit code of that process.
    """
    super().__init__(message)
    self.exit_code = exit_code


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


def where() -> str:
  """Returns "process 1 of 2 (host)" for messages; "" if there is only one process."""
  return _whose(index()) if count() > 1 else ""


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
  with _waiting(f"what process 0 decides ({key})"):
    sent = _received(key, time.monotonic() + timeout_s)
  if sent is None:
    raise ProcessesError(f"waited {timeout_s:g} s for {_whose(0)}, which decides ({key})")
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
  return _main.exchange(value, what=what, timeout_s=timeout_s)


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
    raise of_all(DisagreementError(f"{what} differs between the processes of this run: {listed}"))
  return value


def any_of(flag: Any, *, what: str = "whether to stop") -> bool:
  """Returns whether the flag is true on any process."""
  asked = [number for number in exchange(_asked(flag), what=what) if number]
  _raise_flag(asked)
  return bool(asked)


def _asked(flag: Any) -> int:
  """Returns the signal that raised a flag; -1 if there was none, and 0 if it is not raised."""
  return (flag.number or -1 if isinstance(flag, Flag) else -1) if flag else 0


def _raise_flag(asked: list[int]) -> None:
  """Raises this process's flag if a signal has raised that of another one."""
  numbers = [number for number in asked if number > 0]
  if numbers and watch.current is not None:
    watch.current.stop(numbers[0])


def stop_together(stop: Any) -> None:
  """Raises Stopped on all processes if any is asked to stop.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    stop: Flag that becomes true when the run is asked to end.

  Raises:
    Stopped: A process is asked to stop.
  """
  if any_of(stop):
    raise of_all(Stopped())


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
  return _main.together(work, what=what, timeout_s=timeout_s)


def of_all(error: Raised, *, is_same: bool = True) -> Raised:
  """Returns an error, marked as one that all processes raise at the same place.

  Args:
    error: Error of this process.
    is_same: Whether the main process raises it with the same message, and so prints it for all.
  """
  error.is_of_all_processes = True  # pyright: ignore[reportAttributeAccessIssue]
  if is_same and not is_main():
    error.is_printed_by_main = True  # pyright: ignore[reportAttributeAccessIssue]
  return error


def _outcome(failure: BaseException | None) -> dict[str, Any]:
  """Returns what other processes learn of the end of some work."""
  if failure is None:
    return {}
  if isinstance(failure, Stopped | KeyboardInterrupt):
    flag = watch.current.flag if watch.current else None
    return {"stopped": _asked(flag) or -1}
  return {"failed": _reason(failure), "exit_code": exit_code(failure)}


def _elsewhere(outcomes: list[Mapping[str, Any]]) -> BaseException | None:
  """Returns what ends this process because of the outcomes of all; None if nothing does."""
  for number, outcome in enumerate(outcomes):
    if outcome.get("failed"):
      return OtherProcessError(f"{_whose(number)}: {outcome['failed']}", outcome["exit_code"])
  asked = [outcome["stopped"] for outcome in outcomes if outcome.get("stopped")]
  _raise_flag(asked)
  return Stopped() if asked else None


def exit_code(error: BaseException) -> int:
  """Returns the exit code of a program that an error ends."""
  return getattr(error, "exit_code", 1)


def _reason(error: BaseException) -> str:
  return str(error) if isinstance(error, ExpectedFailure) else f"{type(error).__name__}: {error}"


def _whose(number: int) -> str:
  """Returns "process 1 of 2 (host)"."""
  return watch.current.named(number) if watch.current else f"process {number} of {count()}"


def is_of_all(error: BaseException | None) -> bool:
  """Returns whether all processes raise the error, or one in its place, at the same call.

  Collective work can follow such an error, such as a checkpoint.
  """
  while error is not None:
    if getattr(error, "is_of_all_processes", False):
      return True
    error = error.__cause__ or error.__context__
  return count() == 1


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
    try:
      outcomes = self.exchange(_outcome(failure), what=what, timeout_s=timeout_s)
    except PartedError:
      if failure is None:
        raise
      raise failure from None  # the others wait for something within `work`.
    failure = failure or _elsewhere(outcomes)
    if failure is not None:
      raise of_all(failure, is_same=outcomes[0] == outcomes[index()])
    return result

  @waiting.counted
  def _exchanged(self, data: bytes, what: str, timeout_s: float | None) -> list[bytes]:
    """Returns the bytes of all processes, through the key-value store."""
    client, me, number = _client(), index(), self.made
    self.made += 1
    began = time.monotonic()
    deadline = began + (wait_s if timeout_s is None else timeout_s)
    found = {me: data}
    place = f"{what}\0".encode()
    with _waiting(what):
      client.key_value_set_bytes(self._key(number, me), zlib.compress(place + data, 1))
      for other in range(count()):
        if other == me:
          continue
        sent = _received(self._key(number, other), deadline)
        if sent is None:
          raise ProcessesError(self._missing(number, found, what, time.monotonic() - began))
        at, _, found[other] = zlib.decompress(sent).partition(b"\0")
        if at != place[:-1]:
          _wait_for_news()
          raise PartedError(f"{_whose(other)} is at {at.decode()!r}, this process at {what!r}")
    # All have sent this value, so all have read the ones before.
    if number:
      client.key_value_delete(self._key(number - 1, me))
    return [found[other] for other in range(count())]

  def _key(self, number: int, process: int) -> str:
    return f"grpo_jax/{self._name}/{number}/{process}"

  def _missing(self, number: int, found: Mapping[int, bytes], what: str, waited: float) -> str:
    """Returns who has not sent a value in time."""
    absent = [other for other in range(count()) if other not in found]
    missing = [_whose(other) for other in absent if not _is_sent(self._key(number, other))]
    return f"waited {waited:.0f} s for {what} of {', '.join(missing)}"


_main = Channel("exchange")  # of the main threads.


def _received(key: str, deadline: float) -> bytes | None:
  """Returns the value of a key when it is there; None if it is not by the deadline.

  Raises:
    OtherProcessError: Another process has failed.
    Stopped: Another process was asked to stop, and has.
    ProcessesError: Process 0 does not answer.
  """
  while (left := deadline - time.monotonic()) > 0:
    try:
      return _client().blocking_key_value_get_bytes(key, _milliseconds(min(POLL_S, left)))
    except Exception as error:  # jaxlib has no public class for what its client raises.
      if "DEADLINE_EXCEEDED" not in str(error):
        raise ProcessesError(f"{named()}: no answer from process 0: {_first(error)}") from error
    _raise_news()
  return None


def _raise_news() -> None:
  """Raises the failure of another process that is not one of all."""
  watching = watch.current
  if watching is None or watching.failure is None:
    return
  failure = watching.failure
  if failure.process == watching.index:
    raise ProcessesError(f"this process has failed before: {failure.reason}")
  raise (
    Stopped()
    if failure.stopped
    else OtherProcessError(watching.described(failure), failure.exit_code)
  )


def _wait_for_news() -> None:
  """Raises the failure of the process that has left the common way, if it reports one in time."""
  deadline = time.monotonic() + REACH_S
  while time.monotonic() < deadline:
    _raise_news()
    time.sleep(LOOK_S)


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[None]:
  is_main_thread = threading.current_thread() is threading.main_thread()
  watching = watch.current if is_main_thread else None
  with watching.waiting(what) if watching else contextlib.nullcontext():
    yield


def _is_sent(key: str) -> bool:
  try:
    return bool(_client().key_value_try_get_bytes(key))
  except Exception:
    return False


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
  text = json.dumps([value, _main.made])
  if count() == 1:
    return True
  watching = watch.current
  if watching is not None and watching.failure is not None and not _has_failed:
    return False  # another process failed, alone.
  timeout_s = min(timeout_s, REACH_S) if _has_failed else max(timeout_s, AGREED_S)
  client, name = _client(), _new_name(f"reached/{name}")
  try:
    with _waiting(name):
      client.key_value_set(f"grpo_jax/{name}/{index()}", text)
      barrier(name, timeout_s=timeout_s)
    sent = [client.blocking_key_value_get(f"grpo_jax/{name}/{i}", 1000) for i in range(count())]
  except Exception:  # a process has not come, or the coordination service is gone.
    return False
  is_agreed = all(each == text for each in sent)
  if watching is not None:
    watching.is_agreed = is_agreed
  return is_agreed


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


@contextlib.contextmanager
def failing() -> Iterator[None]:
  """Has the other processes end if the block fails on this process only.

  They learn of it within a second, also when they wait in a collective of the devices, and end with
  this failure and its exit code.
  """
  try:
    yield
  except (Exception, KeyboardInterrupt) as error:
    if _is_lost_connection(error):
      _raise_loss(error)
    give_up(error)
    raise


def _is_lost_connection(error: BaseException) -> bool:
  """Returns whether an error may be what this process sees of the end of another one."""
  if watch.current is None:
    return False
  if isinstance(error, ProcessesError):
    return "no answer from process 0" in str(error)
  words = ("gloo", "nccl", "connection", "unavailable", "coordination")
  is_of_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError", "ValueError")
  if is_of_jax and any(word in str(error).lower() for word in words):
    return True
  return error.__cause__ is not None and _is_lost_connection(error.__cause__)


def _raise_loss(error: BaseException) -> None:
  """Raises the failure of the process that was lost, once the watch has found it."""
  deadline = time.monotonic() + (watch.current.heartbeat_s + 2 if watch.current else 0)
  while watch.current is not None and watch.current.failure is None:
    if time.monotonic() > deadline:
      return
    time.sleep(watch.LOOK_S)
  failure = watch.current.failure if watch.current else None
  if watch.current is not None and failure is not None and failure.process != index():
    if failure.stopped:
      raise Stopped() from error
    message = watch.current.described(failure)
    raise OtherProcessError(message, failure.exit_code) from error


def give_up(error: BaseException) -> None:
  """Has the other processes end because of an error, unless all have it, or one of them had it.

  Args:
    error: Failure of this process; Stopped if it alone was asked to stop.
  """
  global _has_failed
  if watch.current is None or is_of_all(error) or _is_of_another(error) or _has_failed:
    return
  _has_failed = True
  stopped = isinstance(error, Stopped | KeyboardInterrupt)
  watch.current.give_up(Failure(index(), _reason(error), exit_code(error), stopped=stopped))


def _is_of_another(error: BaseException) -> bool:
  failure = watch.current.failure if watch.current else None
  is_told = isinstance(error, OtherProcessError | Stopped)
  return failure is not None and failure.process != index() and is_told


@contextlib.contextmanager
def watching(stop: Any) -> Iterator[None]:
  """Shares a flag among all processes: once one is asked to stop, so are the others.

  Within the block a signal does not save or end anything by itself. The processes decide together,
  by `any_of(stop)`, where they stop.

  Args:
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
  """
  current = watch.current
  if current is None or not isinstance(stop, Flag):
    yield
    return
  current.flag = stop
  current.on_stop(stop.raise_for)
  stop.share(current.publish_stop, current.end_at_once)
  if stop:  # the signal came before there was anyone to report it to.
    current.publish_stop(stop.number)
  try:
    yield
  finally:
    current.on_stop(None)


def continues(text: str) -> None:
  """Sets how the run continues, which is printed below the failure of another process."""
  if watch.current is not None:
    watch.current.last_words = text


def is_printed_elsewhere(error: BaseException) -> bool:
  """Returns whether another process has failed for the same reason, and prints it."""
  cause: BaseException | None = error
  while cause is not None:
    if getattr(cause, "is_printed_by_main", False):
      return True
    cause = cause.__cause__
  failure = watch.current.failure if watch.current else None
  return failure is not None and failure.process != index() and failure.reason == _reason(error)


def may_report() -> bool:
  """Returns whether the caller prints what ends this process; False if the watch has."""
  return watch.current is None or watch.current.claim_report("main")


def lines_of(error: ExpectedFailure, *more: str) -> list[str]:
  """Returns what this process prints about what ends it.

  The main process prints all; another one its own reason only, or that the main one is lost.

  Args:
    error: Failure that ends this process.
    more: Further lines of the main process.
  """
  current = watch.current
  if not isinstance(error, OtherProcessError) or current is None or current.failure is None:
    if is_main():
      return [f"error: {error}", *more]
    is_told = isinstance(error, OtherProcessError) or is_printed_elsewhere(error)
    return [] if is_told else [f"{where()}: error: {error}"]
  last = more or tuple(filter(None, [current.last_words]))
  last = () if error.exit_code == 2 else last  # a mistake, which the same command would repeat.
  return [f"error: {error}", *last] if current.is_printed_here(current.failure) else []


def leave(code: int) -> None:
  """Ends this process if there are others, which have ended or know why they should.

  JAX would wait for them, and abort.

  Args:
    code: Exit code.
  """
  if watch.current is not None:
    watch.current.leave(code)


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
