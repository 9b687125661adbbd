"""Checks that the processes of a run see the same run folder: each writes a file, all look for all.

A folder of the same name on each host's own disk would be filled by every process, and a checkpoint
in it would hold the shards of one host only.
"""

import contextlib
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Sequence

from grpo_jax import processes
from grpo_jax.run_folder import folder_lock

SEEN_S = 30.0  # seconds until a file of another host must be visible; NFS caches lists of names.


def check(workdir: pathlib.Path, *, named: str = "--workdir") -> None:
  """Raises UnusableFolder on all processes if one of them sees another folder than the main
  process.

  Args:
    workdir: Run folder, which the main process has made.
    named: Name of the option that gives the folder, for messages.
  """
  if processes.count() == 1:
    return
  token = processes.broadcast(secrets.token_hex(8))
  marks = [workdir / f".shared-{token}-{number}" for number in range(processes.count())]
  own = marks[processes.index()]
  try:
    problem = _first(_written(own), what="a file in the run folder")
    problem = problem or _first(_unseen(marks), what="what they see in the run folder")
  finally:
    with contextlib.suppress(OSError):
      own.unlink()
  if problem:
    raise processes.of_all(
      folder_lock.UnusableFolder(
        f"{named}={workdir} is not one folder that all processes share: {problem}. All hosts must"
        " mount the same storage there: NFS, Lustre, Filestore, or a bucket by gcsfuse"
      )
    )


def _written(mark: pathlib.Path) -> str | None:
  """Writes this process's file; returns why that is not possible, or None."""
  try:
    _wait_for([mark.parent])  # made by the main process: NFS may show it late.
    mark.write_text(socket.gethostname())
  except OSError as error:
    return f"{_me()} cannot write there ({error.strerror})"
  return None


def _unseen(marks: Sequence[pathlib.Path]) -> str | None:
  """Returns whose file this process does not see, or None."""
  missing = _wait_for(marks)
  if not missing:
    return None
  other = marks.index(missing[0])
  return f"{_me()} does not see what process {other} has written there"


def _wait_for(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
  """Waits until this process sees the paths; returns those that it does not see in time."""
  deadline = time.monotonic() + SEEN_S
  while missing := [path for path in paths if not path.exists()]:
    if time.monotonic() > deadline:
      break
    time.sleep(0.05)
    with contextlib.suppress(OSError):
      os.listdir(missing[0].parent)  # has NFS ask the server again.
  return missing


def _first(problem: str | None, *, what: str) -> str | None:
  """Returns the problem of the first process that has one, on all processes."""
  return next(filter(None, processes.exchange(problem, what=what)), None)


def _me() -> str:
  return f"{processes.named()} ({socket.gethostname()})"
