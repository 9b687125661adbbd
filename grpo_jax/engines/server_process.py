"""Starts and ends one SGLang server as a separate process (I/O: processes, files).

A `ServerProcess` is controlled by a guard (processes/guard.py), which ends the server whenever
the trainer ends. This module does not use HTTP: the fleet finds out whether a server answers.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

from grpo_jax.engines.launching import (
  API_KEY_VARIABLE,
  LaunchOptions,
  ServerError,
  check,
  check_port,
  command_of,
  environment_of,
  free_port,
  is_loopback,
  port_of,
  refusals,
)
from grpo_jax.http import redaction
from grpo_jax.processes import guard

__all__ = [
  "API_KEY_VARIABLE",
  "LaunchOptions",
  "ServerError",
  "ServerProcess",
  "check",
  "check_port",
  "free_port",
  "is_loopback",
  "refusals",
]

_GUARD = guard.__file__


class ServerProcess:
  """A running server and its guard. The server ends with this object, and with the trainer.

  Attributes:
    index: Index of the server in the fleet.
    pid: Process id of its guard, the parent of all its processes.
    port: Port that it listens on.
    log: File with its output, older output in LOG.1.
  """

  def __init__(self, guard: subprocess.Popen[bytes], *, index: int, host: str, port: int,
               log: pathlib.Path, log_start: int):  # fmt: skip
    self.index, self.pid, self.port, self.log = index, guard.pid, port, log
    self._host, self._guard, self._log_start = host, guard, log_start

  @classmethod
  def start(
    cls,
    options: LaunchOptions,
    index: int,
    model_path: str | os.PathLike[str],
    weight_version: int,
    api_key: str = "",
  ) -> "ServerProcess":
    """Starts a server; it needs half a minute before it answers.

    Args:
      options: Options of the fleet.
      index: Index of the server in the fleet, from 0; its log is that of `options.first` + index.
      model_path: Hugging Face folder of the initial weights.
      weight_version: Version of these weights; with `options.command`, only if that uses it.
      api_key: Key that clients must send, passed in the environment; "": none. With
        `options.command` the command finds it in GRPO_JAX_SGLANG_API_KEY.

    Raises:
      ServerError: See `check`; or the log cannot be written.
    """
    check(dataclasses.replace(options, port=None), servers=index + 1, api_key=api_key)
    port = port_of(options, index)
    number = options.first + index
    log = options.log_folder.absolute() / f"server_{number}.log"
    command = [
      *(sys.executable, "-I", _GUARD),
      *("--log", str(log), "--grace", str(options.grace_s)),
      *(part for folder in options.scratch for part in ("--remove", str(folder.absolute()))),
      "--",
      *command_of(options, port, pathlib.Path(model_path).absolute(), weight_version),
    ]
    try:
      options.log_folder.mkdir(parents=True, exist_ok=True)
      with open(log, "ab") as own_troubles:
        log_start = own_troubles.tell()
        guard = subprocess.Popen(
          command,
          stdin=subprocess.PIPE,
          stdout=subprocess.DEVNULL,
          stderr=own_troubles,
          bufsize=0,
          cwd=options.log_folder,  # not the caller's: a server imports modules from its folder.
          env=environment_of(options, index, api_key),
          start_new_session=True,  # Ctrl-C in the terminal is handled by the trainer.
        )
    except OSError as error:
      raise ServerError(f"server {number} cannot be started: {error}") from error
    return cls(guard, index=index, host=options.host, port=port, log=log, log_start=log_start)

  @property
  def address(self) -> str:
    """Address at which the trainer reaches it: "http://127.0.0.1:30000"."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
    return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

  @property
  def is_running(self) -> bool:
    """Whether any process of the server is left."""
    return self._guard.poll() is None

  def exit_text(self) -> str:
    """Returns how it ended: "exited with code 1", "killed by SIGKILL", "is running"."""
    code = self._guard.poll()
    if code is None:
      return "is running"
    names = {each.value: each.name for each in signal.Signals}
    if code < 0:
      return f"killed with its guard, which was killed by {names.get(-code, f'signal {-code}')}"
    if code - 128 in names:
      return f"killed by {names[code - 128]}"
    return f"exited with code {code}"

  def last_lines(self, n: int = 20) -> str:
    """Returns the end of its log, since this start, without terminal control sequences."""
    try:
      with open(self.log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = self._log_start if self._log_start <= size else 0  # the log was rotated.
        file.seek(max(begin, size - 1000 * n))
        lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
      return f"(no log: {error})"
    return "\n".join(map(redaction.printable, lines[-n:]))

  def terminate(self) -> None:
    """Asks it to end, and lets the guard kill it after the grace period; returns at once."""
    self._guard.terminate()

  def kill(self) -> None:
    """Lets the guard kill it with all its processes, even if it hangs; returns at once."""
    assert self._guard.stdin is not None
    try:
      self._guard.stdin.write(b"kill\n")
    except (BrokenPipeError, ValueError):
      pass  # it has ended; ValueError: and was waited for.

  def wait(self, timeout_s: float | None = None) -> bool:
    """Waits until none of its processes is left; returns whether that happened in time."""
    try:
      self._guard.wait(timeout_s)
    except subprocess.TimeoutExpired:
      return False
    assert self._guard.stdin is not None
    self._guard.stdin.close()
    return True

  def __repr__(self) -> str:
    return f"ServerProcess({self.index}, {self.address}, {self.exit_text()})"
