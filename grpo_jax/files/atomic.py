"""Atomic writes of files and folders, and the locks that guard them.

The only module that renames, flushes and locks. Paths are local; `remote` has the others. A reader,
or a process that starts after this one was killed, finds either the old or the new content, never a
part of it.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO

from grpo_jax.files.disk import writing


def replace_file(
  path: pathlib.Path, content: str | bytes | Iterable[str], *, is_durable: bool = False
) -> None:
  """Writes a file, replacing an existing one.

  Args:
    path: File to write; its folder must exist.
    content: Whole content, or its parts in order; strings are written as UTF-8.
    is_durable: Whether the file survives a power failure once this returns.

  Raises:
    WriteError: The file cannot be written; the old one is unchanged.
  """
  temporary = path.with_name(f"{path.name}.tmp")
  parts = [content] if isinstance(content, str | bytes) else content
  with writing(path):
    try:
      with open(temporary, "wb") as file:
        file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
      if is_durable:
        flush(temporary)
      move(temporary, path, is_durable=is_durable)
    except OSError:
      temporary.unlink(missing_ok=True)  # the disk may be full because of it.
      raise


def replace_folder(target: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
  """Fills a temporary folder and renames it to `target`, replacing an existing one.

  If `fill` raises, the temporary folder is removed and an old `target` is unchanged. Folders that
  killed processes left next to `target` are removed.

  Args:
    target: Folder to make.
    fill: Function that fills the empty folder.

  Returns:
    The target.

  Raises:
    WriteError: The folder cannot be written.
  """
  with writing(target):
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(target)
    scratch, held = _scratch(target, ".")
    try:
      fill(scratch)
      scratch.chmod(0o777 & ~_umask())  # mkdtemp makes it private.
      if target.exists():
        old, old_held = _scratch(target, ".old.")
        move(target, old / target.name)
        move(scratch, target)
        shutil.rmtree(old)
        os.close(old_held)
      else:
        move(scratch, target)
    finally:
      shutil.rmtree(scratch, ignore_errors=True)
      os.close(held)
  return target


def clear_leftovers(target: pathlib.Path) -> list[pathlib.Path]:
  """Removes what `replace_folder` left next to a target when its process was killed.

  A folder whose lock is held belongs to a live process and is kept.

  Returns:
    The folders that were removed.
  """
  pattern = re.compile(rf"\.{re.escape(target.name)}\.(old\.)?[a-z0-9_]{{8}}")
  removed = []
  with _folder_locked(target.parent):
    for path in sorted(target.parent.iterdir()):
      if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
          is_free = try_lock(held)
        except OSError:  # a file system without locks: the owner cannot be found out.
          is_free = False
        try:
          if is_free:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
          os.close(held)
  return removed


def new_folder(parent: pathlib.Path, prefix: str) -> pathlib.Path:
  """Makes an empty folder with a new name; `move` later gives it its final name.

  Args:
    parent: Folder to make it in.
    prefix: First characters of its name.
  """
  return pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def move(source: pathlib.Path, target: pathlib.Path, *, is_durable: bool = False) -> None:
  """Renames a file or a folder in one step; a file, or an empty folder, at `target` is replaced.

  Args:
    source: Complete file or folder.
    target: Final path, in the same file system.
    is_durable: Whether the new name survives a power failure once this returns.
  """
  os.replace(source, target)
  if is_durable:
    flush(target.parent)


def flush(path: pathlib.Path) -> None:
  """Waits until a file, or the list of names in a folder, is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def lock(file: IO[str] | int) -> None:
  """Takes the lock of an open file or folder, waiting for it.

  The system releases it when the file is closed or the process ends. `shared_places.open_lock`
  opens files in places that other users can reach.
  """
  fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: IO[str] | int) -> bool:
  """Takes the lock unless another process holds it; returns whether it was taken."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True
  except BlockingIOError:
    return False


def is_locked(file: IO[str] | int) -> bool:
  """Returns whether another open file holds the lock; takes it for the moment of the question."""
  try:
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  fcntl.flock(file, fcntl.LOCK_UN)
  return False


def _scratch(target: pathlib.Path, infix: str) -> tuple[pathlib.Path, int]:
  """Makes an empty folder next to a target; returns it and the descriptor that locks it."""
  with _folder_locked(target.parent):  # else it could be taken for a leftover.
    made = new_folder(target.parent, f".{target.name}{infix}")
    held = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks.
      lock(held)
  return made, held


@contextlib.contextmanager
def _folder_locked(folder: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a folder, if its file system has locks."""
  descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    with contextlib.suppress(OSError):
      lock(descriptor)
    yield
  finally:
    os.close(descriptor)


def _umask() -> int:
  """Returns the file mode creation mask of the process. Reading it requires setting it."""
  mask = os.umask(0o077)
  os.umask(mask)
  return mask
