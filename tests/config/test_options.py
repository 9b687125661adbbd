"""Every field of a config refuses values of the wrong type and out of range, by its name."""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from ml_collections import ConfigDict, FieldReference

from grpo_jax import environments
from grpo_jax.config import command_line, configuration, field_checks, run_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import ALSO, OPTIONS, Config
from grpo_jax.values import checked, options
from grpo_jax.values.options import option

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SHIPPED = [path for path in sorted(CONFIGS.glob("*.py")) if path.stem != "__init__"]
BASE = configuration.load(str(CONFIGS / "base.py"))
FIELDS = configuration.plain_fields(BASE)
NULLABLE = configuration.nullable(BASE) | {"model.fallback"}

WRONG = ["0.2", "", None, math.nan, math.inf, -1, -0.5, 0.5, [1.5], [], {"a": 1}, {}, True, print]
# What may be negative, infinite or anything but a number; the rest follows from the types.
NEGATIVE = {
  *("advantages.clip_low", "advantages.clip_high", "data.task_seed", "evaluation.data.task_seed"),
  *("filters.min_reward_mean", "filters.max_reward_mean"),
}
REST_OF_DEVICES = {
  "mesh.data",
  "mesh.fsdp",
  "mesh.tensor",
  "mesh.expert",
  "mesh.context",
}  # -1, of the negative numbers.
INFINITE = {"filters.min_reward_mean", "filters.max_reward_mean", "loss.importance_high"} | {
  "loss.clip_cov_ub"
}
EMPTY_STRING = {
  *("data.output_key", "data.system_prompt", "data.tools_key", "model.fallback"),
  *("evaluation.data.output_key", "evaluation.data.system_prompt"),
}


def type_of(name):
  """Returns the type that base.py gives a field: of its value, or of its placeholder."""
  section, _, last = name.rpartition(".")
  holder = BASE
  for part in section.split(".") if section else ():
    holder = holder[part]
  kind = type(FIELDS[name]) if FIELDS[name] is not None else holder.get_type(last)
  return kind


def may_be(name, value):
  """Whether a value is of the type of a field, whatever its range; written without the table."""
  kind = type_of(name)
  if value is None:
    return name in NULLABLE
  if kind is bool:
    return isinstance(value, bool)
  if kind is str:
    return isinstance(value, str) and (value != "" or name in EMPTY_STRING)
  if kind is tuple:
    return isinstance(value, list) and not value
  if kind in (dict, ConfigDict):
    return isinstance(value, dict)
  if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
    return False
  if kind is int and not isinstance(value, int):
    return False
  if math.isinf(value) and name not in INFINITE:
    return False
  return value >= 0 or name in NEGATIVE or (value == -1 and name in REST_OF_DEVICES)


def test_fields_refuse_values_of_other_types_by_name():
  ours = {name for name in FIELDS if not name.startswith("environments.")}
  assert ours == set(OPTIONS) - set(ALSO)
  wrong = []
  for name in sorted(ours):
    wrong += field_checks.problems({name: FIELDS[name]})
    for value in WRONG:
      if may_be(name, value):
        continue
      said = list(field_checks.problems({name: value}))
      if len(said) != 1 or not re.fullmatch(rf"{re.escape(name)} must be .*got.*", said[0]):
        wrong.append((name, value, said))
  assert wrong == []


def test_every_option_has_a_meaning():
  meanings = dict(options.meanings(Config))
  assert [name for name in FIELDS if not meanings[name]] == []


@dataclasses.dataclass(frozen=True)
class Part:
  size: int = option(3, "number of rows", checked.whole(low=1))
  names: Mapping[str, int] = option({}, "names", checked.mapping())
  note: str | None = None  # not an option.


@dataclasses.dataclass(frozen=True)
class Whole:
  part: Part = options.section(Part, "a part")
  other: Mapping[str, Any] = options.differences(Part, "what differs", ("size",))
  made: Mapping[str, Mapping[str, Any]] = options.named("first", Part, "parts of users")


