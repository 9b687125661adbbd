"""What the log says of a run that continues with other options."""

import logging

import pytest

import configs.base
from grpo_jax.building import checks
from grpo_jax.config import configuration


@pytest.mark.parametrize(
  "schedule, is_said", [("cosine", True), ("linear", True), ("constant", False)]
)
def test_another_curve_of_the_learning_rate_is_one_line(tmp_path, caplog, schedule, is_said):
  caplog.set_level(logging.INFO)
  config = configs.base.get_config()
  config.total_steps, config.optim.schedule, config.learn.epochs = 4, schedule, 2
  checks.log_schedule(config, tmp_path)  # nothing ran before.
  configuration.write(config, tmp_path / "config.json")
  checks.log_schedule(config, tmp_path)
  assert not caplog.messages
  config.total_steps = 7
  checks.log_schedule(config, tmp_path)
  expected = (
    f"total_steps was 4, is 7: optim.schedule={schedule!r} now falls over 14 optimizer steps, and"
    " the next steps have the learning rates of that curve"
  )
  assert caplog.messages == [expected] * is_said
