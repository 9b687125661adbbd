"""Whether a run replays the experts that its engine chose, and what is refused."""

import dataclasses

import numpy as np
import pytest

import configs.base
from grpo_jax import train
from grpo_jax.building import router_replay
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.models.config import ModelConfig
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

DENSE = ModelConfig("qwen3", 64, 32, 48, 2, 2, 1, 16, 128)


def config(**options):
  made = configs.base.get_config()
  for name, value in options.items():
    made.update_from_flattened_dict({name.replace("__", "."): value})
  return typed(made)


def test_a_dense_model_has_nothing_to_replay():
  for asked in (None, False):
    assert router_replay.shape_of(config(loss__router_replay=asked), DENSE) is None
    assert router_replay.engine_options(config(loss__router_replay=asked), DENSE) == {}
  with pytest.raises(ConfigError, match="router_replay=True needs a mixture.*qwen3"):
    router_replay.shape_of(config(loss__router_replay=True), DENSE)


def test_recorded_groups_have_no_experts():
  made = configs.base.get_config()
  made.mode, made.loss.router_replay = "offline", True
  assert any("recorded groups have no experts" in line for line in train.validate(made))


def group(experts):
  ids = np.arange(2, dtype=np.int32)
  one = Rollout(ids, ids >= 0, -ids.astype(np.float32), ids * 0, FinishReason.STOP, 1.0)
  return RolloutGroup(Prompt("set:3", ids, "env"), (dataclasses.replace(one, experts=experts),))


def test_true_needs_a_record_of_every_completion():
  known, unknown = group(np.zeros((2, 1, 1), np.int8)), group(None)
  asked = config(loss__router_replay=True, engine__name="my_engine")
  router_replay.check(asked, [known])
  with pytest.raises(router_replay.MissingExperts, match="attempt 0 of prompt set:3.*my_engine"):
    router_replay.check(asked, [known, unknown])
  router_replay.check(config(loss__router_replay=None), [unknown])  # its router chooses.
