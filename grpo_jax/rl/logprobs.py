"""Hidden states to token logprobs. Pure; the only place where tokens shift by one.

A hidden state at place t predicts the token after it. Every per-token array of
this package is aligned to the token itself, so the two are brought together
here, once: in packed rows by `Batch.predecessors`, in plain rows by t - 1.
"""

import jax.numpy as jnp
from grpo_kernels.linear_logprobs import linear_logprobs
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.types import Batch, LossTokens


def token_logprobs(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "..."],
  batch: Batch,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
) -> Float[Array, "B N"] | tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Returns log π of the tokens that are learned from, at `batch.loss_places`.

  Only those tokens meet the vocabulary: [B·N, V] logits, in chunks, instead of
  [B·T, V]. Places of -1 give 0 and carry no gradient.

  Args:
    hidden: output of the transformer's final norm.
    head: [V D] or [D V], as `head_layout` says.
    batch: its `tokens`, `predecessors` and `loss_places` are read.
    head_layout: "vd" (an embedding table) or "dv".
    temperature: of the softmax; the one that the tokens were sampled at.
    return_entropy: also return the entropy of each predicting distribution.
    implementation: of `grpo_kernels.linear_logprobs`; None picks by platform.

  Returns:
    Logprobs in nats, float32; with `return_entropy` also the entropies, in nats.
  """
  is_real = batch.loss_places >= 0
  places = jnp.where(is_real, batch.loss_places, 0)
  return _gathered(
    hidden,
    head,
    jnp.take_along_axis(batch.predecessors, places, axis=-1),
    jnp.take_along_axis(batch.tokens, places, axis=-1),
    is_real,
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
  )


def sequence_logprobs(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "..."],
  tokens: Int[Array, "B T"],
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
) -> Float[Array, "B T"] | tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Returns log π of every token of plain rows, one sequence a row; token 0 gets 0.

  For research code without packing. Args and Returns are those of `token_logprobs`.
  """
  places = jnp.broadcast_to(jnp.arange(tokens.shape[-1])[None, :], tokens.shape)
  return _gathered(
    hidden,
    head,
    jnp.maximum(places - 1, 0),
    tokens,
    places > 0,
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
  )


def _gathered(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "..."],
  predecessors: Int[Array, "B N"],
  targets: Int[Array, "B N"],
  is_real: Bool[Array, "B N"],
  *,
  head_layout: str,
  temperature: float,
  return_entropy: bool,
  implementation: str | None,
) -> Float[Array, "B N"] | tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Gathers the predicting hidden states and sends them through the fused head."""
  rows, n = targets.shape
  states = jnp.take_along_axis(hidden, predecessors[:, :, None], axis=1)
  states = jnp.where(is_real[:, :, None], states, 0)  # whatever padding holds stays out.
  outputs = linear_logprobs(
    states.reshape(rows * n, -1),
    head,
    targets.reshape(rows * n),
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
  )
  if not isinstance(outputs, tuple):
    return jnp.where(is_real, outputs.reshape(rows, n), 0)
  logprobs, entropy = (jnp.where(is_real, x.reshape(rows, n), 0) for x in outputs)
  return logprobs, entropy


def gather_loss_tokens(batch: Batch) -> LossTokens:
  """Gathers out of a batch what an objective sees of it, at `batch.loss_places`.

  Completions are numbered anew, by order in their row, so that an id is always
  below N, also when completions without a token to learn from stand between.
  """
  mask = batch.loss_places >= 0
  places = jnp.where(mask, batch.loss_places, 0)
  rollouts = jnp.where(mask, jnp.take_along_axis(batch.rollout_ids, places, axis=-1), -1)
  before = jnp.pad(rollouts[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  begins = mask & (rollouts != before)
  return LossTokens(
    mask=mask,
    sequence_ids=jnp.maximum(jnp.cumsum(begins, axis=-1, dtype=jnp.int32) - 1, 0),
    advantages=jnp.where(mask, jnp.take_along_axis(batch.advantages, places, axis=-1), 0),
    behavior_logprobs=jnp.where(
      mask, jnp.take_along_axis(batch.behavior_logprobs, places, axis=-1), 0
    ),
    old_logprobs=batch.old_logprobs,
    ref_logprobs=batch.ref_logprobs,
  )
