"""Runs parts, each in a process with a limit, several at a time, and keeps the result up to date.

A part that times something asks for the device (`child.alone`): meanwhile the processes of all
others are stopped (SIGSTOP). So parts compile and test at the same time, and nothing else runs
while one measures. Nothing here imports JAX: effects of a part on its process, device and memory
end with it.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.files import cache

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT, PARTIAL = "gpu_day.json", ".partial.json"  # a file; the end of the name of others.
COMMIT = "COMMIT"  # file with the commit of sources that are not in git; see `bundle`.
FORMAT = 2
LAST_LINES = 40  # lines of a failed part's output that the result keeps.
LEAST_S = 10.0  # a part is not started with less time than this left.
GRACE_S = 3.0  # time between asking a process to end and killing it.
POLL_S = 0.02
DONE, SKIPPED, NOT_RUN = "done", "skipped", "not run"
# Statuses of a part that needs attention.
FAILURES = (
  *("failed", "out of memory", "timed out", "killed", "cut off", "no accelerator"),
  NOT_RUN,
)
# Exit codes of `child`.
EXIT_SKIPPED, EXIT_NO_ACCELERATOR, EXIT_OUT_OF_MEMORY = 3, 4, 5
_STATUS_BY_EXIT = {0: DONE, EXIT_SKIPPED: SKIPPED, EXIT_NO_ACCELERATOR: "no accelerator"}
_STATUS_BY_EXIT[EXIT_OUT_OF_MEMORY] = "out of memory"
# Nearly all the time of tiny sizes is compilation: without optimisation it takes a tenth.
_QUICK_COMPILATION = (
  "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


@dataclasses.dataclass(frozen=True)
class Part:
  """One measurement."""

  name: str
  title: str  # for the terminal.
  module: str  # has a function measure(record, settings).
  limit_s: (
    float  # time after which its process is killed; that of others' measurements not counted.
  )
  is_first: bool = False  # whether the others begin only when it has ended.


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that every part receives."""

  tiny: bool
  scratch: str  # folder for large files; removed at the end.
  model: str | None = None  # folder or file of the quickstart's model.
  part: str = ""  # name of the part.

  def sizes(self, usual: Mapping[str, Any], tiny: Mapping[str, Any]) -> types.SimpleNamespace:
    """Returns a part's sizes; `tiny` has those that are others on a CPU."""
    return types.SimpleNamespace(**{**usual, **(tiny if self.tiny else {})})


def signs(settings: Settings) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the files that say that a part wants the device alone, and that it has it."""
  folder = pathlib.Path(settings.scratch)
  return folder / f"{settings.part}.wants", folder / f"{settings.part}.has"


def write_json(path: pathlib.Path, content: Any) -> None:
  """Writes a file atomically: at any time it is the old one or the new one."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  with temporary.open("w") as stream:
    json.dump(content, stream, indent=1)
    stream.flush()
    os.fsync(stream.fileno())
  os.replace(temporary, path)


def new_result(command: Sequence[str], *, tiny: bool) -> dict[str, Any]:
  """Returns a result without any part."""
  return {
    "format": FORMAT,
    "date": datetime.date.today().isoformat(),
    "command": shlex.join(command),
    "tiny": tiny,
    "python": platform.python_version(),
    "commit": commit(),
    "parts": {},
  }


