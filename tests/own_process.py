"""Calls functions of tests in a process of its own, which may be sent signals; pytest must not be.

A signal that comes late, or whose handler ends the process on a busy machine, would end all tests.
"""

import contextlib
import importlib
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]


class Process:
  """A process with the suite's settings and one device, which calls functions."""

  def __init__(self, log: pathlib.Path):
    """Starts nothing: the first call does.

    Args:
      log: File of what the process prints.
    """
    self.log = log
    self.log.touch()
    self._process: subprocess.Popen[str] | None = None
    self._results: Any = None

  def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a function of a test module; it and the arguments must fit into JSON.

    Raises:
      AssertionError: The function failed, or the process has ended.
    """
    if self._process is None or self._process.poll() is not None:
      self._start()
    module = pathlib.Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("")
    call = [".".join(module.parts), function.__name__, *map(_plain, arguments)]
    self._process.stdin.write(json.dumps(call) + "\n")
    self._process.stdin.flush()
    line = self._results.readline()
    assert line, f"{call[:2]} ended the process: {self._process.wait(60)}\n{self.log.read_text()}"
    result, error = json.loads(line)
    assert error is None, error
    return result

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.stdin.close()
      self._process.wait(60)
      self._results.close()

  def _start(self) -> None:
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["PYTEST_XDIST_WORKER"] = "own_process"  # whose cache is that of the first process.
    with self.log.open("a") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.own_process", str(writing)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=[writing],
        text=True,
      )
    os.close(writing)
    self._results = os.fdopen(reading)


def _plain(argument: Any) -> Any:
  return str(argument) if isinstance(argument, os.PathLike) else argument


@contextlib.contextmanager
def only_device():
  """Leaves one of the devices.

  Nothing is compiled ahead: short runs call a few of the programs that a long one may need.
  """
  import jax  # only now: conftest.py sets its environment first.

  from grpo_jax.building import computation

  first = jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: first)
    patch.setattr(computation.Computation, "jobs", lambda self: [])
    yield


@contextlib.contextmanager
def noticing():
  """Collects the lines that the package logs."""
  lines = []
  handler = logging.Handler()
  handler.emit = lambda record: lines.append(record.getMessage())
  logger = logging.getLogger("grpo_jax")
  level = logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  yield lines
  logger.setLevel(level)
  logger.removeHandler(handler)


def main() -> None:
  """Calls what standard input names, and writes each result as a line."""
  from tests import conftest  # noqa: F401  (the settings of the suite)

  # A shell starts what runs in the background with signals ignored.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGHUP, signal.SIG_DFL)

  with os.fdopen(int(sys.argv[1]), "w") as results, only_device():
    for line in sys.stdin:
      module, name, *arguments = json.loads(line)
      try:
        found = getattr(importlib.import_module(module), name)(*arguments), None
      except Exception:
        found = None, traceback.format_exc()
      results.write(json.dumps(found) + "\n")
      results.flush()


if __name__ == "__main__":
  main()
