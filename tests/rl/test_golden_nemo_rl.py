"""Loss, gradient, metrics and advantages against NeMo RL, whose numbers are float32.

Ours are computed in float64; they agree to 1e-6 relative (of the largest entry of a
gradient). Where we differ on purpose:
* `sampling_importance_ratio`: this version of NeMo RL reports the weights that the loss uses, after
  truncation, and those of whole completions under GSPO. Ours is the mean ratio of tokens in all
  cases, as in later versions; where the two differ, the numbers here are NumPy's.
* `disable_ppo_ratio`: NeMo RL reports logprobs as `probs_ratio`; ours is πθ/π_old.
Left out: `positive_example_nll_weight`. NeMo RL divides that term by the count of its
own microbatch, so it depends on how a batch is split, and its GRPO never passes the
rewards that it needs. Its case is checked with the term added here, by hand.
The spike of NeMo RL's leave-one-out std is in none of its golden cases; see
test_advantages.py.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import advantages, objectives
from grpo_jax.types import Denominators, LossTokens, Mean

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
LOSS = json.loads((FOLDER / "nemo_rl_loss.json").read_text())
ADVANTAGE = json.loads((FOLDER / "nemo_rl_advantage.json").read_text())

NAMES = {
  "reference_policy_kl_penalty": "kl_coef",
  "reference_policy_kl_type": "kl_estimator",
  "kl_input_clamp_value": "kl_input_clamp",
  "kl_output_clamp_value": "kl_output_clamp",
  "use_on_policy_kl_approximation": "use_on_policy_kl_approximation",
  "ratio_clip_min": "clip_low",
  "ratio_clip_max": "clip_high",
  "ratio_clip_c": "dual_clip",
  "force_on_policy_ratio": "force_on_policy_ratio",
  "use_kl_in_reward": "kl_in_reward",
}
METRICS = {
  "kl_penalty": "train/kl_to_reference",
  "token_mult_prob_error": "mismatch/token_mult_prob_error",
  "gen_kl_error": "mismatch/gen_kl_error",
  "policy_kl_error": "mismatch/policy_kl_error",
  "js_divergence_error": "mismatch/js_divergence_error",
  "approx_entropy": "train/approx_entropy",
  "sampling_importance_ratio": "mismatch/sampling_importance_ratio",
  "is_oob_ratio": "mismatch/out_of_bounds_share",
  "probs_ratio": "train/ratio_mean",
  "probs_ratio_clamped": "train/clipped_ratio_mean",
  "probs_ratio_min": "train/ratio_min",
  "probs_ratio_max": "train/ratio_max",
  "probs_ratio_clamped_min": "train/clipped_ratio_min",
  "probs_ratio_clamped_max": "train/clipped_ratio_max",
}
TRUNCATIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask"}


def _options(config):
  """Translates NeMo RL's configuration into ours."""
  full = LOSS["defaults"] | config
  options = {ours: full[theirs] for theirs, ours in NAMES.items()}
  options["aggregation"] = "token_mean" if full["token_level_loss"] else "sequence_mean"
  of_sequences = full["sequence_level_importance_ratios"]
  if of_sequences:
    options["loss"] = "gspo"
  if full["disable_ppo_ratio"]:
    options["loss"] = "reinforce"
  if full["use_cispo"]:
    options["loss"] = "cispo"
  if full["use_importance_sampling_correction"]:
    options["importance_correction"] = "sequence" if of_sequences else "token"
  if full["truncated_importance_sampling_type"] is not None:
    options["importance_truncation"] = TRUNCATIONS[full["truncated_importance_sampling_type"]]
    options["importance_low"] = full["truncated_importance_sampling_ratio_min"] or 0.0
    options["importance_high"] = full["truncated_importance_sampling_ratio"]
  return options


def _run(case):
  inputs = {key: np.asarray(value, np.float64) for key, value in case["inputs"].items()}
  mask = (inputs["token_mask"][:, 1:] * inputs["sample_mask"][:, None]) > 0
  tokens = LossTokens(
    mask=jnp.asarray(mask),
    sequence_ids=jnp.zeros(mask.shape, jnp.int32),
    advantages=jnp.asarray(inputs["advantages"][:, 1:]),
    behavior_logprobs=jnp.asarray(inputs["generation_logprobs"][:, 1:]),
    old_logprobs=jnp.asarray(inputs["prev_logprobs"][:, 1:]),
    ref_logprobs=jnp.asarray(inputs["reference_policy_logprobs"][:, 1:]),
  )
  denominators = Denominators(
    float(inputs["global_valid_toks"]), float(inputs["global_valid_seqs"])
  )
  objective = objectives.make(**_options(case["config"]))
  share = jax.jit(
    jax.value_and_grad(lambda lp: objective(lp, None, tokens, denominators), has_aux=True),
    compiler_options={"xla_backend_optimization_level": 0},  # compiling is the test's time.
  )
  (loss, metrics), grad = share(jnp.asarray(inputs["curr_logprobs"]))
  return inputs, mask, loss, grad, metrics


