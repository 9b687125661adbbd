"""Options that were removed: every way to give one is answered with what to use instead."""

import re

import pytest

import configs.base
from grpo_jax import configuration, train
from grpo_jax.config import command_line, removed
from grpo_jax.config.configuration import ConfigError


@pytest.mark.long
def test_every_way_to_give_a_removed_option_says_what_to_use_instead():
  for name, option in removed.OPTIONS.items():
    said = re.escape(f"there is no field {name!r} any more: {option.instead}")
    with pytest.raises(ConfigError, match=said):
      command_line.parse(["--config=base", f"--config.{name}=1"])
    with pytest.raises(ConfigError, match=said):
      configuration.override(configuration.load("base"), {name: 1})
    path, _, field = name.rpartition(".")
    in_file = configs.base.get_config()
    section = in_file
    for part in path.split("."):
      section = section[part]
    section[field] = 1
    (found,) = [each for each in train.validate(in_file) if name in each]
    assert re.search(said, found)


def test_removed_options_are_left_out_of_a_stored_config_and_nothing_else_is():
  stored = {"seed": 3, "engine": {"router": 1, "sglang": {"router": 2, "port": 4}}}
  expected = {"seed": 3, "engine": {"router": 1, "sglang": {"port": 4}}}
  assert removed.without(stored) == expected
  assert list(removed.refusals({"engine": None})) == list(removed.refusals({})) == []


def test_a_file_that_sets_an_option_of_a_removed_section_is_answered_with_its_line(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "from grpo_jax.config import base\n\n\ndef get_config():\n  config = base.get_config()\n"
    "  config.logging.mlflow.experiment = 'mine'\n  return config\n"
  )
  said = r"mine.py:6: there is no field 'logging.mlflow.experiment' any more: .*name='mlflow'"
  with pytest.raises(ConfigError, match=said):
    configuration.load(str(file))
  with pytest.raises(ConfigError, match="'logging.swanlab.mode' any more"):
    command_line.parse(["--config=base", "--config.logging.swanlab.mode=local"])


def test_a_value_that_has_another_name_now_is_answered_with_it():
  for name, values in removed.VALUES.items():
    for former, now in values.items():
      config = configs.base.get_config()
      config.update_from_flattened_dict({name: former})
      assert f"{name}={former!r} is now {now!r}" in list(train.validate(config))
      config.update_from_flattened_dict({name: now})
      assert not [each for each in train.validate(config) if name in each]
  stored = {"model": {"attention": "xla_chunked", "logprobs": "xla_chunked", "path": ["a"]}}
  expected = {"attention": "xla_blocked", "logprobs": "xla_chunked", "path": ["a"]}
  assert removed.without(stored) == {"model": expected}
