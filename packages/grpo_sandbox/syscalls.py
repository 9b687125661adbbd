"""The filter of system calls (seccomp-bpf) that a sandboxed program runs under. Pure.

Allowed are the calls that Python, its standard library and numerical packages need, by number. All
others are refused, including newer calls and calls of the x32 ABI. A program therefore cannot
start a process or become another one (threads are allowed); leave the process group that is
killed, or outlive the parent; open, bind or connect a socket (pairs of connected ones are allowed);
use memory that no limit counts, or that of others; signal, stop or inspect other processes; set
attributes, access lists or flags of files; lock or watch files; or reach namespaces, mounts and
the parts of the kernel in which most vulnerabilities were found.

A refused call fails with EPERM, a newer one (424 and above) with ENOSYS, as on a kernel without it,
so that libraries fall back to an older call. A program in another architecture's mode is killed.

The list was checked up to number 470 (Linux 6.17).

References: seccomp(2), linux/filter.h, asm/unistd.h.
"""

import struct
from typing import NamedTuple

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16  # places in seccomp_data; arguments have 8 bytes.
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_PRETENDED = 0  # the call returns 0 without doing anything.
_SAME_EVERYWHERE = 424  # from here on, calls have one number on all architectures.

# Name → (x86_64, aarch64); None: the architecture does not have the call.
_Numbers = tuple[int | None, int | None]
# fmt: off
_ALLOWED: dict[str, _Numbers] = {
  # Files, as far as the other restrictions allow access; descriptors, pipes.
  "read": (0, 63), "write": (1, 64), "open": (2, None), "openat": (257, 56), "openat2": (437, 437),
  "creat": (85, None), "close": (3, 57), "close_range": (436, 436), "stat": (4, None),
  "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
  "statfs": (137, 43), "fstatfs": (138, 44), "poll": (7, None), "ppoll": (271, 73),
  "select": (23, None), "pselect6": (270, 72), "lseek": (8, 62), "pread64": (17, 67),
  "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69),
  "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "access": (21, None),
  "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59),
  "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "ftruncate": (77, 46),
  "fallocate": (285, 47), "fadvise64": (221, 223), "fsync": (74, 82), "fdatasync": (75, 83),
  "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
  "fchdir": (81, 50), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
  "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None),
  "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None),
  "symlinkat": (266, 36), "readlink": (89, None), "readlinkat": (267, 78), "mknod": (133, None),
  "mknodat": (259, 33), "umask": (95, 166), "sendfile": (40, 71), "copy_file_range": (326, 285),
  "splice": (275, 76), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10),
  "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13),
  # Waiting for several descriptors, and counters of events.
  "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
  "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
  "eventfd": (284, None), "eventfd2": (290, 19), "timerfd_create": (283, 85),
  "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
  # A pair of connected sockets, which nothing else can reach.
  "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
  "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
  "getsockopt": (55, 209),
  # Memory of this process.
  "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
  "brk": (12, 214), "madvise": (28, 233), "msync": (26, 227),
  # Signals of this process to itself.
  "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
  "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
  "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102),
  "setitimer": (38, 103), "restart_syscall": (219, 128),
  # Time.
  "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
  "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
  # Threads.
  "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99),
  "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293),
  "membarrier": (324, 283), "gettid": (186, 178), "getcpu": (309, 168), "sched_yield": (24, 124),
  "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
  "sched_getattr": (315, 275), "sched_get_priority_max": (146, 125),
  "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127),
  # Information about this process, and its end.
  "getpid": (39, 172), "getppid": (110, 173), "getpgid": (121, 155), "getpgrp": (111, None),
  "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
  "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150),
  "getpriority": (140, 141), "capget": (125, 90), "getrlimit": (97, 163), "setrlimit": (160, 164),
  "getrusage": (98, 165), "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278),
  "wait4": (61, 260), "waitid": (247, 95), "exit": (60, 93), "exit_group": (231, 94),
}
# Changes of modes, owners, times and lengths by path, which Landlock does not cover: allowed only
# if no file of the user is within reach.
_FILES: dict[str, _Numbers] = {
  "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
  "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45),
  "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}
# Additional calls of the process that forks programs.
_SERVING: dict[str, _Numbers] = {
  "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "prctl": (157, 167),
  "prlimit64": (302, 261), "capset": (126, 91), "ioctl": (16, 29), "fcntl": (72, 25),
  "socketpair": (53, 199), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
  "landlock_restrict_self": (446, 446),
}
# fmt: on


class _Condition(NamedTuple):
  """A condition on an argument. Only the lower 32 bits can be tested."""

  argument: int
  operation: int  # _EQUAL: equals one of the values; _ANY_BIT: shares a bit with one of them.
  values: tuple[int, ...]
  is_wanted: bool = True  # False: the condition must not hold.
  otherwise: int = _EPERM


_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000
_AF_UNIX, _SOCK_DATAGRAM_BIT = 1, 2
_SOL_SOCKET = 1
_FCNTL = (0, 1, 2, 3, 4, 5, 9, 11, 1030, 1032)  # F_DUPFD to F_GETLK, F_GETOWN, F_GETSIG, and
# F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not allowed: choosing the receiver of I/O signals, leases,
# notifications, larger pipes, hints that persist on a file.
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW.
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_GET_PDEATHSIG, _GET_DUMPABLE, _SET_NAME, _GET_NAME, _GET_SECCOMP, _CAPBSET_READ,
# _GET_TIMERSLACK, _GET_NO_NEW_PRIVS, _GET_THP_DISABLE, _SET_VMA.
_PRCTL = (2, 3, 15, 16, 21, 23, 30, 39, 42, 0x53564D41)
# Calls that are allowed if their arguments are harmless.
_ARGUMENTS: dict[str, tuple[_Numbers, tuple[_Condition, ...]]] = {
  "clone": (
    (56, 220),
    (
      _Condition(0, _ANY_BIT, (_CLONE_THREAD,)),
      _Condition(0, _ANY_BIT, (_CLONE_NAMESPACES,), is_wanted=False),
    ),
  ),
  "prlimit64": ((302, 261), (_Condition(0, _EQUAL, (0,)),)),  # applied to this process.
  "prctl": ((157, 167), (_Condition(0, _EQUAL, _PRCTL),)),
  "socketpair": (
    (53, 199),
    (
      _Condition(0, _EQUAL, (_AF_UNIX,)),
      # Connected permanently: SOCK_DGRAM could be connected to others.
      _Condition(1, _ANY_BIT, (_SOCK_DATAGRAM_BIT,), is_wanted=False),
    ),
  ),
  "setsockopt": (
    (54, 208),
    (
      _Condition(1, _EQUAL, (_SOL_SOCKET,)),
      _Condition(2, _EQUAL, (7, 8, 20, 21)),  # sizes of buffers, time-outs.
    ),
  ),
  "fcntl": (
    (72, 25),
    (
      # One process needs no locks; a lock on a system file would block others. sqlite3
      # only works if the call claims success.
      _Condition(1, _EQUAL, _LOCKS, is_wanted=False, otherwise=_PRETENDED),
      _Condition(1, _EQUAL, _FCNTL),
    ),
  ),
  "ioctl": ((16, 29), (_Condition(1, _EQUAL, _IOCTL),)),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_Instruction = tuple[int, int, int, int]


def program(machine: str, *, processes: bool = False, files: bool = True) -> bytes:
  """Assembles the filter.

  Args:
    machine: Architecture, as `platform.machine()` names it.
    processes: Whether to allow forking, confining the forked process, and its limits.
    files: Whether to allow changes of modes, owners and times of files.

  Returns:
    An array of `struct sock_filter`.

  Raises:
    ValueError: The architecture is neither x86_64 nor aarch64.
  """
  if machine not in _MACHINES:
    raise ValueError(f"the sandbox supports {' and '.join(_MACHINES)}, this machine is {machine}")
  column, architecture = _MACHINES[machine]
  calls = {**_ALLOWED, **(_FILES if files else {}), **(_SERVING if processes else {})}
  code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
  code += [(_LOAD, 0, 0, _NUMBER)]
  for name, (numbers, conditions) in _ARGUMENTS.items():
    if name not in calls:
      code += _by_arguments(numbers[column], conditions)
  allowed = {numbers[column] for numbers in calls.values()}
  code += _by_number({number for number in allowed if number is not None})
  return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _by_number(allowed: set[int]) -> list[_Instruction]:
  """Allows some calls and refuses all others, by comparing with the ends of ranges."""
  code = []
  for end in sorted({_SAME_EVERYWHERE, *allowed, *(number + 1 for number in allowed)}):
    is_allowed = end - 1 in allowed
    if is_allowed != (end in allowed) or end == _SAME_EVERYWHERE:
      refusal = _EPERM if end <= _SAME_EVERYWHERE else _ENOSYS
      action = _ALLOW if is_allowed else _ERROR | refusal
      code += [(_AT_LEAST, 1, 0, end), (_RETURN, 0, 0, action)]
  return [*code, (_RETURN, 0, 0, _ERROR | _ENOSYS)]


def _by_arguments(number: int | None, conditions: tuple[_Condition, ...]) -> list[_Instruction]:
  """Allows a call if all conditions hold."""
  if number is None:
    return []
  body = []
  for argument, operation, values, is_wanted, otherwise in conditions:
    body += [(_LOAD, 0, 0, _ARGUMENT_0 + 8 * argument)]
    for i, value in enumerate(values):
      # If one value suffices, a match jumps over the other values and the refusal.
      body += [(operation, len(values) - i, 0, value)] if is_wanted else [(operation, 0, 1, value)]
      if not is_wanted:
        body += [(_RETURN, 0, 0, _ERROR | otherwise)]
    if is_wanted:
      body += [(_RETURN, 0, 0, _ERROR | otherwise)]
  body += [(_RETURN, 0, 0, _ALLOW)]
  return [(_EQUAL, 0, len(body), number), *body]
