"""The filter of system calls (seccomp-bpf) that a sandboxed program runs under. Pure.

What is refused fails with EPERM. Refused are: starting processes (threads are allowed), so that
there is no fork bomb, no daemon, and the limit of one process's memory is the limit of all;
leaving the process group that is killed, or outliving the parent; sockets, but for pairs of
connected ones; memory that no limit counts (memfd, System V, message queues), and that of others;
looking into or stopping other processes; namespaces, mounts, and the parts of the kernel in which
most holes were found.

References: seccomp(2), linux/filter.h, asm/unistd.h.
"""

import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16  # places in seccomp_data; arguments have 8 bytes.
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_X32 = 0x40000000  # x86_64: calls of the x32 ABI have this bit.

# Name → (x86_64, aarch64); None: the architecture has no such call.
_PROCESSES = {"fork": (57, None), "vfork": (58, None)}
_CLONE3 = (435, 435)
_ALWAYS = {
  "socket": (41, 198),
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "shmget": (29, 194),
  "shmat": (30, 196),
  "shmctl": (31, 195),
  "semget": (64, 190),
  "semop": (65, 193),
  "semctl": (66, 191),
  "semtimedop": (220, 192),
  "msgget": (68, 186),
  "msgsnd": (69, 189),
  "msgrcv": (70, 188),
  "msgctl": (71, 187),
  "mq_open": (240, 180),
  "mq_unlink": (241, 181),
  "ptrace": (101, 117),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "process_madvise": (440, 440),
  "pidfd_open": (434, 434),
  "pidfd_getfd": (438, 438),
  "kcmp": (312, 272),
  "unshare": (272, 97),
  "setns": (308, 268),
  "mount": (165, 40),
  "umount2": (166, 39),
  "pivot_root": (155, 41),
  "chroot": (161, 51),
  "open_tree": (428, 428),
  "move_mount": (429, 429),
  "fsopen": (430, 430),
  "fsconfig": (431, 431),
  "fsmount": (432, 432),
  "fspick": (433, 433),
  "mount_setattr": (442, 442),
  "name_to_handle_at": (303, 264),
  "open_by_handle_at": (304, 265),
  "add_key": (248, 217),
  "request_key": (249, 218),
  "keyctl": (250, 219),
  "bpf": (321, 280),
  "perf_event_open": (298, 241),
  "userfaultfd": (323, 282),
  "io_uring_setup": (425, 425),
  "io_uring_enter": (426, 426),
  "io_uring_register": (427, 427),
  "kexec_load": (246, 104),
  "init_module": (175, 105),
  "finit_module": (313, 273),
  "delete_module": (176, 106),
  "reboot": (169, 142),
  "swapon": (167, 224),
  "acct": (163, 89),
  # Access lists would stay on the scratch folder, for the next program.
  "setxattr": (188, 5),
  "lsetxattr": (189, 6),
  "fsetxattr": (190, 7),
  "removexattr": (197, 14),
  "lremovexattr": (198, 15),
  "fremovexattr": (199, 16),
  "quotactl": (179, 60),
  "personality": (135, 92),
}
# Signals, limits and priorities of other processes: the one that forked it is in reach. And the
# ways out of the process group.
_OTHER_PROCESSES = {
  "setpgid": (109, 154),
  "setsid": (112, 157),
  "kill": (62, 129),
  "tkill": (200, 130),
  "tgkill": (234, 131),
  "rt_sigqueueinfo": (129, 138),
  "rt_tgsigqueueinfo": (297, 240),
  "pidfd_send_signal": (424, 424),
  "setpriority": (141, 140),
  "ioprio_set": (251, 30),
  "sched_setparam": (142, 118),
  "sched_setscheduler": (144, 119),
  "sched_setaffinity": (203, 122),
  "sched_setattr": (314, 274),
  "migrate_pages": (256, 238),
  "move_pages": (279, 239),
}
# Allowed if their arguments are harmless: call → (its numbers, [(which argument, test, with what,
# the test's result that is needed)]). Only arguments of 32 bits can be tested so.
_ARGUMENTS = {
  "clone": ((56, 220), [(0, _ANY_BIT, 0x10000, True)]),  # CLONE_THREAD.
  "prlimit64": ((302, 261), [(0, _EQUAL, 0, True)]),  # of this process.
  "prctl": ((157, 167), [(0, _EQUAL, 1, False)]),  # PR_SET_PDEATHSIG.
  # Of AF_UNIX, connected for good: SOCK_DGRAM, with this bit, could be connected to others.
  "socketpair": ((53, 199), [(0, _EQUAL, 1, True), (1, _ANY_BIT, 2, False)]),
  # Who gets a signal when there is something to read: F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN,
  # SIOCSPGRP.
  "fcntl": ((72, 25), [(1, _EQUAL, command, False) for command in (8, 10, 15)]),
  "ioctl": ((16, 29), [(1, _EQUAL, command, False) for command in (0x8901, 0x8902)]),
}
# Where the user's files are in reach: the changes to them that Landlock does not know, and news of
# what happens to them.
_FILES = {
  "inotify_add_watch": (254, 27),
  "truncate": (76, 45),
  "chmod": (90, None),
  "fchmod": (91, 52),
  "fchmodat": (268, 53),
  "fchmodat2": (452, 452),
  "chown": (92, None),
  "fchown": (93, 55),
  "lchown": (94, None),
  "fchownat": (260, 54),
  "utime": (132, None),
  "utimes": (235, None),
  "futimesat": (261, None),
  "utimensat": (280, 88),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def program(machine: str, *, processes: bool = False, files: bool = True) -> bytes:
  """Assembles the filter.

  Args:
    machine: architecture, as `platform.machine()` names it.
    processes: allow starting processes, and signals.
    files: allow changes of modes, owners, times and attributes of files.

  Returns:
    An array of `struct sock_filter`.

  Raises:
    ValueError: the architecture is none of x86_64 and aarch64.
  """
  if machine not in _MACHINES:
    raise ValueError(f"the sandbox knows {' and '.join(_MACHINES)}, this machine is {machine}")
  column, architecture = _MACHINES[machine]
  refused = {**_ALWAYS, **({} if files else _FILES)}
  if not processes:
    refused |= {**_PROCESSES, **_OTHER_PROCESSES}
  numbers = [call[column] for call in refused.values()]

  code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
  code += [(_LOAD, 0, 0, _NUMBER)]
  if machine == "x86_64":
    code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERROR | _EPERM)]
  for number in numbers:
    if number is not None:
      code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
  if not processes:
    # clone3's flags lie in memory, out of a filter's sight: libraries then turn to clone.
    code += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for call, tests in _ARGUMENTS.values():
      code += _by_arguments(call[column], tests)
  code += [(_RETURN, 0, 0, _ALLOW)]
  return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _by_arguments(
  number: int, tests: list[tuple[int, int, int, bool]]
) -> list[tuple[int, int, int, int]]:
  """Refuses a call of which a test does not come out as needed."""
  body = []
  for argument, operation, value, needed in tests:
    body += [(_LOAD, 0, 0, _ARGUMENT_0 + 8 * argument)]
    body += [(operation, int(needed), int(not needed), value), (_RETURN, 0, 0, _ERROR | _EPERM)]
  body += [(_RETURN, 0, 0, _ALLOW)]
  return [(_EQUAL, 0, len(body), number), *body]
