"""What ends the processes of a run: errors, requests to stop, and who prints them."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, TypeVar

from grpo_jax.errors import ExpectedFailure
from grpo_jax.interrupts import Flag, Stopped
from grpo_jax.processes import watchdog
from grpo_jax.processes.watchdog import Failure

Raised = TypeVar("Raised", bound=BaseException)

LOOK_S = 0.1  # time between two looks at the news, if a process is not where it should be.
REACH_S = 4.0  # longest wait for the others after a failure that they may not have.

has_failed = False  # this process, and not all at the same place.


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


# --- errors that all processes raise ---


def of_all(error: Raised, *, is_same: bool = True) -> Raised:
  """Returns an error, marked as one that all processes raise at the same place.

  Args:
    error: Error of this process.
    is_same: Whether the main process raises it with the same message, and so prints it for all.
  """
  error.is_of_all_processes = True  # pyright: ignore[reportAttributeAccessIssue]
  if is_same and not watchdog.is_main():
    error.is_printed_by_main = True  # pyright: ignore[reportAttributeAccessIssue]
  return error


def is_of_all(error: BaseException | None) -> bool:
  """Returns whether all processes raise the error, or one in its place, at the same call.

  Collective work can follow such an error, such as a checkpoint.
  """
  while error is not None:
    if getattr(error, "is_of_all_processes", False):
      return True
    error = error.__cause__ or error.__context__
  return watchdog.count() == 1


# --- failures of one process ---


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
  if watchdog.current is None:
    return False
  if isinstance(error, ProcessesError):
    return "no answer from process 0" in str(error)
  words = ("gloo", "nccl", "connection", "unavailable", "coordination")
  is_of_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError", "ValueError")
  if is_of_jax and any(word in str(error).lower() for word in words):
    return True
  return error.__cause__ is not None and _is_lost_connection(error.__cause__)


def _raise_loss(error: BaseException) -> None:
  """Raises the failure of the process that was lost, once the watchdog has found it."""
  deadline = time.monotonic() + (watchdog.current.heartbeat_s + 2 if watchdog.current else 0)
  while watchdog.current is not None and watchdog.current.failure is None:
    if time.monotonic() > deadline:
      return
    time.sleep(watchdog.LOOK_S)
  failure = watchdog.current.failure if watchdog.current else None
  if watchdog.current is not None and failure is not None and failure.process != watchdog.index():
    if failure.stopped:
      raise Stopped() from error
    message = watchdog.current.described(failure)
    raise OtherProcessError(message, failure.exit_code) from error


def give_up(error: BaseException) -> None:
  """Has the other processes end because of an error, unless all have it, or one of them had it.

  Args:
    error: Failure of this process; Stopped if it alone was asked to stop.
  """
  global has_failed
  if watchdog.current is None or is_of_all(error) or _is_of_another(error) or has_failed:
    return
  has_failed = True
  stopped = isinstance(error, Stopped | KeyboardInterrupt)
  watchdog.current.give_up(
    Failure(watchdog.index(), reason(error), exit_code(error), stopped=stopped)
  )


def _is_of_another(error: BaseException) -> bool:
  failure = watchdog.current.failure if watchdog.current else None
  is_told = isinstance(error, OtherProcessError | Stopped)
  return failure is not None and failure.process != watchdog.index() and is_told


def raise_news() -> None:
  """Raises the failure of another process that is not one of all."""
  watching = watchdog.current
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


def wait_for_news() -> None:
  """Raises the failure of the process that has left the common way, if it reports one in time."""
  deadline = time.monotonic() + REACH_S
  while time.monotonic() < deadline:
    raise_news()
    time.sleep(LOOK_S)


def leave(code: int) -> None:
  """Ends this process if there are others: they have ended, or know why they should.

  JAX would wait for them, and abort.

  Args:
    code: Exit code.
  """
  if watchdog.current is not None:
    watchdog.current.leave(code)


# --- the flag that asks a run to stop ---


@contextlib.contextmanager
def watching(stop: Any) -> Iterator[None]:
  """Shares a flag among all processes: once one is asked to stop, so are the others.

  Within the block a signal does not save or end anything by itself. The processes decide together,
  by `any_of(stop)`, where they stop.

  Args:
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
  """
  current = watchdog.current
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


def signal_of(flag: Any) -> int:
  """Returns the signal that raised a flag; -1 if there was none, and 0 if it is not raised."""
  return (flag.number or -1 if isinstance(flag, Flag) else -1) if flag else 0


def raise_own(asked: list[int]) -> None:
  """Raises this process's flag if a signal has raised that of another one."""
  numbers = [number for number in asked if number > 0]
  if numbers and watchdog.current is not None:
    watchdog.current.stop(numbers[0])


# --- what is printed ---


def exit_code(error: BaseException) -> int:
  """Returns the exit code of a program that an error ends."""
  return getattr(error, "exit_code", 1)


def reason(error: BaseException) -> str:
  """Returns the message of an error, with the name of its kind if a user cannot repair it."""
  return str(error) if isinstance(error, ExpectedFailure) else f"{type(error).__name__}: {error}"


def continues(text: str) -> None:
  """Sets the text on how the run continues, printed below the failure of another process."""
  if watchdog.current is not None:
    watchdog.current.last_words = text


def is_printed_elsewhere(error: BaseException) -> bool:
  """Returns whether another process has failed for the same reason, and prints it."""
  cause: BaseException | None = error
  while cause is not None:
    if getattr(cause, "is_printed_by_main", False):
      return True
    cause = cause.__cause__
  failure = watchdog.current.failure if watchdog.current else None
  return (
    failure is not None and failure.process != watchdog.index() and failure.reason == reason(error)
  )


def may_report() -> bool:
  """Returns whether the caller prints what ends this process; False if the watchdog has."""
  return watchdog.current is None or watchdog.current.claim_report("main")


def lines_of(error: ExpectedFailure, *more: str) -> list[str]:
  """Returns what this process prints about what ends it.

  The main process prints all; another one its own reason only, or that the main one is lost.

  Args:
    error: Failure that ends this process.
    more: Further lines of the main process.
  """
  current = watchdog.current
  if not isinstance(error, OtherProcessError) or current is None or current.failure is None:
    if watchdog.is_main():
      return [f"error: {error}", *more]
    is_told = isinstance(error, OtherProcessError) or is_printed_elsewhere(error)
    return [] if is_told else [f"{watchdog.where()}: error: {error}"]
  last = more or tuple(filter(None, [current.last_words]))
  last = () if error.exit_code == 2 else last  # a mistake: the same command would repeat it.
  return [f"error: {error}", *last] if current.is_printed_here(current.failure) else []
