"""What a hostile program tries, in every sandbox that this machine offers."""

import ast
import dataclasses
import glob
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from grpo_sandbox import fork_server
from grpo_sandbox.launch import KINDS, Launcher, SandboxError
from grpo_sandbox.supervise import Ending, Supervisor
from tests import sandboxes

FILES_CLOSED = ("bubblewrap", "landlock")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def started(kind, **limits):
  made = dataclasses.replace(sandboxes.LIMITS, **limits)
  return Supervisor(Launcher(sandboxes.need(kind), made), workers=2)


@pytest.fixture(scope="module", params=KINDS)
def boxes(request):
  supervisor = started(request.param)
  supervisor.kind = request.param
  yield supervisor
  supervisor.close()


@pytest.fixture(autouse=True)
def sandbox_is_left_clean(request):
  """After every attack: no process but the sandboxes, and a program that runs."""
  yield
  if "boxes" in request.fixturenames:
    boxes = request.getfixturevalue("boxes")
    output = boxes.run("import os\nprint(sum(map(int, input().split())), os.listdir())", "20 22")
    assert (output.ending, output.text) == (Ending.OK, "42 []\n")
    assert lonely(boxes)


def lonely(boxes):
  """Whether no sandbox holds a process of a program any more."""
  deadline = time.monotonic() + 5
  while time.monotonic() < deadline:
    inner = [p for pid in boxes.pids() for p in psutil.Process(pid).children(recursive=True)]
    if len(inner) <= 2 * len(boxes.pids()):  # bubblewrap's init, and the sandbox's interpreter.
      return True
    time.sleep(0.05)
  return False


def run(boxes, program, stdin="", timeout_s=None):
  return boxes.run(textwrap.dedent(program), stdin, timeout_s)


def test_program_reads_its_input_and_prints(boxes):
  output = run(boxes, "import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd")
  assert (output.ending, output.text) == (Ending.OK, "ba\ndc\n")


def test_fork_bomb_starts_no_process(boxes):
  assert run(boxes, "import os\nwhile True: os.fork()").ending is Ending.RAISED
  output = run(
    boxes,
    """
    import os, subprocess, multiprocessing, ctypes
    def tried(what):
      try: what()
      except (OSError, RuntimeError): print("no")
    tried(os.fork)
    tried(lambda: os.posix_spawn("/bin/sh", ["sh"], {}))
    tried(lambda: subprocess.run(["/bin/true"]))
    tried(lambda: os.forkpty())
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.syscall(56, 17, 0, 0, 0, 0), libc.syscall(57), libc.syscall(58))
  """,
  )
  assert output.text == "no\n" * 4 + "-1 -1 -1\n"


def test_threads_are_allowed_and_bounded(boxes):
  few = "import threading\nt = threading.Thread(target=print, args=['hi'])\nt.start()\nt.join()"
  assert run(boxes, few).text == "hi\n"
  # Not by threading.Thread: its `start` waits for ever for a thread that has no memory to report.
  many = """
    import _thread, threading
    threading.stack_size(1 << 20)
    lock = _thread.allocate_lock()
    lock.acquire()
    while True: _thread.start_new_thread(lock.acquire, ())
  """
  assert run(boxes, many).ending in (Ending.RAISED, Ending.MEMORY)


@pytest.mark.parametrize(
  "program",
  [
    "x = bytearray(10**9)",
    "x = []\nwhile True: x.append(bytes(10**6))",
    "import mmap\nx = mmap.mmap(-1, 10**9)",
    "x = 'a' * 10**9",
  ],
  ids=["block", "list", "mmap", "text"],
)
def test_memory_bomb_ends_at_the_limit(boxes, program):
  assert run(boxes, program).ending in (Ending.MEMORY, Ending.RAISED, Ending.DIED)


def test_memory_that_no_limit_counts_is_not_available(boxes):
  output = run(
    boxes,
    """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.memfd_create(b"x", 0), libc.shmget(0, 1 << 20, 0o1600))
  """,
  )
  assert output.text == "-1 -1\n"


