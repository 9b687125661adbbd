"""Reads the tests of a coding task from the fields of its row. Pure.

docs/code_environment.md has a table of the supported forms.
"""

import ast
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = ("test", "tests", "test_list", "unit_tests", "input_output", "verifier_metadata")


class TestError(ValueError):
  """A row without tests that can be run."""


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionTests:
  """Functions to call, and assertions about what they return."""

  tests: tuple[str, ...] = ()  # pieces of test code.
  entry: str = ""  # name of the function under test.
  setup: str = ""  # code that runs before the tests.
  prompt_code: str = ""  # the prompt, if it is code for the completion to continue.
  cases: tuple[tuple[list[Any], Any], ...] = ()  # (arguments, expected result).


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramTests:
  """A program to run: its inputs, and what it must print."""

  cases: tuple[tuple[str, str], ...]
  entry: str = ""
  prompt_code: str = ""


def read(info: Mapping[str, Any], key: str | None = None) -> FunctionTests | ProgramTests:
  """Reads the tests of a row.

  Args:
    info: Fields of the row.
    key: Field that holds the tests; None: the first of FIELDS that is present, otherwise
      `expected_answer`.

  Raises:
    TestError: There are no tests, or their form is unknown.
  """
  if key is None:
    key = next((name for name in (*FIELDS, "expected_answer") if info.get(name)), None)
  if key is None or not info.get(key):
    raise TestError(f"the code environment needs tests in one of {', '.join(FIELDS)}")
  entry = str(info.get("entry_point") or info.get("fn_name") or "")
  prompt_code = _prompt_code(str(info.get("problem", "")), entry)
  setup = "\n".join([prompt_code, *_setup(info)])
  tests = _loaded(info[key])
  while isinstance(tests, Mapping) and isinstance(tests.get("unit_tests"), Mapping | list | str):
    tests = _loaded(tests["unit_tests"])
  if isinstance(tests, str):
    return FunctionTests((tests,), entry, setup, prompt_code)
  if isinstance(tests, Mapping):
    return _from_columns(tests, entry, setup, prompt_code, key)
  if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):
    return FunctionTests(tuple(tests), entry, setup, prompt_code)
  if isinstance(tests, list) and tests and all(isinstance(t, Mapping) for t in tests):
    columns = {
      "inputs": [_input(t, key) for t in tests],
      "outputs": [_output(t, key) for t in tests],
    }
    return _from_columns(columns, entry, setup, prompt_code, key)
  raise TestError(f"{key}: tests are code, a list of code, or inputs and outputs: {str(tests):.80}")


def same_output(printed: str, expected: str) -> bool:
  """Compares output, ignoring blanks at the ends of lines and blank lines at the end."""
  return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().splitlines()]


def _loaded(value: Any) -> Any:
  """Returns the value of a string that is JSON; other values unchanged."""
  if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
    try:
      return json.loads(value)
    except ValueError:
      return value
  return value


def _prompt_code(problem: str, entry: str) -> str:
  """Returns the prompt, if it is Python that begins the function under test; otherwise ""."""
  if not entry:
    return ""
  try:
    tree = ast.parse(problem)
  except (SyntaxError, ValueError, RecursionError):
    return ""
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  names = {node.name for node in tree.body if isinstance(node, kinds)}
  return problem if entry in names else ""


def _setup(info: Mapping[str, Any]) -> list[str]:
  """Returns the row's code that the tests need: MBPP's, in its two forms."""
  code = info.get("test_setup_code") or info.get("test_imports") or []
  return [code] if isinstance(code, str) else [str(line) for line in code]


def _from_columns(
  tests: Mapping[str, Any], entry: str, setup: str, prompt_code: str, key: str
) -> FunctionTests | ProgramTests:
  """Reads inputs and outputs: of a function, if one is named, otherwise of a program."""
  inputs, outputs = tests.get("inputs"), tests.get("outputs")
  if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
    raise TestError(f"{key}: needs lists 'inputs' and 'outputs', has {', '.join(map(str, tests))}")
  if len(inputs) != len(outputs):
    raise TestError(f"{key}: {len(inputs)} inputs and {len(outputs)} outputs")
  entry = str(tests.get("fn_name") or entry)
  if entry and not all(isinstance(x, str) for x in (*inputs, *outputs)):
    cases = tuple(zip((_arguments(x, key) for x in inputs), outputs, strict=True))
    return FunctionTests((), entry, setup, prompt_code, cases)
  if tests.get("fn_name"):  # LiveCodeBench: one argument per line, as JSON.
    cases = tuple((_json_lines(x, key), _json(y)) for x, y in zip(inputs, outputs, strict=True))
    return FunctionTests((), entry, setup, prompt_code, cases)
  pairs = tuple((_text(x), _text(y)) for x, y in zip(inputs, outputs, strict=True))
  return ProgramTests(pairs)


def _input(test: Mapping[str, Any], key: str) -> Any:
  return _one_of(test, ("input", "args", "stdin"), key)


def _output(test: Mapping[str, Any], key: str) -> Any:
  return _one_of(test, ("output", "expected", "expected_output", "stdout"), key)


def _one_of(test: Mapping[str, Any], names: Sequence[str], key: str) -> Any:
  for name in names:
    if name in test:
      return test[name]
  raise TestError(f"{key}: a test needs one of {', '.join(names)}, has {', '.join(test)}")


def _arguments(value: Any, key: str) -> list[Any]:
  if not isinstance(value, list):
    raise TestError(f"{key}: a function's input is the list of its arguments: {str(value):.80}")
  return value


def _json_lines(text: str, key: str) -> list[Any]:
  try:
    return [json.loads(line) for line in text.splitlines() if line.strip()]
  except ValueError as error:
    raise TestError(f"{key}: an argument is not JSON: {text:.80}") from error


def _json(text: str) -> Any:
  try:
    return json.loads(text)
  except ValueError:
    return text


def _text(value: Any) -> str:
  """Returns what a program reads or prints as a string; a list holds its lines."""
  return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
