"""The options of LoRA, made from `config.model.lora` and checked."""

from collections.abc import Iterator
from typing import Any

from grpo_jax.models import lora

# A ConfigDict, whose fields a type checker cannot know.
Config = Any


def load(config: Config) -> lora.Options | None:
  """Returns the options of the adapter; None: every weight is trained.

  Raises:
    ValueError: The targets do not name kernels.
  """
  section = config.model.lora
  if section.rank is None:
    return None
  given = section.targets
  targets = (given,) if isinstance(given, str) else tuple(given)
  return lora.Options(
    rank=section.rank,
    alpha=float(section.alpha),
    targets=lora.targets(targets),
    init=section.init,
    rank_stabilized=section.rank_stabilized,
    base_dtype=section.base_dtype,
  )


def problems(config: Config) -> Iterator[str]:
  """Yields a message for each option that cannot work."""
  try:
    load(config)
  except ValueError as error:
    yield str(error)