def test_files_are_bounded(boxes):
  output = run(
    boxes,
    """
    import os
    for name in range(8):
      try:
        with open(f"file{name}", "wb", buffering=0) as file:
          for _ in range(1000): file.write(bytes(1 << 16))
      except OSError:
        pass
    sizes = [os.path.getsize(name) for name in os.listdir()]
    print(max(sizes) <= 4 << 20, sum(sizes) <= 4 << 20)
  """,
  )
  assert output.text == f"True {boxes.kind == 'bubblewrap'}\n"  # of each, or of all together.


@pytest.mark.parametrize(
  "program",
  [
    "while True: print('x' * 1000)",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "print('x' * 10**7)",
  ],
)
def test_endless_output_is_cut(boxes, program):
  start = time.monotonic()
  output = run(boxes, program)
  assert output.ending is Ending.OUTPUT
  assert len(output.text) <= sandboxes.LIMITS.output_kib * 1024
  assert time.monotonic() - start < 9


def test_errors_on_standard_error_cost_nothing(boxes):
  output = run(boxes, "import sys\nfor _ in range(10**4): sys.stderr.write('x' * 10**3)\nprint(1)")
  assert (output.ending, output.text) == (Ending.OK, "1\n")


@pytest.mark.parametrize(
  "program",
  ["while True: pass", "import time\ntime.sleep(60)", "input()\ninput()"],
  ids=["busy", "asleep", "reading"],
)
def test_time_out_kills(boxes, program):
  start = time.monotonic()
  ending = run(boxes, program, stdin="\n", timeout_s=0.5).ending
  assert ending is (Ending.RAISED if "input" in program else Ending.TIMEOUT)
  assert time.monotonic() - start < 5


@pytest.mark.long
def test_signals_cannot_be_used_to_survive_a_time_out(boxes):
  program = """
    import signal, time
    for number in range(1, 65):
      try: signal.signal(number, signal.SIG_IGN)
      except (OSError, ValueError): pass
    while True: time.sleep(1)
  """
  assert run(boxes, program, timeout_s=0.7).ending is Ending.TIMEOUT


@pytest.mark.long
def test_output_that_is_closed_does_not_hide_a_program_that_runs_on(boxes):
  program = "import os, time\nprint(42, flush=True)\nos.close(1)\ntime.sleep(60)"
  assert run(boxes, program, timeout_s=2.0).ending is Ending.TIMEOUT


def test_daemon_does_not_outlive_its_program(boxes):
  program = """
    import os, threading, time
    try:
      if os.fork() == 0:
        os.setsid()
        time.sleep(60)
    except OSError:
      pass
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
    print("done")
  """
  output = run(boxes, program)
  assert (output.ending, output.text) == (Ending.OK, "done\n")


def test_program_stays_among_those_that_are_killed_together(boxes):
  """Else one that sleeps through its time-out in a session of its own would be a daemon."""
  output = run(
    boxes,
    """
    import ctypes, os
    for leave in (os.setsid, lambda: os.setpgid(0, 0)):
      try: leave()
      except OSError: print("no")
    print(ctypes.CDLL(None).prctl(1, 0, 0, 0, 0))  # PR_SET_PDEATHSIG: to outlive its parent.
  """,
  )
  assert output.text == "no\nno\n-1\n"


SECRET = "hunter2-4711"


def test_home_folder_and_other_files_cannot_be_read(boxes, tmp_path):
  if boxes.kind not in FILES_CLOSED:
    pytest.skip("the sandbox 'limits' leaves files open, and says so")
  (tmp_path / "secret").write_text(SECRET)
  output = run(
    boxes,
    f"""
    import os
    for path in ({str(tmp_path / "secret")!r}, "/etc/passwd", "/etc/hostname", "/proc/1/environ",
                 "/proc/self/environ", "/proc/self/mem", {__file__!r}, {os.getcwd()!r},
                 os.path.expanduser("~root/.bashrc"), "/home", "/root", "/tmp", "/proc"):
      try:
        print(os.listdir(path) if os.path.isdir(path) else open(path).read())
      except OSError as error:
        pass
  """,
  )
  assert output.ending is Ending.OK
  seen = output.text.replace("['.pyenv']", "").split()  # parents of the interpreter's folder.
  assert SECRET not in output.text and len("".join(seen)) < 200, output.text


