"""What a process does to itself before it runs a program: limits and walls.

Nothing of this can be undone from within. Called in the sandboxed process only.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

MIB = 1 << 20
_OPEN_FILES = 64
_THREADS = 64
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9

# Landlock, the same numbers everywhere. Version 3 (Linux 6.2) is the first that knows truncation.
# https://docs.kernel.org/userspace-api/landlock.html
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_RIGHTS = (1 << 15) - 1
LANDLOCK_ABI = 3  # the least that is needed.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14)  # the others are of folders.


def limit(*, memory_mib: int, cpu_s: int, file_mib: int, count_threads: bool) -> None:
  """Sets the limits of resources, for good.

  Args:
    memory_mib: of the address space.
    cpu_s: of CPU time; the kernel kills at it.
    file_mib: of one file.
    count_threads: bound their number. The count is of the user in its user namespace: only
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


def shut(
  *,
  seccomp: str,
  readable: Sequence[str],
  devices: Sequence[str],
  scratch: str | None,
) -> None:
  """Closes what is not needed: root's powers, system calls, and files without bubblewrap.

  Args:
    seccomp: the filter of system calls, see `syscalls`, in hexadecimal.
    readable: files and folders that it may read, with all below them.
    devices: files that it may also write.
    scratch: the one folder that it may also write; None leaves all files as they are.

  Raises:
    OSError: the kernel refuses.
  """
  libc = _Libc()
  libc.prctl("NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
  if scratch is not None:
    read = _EXECUTE | _READ_FILE | _READ_DIR
    places = [*((path, read) for path in readable), (scratch, _ALL_RIGHTS)]
    _close_files(libc, [*places, *((path, _READ_FILE | _WRITE_FILE) for path in devices)])
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


def _close_files(libc: "_Libc", places: Sequence[tuple[str, int]]) -> None:
  """Closes all files but for some places, each with the rights that remain."""
  ruleset = libc.landlock(_CREATE_RULESET, _ALL_RIGHTS.to_bytes(8, "little"), 8, 0)
  for path, rights in places:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rights &= _ALL_RIGHTS if os.path.isdir(path) else _OF_FILES
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

  def landlock(self, *arguments: Any) -> int:
    """A system call of Landlock; whole numbers are passed as long ones."""
    as_long = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return self._checked(self._library.syscall(*as_long), "Landlock")

  def _checked(self, result: int, what: str) -> int:
    if result < 0:
      error = ctypes.get_errno()
      raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
