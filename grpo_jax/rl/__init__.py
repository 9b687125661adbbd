"""The mathematics of policy optimization as pure functions of arrays; needs JAX and jaxtyping only.

Arrays are JAX arrays, NumPy arrays or lists. Logprobs are in nats, losses are to be minimised, and
results are float32, or float64 where that is given. docs/algorithms.md has the formulas and a first
example; `help(grpo_jax.rl.MODULE)` shows the functions of a module.

What a training loop calls:

  advantages          rewards [P, G] to advantages: grpo, rloo, dr_grpo, maxrl, opo, gdpo, whiten
  estimators          make("grpo"): the same by name
  masks               the tokens that are learned from: until_stop, overlong_filter
  objectives          make(loss="clipped", kl_coef=0.01): loss and metrics of a batch
  aggregate           token_mean, sequence_mean, constant_length, and the counts that they divide by
  logprobs            hidden states and a head to logprobs of tokens

What an objective is made of:

  losses              clipped_surrogate, gspo, cispo, sapo, reinforce
  sequence_losses     gmpo, luspo, vespo
  dppo                dppo_tv, dppo_kl
  covariance_losses   clip_cov, kl_cov
  kl                  estimates of the KL to a reference policy: k1, k2, k3
  importance          weights and masks for the mismatch of engine and trainer
  proximal            old logprobs that are interpolated and not scored
  distillation        advantages from the logprobs of a teacher
  selection           tokens chosen among all of an optimizer step
  diagnostics         the metrics of an objective
  objective_options   every option of an objective, with its default
  options             the sections advantages and loss of a config

What these share: arrays, custom_functions, moments, numerics, policy_terms, staleness.

A metric of an objective is a `types.Mean` or `types.Maximum` of one part of a batch. Its value is
`float(metric)`, and `one.merge(other)` is the metric of two parts together.
"""
