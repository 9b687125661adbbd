"""Engines that sample completions: in process, on SGLang servers, scripted for tests."""

from typing import Any

from grpo_jax import registry

_ENGINES = ("fake", "jax_sampler", "sglang")  # the other modules are parts of these.


def make(name: str, **settings: Any) -> Any:
  """Makes an engine.

  Args:
    name: "jax_sampler", "sglang" or "fake", modules of this folder; or the dotted path of one of
      your own, which has a function `make(**settings)`.
    **settings: of that engine.

  Returns:
    A `base.Engine`.

  Raises:
    ValueError: no such engine, or a setting that it does not have; the message lists those that
      there are.
  """
  hidden = set(registry.modules(__name__)) - set(_ENGINES)
  module = registry.module(__name__, name, hidden=hidden)
  registry.check_arguments(f"engine {name!r}", module.make, settings)
  return module.make(**settings)
