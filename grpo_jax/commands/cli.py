"""The console script: `grpo-jax COMMAND …`; `grpo-jax --config=…` trains.

A command is a module with `USAGE`, which --help prints, and `main(arguments)`, which returns the
exit code and may raise what `run_command` reports. Modules are imported when they are asked for,
so that a mistyped name is answered at once.
"""

import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import grpo_jax
from grpo_jax import interrupts
from grpo_jax.commands.arguments import HelpWanted, WrongUse
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import installed
from grpo_jax.values import names

# Name -> module and function, and one line of explanation. The module of `plan` is in packages/.
COMMANDS = {
  "train": ("grpo_jax.commands.train:main", "train a model, or continue a run that was stopped"),
  "launch": ("grpo_jax.commands.launch:main", "train as several processes on this machine"),
  "evaluate": ("grpo_jax.commands.evaluate:main", "measure a model or a run on named test sets"),
  "serve": ("grpo_jax.commands.serve:main", "serve a model as OpenAI's API does, to try agents"),
  "export": ("grpo_jax.commands.export:main", "write a checkpoint as a Hugging Face folder"),
  "report": ("grpo_jax.commands.report:main", "write report.html of a run, finished or not"),
  "plan": ("grpo_plan.command:main", "say whether a run fits a machine that is not present"),
  "compare": ("grpo_jax.commands.compare:main", "print runs side by side, draw their curves"),
  "doctor": (
    "grpo_jax.commands.doctor:main",
    "report what this machine can run, and what is missing",
  ),
}
# Name of a removed command -> what to use instead.
REMOVED = {
  "overlap": (
    "time/sample_s, time/sync_s and time/step_s of a synchronous run say what sampling ahead can"
    " save, perf/overlap_share and perf/trainer_idle_share of an asynchronous run what it saves"
    " (docs/async.md), and grpo-jax plan bounds the times on a machine that is not present"
  )
}
USAGE = "\n".join(
  [
    "Trains language models by GRPO.",
    "",
    "  grpo-jax COMMAND [arguments]",
    "",
    *(f"  {name:<10}{line}" for name, (_, line) in COMMANDS.items()),
    "",
    "  grpo-jax COMMAND --help    explains a command",
    "  grpo-jax --version         prints the version",
    "",
    "Examples:",
    "  grpo-jax doctor",
    "  grpo-jax train quickstart --workdir=runs/first",
    "  grpo-jax report runs/first",
  ]
)
COMPUTING = {"train", "launch", "evaluate", "serve", "export", "plan"}
HELP = {"-h", "--help"}
FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130
UNREAD = 128 + signal.SIGPIPE  # as a shell reports programs that end by this signal.


def run(arguments: Sequence[str]) -> int:
  """Runs one command; returns the exit code.

  Args:
    arguments: Words after `grpo-jax`.
  """
  if not arguments:
    print(USAGE, file=sys.stderr)
    return WRONG_USE
  first, *rest = arguments
  if list(arguments) in (["--help"], ["-h"], ["help"]):
    print(USAGE)
    return 0
  if first == "--version":
    print(f"grpo-jax {grpo_jax.__version__}")
    return 0
  if first.startswith("-"):
    first, rest = "train", list(arguments)
  if first in REMOVED:
    print(f"error: the command {first!r} was removed: {REMOVED[first]}", file=sys.stderr)
    return WRONG_USE
  if first not in COMMANDS:
    hint = names.hint(first, COMMANDS)
    print(
      f"error: there is no command {first!r}{hint}; there are: {', '.join(COMMANDS)}",
      file=sys.stderr,
    )
    return WRONG_USE
  return run_command(first, rest)


def run_command(name: str, arguments: Sequence[str]) -> int:
  """Runs a command of the table; failures that a user can repair are one message.

  Args:
    name: Name in `COMMANDS`.
    arguments: Words after the name.

  Returns:
    The exit code: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
  """
  module, _, function = COMMANDS[name][0].partition(":")

  def command(given: Sequence[str]) -> int:
    if name in COMPUTING and not HELP & {*given}:
      installed.check()
    return getattr(importlib.import_module(module), function)(given)

  return reported(command, arguments)


def reported(program: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
  """Runs a command, or a program of scripts/; returns the exit code, as `run_command` does.

  Args:
    program: Function from the words of the command line to the exit code; None: 0.
    arguments: Words.
  """
  try:
    return program(arguments) or 0
  except HelpWanted as text:
    print(text)
    return 0
  except ExpectedFailure as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE if is_wrong_use(error) else FAILED
  except KeyboardInterrupt:
    return INTERRUPTED


def is_wrong_use(error: ExpectedFailure) -> bool:
  """Returns whether the command was wrong, and not what it worked on."""
  from grpo_jax.config.configuration import ConfigError  # only now: a command may not need it.

  return isinstance(error, WrongUse | ConfigError)


def console() -> None:
  """Runs the console script with the process's arguments; does not return.

  Modules that a config names are found in the working folder, as by `python -m`.
  """
  with contextlib.suppress(FileNotFoundError):  # the working folder was removed.
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
      sys.path.insert(0, os.getcwd())
  try:
    code = run(sys.argv[1:])
    if sys.stdout is not None:
      sys.stdout.flush()
  except BrokenPipeError:
    if sys.stdout is None or not is_unread(sys.stdout):
      raise
    code = UNREAD
  interrupts.leave(code)


def is_unread(stream: TextIO) -> bool:
  """Returns whether the reader of a pipe, such as `head`, has ended."""
  watched = select.poll()
  watched.register(stream, 0)
  return any(events & (select.POLLERR | select.POLLHUP) for _, events in watched.poll(0))


if __name__ == "__main__":
  console()
