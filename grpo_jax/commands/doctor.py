"""`grpo-jax doctor`: what this machine can run, what will be slow or refused, and the repair."""

import functools
import os
import pathlib
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from grpo_jax.commands import diagnosis
from grpo_jax.commands.arguments import Parser
from grpo_jax.commands.diagnosis import FATAL, OK, PROBLEM, Finding
from grpo_jax.files import local_paths

USAGE = """\
Checks what this machine can run, what will be slow or refused, and says how to repair it.

  grpo-jax doctor [--workdir=FOLDER] [--sglang=PYTHON]

  --workdir   folder in which runs will be written (runs): is there space, may it be written?
  --sglang    Python of SGLang's environment (.venv-sglang/bin/python).

It starts JAX, the sandbox and SGLang's Python in processes of their own, changes nothing, and ends
after at most 90 seconds, usually after a few.

Exit codes: 0 training can run here; 1 it cannot; 2 wrong use.
"""
DEADLINE_S = 90.0
SGLANG_PYTHON = ".venv-sglang/bin/python"  # the default of engine.sglang.python.
_SUBJECT = 11  # width of a column.

Check = Callable[[], Iterable[Finding]]


def main(arguments: Sequence[str]) -> int:
  """Prints the findings; returns the exit code.

  Args:
    arguments: Words after `grpo-jax doctor`.
  """
  parser = Parser(USAGE)
  parser.add_argument("--workdir", type=local_paths.argument, default=pathlib.Path("runs"))
  parser.add_argument("--sglang", default=SGLANG_PYTHON, metavar="PYTHON")
  options = parser.read(arguments)
  checks: dict[str, Check] = {
    "python": diagnosis.python,
    "packages": diagnosis.packages,
    "devices": diagnosis.devices,
    "memory": diagnosis.memory,
    "cores": diagnosis.cores,
    "processes": diagnosis.several_processes,
    "disk": functools.partial(diagnosis.disk, options.workdir),
    "sandbox": diagnosis.sandbox,
    "sglang": functools.partial(diagnosis.sglang, options.sglang),
  }
  found = []
  for finding in findings(checks):
    found.append(finding)
    print(shown(finding), flush=True)
  print(f"\n{verdict(found)}")
  return int(any(finding.level == FATAL for finding in found))


def findings(checks: dict[str, Check], deadline_s: float = DEADLINE_S) -> Iterable[Finding]:
  """Runs checks beside each other and yields what they find, in their order.

  A check that does not end, for example at a file system that hangs, is given up.

  Args:
    checks: Subject -> check.
    deadline_s: Time for all of them, in seconds.
  """
  found: dict[str, list[Finding]] = {}
  threads = []
  for subject, check in checks.items():
    arguments = (subject, check, found)
    threads.append(threading.Thread(target=_run, args=arguments, name=subject, daemon=True))
    threads[-1].start()
  end = time.monotonic() + deadline_s
  for thread in threads:
    thread.join(max(end - time.monotonic(), 0))
    late = Finding(PROBLEM, thread.name, f"could not be checked in {deadline_s:g} s")
    yield from found.get(thread.name, [late])


def _run(subject: str, check: Check, found: dict[str, list[Finding]]) -> None:
  try:
    found[subject] = list(check())
  except Exception as error:  # a broken machine may raise anything; the other checks continue.
    text = f"could not be checked: {type(error).__name__}: {error}"
    found[subject] = [Finding(PROBLEM, subject, text)]


def shown(finding: Finding) -> str:
  """Returns the lines of a finding: level, subject, text; below, the repair."""
  margin = " " * (9 + _SUBJECT)
  width = max(shutil.get_terminal_size((100, 24)).columns - 1, 60)
  mark = "" if finding.level == OK else finding.level
  first = f"{mark:<9}{finding.subject:<{_SUBJECT}}{finding.text}"
  wrap = functools.partial(textwrap.wrap, width=width, subsequent_indent=margin)
  lines = wrap(first, break_long_words=False, break_on_hyphens=False)
  if finding.repair:
    lines.append(f"{margin}→ {finding.repair}")  # not wrapped: it is there to be copied.
  return "\n".join(lines)


def verdict(found: Sequence[Finding]) -> str:
  """Returns the last line."""
  fatal = [finding for finding in found if finding.level == FATAL]
  problems = [finding for finding in found if finding.level == PROBLEM]
  if fatal:
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in fatal))
    return f"Training cannot run here: {subjects}."
  if problems:
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in problems))
    return f"Training can run here, with problems: {subjects}."
  return f"Training can run here. Try: grpo-jax train quickstart --workdir=runs{os.sep}quickstart"
