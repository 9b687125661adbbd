"""Folders and locks in places that several processes, or several users, can reach.

A folder in /dev/shm or /tmp has a name that anybody can take first, and a link or a file in it can
lead elsewhere. Nothing here follows a link, empties a file, or uses what belongs to somebody else.
"""

import os
import pathlib
import stat
from typing import IO

from grpo_jax.errors import ExpectedFailure

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(ExpectedFailure, PermissionError):
  """A folder or a file is not this user's alone, so nothing in it can be trusted."""

  def __init__(self, message: str):
    super().__init__(message)
    self.strerror = message  # what messages of an OSError are made of.


def private_folder(path: pathlib.Path) -> pathlib.Path:
  """Makes a folder that only this user can write, or checks one that is there.

  Args:
    path: Its parents are made if needed.

  Raises:
    NotOurs: It is a link or not a folder, belongs to another user, or others may write it.
    OSError: It cannot be made.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  try:
    path.mkdir(mode=0o700)
  except FileExistsError:
    pass
  found = os.lstat(path)
  if not stat.S_ISDIR(found.st_mode):
    kind = "a link" if stat.S_ISLNK(found.st_mode) else "not a folder"
    raise NotOurs(f"{path} is {kind}; a folder of this user was needed: remove it")
  if found.st_uid != os.getuid():
    raise NotOurs(
      f"{path} belongs to user {found.st_uid}, this is user {os.getuid()}: have it removed, or"
      " name another folder"
    )
  if found.st_mode & _OTHERS_WRITE:
    raise NotOurs(
      f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):03o}): look at what"
      f" is in it, then `chmod go-w {path}`, or remove it"
    )
  return path


def open_lock(path: pathlib.Path, *, of_others: bool = False) -> IO[str]:
  """Opens a file to be locked, making it if it is not there; its content stays.

  Args:
    path: Of the file.
    of_others: Whether it may belong to another user, where several share a folder on purpose.

  Raises:
    NotOurs: It is a link or not a regular file, has a second name, or is another user's.
    OSError: It cannot be opened.
  """
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
  try:
    descriptor = os.open(path, flags, 0o600)
  except OSError as error:
    if path.is_symlink():
      raise NotOurs(f"{path} is a link, a lock was needed: remove it") from error
    raise
  found = os.fstat(descriptor)
  is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
  if not is_plain or not (of_others or found.st_uid == os.getuid()):
    os.close(descriptor)
    raise NotOurs(f"{path} is not a plain file of user {os.getuid()}, a lock was needed: remove it")
  return os.fdopen(descriptor, "r+")
