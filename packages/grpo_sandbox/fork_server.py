"""A sandboxed process that makes one confined process after another.

    python -c "…; fork_server.main()" SETTINGS

It keeps a warm interpreter, and forks it for every program and every judge: a fork costs
milliseconds, a fresh sandbox and interpreter fifty. It never sees their content: a
child reads its program, or its tests, from its own pipes. There is one child at a time. A child
cannot outlive its turn, because it cannot start processes. Afterwards its folder is removed and
recreated. A folder that is a mount (bubblewrap) is emptied instead; if it is not as before, the
sandbox ends.

Standard input is a socket. A request is one byte, the role, and file descriptors: standard input
and output of the child, and for a judge the pipes to and from the program. The answer is the
child's exit code, one byte: 128 + signal for one that was killed.
"""

import array
import contextlib
import fcntl
import gc
import importlib
import importlib.metadata
import json
import os
import pkgutil
import random
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any

from grpo_sandbox import candidate, confine, grader, judge

READY = b"+"  # the first byte that is sent over the socket.
PROGRAM, FUNCTIONS, JUDGE, GRADER = b"p", b"f", b"j", b"g"
_MOST_FDS = 4
# The modules that programs import most: loaded once.
_WARM = ("typing", "math", "re", "collections", "itertools", "functools", "heapq", "bisect")
_WARM += ("string", "copy", "operator", "datetime", "decimal", "fractions")
_FOR_GRADERS = ("grpo_sandbox.expressions",)  # cannot be read later.
_UNUSABLE = 1
_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS.
_FLAGS_OF_USERS = 0x000380FF  # FS_FL_USER_MODIFIABLE.


def main() -> None:
  """Serves requests until the socket ends; in a child, runs its role instead.

  The argument is JSON: {"limits": arguments of confine.limit, "server": of confine.shut_server,
  "seccomp": {"files": filter of system calls for a program that may change modes and times of
  files, "no_files": for one that may not}, "writable": what Landlock lets a program write, or None,
  "scratch": folder that is emptied after every child, "folder": folder in it, or it itself, that
  children start in, "packages": folders to import from, "parent": id of the trainer's process, or
  0 if bubblewrap ensures that this one dies with it, "max_bytes": longest message between
  program and judge, "grader": file with the functions of graders, or None}. "limits", "server" and
  "seccomp" are None if nothing confines a process.
  """
  settings = json.loads(sys.argv[1])
  del sys.argv[1:], sys.orig_argv[1:]
  for name in (*_WARM, *(_FOR_GRADERS if settings["grader"] else ())):
    importlib.import_module(name)
  if settings["parent"]:
    confine.die_with(settings["parent"])
  sys.path[:] = [*sys.path[1:], *settings["packages"]]  # this package is loaded; hide it.
  files = (settings["server"] or {}).get("files")
  _remember_listings(files and files["readable"])
  settings["filter"] = None
  if settings["server"]:
    is_read_only = confine.shut_server(**settings["server"])
    settings["filter"] = settings["seccomp"]["files" if is_read_only else "no_files"]
  renew(settings["scratch"], settings["folder"])
  if settings["grader"]:
    settings["functions"] = grader.load(settings["grader"])
    gc.collect()
    gc.freeze()  # so that a fork copies fewer pages.
  channel = os.dup(0)
  candidate.silence(0)
  os.write(channel, READY)
  run = _serve(channel, settings)
  run()


def _remember_listings(readable: Sequence[str] | None) -> None:
  """Caches the listings of module folders: without read access they cannot be listed later.

  Args:
    readable: Files and folders that can be read later; None: all of them. Other packages are
      removed from the listings, so that they are missing and not unreadable: libraries expect an
      ImportError from an optional package.
  """
  for path in sys.path:
    finder = pkgutil.get_importer(path)
    if finder is not None and os.path.isdir(path):
      finder.find_spec("")
      vars(finder)["invalidate_caches"] = lambda: None
      parts = {os.path.basename(each) for each in readable or () if os.path.dirname(each) == path}
      if parts:
        vars(finder)["_path_cache"] &= parts
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    importlib.metadata.distribution("-")  # lists the installed distributions.