def commit() -> str | None:
  """Returns the commit of this checkout, with "+" if files were changed; None if not in git."""
  of_bundle = ROOT / COMMIT
  if of_bundle.exists():
    return of_bundle.read_text().strip()
  git = lambda *words: subprocess.run(
    ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.strip()
  try:
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
  except (OSError, subprocess.CalledProcessError):
    return None


def read(path: pathlib.Path) -> dict[str, Any]:
  """Reads a result.

  Raises:
    ValueError: The file is not one.
  """
  try:
    result = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(f"{path}: {error}") from error
  if not isinstance(result, dict) or result.get("format") != FORMAT:
    raise ValueError(f"{path} is not a result of scripts/gpu_day.py in format {FORMAT}")
  return result


def resume(out: pathlib.Path, *, tiny: bool) -> dict[str, Any] | None:
  """Returns an earlier result in a folder, including the measurements of parts that were cut off.

  Raises:
    ValueError: The result is of the other kind, tiny or not, or cannot be read.
  """
  if not (out / RESULT).exists():
    return None
  result = read(out / RESULT)
  if result["tiny"] != tiny:
    kind = "tiny" if result["tiny"] else "full"
    raise ValueError(f"{out / RESULT} is of {kind} sizes: choose another --out")
  for partial in out.glob(f"*{PARTIAL}"):
    found = json.loads(partial.read_text())
    if result["parts"].get(found["part"], {}).get("status") != DONE:
      result["parts"][found["part"]] = {
        "status": "cut off",
        "reason": "this program or its machine ended in the middle of the part",
        **{key: found[key] for key in ("device", "result")},
      }
    partial.unlink()
  return result


class _Process:
  """A part that runs."""

  def __init__(self, part: Part, settings: Settings, out: pathlib.Path):
    self.part, self.spent, self._is_stopped = part, 0.0, False
    settings = dataclasses.replace(settings, part=part.name)
    self.wants, self.has = signs(settings)
    self._partial, self._log = out / f"{part.name}{PARTIAL}", out / f"{part.name}.log"
    self._started = time.time()
    job = {
      "module": part.module,
      "settings": dataclasses.asdict(settings),
      "partial": str(self._partial),
    }
    write_json(self._partial, {"part": part.name, "device": None, "result": {}})
    with self._log.open("w") as stream:
      self._process = subprocess.Popen(
        [sys.executable, str(HERE / "child.py"), json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        env=_environment(settings),
        start_new_session=True,
      )

  @property
  def platform(self) -> str | None:
    """The platform on which it computes, once it is known."""
    return (json.loads(self._partial.read_text())["device"] or {}).get("platform")

  def count(self, seconds: float) -> None:
    """Adds to the time that the part has spent, unless it had to wait."""
    is_waiting = self.wants.exists() and not self.has.exists()
    self.spent += 0.0 if self._is_stopped or is_waiting else seconds

  def stop(self, is_stopped: bool) -> None:
    """Stops its processes, or lets them continue."""
    if is_stopped != self._is_stopped:
      self._is_stopped = is_stopped
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)

  def ended(self, over: str | None) -> dict[str, Any] | None:
    """Returns the part's entry if it has ended, or if its time is over; else None.

    Args:
      over: Why the time of all parts is over; None: it is not.
    """
    code = self._process.poll()
    if code is None and self.spent > self.part.limit_s:
      over = f"its limit of {self.part.limit_s:.0f} s was over"
    if code is None and not over:
      return None
    self.end()
    if code is None:
      status, reason = "timed out", over
    elif code < 0:
      status, reason = "killed", f"its process was ended by {signal.Signals(-code).name}"
    else:
      status = _STATUS_BY_EXIT.get(code, "failed")
      reason = "" if status == DONE else f"its process ended with exit code {code}"
    found = json.loads(self._partial.read_text())
    entry = {
      "status": status,
      "reason": found.get("reason") or reason,
      "seconds": round(time.time() - self._started, 2),
      "device": found["device"],
      "result": found["result"],
    }
    if status in FAILURES:
      entry["last_lines"] = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return entry

  def end(self) -> None:
    """Ends its process, if it is still running, and everything that it has started."""
    with contextlib.suppress(ProcessLookupError):
      if self._process.poll() is None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self.stop(False)
        with contextlib.suppress(subprocess.TimeoutExpired):
          self._process.wait(GRACE_S)
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    for sign in (self.wants, self.has):
      sign.unlink(missing_ok=True)

  def forget(self) -> None:
    """Removes the file of its measurements so far, once they are in the result."""
    for rest in self._partial.parent.glob(f"*{self._partial.name}*"):
      rest.unlink()


class Day:
  """The parts of a day: those that run, and those that wait."""

  def __init__(
    self,
    settings: Settings,
    out: pathlib.Path,
    result: dict[str, Any],
    *,
    minutes: float,
    at_once: int,
    log: Callable[[str], None] = print,
  ):
    """Makes a day; `run` runs it.

    Args:
      settings: Settings for every part.
      out: Folder of the result file and the logs.
      result: Result to extend; its content is kept.
      minutes: Time for all parts together.
      at_once: Number of parts that may run at the same time. It is 1 on a TPU, which one process
        takes, and until a part has said on what it computes.
      log: Function called with a line when a part starts and when it ends.
    """
    out.mkdir(parents=True, exist_ok=True)
    self._settings, self._out, self._result, self._log = settings, out, result, log
    self._at_once, self._minutes = at_once, minutes
    self._end = time.time() + 60 * minutes
    self._running: list[_Process] = []

  def run(self, parts: Sequence[Part]) -> dict[str, Any]:
    """Runs parts in their order, and writes the result after each; returns it.

    A part that is finished in the result is skipped. If one fails, the others still run; but
    without an accelerator, unless the sizes are tiny, no further parts are started.
    """
    waiting = list(parts)
    last = time.time()
    try:
      while waiting or self._running:
        while waiting and self._may_start():
          self._start(waiting.pop(0))
        time.sleep(POLL_S)
        now = time.time()
        for process in list(self._running):
          process.count(now - last)
          self._look_at(process, now)
        self._give_the_device()
        last = now
    finally:
      for process in self._running:
        process.end()
    return self._result

  def _may_start(self) -> bool:
    """Returns whether the next part may start now."""
    if not self._running:
      return True
    if any(process.part.is_first or process.has.exists() for process in self._running):
      return False
    entries = [entry.get("device") or {} for entry in self._result["parts"].values()]
    known = {x.get("platform") for x in entries} | {x.platform for x in self._running}
    is_one = "tpu" in known or known == {None}
    return len(self._running) < (1 if is_one else self._at_once)

  def _start(self, part: Part) -> None:
    """Starts a part, or writes down why not."""
    entries = self._result["parts"]
    if entries.get(part.name, {}).get("status") in (DONE, SKIPPED):
      self._log(f"{part.name:<14} is done already")
      return
    reason = "no time was left" if self._end - time.time() < LEAST_S else ""
    if any(entry["status"] == "no accelerator" for entry in entries.values()):
      reason = "there is no accelerator here"
    if reason:
      self._write(part, {"status": NOT_RUN, "reason": reason})
      self._log(f"{part.name:<14} {NOT_RUN}: {reason}")
      return
    entries.pop(part.name, None)
    self._log(f"{part.name:<14} begins: {part.title} (at most {part.limit_s:.0f} s)")
    self._running.append(_Process(part, self._settings, self._out))

  def _look_at(self, process: _Process, now: float) -> None:
    """Writes down the entry of a part that has ended."""
    over = f"the {self._minutes:g} minutes of all parts were over" if now > self._end else None
    entry = process.ended(over)
    if entry is None:
      return
    self._running.remove(process)
    self._write(process.part, entry)
    process.forget()
    reason = f": {entry['reason']}" if entry["reason"] else ""
    self._log(f"{process.part.name:<14} {entry['status']} after {entry['seconds']:.1f} s{reason}")

  def _write(self, part: Part, entry: dict[str, Any]) -> None:
    self._result["parts"][part.name] = entry
    write_json(self._out / RESULT, self._result)

  def _give_the_device(self) -> None:
    """Stops all parts but the one that has the device, or gives it to the first that wants it."""
    if any(process.has.exists() for process in self._running):
      return
    chosen = next((process for process in self._running if process.wants.exists()), None)
    for process in self._running:
      process.stop(chosen is not None and process is not chosen)
    if chosen is not None:
      chosen.has.touch()


def _environment(settings: Settings) -> dict[str, str]:
  """Returns the environment of a part's process."""
  folders = (ROOT, ROOT / "kernels", ROOT / "packages", HERE.parent, HERE.parent / "benchmark")
  paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
  variables = {
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "HF_HUB_OFFLINE": "1",  # nothing uses a network.
    # Parts share the device, so none may take all of its memory.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  if settings.tiny:
    variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK_COMPILATION, "OMP_NUM_THREADS": "1"}
  # What one part, or an earlier day, has compiled, others read.
  folder = (
    pathlib.Path(settings.scratch) / "xla" if settings.tiny else cache.default_cache() / "xla"
  )
  kept = {"JAX_COMPILATION_CACHE_DIR": str(folder)}
  return {**kept, **os.environ, **variables}
