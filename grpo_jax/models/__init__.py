"""Language models: one transformer, its families, and the files it is read from and written to.

`Loaded` and `load` are those of `loading`, which is imported when one of them is first used:
`options` is read before JAX is imported, so that a mistake in a command is answered at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from grpo_jax.models.loading import Loaded as Loaded
  from grpo_jax.models.loading import load as load


def __getattr__(name: str) -> Any:
  """Returns a name of `loading` (PEP 562)."""
  if name in ("Loaded", "load"):
    return getattr(importlib.import_module(f"{__name__}.loading"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
