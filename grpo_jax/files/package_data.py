"""Files of the repository that an installed package needs besides its modules.

A wheel holds them in `grpo_jax/shipped/` (setup.py puts them there); in a checkout they are where
the repository has them. Below `folder()` their paths are the same: `configs/quickstart.py`.
"""

import pathlib


def folder() -> pathlib.Path:
  """Returns the folder that holds `configs/`, `constraints/` and `scripts/`."""
  package = pathlib.Path(__file__).parents[1]
  installed = package / "shipped"
  return installed if installed.is_dir() else package.parent
