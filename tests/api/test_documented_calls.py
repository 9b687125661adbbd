"""The blocks of docs/python_api.md and of README.md that train and look at a run, as they stand.

Only the model, its data and the sizes are replaced: the blocks run in their order, in one folder.
"""

import json
import pathlib

import pytest

from grpo_jax import configuration
from tests.api.test_training import ROWS, SIZES
from tests.test_documented_code import blocks

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def tiny_configs(model, monkeypatch, tmp_path):
  """Has every config train the tiny model on short rows; the folder of the runs is new."""
  load = configuration.load
  rows = tmp_path / "short.jsonl"
  rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  small = {name: value for name, value in SIZES.items() if name != "total_steps"}
  small |= {"model.path": str(model), "data.kind": "jsonl", "data.path": str(rows)}
  small |= {"data.task": None, "data.system_prompt": None, "evaluation.data.task_seed": None}
  own = {"module": "function", "path": "tests.rewards.vowels"}

  def load_small(name, overrides=None):
    config = load(name, {"total_steps": 1, **(overrides or {}), **small})
    config.environments = {"arithmetic": own}
    return config

  monkeypatch.setattr(configuration, "load", load_small)
  monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", ["docs/python_api.md", "README.md"])
@pytest.mark.long
def test_the_blocks_that_call_the_api_run_unchanged(page, tiny_configs, capsys):
  scope: dict = {"__name__": "documented"}
  found = [text for language, text in blocks(ROOT / page) if language == "python"]
  found = [text for text in found if "grpo_jax.train(" in text or "run." in text]
  assert len(found) == {"docs/python_api.md": 5, "README.md": 1}[page]
  for text in found:
    exec(compile(text, page, "exec"), scope)
  run = scope["run"]
  assert run.checkpoints and run.report().exists() and "reward" in capsys.readouterr().out
