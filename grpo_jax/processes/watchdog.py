"""Watches the other processes of a run, whatever the main thread does meanwhile.

A process whose main thread waits in a collective of the devices cannot learn that another one has
failed, was asked to stop, died or hangs: the collective never ends, and JAX's own heartbeat aborts
everything from C++, without a name. Two threads do that here. One sends a sign of life every second
and reads the news of the others, through the key-value store of JAX's coordination service; the
other one judges by the clock, also when that service does not answer. What they find ends the
process with a message and an exit code, unless the main thread does so itself within `GRACE_S`.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

PERIOD_S = 1.0  # time between two signs of life.
LOOK_S = 0.25  # time between two looks at the clock.
GRACE_S = 6.0  # time for the main thread to end the process by itself.
LINGER_S = 10.0  # longest time that process 0 outlasts the others, because it serves them.
_FAILED = "grpo_jax/news/failed"
_STOP = "grpo_jax/news/stop"
_ALIVE = "grpo_jax/alive/"
_LEFT = "grpo_jax/left/"
# All computations on the devices of several processes start there; a call that waits is in C++.
_PROGRAMS = "grpo_jax.compilation.programs"


@dataclasses.dataclass(frozen=True)
class Failure:
  """Why a run of several processes ends although they have not agreed on it."""

  process: int  # the one that failed.
  reason: str
  exit_code: int = 1
  stopped: bool = False  # it was asked to stop where the others do not ask whether to.
  at_once: bool = False  # nobody has time to end by itself.
  is_lost: bool = False  # another process has found this, and prints it.


class Watchdog:
  """Knows what the other processes of a run are doing."""

  def __init__(
    self,
    client: Any,
    index: int,
    hosts: Sequence[str],
    *,
    coordinator: tuple[str, int],
    heartbeat_s: float,
    wait_s: float,
  ):
    """Makes a watchdog; `start` starts its threads.

    Args:
      client: Client of JAX's coordination service.
      index: Number of this process.
      hosts: Name of the host of each process.
      coordinator: Host and port of the coordination service, which process 0 runs.
      heartbeat_s: Seconds without a sign of life after which a process is given up.
      wait_s: Seconds that others wait in a collective for a process that does something else.
    """
    self.index = index
    self.hosts = list(hosts)
    self.failure: Failure | None = None  # of any process, also of this one.
    self.flag: Any = None  # of this process; see `processes.watching`.
    self.is_agreed = False  # all processes end, and save, together.
    self.last_words = ""  # printed below a failure: how the run continues.
    self._reported_by = ""  # "main" or "watch", which has printed a failure.
    self._report_lock = threading.Lock()
    self._client = client
    self._coordinator = coordinator
    self.heartbeat_s = heartbeat_s
    self._wait_s = wait_s
    self._failed_at = 0.0
    self._answered_at = time.monotonic()
    self._exchanges = 0
    self._waits_for = ""
    self._stop: Callable[[int], None] | None = None
    self._signal = int(signal.SIGINT)  # what asked a run to stop, if anything did.
    self._ended = threading.Event()
    self._leaving: int | None = None  # exit code.
    self._seen: dict[int, tuple[Any, float]] = {}  # sign of life of each process, and its time.
    self._stuck: dict[int, tuple[Any, float]] = {}  # what each process does, and since when.
    self._period_s = max(PERIOD_S, len(self.hosts) / 64)

  # --- what the main thread calls ---

  def start(self) -> None:
    """Starts the threads."""
    for work, name in ((self._pulse, "pulse"), (self._judge, "watch")):
      threading.Thread(target=work, name=name, daemon=True).start()

  def end(self) -> None:
    """Ends the threads; the process may then leave in its own way."""
    self._ended.set()

  def on_stop(self, raise_flag: Callable[[int], None] | None) -> None:
    """Sets the function that is called with the number of a signal that another process got."""
    self._stop = raise_flag

  def stop(self, number: int) -> None:
    """Raises this process's flag, because another one got a signal."""
    self._signal = number
    if self._stop is not None:
      self._stop(number)

  def publish_stop(self, number: int) -> None:
    """Has all processes stop, because this one got a signal."""
    self._signal = number
    self._set(_STOP, json.dumps({"signal": int(number), "process": self.index}))

  def give_up(self, failure: Failure) -> None:
    """Has all processes end because of a failure; the first one of a run counts."""
    if failure.stopped:
      failure = dataclasses.replace(failure, exit_code=128 + self._signal)
    self._note(failure)
    self._set(_FAILED, json.dumps(dataclasses.asdict(failure)))

  def end_at_once(self, number: int) -> None:
    """Ends all processes, because this one got a second signal."""
    self._signal = number
    self.give_up(Failure(self.index, signal.Signals(number).name, stopped=True, at_once=True))
    self.leave(128 + number)

  @contextlib.contextmanager
  def waiting(self, what: str):
    """While the block runs, this process waits for the others with a time-out of its own."""
    self._exchanges += 1
    self._waits_for = what
    try:
      yield
    finally:
      self._waits_for = ""

  def named(self, process: int) -> str:
    """Returns "process 1 of 2 (host)"."""
    return f"process {process} of {len(self.hosts)} ({self.hosts[process]})"

  def leave(self, code: int) -> None:
    """Ends the process now; process 0 first waits for the others, because it serves them."""
    if self._leaving is None:
      self._leaving = code
    self._ended.set()
    _flush()
    self._set(f"{_LEFT}{self.index}", str(code), within_s=2)
    if self.index == 0:
      self._linger()
    os._exit(code)

  def on_abort(self) -> None:
    """Has an abort in C++ reported: of this process to the others, or of process 0 by this one.

    JAX aborts a process as soon as process 0 does not answer. The handler runs in the thread that
    aborts, which does not hold the interpreter's lock.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
    self._handler = handler  # must live as long as the process.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

  # --- threads ---

  def _pulse(self) -> None:
    """Sends signs of life and reads news; hangs when process 0 does not answer."""
    number = 0
    while not self._ended.is_set():
      number += 1
      at, is_of_jax = _place()
      sign = {
        "number": number,
        "exchanges": self._exchanges,
        "waits": self._waits_for,
        "at": at,
        "is_of_jax": is_of_jax,
      }
      try:
        self._client.key_value_set(f"{_ALIVE}{self.index}", json.dumps(sign), allow_overwrite=True)
        news = dict(self._client.key_value_dir_get("grpo_jax/news/"))
        signs = self._client.key_value_dir_get(_ALIVE) if self.index == 0 else []
      except Exception:  # jaxlib has no public class; what it means, `_judge` decides by the clock.
        self._ended.wait(self._period_s)
        continue
      self._answered_at = time.monotonic()
      self._read({name.rpartition("/")[2]: json.loads(text) for name, text in news.items()})
      if self.index == 0:
        self._compare({int(k.rpartition("/")[2]): json.loads(text) for k, text in signs})
      self._ended.wait(self._period_s)

  def _read(self, news: Mapping[str, Any]) -> None:
    if "failed" in news:
      self._note(Failure(**news["failed"]))
    if "stop" in news and news["stop"]["process"] != self.index:
      self.stop(news["stop"]["signal"])

  def _compare(self, signs: Mapping[int, Mapping[str, Any]]) -> None:
    """Finds processes that are dead or hang; runs in process 0."""
    now = time.monotonic()
    for process, sign in signs.items():
      if self._seen.get(process, (None, 0))[0] != sign["number"]:
        self._seen[process] = (sign["number"], now)
      # What runs outside of JAX may go from place to place: only a collective holds up the others.
      doing = (sign["exchanges"], sign["waits"], sign["at"] if sign["is_of_jax"] else "")
      if self._stuck.get(process, (None, 0))[0] != doing:
        self._stuck[process] = (doing, now)
    for process, (_, at) in self._seen.items():
      if now - at > self.heartbeat_s and self.failure is None:
        self.give_up(Failure(process, _silent(now - at), is_lost=True))
    self._find_hanging(signs, now)

  def _find_hanging(self, signs: Mapping[int, Mapping[str, Any]], now: float) -> None:
    """Gives up if some process waits for devices, and another one does something else."""
    if self.failure is not None or any(sign["waits"] for sign in signs.values()):
      return  # an exchange has a time-out of its own, and names who is missing.
    waiting = [p for p, sign in signs.items() if sign["is_of_jax"]]
    others = [p for p in signs if p not in waiting]
    if not waiting or not others:
      return
    longest = min(now - self._stuck[p][1] for p in signs)
    if longest > self._wait_s:
      first = others[0]
      self.give_up(
        Failure(
          first,
          f"the other processes have waited {longest:.0f} s for it (distributed.wait_s); it is in"
          f" {signs[first]['at']}",
          at_once=True,
          is_lost=first != 0,
        )
      )

  def _judge(self) -> None:
    """Ends the process when the main thread does not; never waits for anything but the clock."""
    before = time.monotonic()
    while not self._ended.wait(LOOK_S):
      now = time.monotonic()
      if now - before > 20 * LOOK_S:  # this process itself was stopped meanwhile.
        self._answered_at = now
        self._seen = {process: (number, now) for process, (number, _) in self._seen.items()}
      before = now
      if self.failure is None and now - self._answered_at > self.heartbeat_s:
        self._note(Failure(0, _silent(now - self._answered_at), is_lost=True))
      if self.failure is not None and now - self._failed_at > self._patience(self.failure):
        self._report()
        self.leave(self.failure.exit_code)

  def _patience(self, failure: Failure) -> float:
    """Returns the seconds that the main thread has to end the process by itself."""
    if failure.at_once:
      return 0.0
    return self._wait_s if self.is_agreed else GRACE_S

  # --- ends ---

  def _note(self, failure: Failure) -> None:
    if self.failure is None:
      self._failed_at = time.monotonic()
      self.failure = failure

  def _report(self) -> None:
    """Prints the failure, unless the main thread has."""
    failure = self.failure
    if failure is None or failure.stopped or not self.is_printed_here(failure):
      return
    if not self.claim_report("watch"):
      return
    for line in filter(None, (f"error: {self.described(failure)}", self.last_words)):
      print(line, file=sys.stderr)

  def is_printed_here(self, failure: Failure) -> bool:
    """Returns whether this process prints a failure: the main one, or where that one cannot."""
    if self.index == 0:
      return True
    return failure.is_lost == (failure.process == 0) and failure.process in (0, self.index)

  def claim_report(self, thread: str) -> bool:
    """Returns whether a thread, "main" or "watch", may print a failure; the other may not then."""
    with self._report_lock:
      self._reported_by = self._reported_by or thread
      return self._reported_by == thread

  def described(self, failure: Failure) -> str:
    """Returns "process 1 of 2 (host): the reason"."""
    return f"{self.named(failure.process)}: {failure.reason}"

  def _linger(self) -> None:
    """Waits until the other processes have left; they abort when process 0 is gone."""
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline:
      try:
        left = {k.rpartition("/")[2] for k, _ in self._client.key_value_dir_get(_LEFT)}
      except Exception:
        return
      silent = {
        str(p) for p, (_, at) in self._seen.items() if time.monotonic() - at > self.heartbeat_s
      }
      if len(left | silent | {"0"}) == len(self.hosts):
        time.sleep(0.2)  # from the last word of a process to its end.
        return
      time.sleep(0.05)

  def _set(self, key: str, text: str, *, within_s: float = 5) -> None:
    """Sets a key, if it is not set and the coordination service answers in time."""

    def try_it() -> None:
      with contextlib.suppress(Exception):  # set by another process, or process 0 is gone.
        self._client.key_value_set(key, text)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(within_s)

  def _aborted(self, number: int) -> None:
    """Handles SIGABRT in the thread that aborts."""
    del number
    if self._leaving is not None:
      os._exit(self._leaving)
    if self.failure is None and self.index and not _answers(self._coordinator):
      self._note(Failure(0, "it died, or its host was lost", is_lost=True))
    if self.failure is not None:
      self._report()
      _flush()
      os._exit(self.failure.exit_code)
    reason = "aborted in C++; its standard error has the reason"
    self.give_up(Failure(self.index, reason, exit_code=1))


def _silent(seconds: float) -> str:
  return (
    f"no sign of life for {seconds:.0f} s (distributed.heartbeat_s): it was killed or suspended, or"
    " its host is lost"
  )


def _answers(address: tuple[str, int]) -> bool:
  try:
    with socket.create_connection(address, timeout=2):
      return True
  except OSError:
    return False


def _place() -> tuple[str, bool]:
  """Returns where the main thread is, and whether it is in JAX, where it may wait for others.

  The place is the innermost frame outside of Python's standard library: "file:line (function)".
  """
  frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
  while frame is not None and frame.f_back and _package(frame) in sys.stdlib_module_names:
    frame = frame.f_back
  if frame is None:
    return "", False
  at = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
  is_program = frame.f_globals.get("__name__") == _PROGRAMS
  return at, is_program or _package(frame) in ("jax", "jaxlib", "orbax")


def _package(frame: FrameType) -> str:
  return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):
      stream.flush()


# The watch of this process; None: there are no others.
current: Watchdog | None = None


# --- who the processes are ---


def count() -> int:
  """Returns the number of processes of this run."""
  state = distributed()
  return 1 if state is None else int(state.num_processes)


def index() -> int:
  """Returns the number of this process, from 0."""
  state = distributed()
  return 0 if state is None else int(state.process_id)


def is_main() -> bool:
  """Returns whether this process writes, prints and decides for the whole run."""
  return index() == 0


def named() -> str:
  """Returns "process 1 of 2" for messages; "" if there is only one process."""
  return f"process {index()} of {count()}" if count() > 1 else ""


def where() -> str:
  """Returns "process 1 of 2 (host)" for messages; "" if there is only one process."""
  return name_of(index()) if count() > 1 else ""


def name_of(number: int) -> str:
  """Returns "process 1 of 2 (host)" for the process with a number."""
  return current.named(number) if current else f"process {number} of {count()}"


def distributed() -> Any:
  """Returns the state of `jax.distributed`; None if it is not running.

  JAX's public functions `process_index` and `process_count` would start a backend.
  """
  jax = sys.modules.get("jax")
  if jax is None or not hasattr(jax, "distributed") or not jax.distributed.is_initialized():
    return None
  from jax._src import distributed

  return distributed.global_state


def client() -> Any:
  """Returns the client of JAX's coordination service; only runs of several processes have one."""
  return distributed().client
