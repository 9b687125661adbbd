"""The process of one part: `running` starts it with a job in JSON as its only argument."""

import contextlib
import ctypes
import importlib
import json
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from gpu_day_parts import running


class Skipped(Exception):
  """A part cannot run here; the message says why."""


class NoAccelerator(Exception):
  """JAX computes on a CPU, and the sizes are too large for one."""


class Record:
  """The measurements of a part so far; the file always contains all of them."""

  def __init__(self, path: pathlib.Path, part: str):
    self._path = path
    self._content: dict[str, Any] = {"part": part, "device": None, "result": {}}

  @property
  def result(self) -> dict[str, Any]:
    """What was measured so far, by name."""
    return self._content["result"]

  def put(self, **values: Any) -> None:
    """Adds values to the result; "headline" is the text of the part in the table."""
    self.result.update(values)
    running.write_json(self._path, self._content)

  def append(self, name: str, value: Any) -> None:
    """Adds a value to a list of the result."""
    self.result.setdefault(name, []).append(value)
    running.write_json(self._path, self._content)

  def set_device(self, device: dict[str, str]) -> None:
    """Records the device on which the part computes."""
    self._content["device"] = device
    running.write_json(self._path, self._content)

  def end(self, reason: str) -> None:
    """Records why the part ends without being done."""
    self._content["reason"] = reason
    running.write_json(self._path, self._content)


@contextlib.contextmanager
def alone(settings: running.Settings) -> Iterator[None]:
  """Has the device and the machine to itself: `running` stops all other parts meanwhile."""
  wants, has = running.signs(settings)
  wants.touch()
  while not has.exists():
    time.sleep(0.01)
  try:
    yield
  finally:
    wants.unlink()
    has.unlink()


def open_device(record: Record, settings: running.Settings) -> Any:
  """Starts JAX; returns its first device.

  Raises:
    NoAccelerator: The platform is a CPU, and the sizes are not tiny.
  """
  import jax

  device = jax.devices()[0]
  record.set_device({"platform": platform_of(device), "kind": device.device_kind})
  if device.platform == "cpu" and not settings.tiny:
    raise NoAccelerator(
      "JAX computes on a CPU: there is no accelerator, or JAX is not installed for it"
      " (pip install -e '.[cuda]' or '.[tpu]'); --tiny tries the script on a CPU"
    )
  return device


def platform_of(device: Any) -> str:
  """Returns "gpu", "tpu" or "cpu"."""
  return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def peak_gib(device: Any) -> float | None:
  """Returns the peak memory of this process on a device; None if the device does not report it."""
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  return peak and peak / 2**30


def end_with_the_parent() -> None:
  """Asks Linux to kill this process when its parent ends, in whatever way."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(job: dict[str, Any]) -> int:
  """Runs one part; returns the exit code."""
  end_with_the_parent()
  settings = running.Settings(**job["settings"])
  record = Record(pathlib.Path(job["partial"]), settings.part)
  try:
    importlib.import_module(job["module"]).measure(record, settings)
    return 0
  except Skipped as reason:
    record.end(str(reason))
    return running.EXIT_SKIPPED
  except NoAccelerator as reason:
    record.end(str(reason))
    return running.EXIT_NO_ACCELERATOR
  # Errors of a part stop here: they are recorded, and the next part runs.
  except Exception as error:
    traceback.print_exc()
    record.end(first_line(error))
    return running.EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else 1


def is_out_of_memory(error: BaseException) -> bool:
  """Returns whether an error says that memory was short."""
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def first_line(error: BaseException) -> str:
  """Returns an error as one line."""
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
  # Imported under its real name, so that the parts raise the same `Skipped` that is caught here.
  sys.exit(importlib.import_module("gpu_day_parts.child").main(json.loads(sys.argv[1])))
