"""The sandbox stands alone: it could be copied out of the package, and starts without it."""

import pathlib
import sys

import pytest

from grpo_jax.sandbox.launch import KINDS, Launcher, Limits
from tests.test_architecture import FILES, PACKAGE, imports_of

SANDBOX = [path for path in FILES if path.parent == PACKAGE / "sandbox"]
CALLED_BY_GRADERS = {"sympy"}


@pytest.mark.parametrize("path", SANDBOX, ids=lambda path: path.stem)
def test_the_sandbox_imports_the_standard_library_and_itself(path):
  own = "grpo_jax.sandbox"
  others = {name for name in imports_of(path) if not f"{name}.".startswith(f"{own}.")}
  roots = {name.partition(".")[0] for name in others}
  assert roots <= sys.stdlib_module_names | CALLED_BY_GRADERS, sorted(others)


def test_an_unknown_kind_of_sandbox_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match="'bublewrap' .did you mean 'bubblewrap'.*landlock"):
    Launcher("bublewrap", Limits())
  text = (pathlib.Path(__file__).parents[2] / "SECURITY.md").read_text()
  assert "| | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |" in text
