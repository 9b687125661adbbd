"""Runs parts, each in a separate process with a limit, and keeps the result file up to date.

Nothing here imports JAX: effects of a part on its process, device and memory end with it.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT, PARTIAL, LOG = "gpu_day.json", "partial.json", "gpu_day.log"
FORMAT = 1
LAST_LINES = 40  # lines of a failed part's output that the result keeps.
LEAST_S = 10.0  # a part is not started with less time than this left.
GRACE_S = 3.0  # time between asking a process to end and killing it.
DONE, SKIPPED = "done", "skipped"
# Statuses of a part that failed and needs attention.
FAILURES = ("failed", "out of memory", "timed out", "killed", "cut off", "no accelerator")
NOT_RUN = "not run"
# Exit codes of `child`.
EXIT_SKIPPED, EXIT_NO_ACCELERATOR, EXIT_OUT_OF_MEMORY = 3, 4, 5
# Nearly all the time of tiny sizes is compilation: without optimisation it takes a tenth.
_QUICK_COMPILATION = (
  "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
_STATUS_BY_EXIT = {0: DONE, EXIT_SKIPPED: SKIPPED, EXIT_NO_ACCELERATOR: "no accelerator"}
_STATUS_BY_EXIT[EXIT_OUT_OF_MEMORY] = "out of memory"


@dataclasses.dataclass(frozen=True)
class Part:
  """One measurement."""

  name: str
  title: str  # for the terminal and the tables.
  module: str  # has a function measure(record, settings, **sizes).
  limit_s: float  # time after which its process is killed.
  sizes: Mapping[str, Any]
  tiny: Mapping[str, Any]  # replaces `sizes` on a CPU.
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its process.


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that every part receives."""

  tiny: bool
  scratch: str  # folder for large files; removed at the end.
  model: str | None = None  # folder of the quickstart's model.
  wheels: str | None = None  # folder of wheels copied to this machine.
  liger_python: str | None = None  # interpreter with liger-kernel installed.
  deadline: float = 0.0  # `time.time()` at which the part is killed.

  def left_s(self) -> float:
    """Returns how much time the part has left."""
    return self.deadline - time.time()


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
    "commit": _commit(),
    "parts": {},
  }


