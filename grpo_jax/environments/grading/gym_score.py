"""Scores an answer with the scorer of a reasoning-gym task. That scorer may do anything.

Some scorers pass the answer to `eval` or to SymPy's parser, which runs it: `computes` finds them.
In a sandbox, `prepare` has replaced `eval` by a function that runs nothing.
"""

import functools
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from grpo_sandbox import expressions

# Functions that run text, however they were imported.
_RUNNING = {
  *("eval", "exec", "compile", "__import__", "import_module", "subprocess", "Popen", "system"),
  *("parse_expr", "sympify", "S", "lambdify", "numexpr", "pickle", "marshal", "unsafe_load"),
}


def prepare() -> None:
  """Makes scorers harmless. For use in a sandbox only: it changes the packages."""
  expressions.guard("reasoning_gym")


def score(task: str, args: Mapping[str, Any], answer: str, entry: dict[str, Any]) -> float:
  """Returns the task's score of an answer, usually in [0, 1].

  Args:
    task: Name of the reasoning-gym dataset.
    args: Arguments of the task, size and seed included.
    answer: Answer of the model.
    entry: Row of the dataset: question, answer, metadata.
  """
  return float(dataset(task, json.dumps(args)).score_answer(answer, entry))


def has_plain_scorer(task: str) -> bool:
  """Returns whether the task only compares strings; that is safe."""
  return _class_of(task).score_answer is ProceduralDataset.score_answer


@functools.cache
def computes(task: str) -> bool:
  """Returns whether the task's scorer calls something that runs text, judged by its compiled code.

  The check follows everything in the package that the scorer can call. It may therefore also report
  a task whose scorer runs nothing but its own question.
  """
  cls = _class_of(task)
  waiting, seen = [cls.score_answer], set()
  while waiting:
    function = waiting.pop()
    if function in seen:
      continue
    seen.add(function)
    names = set(_named(function.__code__))
    delegates = "score_answer" in names and "super" not in names  # to tasks in its arguments.
    if delegates or names & _RUNNING:
      return True
    for name in names:
      waiting += _functions(getattr(cls, name, None), function.__globals__.get(name))
  return False


@functools.lru_cache(maxsize=64)
def dataset(task: str, args: str) -> Any:
  """Creates a dataset from its arguments in JSON."""
  return reasoning_gym.create_dataset(task, **json.loads(args))


def _class_of(task: str) -> Any:
  return DATASETS[task][0]


def _named(code: types.CodeType) -> Iterator[str]:
  """Yields the global names and attributes that compiled code uses, nested code included."""
  yield from code.co_names
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _named(constant)


def _functions(*values: Any) -> Iterator[Any]:
  """Yields the functions of the package among the values, methods of classes included."""
  for value in values:
    members = vars(value).values() if inspect.isclass(value) else [value]
    for member in members:
      found = inspect.unwrap(member) if callable(member) else None
      if inspect.isfunction(found) and found.__module__.startswith("reasoning_gym."):
        yield found
