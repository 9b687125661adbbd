"""Restrictions that a process gives itself before it runs a program: resources and access.

The process cannot undo them. Called in the sandboxed process only.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

MIB = 1 << 20
_OPEN_FILES = 64
_THREADS = 64
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096
# Mount flags as statvfs reports them → as mount expects them: nosuid, nodev, noexec, noatime,
# nodiratime, relatime. Flags that are set must be kept.
_MOUNT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}

# Landlock uses the same numbers on all architectures. Version 3 (Linux 6.2) adds truncation.
# https://docs.kernel.org/userspace-api/landlock.html
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_RIGHTS = (1 << 15) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
LANDLOCK_ABI = 3  # smallest version that is needed.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14)  # the others apply to folders.


def limit(*, memory_mib: int, cpu_s: int, file_mib: int, count_threads: bool) -> None:
  """Sets resource limits that cannot be raised again.

  Args:
    memory_mib: Size of the address space, in MiB.
    cpu_s: CPU time, in seconds; the kernel kills the process when it is used up.
    file_mib: Size of one file, in MiB.
    count_threads: Whether to limit the number of threads. The count is per user in a user
      namespace, so it only makes sense in a separate namespace.
  """
  bounds = {
    resource.RLIMIT_AS: memory_mib * MIB,
    resource.RLIMIT_CPU: cpu_s,
    resource.RLIMIT_FSIZE: file_mib * MIB,
    resource.RLIMIT_NOFILE: _OPEN_FILES,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
  }
  if count_threads:
    bounds[resource.RLIMIT_NPROC] = _THREADS
  for name, value in bounds.items():
    hard = resource.getrlimit(name)[1]
    lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(name, (lowest, lowest))


def die_with(parent: int) -> None:
  """Makes the kernel kill this process when its parent, of this id, dies."""
  _Libc().prctl("PDEATHSIG", _PR_SET_PDEATHSIG, _SIGKILL)
  if os.getppid() != parent:
    os._exit(1)  # the parent is already dead.


class Files(TypedDict):
  """The files that Landlock leaves accessible."""

  readable: Sequence[str]  # files and folders (with their content) that may be read,
  hidden: Sequence[str]  # except for these folders, unless `readable` lists them.
  devices: Sequence[str]  # files that may also be written.
  scratch: str  # folder that contains the folders of programs.


def shut_server(*, seccomp: str, files: Files | None, devices: Sequence[str]) -> bool:
  """Removes what the process that forks programs does not need, for itself and its children.

  Args:
    seccomp: Filter of system calls, see `syscalls`, in hexadecimal.
    files: Files that Landlock leaves accessible; None: Landlock is not used.
    devices: Mounted device files, whose mounts are to be read-only: a device can still be
      written, but its mode and times cannot be changed.

  Returns:
    Whether the devices are mounted read-only now.

  Raises:
    OSError: The kernel refuses one of the other restrictions.
  """
  libc = _Libc()
  is_read_only = all([_is_remounted(libc, device) for device in devices])
  libc.prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
  if files is not None:
    readable = [
      (path, _READ) for top in files["readable"] for path in _around(top, files["hidden"])
    ]
    writable = [(path, _READ_FILE | _WRITE_FILE) for path in files["devices"]]
    _close_files(libc, _ALL_RIGHTS, [*readable, *writable, (files["scratch"], _ALL_RIGHTS)])
  libc.drop_capabilities()
  _filter_calls(libc, bytes.fromhex(seccomp))
  return is_read_only


def shut(*, seccomp: str, writable: Sequence[str] | None) -> None:
  """Removes what a program does not need: root's capabilities, system calls, write access.

  Args:
    seccomp: Filter of system calls, see `syscalls`, in hexadecimal.
    writable: Only files and folders that the program may write; None: Landlock is not used.

  Raises:
    OSError: The kernel refuses.
  """
  libc = _Libc()
  libc.prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
  if writable is not None:
    _close_files(libc, _ALL_RIGHTS & ~_READ, [(path, _ALL_RIGHTS & ~_READ) for path in writable])
  libc.drop_capabilities()
  _filter_calls(libc, bytes.fromhex(seccomp))


def landlock_abi() -> int:
  """Returns the Landlock version of the kernel; 0: none."""
  if sys.platform != "linux":
    return 0
  try:
    return _Libc().landlock(_CREATE_RULESET, None, 0, 1)
  except OSError:
    return 0


def _around(top: str, hidden: Sequence[str]) -> Iterator[str]:
  """Yields paths that cover a folder except for the hidden ones in it. Links are left out."""
  if top in hidden:
    return
  if not any(path.startswith(f"{top}/") for path in hidden):
    yield top
    return
  for entry in os.scandir(top):
    if not entry.is_symlink():
      yield from _around(entry.path, hidden)


def _is_remounted(libc: "_Libc", path: str) -> bool:
  """Makes a mount read-only; returns whether the kernel allowed it."""
  flags = os.statvfs(path).f_flag
  kept = sum(mount for shown, mount in _MOUNT_FLAGS.items() if flags & shown)
  try:
    libc.mount(path, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)
  except OSError:
    return False
  return True


def _close_files(libc: "_Libc", closed: int, places: Sequence[tuple[str, int]]) -> None:
  """Removes all rights to files, except for some places, each with the rights that remain."""
  ruleset = libc.landlock(_CREATE_RULESET, closed.to_bytes(8, "little"), 8, 0)
  for path, rights in places:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rights &= closed if os.path.isdir(path) else _FILE_RIGHTS
    rule = rights.to_bytes(8, "little") + place.to_bytes(4, "little")
    libc.landlock(_ADD_RULE, ruleset, 1, rule, 0)
    os.close(place)
  libc.landlock(_RESTRICT_SELF, ruleset, 0)
  os.close(ruleset)


def _filter_calls(libc: "_Libc", seccomp: bytes) -> None:
  """Installs a filter of system calls."""

  class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]

  described = Filter(len(seccomp) // 8, seccomp)
  libc.prctl("SECCOMP", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(described))


class _Libc:
  """The C library, with errors as exceptions."""

  def __init__(self):
    self._library = ctypes.CDLL(None, use_errno=True)

  def prctl(self, name: str, option: int, argument: int, more: Any = 0) -> None:
    self._checked(self._library.prctl(option, argument, more, 0, 0), f"prctl({name})")

  def drop_capabilities(self) -> None:
    version, sets = 0x20080522, 6  # effective, permitted, inheritable: 64 bits each.
    header = (ctypes.c_uint32 * 2)(version, 0)  # 0: this process.
    self._checked(self._library.capset(header, (ctypes.c_uint32 * sets)()), "capset")

  def mount(self, path: str, flags: int) -> None:
    result = self._library.mount(None, os.fsencode(path), None, ctypes.c_ulong(flags), None)
    self._checked(result, f"mount({path})")

  def landlock(self, *arguments: Any) -> int:
    """Makes a Landlock system call; whole numbers are passed as longs."""
    as_long = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return self._checked(self._library.syscall(*as_long), "Landlock")

  def _checked(self, result: int, what: str) -> int:
    if result < 0:
      error = ctypes.get_errno()
      raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
