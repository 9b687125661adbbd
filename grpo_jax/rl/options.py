"""The options of advantages, losses and distillation. Pure; it imports no JAX."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.values import checked
from grpo_jax.values.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
  """How advantages are computed: the section `advantages` of a config."""

  estimator: str = option(
    "grpo",
    "grpo, lite_ppo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, gdpo, maxrl, opo,"
    " remax, pass_at_k, or dotted path",
  )
  estimator_args: Mapping[str, Any] = option({}, "further arguments of an estimator of your own")
  baseline: str | None = option(
    None,
    '"group_mean", "leave_one_out", "length_weighted", "greedy", "none"; None: the estimator\'s',
  )
  scale: str | None = option(
    None, '"group_std", "batch_std", "group_mean", "none"; None: the estimator\'s'
  )
  ddof: int = option(
    1, "degrees of freedom of the standard deviation; 1: unbiased", checked.whole(low=0, high=1)
  )
  eps: float = option(1e-6, "added to the standard deviation", checked.number(low=0))
  weights: tuple[float, ...] | None = option(
    None,
    "gdpo: weights of the reward components",
    checked.several(checked.number(), least=2, none=True),
  )
  pass_k: int | None = option(
    None, "pass_at_k: number of attempts whose best reward counts", checked.whole(low=1, none=True)
  )
  clip_low: float | None = option(
    None, "smallest advantage; None: no bound", checked.number(none=True)
  )
  clip_high: float | None = option(
    None, "largest advantage; None: no bound", checked.number(none=True)
  )


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
  """The choices and numbers of an objective.

  Defaults are those of NeMo RL's `grpo_math_1B` recipe.
  """

  loss: str | Callable[..., Any] = option(
    "clipped",
    "clipped, gspo, gspo_token, cispo, sapo, reinforce, gmpo, luspo, vespo, dppo_tv, dppo_kl,"
    " clip_cov, kl_cov, or dotted path",
    checked.text(),
  )
  clip_low: float | None = option(
    None,
    "the ratio is clipped below 1 - clip_low; None: the loss's own (clipped: 0.2)",
    checked.number(low=0, none=True),
  )
  clip_high: float | None = option(
    None,
    "the ratio is clipped above 1 + clip_high; None: the loss's own (clipped: 0.2, DAPO: 0.28)",
    checked.number(low=0, none=True),
  )
  dual_clip: float | None = option(
    None,
    "> 1: bounds the loss of tokens with a negative advantage; 3 is usual",
    checked.number(above=1, none=True),
  )
  force_on_policy_ratio: bool = option(False, "sets the ratio to 1; needs one update per batch")
  use_behavior_logprobs: bool = option(
    False,
    "ratios to the logprobs of the engine instead of the trainer's; prime-rl, verl's bypass_mode",
  )
  old_logprobs: str = option(
    "scored",
    'logprobs of the policy before the update: "scored", or "interpolated" between engine and'
    ' policy by the ages of the tokens, without a scoring pass (AReaL\'s "loglinear")',
  )
  dppo_mask_low: float | None = option(
    None,
    "dppo: largest fall of a token's probability (dppo_kl: its divergence, in nats) that is"
    " learned from; None: the loss's own (dppo_tv: 0.2, dppo_kl: 0.05)",
    checked.number(low=0, none=True),
  )
  dppo_mask_high: float | None = option(
    None, "dppo: the same for a rise", checked.number(low=0, none=True)
  )
  dppo_ratio_cap: float | None = option(
    None, "dppo: largest ratio; None: no bound", checked.number(above=0, none=True)
  )
  dppo_kl_tau: float = option(
    0.0, "dppo: coefficient of the squared log-ratio; prime-rl: 1e-3", checked.number(low=0)
  )
  clip_cov_ratio: float = option(
    2e-4, "clip_cov: share of the tokens that lose their gradient", checked.number(above=0, high=1)
  )
  clip_cov_lb: float = option(
    1.0, "clip_cov: lower bound of the covariance of these tokens", checked.number(low=0)
  )
  clip_cov_ub: float = option(
    5.0, "clip_cov: upper bound of it", checked.number(above=0, infinite=True)
  )
  kl_cov_ratio: float = option(
    2e-4,
    "kl_cov: share of the tokens, of largest covariance, with a penalty",
    checked.number(above=0, high=1),
  )
  kl_cov_coef: float = option(
    1.0, "kl_cov: coefficient of that penalty, the absolute log-ratio", checked.number(low=0)
  )
  top_entropy_share: float = option(
    1.0,
    'share of the tokens, of largest entropy, in the policy loss; 1: all, 0.2: "80/20 rule"',
    checked.number(above=0, high=1),
  )
  sapo_temperature_positive: float = option(
    1.0, "sapo: damping of ratios for positive advantages", checked.number(low=1e-6, high=1e6)
  )
  sapo_temperature_negative: float = option(
    1.05, "sapo: damping of ratios for negative advantages", checked.number(low=1e-6, high=1e6)
  )
  kl_coef: float = option(
    0.01,
    "coefficient of the KL to the reference policy; 0: no reference is needed",
    checked.number(low=0),
  )
  kl_estimator: str = option("k3", '"k1", "k2" or "k3"')
  kl_input_clamp: float | None = option(
    20.0,
    "bound of the log-ratio to the reference, in nats; None: off",
    checked.number(above=0, none=True),
  )
  kl_output_clamp: float | None = option(
    10.0, "bound of the KL of a token, in nats; None: off", checked.number(above=0, none=True)
  )
  kl_weight: str = option("score", '"score" (exact gradient), "none" (TRL, verl) or "old"')
  use_on_policy_kl_approximation: bool = option(False, "weighs the KL by policy/behavior")
  kl_in_reward: bool = option(False, "subtracts the KL from the advantages instead (REINFORCE++)")
  entropy_coef: float = option(
    0.0, "coefficient of an entropy bonus; 0: none", checked.number(low=0)
  )
  importance_correction: str = option(
    "none", 'weights old/behavior: "none", "token", "sequence", "sequence_mean"'
  )
  importance_truncation: str | None = option(None, 'None, "tis", "icepop" or "seq_mask"')
  importance_low: float = option(
    0.0, "lower bound of the truncation, inclusive", checked.number(low=0)
  )
  importance_high: float = option(
    math.inf, "upper bound of the truncation, inclusive", checked.number(above=0, infinite=True)
  )
  off_policy_mask_threshold: float | None = option(
    None,
    "drop bad completions that are further from the policy, in nats per token",
    checked.number(low=0, none=True),
  )
  seq_logprob_error_threshold: float | None = option(
    None,
    "drop completions whose mean of exp |log behavior - log old| is larger; costs a scoring pass",
    checked.number(low=1, none=True),
  )
  aggregation: str | None = option(
    None,
    "token_mean, sequence_mean or constant_length; None: token_mean, or sequence_mean for"
    " gspo, gspo_token, gmpo and luspo",
  )
  max_completion_tokens: int | None = option(
    None, 'the length that "constant_length" divides by', checked.whole(low=1, none=True)
  )


@dataclasses.dataclass(frozen=True)
class LossOptions(ObjectiveOptions):
  """The section `loss` of a config."""

  loss_args: Mapping[str, Any] = option({}, "further arguments of a loss of your own")
  router_replay: bool | None = option(
    None,
    "replays the experts that the engine chose; None: of a mixture, where it recorded them",
  )


@dataclasses.dataclass(frozen=True)
class DistillationOptions:
  """How a teacher's logprobs become advantages: a part of the section `teacher` of a config."""

  coef: float = option(
    1.0, "coefficient of log teacher/policy of each token", checked.number(above=0)
  )
  reward_coef: float = option(
    0.0, "coefficient of the advantages from rewards; 0: the teacher's alone", checked.number(low=0)
  )
  clamp: float | None = option(
    None,
    "bound of log teacher/policy on both sides; None: no bound",
    checked.number(above=0, none=True),
  )
