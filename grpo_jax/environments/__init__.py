"""Environments by name: each scores the attempts at the prompts that name it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_jax import registry
from grpo_jax.environments import setting_kinds
from grpo_jax.environments.base import (
  NOT_AN_AGENT,
  NOT_DECLARED,
  AnyFactory,
  EnvironmentFactory,
  as_factory,
  has_run,
)
from grpo_jax.environments.grading import confinement
from grpo_jax.errors import last_frames, place_and_reason
from grpo_jax.types import Prompt
from grpo_jax.values import checked

_HIDDEN = ("base", "grading", "hanging", "isolation", "scoring", "setting_kinds", "toolbox")


class Environments(Mapping[str, EnvironmentFactory]):
  """Factories by name. Close it at the end of the run, or use it in a `with` block."""

  def __init__(self, factories: Mapping[str, AnyFactory]):
    self._factories = {name: as_factory(made) for name, made in factories.items()}

  def __getitem__(self, name: str) -> EnvironmentFactory:
    return registry.choose("environment", name, self._factories)

  def __iter__(self) -> Iterator[str]:
    return iter(self._factories)

  def __len__(self) -> int:
    return len(self._factories)

  def __enter__(self) -> "Environments":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def metrics(self) -> dict[str, float]:
    """Returns the counts of all environments since the start, as "env/NAME/METRIC"."""
    return {
      f"env/{name}/{metric}": value
      for name, factory in self._factories.items()
      for metric, value in {**_hanging(factory), **factory.metrics()}.items()
    }

  def close(self) -> None:
    """Closes all environments; later calls do nothing."""
    for factory in self._factories.values():
      factory.close()


def _hanging(factory: EnvironmentFactory) -> dict[str, float]:
  count = factory.hanging.count()
  return {"hanging_attempts": float(count)} if count else {}


def make(**environments: Mapping[str, Any]) -> Environments:
  """Makes the environments of a run.

  Args:
    **environments: Settings by name, for `make` of the module of that name, or of the
      module that the setting `module` names. That is a module of this package, one of
      packages/grpo_environments, or one of the user,
      or the dotted path of a class of environments or of a function like `make`.

  Returns:
    Factories by name.

  Raises:
    ValueError: There is no such module, it has no `make`, or it rejects a setting.
  """
  return Environments({name: _factory(name, dict(s)) for name, s in environments.items()})


def total_timeout_s(name: str, settings: Mapping[str, Any]) -> float:
  """Returns an environment's setting `total_timeout_s`: the time limit of one score, in seconds.

  Returns:
    The setting, or its default; 0 if the environment has no such setting.

  Raises:
    ValueError: The setting is not a number; and see `make`.
  """
  setting = inspect.signature(_maker(name, settings)).parameters.get("total_timeout_s")
  value = settings.get("total_timeout_s", setting.default) if setting else 0.0
  if not isinstance(value, int | float):
    raise ValueError(f"environment {name!r}: total_timeout_s must be a number, got {value!r}")
  return value


def has_setting(name: str, settings: Mapping[str, Any], setting: str) -> bool:
  """Returns whether an environment of this package has a setting of that name.

  Args:
    name: Name of the environment.
    settings: Settings, as for `make`. An environment given by a dotted path has none of ours.
    setting: Name of the setting.

  Raises:
    ValueError: See `make`.
  """
  if "." in (settings.get("module") or name):
    return False
  return setting in inspect.signature(_maker(name, settings)).parameters


def check(environments: Mapping[str, AnyFactory], prompts: Iterable[Prompt]) -> None:
  """Raises ValueError if an environment rejects all of these prompts.

  No environment is started: a factory rejects a prompt without the fields that it needs. A single
  broken row among others is not an error here; it is counted when it is attempted.

  Args:
    environments: Factories by name.
    prompts: A few prompts of each dataset; each names its environment.
  """
  refused: dict[str, list[tuple[Prompt, str]]] = {}
  taken: set[str] = set()
  for prompt in prompts:
    if prompt.environment in taken:
      continue
    try:
      factory = as_factory(environments[prompt.environment])
      _check_kind(factory, factory(prompt))
    except Exception as error:  # a user's factory may raise anything.
      explains_itself = isinstance(error, ValueError) and not last_frames(error)
      reason = str(error) if explains_itself else place_and_reason(error)
      refused.setdefault(prompt.environment, []).append((prompt, reason))
    else:
      taken.add(prompt.environment)
  for name in sorted(refused.keys() - taken):
    (prompt, reason), *others = refused[name]
    raise ValueError(
      f"the environment {name!r} accepts none of the {1 + len(others)} prompts that were tried:"
      f" {reason}. The fields of this row: {', '.join(prompt.info) or 'none'}"
    )


def _check_kind(factory: EnvironmentFactory, made: Any) -> None:
  """Raises ValueError if an environment is not of the kind that its factory declares."""
  if has_run(made) != factory.is_agent:
    problem = NOT_AN_AGENT if factory.is_agent else NOT_DECLARED
    raise ValueError(problem.format(type(made).__name__))


def objection(name: str, settings: Mapping[str, Any], task: str) -> str:
  """Returns why an environment cannot score a reasoning-gym task; "" if no reason is known.

  Args:
    name: Name of the environment.
    settings: Settings of the environment.
    task: Name of the task, for data of kind "reasoning_gym".

  Raises:
    ValueError: Its sandbox does not work on this machine, or see `make`.
  """
  if (settings.get("module") or name) != "reasoning_gym" or settings.get("allow_unsandboxed"):
    return ""
  if confinement.find(settings.get("sandbox", confinement.BEST)).is_sandbox:
    return ""  # known without the package, whose import takes seconds.
  return vars(registry.module(__name__, "reasoning_gym", hidden=_HIDDEN))["objection"](
    task, **settings
  )


def problems(name: str, settings: Mapping[str, Any]) -> list[str]:
  """Returns a message for every setting of the wrong type or out of range.

  Args:
    name: Name of the environment.
    settings: Settings, as for `make`. An environment given by a dotted path checks its own.
  """
  module = settings.get("module", name)
  if isinstance(module, str) and "." in module:
    return []
  found = setting_kinds.SETTINGS
  if module == "function":  # it passes its `settings` to a function and has a time limit.
    found = {**found, "timeout_s": checked.optional(found["timeout_s"])}
  return checked.problems(found, settings, prefix=f"environments.{name}.")


def _factory(name: str, settings: dict[str, Any]) -> AnyFactory:
  wrong = problems(name, settings)
  if wrong:
    raise ValueError("; ".join(wrong))
  make_one = _maker(name, settings)
  what = f"environment {name!r} ({settings.pop('module', None) or name})"
  registry.check_arguments(what, make_one, settings)
  try:
    return registry.called(f"{what} cannot be made", make_one, **settings)
  except TypeError as error:  # a setting of the wrong type.
    raise ValueError(f"{what}: {error}") from error


def _maker(name: str, settings: Mapping[str, Any]) -> Callable[..., AnyFactory]:
  """Returns `make` of the module of an environment, or what the settings name instead."""
  source = settings.get("module") or name
  found = registry.module_or_member(__name__, source, hidden=_HIDDEN)
  if inspect.isclass(found):
    return _maker_of(found)
  if callable(found):
    return found
  if "make" not in vars(found):
    raise ValueError(
      f"environment {name!r}: the module {source} has no make(**settings); to use a class of"
      f" environments in it, write {source}.NAME"
    )
  return vars(found)["make"]


def _maker_of(environment: type) -> Callable[..., AnyFactory]:
  """Returns a `make` for a class whose first argument is the prompt; the others are settings."""
  parameters = list(inspect.signature(environment).parameters.values())

  def make(**settings: Any) -> AnyFactory:
    return functools.partial(environment, **settings) if settings else environment

  vars(make)["__signature__"] = inspect.Signature(parameters[1:])
  return make
