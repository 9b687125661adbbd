"""The program: `python -m grpo_jax.main --config=configs/quickstart.py --workdir=runs/first`.

A mistake in the command or the configuration is reported in one message: before JAX is imported
or, for combinations that cannot work, before a model is loaded.
"""

import datetime
import logging
import pathlib
import sys
import traceback
from collections.abc import Sequence

from grpo_jax import interrupts, processes
from grpo_jax.compilation import gpu_share
from grpo_jax.config import command_line, configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import installed, local_paths
from grpo_jax.processes import starting
from grpo_jax.run_folder import notices, output, workdirs

_log = logging.getLogger("grpo_jax.main")  # __name__ is "__main__" for the program.

WRONG_USE = 2
FAILED = 1


def main(arguments: Sequence[str]) -> int:
  """Runs one training; returns the exit code (see `command_line.USAGE`)."""
  with output.lasting() as streams, notices.for_program():
    try:
      command = command_line.parse(arguments)
      with interrupts.Flag() as stop:
        failed = run(command, stop, streams)
    except command_line.HelpWanted as text:
      print(text)
      return 0
    except ExpectedFailure as error:  # of the command, the configuration or the run folder.
      report_failure(error)
      return left(error.exit_code)
    except Exception as error:  # a mistake in a program: of this package, or of a user's function.
      if processes.count() == 1:
        raise
      processes.may_report()
      traceback.print_exception(error)
      return left(FAILED)
    return left(failed or stop.exit_code)


def left(code: int) -> int:
  """Returns the exit code of this process; does not return if others end with a failure.

  Args:
    code: Exit code; 0 if the run is done.
  """
  if processes.count() == 1:
    return code
  try:
    code = starting.finish(code)
  except ExpectedFailure as error:
    report_failure(error)
    code = code or error.exit_code
  if code:
    processes.leave(code)
  return code


def run(
  command: command_line.Command,
  stop: interrupts.Flag,
  streams: Sequence[output.FallbackStream] = (),
) -> int:
  """Runs the training that a command asks for.

  The flag is set up before JAX is imported: an extension module can swallow a KeyboardInterrupt
  during the import, and the run would continue.

  Args:
    command: Parsed command line.
    stop: Flag raised by signals.
    streams: Standard output and error; what they cannot write goes to the run folder.

  Returns:
    The exit code: 0, or that of a failure that a user can repair and that has been reported.

  Raises:
    ConfigError: The configuration cannot work.
    UnusableFolder: The run folder cannot be used.
    WrongPackages: The installed packages are not those that grpo_jax needs.
  """
  workdirs.check(command.workdir)
  installed.check()
  gpu_share.set_for_run(command.config.get("engine"))
  try:
    starting.start(command.config.get("distributed"), stop)
  except interrupts.Stopped:
    return 0  # while the processes joined.
  try:
    with processes.watching(stop), processes.failing():
      return run_joined(command, stop, streams)
  except interrupts.Stopped:  # on any process, before or after the training; it has its exit code.
    return 0


def run_joined(
  command: command_line.Command,
  stop: interrupts.Flag,
  streams: Sequence[output.FallbackStream] = (),
) -> int:
  """Runs the training of a command, beside the other processes if there are any; see `run`."""
  from grpo_jax import train  # late: it takes seconds, which a mistyped command should not.

  processes.together(
    lambda: configuration.check(command.config, [train.validate]), what="the check of the config"
  )
  if stop:
    _log.info("stopped before the run began")
    processes.give_up(interrupts.Stopped())
    return 0
  starting.allow_open_files()
  workdir = shared_workdir(command)
  processes.continues(how_to_continue(workdir))
  try:
    with workdirs.opened(workdir, stop=stop) as folder:
      for stream in streams if processes.is_main() else ():
        stream.file = folder / output.NAME
      if folder == workdir:
        _log.info("run folder: %s", workdir)
      train.train(command.config, folder, stop=stop)
  except ExpectedFailure as error:
    processes.give_up(error)
    if error.exit_code == WRONG_USE:
      raise
    report_failure(error, how_to_continue(workdir))
    return error.exit_code
  except interrupts.Stopped as stopped:  # while the run folder was opened.
    processes.give_up(stopped)
  if stop:
    _log.info("stopped; %s", how_to_continue(workdir))
  return 0


def how_to_continue(workdir: pathlib.Path | str | None) -> str:
  """Returns the last line of a run that ended early."""
  return f"the same command with --workdir={workdir} continues"


def report_failure(error: ExpectedFailure, *more: str) -> None:
  """Writes the reason why the program ends to standard error.

  Args:
    error: Failure that ends the program.
    more: Further lines; the main process writes them.
  """
  for line in processes.lines_of(error, *more) if processes.may_report() else []:
    print(line, file=sys.stderr)


def shared_workdir(command: command_line.Command) -> pathlib.Path | str:
  """Returns the run folder of a command; the main process names it for all processes.

  Raises:
    ConfigError: A new folder cannot be made.
  """
  named = ""
  if processes.is_main():
    named = str(command.workdir or new_workdir(command.config_path))
  named = processes.broadcast(named)
  return named if local_paths.is_url(named) else pathlib.Path(named)


def new_workdir(config_path: str, *, root: pathlib.Path = pathlib.Path("runs")) -> pathlib.Path:
  """Makes and returns runs/CONFIG-DATE-TIME, numbered if another run began in the same second.

  Raises:
    ConfigError: The folder cannot be made.
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


def console() -> None:
  """Runs the console script `grpo-jax`: `main` with the process's arguments; does not return."""
  interrupts.leave(main(sys.argv[1:]))


if __name__ == "__main__":
  console()
