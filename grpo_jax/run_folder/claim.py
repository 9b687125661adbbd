"""The lock of a run folder: one process works in it at a time."""

import contextlib
import os
import pathlib
from typing import IO, Any

from grpo_jax import processes
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import atomic, shared_places


class Unusable(ExpectedFailure, OSError):
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
    Unusable: Another process uses the folder, or it cannot be made or written to.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = shared_places.open_lock(workdir / ".lock", allow_other_owner=True)
  except OSError as error:
    raise Unusable(f"cannot use {named}={workdir}: {error.strerror}") from error
  if not atomic.try_lock(lock):
    owner = lock.read().strip()
    lock.close()
    raise Unusable(f"{named}={workdir} is in use by another run (process {owner})")
  try:
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
  except OSError as error:
    with contextlib.suppress(OSError):
      lock.close()
    raise Unusable(f"cannot use {named}={workdir}: {error.strerror}") from error
  return lock


def claimed_by_main(
  workdir: pathlib.Path, *, named: str = "--workdir"
) -> contextlib.AbstractContextManager[Any]:
  """Does what `claimed` does, by the main process for all processes of a run.

  Raises:
    Unusable: As of `claimed`, on all processes.
  """
  lock: Any = contextlib.nullcontext()
  problem = None
  if processes.is_main():
    try:
      lock = claimed(workdir, named=named)
    except Unusable as error:
      problem = str(error)
  if problem := processes.broadcast(problem):
    raise processes.of_all(Unusable(problem))
  return lock
