"""The tests of `make test-gpu`: the compiled Hopper kernel at the sizes of real models."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

from gpu_day_parts import child, running

_OUTCOME = re.compile(
  r"^(\S+::\S.*?) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))?(?:\s+\[ *\d+%\])?$"
)
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?) - (.*)$")
_COLLECTED = re.compile(r"^collect(?:ed|ing).*?(\d+) items?(?: / (\d+) deselected)?")


@dataclasses.dataclass
class Outcomes:
  """The outcomes in pytest's output so far. Names are those of tests, without the file."""

  collected: int = 0
  passed: list[str] = dataclasses.field(default_factory=list)
  failed: dict[str, str] = dataclasses.field(default_factory=dict)  # test → reason.
  skipped: dict[str, str] = dataclasses.field(default_factory=dict)

  def read(self, line: str) -> bool:
    """Reads a line of `pytest -v`; returns whether it contained anything new."""
    line = line.rstrip()
    if match := _COLLECTED.match(line):
      self.collected = int(match[1]) - int(match[2] or 0)
    elif match := _OUTCOME.match(line):
      name, outcome, reason = match[1].split("::", 1)[1], match[2], match[3] or ""
      if outcome == "PASSED":
        self.passed.append(name)
      else:
        (self.skipped if outcome == "SKIPPED" else self.failed)[name] = reason
    elif match := _REASON.match(line):
      self.failed[match[1].split("::", 1)[1]] = match[2]
    else:
      return False
    return True


def outcomes(lines: Iterable[str]) -> Outcomes:
  """Returns the outcomes in all lines of `pytest -v`."""
  found = Outcomes()
  for line in lines:
    found.read(line)
  return found


def measure(record: child.Record, settings: running.Settings, *, file: str) -> None:
  """Runs the tests of a file that are marked `gpu`.

  Args:
    record: Record of the outcome of every test, written as soon as it is known.
    settings: Settings of the day.
    file: Path of the tests, from the root of the repository.

  Raises:
    Skipped: Every test was skipped; with the reason.
    RuntimeError: Tests failed, or did not run.
  """
  # JAX is not started here: only one process can use a TPU.
  # The suite's own settings need plugins that a borrowed machine may lack.
  ini = pathlib.Path(settings.scratch) / "pytest.ini"
  ini.write_text("[pytest]\nmarkers =\n  gpu: needs an NVIDIA GPU\n")
  command = [sys.executable, "-m", "pytest", "-v", "--noconftest", "-W", "default", "-m", "gpu"]
  command += ["-c", str(ini), "--rootdir", str(running.ROOT), "-p", "no:cacheprovider", file]
  process = subprocess.Popen(
    command,
    cwd=running.ROOT,
    env={**os.environ, "COLUMNS": "300"},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  found = Outcomes()
  assert process.stdout
  for line in process.stdout:
    print(line, end="")
    if found.read(line):
      record.put(**dataclasses.asdict(found))
  code = process.wait()
  judge(found, code)


def judge(found: Outcomes, code: int) -> None:
  """Raises unless all tests passed; a few skipped tests are accepted if others passed.

  Args:
    found: Outcomes in pytest's output.
    code: Exit code of pytest.

  Raises:
    Skipped: Every test was skipped.
    RuntimeError: Tests failed, or did not run.
  """
  seen = len(found.passed) + len(found.failed) + len(found.skipped)
  if found.failed:
    raise RuntimeError(f"{len(found.failed)} of {found.collected} tests failed")
  if code or seen < found.collected or not seen:
    missing = found.collected - seen
    raise RuntimeError(f"pytest ended with exit code {code}; {missing} tests did not run")
  if not found.passed:
    raise child.Skipped(f"all {seen} tests: {next(iter(found.skipped.values()))}")
