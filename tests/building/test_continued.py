"""What a run that continues with other options logs, and with which ones it does not."""

import json
import logging

import pytest

import configs.base
from grpo_jax.building import checks, stored
from grpo_jax.config import configuration, removed
from grpo_jax.config.configuration import ConfigError, typed


@pytest.mark.parametrize(
  "schedule, is_said", [("cosine", True), ("linear", True), ("constant", False)]
)
def test_another_curve_of_the_learning_rate_is_one_line(tmp_path, caplog, schedule, is_said):
  caplog.set_level(logging.INFO)
  config = configs.base.get_config()
  config.total_steps, config.optim.schedule, config.learn.epochs = 4, schedule, 2
  checks.log_schedule(typed(config), tmp_path)  # nothing ran before.
  configuration.write(config, tmp_path / "config.json")
  checks.log_schedule(typed(config), tmp_path)
  assert not caplog.messages
  config.total_steps = 7
  checks.log_schedule(typed(config), tmp_path)
  expected = (
    f"total_steps was 4, is 7: optim.schedule={schedule!r} now falls over 14 optimizer steps, and"
    " the next steps have the learning rates of that curve"
  )
  assert caplog.messages == [expected] * is_said


def stored_with(folder, options):
  """Writes the config.json of a run that has more options, by their dotted names."""
  stored = configuration.to_json(configs.base.get_config())
  for name, value in options.items():
    section = stored
    *path, last = name.split(".")
    for part in path:
      section = section[part]
    section[last] = value
  (folder / "config.json").write_text(json.dumps(stored))


@pytest.mark.parametrize(
  ("staleness", "order", "in_flight"),
  [(0, "prompt", False), (1, "prompt", False), (2, "finished", True)],
)
def test_removed_options_that_changed_nothing_do_not_keep_a_run_from_continuing(
  staleness, order, in_flight, tmp_path, caplog
):
  options = {
    "rollout.max_staleness": staleness,
    "rollout.order": order,
    "rollout.in_flight_updates": in_flight,
    "rollout.on_stale": "wait",
    "rollout.recompute_cache": True,
    "engine.sglang.router": None,
    "engine.sglang.requests": "completion",
    "engine.sglang.pause": "retract",
    **{f"sampling.{name}": 0.0 for name in ("presence_penalty", "frequency_penalty")},
    **{f"sampling.{name}": None for name in ("regex", "json_schema", "ebnf")},
    "sampling.repetition_penalty": 1.0,
    "logging.mlflow": {"experiment": "mine", "name": None},
    "logging.trackio": {},
    "logging.swanlab": {"tags": ["a"]},
    "logging.tensorboard": False,
    "evaluation.keep_mb": 3.0,
    "distributed.secret_env": "MINE",
    "model.lora.init": "xavier",
    "reference.reset_optimizer": False,
  }
  of_sampling = [name for name in options if name.startswith("sampling.")]
  options |= {f"evaluation.{name}": None for name in of_sampling}
  assert options.keys() - {"rollout.max_staleness"} == removed.OPTIONS.keys()
  stored_with(tmp_path, options)
  config = configs.base.get_config()
  config.rollout.max_staleness = staleness
  checks.log_differences(typed(config), tmp_path)
  assert not caplog.messages


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"engine.sglang.router": "http://r:1"},
      "engine.sglang.router='http://r:1' was removed: name the servers behind the router in",
    ),
    (
      {"sampling.regex": "a+"},
      "sampling.regex='a+' was removed: completions are sampled from the distribution that is",
    ),
    (
      {"reference.reset_optimizer": True},
      "reference.reset_optimizer=True was removed: the optimizer keeps its state",
    ),
    (
      {"engine.sglang.requests": "group"},
      "engine.sglang.requests='group' was removed: each completion is a request of its own",
    ),
    (
      {"engine.sglang.pause": "abort"},
      "engine.sglang.pause='abort' was removed: new weights always retract what is under way",
    ),
    (
      {"rollout.on_stale": "drop"},
      "rollout.on_stale='drop' was removed: a step always waits for the groups",
    ),
    (
      {"rollout.max_staleness": 2, "rollout.order": "prompt", "rollout.in_flight_updates": True},
      "rollout.order='prompt' was removed: rollout.max_staleness decides it: with 1 steps take",
    ),
    (
      {"rollout.max_staleness": 1, "rollout.order": "finished"},
      "rollout.order='finished' was removed: rollout.max_staleness decides it: with 1 steps take",
    ),
    (
      {"rollout.max_staleness": 2, "rollout.order": "finished", "rollout.in_flight_updates": False},
      "rollout.in_flight_updates=False was removed: rollout.max_staleness decides it: with 1 comp",
    ),
    (
      {"rollout.recompute_cache": False},
      "rollout.recompute_cache=False was removed: new weights always compute the keys and values",
    ),
  ],
)
def test_a_run_that_needs_a_removed_option_does_not_continue(options, message, tmp_path):
  stored_with(tmp_path, options)
  with pytest.raises(ConfigError) as caught:
    checks.log_differences(typed(configs.base.get_config()), tmp_path)
  assert message in str(caught.value) and "\n" not in str(caught.value)
  assert str(caught.value).endswith("Move the file away to continue the run without it")


def test_an_old_run_is_read_with_the_options_of_this_version(tmp_path):
  stored_with(tmp_path, {"engine.sglang.router": "http://r:1", "seed": 7})
  config = stored.whole_config_of(tmp_path)
  assert config.seed == 7 and not hasattr(config.engine.sglang, "router")
