"""The sandboxed process of the tests: asks a program for values and compares them.

It knows the expected values, but only the answers of the program.
"""

import ast
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from grpo_sandbox import asserts, candidate, remote, wire

MAX_SUITE = 1 << 27  # size of a suite in bytes: test files may be large.
MAX_VERDICT = 1 << 15


class BadTests(Exception):
  """The tests cannot be run, whatever the program does."""


def answer(requests: int, replies: int, max_bytes: int) -> None:
  """Reads a suite from standard input, and writes the verdict to standard output.

  Args:
    requests: Pipe to the program.
    replies: Pipe from the program.
    max_bytes: Length of the longest message of the program.
  """
  suite = wire.receive(0, MAX_SUITE)
  channel = os.dup(1)
  for stream in (0, 1):  # tests may print.
    candidate.silence(stream)
  wire.send(channel, verdict(suite, remote.Link(requests, replies, max_bytes)), MAX_VERDICT)
  os._exit(0)  # does not wait for threads of the tests.


def verdict(suite: dict[str, Any], link: remote.Link) -> dict[str, Any]:
  """Judges the program behind a link.

  Args:
    suite: Mapping {"sources": the program, as pieces of code that are run in turn; "given": code
      of the task that the program begins with (if it is missing, all sources but the last);
      "setup": code of the data that the tests may use; "tests": pieces of test code; "entry": name
      of the function under test, or ""; "cases": [[arguments, expected], …] for it}.
    link: Link to the program.

  Returns:
    {"passed", "failed"}: numbers of assertions; "first": the first failure; "compile":
    True if the program is not Python; "gone": why the program ended too early, "" if it did
    not; "over": the limit that it reached, "memory", "output" or "". Or {"bad_tests": reason}.
  """
  count = _Count()
  try:
    tests = _Tests(suite)
    count.written = tests.number
    link.codec.sent = link.errors = tests.classes
    link.codec.taken = tests.classes_of_the_program
    failure = link.load(suite["sources"])
    if failure:
      count.failed(f"{failure['error'][0]}: {failure['message']}")
      return count.result(compile_error="compile" in failure)
    tests.run(link, count)
    if not count.total and not link.questions:
      tests.check_that_they_ask(link)
      count.failed("nothing was asserted")
  except BadTests as error:
    return {"bad_tests": str(error)[:500]}
  except remote.Gone:
    count.failed("the program has ended")
  except ImportError as error:
    if not link.questions:  # the program cannot have caused it.
      return {"bad_tests": f"{type(error).__name__}: {error}"[:500]}
    count.failed(f"{type(error).__name__}: {error}")
  except Exception as error:  # mostly values that are too large for this process.
    count.failed(f"{type(error).__name__}: {error}")
  return count.result(gone=link.gone, over=link.over)


class _Count:
  """Counts assertions as they are made."""

  def __init__(self):
    self.written = 0  # assertions in the test code; those not reached count as failed.
    self._passed = 0
    self._failures: list[str] = []

  @property
  def total(self) -> int:
    return self._passed + len(self._failures)

  def passed(self) -> None:
    self._passed += 1

  def failed(self, what: str) -> None:
    self._failures.append(what[:300])

  def failed_assertion(self, text: str) -> None:
    """Records a failure; within an except block, adds what the program raised to the text."""
    kind, error, _ = sys.exc_info()
    says_more = kind is not None and kind is not AssertionError
    self.failed(f"{text}: {kind.__name__}: {error}" if kind and says_more else text)

  def result(
    self, *, compile_error: bool = False, gone: str = "", over: str = ""
  ) -> dict[str, Any]:
    first = self._failures[0] if self._failures else ""
    failed = len(self._failures) and max(len(self._failures), self.written - self._passed)
    return {
      "passed": self._passed,
      "failed": failed,
      "first": first.encode(errors="replace").decode(),
      "compile": compile_error,
      "gone": gone,
      "over": over,
    }