def _serve(channel: int, settings: dict[str, Any]) -> Callable[[], None]:
  """Forks for every request. Returns in the children only: the function to run."""
  me = os.getpid()
  while True:
    role, fds = _request(channel)
    if not role:
      os._exit(0)
    child = os.fork()
    if child == 0:
      os.close(channel)
      return _child(role, fds, me, settings)
    for fd in fds:
      os.close(fd)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not _is_renewed(settings):
      os._exit(_UNUSABLE)
    os.write(channel, bytes([128 - status if status < 0 else status]))


def _request(channel: int) -> tuple[bytes, list[int]]:
  """Waits for the next request; (b"", []) at the end."""
  fds = array.array("i")
  with socket.socket(fileno=os.dup(channel)) as door:
    role, ancillary, *_ = door.recvmsg(1, socket.CMSG_LEN(_MOST_FDS * fds.itemsize))
  for _, _, data in ancillary:
    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
  return role, list(fds)


def _child(
  role: bytes, fds: list[int], parent: int, settings: dict[str, Any]
) -> Callable[[], None]:
  """Receives the pipes, confines itself permanently, and returns the role."""
  for stream, fd in enumerate(fds[:2]):
    os.dup2(fd, stream)
    os.close(fd)
  candidate.silence(2)
  os.chdir(settings["folder"])
  random.seed(0)  # the same random numbers for every program, in every run.
  if settings["limits"]:
    confine.limit(**settings["limits"])
    confine.die_with(parent)
  if settings["filter"] is not None:
    confine.shut(seccomp=settings["filter"], writable=settings["writable"])
  if role == GRADER:
    return lambda: grader.answer(settings["functions"])
  if role == JUDGE:
    requests, replies = fds[2:]
    return lambda: judge.answer(requests, replies, settings["max_bytes"])
  if role == FUNCTIONS:
    return lambda: candidate.serve_functions(settings["max_bytes"])
  return candidate.run_program


def renew(scratch: str, folder: str) -> None:
  """Removes everything that a program left, and prepares a clean folder for the next one.

  Args:
    scratch: Folder that is emptied.
    folder: Folder in it, which is recreated; or the same folder, if it is a mount, which cannot be
      recreated.

  Raises:
    OSError: Something cannot be removed, or the folder keeps some state.
  """
  empty(scratch)
  if folder != scratch:
    os.mkdir(folder, stat.S_IRWXU)
    return
  os.utime(folder, ns=(0, 0))
  left = [*os.listdir(folder), *os.listxattr(folder)]
  if left or _flags(folder) or stat.S_IMODE(os.stat(folder).st_mode) != stat.S_IRWXU:
    raise OSError(f"{folder} keeps {left} or a mode or flags")


def _flags(folder: str) -> int:
  """Returns the flags of a folder that users may set, such as append-only."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    answer = fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8))
  except OSError:  # the file system does not support flags.
    return 0
  finally:
    os.close(descriptor)
  return int.from_bytes(answer[:4], sys.byteorder) & _FLAGS_OF_USERS


def empty(folder: str) -> None:
  """Removes everything in a folder, and restores its mode.

  Folders may be nested deeper than paths and recursion reach, so the subfolders of a folder are
  moved up before it is removed.

  Raises:
    OSError: Something cannot be removed.
  """
  os.chmod(folder, stat.S_IRWXU)
  while entries := list(os.scandir(folder)):
    for entry in entries:
      if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.path)
        continue
      os.chmod(entry.path, stat.S_IRWXU)
      for inner in list(os.scandir(entry.path)):
        if inner.is_dir(follow_symlinks=False):
          os.chmod(inner.path, stat.S_IRWXU)
          os.rename(inner.path, os.path.join(folder, os.urandom(16).hex()))
        else:
          os.unlink(inner.path)
      os.rmdir(entry.path)


def _is_renewed(settings: dict[str, Any]) -> bool:
  try:
    renew(settings["scratch"], settings["folder"])
  except OSError:  # something that a child left cannot be removed: the sandbox is given up.
    return False
  return True