def test_environment_variables_are_not_there(boxes, monkeypatch):
  monkeypatch.setenv("API_TOKEN", SECRET)
  boxes = started(boxes.kind)
  output = run(boxes, "import os\nprint(sorted(os.environ), os.environb)")
  boxes.close()
  assert SECRET not in output.text
  names = ("HOME", "LANG", "PATH", "PWD", "PYTHONHASHSEED")
  names += ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
  assert set(ast.literal_eval(output.text.partition("]")[0] + "]")) <= set(names)


def test_nothing_outside_is_written(boxes, tmp_path):
  if boxes.kind not in FILES_CLOSED:
    pytest.skip("the sandbox 'limits' leaves files open, and says so")
  mine = tmp_path / "mine"
  mine.write_text("as it was")
  output = run(
    boxes,
    f"""
    import os, shutil, sys
    def tried(what):
      try: what()
      except OSError: print("no")
    tried(lambda: open({str(tmp_path / "new")!r}, "w"))
    tried(lambda: open({str(mine)!r}, "a"))
    tried(lambda: os.truncate({str(mine)!r}, 0))
    tried(lambda: os.unlink({str(mine)!r}))
    tried(lambda: os.rename({str(mine)!r}, "here"))
    tried(lambda: os.link({str(mine)!r}, "here"))
    tried(lambda: os.chmod({str(mine)!r}, 0))
    tried(lambda: os.utime({str(mine)!r}, (0, 0)))
    tried(lambda: os.mkdir({str(tmp_path / "folder")!r}))
    tried(lambda: open(os.__file__, "a"))
    tried(lambda: open(sys.executable, "ab"))
  """,
  )
  assert output.text == "no\n" * 11
  assert mine.read_text() == "as it was" and os.listdir(tmp_path) == ["mine"]
  assert mine.stat().st_mode & 0o400 and mine.stat().st_mtime > 0


def test_files_of_its_own_can_be_written_and_are_gone_afterwards(boxes):
  output = run(
    boxes,
    """
    import os, tempfile
    os.makedirs("a/b")
    with open("a/b/c", "w") as file: file.write("text")
    os.symlink("/", "a/link")
    os.mkdir("closed", 0)
    print(open("a/b/c").read())
  """,
  )
  assert (output.ending, output.text) == (Ending.OK, "text\n")


def test_link_in_the_folder_does_not_lead_the_cleaning_astray(boxes, tmp_path):
  (tmp_path / "file").write_text("as it was")
  tmp_path.chmod(0o500)
  run(boxes, f"import os\nos.symlink({str(tmp_path)!r}, 'link')")
  assert tmp_path.stat().st_mode & 0o777 == 0o500 and (tmp_path / "file").exists()


def test_no_socket_can_be_opened(boxes):
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.settimeout(0.2)
    output = run(
      boxes,
      f"""
      import socket, urllib.request
      def tried(what):
        try: what()
        except OSError as error: print(type(error).__name__)
      tried(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]})))
      tried(lambda: socket.socket(socket.AF_UNIX))
      tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
      tried(lambda: urllib.request.urlopen("http://127.0.0.1", timeout=1))
    """,
    )
    assert output.text == "PermissionError\n" * 3 + "URLError\n"
    with pytest.raises(TimeoutError):
      server.accept()


def test_pair_of_sockets_cannot_be_connected_to_another_process(boxes, tmp_path):
  path = str(tmp_path / "socket")
  with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
    server.bind(path)
    server.settimeout(0.2)
    output = run(
      boxes,
      f"""
      import asyncio, socket
      for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", {path!r})
        except OSError as error: print(type(error).__name__)
      asyncio.run(asyncio.sleep(0))  # needs a pair, and is harmless.
    """,
    )
    assert (output.ending, output.text) == (Ending.OK, "PermissionError\n" * 2)
    with pytest.raises(TimeoutError):
      server.recv(1)