class _Tests:
  """A compiled suite, with the names that its setup defines."""

  def __init__(self, suite: dict[str, Any]):
    """Compiles the tests and runs the setup; the program is not asked yet.

    Raises:
      BadTests: The tests are not Python, or the setup raises.
    """
    self._entry, self._cases = suite["entry"], suite["cases"]
    module = types.ModuleType("tests")
    sys.modules["tests"] = sys.modules["__main__"] = module  # where unittest.main() looks.
    self._space = vars(module)
    try:
      setup = ast.parse(suite["setup"])
      trees = [asserts.counted(source) for source in suite["tests"]]
      self._codes = [compile(t, "<tests>", "exec", dont_inherit=True) for t in trees]
      exec(compile(setup, "<setup>", "exec", dont_inherit=True), self._space)
    except (SyntaxError, ValueError, RecursionError) as error:
      raise BadTests(f"the tests are not Python: {error}") from error
    except Exception as error:  # the setup comes from the data, and may raise anything.
      raise BadTests(f"the setup raises {type(error).__name__}: {error}") from error
    if not self._cases and not any(asserts.does_anything(tree) for tree in trees):
      raise BadTests("the tests call nothing and assert nothing")
    self.number = sum(asserts.number(tree) for tree in trees) + len(self._cases)
    self._free = set().union(*(asserts.free_names(t) for t in trees))
    self._stubs = asserts.stubs(setup)
    self._given = asserts.bound_names(suite.get("given") or "\n".join(suite["sources"][:-1]))

  @property
  def classes(self) -> dict[str, type]:
    """Returns the classes that the setup defines, except those that the program must write."""
    mine = {n: v for n, v in self._space.items() if isinstance(v, type)}
    theirs = {*self._stubs, self._entry}
    return {n: c for n, c in mine.items() if c.__module__ == "tests" and n not in theirs}

  @property
  def classes_of_the_program(self) -> dict[str, type]:
    """Returns the classes that the program was given, and may make instances of.

    A program may not send instances of other classes: it could choose the attributes of an object
    that decides, by its `__eq__`, what is right.
    """
    return {n: c for n, c in self.classes.items() if n in self._given}

  def run(self, link: remote.Link, count: _Count) -> None:
    """Runs all tests."""
    space = self._space
    self._bind(link)
    link.questions = 0  # from here on, questions of the tests.
    space |= {asserts.PASSED: count.passed, asserts.FAILED: count.failed_assertion}
    space[asserts.FAILURES] = (Exception, remote.Gone)
    for code in self._codes:
      self._guarded(lambda code=code: exec(code, space), count)
    if self._has_check():
      if not self._entry:
        raise BadTests("there is check(candidate), but no entry_point that says what to check")
      if not link.questions:  # unless the tests called it themselves.
        self._guarded(lambda: space["check"](space["candidate"]), count)
    for args, expected in self._cases:
      self._case(args, expected, count)
    if "unittest" in sys.modules:
      _run_test_cases(space, count)

  def check_that_they_ask(self, link: remote.Link) -> None:
    """Raises BadTests if tests ran without asking the program anything through their own fault.

    It is their fault unless they read values of the program: those may have stopped them.
    """
    read = link.names & {*self._free, self._entry}
    if all(isinstance(self._space.get(name), remote.Remote) for name in read):
      raise BadTests(
        "the tests end without asking the program anything: do they define functions that are never"
        " called?"
      )

  def _has_check(self) -> bool:
    check = self._space.get("check")
    return isinstance(check, types.FunctionType) and check.__module__ == "tests"

  def _bind(self, link: remote.Link) -> None:
    """Gives the tests the program's names. Names from the setup are kept, except for stubs."""
    for name in sorted(self._free & link.names):
      if name not in self._space or name in self._stubs:
        self._space[name] = link.name(name)
    if self._entry:
      self._space["candidate"] = self._space[self._entry] = _entry(link, self._entry)

  def _guarded(self, run: Callable[[], Any], count: _Count) -> None:
    """Runs a piece of the tests; if it raises, that is one failure, and the others still run."""
    try:
      run()
    except (ImportError, BadTests):
      raise
    except SystemExit as error:  # the test ends itself.
      if error.code:
        count.failed(f"SystemExit: {error.code}")
    except (Exception, remote.Gone) as error:  # a call outside of an assertion raised.
      count.failed(f"{type(error).__name__}: {error}")

  def _case(self, args: list[Any], expected: Any, count: _Count) -> None:
    try:
      value = self._space["candidate"](*args)
      is_right = _listed(value) == _listed(expected)
    except (Exception, remote.Gone) as error:  # anything that the program raised.
      return count.failed(f"{type(error).__name__}: {error}")
    return count.passed() if is_right else count.failed(f"wrong result for {str(args):.200}")


def _entry(link: remote.Link, name: str) -> Any:
  """Returns the function under test, or one that fails because the model did not write it.

  A method of a class `Solution` is found as well.
  """
  if name in link.names:
    return link.name(name)
  if "Solution" in link.names:
    return lambda *args, **kwargs: _method(link, name)(*args, **kwargs)

  def missing(*_: Any, **__: Any) -> None:
    raise NameError(f"the program defines no {name}")

  return missing


def _method(link: remote.Link, name: str) -> Any:
  return getattr(link.name("Solution")(), name)


def _listed(value: Any) -> Any:
  """Returns tuples as lists, because JSON has no tuples."""
  if isinstance(value, (list, tuple)):
    return [_listed(v) for v in value]
  return {k: _listed(v) for k, v in value.items()} if isinstance(value, dict) else value


def _run_test_cases(space: dict[str, Any], count: _Count) -> None:
  """Runs the classes of unittest that the tests define.

  A method is one assertion, and so is each of its sub-tests that fails.
  """
  import unittest

  class Result(unittest.TestResult):
    def addSuccess(self, test: unittest.TestCase) -> None:
      count.passed()

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
      count.failed(f"{test}: {err[1]}")

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
      if err is not None:
        self.addFailure(subtest, err)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
      count.passed()

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
      count.failed(f"{test}: a success that was not expected")

  loader = unittest.TestLoader()
  for value in list(space.values()):
    if isinstance(value, type) and issubclass(value, unittest.TestCase):
      loader.loadTestsFromTestCase(value).run(Result())