@pytest.mark.parametrize("index", range(len(LOSS["cases"])))
def test_loss_gradient_and_metrics_equal_nemo_rl(index):
  case = LOSS["cases"][index]
  with jax.enable_x64(True):
    inputs, mask, loss, grad, metrics = _run(case)
  if weight := case["config"].get("positive_example_nll_weight"):
    correct = mask & (inputs["rewards"][:, None] > 0)
    nll = -(inputs["curr_logprobs"] * correct).sum() / correct.sum()
    np.testing.assert_allclose(nll, case["metrics"]["positive_nll_loss"], rtol=1e-6)
    loss = np.asarray(loss) + weight * nll
    grad = np.asarray(grad) - weight * correct / correct.sum()
  np.testing.assert_allclose(loss, case["loss"], rtol=1e-6, atol=1e-7)
  largest = np.abs(case["grad"]).max()
  np.testing.assert_allclose(grad, case["grad"], rtol=0, atol=1e-6 * largest)
  log_ratio = inputs["prev_logprobs"][:, 1:] - inputs["generation_logprobs"][:, 1:]
  _check_metrics(case, mask, metrics, np.exp(log_ratio[mask]))


def _check_metrics(case, mask, metrics, ratios):
  full = LOSS["defaults"] | case["config"]
  tokens, sequences = (case["inputs"][f"global_valid_{n}"] for n in ("toks", "seqs"))
  assert metrics["train/loss"].count == (
    mask.sum() if full["token_level_loss"] else mask.any(axis=1).sum()
  )
  of_sequences = full["sequence_level_importance_ratios"]
  is_truncated = full["truncated_importance_sampling_type"] is not None
  for theirs, ours in METRICS.items():
    if theirs == "sampling_importance_ratio" and (of_sequences or is_truncated):
      np.testing.assert_allclose(metrics[ours].value(), ratios.mean(), rtol=1e-9)
      continue
    if theirs not in case["metrics"] or full["disable_ppo_ratio"] and "probs_ratio" in theirs:
      continue
    expected = case["metrics"][theirs]
    if theirs == "kl_penalty" and expected == 0:  # NeMo RL's word for "not computed".
      assert ours not in metrics
      continue
    by_sequence = (
      theirs == "kl_penalty"
      and not full["token_level_loss"]
      or theirs == "is_oob_ratio"
      and full["truncated_importance_sampling_type"] == "seq-mask-tis"
    )
    metric = metrics[ours]
    if isinstance(metric, Mean):
      got = float(metric.total) / (sequences if by_sequence else tokens)
    else:
      got = metric.value()
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7, err_msg=theirs)


def _advantages(case, baseline, rewards):
  """Returns baseline, spread, advantages; GDPO's rewards are [K P G], summed for the first two."""
  totals = rewards.sum(axis=0) if case["estimator"] == "gdpo" else rewards
  mask = jnp.ones_like(totals, bool)
  centre, spread = advantages.baseline_and_spread(totals, mask, baseline=baseline)
  if case["estimator"] == "gdpo":
    return centre, spread, advantages.gdpo(rewards, mask, baseline=baseline)
  if case["estimator"] == "rpp":
    level = "group_mean" if case["config"].get("minus_baseline", True) else "none"
    raw = advantages.group_relative(totals, mask, baseline=level, scale="none")
    return centre, spread, advantages.whiten(raw, mask)
  scale = "group_std" if case["config"].get("normalize_rewards", True) else "none"
  got = advantages.group_relative(totals, mask, baseline=baseline, scale=scale)
  return centre, spread, got


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(ADVANTAGE)))
def test_advantages_equal_nemo_rl(index):
  case = ADVANTAGE[index]
  leave_one_out = case["config"].get("use_leave_one_out_baseline", True)
  baseline = "leave_one_out" if leave_one_out else "group_mean"
  with jax.enable_x64(True):
    rewards = jnp.asarray(np.asarray(case["rewards"]).reshape(-1, case["group"]))
    if case["estimator"] == "gdpo":
      parts = case["extra"]["repeated_batch"]
      rewards = jnp.asarray([np.reshape(parts[f"reward/{n}"], rewards.shape) for n in ("a", "b")])
    centre, spread, got = jax.jit(functools.partial(_advantages, case, baseline))(rewards)
  np.testing.assert_allclose(centre.reshape(-1), case["baseline"], rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(spread.reshape(-1), case["std"], rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(got.reshape(-1), case["advantage"], rtol=1e-6, atol=1e-7)