def test_signals_cannot_be_sent_by_way_of_a_descriptor(boxes):
  """The owner of a descriptor gets a signal of one's choice when there is something to read."""
  with subprocess.Popen(["sleep", "60"]) as victim:
    output = run(
      boxes,
      f"""
      import array, fcntl, os, signal, socket
      SETSIG, FIOSETOWN = 10, 0x8901
      mine, other = socket.socketpair()
      fcntl.fcntl(mine, fcntl.F_SETFL, os.O_ASYNC)
      def tried(what):
        try: what()
        except OSError: print("no")
      for number in ({victim.pid}, os.getppid()):
        tried(lambda: fcntl.fcntl(mine, SETSIG, signal.SIGKILL))
        tried(lambda: fcntl.fcntl(mine, fcntl.F_SETOWN, number))
        tried(lambda: fcntl.ioctl(mine, FIOSETOWN, array.array("i", [number])))
        other.send(b"x")
    """,
    )
    is_alive = victim.poll() is None
    victim.kill()
  assert output.text == "no\n" * 6 and is_alive


def test_shared_memory_of_other_processes_can_be_neither_opened_nor_removed(boxes):
  output = run(
    boxes,
    """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_long
    for call in (lambda: libc.shmat(0, None, 0), lambda: libc.shmctl(0, 0, None),
                 lambda: libc.semctl(0, 0, 0), lambda: libc.msgctl(0, 0, None),
                 lambda: libc.mq_unlink(b"/x")):
      print(call(), ctypes.get_errno() in (1, 13))  # refused, whether there is one or not.
  """,
  )
  assert output.text == "-1 True\n" * 5


def test_root_in_the_sandbox_has_no_powers(boxes):
  output = run(
    boxes,
    """
    import ctypes
    sets = (ctypes.c_uint32 * 6)()
    print(ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets), *sets)
  """,
  )
  assert output.text == "0 0 0 0 0 0 0\n"


def test_parent_and_everybody_else_stay_alive(boxes):
  before = boxes.pids()
  output = run(
    boxes,
    f"""
    import os, signal, resource
    def tried(what):
      try: what()
      except (OSError, ValueError): print("no")
    for number in (os.getppid(), 1, -1, 0, {os.getpid()}):
      tried(lambda: os.kill(number, signal.SIGKILL))
    tried(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))
    tried(lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19))
    print("alive")
  """,
  )
  assert output.text == "no\n" * 7 + "alive\n"
  assert boxes.pids() == before


def test_other_processes_cannot_be_looked_into(boxes):
  output = run(
    boxes,
    """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.ptrace(16, os.getppid(), 0, 0), libc.unshare(0x10000000), libc.setns(0, 0))
    print(libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0), libc.prctl(38, 0, 0, 0, 0))
    try: print(open(f"/proc/{os.getppid()}/mem", "rb").name if KIND != "limits" else "")
    except OSError: print()
  """.replace("KIND", repr(boxes.kind)),
  )
  assert output.text == "-1 -1 -1\n-1 -1\n\n"


def test_program_has_the_standard_streams_and_no_other_descriptor(boxes):
  probe = """
    import os
    for fd in range(256):
      try: print(fd, os.fstat(fd).st_mode // 4096)
      except OSError: pass
  """
  assert run(boxes, probe).text == "0 1\n1 1\n2 2\n"  # pipe, pipe, /dev/null.


def test_limits_cannot_be_raised(boxes):
  output = run(
    boxes,
    """
    import resource
    for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
      number = getattr(resource, name)
      try: resource.setrlimit(number, (resource.getrlimit(number)[1] * 2,) * 2)
      except (ValueError, OSError): print("no")
    resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
  """,
  )
  assert (output.ending, output.text) == (Ending.OK, "no\n" * 4)


