"""The sandbox stands alone: it starts without the trainer."""

import sys

import pytest

from grpo_sandbox.launch import KINDS, Launcher, ProcessLimits
from tests.test_architecture import ROOT, imports_of

SANDBOX = sorted((ROOT / "packages" / "grpo_sandbox").glob("*.py"))
CALLED_BY_GRADERS = {"sympy"}


@pytest.mark.parametrize("path", SANDBOX, ids=lambda path: path.stem)
def test_the_sandbox_imports_the_standard_library_and_itself(path):
  own = "grpo_sandbox"
  others = {name for name in imports_of(path) if not f"{name}.".startswith(f"{own}.")}
  roots = {name.partition(".")[0] for name in others}
  assert roots <= sys.stdlib_module_names | CALLED_BY_GRADERS, sorted(others)


def test_an_unknown_kind_of_sandbox_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match="'bublewrap' .did you mean 'bubblewrap'.*landlock"):
    Launcher("bublewrap", ProcessLimits())
  text = (ROOT / "SECURITY.md").read_text()
  assert "| | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |" in text
