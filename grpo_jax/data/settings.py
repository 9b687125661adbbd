"""Derives the fields of every single dataset from the fields of a config. Pure.

`config.data` holds what all training datasets share; `data.datasets` lists what differs, one
mapping per dataset. `config.evaluation.data` holds the fields that evaluation changes, and
`evaluation.datasets` lists its sets.
"""

import contextlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.data import named, prompts, sources
from grpo_jax.data.options import DataOptions
from grpo_jax.files import local_paths
from grpo_jax.registry import nearest
from grpo_jax.values import checked, options

Settings = Mapping[str, Any]

# Fields that define a source. A dataset with its own source ignores the shared ones.
_SOURCE = ("kind", "path", "dataset", "subset", "split", "task")
_OF_TASK = ("task_seed", "size")  # they choose the rows of a task.
_WITHOUT_PATH = ("hub", "reasoning_gym")  # kinds that cannot be combined with a path.
_TWINS = (("prompt_template", "prompt_file"), ("system_prompt", "system_prompt_file"))
_FIELDS = set(inspect.signature(prompts.open_dataset).parameters) - {
  "tokenizer",
  "tools_of",
  "side",
  "for_evaluation",
}
# Kinds of the fields of a dataset in a list; None means: not given.
_KINDS: Mapping[str, checked.Kind] = {
  **options.kinds(DataOptions),
  "side": checked.choice(("all", "train", "validation")),
  "for_evaluation": checked.switch(),
  "weight": checked.number(low=0, none=True),
}
_TASK_FIELDS = set(inspect.signature(prompts.make_task).parameters) - {"entry"}


def inherit(shared: Settings, own: Settings) -> dict[str, Any]:
  """Returns the shared fields, overridden by those of one dataset; None means not given.

  Its own `dataset` or `task` replaces the whole shared source; its own `path` or `split` is
  another file or split of the shared dataset. Its own text replaces the shared file with that
  text.
  """
  given = {key: value for key, value in own.items() if value is not None}
  base, replaced = dict(shared), set()
  if {"dataset", "task"} & given.keys():
    replaced |= {*_SOURCE, "name"}
  elif "path" in given:
    replaced |= {"name", *(("kind",) if base.get("kind") in _WITHOUT_PATH else ())}
  for twins in _TWINS:
    if given.keys() & set(twins):
      replaced |= set(twins)
  return {**{key: value for key, value in base.items() if key not in replaced}, **given}


def training(shared: Settings, items: Sequence[Any]) -> dict[str, dict[str, Any]]:
  """Returns the fields of every training dataset, by its name.

  Args:
    shared: Fields of `prompts.open_dataset` that apply to all datasets.
    items: Differing fields, one mapping per dataset; empty: the shared fields are the only dataset.

  Raises:
    ValueError: A field is unknown, or two datasets have the same name.
  """
  found = _expand(shared, items, "data.datasets")
  return {
    name: {**one, "side": "train"} if one.get("split_validation_size") else one
    for name, one in found.items()
  }


def evaluation(
  shared: Settings, items: Sequence[Any], own: Settings, sets: Sequence[Any], *, name: str
) -> dict[str, dict[str, Any]]:
  """Returns the fields of every evaluation set, by the name that its metrics have.

  The sets are those listed, or the one that `own` describes, and what training datasets split
  off. If there are none: the training datasets' other split. A set of training rows is not among
  them, as far as the fields show it; see `trained_on`.

  Args:
    shared: Fields that the training datasets share.
    items: Training datasets, as for `training`.
    own: Fields that evaluation changes; None means not given.
    sets: Evaluation sets: the fields that differ from these.
    name: Name of a single set.

  Raises:
    ValueError: A field is unknown, or two sets have the same name.
  """
  found = _asked_for(shared, items, own, sets, name)
  trained = trained_on(shared, items, own, sets, name=name)
  return {key: one for key, one in found.items() if key not in trained}


def trained_on(
  shared: Settings, items: Sequence[Any], own: Settings, sets: Sequence[Any], *, name: str
) -> list[str]:
  """Returns the names of the sets that are training data, and so must not be evaluated.

  Takes the arguments of `evaluation`, and raises the same errors. Fields are compared; see
  `reads_same`.
  """
  found = _asked_for(shared, items, own, sets, name)
  trained = training(shared, items).values()
  return [key for key, one in found.items() if any(reads_same(one, each) for each in trained)]


def names_a_source(own: Settings) -> bool:
  """Returns whether the fields that evaluation changes name other rows than those of training."""
  return any(own.get(key) is not None for key in (*_SOURCE, *_OF_TASK))


