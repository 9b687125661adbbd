"""Engines that sample completions: in process, on SGLang servers, scripted for tests."""

import inspect
from typing import Any

from grpo_jax import registry

_ENGINES = ("fake", "jax_sampler", "sglang")  # the other modules are parts of these.


def make(name: str, **settings: Any) -> Any:
  """Makes an engine.

  Args:
    name: "jax_sampler", "sglang" or "fake", modules of this folder; or the dotted path of one of
      your own, which has a function `make(**settings)`.
    **settings: of that engine. `matmul_precision` and `product_dtype` are given to an engine of
      your own only if its `make` takes them.

  Returns:
    A `base.Engine`.

  Raises:
    ValueError: no such engine, or a setting that it does not have; the message lists those that
      there are.
  """
  hidden = set(registry.modules(__name__)) - set(_ENGINES)
  module = registry.module(__name__, name, hidden=hidden)
  takes = inspect.signature(module.make).parameters
  for numerics in ("matmul_precision", "product_dtype"):
    if numerics not in takes and name not in _ENGINES:
      settings.pop(numerics, None)  # how it computes products is its own business.
  registry.check_arguments(f"engine {name!r}", module.make, settings)
  return module.make(**settings)
