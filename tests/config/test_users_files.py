"""A user's own folders and modules beside the configs of the package, which have common names."""

import os
import sys

import pytest

from grpo_jax import registry
from grpo_jax.commands import cli
from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.files import package_data

OWN = {
  "a package": {"configs/__init__.py": "", "configs/base.py": "seed = 1\n"},
  "a folder": {
    "configs/base.py": "seed = 1\n",
    "configs/quickstart.py": "",
    "configs/math_1b.py": "",
  },
  "a module": {"configs.py": "seed = 1\n"},
  "modules": {
    "base.py": "seed = 1\n",
    "configuration.py": "",
    "config/base.py": "",
    "config.py": "",
  },
}


@pytest.fixture
def own(request, tmp_path, monkeypatch):
  """The working folder of a user, first on the path, in a process that has imported no configs."""
  for name, text in OWN[request.param].items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  monkeypatch.chdir(tmp_path)
  modules = {
    name: module for name, module in sys.modules.items() if name.split(".")[0] == "configs"
  }
  for name in modules:
    del sys.modules[name]
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path
  for name in [name for name in sys.modules if name.split(".")[0] == "configs"]:
    del sys.modules[name]
  sys.modules.update(modules)


@pytest.mark.parametrize("own", OWN, indirect=True)
def test_configs_of_the_package_work_beside_a_users_own(own):
  loaded = {name: configuration.load(name) for name in configuration.by_name()}
  file = package_data.folder() / "configs" / "math_1b_gpu.py"
  assert configuration.load(str(file)).to_dict() == loaded["math_1b_gpu"].to_dict()
  assert loaded["math_8b_lora"].engine.name == "sglang", "what it inherits"
  assert configuration.load("curriculum:mixed").data.num_prompts_per_dataloader == 4
  assert "configs" not in sys.modules, "the user's own was not imported"


@pytest.mark.parametrize("own", ["a package", "a module"], indirect=True)
def test_a_config_of_ones_own_says_how_it_begins_where_configs_is_the_users(own):
  (own / "mine.py").write_text("import configs.gsm8k\n")
  with pytest.raises(ConfigError, match=r"mine.py:1: .*write configuration.load\('gsm8k'\)"):
    configuration.load("mine.py")
  (own / "mine.py").write_text("import configs.of_my_own\n")
  with pytest.raises(ConfigError, match="No module named 'configs.of_my_own'") as refused:
    configuration.load("mine.py")
  assert "configuration.load" not in str(refused.value)
  (own / "mine.py").write_text(
    "from grpo_jax import configuration\nimport configs\n\n\n"
    "def get_config():\n  config = configuration.load('gsm8k')\n"
    "  config.seed = getattr(configs, 'seed', 5)\n  return config\n"
  )
  config = configuration.load("mine.py")
  assert config.model == configuration.load("gsm8k").model and config.seed in (1, 5)


def test_the_console_script_finds_modules_of_the_working_folder(tmp_path, monkeypatch):
  (tmp_path / "a_loss_in_the_working_folder.py").write_text("def paper():\n  pass\n")
  monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="no module 'a_loss_in.*working folder, .* of PYTHONPATH"):
    registry.function("a_loss_in_the_working_folder.paper")
  monkeypatch.setattr("sys.argv", ["grpo-jax", "--version"])
  with pytest.raises(SystemExit):
    cli.console()
  assert sys.path[0] == os.getcwd()
  assert registry.function("a_loss_in_the_working_folder.paper")


def test_a_config_of_ones_own_adds_environments_to_one_of_the_package(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for begins in ("import configs.math_1b_lora as base", "from configs import math_1b_lora as base"):
    (tmp_path / "mine.py").write_text(
      f"{begins}\n\n\ndef get_config():\n  config = base.get_config()\n"
      "  config.environments.mine = dict(module='short_answer')\n  return config\n"
    )
    assert configuration.load("mine.py").environments.mine.module == "short_answer"
