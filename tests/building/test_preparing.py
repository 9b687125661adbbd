"""What a run says when it begins."""

import pytest

from grpo_jax.building import checks
from grpo_jax.config import base, configuration


@pytest.mark.parametrize(
  "options, warned",
  [
    ({"sampling.max_tokens": 600, "rollout.max_tokens": 128}, "sampling.max_tokens=600"),
    ({"sampling.max_tokens": 64, "batching.row_tokens": 32}, "sampling.max_tokens=64"),
    ({"evaluation.sampling.max_tokens": 2000}, "evaluation.sampling.max_tokens=2000"),
    ({"sampling.max_tokens": 128, "rollout.max_tokens": 128}, None),
    ({"sampling.max_tokens": 9999, "mode": "offline"}, None),
  ],
)
def test_a_length_that_no_completion_reaches_is_said(options, warned, noticed):
  checks.log_lengths(configuration.replaced(base.get_config(), options))
  assert len(noticed) == (warned is not None)
  if warned:
    assert noticed[0].startswith(f"{warned} is never reached: a prompt with its completion has at")