def test_an_annotation_that_says_everything_is_the_kind_of_an_option():
  @dataclasses.dataclass(frozen=True)
  class Plain:
    on: bool = option(True, "a switch")
    word: Literal["a", "b"] | None = option(None, "a choice")
    words: tuple[str, ...] = option((), "texts")
    more: Mapping[str, Any] = option({}, "a mapping")

  found = options.kinds(Plain)
  assert found["word"].words == ("a", "b") and found["word"].fits(None)
  for name, right, wrong in (
    ("on", False, 1),
    ("word", "b", "c"),
    ("words", ["x"], [""]),
    ("more", {"a": 1}, {1: "a"}),
  ):
    assert found[name].fits(right) and not found[name].fits(wrong), name

  @dataclasses.dataclass(frozen=True)
  class Unbounded:
    size: int = option(1, "says no range")

  with pytest.raises(TypeError, match="an option of type <class 'int'> needs a kind"):
    options.kinds(Unbounded)


def test_a_section_is_read_and_written_and_knows_its_options():
  whole = options.read(Whole, {"part": {"size": 5, "unknown": 1}, "made": {"mine": {"a": 1}}})
  assert whole == Whole(Part(size=5), made={"mine": {"a": 1}})
  plain = {"part": {"size": 5, "names": {}}, "other": {"size": None}, "made": {"mine": {"a": 1}}}
  assert options.plain(whole) == plain and options.read(Whole, plain) == whole
  assert options.plain(Part(note="kept")) == {"size": 3, "names": {}, "note": "kept"}
  assert options.values(Part(note="left")) == {"size": 3, "names": {}}
  found = dict(options.below(Whole))
  assert list(found) == ["part.size", "part.names", "other.size"]
  assert found["other.size"].kind.fits(None) and not found["part.size"].kind.fits(None)
  assert [name for name, _ in options.meanings(Whole)] == [
    *("part", "part.size", "part.names", "other", "other.size"),
    *("made", "made.first.size", "made.first.names"),
  ]
  with pytest.raises(ValueError, match="part: size must be an integer >= 1, got 0"):
    options.require(Part(size=0), of="part")


@pytest.mark.long
def test_the_typed_config_is_written_as_the_config_of_a_file():
  for path in SHIPPED:
    config = configuration.load(str(path))
    typed = configuration.typed(config)
    assert json.dumps(configuration.to_json(typed)) == json.dumps(configuration.to_json(config))
    assert configuration.typed(typed) is typed
    changed = configuration.replaced(typed, {"loss.kl_coef": 0.5, "environments.own": {"a": 1}})
    assert changed.loss.kl_coef == 0.5 and changed.environments["own"] == {"a": 1}
    assert configuration.typed(config) == typed != changed


def test_what_is_right_is_not_refused():
  for name, values in {
    "loss.clip_low": (0, 0.2, 1, None),
    "data.split_validation_size": (0, 0.1, 100),
    "mesh.data": (-1, 1, 8),
    "batching.row_buckets": ((512, 1024), [512], None),
    "sampling.stop_strings": (("\n",), [" "], ()),
    "data.output_key": ("", "answer", None),
    "seed": (0, 2**32 - 1),
    "filters.min_reward_mean": (-math.inf, -1.0),
  }.items():
    for value in values:
      assert list(field_checks.problems({name: value})) == [], (name, value)


