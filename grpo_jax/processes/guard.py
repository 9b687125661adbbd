"""Runs a server and makes sure that it ends when the trainer ends, in whatever way.

    python -I guard.py [--log FILE] [--grace S] [--max-bytes N] [--remove DIR ...] -- COMMAND...

The trainer starts the guard and keeps the other end of its standard input open. Events:

    end of the input, or death of the parent   SIGTERM; after the grace period SIGKILL of every
                                               descendant; the folders of --remove are removed
    SIGTERM to the guard                       the same, but the folders stay: other servers and
                                               the trainer may still use them
    a line "kill" on the input                 SIGKILL of every descendant at once, also of those
                                               that hang or are stopped; the folders stay
    SIGKILL of the guard                       the kernel kills the server (PR_SET_PDEATHSIG)
    the server itself                          its leftovers are killed

The guard exits with the server's exit code, 128 + N if signal N killed it. It copies the server's
output to FILE, with the API key of GRPO_JAX_SGLANG_API_KEY replaced by "***"; FILE moves to FILE.1
when it is full. Without --log, the server has the guard's standard streams: the guard reads no
input, and writes nothing unless the server cannot be started. It is a separate script (Linux,
standard library), so that it outlives the trainer.
"""

import argparse
import ctypes
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time

API_KEY_VARIABLE = "GRPO_JAX_SGLANG_API_KEY"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LONGEST_LINE = 1 << 16
LIBC = ctypes.CDLL(None, use_errno=True)


class Log:
  """A file of lines without the secret, moved to FILE.1 when it is full."""

  def __init__(self, path: pathlib.Path, secret: str, max_bytes: int):
    self.path, self.max_bytes = path, max_bytes
    self.secret = secret.encode()
    self.file = open(path, "ab", buffering=0)
    self.pending = b""

  def feed(self, output: bytes) -> None:
    """Receives output of the server; writes the lines that are complete."""
    *lines, self.pending = (self.pending + output).split(b"\n")
    for line in lines:
      self._write(self._without_secret(line) + b"\n")
    if len(self.pending) > LONGEST_LINE:
      masked = self._without_secret(self.pending)
      keep = max(len(self.secret) - 1, 0)  # part of the secret may have arrived.
      self._write(masked[: len(masked) - keep])
      self.pending = masked[len(masked) - keep :]

  def say(self, text: str) -> None:
    """Writes a line of the guard itself."""
    if self.pending:
      self.feed(b"\n")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    self._write(self._without_secret(f"[{now}] guard: {text}\n".encode()))

  def _without_secret(self, line: bytes) -> bytes:
    return line.replace(self.secret, b"***") if self.secret else line

  def _write(self, line: bytes) -> None:
    try:
      if self.file.tell() + len(line) > self.max_bytes and self.file.tell():
        self.file.close()
        os.replace(self.path, f"{self.path}.1")
        self.file = open(self.path, "ab", buffering=0)
      self.file.write(line)
    except (OSError, ValueError):
      pass  # a full disk must not stop the server; ValueError: it could not be reopened.


class Children:
  """The server and all processes that it started, reaped as they die."""

  def __init__(self, command: list[str], *, has_streams: bool):
    """Starts the server.

    Args:
      command: Program and arguments.
      has_streams: Whether the server has the guard's standard streams; otherwise its output is read
        from `output`.
    """
    # Orphaned descendants become children of the guard and not of init: none can escape.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard = os.getpid()

    def die_with_guard() -> None:  # runs in the server's process, before the command does.
      LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
      if os.getppid() != guard:
        os._exit(1)  # the guard died before the line above.

    # Called on the main thread: PR_SET_PDEATHSIG applies to the thread that forked.
    self.server = subprocess.Popen(
      command,
      stdin=None if has_streams else subprocess.DEVNULL,
      stdout=None if has_streams else subprocess.PIPE,
      stderr=None if has_streams else subprocess.STDOUT,
      start_new_session=True,
      preexec_fn=die_with_guard,
    )
    self.output: int | None = None
    if self.server.stdout is not None:
      self.output = self.server.stdout.fileno()
      os.set_blocking(self.output, False)
    self.exit_code: int | None = None

  def reap(self) -> None:
    """Reaps dead processes; sets `exit_code` if the server is among them."""
    while True:
      try:
        pid, status = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        return
      if pid == 0:
        return
      if pid == self.server.pid:
        self.exit_code = self.server.returncode = os.waitstatus_to_exitcode(status)

  def terminate(self) -> None:
    """Asks the server to end. A stopped one cannot; it is killed after the grace period."""
    if self.exit_code is None:
      os.kill(self.server.pid, signal.SIGTERM)

  def kill(self, patience_s: float = 10.0) -> list[int]:
    """Kills every descendant, including those that are forked meanwhile.

    Returns:
      Processes that could not be killed: those inside a driver call that does not return.
    """
    deadline = time.monotonic() + patience_s
    while remaining := descendants(os.getpid()):
      for pid in remaining:
        try:
          os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
          pass
      self.reap()
      if time.monotonic() > deadline:
        return remaining
      time.sleep(0.01)
    self.reap()
    return []


def descendants(root: int) -> list[int]:
  """Returns the processes below `root`, zombies included, from /proc."""
  children: dict[int, list[int]] = {}
  for entry in os.listdir("/proc"):
    if entry.isdigit():
      try:
        stat = pathlib.Path("/proc", entry, "stat").read_text(errors="replace")
      except OSError:
        continue  # it has ended meanwhile.
      parent = int(
        stat.rpartition(")")[2].split()[1]
      )  # after the name, which may contain anything.
      children.setdefault(parent, []).append(int(entry))
  found: list[int] = []
  generation = children.get(root, [])
  while generation:
    found += generation
    generation = [child for pid in generation for child in children.get(pid, [])]
  return found


