"""Configurations: messages instead of traces, exact round trips, readable differences."""

import copy
import json
import math
import pathlib
import re

import pytest
from ml_collections import ConfigDict, FieldReference, config_dict

import configs.base
from grpo_jax.config import base, configuration, field_checks, run_options
from grpo_jax.config.configuration import ConfigError


def make_config():
  return ConfigDict(
    {
      "seed": 1,
      "loss": {"clip_low": 0.2, "dual_clip": config_dict.placeholder(float), "clamp": None},
      "data": {"shuffle": True, "args": {}, "stop": ("a", "b"), "sources": [{"path": "x"}]},
      "logging": {"every_steps": 1, "high": math.inf},
    }
  )


def write_config(tmp_path, text, name="some.py"):
  folder = tmp_path / "configs"
  folder.mkdir(exist_ok=True)
  (folder / name).write_text(text)
  return str(folder / name)


GOOD = """
from ml_collections import ConfigDict
def get_config(word="none"):
  return ConfigDict({"word": word, "loss": {"clip_low": 0.2}})
"""


def test_load_returns_a_locked_config_and_passes_the_word_after_the_colon(tmp_path):
  path = write_config(tmp_path, GOOD)
  assert configuration.load(path).word == "none"
  config = configuration.load(f"{path}:tiny")
  assert config.word == "tiny"
  with pytest.raises(AttributeError):
    config.loss.clp_low = 0.3


def test_load_finds_the_neighbours_of_a_file_from_any_working_directory(tmp_path, monkeypatch):
  write_config(tmp_path, GOOD, "base_of_neighbour_test.py")
  path = write_config(tmp_path, "from configs_of_test.base import get_config", "child.py")
  (tmp_path / "configs").rename(tmp_path / "configs_of_test")
  (tmp_path / "configs_of_test" / "base_of_neighbour_test.py").rename(
    tmp_path / "configs_of_test" / "base.py"
  )
  monkeypatch.chdir("/")
  assert configuration.load(path.replace("/configs/", "/configs_of_test/")).word == "none"


def test_the_package_holds_the_base_config_and_needs_no_file_outside_of_it():
  assert configs.base.get_config is base.get_config
  package = pathlib.Path(base.__file__).parents[1]
  imported = re.compile(r"^\s*(import|from) configs\b", re.MULTILINE)
  assert [path for path in package.rglob("*.py") if imported.search(path.read_text())] == []


@pytest.mark.parametrize(
  "text, message",
  [
    ("def get_config(:\n  pass\n", r"some\.py:1: invalid syntax"),
    ("\nimport nothing_of_this_name\n", r"some\.py:2: ModuleNotFoundError.*nothing_of_this_name"),
    ("def get_config():\n  return 1 / 0\n", r"some\.py:2: ZeroDivisionError: division by zero"),
    ("x = 3\n", r"some\.py: has no function get_config"),
    ("get_config = 3\n", r"some\.py: has no function get_config"),
    ("def get_config():\n  pass\n", r"some\.py: get_config\(\) must return .*, got None"),
    ("def get_config():\n  return {}\n", r"must return .*, got \{\} \(dict\)"),
    ("def get_config(word):\n  return {}\n", r"some\.py: TypeError: .*'word'"),
    (
      "from ml_collections import ConfigDict\n"
      "def get_config():\n  c = ConfigDict(dict(a=1)).lock()\n  c.b = 2\n  return c\n",
      r"some\.py:4: AttributeError: .*b",
    ),
    (
      "from ml_collections import ConfigDict\n"
      "def get_config():\n  return ConfigDict(dict(learn=dict(update={'a': 1})))\n",
      r"'learn.update' cannot be the name",
    ),
    (
      "from ml_collections import ConfigDict, config_dict as c\n"
      "def get_config():\n  return ConfigDict(dict(a=c.required_placeholder(int)))\n",
      r"required_placeholder has no value",
    ),
  ],
)
def test_load_names_file_and_line_of_a_mistake(tmp_path, text, message):
  with pytest.raises(ConfigError, match=message):
    configuration.load(write_config(tmp_path, text))


def test_load_names_the_file_nearest_to_a_missing_one(tmp_path):
  path = write_config(tmp_path, GOOD, "math_1b.py")
  with pytest.raises(ConfigError, match=r"no file .*math_1.py \(did you mean .*math_1b.py'\?\)"):
    configuration.load(path.replace("1b", "1"))
  with pytest.raises(ConfigError, match="is a folder; there are: .*math_1b.py"):
    configuration.load(str(tmp_path / "configs"))


