"""Values that all processes exchange and compare, and work that fails on all if it does on one."""

import itertools
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from grpo_jax.interrupts import Stopped
from grpo_jax.processes import failures, flags, roles, store, waiting, watch
from grpo_jax.processes.failures import (
  DisagreementError,
  OtherProcessError,
  PartedError,
  ProcessesError,
)

T = TypeVar("T")

TIMEOUT_S = 300.0  # seconds that one process waits for what the main one decides.
wait_s = 1800.0  # seconds that one process waits for what takes the others long; set by `start`.

# Numbers of broadcasts; all processes make the same ones in the same order.
_numbers = itertools.count()


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
  if roles.count() == 1:
    return value
  key = f"grpo_jax/broadcast/{next(_numbers)}"
  if roles.is_main():
    roles.client().key_value_set(key, text)
    return value
  with store.awaiting(f"what process 0 decides ({key})"):
    sent = store.received(key, time.monotonic() + timeout_s)
  if sent is None:
    raise ProcessesError(f"waited {timeout_s:g} s for {roles.name_of(0)}, which decides ({key})")
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
  asked = [number for number in exchange(flags.signal_of(flag), what=what) if number]
  flags.raise_own(asked)
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
    flag = watch.current.flag if watch.current else None
    return {"stopped": flags.signal_of(flag) or -1}
  return {"failed": failures.reason(failure), "exit_code": failures.exit_code(failure)}


def _elsewhere(outcomes: list[Mapping[str, Any]]) -> BaseException | None:
  """Returns what ends this process because of the outcomes of all; None if nothing does."""
  for number, outcome in enumerate(outcomes):
    if outcome.get("failed"):
      return OtherProcessError(
        f"{roles.name_of(number)}: {outcome['failed']}", outcome["exit_code"]
      )
  asked = [outcome["stopped"] for outcome in outcomes if outcome.get("stopped")]
  flags.raise_own(asked)
  return Stopped() if asked else None


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
    self._name = store.new_name(name)
    self.made = 0  # number of exchanges that have begun.

  def exchange(self, value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
    """Does what `processes.exchange` does, on this channel."""
    text = json.dumps(value)  # also with one process, so that mistakes are found there.
    if roles.count() == 1:
      return [value]
    return [json.loads(each) for each in self._exchanged(text.encode(), what, timeout_s)]

  def together(self, work: Callable[[], T], *, what: str, timeout_s: float | None = None) -> T:
    """Does what `processes.together` does, on this channel."""
    if roles.count() == 1:
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
      raise failures.of_all(failure, is_same=outcomes[0] == outcomes[roles.index()])
    return result

  @waiting.counted
  def _exchanged(self, data: bytes, what: str, timeout_s: float | None) -> list[bytes]:
    """Returns the bytes of all processes, through the key-value store."""
    client, me, number = roles.client(), roles.index(), self.made
    self.made += 1
    began = time.monotonic()
    deadline = began + (wait_s if timeout_s is None else timeout_s)
    found = {me: data}
    place = f"{what}\0".encode()
    with store.awaiting(what):
      client.key_value_set_bytes(self._key(number, me), zlib.compress(place + data, 1))
      for other in range(roles.count()):
        if other == me:
          continue
        sent = store.received(self._key(number, other), deadline)
        if sent is None:
          raise ProcessesError(self._missing(number, found, what, time.monotonic() - began))
        at, _, found[other] = zlib.decompress(sent).partition(b"\0")
        if at != place[:-1]:
          failures.wait_for_news()
          raise PartedError(
            f"{roles.name_of(other)} is at {at.decode()!r}, this process at {what!r}"
          )
    # All have sent this value, so all have read the ones before.
    if number:
      client.key_value_delete(self._key(number - 1, me))
    return [found[other] for other in range(roles.count())]

  def _key(self, number: int, process: int) -> str:
    return f"grpo_jax/{self._name}/{number}/{process}"

  def _missing(self, number: int, found: Mapping[int, bytes], what: str, waited: float) -> str:
    """Returns who has not sent a value in time."""
    absent = [other for other in range(roles.count()) if other not in found]
    missing = [other for other in absent if not store.is_sent(self._key(number, other))]
    return f"waited {waited:.0f} s for {what} of {', '.join(map(roles.name_of, missing))}"


main_channel = Channel("exchange")  # of the main threads.