def test_one_program_leaves_nothing_for_the_next(boxes):
  run(boxes, "import builtins, random\nbuiltins.left = 1\nprint = None\nrandom.seed(1)")
  probe = "import builtins, random\nprint(hasattr(builtins, 'left'), random.random())"
  first, second = run(boxes, probe).text, run(boxes, probe).text
  assert first.startswith("False") and first == second  # and the same luck for all.


def access_list(*entries):
  """An access list of files; entries are (1: owner, 4: group, 32: others; rights)."""
  return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e, 2**32 - 1) for e in entries)


@pytest.mark.parametrize(
  "program",
  [
    "os.chmod('.', 0o500)",
    "os.setxattr('.', 'system.posix_acl_default', bytes.fromhex(ACL))",
    "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "os.mkdir('a'); os.mkdir('a/b', 0); os.mkfifo('a/c'); os.symlink('a', 'd'); os.umask(0o777)",
  ],
  ids=["mode", "access list", "deep", "of all kinds"],
)
def test_folder_is_as_new_for_the_next_program(boxes, program):
  acl = access_list((1, 0), (4, 0), (32, 0))  # no rights on what is made in it.
  run(boxes, f"import os\nACL = {acl.hex()!r}\n{program}")
  probe = "import os\nopen('x', 'w').close()\nprint(oct(os.stat('x').st_mode), os.listxattr('.'))"
  output = run(boxes, f"{probe}\nprint(open('x').read(), os.listdir())")
  assert (output.ending, output.text) == (Ending.OK, "0o100644 []\n ['x']\n")


NEW_CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def answers(number, *arguments):
  ctypes.set_errno(0)
  return libc.syscall(number, *arguments), ctypes.get_errno()
"""


def test_calls_newer_than_the_list_are_refused(boxes):
  probe = NEW_CALLS + "print({answers(number, -1, -1, -1, -1, -1, -1) for number in NUMBERS})"
  for numbers in ("range(452, 600)", "range(0x40000000, 0x40000200)"):
    assert run(boxes, probe.replace("NUMBERS", numbers)).text == "{(-1, 38)}\n"


def test_attributes_of_files_outside_cannot_be_set_by_a_new_call(boxes, tmp_path):
  mine = tmp_path / "mine"
  mine.write_text(SECRET)
  mine.chmod(0o600)
  acl = access_list((1, 6), (4, 0), (32, 6))
  program = f"""
    acl = ctypes.create_string_buffer(bytes.fromhex({acl.hex()!r}), {len(acl)})
    class Arguments(ctypes.Structure):
      _fields_ = [("value", ctypes.c_uint64), ("size", ctypes.c_uint32), ("flags", ctypes.c_uint32)]
    arguments = Arguments(ctypes.addressof(acl), {len(acl)}, 0)
    name = b"system.posix_acl_access"
    print(answers(463, -100, {os.fsencode(mine)!r}, 0, name, ctypes.byref(arguments), 16))
    attributes = ctypes.create_string_buffer(24)
    print(answers(469, -100, {os.fsencode(mine)!r}, attributes, ctypes.c_size_t(24), 0))
  """
  assert run(boxes, NEW_CALLS + textwrap.dedent(program)).text == "(-1, 38)\n" * 2
  assert mine.stat().st_mode & 0o777 == 0o600


def test_mode_and_times_of_devices_cannot_be_changed(boxes):
  """They are the machine's own; a trainer that runs as root owns them."""
  before = [(os.stat(path).st_mode, os.stat(path).st_mtime) for path in DEVICES]
  output = run(
    boxes,
    f"""
    import os
    def tried(what):
      try: what()
      except OSError: print("no")
    for path in {DEVICES!r}:
      tried(lambda: os.chmod(path, os.stat(path).st_mode & 0o777))
      tried(lambda: os.utime(path))
      tried(lambda: os.utime(path, (os.stat(path).st_atime, os.stat(path).st_mtime)))
      open(path, "rb").close(), open(path, "wb").close()
  """,
  )
  assert output.text == "no\n" * 3 * len(DEVICES)
  assert before == [(os.stat(path).st_mode, os.stat(path).st_mtime) for path in DEVICES]