def test_fields_are_dotted_and_nullable_ones_are_known():
  config = make_config()
  assert list(configuration.fields(config)) == [
    *("data.args", "data.shuffle", "data.sources", "data.stop"),
    *("logging.every_steps", "logging.high", "loss.clamp", "loss.clip_low", "loss.dual_clip"),
    "seed",
  ]
  assert configuration.nullable(config) == {"loss.clamp", "loss.dual_clip"}
  config.loss.dual_clip = 3.0
  config.loss.clip_low = FieldReference(0.2)
  assert configuration.nullable(config) == {"loss.clamp", "loss.clip_low", "loss.dual_clip"}


@pytest.mark.parametrize(
  "name, message",
  [
    ("loss.clp_low", "did you mean 'loss.clip_low'"),
    ("los.clip_low", "did you mean 'loss.clip_low'"),
    ("clip_low", "did you mean 'loss.clip_low'"),
    ("data.clip_low", "did you mean 'loss.clip_low'"),
    ("sede", "did you mean 'seed'"),
    ("loss", "is a section; set its fields instead. loss has: clamp, clip_low, dual_clip"),
    ("loss.clip_low.x", r"loss.clip_low is not a section but 0.2 \(float\)"),
    ("data.args.depth", r"data.args is empty here .*: --config.data.args=.\{'KEY': VALUE\}"),
    ("qqqqqqqq", "the configuration has: data, logging, loss, seed"),
  ],
)
def test_refusal_names_the_nearest_field(name, message):
  refusal = configuration.refusal(make_config(), name)
  assert refusal is not None
  pytest.raises(ConfigError, _raise, refusal).match(message)


def test_a_mistyped_section_suggests_its_own_field_and_not_one_of_another_section():
  for section, field in (("rolout", "rollout.group_size"), ("evaluatoin", "evaluation.data.path")):
    wrong = f"{section}.{field.partition('.')[2]}"
    on_the_command_line = str(configuration.refusal(base.get_config(), wrong))
    (in_a_file,) = field_checks.problems({wrong: 3})
    assert f"did you mean {field!r}?" in on_the_command_line
    assert f"did you mean {field!r}?" in in_a_file


def _raise(message):
  raise ConfigError(message)


def test_refusal_lets_every_field_pass():
  config = make_config()
  names = [*configuration.fields(config), "data.sources[0].path"]
  assert [configuration.refusal(config, name) for name in names] == [None] * len(names)


def test_check_reports_every_complaint_at_once():
  rules = [lambda c: ["one"], lambda c: [], lambda c: [f"two {c.seed}", "three"]]
  with pytest.raises(ConfigError, match=r"(?s)cannot work:\n  - one\n  - two 1\n  - three$"):
    configuration.check(make_config(), rules)
  configuration.check(make_config(), [lambda c: []])


def test_written_config_is_strict_json_and_equal_when_read(tmp_path):
  config = make_config()
  configuration.write(config, tmp_path / "config.json")

  def refuse(word):
    raise AssertionError(f"{word} is no JSON")

  text = (tmp_path / "config.json").read_text()
  stored = json.loads(text, parse_constant=refuse)
  assert stored["logging"] == {"every_steps": 1, "high": "inf"}
  assert stored["data"]["stop"] == ["a", "b"]
  assert configuration.differences(configuration.read(tmp_path / "config.json"), config) == (
    configuration.Differences(harmless=(), serious=())
  )


def test_config_that_json_cannot_hold_names_the_field():
  with pytest.raises(ConfigError, match=r"data.f\[1\] is .*function"):
    configuration.to_json(ConfigDict({"data": {"f": [1, print]}}))


def test_unreadable_stored_config_is_named(tmp_path):
  (tmp_path / "config.json").write_text('{"seed": ')
  with pytest.raises(ConfigError, match="config.json cannot be read"):
    configuration.read(tmp_path / "config.json")
  with pytest.raises(ConfigError, match="config.json cannot be read"):
    configuration.read(tmp_path / "absent" / "config.json")


def test_differences_name_both_values_and_say_which_are_harmless():
  stored = configuration.to_json(make_config())
  config = make_config()
  config.loss.clip_low = 0.3
  config.loss.dual_clip = 3.0
  config.data.stop = ("a",)
  config.logging.every_steps = 5
  config.seed = 2
  config.data.args.depth = 4
  stored["gone"] = {"x": "y"}
  found = configuration.differences(stored, config, harmless=["logging.*", "seed"])
  assert found.harmless == ("logging.every_steps: was 1, is 5", "seed: was 1, is 2")
  assert found.serious == (
    "data.args.depth: was absent, is 4",
    'data.stop: was ["a", "b"], is ["a"]',
    "loss.clip_low: was 0.2, is 0.3",
    "loss.dual_clip: was null, is 3.0",
    "data.args: was {}, is absent",
    'gone.x: was "y", is absent',
  )


@pytest.fixture(scope="module")
def loaded():
  root = pathlib.Path(__file__).parents[2]
  return configuration.load(str(root / "configs" / "quickstart.py"))


