"""The result of every program of the benchmark: a JSON record of its steps.

Standard library only.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import workload as workloads


@dataclasses.dataclass(frozen=True)
class Step:
  """Times and counts of one training step. Tokens are counted without padding."""

  wall_s: float  # duration of the whole step.
  generate_s: float  # duration of sampling the completions.
  train_s: float  # duration of the update: forward, backward, optimizer.
  prompt_tokens: int  # tokens of the step's prompts, each counted once.
  completion_tokens: int  # sampled, end tokens included.
  trained_tokens: int  # through the forward and backward pass.
  reward_mean: float


def versions(*packages: str) -> dict[str, str]:
  """Returns the versions of Python and of the installed packages among `packages`."""
  found = {"python": platform.python_version()}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def write(
  path: str | pathlib.Path,
  *,
  program: str,
  workload: workloads.Workload,
  steps: Sequence[Step],
  settings: dict[str, Any],
  packages: dict[str, str],
) -> None:
  """Writes the record of one run.

  Args:
    path: Path of the JSON file.
    program: Name of the program that ran.
    workload: Workload of the program.
    steps: Steps in order; the first contains compilation.
    settings: Further information on how the program was set up.
    packages: Versions of packages, from `versions`.
  """
  record = {
    "program": program,
    "workload": dataclasses.asdict(workload),
    "settings": settings,
    "versions": packages,
    "load_average_at_end": os.getloadavg()[0],
    "steps": [dataclasses.asdict(step) for step in steps],
  }
  pathlib.Path(path).write_text(json.dumps(record, indent=1))
