"""Engines that sample completions: in process, scripted for tests."""

from typing import Any

from grpo_jax import registry

_NOT_ENGINES = ("base", "calls", "decoding", "sampling", "scheduling", "session", "stopping")


def make(name: str, **settings: Any) -> Any:
  """Makes an engine.

  Args:
    name: module of this folder ("jax_sampler", "fake"), or the dotted path of one of your own,
      which has a function `make(**settings)`.
    **settings: of that engine.

  Returns:
    A `base.Engine`.

  Raises:
    ValueError: no such engine; the message lists those that there are.
    TypeError: a setting that it does not have.
  """
  return registry.module(__name__, name, hidden=_NOT_ENGINES).make(**settings)