@pytest.mark.parametrize(
  "path, name, expected",
  [
    ("", "total_step", "no field 'total_step' (did you mean 'total_steps'?)"),
    ("", "clip_high", "(did you mean 'advantages.clip_high' or 'loss.clip_high'?)"),
    ("", "group_siz", "(did you mean 'rollout.group_size'?)"),
    ("loss", "clip_hihg", "no field 'loss.clip_hihg' (did you mean 'loss.clip_high'?); loss has: "),
    ("engine.sglang", "server", "(did you mean 'engine.sglang.servers'?)"),
    ("", "qqqqqqqq", "no field 'qqqqqqqq'; it has: advantages, "),
  ],
)
def test_a_typo_in_python_is_one_line_with_the_nearest_name(loaded, path, name, expected):
  section = loaded
  for part in path.split(".") if path else ():
    section = section[part]
  for act in (
    lambda: setattr(section, name, 5),
    lambda: getattr(section, name),
    lambda: section.__setitem__(name, 5),
  ):
    with pytest.raises((AttributeError, KeyError)) as caught:
      act()
    message = str(caught.value)
    assert expected in message and "\n" not in message and len(message) < 720


def test_a_loaded_config_is_shown_as_readable_text(loaded):
  text = repr(loaded)
  assert text == str(loaded) and "!!python" not in text and "ConfigDict" not in text
  assert "loss:\n" in text and "  kl_coef: 0.0\n" in text and "seed: 0\n" in text
  assert "  task_args:\n    max_digits: 2\n" in text and "  options: {}\n" in text
  assert len(text.splitlines()) < 400


def test_a_loaded_config_still_is_a_config(loaded):
  config = copy.deepcopy(loaded)
  config.loss.clip_high = 0.28
  config["total_steps"] = 3
  config.environments = {"own": {"module": "math", "answer": "any"}}
  config.data.task_args = ConfigDict({"depth": 3})
  with pytest.raises(AttributeError, match="did you mean 'environments.own.module'"):
    config.environments.own.modul = "x"
  with pytest.raises(TypeError):
    config.total_steps = "many"
  assert (loaded.loss.clip_high, config.loss.clip_high) == (None, 0.28)
  assert config.optim.to_dict()["max_grad_norm"] == 1.0 and not hasattr(config, "nothing")
  config.optim.max_grad_norm = None  # a reference: it may be None.
  assert configuration.to_json(config)["data"]["task_args"] == {"depth": 3}
  with config.unlocked():
    config.mine = 1
  assert config.mine == 1 and "mine" in repr(config)


@pytest.mark.long
def test_an_unknown_field_is_named_with_the_line_that_sets_it(tmp_path):
  text = (
    "from grpo_jax.config import base\n\n\ndef get_config():\n  config = base.get_config()\n"
    "  config.total_step = 3\n  loss = config.loss\n  loss.clip_hihg = 0.3\n"
    "  config.rollout.update(dict(group_sze=4))\n"
    "  config.update_from_flattened_dict({'optim.learning_rate': 1e-5})\n"
    "  with config.unlocked():\n    config['data']['shufle'] = True\n  return config\n"
  )
  path = write_config(tmp_path, text)
  config = configuration.load(path)
  said = [each for each in run_options.validate(config) if "there is no field" in each]
  assert sorted(said) == [
    f"{path}:12: there is no field 'data.shufle' (did you mean 'data.shuffle'?), but it is set to"
    " True",
    f"{path}:6: there is no field 'total_step' (did you mean 'total_steps'?), but it is set to 3",
    f"{path}:8: there is no field 'loss.clip_hihg' (did you mean 'loss.clip_high'?), but it is set"
    " to 0.3",
    f"{path}:9: there is no field 'rollout.group_sze' (did you mean 'rollout.group_size'?), but it"
    " is set to 4",
  ]
  loading = (
    f"from grpo_jax import configuration\ndef get_config(): return configuration.load({path!r})"
  )
  outer = configuration.load(write_config(tmp_path, loading, "outer.py"))
  assert configuration.place_of(outer, "total_step") == f"{path}:6: "
  # One that a neighbour sets, and one that was set elsewhere.
  folder = tmp_path / "neighbours_of_a_test"
  folder.mkdir()
  (folder / "other.py").write_text(text.replace("total_step ", "sed "))
  module = "neighbours_of_a_test.other"
  importing = f"import {module}\n\ndef get_config():\n  return {module}.get_config()\n"
  (folder / "importing.py").write_text(importing)
  config = configuration.load(str(folder / "importing.py"))
  places = [configuration.place_of(config, name) for name in ("sed", "nowhere")]
  assert places[0].endswith("other.py:6: ") and places[1] == ""