NOTES = {
  "times": "os.utime('.', (4711, 4711))",
  "times by descriptor": "os.utime(os.open('.', os.O_RDONLY), (4711, 4711))",
  "attribute": "os.setxattr('.', 'user.note', b'x')",
  "flags": "import fcntl\nfcntl.ioctl(os.open('.', 0), 0x40086602, bytes([128] + [0] * 7))",
  "hint": "import fcntl\nfcntl.fcntl(os.open('.', os.O_RDONLY), 1036, bytes([3] + [0] * 7))",
  "size": "for i in range(3000): open('x' * 200 + str(i), 'w').close()",
  "parent": "open('../note', 'w').close()",
  "sibling": "os.mkdir('../other')",
  "place": "os.rename('.', '../elsewhere')",
  "name": "import socket\nsocket.socketpair()[0].bind('\\0note')",
  "shared memory": "open('/dev/shm/note', 'w').close()",
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES.keys())
def test_folder_says_nothing_of_the_program_before(boxes, note):
  if boxes.kind not in FILES_CLOSED and "shm" in note:
    pytest.skip("the sandbox 'limits' leaves files open, and says so")
  probe = """
    import ctypes, os
    here, above = os.stat("."), os.listdir("..")
    attributes = [name for place in (".", "..") for name in os.listxattr(place)]
    print(here.st_mode, here.st_nlink, here.st_size, int(here.st_mtime) == 4711, above, attributes)
    print(os.listdir(), os.path.exists("/dev/shm/note"))
  """
  before = run(boxes, probe).text
  run(boxes, f"import os\n{note}")
  assert run(boxes, probe).text == before


def test_sandbox_whose_folder_keeps_something_is_given_up(tmp_path):
  folder = str(tmp_path / "mount")
  os.mkdir(folder)
  fork_server.renew(folder, folder)
  assert os.stat(folder).st_mtime == 0
  os.setxattr(folder, "user.note", b"x")
  with pytest.raises(OSError, match=r"keeps \['user.note'\]"):
    fork_server.renew(folder, folder)


PACKAGES = """
  import os, sys
  found = []
  for top in {sys.prefix, sys.base_prefix, "/usr/lib", "/usr/lib64", "/lib", "/usr", *TOPS}:
    for folder, names, files in os.walk(top):
      if "site-packages" in folder or "dist-packages" in folder:
        found += [folder + "/" + name for name in (*names, *files)]
  sys.path += PATHS
  try: import pip
  except ImportError: print(found)
"""


@pytest.mark.parametrize("kind", FILES_CLOSED)
def test_packages_of_the_interpreter_and_the_system_cannot_be_read(kind):
  boxes = started(kind)
  paths = sorted(glob.glob(f"{sys.base_prefix}/lib*/python*/*-packages"))
  paths += glob.glob("/usr/lib/python*/*-packages")
  assert any(os.listdir(path) for path in paths)
  program = PACKAGES.replace("TOPS", repr(paths)).replace("PATHS", repr(paths))
  assert run(boxes, program).text == "[]\n"
  opened = "\n".join(f"try: print(os.listdir({p!r}))\nexcept OSError: print([])" for p in paths)
  assert run(boxes, f"import os\n{opened}").text == "[]\n" * len(paths)
  boxes.close()


@pytest.mark.parametrize("kind", FILES_CLOSED)
def test_packages_that_are_named_can_be_read_although_they_are_the_interpreters(kind):
  packages = (
    f"{sys.base_prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
  )
  if not os.path.isdir(f"{packages}/pip"):
    pytest.skip(f"there is no pip in {packages}")
  launcher = Launcher(sandboxes.need(kind), sandboxes.LIMITS, packages=[packages])
  boxes = Supervisor(launcher, workers=1)
  assert run(boxes, "import pip\nprint(pip.__name__)").text == "pip\n"
  boxes.close()


