"""The share of a GPU's memory that JAX takes: by its own default 75 %, in most runs 92 %.

JAX reads it from the environment when it first looks for devices. A run and a plan ask here.
"""

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

# JAX's names for it, the older one last, and its default.
NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
OF_JAX = 0.75
# The rest is for CUDA's context, its libraries, and a desktop.
ALONE = 0.92
_EMBEDDED = "jax_sampler"


def of_run(engine: str, environment: Mapping[str, str] = os.environ) -> float:
  """Returns the share that JAX takes in a run.

  Args:
    engine: `engine.name` of the run. Another engine than the embedded sampler may need memory of
      the same GPU, so JAX's default stays.
    environment: Environment variables, which come first.

  Raises:
    ValueError: The variable is not a share; the message names it.
  """
  for name in NAMES:
    if given := environment.get(name, "").strip():
      return _number(name, given)
  return ALONE if engine == _EMBEDDED else OF_JAX


def set_for_run(engine: Any, environment: MutableMapping[str, str] = os.environ) -> None:
  """Sets the share of a run, unless the environment has one; before JAX looks for devices.

  Args:
    engine: Section `engine` of the run's config; None, if it has none, which is refused later.
    environment: Environment variables.
  """
  embedded = getattr(engine, "name", None) == _EMBEDDED
  if embedded and not any(environment.get(name) for name in NAMES):
    environment[NAMES[-1]] = str(ALONE)


def origin(engine: str, environment: Mapping[str, str] = os.environ) -> str:
  """Returns where the share of a run is from, for a plan."""
  given = next((name for name in NAMES if environment.get(name, "").strip()), None)
  if given is not None:
    return f"{given}={environment[given]}"
  return "what a run takes" if engine == _EMBEDDED else f"JAX's default; {NAMES[-1]} changes it"


def _number(name: str, given: str) -> float:
  try:
    share = float(given)
  except ValueError:
    share = 0.0
  if not 0 < share <= 1:
    raise ValueError(f"{name}={given} must be a number above 0 and at most 1")
  return share
