"""Environments by name: each scores the attempts at the prompts that name it."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_jax import registry
from grpo_jax.environments.base import Closing, Counting, EnvironmentFactory

_HIDDEN = ("base", "grading", "isolation", "scoring")


class Environments(Mapping[str, EnvironmentFactory]):
  """Factories by name. Close it at the end of the run, or use it in a `with` block."""

  def __init__(self, factories: Mapping[str, EnvironmentFactory]):
    self._factories = dict(factories)

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
    """Returns the counts of all environments, as "env/NAME/METRIC", since the start."""
    return {
      f"env/{name}/{metric}": value
      for name, factory in self._factories.items()
      if isinstance(factory, Counting)
      for metric, value in factory.metrics().items()
    }

  def close(self) -> None:
    """Closes all of them; later calls do nothing."""
    for factory in self._factories.values():
      if isinstance(factory, Closing):
        factory.close()


def make(**environments: Mapping[str, Any]) -> Environments:
  """Makes the environments of a run.

  Args:
    **environments: name → settings for `make` of the module of that name, or of the
      module that the setting `module` names: one of this package, or a dotted path.

  Returns:
    Name → factory.

  Raises:
    ValueError: there is no such module, it has no `make`, or refuses a setting.
  """
  return Environments({name: _factory(name, dict(s)) for name, s in environments.items()})


def _factory(name: str, settings: dict[str, Any]) -> EnvironmentFactory:
  source = settings.pop("module", None) or name
  module = registry.module(__name__, source, hidden=_HIDDEN)
  if "make" not in vars(module):
    raise ValueError(f"environment {name!r}: {source} has no make(**settings)")
  what = f"environment {name!r} ({source})"
  registry.check_arguments(what, module.make, settings)
  try:
    return module.make(**settings)
  except TypeError as error:  # a setting of a wrong kind.
    raise ValueError(f"{what}: {error}") from error
