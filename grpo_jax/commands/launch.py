"""`grpo-jax launch`: a run of several processes on this machine, to try one and to test it."""

import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from grpo_jax.commands.arguments import HelpWanted, WrongUse
from grpo_jax.processes import connections

USAGE = """\
Runs a training as several processes on this machine, as a cluster would on several hosts.

  grpo-jax launch --processes=N [--devices=D] [--] ARGUMENTS

  --processes=N   number of processes
  --devices=D     simulated CPU devices of each process; without it, the processes use the devices
                  of this machine, and the GPUs of CUDA_VISIBLE_DEVICES are divided among them
  ARGUMENTS       what `grpo-jax train` takes: --config=quickstart --workdir=runs/first ...

The screen is that of process 0; lines of the others, such as the reason why one fails, begin with
their number: [1]. Ctrl-C and SIGTERM reach all processes: they stop at the same step and save a
checkpoint. If a process dies, the others end too. The exit code is that of the process that failed
first, and that of a single process otherwise (see `grpo-jax train --help`).

It is for tests and for looking at a run of several processes. On a cluster, start the same command
on every host: docs/hosts.md.

Example:
  grpo-jax launch --processes=2 --devices=2 -- --config=quickstart --workdir=runs/two
"""

LEAVE_S = 30.0  # longest time that the others outlast the first process that fails, before SIGKILL.
POLL_S = 0.1
# C++ libraries write these lines to standard output, whatever the level of the log.
NOISE = (b"[Gloo] ",)


@dataclasses.dataclass(frozen=True)
class LaunchArguments:
  """Options of the command."""

  processes: int
  devices: int | None
  arguments: tuple[str, ...]  # of the training.


def parse(words: Sequence[str]) -> LaunchArguments:
  """Reads the arguments of the command.

  Raises:
    HelpWanted: --help was given.
    WrongUse: An option is missing or wrong.
  """
  given: dict[str, str] = {}
  rest = list(words)
  while rest and rest[0] != "--":
    name, equals, value = rest[0].partition("=")
    if name in ("--help", "-h"):
      raise HelpWanted(USAGE)
    if name not in ("--processes", "--devices"):
      break  # the arguments of the training, without "--".
    rest.pop(0)
    if not equals:
      value = rest.pop(0) if rest else ""
    given[name] = value
  rest = rest[1:] if rest[:1] == ["--"] else rest
  for name, value in given.items():
    if not value.isdigit() or not int(value):
      raise WrongUse(f"{name} needs a number from 1 on, got {value!r}")
  if "--processes" not in given:
    raise WrongUse("--processes=N is missing, for example grpo-jax launch --processes=2 -- ...")
  if any(word.partition("=")[0].startswith("--config.distributed.") for word in rest):
    joined = ("coordinator", "processes", "index")
    for word in rest:
      name = word.partition("=")[0].removeprefix("--config.distributed.")
      if name in joined:
        raise WrongUse(f"--config.distributed.{name} is set by launch itself")
  devices = int(given["--devices"]) if "--devices" in given else None
  return LaunchArguments(int(given["--processes"]), devices, tuple(rest))


def main(words: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  options = parse(words)
  with Processes(options) as running:
    return running.wait()


class Processes:
  """The processes of a run on this machine; leaving the block kills what is still running."""

  def __init__(self, options: LaunchArguments):
    self._options = options
    self._processes: list[subprocess.Popen[bytes]] = []
    self._readers: list[threading.Thread] = []
    self._before: dict[int, object] = {}
    self._secret = {connections.SECRET_VARIABLE: secrets.token_hex(32)}

  def __enter__(self) -> "Processes":
    address = f"127.0.0.1:{free_port()}"
    try:
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
          self._before[number] = signal.signal(number, self._pass_on)
      for index in range(self._options.processes):
        self._start(index, address)
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_: object) -> None:
    for process in self._processes:
      if process.poll() is None:
        process.kill()
      process.wait()
    for reader in self._readers:
      reader.join(5)
    for number, handler in self._before.items():
      signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

  def wait(self) -> int:
    """Returns the exit code of the first process that failed, once all have ended."""
    first, deadline = 0, float("inf")
    while any(process.poll() is None for process in self._processes):
      first = first or self._failed()
      if first and deadline == float("inf"):
        deadline = time.monotonic() + LEAVE_S
      if time.monotonic() > deadline:
        break  # leaving the block kills the rest.
      time.sleep(POLL_S)
    code = first or self._failed()
    return 128 - code if code < 0 else code

  def _failed(self) -> int:
    """Returns the exit code of a process that failed; one that died by a signal comes first."""
    codes = [code for process in self._processes if (code := process.poll())]
    return min(codes, default=0)

  def _start(self, index: int, address: str) -> None:
    joined = [
      f"--config.distributed.coordinator={address}",
      f"--config.distributed.processes={self._options.processes}",
      f"--config.distributed.index={index}",
    ]
    own = variables(index, self._options.processes, self._options.devices)
    is_first = index == 0
    process = subprocess.Popen(
      [sys.executable, "-m", "grpo_jax.main", *self._options.arguments, *joined],
      env={**os.environ, **self._secret, **own},
      stdin=None if is_first else subprocess.DEVNULL,
      stdout=None if is_first else subprocess.PIPE,
      stderr=None if is_first else subprocess.STDOUT,
      start_new_session=True,  # a Ctrl-C of the terminal is passed on, once.
    )
    self._processes.append(process)
    if process.stdout is not None:
      reader = threading.Thread(target=_show, args=(process.stdout, index), daemon=True)
      reader.start()
      self._readers.append(reader)

  def _pass_on(self, number: int, frame: object) -> None:
    for process in self._processes:
      if process.poll() is None:
        process.send_signal(number)


def variables(
  index: int, processes: int, devices: int | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
  """Returns the environment variables that give a process its devices.

  Args:
    index: Number of the process.
    processes: Number of processes.
    devices: Number of simulated CPU devices of each process; None: those of this machine.
    environment: Environment variables of this process.

  Raises:
    WrongUse: The GPUs cannot be divided among the processes.
  """
  if devices is not None:
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
  gpus = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
  if not gpus:
    return {}
  each, rest = divmod(len(gpus), processes)
  if rest or not each:
    raise WrongUse(
      f"{len(gpus)} GPUs (CUDA_VISIBLE_DEVICES) cannot be divided among {processes} processes"
    )
  return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * each : (index + 1) * each])}


def free_port() -> int:
  """Returns a port that is free now."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def _show(lines: IO[bytes], index: int) -> None:
  """Prints the lines of a process other than the first, with its number."""
  with lines:
    for line in lines:
      if line.strip() and not line.startswith(NOISE):
        print(f"[{index}] {line.decode(errors='replace').rstrip()}", file=sys.stderr, flush=True)
