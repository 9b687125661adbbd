"""The composed objective: invariances, junk under masks, options, metrics."""

import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import (
  aggregate,
  covariance_losses,
  distillation,
  dppo,
  importance,
  losses,
  objective_options,
  objectives,
  policy_terms,
  sequence_losses,
)
from grpo_jax.types import Denominators, LossTokens, Mean

SEQUENCE = {"aggregation": "sequence_mean"}
CONFIGS = {
  "grpo": {"entropy_coef": 0.01},
  "everything": {
    "dual_clip": 3.0,
    "importance_correction": "token",
    "importance_truncation": "seq_mask",
    "importance_low": 0.7,
    "importance_high": 1.4,
    "off_policy_mask_threshold": 0.1,
    "use_on_policy_kl_approximation": True,
    "aggregation": "constant_length",
    "max_completion_tokens": 7,
  },
  "dppo": {
    "loss": "dppo_kl",
    "use_behavior_logprobs": True,
    "dppo_kl_tau": 0.1,
    "top_entropy_share": 0.5,
    "seq_logprob_error_threshold": 1.3,
  },
  "clip_cov": {"loss": "clip_cov", **SEQUENCE},
  "kl_cov": {"loss": "kl_cov", "seq_logprob_error_threshold": 1.3},
  "gspo": {
    "loss": "gspo",
    "importance_correction": "sequence",
    "importance_truncation": "tis",
    "importance_high": 2.0,
    **SEQUENCE,
  },
}


def _tokens(seed=0, shape=(4, 6)):
  rng = np.random.default_rng(seed)
  policy = -rng.exponential(size=shape)
  near = [policy + 0.3 * rng.normal(size=shape) for _ in range(3)]
  old, behavior, ref = (jnp.asarray(x, jnp.float32) for x in near)
  tokens = LossTokens(
    mask=jnp.asarray(rng.random(shape) < 0.8),
    sequence_ids=jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=1), jnp.int32),
    advantages=jnp.asarray(rng.normal(size=shape), jnp.float32),
    behavior_logprobs=behavior,
    old_logprobs=old,
    ref_logprobs=ref,
    selected=jnp.asarray(rng.random(shape) < 0.4),
  )
  marks = (tokens.old_logprobs, tokens.behavior_logprobs, tokens.mask, tokens.sequence_ids)
  kept = importance.seq_logprob_error_mask(*marks, threshold=1.3)
  assert kept.any() and not np.array_equal(kept, tokens.mask)
  tokens = dataclasses.replace(tokens, kept=kept)
  entropy = jnp.asarray(rng.exponential(size=shape), jnp.float32)
  return jnp.asarray(policy, jnp.float32), entropy, tokens


def _mapped(change, arrays):
  """Returns the tree with each array changed by NumPy, which compiles nothing."""
  return jax.tree.map(lambda x: jnp.asarray(change(np.asarray(x))), arrays)


def _denominators(tokens, objective=None):
  ids, mask = np.asarray(tokens.sequence_ids), np.asarray(tokens.mask)
  if objective is not None and objective.drops_by_error:
    mask = mask & np.asarray(tokens.kept)
  sequences = sum(len(set(ids[row][mask[row]].tolist())) for row in range(len(ids)))
  return Denominators(float(mask.sum()), float(sequences))


@functools.cache
def _compiled(objective):
  """Returns the loss, the metrics and the gradient; compiled once for all inputs of a shape."""
  share = jax.value_and_grad(lambda *given: objective(*given), has_aux=True)
  return jax.jit(share, compiler_options={"xla_backend_optimization_level": 0})


