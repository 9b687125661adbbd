"""The gradient-in-forward form gives the loss, metrics and gradients of the two-pass form."""

import equivalence_case as case
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base
from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.building import computation
from grpo_jax.config import configuration, run_options
from grpo_jax.config.configuration import typed
from grpo_jax.learn import scoring
from grpo_jax.rl import objectives
from grpo_jax.rl.distillation import Distillation

# Every input that a token-local objective may read, and every option that it may have.
LOSSES = {
  "clipped": {"kl_coef": 0.1},
  "everything": {
    "kl_coef": 0.1,
    "kl_weight": "old",
    "entropy_coef": 0.05,
    "dual_clip": 3.0,
    "importance_correction": "token",
    "importance_truncation": "tis",
    "importance_high": 2.0,
    "distillation": Distillation(coef=0.7, reward_coef=0.5, clamp=2.0),
  },
  "icepop": {
    "kl_coef": 0.1,
    "kl_estimator": "k2",
    "use_on_policy_kl_approximation": True,
    "importance_correction": "token",
    "importance_truncation": "icepop",
    "importance_low": 0.1,
    "importance_high": 10.0,
  },
  "dr_grpo": {"kl_coef": 0.0, "aggregation": "constant_length", "max_completion_tokens": 12},
  "on_policy": {"kl_coef": 0.1, "kl_weight": "none", "force_on_policy_ratio": True},
  "kl_in_reward": {"kl_coef": 0.1, "kl_in_reward": True},
  "cispo": {"loss": "cispo", "kl_coef": 0.1, "clip_low": 1.0, "clip_high": 4.0},
  "sapo": {"loss": "sapo", "kl_coef": 0.1},
  "interpolated": {
    **{"kl_coef": 0.1, "kl_weight": "old", "old_logprobs": "interpolated"},
    **{"importance_correction": "token", "importance_truncation": "tis", "importance_high": 2.0},
  },
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_one_sweep_equals_two_passes(name):
  loss = LOSSES[name]
  assert objectives.make(**loss).is_token_local
  groups, advantages = case.ragged_groups()
  batch = case.aged(groups), advantages
  settings = {"loss": loss, "step": 4, "has_layers": False}
  expected = case.gradients(*batch, **settings)
  got = case.gradients(*batch, **settings, one_sweep=True)
  case.assert_same(got, expected)
  assert got[3].keys() == expected[3].keys() and "staleness/2_3/ratio" in got[3]
  for metric, wanted in expected[3].items():
    value = got[3][metric].value()
    np.testing.assert_allclose(value, wanted.value(), rtol=2e-6, atol=1e-6, err_msg=metric)


@pytest.mark.long
def test_microbatches_of_one_sweep_add_up():
  """With the layers of the model."""
  loss = LOSSES["everything"]
  layout = {"shapes": (packing.Shape(1, 32, 32),)}
  many = case.gradients(*case.ragged_groups(), loss=loss, one_sweep=True, **layout)
  assert len(many[2].minibatches[0].microbatches) >= 4
  case.assert_same(many, case.gradients(*case.ragged_groups(), loss=loss))


@pytest.mark.parametrize(
  "loss",
  [
    {"loss": "gspo", "aggregation": "sequence_mean"},
    {"aggregation": "sequence_mean"},
    {"importance_correction": "sequence"},
    {"off_policy_mask_threshold": 0.1},
    {"loss": "vespo"},
  ],
  ids=lambda loss: "-".join(map(str, loss.values())),
)
def test_loss_that_is_not_token_local_is_refused(loss):
  assert not objectives.make(**loss).is_token_local
  with pytest.raises(ValueError, match="not token-local"):
    case.gradients(
      *case.ragged_groups(), loss={"kl_coef": 0.0, **loss}, one_sweep=True, has_layers=False
    )


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({}, True),
    ({"learn.gradient_in_forward": False}, False),
    ({"learn.epochs": 2}, False),
    ({"learn.minibatches": 2}, False),
    ({"loss.aggregation": "sequence_mean"}, False),
    ({"model.logprobs": "xla_chunked"}, False),
  ],
)
def test_config_decides_whether_the_update_takes_one_sweep(changes, expected):
  config: ConfigDict = base.get_config()
  config.update_from_flattened_dict(changes)
  assert (
    computation.takes_one_sweep(typed(config), run_options.objective(typed(config))) is expected
  )


def test_all_configs_but_two_take_one_sweep_as_the_page_on_the_head_says():
  loaded = {name: configuration.load(name) for name in configuration.by_name()}
  two = {
    name
    for name, config in loaded.items()
    if not computation.takes_one_sweep(typed(config), run_options.objective(typed(config)))
  }
  assert two == {"dapo_math", "math_8b"}, "docs/linear_logprobs.md names them"


@pytest.mark.long
def test_scorer_and_one_sweep_give_the_same_logprobs():
  loss = tuple(LOSSES["clipped"].items())
  update = case.updater(case.CONFIG, loss, "full", None, True, has_layers=False)
  score = case.scorer(case.CONFIG, has_layers=False)
  assembled = batching.assemble(*case.ragged_groups(), **case.LAYOUT)
  with case.without_layers():
    [minibatch] = scoring.with_logprobs(
      assembled.minibatches, score, old_params=case.table(1), ref_params=case.table(2)
    )
    *_, [seen] = update.gradients(case.table(), minibatch)
    scored = score(case.table(), minibatch.microbatches[0])
  np.testing.assert_allclose(seen, scored, rtol=0, atol=5e-6)