def _asked_for(
  shared: Settings, items: Sequence[Any], own: Settings, sets: Sequence[Any], name: str
) -> dict[str, dict[str, Any]]:
  """Returns the fields of all sets that are asked for, sets of training rows included."""
  once = {"split_validation_size": 0, "repeat": 1, "for_evaluation": True}
  base = inherit({**shared, **once}, own)
  trained = _expand(shared, items, "data.datasets")
  asked = {key: value for key, value in own.items() if key not in (*_SOURCE, *_OF_TASK, "name")}
  split_off = {
    key: {**inherit({**one, "repeat": 1}, asked), "side": "validation"}
    for key, one in trained.items()
    if one.get("split_validation_size")
  }
  if sets:
    found = _expand(base, sets, "evaluation.datasets")
  elif names_a_source(own):
    found = {name: base}
  elif split_off:
    found = {}
  elif items:
    found = {key: inherit({**one, **once}, own) for key, one in trained.items()}
  else:
    found = {name: base}
  if not found and len(split_off) == 1:
    return {name: next(iter(split_off.values()))}
  twice = found.keys() & split_off.keys()
  if twice:
    raise ValueError(f"two evaluation sets are called {sorted(twice)[0]!r}: give one a name")
  return {**found, **split_off}


def reads_same(one: Settings, trained: Settings) -> bool:
  """Returns whether an evaluation set reads rows that a training dataset trains on.

  Only the fields are compared; no file is opened. How the rows are asked and scored does not
  matter. Of one source, the two sides of one split have no row in common.

  Args:
    one: Fields of the evaluation set.
    trained: Fields of the training dataset.
  """
  if _rows_of(one) != _rows_of(trained):
    return False
  split = ("split_validation_size", "split_seed")
  has_sides = (one.get("side"), trained.get("side")) == ("validation", "train")
  return not (has_sides and all(one.get(key) == trained.get(key) for key in split))


def _rows_of(one: Settings) -> tuple[Any, ...]:
  """Returns what decides which rows a source has, in one spelling."""
  kind, path, task = (one.get(key) for key in ("kind", "path", "task"))
  dataset = one.get("dataset")
  entry = None
  with contextlib.suppress(ValueError):  # an unknown name is reported elsewhere.
    entry = named.find(str(dataset)) if dataset else None
  split = one.get("split") or prompts.usual_split(entry, bool(one.get("for_evaluation")))
  arguments = repr(sorted((one.get("task_args") or {}).items(), key=str))
  if kind and "." in kind:  # a user's function may use all of these.
    others = (one.get(key) for key in ("dataset", "subset", "split", "task_seed", "size"))
    return (kind, path, task, arguments, *others)
  if path:
    place = str(path) if local_paths.is_url(path) else os.path.realpath(path)
    return "file", place, split if sources.may_hold_splits(place) else None
  if task:
    usual = "function" if kind == "function" else "reasoning_gym"
    return usual, task, arguments, one.get("task_seed", 0)
  hub = (entry.hub if entry else str(dataset)).lower()
  return "hub", hub, one.get("subset") or (entry.subset if entry else None), split or "train"


def _expand(shared: Settings, items: Sequence[Any], where: str) -> dict[str, dict[str, Any]]:
  if not items:
    _check_fields(shared, "data")
    return {prompts.name_of(shared) or "data": dict(shared)}
  found: dict[str, dict[str, Any]] = {}
  for number, item in enumerate(items):
    place = f"{where}[{number}]"
    if not isinstance(item, Mapping):
      raise ValueError(f"{place} must be a mapping of fields, got {item!r}")
    _check_fields(item, place)
    one = inherit({**shared, "name": None}, item)
    name = prompts.name_of(one)
    if name is None:
      raise ValueError(f"{place} has no data: give it a path, a dataset, a task, or a name")
    if name in found:
      raise ValueError(f"{where} has two datasets called {name!r}: give one of them a name")
    found[name] = {**one, "name": name}
  return found


def _check_fields(item: Settings, place: str) -> None:
  """Raises ValueError for a field that datasets do not have."""
  known = _FIELDS | {"weight", "side", "for_evaluation"}
  for key, value in item.items():
    kind = _KINDS.get(key)
    problem = kind.problem(f"{place}.{key}", value) if kind and value is not None else None
    if problem:
      raise ValueError(problem)
    if key not in known:
      raise ValueError(
        f"{place} has no field {key!r}{nearest(key, known)}; there are: {', '.join(sorted(known))}"
      )
  for word, task in (item.get("tasks") or {}).items():
    if not isinstance(task, Mapping):
      raise ValueError(f"{place}: tasks[{word!r}] must be a mapping of fields, got {task!r}")
    for key, value in task.items():
      kind = _KINDS.get(key)
      problem = kind.problem(f"{place}: tasks[{word!r}].{key}", value) if kind else None
      if problem and value is not None:
        raise ValueError(problem)
      if key not in _TASK_FIELDS:
        raise ValueError(
          f"{place}: tasks[{word!r}] has no field {key!r}{nearest(key, _TASK_FIELDS)}; "
          f"there are: {', '.join(sorted(_TASK_FIELDS))}"
        )


def environments(settings: Settings) -> set[str]:
  """Returns the names of the environments that score a dataset's rows."""
  usual = prompts.environment_of(settings)
  tasks = settings.get("tasks") or {}
  return {task.get("environment") or usual for task in tasks.values()} or {usual}
