"""What a process does to itself before it runs a program: limits and walls.

Nothing of this can be undone from within. Called in the sandboxed process only.
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
# Flags of a mount as statvfs shows them → as mount takes them: nosuid, nodev, noexec, noatime,
# nodiratime, relatime. Those that are set must stay.
_MOUNT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}

# Landlock, the same numbers everywhere. Version 3 (Linux 6.2) is the first that knows truncation.
# https://docs.kernel.org/userspace-api/landlock.html
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_RIGHTS = (1 << 15) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
LANDLOCK_ABI = 3  # the least that is needed.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14)  # the others are of folders.


def limit(*, memory_mib: int, cpu_s: int, file_mib: int, count_threads: bool) -> None:
  """Sets the limits of resources, for good.

  Args:
    memory_mib: Of the address space.
    cpu_s: Of CPU time; the kernel kills at it.
    file_mib: Of one file.
    count_threads: Bound their number. The count is of the user in its user namespace: only
      in a namespace of its own does it count nothing else.
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
  """Has this process killed when its parent, of this id, dies."""
  _Libc().prctl("PDEATHSIG", _PR_SET_PDEATHSIG, _SIGKILL)
  if os.getppid() != parent:
    os._exit(1)  # it died before.


class Files(TypedDict):
  """The files that Landlock leaves open."""

  readable: Sequence[str]  # files and folders that may be read, with all below them
  hidden: Sequence[str]  # but for these folders, unless they are in `readable` themselves.
  devices: Sequence[str]  # files that may also be written.
  scratch: str  # the folder in which the folders of programs are made.


def shut_server(*, seccomp: str, files: Files | None, devices: Sequence[str]) -> bool:
  """Closes what the process that forks programs does not need, for itself and its children.

  Args:
    seccomp: Filter of system calls, see `syscalls`, in hexadecimal.
    files: What Landlock leaves open; None: it is not used.
    devices: Files that are mounted, and whose mounts are to be read-only: a device can still be
      written, its mode and times cannot be changed.

  Returns:
    Whether the devices are mounted read-only now.

  Raises:
    OSError: The kernel refuses one of the others.
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
  """Closes what a program does not need: root's powers, system calls, and writing of files.

  Args:
    seccomp: Filter of system calls, see `syscalls`, in hexadecimal.
    writable: The only files and folders that it may write; None: Landlock is not used.

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
  """Returns the version of the kernel's Landlock; 0: it has none."""
  if sys.platform != "linux":
    return 0
  try:
    return _Libc().landlock(_CREATE_RULESET, None, 0, 1)
  except OSError:
    return 0


def _around(top: str, hidden: Sequence[str]) -> Iterator[str]:
  """Yields what covers a folder but for the hidden ones in it. Links are left out."""
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
  """Takes rights to all files away, but for some places, each with the rights that remain."""
  ruleset = libc.landlock(_CREATE_RULESET, closed.to_bytes(8, "little"), 8, 0)
  for path, rights in places:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rights &= closed if os.path.isdir(path) else _OF_FILES
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
    header = (ctypes.c_uint32 * 2)(version, 0)  # of this process.
    self._checked(self._library.capset(header, (ctypes.c_uint32 * sets)()), "capset")

  def mount(self, path: str, flags: int) -> None:
    result = self._library.mount(None, os.fsencode(path), None, ctypes.c_ulong(flags), None)
    self._checked(result, f"mount({path})")

  def landlock(self, *arguments: Any) -> int:
    """A system call of Landlock; whole numbers are passed as long ones."""
    as_long = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return self._checked(self._library.syscall(*as_long), "Landlock")

  def _checked(self, result: int, what: str) -> int:
    if result < 0:
      error = ctypes.get_errno()
      raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