def _commit() -> str | None:
  """Returns the commit of this checkout, with "+" if files were changed; None if not in git."""
  git = lambda *words: subprocess.run(
    ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.strip()
  try:
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
  except (OSError, subprocess.CalledProcessError):
    return None


def resume(out: pathlib.Path, *, tiny: bool) -> dict[str, Any] | None:
  """Returns an earlier result in a folder, including the measurements of a part that was cut off.

  Raises:
    ValueError: The result is of the other kind, tiny or not, or cannot be read.
  """
  path = out / RESULT
  if not path.exists():
    return None
  result = json.loads(path.read_text())
  if result.get("format") != FORMAT or result["tiny"] != tiny:
    kind = "tiny" if result.get("tiny") else "full"
    raise ValueError(f"{path} is of format {result.get('format')} and {kind} sizes: choose --out")
  partial = out / PARTIAL
  if partial.exists():
    found = json.loads(partial.read_text())
    earlier = result["parts"].get(found["part"], {})
    if earlier.get("status") != DONE:
      result["parts"][found["part"]] = {
        "status": "cut off",
        "reason": "this program or its machine ended in the middle of the part",
        **{key: found[key] for key in ("device", "result")},
      }
    partial.unlink()
  return result


def run(
  parts: Sequence[Part],
  settings: Settings,
  out: pathlib.Path,
  result: dict[str, Any],
  *,
  minutes: float,
  log: Callable[[str], None] = print,
) -> dict[str, Any]:
  """Runs parts one after the other, and writes the result after each.

  A part that is finished in `result` is skipped. If one fails, the next still runs; but without an
  accelerator, unless the sizes are tiny, no further parts are started.

  Args:
    parts: Parts to run, in order.
    settings: Settings for every part.
    out: Folder of the result file and the log.
    result: Result to extend; its content is kept.
    minutes: Time for all parts together.
    log: Function called with a line when a part starts and when it ends.

  Returns:
    `result`.
  """
  out.mkdir(parents=True, exist_ok=True)
  end = time.time() + 60 * minutes
  has_device = True
  for part in parts:
    if result["parts"].get(part.name, {}).get("status") in (DONE, SKIPPED):
      log(f"{part.name:<22} is done already")
      continue
    left = end - time.time()
    if not has_device or left < LEAST_S:
      reason = "no time was left" if has_device else "there is no accelerator here"
      result["parts"][part.name] = {"status": NOT_RUN, "reason": reason}
      log(f"{part.name:<22} {NOT_RUN}: {reason}")
    else:
      limit = min(part.limit_s, left)
      log(f"{part.name:<22} begins: {part.title} (at most {limit:.0f} s)")
      entry = _run_one(part, settings, out, limit)
      result["parts"][part.name] = entry
      reason = f": {entry['reason']}" if entry["reason"] else ""
      log(f"{part.name:<22} {entry['status']} after {entry['seconds']:.1f} s{reason}")
      has_device = entry["status"] != "no accelerator"
    write_json(out / RESULT, result)
    for rest in (out / PARTIAL, *out.glob(f".{PARTIAL}.*")):
      rest.unlink(missing_ok=True)
  return result


def _run_one(part: Part, settings: Settings, out: pathlib.Path, limit: float) -> dict[str, Any]:
  """Runs one part; returns its entry for the result."""
  started = time.time()
  settings = dataclasses.replace(settings, deadline=started + limit)
  partial, log = out / PARTIAL, out / LOG
  job = {
    "part": part.name,
    "module": part.module,
    "sizes": dict(part.tiny if settings.tiny else part.sizes),
    "settings": dataclasses.asdict(settings),
    "partial": str(partial),
  }
  write_json(partial, {"part": part.name, "device": None, "result": {}})
  with log.open("a") as stream:
    stream.write(f"\n===== {part.name}\n")
    stream.flush()
    begins = stream.tell()
    process = subprocess.Popen(
      [sys.executable, str(HERE / "child.py"), json.dumps(job)],
      stdin=subprocess.DEVNULL,
      stdout=stream,
      stderr=subprocess.STDOUT,
      env=_environment(part, settings),
      start_new_session=True,
    )
    status, reason = _wait(process, limit)
  found = json.loads(partial.read_text())
  entry = {
    "status": status,
    "reason": found.get("reason") or reason,
    "seconds": round(time.time() - started, 2),
    "limit_s": limit,
    "device": found["device"],
    "result": found["result"],
  }
  if status in FAILURES:
    entry["last_lines"] = _last_lines(log, begins)
  return entry


def _wait(process: subprocess.Popen[bytes], limit: float) -> tuple[str, str]:
  """Waits for a part's process; returns its status and a reason, and ends all its processes."""
  try:
    code = process.wait(limit)
  except subprocess.TimeoutExpired:
    return "timed out", f"its limit of {limit:.0f} s was over"
  finally:
    _end(process)
  if code < 0:
    return "killed", f"its process was ended by {signal.Signals(-code).name}"
  status = _STATUS_BY_EXIT.get(code, "failed")
  return status, "" if status == DONE else f"its process ended with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
  """Ends a part's process, if it is still running, and everything that it has started."""
  with contextlib.suppress(ProcessLookupError):
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def _environment(part: Part, settings: Settings) -> dict[str, str]:
  """Returns the environment of a part's process."""
  folders = (ROOT, ROOT / "kernels", ROOT / "packages", HERE.parent, HERE.parent / "benchmark")
  paths = [str(folder) for folder in folders]
  if os.environ.get("PYTHONPATH"):
    paths.append(os.environ["PYTHONPATH"])
  variables = {
    "PYTHONPATH": os.pathsep.join(paths),
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    # Nothing uses a network: pip looks only into the folder of wheels.
    "HF_HUB_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    # A memory pool keeps what was freed; a part that starts other processes must leave them memory.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  if settings.wheels:
    variables["PIP_FIND_LINKS"] = str(pathlib.Path(settings.wheels).resolve())
  if settings.tiny:
    variables |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK_COMPILATION}
  folder = pathlib.Path(settings.scratch) / "xla" if settings.tiny else _user_cache()
  kept = {"JAX_COMPILATION_CACHE_DIR": str(folder)}
  return {**kept, **os.environ, **variables, **part.environment}


def _user_cache() -> pathlib.Path:
  """Returns the folder in which runs cache compiled programs, so that a second day starts warm."""
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(os.environ.get("GRPO_JAX_CACHE") or pathlib.Path(base) / "grpo_jax") / "xla"


def _last_lines(log: pathlib.Path, begins: int) -> list[str]:
  """Returns the last lines that a part has printed."""
  with log.open("rb") as stream:
    stream.seek(begins)
    text = stream.read().decode(errors="replace")
  return text.splitlines()[-LAST_LINES:]
