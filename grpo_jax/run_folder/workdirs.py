"""The run folder of a run: a local one, or a URL with a local copy that the run works in.

The one place that distinguishes them. Everything else of a run sees a local folder.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from grpo_jax import processes
from grpo_jax.files import local_paths
from grpo_jax.run_folder import claim, shared_folder


def check(workdir: str | os.PathLike[str] | None) -> None:
  """Raises Unusable if a run folder is a URL that cannot be used; asks no network."""
  if local_paths.is_url(workdir):
    from grpo_jax.files import remote  # only here: most runs need no fsspec.

    if reason := remote.problem("--workdir", workdir, writes=True):
      raise claim.Unusable(reason)


def local_folder(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the folder that a run works in: of a URL, the copy in the user's cache.

  Raises:
    NotLocal: The path cannot be used on this machine.
  """
  if local_paths.is_url(workdir):
    from grpo_jax.run_folder.mirrored import opening  # only here: most runs need no fsspec.

    return opening.local_copy(str(workdir))
  return local_paths.checked("workdir", workdir)


@contextlib.contextmanager
def opened(
  workdir: str | os.PathLike[str],
  *,
  local: str | os.PathLike[str] | None = None,
  stop: Any = False,
  named: str = "--workdir",
) -> Iterator[pathlib.Path]:
  """Takes a run folder for the block.

      with workdirs.opened("gs://bucket/run", stop=stop) as folder:
        train.train(config, folder, stop=stop)

  If it is a URL, what is there is fetched first, and leaving the block waits until everything that
  the run has written is there. docs/remote_folders.md

  A new local folder is removed if the block raises before the run has written anything of its own.

  Args:
    workdir: Run folder: a path, or a URL.
    local: Folder in which a run with a URL works; None: a folder of the user's cache.
    stop: Flag that becomes true when the run is asked to end; an `interrupts.Flag` also waits for
      the upload.
    named: Name of the option that gives a local run folder, for messages.

  Yields:
    The local folder that the run works in.

  Raises:
    Unusable: On entering: the folder cannot be used, or another process uses it.
    Stopped: On entering: the run is asked to end.
    RemoteError: On leaving: the URL does not hold the end of the run.
  """
  check(workdir)
  if local_paths.is_url(workdir):
    from grpo_jax.run_folder.mirrored import opening  # only here, as above.

    with opening.opened(workdir, local, stop) as folder:
      yield folder
    return
  if local is not None:
    raise claim.Unusable(f"--workdir.local={local} needs a --workdir that is a URL")
  folder = local_paths.checked("workdir", workdir)
  is_new = not claim.holds_anything(folder)
  with claim.claimed_by_main(folder, named=named):
    try:
      shared_folder.check(folder, named=named)
      yield folder
    except BaseException:
      if is_new and processes.is_main():
        claim.remove_unused(folder)
      raise
