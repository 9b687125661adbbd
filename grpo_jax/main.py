"""The program: `python -m grpo_jax.main --config=configs/quickstart.py --workdir=runs/first`.

Whatever is wrong with the command or the configuration is said in one message, before
JAX is imported or, for combinations that cannot work, before a model is loaded.
"""

import contextlib
import datetime
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import IO

from grpo_jax import interrupts
from grpo_jax.config import command_line, configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import shared_places
from grpo_jax.run_folder import output

WRONG_USE = 2
FAILED = 1


def main(arguments: Sequence[str]) -> int:
  """Runs one training; returns the exit code (see `command_line.USAGE`)."""
  with output.lasting() as streams:
    try:
      command = command_line.parse(arguments)
      with interrupts.Flag() as stop:
        failed = run(command, stop, streams)
    except command_line.HelpWanted as text:
      print(text)
      return 0
    except ConfigError as error:
      print(f"error: {error}", file=sys.stderr)
      return WRONG_USE
    return FAILED if failed else stop.exit_code


def run(
  command: command_line.Command, stop: interrupts.Flag, streams: Sequence[output.Lasting] = ()
) -> bool:
  """Runs the training that was asked for, and says so if it was stopped.

  Returns whether it failed by what a user can repair, and was told so. Other failures are raised.

  The flag is up before JAX is imported: a KeyboardInterrupt in the midst of that can be
  swallowed by an extension module, and the run would continue.

  Args:
    command: what to run.
    stop: of the signals.
    streams: standard output and error; what they cannot take goes to the run folder.

  Raises:
    ConfigError: the configuration cannot work, or the run folder cannot be used.
  """
  from grpo_jax import train  # only now: it takes seconds, and mistakes should not.

  configuration.check(command.config, [train.validate])
  if stop:
    print("stopped before the run began", flush=True)
    return False
  workdir = command.workdir or new_workdir(command.config_path)
  with claim(workdir):
    for stream in streams:
      stream.file = workdir / output.NAME
    print(f"run folder: {workdir}", flush=True)
    try:
      train.train(command.config, workdir, stop=stop)
    except ConfigError:
      raise
    except ExpectedFailure as error:
      print(f"error: {error}", file=sys.stderr)
      print(f"the same command with --workdir={workdir} continues", file=sys.stderr)
      return True
  if stop:
    print(f"stopped; the same command with --workdir={workdir} continues", flush=True)
  return False


def new_workdir(config_path: str, *, root: pathlib.Path = pathlib.Path("runs")) -> pathlib.Path:
  """Makes runs/CONFIG-DATE-TIME and returns it; numbered if another run began in this second.

  Raises:
    ConfigError: the folder cannot be made.
  """
  stem = pathlib.Path(config_path.partition(":")[0]).stem
  name = f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
  number = 1
  while True:
    path = root / (name if number == 1 else f"{name}-{number}")
    try:
      path.mkdir(parents=True)
      return path
    except FileExistsError:
      number += 1
    except OSError as error:
      raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error


def claim(workdir: pathlib.Path) -> IO[str]:
  """Makes the run folder if needed, and takes it for this process until the file is closed.

  Two processes in one folder would destroy each other's checkpoints. The claim ends with
  the process, however it ends.

  Raises:
    ConfigError: another process has it, or it cannot be made or written.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = shared_places.open_lock(workdir / ".lock", of_others=True)
  except OSError as error:
    raise ConfigError(f"cannot use --workdir={workdir}: {error.strerror}") from error
  if not shared_places.try_lock(lock):
    owner = lock.read().strip()
    lock.close()
    raise ConfigError(f"--workdir={workdir} is in use by another run (process {owner})")
  try:
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
  except OSError as error:
    with contextlib.suppress(OSError):
      lock.close()
    raise ConfigError(f"cannot use --workdir={workdir}: {error.strerror}") from error
  return lock


def console() -> None:
  """Runs the console script `grpo-jax`: `main` with the process's arguments; does not return."""
  interrupts.leave(main(sys.argv[1:]))


if __name__ == "__main__":
  console()
