"""Warnings of packages that a user can do nothing about are not shown; all others are."""

import os
import subprocess
import sys

import pytest

PLANTED = "x = 1 is 1\n"  # a SyntaxWarning, when it is compiled.
FILES = {
  "reasoning_gym/__init__.py": "import cellpylib.parts, another_package\n",
  "reasoning_gym/dataset.py": "class ProceduralDataset: pass\n",
  "reasoning_gym/factory.py": "DATASETS = {}\n",
  "cellpylib/__init__.py": "",
  "cellpylib/parts.py": PLANTED,
  "another_package.py": PLANTED,
}
USES = {
  "data": "from grpo_jax.data import generated; generated.make_task('a', {})",
  "grader": "import grpo_jax.environments.grading.gym_score",
}


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_syntax_warnings_of_cellpylib_are_not_shown(use, tmp_path):
  for name, text in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
  environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
  done = subprocess.run(
    [sys.executable, "-c", USES[use]], env=environment, capture_output=True, text=True
  )
  warned = [line for line in done.stderr.splitlines() if "SyntaxWarning" in line]
  assert len(warned) == 1 and "another_package" in warned[0], done.stderr
