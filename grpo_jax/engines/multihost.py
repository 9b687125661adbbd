"""What the engines of several processes decide together: who is on which host, and who failed."""

import contextlib
import pathlib
import secrets
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_jax import processes
from grpo_jax.engines.base import EngineFailure
from grpo_jax.errors import ExpectedFailure
from grpo_jax.interrupts import Stopped
from grpo_jax.processes.exchanges import EndedEarly

T = TypeVar("T")

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def together(
  work: Callable[[Any], T],
  *,
  what: str,
  failure: type[ExpectedFailure] = EngineFailure,
  stop: Any = False,
) -> T:
  """Does what may fail on some processes; if it does, all processes raise the same kind of error.

  So all of them treat it alike: a run records the step before it ends of an `EngineFailure`.

  Args:
    work: Function of a flag that becomes true when the work is no longer wanted, because another
      process has failed; it may then raise Stopped. Where it exchanges anything with the other
      processes, it must fail on all of them alike.
    what: Name of the work, for messages.
    failure: Kind of error that becomes an error of the same kind on all processes. Others become
      `OtherProcessError`s elsewhere.
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.

  Returns:
    What `work` returns on this process.

  Raises:
    failure: The work failed here, or on another process, which the message names.
    OtherProcessError: The work failed on another process in another way.
    Stopped: The run is asked to end.
  """
  if processes.count() == 1:
    return work(stop)
  early = EndedEarly(stop)
  try:
    result, caught = processes.together(lambda: _attempted(work, early, failure), what=what)
    reason = None if caught is None else f"({socket.gethostname()}): {caught}"
    reasons = processes.exchange(reason, what=what)
  finally:
    early.forget()
  if caught is not None:
    raise processes.of_all(caught)
  for number, other in enumerate(reasons):
    if other is not None:
      raise processes.of_all(failure(f"process {number} of {processes.count()} {other}"))
  assert not isinstance(result, _Nothing)  # only if the work failed somewhere.
  return result


class _Nothing:
  """Stands for the result of work that has none."""


def _attempted(
  work: Callable[[Any], T], early: EndedEarly, failure: type[ExpectedFailure]
) -> tuple[T | _Nothing, ExpectedFailure | None]:
  """Returns the result of some work, or how it failed; if another process has failed, neither."""
  try:
    return work(early), None
  except failure as error:
    early.announce()
    return _Nothing(), error
  except Stopped:
    if early.is_over:
      return _Nothing(), None
    early.announce()
    raise
  except BaseException:
    early.announce()
    raise


def before_on_host() -> int:
  """Returns how many processes with smaller numbers run on the same host.

  Containers with names of their own count as hosts: they number their ports and GPUs separately.
  """
  boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
  hosts = processes.exchange([socket.gethostname(), boot], what="the names of the hosts")
  me = processes.index()
  return hosts[:me].count(hosts[me])


def sharers(folder: pathlib.Path) -> tuple[int, ...]:
  """Returns the processes that see the same folder as this one, in order; this one is among them.

  They are those of a host, or all if hosts share the storage. Names of hosts and file systems
  cannot decide that, so each process leaves a file that the others look for.

  Args:
    folder: Folder that exists on each process.

  Raises:
    EngineFailure: A process cannot write to its folder.
  """
  if processes.count() == 1:
    return (0,)
  mark = folder / f".process-{secrets.token_hex(16)}"
  what = "who sees the same folder"
  try:
    together(lambda _: _touch(mark), what=what)
    marks = processes.exchange(mark.name, what=what)
    seen = [number for number, name in enumerate(marks) if (folder / name).exists()]
    firsts = processes.exchange(seen[0], what=what)  # all have looked once this returns.
  finally:
    with contextlib.suppress(OSError):
      mark.unlink()
  return tuple(number for number, first in enumerate(firsts) if first == seen[0])


def _touch(path: pathlib.Path) -> None:
  try:
    path.touch(mode=0o600)
  except OSError as error:
    raise EngineFailure(f"nothing can be written to {path.parent}: {error.strerror}") from error
