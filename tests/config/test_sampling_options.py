"""Sampling that the engine or training cannot do is refused before a model is read."""

import pytest

import configs.base
from grpo_jax.building import computation
from grpo_jax.config import command_line, configuration, overrides, run_options
from grpo_jax.config.configuration import typed
from grpo_jax.config.options import ALSO
from grpo_jax.engines.base import SamplingParams


def complaints(**options):
  """Returns what a run with these options is refused for; `a__b=1` sets config.a.b."""
  config = configs.base.get_config()
  config.update_from_flattened_dict(
    {name.replace("__", "."): value for name, value in options.items()}
  )
  found = list(run_options.validate(config))
  return [each for each in found if "sampling" in each or "rollout" in each]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"sampling__logprobs": "half"}, "sampling.logprobs must be one of 'full', 'truncated'"),
    ({"rollout__schedule": "freely"}, "rollout.schedule must be one of 'rounds', 'free'"),
  ],
)
def test_values_without_a_meaning_are_named(options, message):
  found = complaints(engine__name="sglang", **options)
  assert any(message in each for each in found), found


def test_an_evaluation_may_change_options_that_the_base_config_does_not_list():
  command = command_line.parse(
    ["--config=base", "--config.evaluation.sampling.stop_strings=a,b", "--config.sampling.top_k=3"]
  )
  config = typed(command.config)
  sampling = SamplingParams.of(run_options.evaluation_sampling(config))
  assert (sampling.stop_strings, sampling.top_k) == (("a", "b"), 3) and not complaints()
  in_file = configs.base.get_config()
  in_file.evaluation.sampling.stop_strings = ("a", "b")
  in_file.sampling.top_k = 3
  in_python = overrides.override(
    configuration.load("base"),
    {"evaluation.sampling.stop_strings": ("a", "b"), "sampling.top_k": 3},
  )
  in_notebook = configuration.load("base")
  in_notebook.evaluation.sampling.stop_strings = ("a", "b")
  in_notebook.sampling["top_k"] = 3
  assert typed(in_file) == typed(in_python) == typed(in_notebook) == config
  assert in_notebook.evaluation.sampling.is_locked
  in_file.evaluation.sampling.stop_strings = (3,)
  assert "evaluation.sampling.stop_strings must be" in next(iter(run_options.validate(in_file)))


@pytest.mark.parametrize(
  "flag", ["--config.evaluation.data.splt_seed", "--evaluation.data.splt_seed"]
)
def test_an_option_that_the_base_config_does_not_list_is_the_nearest_name(flag):
  with pytest.raises(
    configuration.ConfigError, match=r"did you mean .*evaluation\.data\.split_seed"
  ):
    command_line.parse(["--config=base", f"{flag}=3"])


@pytest.mark.parametrize("name", ["evaluation.sampling", "evaluation.data"])
def test_the_names_in_a_message_are_all_that_an_evaluation_may_change(name):
  config = configuration.load("base")
  section = config.evaluation[name.rpartition(".")[2]]
  also = {each.rpartition(".")[2] for each in ALSO if each.startswith(f"{name}.")}
  said = str(configuration.refusal(config, f"{name}.qqqqqqqq"))
  with pytest.raises(AttributeError) as caught:
    section.qqqqqqqq = 1
  for message in (said, str(caught.value)):
    assert {*message.rpartition(" has: ")[2].split(", ")} == {*section.keys(), *also}


TRUNCATED = {"sampling__logprobs": "truncated", "sampling__top_p": 0.9}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"model__logprobs": "xla_chunked"}, "model.logprobs='xla_chunked' must be None"),
    ({"engine__name": "sglang"}, "needs sampling.top_k"),
    ({"loss__kl_weight": "old"}, "loss.kl_weight='score' or 'none'"),
    ({"loss__use_on_policy_kl_approximation": True}, "use_on_policy_kl_approximation"),
    ({"mode": "offline"}, "mode='online'"),
  ],
)
def test_truncated_logprobs_refuse_what_would_use_others(options, message):
  assert not complaints(**TRUNCATED)
  found = complaints(**TRUNCATED, **options)
  assert any(message in each for each in found), found


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, None),
    ({"top_p": 0.9}, None),
    ({"logprobs": "truncated"}, None),  # nothing is left out.
    ({"logprobs": "truncated", "top_p": 0.9}, (0, 0.9, 0.0, 300, False)),
    ({"logprobs": "truncated", "top_k": 5, "min_p": 0.1}, (5, 1.0, 0.1, 300, False)),
  ],
)
def test_the_trainer_takes_the_filters_of_the_sampling(options, expected):
  config = configs.base.get_config()
  config.sampling.update(options)
  found = computation.truncation_of(typed(config), 300)
  values = found and (found.top_k, found.top_p, found.min_p, found.num_valid, found.is_joint)
  assert values == expected
  evaluation = SamplingParams.of(run_options.evaluation_sampling(typed(config)))
  assert not evaluation.reports_truncated


def test_the_trainer_filters_as_sglang_does_for_its_servers():
  config = configs.base.get_config()
  config.engine.name = "sglang"
  config.sampling.update({"logprobs": "truncated", "top_k": 5, "top_p": 0.9})
  found = computation.truncation_of(typed(config), 300)
  assert found.is_joint and found.num_valid is None
