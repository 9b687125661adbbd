"""Options that were removed: what to use instead, and which runs that have them continue.

Also values of options that have another name now.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# A config.json: sections and fields by name.
Stored = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
  """An option that was removed.

  Attributes:
    instead: Remedy for users of the option, for a message.
    is_kept: Function (stored value, config.json) → whether the run does the same without it.
  """

  instead: str
  is_kept: Callable[[Any, Stored], bool]


def _always(value: Any, stored: Stored) -> bool:
  """Returns that a run does the same without the option, whatever its value."""
  return True


def _one_of(*values: Any) -> Callable[[Any, Stored], bool]:
  return lambda value, _: value in values


def _by_staleness(one: Any, more: Any) -> Callable[[Any, Stored], bool]:
  """Returns whether a value is the one that follows from `rollout.max_staleness` now."""

  def is_kept(value: Any, stored: Stored) -> bool:
    return value == (one if stored["rollout"].get("max_staleness", 0) in (0, 1) else more)

  return is_kept


# The options of sampling that changed the distribution beside the filters, with their defaults.
_CHANGED: Mapping[str, Any] = {
  **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
  **{"regex": None, "json_schema": None, "ebnf": None},
}


# By dotted name.
OPTIONS: Mapping[str, Removed] = {
  "engine.sglang.router": Removed(
    "name the servers behind the router in engine.sglang.addresses; requests go to each of them",
    _one_of(None),
  ),
  "engine.sglang.requests": Removed(
    "each completion is a request of its own, and the requests of a group go to one server",
    _one_of("completion"),
  ),
  "engine.sglang.pause": Removed(
    "new weights always retract what is under way: it continues, its context computed again",
    _one_of(None, "retract"),
  ),
  "rollout.order": Removed(
    "rollout.max_staleness decides it: with 1 steps take groups in the order of their prompts, with"
    " more those that finish first",
    _by_staleness("prompt", "finished"),
  ),
  "rollout.in_flight_updates": Removed(
    "rollout.max_staleness decides it: with 1 completions are finished before new weights come,"
    " with more they are under way meanwhile",
    _by_staleness(False, True),
  ),
  "rollout.on_stale": Removed(
    "a step always waits for the groups that would become too old, so none is dropped or masked",
    _one_of("wait"),
  ),
  "rollout.recompute_cache": Removed(
    "new weights always compute the keys and values of unfinished completions again",
    _one_of(True),
  ),
  **{
    f"{section}.{name}": Removed(
      "completions are sampled from the distribution that is trained, which engines restrict by"
      f" top_k, top_p and min_p only; an engine of your own, engine.name=MODULE, can apply a {name}"
      " that engine.options gives it",
      _one_of(usual, None),
    )
    for section in ("sampling", "evaluation.sampling")
    for name, usual in _CHANGED.items()
  },
  **{
    f"logging.{name}": Removed(
      "give its options where the sink is named, for example"
      f" logging.sinks=('jsonl', dict(name={name!r}, {option}='mine'))",
      _always,
    )
    for name, option in (("mlflow", "experiment"), ("trackio", "project"), ("swanlab", "project"))
  },
  "logging.tensorboard": Removed(
    "leave 'tensorboard' out of logging.sinks, for example logging.sinks=('jsonl', 'console')",
    _always,
  ),
  "evaluation.keep_mb": Removed("the first 20 MB of each evaluation are always kept", _always),
  "distributed.secret_env": Removed(
    "set the variable GRPO_JAX_RUN_SECRET to the secret in all processes", _always
  ),
  "model.lora.init": Removed(
    "A begins as PEFT's, uniform of variance 1 / (3 i); to begin with another, name its PEFT folder"
    " in model.lora.path",
    _always,
  ),
  "reference.reset_optimizer": Removed(
    "the optimizer keeps its state; to empty it, export the run and begin a new one with"
    " model.path=RUN/export",
    _one_of(False),
  ),
}

# Values that have another name now, by the dotted name of their option: former name → present name.
VALUES: Mapping[str, Mapping[Any, Any]] = {"model.attention": {"xla_chunked": "xla_blocked"}}

# Flags beside the config, by name without dashes → what to use instead.
FLAGS: Mapping[str, str] = {
  "workdir.local": (
    "a run at a URL keeps its checkpoints there only, and works in a folder of the cache; set"
    " GRPO_JAX_CACHE=FOLDER to move the cache"
  ),
}


def explanation(name: str) -> str | None:
  """Returns what to use instead of an option that was removed; None if it was not.

  An option is removed by its own name, or with its section.

  Args:
    name: Dotted name, such as "engine.sglang.router".
  """
  parts = name.split(".")
  for count in range(len(parts), 0, -1):
    if removed := OPTIONS.get(".".join(parts[:count])):
      return f"there is no field {name!r} any more: {removed.instead}"
  return None


def present_name(name: str, value: Any) -> Any:
  """Returns the present name of a value of an option; other values are returned as they are.

  Args:
    name: Dotted name of the option.
    value: Its value, of any type.
  """
  return VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def refusals(stored: Stored) -> Iterator[str]:
  """Yields a message for each removed option of a run without which it would do something else."""
  for name, removed in OPTIONS.items():
    section: Any = stored
    *path, last = name.split(".")
    for part in path:
      section = section.get(part) if isinstance(section, Mapping) else None
    has_it = isinstance(section, Mapping) and last in section
    if has_it and not removed.is_kept(section[last], stored):
      yield f"{name}={section[last]!r} was removed: {removed.instead}"


def without(stored: Stored, path: str = "") -> dict[str, Any]:
  """Returns a config.json without the options that were removed, with present names of values."""
  named = {f"{path}.{key}" if path else key: (key, value) for key, value in stored.items()}
  return {
    key: without(value, name) if isinstance(value, Mapping) else present_name(name, value)
    for name, (key, value) in named.items()
    if name not in OPTIONS
  }
