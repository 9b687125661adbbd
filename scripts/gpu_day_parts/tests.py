"""The tests of `make test-gpu`: the compiled kernels at the sizes of real models."""

import pathlib
from typing import Any

from gpu_day_parts import child, running

TITLE = "the tests of `make test-gpu`"
LIMIT_S = 240.0
FOLDER = "tests/kernels"


class Outcomes:
  """A plugin of pytest that records the outcome of every test as soon as it is known."""

  def __init__(self, record: child.Record):
    self._record = record
    self.collected = 0
    self.passed: list[str] = []
    self.failed: dict[str, str] = {}  # test → reason.
    self.skipped: dict[str, str] = {}

  def pytest_collection_finish(self, session: Any) -> None:
    self.collected = len(session.items)

  def pytest_collectreport(self, report: Any) -> None:
    if report.failed:
      self._add(self.failed, report)

  def pytest_runtest_logreport(self, report: Any) -> None:
    if report.failed:
      self._add(self.failed, report)
    elif report.skipped:
      self._add(self.skipped, report)
    elif report.when == "call":
      self.passed.append(report.nodeid)
    counts = {name: len(getattr(self, name)) for name in ("passed", "failed", "skipped")}
    self._record.put(
      **{"collected": self.collected, "passed": self.passed, "failed": self.failed},
      skipped=self.skipped,
      headline=", ".join(f"{count} {name}" for name, count in counts.items()),
    )

  def _add(self, where: dict[str, str], report: Any) -> None:
    """Keeps the last line of a reason, such as "E  AssertionError: 0.3 of 0.1"."""
    reason = report.longrepr
    lines = str(reason[2] if isinstance(reason, tuple) else reason).strip().splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    where.setdefault(report.nodeid, (errors or lines or ["no reason"])[0][:300])


def measure(record: child.Record, settings: running.Settings) -> None:
  """Runs the tests that are marked `gpu`.

  Raises:
    Skipped: Every test was skipped; with the reason.
    RuntimeError: Tests failed, or did not run.
  """
  child.open_device(record, settings)
  import pytest

  tests = sorted((running.ROOT / FOLDER).glob("test_*.py"))
  files = [str(path) for path in tests if "pytest.mark.gpu" in path.read_text()]
  # The suite's own settings need plugins that a borrowed machine may lack.
  ini = pathlib.Path(settings.scratch) / "pytest.ini"
  ini.write_text("[pytest]\nmarkers =\n  gpu: needs an NVIDIA GPU\n")
  options = ["-v", "--noconftest", "-W", "default", "-m", "gpu", "-c", str(ini)]
  options += ["--rootdir", str(running.ROOT), "-p", "no:cacheprovider", *files]
  found = Outcomes(record)
  judge(found, int(pytest.main(options, plugins=[found])))


def judge(found: Outcomes, code: int) -> None:
  """Raises unless all tests passed; a few skipped tests are accepted if others passed.

  Args:
    found: Outcomes of the tests.
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
