"""Scores an answer by a reasoning-gym task's own scorer, which may be anything.

Some scorers hand the answer to `eval` or to SymPy's parser, which runs it: `computes` finds them.
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

from grpo_jax.sandbox import expressions

# What runs a text, by whatever way it was imported.
_RUNNING = {
  *("eval", "exec", "compile", "__import__", "import_module", "subprocess", "Popen", "system"),
  *("parse_expr", "sympify", "S", "lambdify", "numexpr", "pickle", "marshal", "unsafe_load"),
}


def prepare() -> None:
  """Makes scorers harmless. For a sandbox alone: it changes the packages."""
  expressions.guard("reasoning_gym")


def score(task: str, args: Mapping[str, Any], answer: str, entry: dict[str, Any]) -> float:
  """Returns the task's score of an answer, usually in [0, 1].

  Args:
    task: Name of the reasoning-gym dataset.
    args: Its arguments, size and seed included.
    answer: What the model answered.
    entry: The row: question, answer, metadata.
  """
  return float(dataset(task, json.dumps(args)).score_answer(answer, entry))


def has_plain_scorer(task: str) -> bool:
  """Says whether the task compares strings only, which needs no guard."""
  return _class_of(task).score_answer is ProceduralDataset.score_answer


@functools.cache
def computes(task: str) -> bool:
  """Says whether the task's scorer calls something that runs text, by its compiled code.

  Everything of the package that the scorer can call is looked at, so a task may be named whose
  scorer runs nothing but its own question.
  """
  cls = _class_of(task)
  waiting, seen = [cls.score_answer], set()
  while waiting:
    function = waiting.pop()
    if function in seen:
      continue
    seen.add(function)
    names = set(_named(function.__code__))
    delegates = "score_answer" in names and "super" not in names  # to tasks of its arguments.
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
  """Yields the global names and attributes that compiled code uses, that within it included."""
  yield from code.co_names
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _named(constant)


def _functions(*values: Any) -> Iterator[Any]:
  """Yields those of the package's functions that are among values, or methods of classes."""
  for value in values:
    members = vars(value).values() if inspect.isclass(value) else [value]
    for member in members:
      found = inspect.unwrap(member) if callable(member) else None
      if inspect.isfunction(found) and found.__module__.startswith("reasoning_gym."):
        yield found
