"""Engines that sample completions: in process, on SGLang servers, scripted for tests."""

import inspect
from types import ModuleType
from typing import Any

from grpo_jax import registry

_ENGINES = ("fake", "jax_sampler", "sglang")  # the other modules are parts of these.


def make(name: str, **settings: Any) -> Any:
  """Makes an engine.

  Args:
    name: "jax_sampler", "sglang" or "fake", modules of this folder; or the dotted path of another
      module, which has a function `make(**settings)`.
    **settings: Settings of that engine. `matmul_precision`, `product_dtype` and `attention` are
      passed only to an engine whose `make` accepts them.

  Returns:
    A `base.Engine`.

  Raises:
    ValueError: The engine or a setting is unknown; the message lists the valid ones.
  """
  found = module(name)
  takes = inspect.signature(found.make).parameters
  for numerics in ("matmul_precision", "product_dtype", "attention"):
    if numerics not in takes and name != "jax_sampler":  # whose class takes all of them.
      settings.pop(numerics, None)  # it decides itself how to compute.
  registry.check_arguments(f"engine {name!r}", found.make, settings)
  return registry.called(f"{name}.make failed", found.make, **settings)


def module(name: str) -> ModuleType:
  """Returns the module of an engine; nothing is made.

  Args:
    name: Name, as for `make`.

  Raises:
    ValueError: There is no such engine; the message lists the known ones. Or it has no `make`.
  """
  hidden = set(registry.modules(__name__)) - set(_ENGINES)
  found = registry.module(__name__, name, hidden=hidden)
  if not callable(getattr(found, "make", None)):
    raise ValueError(f"engine {name!r}: the module has no make(**settings)")
  return found
