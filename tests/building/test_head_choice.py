"""A fused head that cannot run here is found out before anything is loaded."""

import contextlib

import pytest

import configs.quickstart
from grpo_jax.building import run as building
from grpo_jax.config import configuration


@pytest.mark.parametrize(
  ("name", "reason"),
  [("mosaic_gpu", "Hopper"), ("pallas_tpu", "runs on tpu"), ("xla_chunkd", "there are reference")],
)
def test_head_that_cannot_run_is_refused_by_the_name_of_its_option(name, reason, tmp_path):
  config = configs.quickstart.get_config()
  config.model.logprobs = name
  config.model.path = "/no/such/model"  # would be the complaint if it were looked for first.
  with (
    contextlib.ExitStack() as stack,
    pytest.raises(configuration.ConfigError, match=f"model.logprobs: .*{reason}"),
  ):
    building.build(config, tmp_path, stack)


def test_attention_that_cannot_run_is_refused_with_the_valid_names(tmp_path):
  config = configs.quickstart.get_config()
  config.model.attention = "flash"
  config.model.path = "/no/such/model"
  message = "model.attention: .*no implementation 'flash'; there are reference, xla_blocked"
  with contextlib.ExitStack() as stack, pytest.raises(configuration.ConfigError, match=message):
    building.build(config, tmp_path, stack)
