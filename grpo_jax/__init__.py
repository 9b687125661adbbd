"""GRPO for language models: pure functions in JAX, a command, and an API for Python and notebooks.

    import grpo_jax

    run = grpo_jax.train("quickstart", "runs/first", total_steps=14)
    run.sample("2 + 2 =")

`grpo_jax.train`, `grpo_jax.open`, `grpo_jax.Run` and `grpo_jax.StopTraining` are those of
`grpo_jax.api`; `grpo_jax.notebook` has displays for notebooks. Importing this package imports
nothing else: its parts are imported when they are first used.
"""

import importlib
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

_OF_API = ("Run", "StopTraining", "open")
_MODULES = ("api", "configuration", "notebook", "train")

if TYPE_CHECKING:
  from grpo_jax import api as api
  from grpo_jax import configuration as configuration
  from grpo_jax import notebook as notebook
  from grpo_jax.api import Run as Run
  from grpo_jax.api import StopTraining as StopTraining
  from grpo_jax.api import open as open

  train: "CallableTrain"


class CallableTrain(types.ModuleType):
  """The class of the module `grpo_jax.train`, which is also the function `grpo_jax.api.train`."""

  if TYPE_CHECKING:
    train: Any
    validate: Any
    __call__ = staticmethod(api.train)
  else:

    def __call__(self, *arguments, **options):
      """See `grpo_jax.api.train`."""
      return __getattr__("api").train(*arguments, **options)


def __getattr__(name: str) -> Any:
  """Imports the parts of the package that are used through it (PEP 562)."""
  if name in ("api", "train", *_OF_API):  # before what a wrong version of JAX would break.
    importlib.import_module(f"{__name__}.files.installed").check()
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  if name in _OF_API:
    return getattr(importlib.import_module(f"{__name__}.api"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *_OF_API, *_MODULES})
