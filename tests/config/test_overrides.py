"""Overrides in Python: the rules and the messages of the command line, for values of Python."""

import pathlib

import numpy as np
import pytest

from grpo_jax import configuration
from grpo_jax.config import command_line
from grpo_jax.config import configuration as files
from grpo_jax.configuration import ConfigError
from grpo_jax.files import package_data

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_a_name_loads_what_its_path_loads(name, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  by_path = files.to_json(configuration.load(str(ROOT / "configs" / f"{name}.py")))
  assert files.to_json(configuration.load(name)) == by_path
  assert name in files.by_name()


def test_a_word_follows_the_name_and_a_path_stays_a_path(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  path = str(ROOT / "configs" / "curriculum.py:mixed")
  assert files.to_json(configuration.load("curriculum:mixed")) == files.to_json(
    configuration.load(path)
  )
  text = "from ml_collections import ConfigDict\n\ndef get_config():\n  return ConfigDict({'a': 1})"
  pathlib.Path("quickstart.py").write_text(text)
  pathlib.Path("without_suffix").write_text(text)
  assert list(configuration.load("quickstart.py").keys()) == ["a"]
  assert list(configuration.load(pathlib.Path("quickstart.py")).keys()) == ["a"]
  assert list(configuration.load("without_suffix").keys()) == ["a"]
  assert "loss" in configuration.load("quickstart")


def test_a_config_of_ones_own_imports_the_base_by_either_name(monkeypatch, tmp_path):
  (tmp_path / "configs").mkdir()
  for line in ("import configs.base as base", "from grpo_jax.config import base"):
    file = tmp_path / "configs" / "mine.py"
    file.write_text(
      f"{line}\n\ndef get_config():\n  config = base.get_config()\n  config.seed = 7\n"
      "  return config\n"
    )
    assert configuration.load(str(file)).seed == 7


@pytest.mark.parametrize(
  "name, message",
  [
    ("quikstart", "no config 'quikstart' .did you mean 'quickstart'.*by name there are: base, "),
    ("math_1b_gp", "did you mean 'math_1b_gpu'"),
    ("tiny", "did you mean 'configs/tiny.py'"),
    (
      "quickstart.py",
      "no file quickstart.py .did you mean 'quickstart', the config of",
    ),
    ("configs/math_1b.py", "no file configs/math_1b.py .did you mean 'math_1b', the config of the"),
    ("configs", "configs is a folder"),
    ("", "is a folder"),
  ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, message, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "tiny.py").write_text("")
  with pytest.raises(ConfigError, match=message):
    configuration.load(name)


def test_installed_configs_are_found_inside_the_package(monkeypatch, tmp_path):
  package = tmp_path / "site-packages" / "grpo_jax"
  monkeypatch.setattr(package_data, "__file__", str(package / "files" / "package_data.py"))
  assert package_data.folder() == tmp_path / "site-packages"
  (package / "shipped" / "configs").mkdir(parents=True)
  assert package_data.folder() == package / "shipped"


@pytest.mark.parametrize(
  "name, value, expected",
  [
    ("total_steps", 3, 3),
    ("total_steps", np.int64(3), 3),
    ("optim.learning_rate", 1, 1.0),
    ("optim.learning_rate", np.float32(0.5), 0.5),
    ("optim.max_grad_norm", None, None),
    ("loss.clip_high", 0.28, 0.28),
    ("loss.dual_clip", 3, 3.0),
    ("model.path", pathlib.Path("/models/own"), "/models/own"),
    ("evaluation.pass_k", [1, 8], (1, 8)),
    ("sampling.stop_strings", ("a", "b"), ("a", "b")),
    ("data.shuffle", False, False),
  ],
)
def test_a_value_has_the_type_of_its_field(name, value, expected):
  config = configuration.load("quickstart", {name: value})
  found = files.fields(config)[name]
  assert (found, type(found)) == (expected, type(expected))
  files.to_json(config)


def test_mappings_set_fields_and_leave_the_others():
  config = configuration.load(
    "quickstart",
    {
      "loss": {"clip_low": 0.1, "clip_high": 0.3},
      "data.task_args": {"max_digits": 1, "depth": 2},
      "environments.mine": {"module": "function", "path": "__main__.brevity"},
      "environments": {"arithmetic": {"timeout_s": 2.0}},
    },
  )
  assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef) == (0.1, 0.3, 0.0)
  assert config.data.task_args.to_dict() == {
    **dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    "depth": 2,
  }
  assert config.environments.mine.path == "__main__.brevity"
  assert config.environments.arithmetic.to_dict() == dict(
    module="math", answer="last_number", workers=1, timeout_s=2.0
  )


@pytest.mark.parametrize(
  "values, message",
  [
    ({"total_step": 3}, "^total_step: there is no field 'total_step' .did you mean 'total_steps'"),
    ({"clip_hihg": 3}, "did you mean 'loss.clip_high'|did you mean 'advantages.clip_high'"),
    ({"loss": {"clip_lw": 1}}, "no field 'loss.clip_lw' .did you mean 'loss.clip_low'"),
    ({"loss": 3}, "^loss: it is a section"),
    ({"total_steps": "many"}, "^total_steps must be an integer >= 1, got 'many' .str."),
    ({"total_steps": "3"}, "^total_steps must be an integer"),
    ({"total_steps": 1.5}, "^total_steps must be an integer"),
    ({"total_steps": True}, "^total_steps must be an integer"),
    ({"total_steps": 0}, "^total_steps must be an integer >= 1, got 0"),
    ({"total_steps": None}, "^total_steps=None: this field needs a value"),
    ({"seed": -1}, "^seed must be an integer from 0"),
    ({"data.shuffle": 1}, "^data.shuffle must be True or False, got 1"),
    ({"loss.clip_low": "0.2"}, "^loss.clip_low must be"),
    ({"model.compute_dtype": "float64"}, "must be one of 'float32', 'bfloat16'"),
    ({"sampling.stop_strings": "a"}, "^sampling.stop_strings must be a list"),
    ({"data.task_args": 3}, "^data.task_args: it is a section"),
    ({"evaluation.datasets[0].path": "x"}, "elements of a list are set together"),
    ({"environments.own.low": 1}, "no field 'environments.own.low'"),
  ],
)
def test_a_value_that_cannot_be_is_refused_and_nothing_is_changed(values, message):
  config = configuration.load("quickstart")
  before = files.to_json(config)
  with pytest.raises(ConfigError, match=message) as caught:
    configuration.override(config, {"seed": 5, **values})
  assert "\n" not in str(caught.value)
  assert files.to_json(config) == before


def test_every_complaint_is_a_line():
  with pytest.raises(ConfigError, match="^total_steps must.*\nloss.clip_low must"):
    configuration.load("quickstart", {"total_steps": 0, "loss.clip_low": "x"})


def test_fields_of_a_config_of_ones_own_keep_their_types(tmp_path):
  (tmp_path / "custom_functions.py").write_text(
    "from ml_collections import ConfigDict\n\ndef get_config():\n"
    "  return ConfigDict({'word': 'a', 'deep': {'rate': 0.5, 'many': (1, 2)}, 'none': None})\n"
  )
  load = lambda **values: configuration.load(str(tmp_path / "custom_functions.py"), values)
  config = load(word="b", deep={"rate": 1, "many": [3]}, none="x")
  assert files.to_json(config) == {
    "word": "b",
    "deep": {"rate": 1.0, "many": [3]},
    "none": "x",
  }
  for values, message in (
    ({"word": 3}, "word must be a string, got 3"),
    ({"deep": {"rate": "fast"}}, "deep.rate must be a number, got 'fast'"),
    ({"deep": {"many": 3}}, "deep.many must be a tuple, got 3"),
  ):
    with pytest.raises(ConfigError, match=message):
      load(**values)


def test_another_model_drops_the_fallback_as_on_the_command_line():
  config = configuration.load("quickstart")
  assert configuration.override(config, {"model.path": "org/mine"}) is config
  assert config.model.fallback is None
  command = command_line.parse(["--config=quickstart", "--config.model.path=org/mine"])
  assert files.to_json(command.config) == files.to_json(config)
  assert command.config_path == "quickstart"
  with pytest.raises(AttributeError, match="did you mean 'total_steps'"):
    config.total_step = 3
