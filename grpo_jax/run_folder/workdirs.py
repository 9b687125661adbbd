"""The run folder of a run: a local one, or a URL with a local folder that the run works in.

The one place that distinguishes them. Everything else of a run sees a local folder, whose
checkpoints are where `checkpoints` says.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from grpo_jax import processes
from grpo_jax.files import local_paths
from grpo_jax.run_folder import folder_lock, shared_folder, stored_steps

# The runs at URLs that this process has opened, by their local folders.
_at_urls: dict[pathlib.Path, Any] = {}


def check(workdir: str | os.PathLike[str] | None) -> None:
  """Raises UnusableFolder if a run folder is a URL that cannot be used; asks no network."""
  if local_paths.is_url(workdir):
    from grpo_jax.files import remote  # only here: most runs need no fsspec.

    if reason := _not_written(workdir) or remote.problem("--workdir", workdir):
      raise folder_lock.UnusableFolder(reason)


def _not_written(url: str) -> str | None:
  """Returns why checkpoints cannot be written to a URL; None if they can be."""
  from grpo_jax.files import remote  # only here, as above.

  scheme, _, rest = url.partition("://")
  if scheme == "file" and not rest.startswith("/"):
    return f"--workdir={url}: an absolute path is needed: file:///FOLDER"
  if scheme in ("gs", "file"):
    return None
  return (
    f"--workdir={remote.shown(url)}: Orbax writes checkpoints to gs:// only; name a folder of a"
    " disk that outlives the machine, and copy it (aws s3 sync, rclone sync)"
  )


def checkpoints(folder: pathlib.Path) -> Any:
  """Returns where the checkpoints of a run are that works in a local folder.

  Returns:
    Their folder, or `url_steps.AtUrl`: what `checkpointing.open` takes.
  """
  return _at_urls[folder].checkpoints() if folder in _at_urls else folder / "checkpoints"


def steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints of such a run in ascending order."""
  found = checkpoints(folder)
  return stored_steps.complete(found) if isinstance(found, pathlib.Path) else found.steps()


def shown(folder: pathlib.Path) -> str:
  """Returns the name by which a run folder is given to commands: its path, or its URL."""
  return _at_urls[folder].url if folder in _at_urls else str(folder)


def local_folder(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the folder that a run works in: of a URL, a folder in the user's cache.

  Raises:
    NotLocal: The path cannot be used on this machine.
  """
  if local_paths.is_url(workdir):
    from grpo_jax.run_folder import url_runs  # only here, as above.

    return url_runs.local_folder(workdir)
  return local_paths.checked("workdir", workdir)


@contextlib.contextmanager
def opened(
  workdir: str | os.PathLike[str],
  *,
  stop: Any = False,
  named: str = "--workdir",
) -> Iterator[pathlib.Path]:
  """Takes a run folder for the block.

      with workdirs.opened("gs://bucket/run", stop=stop) as folder:
        train.train(config, folder, stop=stop)

  If it is a URL, the files there are fetched first, and leaving the block waits until everything
  that the run has written is there. docs/remote_folders.md

  A new local folder is removed if the block raises before the run has written anything of its own.

  Args:
    workdir: Run folder: a path, or a URL.
    stop: Flag that becomes true when the run is asked to end; an `interrupts.Flag` also waits until
      everything is at the URL.
    named: Name of the option that gives a local run folder, for messages.

  Yields:
    The local folder that the run works in.

  Raises:
    UnusableFolder: On entering: the folder cannot be used, or another process uses it.
    Stopped: On entering: the run is asked to end.
    RemoteError: On leaving: the URL does not hold the end of the run.
  """
  check(workdir)
  if local_paths.is_url(workdir):
    from grpo_jax.run_folder import url_runs  # only here, as above.

    with url_runs.opened(workdir, stop) as run:
      _at_urls[run.folder] = run
      yield run.folder
    return
  folder = local_paths.checked("workdir", workdir)
  is_new = not folder_lock.holds_anything(folder)
  with folder_lock.claimed_by_main(folder, named=named):
    try:
      shared_folder.check(folder, named=named)
      yield folder
    except BaseException:
      if is_new and processes.is_main():
        folder_lock.remove_unused(folder)
      raise
