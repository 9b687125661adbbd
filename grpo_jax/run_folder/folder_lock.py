"""The lock of a run folder: one process works in it at a time."""

import contextlib
import os
import pathlib
import time
from typing import IO, Any

from grpo_jax import processes
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import atomic, shared_places

LOCK = ".lock"
# How often, and after how many seconds, a lock that was taken is tried again.
ASKED_TIMES, ASKED_S = 2, 0.05
# Files that are in a run folder before the run writes its own: its lock, rows and a reward.
_BEFORE_A_RUN = {LOCK, "rows.jsonl", "evaluation_rows.jsonl", "reward.py"}


class UnusableFolder(ExpectedFailure, OSError):
  """A run folder is in use, or cannot be made, written or reached."""

  exit_code = 2


def claimed(workdir: pathlib.Path, *, named: str = "--workdir") -> IO[str]:
  """Makes a folder if needed, and locks it for this process until the file is closed.

  Two processes in one folder would destroy each other's checkpoints. The lock ends with
  the process, however it ends.

  Args:
    workdir: Run folder.
    named: Name of the option that gives the folder, for messages.

  Raises:
    UnusableFolder: Another process uses the folder, or it cannot be made or written to.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = shared_places.open_lock(workdir / LOCK, allow_other_owner=True)
  except OSError as error:
    raise UnusableFolder(f"cannot use {named}={workdir}: {error.strerror}") from error
  if not (_locked(lock) and _is_there(lock, workdir / LOCK)):
    owner = lock.read().strip()
    lock.close()
    raise UnusableFolder(f"{named}={workdir} is in use by another run (process {owner})")
  try:
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
  except OSError as error:
    with contextlib.suppress(OSError):
      lock.close()
    raise UnusableFolder(f"cannot use {named}={workdir}: {error.strerror}") from error
  return lock


def is_in_use(workdir: pathlib.Path) -> bool:
  """Returns whether a process works in a run folder; changes nothing there."""
  try:
    with open(workdir / LOCK, encoding="utf-8") as lock:
      return atomic.is_locked(lock)
  except OSError:  # there is no lock, or it cannot be read.
    return False


def _locked(lock: IO[str]) -> bool:
  """Takes the lock, for which `is_in_use` may be asking in this moment; returns whether it did."""
  for _ in range(ASKED_TIMES):
    if atomic.try_lock(lock):
      return True
    time.sleep(ASKED_S)
  return atomic.try_lock(lock)


def holds_anything(workdir: pathlib.Path) -> bool:
  """Returns whether a folder exists and has anything in it."""
  with contextlib.suppress(OSError):
    return any(workdir.iterdir())
  return False


def remove_unused(workdir: pathlib.Path) -> None:
  """Removes a folder in which no run has begun: it has nothing but its lock and what was given."""
  with contextlib.suppress(OSError):
    if {each.name for each in workdir.iterdir()} <= _BEFORE_A_RUN:
      for each in workdir.iterdir():
        each.unlink()
      workdir.rmdir()


def _is_there(lock: IO[str], path: pathlib.Path) -> bool:
  """Returns whether an open lock is the file at a path, which `remove_unused` may have removed."""
  with contextlib.suppress(FileNotFoundError):
    return os.path.samestat(os.fstat(lock.fileno()), path.stat())
  return False


def claimed_by_main(
  workdir: pathlib.Path, *, named: str = "--workdir"
) -> contextlib.AbstractContextManager[Any]:
  """Has the main process call `claimed` for all processes of a run.

  Raises:
    UnusableFolder: The main process could not lock the folder; raised on all processes.
  """
  lock: Any = contextlib.nullcontext()
  problem = None
  if processes.is_main():
    try:
      lock = claimed(workdir, named=named)
    except UnusableFolder as error:
      problem = str(error)
  if problem := processes.broadcast(problem):
    raise processes.of_all(UnusableFolder(problem))
  return lock