def _evaluate(objective, *given):
  (loss, metrics), grad = jax.device_get(_compiled(objective)(*given))
  return loss, metrics, grad


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_microbatches_add_up_in_loss_gradient_and_metrics(name):
  objective = objectives.make(**CONFIGS[name])
  policy, entropy, tokens = _tokens()
  step = _denominators(tokens, objective)
  loss, metrics, grad = _evaluate(objective, policy, entropy, tokens, step)
  parts = []
  for rows in (slice(0, 2), slice(2, 4)):
    part = _mapped(lambda x, rows=rows: x[rows], (policy, entropy, tokens))
    parts.append(_evaluate(objective, *part, step))
  np.testing.assert_allclose(parts[0][0] + parts[1][0], loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(np.concatenate([parts[0][2], parts[1][2]]), grad, rtol=1e-5, atol=1e-7)
  assert set(metrics) == set(parts[0][1])
  for key, metric in metrics.items():
    merged = parts[0][1][key].merge(parts[1][1][key]).value()
    np.testing.assert_allclose(merged, metric.value(), rtol=1e-4, atol=1e-5, err_msg=key)
  np.testing.assert_allclose(metrics["train/loss"].value(), loss, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_and_what_it_holds_change_nothing(name):
  objective = objectives.make(**CONFIGS[name])
  policy, entropy, tokens = _tokens()
  step = _denominators(tokens, objective)
  loss, metrics, grad = _evaluate(objective, policy, entropy, tokens, step)

  def pad(x, junk):
    value = False if x.dtype == bool else 0 if x.dtype == np.int32 else junk
    return np.pad(x, ((0, 1), (0, 2)), constant_values=value)

  for junk in (float("nan"), float("inf"), -float("inf"), 1e30):
    padded = _mapped(functools.partial(pad, junk=junk), (policy, entropy, tokens))
    got_loss, got_metrics, got_grad = _evaluate(objective, *padded, step)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5, atol=1e-7, err_msg=f"{junk}")
    np.testing.assert_allclose(got_grad[:4, :6], grad, rtol=1e-5, atol=1e-7, err_msg=f"{junk}")
    assert (got_grad[4:] == 0).all() and (got_grad[:, 6:] == 0).all(), junk
    assert (got_grad[:4, :6][~np.asarray(tokens.mask)] == 0).all(), junk
    for key, metric in metrics.items():
      value = got_metrics[key].value()
      np.testing.assert_allclose(value, metric.value(), rtol=1e-5, err_msg=f"{junk} {key}")


def test_without_old_logprobs_the_policy_is_taken_for_them():
  policy, _, tokens = _tokens()
  objective = objectives.make(kl_coef=0.0)
  absent = dataclasses.replace(tokens, old_logprobs=None)
  same = dataclasses.replace(tokens, old_logprobs=policy)
  step = _denominators(tokens)
  loss, metrics, grad = _evaluate(objective, policy, None, absent, step)
  expected = _evaluate(objective, policy, None, same, step)
  np.testing.assert_array_equal(loss, expected[0])
  np.testing.assert_array_equal(grad, expected[2])
  np.testing.assert_allclose(
    grad, np.where(tokens.mask, -tokens.advantages / step.tokens, 0), rtol=1e-5
  )
  assert metrics["train/ratio_max"].value() == 1.0


def test_forced_ratio_ignores_old_logprobs_and_needs_none():
  policy, _, tokens = _tokens()
  objective = objectives.make(kl_coef=0.0, force_on_policy_ratio=True)
  assert not objective.needs_old
  _, metrics, grad = _evaluate(objective, policy, None, tokens, _denominators(tokens))
  assert metrics["train/ratio_min"].value() == metrics["train/ratio_max"].value() == 1.0
  expected = np.where(tokens.mask, -tokens.advantages / tokens.mask.sum(), 0)
  np.testing.assert_allclose(grad, expected, rtol=1e-5)


def test_entropy_bonus_pulls_the_entropy_up():
  policy, entropy, tokens = _tokens()
  objective = objectives.make(entropy_coef=0.5)
  share = lambda e: objective(policy, e, tokens, _denominators(tokens))[0]
  grad = jax.jit(jax.grad(share))(entropy)
  np.testing.assert_allclose(grad, np.where(tokens.mask, -0.5 / tokens.mask.sum(), 0), rtol=1e-6)


def test_clip_shares_count_the_tokens_without_a_gradient():
  ratio = jnp.asarray([[0.5, 1.5, 0.5, 1.5, 4.0, 1.0]])
  advantages = jnp.asarray([[-1.0, 1.0, 1.0, -1.0, -1.0, 1.0]])
  tokens = LossTokens(
    mask=jnp.ones((1, 6), bool),
    sequence_ids=jnp.zeros((1, 6), jnp.int32),
    advantages=advantages,
    behavior_logprobs=jnp.full((1, 6), -2.0),
    old_logprobs=jnp.full((1, 6), -2.0),
  )
  objective = objectives.make(kl_coef=0.0, dual_clip=3.0)
  _, metrics, grad = _evaluate(
    objective, jnp.log(ratio) - 2.0, None, tokens, Denominators(6.0, 1.0)
  )
  shares = [metrics[f"train/clip_{side}_share"].value() for side in ("low", "high", "dual")]
  np.testing.assert_allclose(shares, [1 / 6] * 3, rtol=1e-6)
  np.testing.assert_array_equal(grad[0] == 0, [True, True, False, False, True, False])


@pytest.mark.long
def test_mismatch_metrics_match_values_worked_by_hand():
  behavior, old = jnp.log(jnp.asarray([[0.5, 0.2]])), jnp.log(jnp.asarray([[0.25, 0.4]]))
  tokens = LossTokens(
    mask=jnp.ones((1, 2), bool),
    sequence_ids=jnp.zeros((1, 2), jnp.int32),
    advantages=jnp.ones((1, 2)),
    behavior_logprobs=behavior,
    old_logprobs=old,
  )
  _, metrics = objectives.make(kl_coef=0.0)(old, None, tokens, Denominators(2.0, 1.0))
  # weights 1/2 and 2: mean 1.25, (Σw)²/(n Σw²) = 6.25 / (2 * 4.25).
  expected = {
    "mismatch/abs_logprob_max": np.log(2),
    "mismatch/token_mult_prob_error": 2.0,
    "mismatch/sampling_importance_ratio": 1.25,
    "mismatch/effective_sample_share": 6.25 / 8.5,
    "mismatch/gen_kl_error": np.mean([0.5 - 1 + np.log(2), 2 - 1 - np.log(2)]),
    "train/approx_entropy": -np.mean([0.5 * np.log(0.25), 2 * np.log(0.4)]),
  }
  for key, value in expected.items():
    np.testing.assert_allclose(metrics[key].value(), value, rtol=1e-5, err_msg=key)


def test_a_batch_without_tokens_has_loss_zero_and_no_gradient():
  policy, entropy, tokens = _tokens()
  nothing = dataclasses.replace(tokens, mask=jnp.zeros_like(tokens.mask))
  loss, metrics, grad = _evaluate(
    objectives.make(**CONFIGS["everything"]), policy, entropy, nothing, Denominators(0.0, 0.0)
  )
  assert loss == 0.0 and (np.asarray(grad) == 0).all()
  assert np.isnan(metrics["train/ratio_mean"].value())
  assert isinstance(metrics["train/loss"], Mean) and float(metrics["train/loss"].count) == 0


@pytest.mark.parametrize(
  "options, needs",
  [
    ({}, "old ref local"),
    ({"kl_coef": 0.0}, "old local"),
    ({"kl_coef": 0.0, "loss": "reinforce"}, "local"),
    ({"kl_coef": 0.0, "loss": "reinforce", "importance_correction": "token"}, "old local"),
    ({"kl_coef": 0.0, "force_on_policy_ratio": True, "entropy_coef": 0.1}, "entropy local"),
    ({"kl_in_reward": True}, "old ref local"),
    ({"kl_coef": 0.0, "importance_correction": "sequence"}, "old"),
    ({"kl_coef": 0.0, "off_policy_mask_threshold": 0.1}, "old"),
    ({"kl_coef": 0.0, **SEQUENCE}, "old"),
    ({"kl_coef": 0.0, "loss": "dppo_tv"}, "old local"),
    ({"kl_coef": 0.0, "loss": "dppo_tv", "use_behavior_logprobs": True}, "local"),
    ({"kl_in_reward": True, "use_behavior_logprobs": True}, "old ref local"),
    ({"kl_coef": 0.0, "loss": "clip_cov"}, "old local selected"),
    ({"kl_coef": 0.0, "loss": "kl_cov"}, "old local selected"),
    ({"kl_coef": 0.0, "top_entropy_share": 0.2}, "old local selected by entropy"),
    ({"kl_coef": 0.0, "seq_logprob_error_threshold": 2.0}, "old local kept"),
  ],
)
def test_objective_says_what_it_needs(options, needs):
  objective = objectives.make(**options)
  said = {
    "old": objective.needs_old,
    "ref": objective.needs_ref,
    "entropy": objective.needs_entropy,
    "local": objective.is_token_local,
    "selected": objective.selects,
    "by entropy": objective.selects_by_entropy,
    "kept": objective.drops_by_error,
  }
  assert objective.acts_without_advantage == bool(
    {"ref", "entropy", "selected", "kept"} & {name for name, is_so in said.items() if is_so}
  )
  assert " ".join(name for name, is_so in said.items() if is_so) == needs


@pytest.mark.parametrize("local", [True, False])
def test_token_local_means_that_a_token_alone_has_its_share_of_the_loss(local):
  options = {"importance_correction": "token"} if local else SEQUENCE
  objective = objectives.make(**options)
  assert objective.is_token_local == local
  policy, _, tokens = _tokens()
  step = _denominators(tokens)
  share = jax.jit(lambda policy, tokens: objective(policy, None, tokens, step)[0])
  whole = share(policy, tokens)
  columns = [_mapped(lambda x, t=t: x[:, t : t + 1], (policy, tokens)) for t in range(6)]
  columns = [
    (p, dataclasses.replace(t, sequence_ids=jnp.zeros_like(t.sequence_ids))) for p, t in columns
  ]
  total = sum(float(share(p, t)) for p, t in columns)
  assert np.isclose(total, whole, rtol=1e-5) == local


@pytest.mark.parametrize(
  "options, message",
  [
    ({"clip_lo": 0.1}, "did you mean 'clip_low'"),
    ({"loss": "grpo_clipped"}, "clipped"),
    ({"kl_estimator": "k4"}, "k3"),
    ({"aggregation": "token"}, "token_mean"),
    ({"importance_truncation": "tiss"}, "did you mean 'tis'"),
    ({"clip_low": -0.1}, "clip_low"),
    ({"clip_low": 1.5}, "positive"),
    ({"kl_coef": float("nan")}, "kl_coef"),
    ({"dual_clip": 0.9}, "dual_clip must be a finite number > 1"),
    ({"dual_clip": 3.0, "loss": "cispo"}, "dual_clip"),
    ({"loss": "gspo", "aggregation": "token_mean"}, "sequence_mean"),
    ({"loss": "reinforce", "force_on_policy_ratio": True}, "no ratio"),
    ({"importance_truncation": "tis", "importance_high": 2.0}, "importance_correction"),
    ({"importance_correction": "token", "importance_high": 2.0}, "importance_truncation"),
    ({"importance_correction": "token", "importance_truncation": "tis"}, "importance_high"),
    (
      {
        "importance_correction": "sequence",
        "importance_truncation": "seq_mask",
        "importance_high": 2.0,
      },
      "seq_mask",
    ),
    (
      {
        "importance_correction": "token",
        "importance_truncation": "tis",
        "importance_low": 3.0,
        "importance_high": 2.0,
      },
      "importance_low",
    ),
    ({"kl_in_reward": True, "kl_coef": 0.0}, "kl_coef"),
    ({"kl_in_reward": True, "force_on_policy_ratio": True}, "old_logprobs"),
    ({"use_on_policy_kl_approximation": True, "kl_weight": "old"}, "kl_weight"),
    ({"aggregation": "constant_length"}, "max_completion_tokens"),
    ({"kl_input_clamp": 0.0}, "kl_input_clamp"),
    ({"loss": "dppo"}, "'dppo_tv' or 'dppo_kl'"),
    ({"loss": "dppo_tv", "clip_low": 0.1}, "clip_low=0.1 would never be read"),
    ({"loss": "dppo_tv", "dual_clip": 3.0}, "dual_clip"),
    ({"loss": "kl_cov", "clip_high": 0.28}, "clip_high=0.28 would never be read"),
    ({"dppo_mask_low": 0.1}, "is not 'dppo_tv' or 'dppo_kl'"),
    ({"loss": "cispo", "dppo_kl_tau": 1e-3}, "dppo_kl_tau=0.001 would never be read"),
    ({"loss": "kl_cov", "clip_cov_ratio": 0.1}, "clip_cov_ratio=0.1 would never be read"),
    ({"loss": "clip_cov", "kl_cov_coef": 0.1}, "kl_cov_coef=0.1 would never be read"),
    ({"loss": "clip_cov", "clip_cov_lb": 9.0}, "clip_cov_lb must be < clip_cov_ub"),
    ({"loss": "clip_cov", "clip_cov_ratio": 0.0}, "clip_cov_ratio must be"),
    ({"loss": "clip_cov", "top_entropy_share": 0.2}, "both choose tokens"),
    ({"loss": "gspo", "top_entropy_share": 0.2, **SEQUENCE}, "one ratio per completion"),
    ({"top_entropy_share": 0.0}, "top_entropy_share must be"),
    ({"seq_logprob_error_threshold": 0.5}, "seq_logprob_error_threshold must be"),
    ({"loss": "reinforce", "use_behavior_logprobs": True}, "'reinforce' does not take"),
    ({"use_behavior_logprobs": True, "force_on_policy_ratio": True}, "both set old_logprobs"),
    ({"use_behavior_logprobs": True, "importance_correction": "token"}, "mismatch twice"),
    ({"use_behavior_logprobs": True, "kl_weight": "old"}, "no old policy"),
  ],
)
def test_options_that_make_no_sense_are_refused_with_the_reason(options, message):
  with pytest.raises(ValueError, match=message):
    objectives.make(**options)


OF_FUNCTIONS = {
  "clipped": losses.clipped_surrogate,
  "gspo": losses.gspo,
  "gspo_token": losses.gspo,
  "cispo": losses.cispo,
  "sapo": losses.sapo,
  "reinforce": losses.reinforce,
  "gmpo": sequence_losses.gmpo,
  "luspo": sequence_losses.luspo,
  "vespo": sequence_losses.vespo,
  "dppo_tv": dppo.dppo_tv,
  "dppo_kl": dppo.dppo_kl,
  "clip_cov": covariance_losses.clip_cov,
  "kl_cov": covariance_losses.kl_cov,
}


@pytest.mark.parametrize("name", objective_options.LOSSES)
def test_a_loss_has_the_same_defaults_as_its_function(name):
  made = objectives.make(loss=name).options
  parameters = inspect.signature(OF_FUNCTIONS[name]).parameters
  names = {"clip_low": "clip_low", "clip_high": "clip_high", "dual_clip": "dual_clip"}
  if name == "sapo":
    names = {f"sapo_temperature_{sign}": f"temperature_{sign}" for sign in ("positive", "negative")}
  if name.startswith("dppo"):
    names = {f"dppo_{end}": end for end in ("mask_low", "mask_high", "ratio_cap", "kl_tau")}
  if name == "kl_cov":
    names = {"kl_cov_coef": "kl_cov_coef"}
  for ours, theirs in names.items():
    default = parameters[theirs].default if theirs in parameters else None
    assert getattr(made, ours) == default, ours
  of_sequences = name in ("gspo", "gspo_token", "gmpo", "luspo")
  assert made.aggregation == ("sequence_mean" if of_sequences else "token_mean")


@pytest.mark.long
def test_a_loss_clips_where_its_options_say():
  """CISPO's weight grows to 1 + 4.0: a ratio of 3 is not clipped to 1.2."""
  policy, tokens = jnp.log(jnp.full((1, 1), 3.0)), _one_token(old=0.0)
  loss = lambda p: objectives.make(loss="cispo", kl_coef=0.0)(p, None, tokens, ONE)[0]
  assert jax.grad(loss)(policy)[0, 0] == pytest.approx(-3.0)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_teacher_and_a_choice_by_advantages_exclude_each_other(name):
  with pytest.raises(ValueError, match="which a teacher changes"):
    objectives.make(loss=name, distillation=distillation.Distillation(coef=1.0))


ONE = Denominators(1.0, 1.0)


def _one_token(old):
  one = jnp.ones((1, 1))
  return LossTokens(
    mask=one > 0,
    sequence_ids=jnp.zeros((1, 1), jnp.int32),
    advantages=one,
    behavior_logprobs=one * old,
    old_logprobs=one * old,
  )


@pytest.mark.parametrize(
  "options",
  [
    {"loss": "reinforce", "clip_low": 0.1},
    {"loss": "sapo", "clip_high": 0.3},
    {"loss": "vespo", "clip_low": 0.3},
    {"loss": "clipped", "sapo_temperature_positive": 2.0},
    {"loss": "gspo", "sapo_temperature_negative": 2.0},
    {"max_completion_tokens": 512},
    {"max_completion_tokens": 512, "aggregation": "sequence_mean"},
    {"kl_in_reward": True, "kl_weight": "none"},
    {"kl_in_reward": True, "use_on_policy_kl_approximation": True},
  ],
)
def test_an_option_that_the_loss_never_reads_is_refused(options):
  *_, name = [key for key in options if key not in ("loss", "aggregation", "kl_in_reward")]
  with pytest.raises(ValueError, match=f"{name}=.* would never be read"):
    objectives.make(**options)


@pytest.mark.parametrize(
  "name, hint",
  [
    ("grpo", "here it is 'clipped'"),
    ("PPO", "here it is 'clipped'"),
    ("dapo", "'clipped' with clip_high=0.28"),
    ("dr_grpo", "'clipped' with aggregation='constant_length'"),
    ("bnpo", "'clipped' with aggregation='token_mean'"),
    ("gpg", "here it is 'reinforce'"),
    ("geo_mean", "here it is 'gmpo'"),
    ("cipso", "did you mean 'cispo'"),
  ],
)
def test_a_loss_of_another_name_is_recognised(name, hint):
  with pytest.raises(ValueError, match=hint):
    objectives.make(loss=name)


BOOLEANS = (
  *("force_on_policy_ratio", "use_on_policy_kl_approximation", "kl_in_reward"),
  "use_behavior_logprobs",
)
WORDS = ("loss", "kl_estimator", "kl_weight", "importance_correction", "old_logprobs")
NULLABLE_WORDS = ("importance_truncation", "aggregation")
NULLABLE = (
  *("clip_low", "clip_high", "dual_clip", "kl_input_clamp", "kl_output_clamp"),
  *("off_policy_mask_threshold", "max_completion_tokens", "seq_logprob_error_threshold"),
  *("dppo_mask_low", "dppo_mask_high", "dppo_ratio_cap"),
)
NUMBERS = (
  *("dppo_kl_tau", "clip_cov_ratio", "kl_cov_ratio", "kl_cov_coef", "top_entropy_share"),
  *("clip_cov_lb", "clip_cov_ub"),
  *("sapo_temperature_positive", "sapo_temperature_negative", "kl_coef", "entropy_coef"),
  *("importance_low", "importance_high"),
)


def test_every_option_refuses_values_of_other_types_by_name():
  wrong = ["0.2", "no", math.nan, -1, [1.0], {}, (), math.inf, True, None, 0.5, "k3", 1.0]
  allowed = {
    **dict.fromkeys(BOOLEANS, [True]),
    **dict.fromkeys(WORDS, []),
    **dict.fromkeys(NULLABLE_WORDS, [None]),
    **dict.fromkeys(NULLABLE, [None, 0.5, 1.0]),
    **dict.fromkeys(NUMBERS, [0.5, 1.0]),
    "importance_high": [math.inf, 0.5, 1.0],
    "kl_estimator": ["k3"],
    "dual_clip": [None],
    "max_completion_tokens": [None],
    "seq_logprob_error_threshold": [None, 1.0],
    "clip_cov_ub": [math.inf, 0.5, 1.0],
  }
  assert set(allowed) == {
    field.name for field in dataclasses.fields(objective_options.ResolvedOptions)
  }
  for name, fine in allowed.items():
    for value in wrong:
      if any(value is one or (value == one and type(value) is type(one)) for one in fine):
        continue
      with pytest.raises(ValueError, match=f"(no )?{name} "):
        objectives.make(**{name: value})


def test_all_that_is_wrong_is_said_at_once():
  with pytest.raises(ValueError, match="dual_clip.*constant_length"):
    objectives.make(dual_clip=0.5, aggregation="constant_length")


@pytest.mark.parametrize(
  "options, message",
  [
    ({}, "ref_logprobs"),
    ({"entropy_coef": 1.0, "kl_coef": 0.0}, "entropy"),
    ({"loss": "kl_cov", "kl_coef": 0.0}, "loss='kl_cov' needs LossTokens.selected"),
    ({"top_entropy_share": 0.2, "kl_coef": 0.0}, "top_entropy_share needs LossTokens.selected"),
    ({"seq_logprob_error_threshold": 2.0, "kl_coef": 0.0}, "LossTokens.kept"),
  ],
)
def test_a_missing_input_is_named(options, message):
  policy, _, tokens = _tokens()
  tokens = dataclasses.replace(tokens, ref_logprobs=None, selected=None, kept=None)
  with pytest.raises(ValueError, match=message):
    objectives.make(**options)(policy, None, tokens, _denominators(tokens))


@pytest.mark.parametrize(
  "options, needed",
  [
    (
      {
        "importance_correction": "token",
        "importance_truncation": "tis",
        "importance_high": 2.0,
      },
      "importance_correction='token'",
    ),
    ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold"),
    ({"use_on_policy_kl_approximation": True}, "use_on_policy_kl_approximation"),
    ({"use_behavior_logprobs": True}, "use_behavior_logprobs"),
    ({"seq_logprob_error_threshold": 2.0}, "seq_logprob_error_threshold"),
  ],
)
def test_logprobs_of_the_engine_are_needed_only_by_what_compares_with_them(options, needed):
  policy, _, tokens = _tokens()
  without = dataclasses.replace(tokens, behavior_logprobs=None)
  with pytest.raises(ValueError, match=f"{needed} needs behavior_logprobs"):
    objectives.make(**options)(policy, None, without, _denominators(tokens))
  objective = objectives.make()
  loss, metrics = objective(policy, None, without, _denominators(tokens))
  expected, all_metrics = objective(policy, None, tokens, _denominators(tokens))
  assert loss == expected
  missing = {name for name in all_metrics if name.startswith("mismatch/")}
  assert set(all_metrics) - set(metrics) == missing | {"train/approx_entropy"}


@pytest.mark.parametrize("loss", objective_options.LOSSES)
def test_without_ids_a_row_is_one_completion_and_masks_may_be_numbers(loss):
  policy, _, tokens = _tokens()
  rows = dataclasses.replace(tokens, sequence_ids=jnp.zeros_like(tokens.sequence_ids))
  plain = dataclasses.replace(tokens, sequence_ids=None)
  objective = objectives.make(loss=loss, kl_coef=0.0)
  counts = aggregate.local_denominators(np.asarray(tokens.mask, np.float32))
  expected = objective(policy, None, rows, aggregate.local_denominators(tokens.mask))[0]
  np.testing.assert_allclose(objective(policy, None, plain, counts)[0], expected, rtol=1e-6)


def test_every_named_loss_exists_and_objectives_are_hashable():
  assert set(policy_terms.POLICY_LOSSES) == set(objective_options.LOSSES)
  assert hash(objectives.make()) == hash(objectives.make(loss="clipped"))
