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
    ValueError: no such engine; the message lists those that there are.
    TypeError: a setting that it does not have.
  """
  hidden = set(registry.modules(__name__)) - set(_ENGINES)
  return registry.module(__name__, name, hidden=hidden).make(**settings)
