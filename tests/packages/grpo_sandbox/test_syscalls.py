"""What the filter of system calls answers, by running its instructions. Both architectures."""

import struct

import pytest

from grpo_sandbox import syscalls

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, KILLED, EPERM, ENOSYS, PRETENDED = "allowed", "killed", 1, 38, 0


def answer(machine, number, *arguments, architecture=None, **options):
  """What the kernel makes of a call: ALLOWED, KILLED, or the error that it returns."""
  words = [number, architecture or MACHINES[machine], 0, 0]
  for argument in (*arguments, *(0,) * (6 - len(arguments))):
    words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
  code = list(struct.iter_unpack("<HBBI", syscalls.program(machine, **options)))
  value, at = 0, 0
  while True:
    operation, if_true, if_false, constant = code[at]
    at += 1
    if operation == 0x20:
      value = words[constant // 4]
    elif operation == 0x06:
      named = {0x7FFF0000: ALLOWED, 0x80000000: KILLED}
      return named.get(constant, constant & 0xFFFF)
    else:
      tests = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant}
      at += if_true if tests[operation] else if_false


NEW = {
  "setxattrat": 463, "getxattrat": 464, "listxattrat": 465, "removexattrat": 466,
  "open_tree_attr": 467, "file_getattr": 468, "file_setattr": 469, "statmount": 457,
  "listmount": 458, "lsm_set_self_attr": 460, "fchmodat2": 452, "quotactl_fd": 443,
  "io_uring_setup": 425, "pidfd_open": 434, "clone3": 435, "memfd_secret": 447,
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("files", [True, False])
def test_calls_that_are_not_on_the_list_are_refused(machine, files):
  for number in (*NEW.values(), *range(470, 600), 4095, 2**31, 2**32 - 1):
    assert answer(machine, number, files=files) == ENOSYS, number
  assert answer(machine, 0x40000000 + 463, files=files) == ENOSYS  # x32
  assert answer(machine, 0, architecture=0x40000003) == KILLED  # 32 bits


OLD = {  # (x86_64, aarch64)
  "io_setup": (206, 0), "flock": (73, 32), "setxattr": (188, 5), "removexattr": (197, 14),
  "fork": (57, None), "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198),
  "bind": (49, 200), "connect": (42, 203), "kill": (62, 129), "tgkill": (234, 131),
  "setsid": (112, 157), "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97),
  "bpf": (321, 280), "seccomp": (317, 277), "shmget": (29, 194), "memfd_create": (319, 279),
  "mincore": (27, 232), "sync": (162, 81), "personality": (135, 92), "inotify_init1": (294, 26),
  "fanotify_init": (300, 262), "mq_open": (240, 180), "keyctl": (250, 219), "chroot": (161, 51),
}  # fmt: skip


@pytest.mark.parametrize(("column", "machine"), list(enumerate(MACHINES)))
def test_older_calls_that_no_program_needs_are_refused(column, machine):
  for name, numbers in OLD.items():
    if numbers[column] is not None:
      assert answer(machine, numbers[column]) == EPERM, name


# Name, first two or three arguments, answer.
BY_ARGUMENT = [
  ("clone", (0x3D0F00,), ALLOWED),  # a thread of the C library.
  ("clone", (17,), EPERM),  # a process.
  ("clone", (0x10000 | 0x10000000,), EPERM),  # a namespace.
  ("prlimit64", (0,), ALLOWED),
  ("prlimit64", (1,), EPERM),
  ("prctl", (15,), ALLOWED),
  ("prctl", (1,), EPERM),  # outliving the parent.
  ("prctl", (22,), EPERM),
  ("socketpair", (1, 1), ALLOWED),
  ("socketpair", (1, 1 | 0x80800), ALLOWED),
  ("socketpair", (1, 2), EPERM),
  ("socketpair", (2, 1), EPERM),
  ("setsockopt", (3, 1, 20), ALLOWED),
  ("setsockopt", (3, 1, 50), EPERM),  # a filter of the program's.
  ("setsockopt", (3, 6, 20), EPERM),
  *(("fcntl", (3, command), ALLOWED) for command in (0, 1, 2, 3, 4, 1030)),
  *(("fcntl", (3, command), PRETENDED) for command in (6, 7, 37, 38)),  # locks.
  # Owner and signal, leases, news, size of pipes, seals, hints.
  *(("fcntl", (3, command), EPERM) for command in (8, 10, 15, 1024, 1026, 1031, 1033, 1036, 1038)),
  *(("ioctl", (3, request), ALLOWED) for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5451)),
  # FIOSETOWN, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, TIOCSTI.
  *(("ioctl", (3, request), EPERM) for request in (0x8901, 0x40086602, 0x401C5820, 0x5412)),
]
NUMBERS = {
  "clone": (56, 220), "prlimit64": (302, 261), "prctl": (157, 167), "socketpair": (53, 199),
  "setsockopt": (54, 208), "fcntl": (72, 25), "ioctl": (16, 29),
}  # fmt: skip


@pytest.mark.parametrize(("column", "machine"), list(enumerate(MACHINES)))
def test_some_calls_are_allowed_by_their_arguments(column, machine):
  for name, arguments, wanted in BY_ARGUMENT:
    assert answer(machine, NUMBERS[name][column], *arguments) == wanted, (name, arguments)


def test_changes_of_modes_are_allowed_only_where_no_file_of_the_user_is_in_reach():
  for number in (90, 91, 268, 92, 280, 76):  # chmod, fchmod, fchmodat, chown, utimensat, truncate.
    assert answer("x86_64", number, files=True) == ALLOWED
    assert answer("x86_64", number, files=False) == EPERM


def test_machine_without_a_list_is_refused_by_name():
  with pytest.raises(ValueError, match="x86_64 and aarch64, this machine is riscv64"):
    syscalls.program("riscv64")