def test_whole_standard_library_can_be_imported_and_its_caches_forgotten(boxes):
  program = """
    import importlib, os, sys
    importlib.invalidate_caches()
    import asyncio, concurrent.futures, csv, email.mime.text, html.parser, logging.handlers, sqlite3
    import statistics, unittest.mock, xml.etree.ElementTree, zoneinfo, _heapq, array
    open("mine.py", "w").write("x = 1")
    sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    import mine
    print(mine.x)
  """
  assert run(boxes, program).text == "1\n"


def test_ordinary_work_succeeds_under_the_filter(boxes):
  output = run(
    boxes,
    """
    import asyncio, concurrent.futures, mmap, os, select, shutil, signal, socket, sqlite3, tarfile
    import tempfile, threading, time, zipfile
    database = sqlite3.connect("x.db")
    database.execute("create table t(a)")
    database.execute("insert into t values (7)")
    database.commit()
    print(database.execute("select a from t").fetchall())
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/a", "w") as file:
      file.write("text")
    with zipfile.ZipFile("z.zip", "w") as archive: archive.writestr("a", "b")
    zipfile.ZipFile("z.zip").extractall("unpacked")
    shutil.copyfile("z.zip", "y.zip")
    with concurrent.futures.ThreadPoolExecutor(4) as pool: print(sum(pool.map(len, ["a", "bb"])))
    print(asyncio.run(asyncio.to_thread(time.sleep, 0)))
    with open("m", "wb") as file: file.write(bytes(4096))
    with open("m", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped: mapped[0] = 1
    mine, other = socket.socketpair()
    mine.settimeout(1)
    mine.sendall(b"x")
    print(select.select([other], [], [], 1)[0] == [other], other.recv(1))
    signal.signal(signal.SIGALRM, lambda *_: print("rang"))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05)
    os.rename("m", "n")
    os.symlink("n", "link")
    print(os.path.getsize("link"), len(os.sched_getaffinity(0)) > 0, os.isatty(0))
  """,
  )
  assert output.text == "[(7,)]\n3\nNone\nTrue b'x'\nrang\n4096 True False\n"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_sandboxes_end_with_the_trainer_that_is_killed(kind, tmp_path):
  sandboxes.need(kind)
  program = f"""
    import threading, time
    from grpo_sandbox.launch import Launcher, ProcessLimits
    from grpo_sandbox.supervise import Supervisor
    supervisor = Supervisor(Launcher({kind!r}, ProcessLimits(timeout_s=60)), workers=1)
    supervisor.submit(supervisor.run, "while True: pass", "")
    while not supervisor.pids(): time.sleep(0.05)
    time.sleep(0.3)
    print(*supervisor.pids(), flush=True)
    time.sleep(60)
  """
  environment = {**os.environ, "PYTHONPATH": os.path.abspath("packages"), "TMPDIR": str(tmp_path)}
  trainer = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=environment
  )
  assert trainer.stdout is not None
  (pid,) = map(int, trainer.stdout.readline().split())
  inner = psutil.Process(pid).children(recursive=True)
  assert inner
  trainer.send_signal(signal.SIGKILL)
  trainer.wait()
  trainer.stdout.close()
  psutil.wait_procs(inner, timeout=5)
  assert [p for p in inner if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_close_ends_a_program_in_the_middle():
  supervisor = started(sandboxes.any_kind())
  future = supervisor.submit(supervisor.run, "while True: pass", "")
  while not supervisor.pids():
    time.sleep(0.02)
  pids = supervisor.pids()
  supervisor.close()
  assert future.done() and not any(psutil.pid_exists(pid) for pid in pids)


def test_sandbox_that_is_not_available_is_refused_with_the_reason(monkeypatch):
  monkeypatch.setenv("PATH", "/nonexistent")
  with pytest.raises(
    SandboxError, match=r"no program bwrap.*apt-get install bubblewrap.*docs/code"
  ):
    Launcher("bubblewrap", sandboxes.LIMITS)
  with pytest.raises(ValueError, match=r"bubblewarp.*did you mean 'bubblewrap'"):
    Launcher("bubblewarp", sandboxes.LIMITS)