@pytest.mark.long
def test_no_shipped_config_is_refused():
  for path in SHIPPED:
    fields = configuration.plain_fields(configuration.load(str(path)))
    assert list(field_checks.problems(fields)) == [], path.stem


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--config.loss.clip_low=nan", r"loss\.clip_low must be a finite number >= 0"),
    ("--config.optim.learning_rate=inf", r"optim\.learning_rate must be a finite number > 0"),
    ("--config.rollout.group_size=-1", r"rollout\.group_size must be an integer >= 1, got -1"),
    ("--config.shaping.scale_from=1,2,3", r"shaping\.scale_from must be a list of 2 elements"),
    ("--config.advantages.weights=nan,1", r"advantages\.weights must be a list"),
    ("--config.engine.sglang.port=70000", r"engine\.sglang\.port must be an integer .*70000"),
    ("--config.data.datasets=3", r"data\.datasets must be a list, each a mapping"),
    ("--config.environments.math.workers=0", r"environments\.math\.workers must be an integer"),
    ("--config.environments.math.timeout_s=nan", r"environments\.math\.timeout_s must be"),
    ("--config.environments.math.format_reward=abc", r"environments\.math\.format_reward must be"),
    ("--config.loss.loss=grpo", "no loss 'grpo': here it is 'clipped'"),
    ("--config.loss.sapo_temperature_positive=2", "sapo_temperature_positive=2.0 would never be"),
    ("--config.evaluation.sampling.top_p=0", r"evaluation\.sampling\.top_p must be a finite"),
    ("--config.data.on_error=stopp", r"data\.on_error must be one of 'stop', 'skip'"),
    ("--config.offline.rank_temperature=-1", r"offline\.rank_temperature must be a finite"),
  ],
)
def test_a_flag_of_a_wrong_value_is_refused_with_its_name(flag, message):
  with pytest.raises(ConfigError, match=message):
    command = command_line.parse([f"--config={CONFIGS / 'base.py'}", flag])
    configuration.check(command.config, [run_options.validate])


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--config.loss.clip_low=abc", r"clip_low"),
    ("--config.loss.kl_coef=None", r"kl_coef=None: this field needs a value"),
    ("--config.data.shuffle=maybe", r"shuffle.*true or false"),
    ("--config.total_steps=1.5", r"total_steps.*an integer"),
  ],
)
def test_a_flag_of_another_type_is_refused_as_it_is_read(flag, message):
  with pytest.raises(ConfigError, match=message):
    command = command_line.parse([f"--config={CONFIGS / 'base.py'}", flag])
    configuration.check(command.config, [run_options.validate])


def test_rules_about_several_fields_are_reported_with_single_wrong_fields():
  config = configuration.load(str(CONFIGS / "base.py"))
  config.total_steps = 0
  config.rollout.group_size = -1
  config.filters.min_scored = 9
  config.evaluation.pass_k = (4,)
  config.optim.final_share = 0.1
  reported = list(run_options.validate(config))
  assert reported[:2] == [
    "rollout.group_size must be an integer >= 1, got -1",
    "total_steps must be an integer >= 1, got 0",
  ]
  for expected in ("evaluation.pass_k=[4]", "final_share=0.1"):
    assert any(expected in line for line in reported), expected
  assert not any("min_scored" in line for line in reported)  # nothing is known to compare it with.


def test_a_value_that_replaces_a_wrong_one_is_not_reported():
  config = configuration.load(str(CONFIGS / "base.py"))
  config.rollout.max_tokens = -5
  config.shaping.overlong_buffer_tokens = 4  # with room for completions of 7 tokens it never acts.
  assert list(run_options.validate(config)) == [
    "rollout.max_tokens must be an integer >= 2, got -5"
  ]


def test_the_values_that_replace_a_field_fit_its_kind():
  assert [
    (name, value)
    for name, each in OPTIONS.items()
    for value in field_checks.stand_ins(name)
    if not each.kind.fits(value)
  ] == []


def test_all_wrong_and_unknown_fields_are_reported_at_once():
  reported = list(field_checks.problems({"loss.kl_coef": "0.1", "seed": -1, "loss.foo": 3}))
  assert len(reported) == 3 and reported[2] == "there is no field 'loss.foo', but it is set to 3"


@pytest.mark.parametrize("value", ["many", None, math.nan, 0, -2, True, [2]])
def test_settings_of_environments_are_checked_for_library_users_too(value):
  with pytest.raises(ValueError, match=r"environments\.math\.workers must be an integer >= 1"):
    environments.make(math={"workers": value})


def test_the_resolved_config_has_numbers_in_place_of_none():
  config = configuration.load(str(CONFIGS / "base.py"))
  with config.unlocked():
    config.loss.loss = "gspo"
  loss = run_options.resolved(config).loss
  assert (loss.clip_low, loss.clip_high, loss.aggregation) == (3e-4, 4e-4, "sequence_mean")
  assert config.loss.clip_low is None
  written = configuration.to_json(run_options.resolved(BASE))["loss"]
  assert (written["clip_low"], written["clip_high"]) == (0.2, 0.2)
  assert not isinstance(run_options.resolved(BASE).loss.kl_input_clamp, FieldReference)