def ending(exit_code: int) -> str:
  """Returns how a process ended, as text."""
  if exit_code >= 0:
    return f"exited with code {exit_code}"
  names = {each.value: each.name for each in signal.Signals}  # without real-time signals.
  return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


class Guard:
  """The loop: waits for output of the server, commands of the trainer, and the end of either."""

  def __init__(self, children: Children, log: Log, grace_s: float):
    self.children, self.log, self.grace_s = children, log, grace_s
    self.kill_at: float | None = None  # set when the server has been asked to end.
    self.trainer_ended = self.asked_to_end = False
    self.orders = b""
    self.woken, wakes = os.pipe()
    for end in (self.woken, wakes):
      os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, self._note_request)
    for ignored in (signal.SIGINT, signal.SIGHUP):
      signal.signal(ignored, signal.SIG_IGN)
    self.waits_for = {self.woken: self._on_signal}
    if children.output is not None:
      os.set_blocking(0, False)
      self.waits_for |= {0: self._on_order, children.output: self._on_output}
    try:
      # The input stays open while a process forked from the trainer still holds its other end.
      self.waits_for[os.pidfd_open(os.getppid())] = self._on_parent_death
    except OSError:
      pass  # the parent is in another container, or the kernel is older than 5.3: use the input.

  def run(self) -> int:
    """Returns the server's exit code, when none of its processes is left."""
    self.children.reap()  # it may have died before the handler was installed.
    while self.children.exit_code is None and (patience := self._patience()) != 0.0:
      self._wait(patience)
    left = self.children.kill()
    self._wait(0.0)  # did the trainer die as well?
    self._drain()
    if left:
      self.log.say(f"processes that do not die: {left}")
    code = self.children.exit_code
    self.log.say("the server does not die" if code is None else f"the server {ending(code)}")
    return 1 if code is None else code if code >= 0 else 128 - code

  def _patience(self) -> float | None:
    """Returns the seconds until the server is killed; None if it need not be killed."""
    return None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())

  def _wait(self, patience_s: float | None) -> None:
    """Waits until something happens, and handles it."""
    ready, _, _ = select.select(list(self.waits_for), [], [], patience_s)
    for source in ready:
      if source in self.waits_for:
        self.waits_for[source](source)
    self.children.reap()

  def _note_request(self, *_: object) -> None:
    self.asked_to_end = True  # nothing else: a handler may interrupt anything.

  def stop(self, reason: str) -> None:
    """Asks the server to end, and sets the time at which it is killed."""
    if self.kill_at is None:
      self.log.say(f"{reason}: SIGTERM to the server, SIGKILL in {self.grace_s:g} s")
      self.kill_at = time.monotonic() + self.grace_s
      self.children.terminate()

  def _on_order(self, source: int) -> None:
    try:
      read = os.read(source, 4096)
    except BlockingIOError:
      return
    if not read:
      del self.waits_for[source]
      self.trainer_ended = True
      self.stop("the trainer ended")
    *lines, self.orders = (self.orders + read).split(b"\n")
    if b"kill" in lines:
      self.log.say("killing the server, as requested")
      self.kill_at = 0.0

  def _on_parent_death(self, source: int) -> None:
    del self.waits_for[source]
    self.trainer_ended = True
    self.stop("the trainer died")

  def _on_signal(self, source: int) -> None:
    os.read(source, 4096)
    if self.asked_to_end:
      self.stop("asked to end")

  def _on_output(self, source: int) -> None:
    try:
      read = os.read(source, 1 << 16)
    except BlockingIOError:
      return
    if not read:
      del self.waits_for[source]  # it closed its output; it may still be running.
    self.log.feed(read)

  def _drain(self) -> None:
    """Reads what dead processes have left in the pipe."""
    output = self.children.output
    try:
      while output is not None and output in self.waits_for and (read := os.read(output, 1 << 16)):
        self.log.feed(read)
    except BlockingIOError:
      pass


def main(arguments: list[str]) -> int:
  """Runs until the server and all its descendants are gone; returns the server's exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--log", type=pathlib.Path, help="file for the output")
  parser.add_argument("--grace", type=float, default=10.0, help="seconds between TERM and KILL")
  parser.add_argument("--max-bytes", type=int, default=20 << 20, help="size at which the log moves")
  parser.add_argument("--remove", type=pathlib.Path, action="append", default=[], metavar="DIR")
  parser.add_argument("command", nargs=argparse.REMAINDER)
  options = parser.parse_args(arguments)
  command = options.command[1:] if options.command[:1] == ["--"] else options.command
  if not command:
    parser.error("no command was given")

  file = options.log or pathlib.Path(os.devnull)
  log = Log(file, os.environ.get(API_KEY_VARIABLE, ""), options.max_bytes)
  log.say("starting " + " ".join(command))
  try:
    children = Children(command, has_streams=options.log is None)
  except OSError as error:
    log.say(f"the server cannot be started: {error}")
    if options.log is None:
      print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    return 127
  if options.log is None:  # the server alone holds the ends of the pipes.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
      os.dup2(nowhere, stream)
  guard = Guard(children, log, options.grace)
  code = guard.run()
  if guard.trainer_ended:
    for folder in options.remove:
      shutil.rmtree(folder, ignore_errors=True)
  return code


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
