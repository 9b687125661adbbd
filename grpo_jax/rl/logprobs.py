"""Hidden states to token logprobs. Pure; the only place where tokens shift by one.

A hidden state at place t predicts the token after it. Every per-token array of
this package is aligned to the token itself, so the two are brought together
here, once: in packed rows by `Batch.predecessors`, in plain rows by t - 1.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from grpo_kernels.linear_logprobs import linear_logprobs, sharded, token_local, truncated
from grpo_kernels.truncation import Truncation
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Denominators, LossTokens


def token_logprobs(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "..."],
  batch: Batch,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
  partition: sharded.Partition | None = None,
) -> Float[Array, "B N"] | tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Returns log π of the tokens that are learned from, at `batch.loss_places`.

  Logits are computed for these tokens only: [B·N, V], in chunks, instead of
  [B·T, V]. Places of -1 give 0 and carry no gradient.

  Args:
    hidden: Output of the transformer's final norm.
    head: Weights of the LM head, [V D] or [D V], as `head_layout` says.
    batch: Batch whose `tokens`, `predecessors` and `loss_places` are read.
    head_layout: "vd" (an embedding table) or "dv".
    temperature: Temperature of the softmax; the one that the tokens were sampled at.
    return_entropy: Whether to return the entropy of each predicting distribution as well.
    implementation: Name of a `grpo_kernels.linear_logprobs` implementation; None: chosen by
      platform.
    partition: Placement of head and rows on a mesh (`learn.sharding.head_partition`); None: on one
      device, or wherever the compiler puts them.

  Returns:
    Logprobs in nats, float32; with `return_entropy` also the entropies, in nats.
  """
  return _gathered(
    hidden,
    head,
    *_predictions(batch),
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
    partition=partition,
  )


def truncated_token_logprobs(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "..."],
  batch: Batch,
  truncation: Truncation,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  partition: sharded.Partition | None = None,
) -> truncated.Scores:
  """Returns log π of the tokens that are learned from, under top-k, top-p and min-p.

  The same tokens as `token_logprobs`; see `truncated.linear_logprobs` for the distribution. Places
  of -1 give 0 (False) and carry no gradient.

  Args:
    hidden: Output of the transformer's final norm.
    head: Weights of the LM head, [V D] or [D V], as `head_layout` says.
    batch: Batch whose `tokens`, `predecessors` and `loss_places` are read.
    truncation: Filters that the tokens were sampled with.
    head_layout: "vd" (an embedding table) or "dv".
    temperature: Temperature of the softmax; the one that the tokens were sampled at.
    return_entropy: Whether to return the entropy of each truncated distribution as well.
    partition: Placement of head and rows on a mesh; None: on one device.

  Returns:
    Scores whose arrays are [B N].
  """
  predecessors, targets, is_real = _predictions(batch)
  found = truncated.linear_logprobs(
    _states(hidden, predecessors, is_real),
    head,
    targets.reshape(-1),
    truncation,
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    partition=partition,
  )
  return jax.tree.map(lambda x: jnp.where(is_real, x.reshape(is_real.shape), 0), found)


def token_objective(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "..."],
  batch: Batch,
  objective: Objective,
  denominators: Denominators,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  partition: sharded.Partition | None = None,
) -> tuple[Float[Array, ""], Float[Array, "B N"], Float[Array, "B N"] | None]:
  """Returns a token-local loss, whose gradients are computed in the same pass.

  Equal to `objective` of `token_logprobs`, with a quarter fewer operations in the head; see
  `grpo_kernels.linear_logprobs.token_local`.

  Args:
    hidden: Output of the transformer's final norm.
    head: Weights of the LM head, [V D] or [D V], as `head_layout` says.
    batch: Batch to learn from.
    objective: Objective with `is_token_local`.
    denominators: Counts of the whole optimizer step.
    head_layout: "vd" (an embedding table) or "dv".
    temperature: Temperature of the softmax; the one that the tokens were sampled at.
    return_entropy: Whether to return the entropies as well.
    partition: Placement of head and rows on a mesh.

  Returns:
    The loss; log π of the tokens that are learned from, as `token_logprobs` gives them, and the
    entropies or None. Only the loss can be differentiated.

  Raises:
    ValueError: The objective is not token-local.
  """
  if not objective.is_token_local:
    raise ValueError(f"a loss that is not token-local has no one-pass gradient: {objective}")
  predecessors, targets, is_real = _predictions(batch)
  tokens = gather_loss_tokens(batch)
  rows, n = targets.shape
  states = _states(hidden, predecessors, is_real)
  fields = {field: getattr(tokens, field) for field in _Share.FIELDS}
  per_token: dict[str, Any] = {
    field: None if x is None else x.reshape(-1) for field, x in fields.items()
  }
  per_token["targets"] = targets.reshape(-1)
  live, back = None, None
  if partition is None:
    # Padding is sorted to the end, where its chunks are skipped. Devices of a mesh keep their rows.
    order = jnp.argsort(~is_real.reshape(-1), stable=True)
    states, per_token = jax.tree.map(lambda x: x[order], (states, per_token))
    live, back = jnp.sum(is_real, dtype=jnp.int32), jnp.argsort(order)
  loss, logprobs, entropy = token_local.linear_objective(
    states,
    head,
    per_token.pop("targets"),
    _Share(objective),
    per_token,
    denominators,
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy or objective.needs_entropy,
    differentiate_entropy=objective.needs_entropy,
    partition=partition,
    live=live,
  )

  def at_real(x):
    return jnp.where(is_real, (x if back is None else x[back]).reshape(rows, n), 0)

  return loss, at_real(logprobs), None if entropy is None else at_real(entropy)


@dataclasses.dataclass(frozen=True)
class _Share:
  """The contribution of some tokens, from any rows, to a token-local loss."""

  objective: Objective

  # Fields of `LossTokens`; a token-local loss does not depend on a token's completion.
  FIELDS: ClassVar = (
    *("mask", "advantages", "behavior_logprobs", "old_logprobs", "ref_logprobs"),
    *("teacher_logprobs", "selected", "kept", "ages", "weights"),
  )

  def __call__(
    self,
    logprobs: Float[Array, " n"],
    entropy: Float[Array, " n"] | None,
    token_fields: dict[str, Any],
    denominators: Denominators,
  ) -> Float[Array, ""]:
    """Returns the loss of tokens that are in one row."""
    row = lambda x: None if x is None else x[None, :]
    fields: dict[str, Any] = {field: row(x) for field, x in token_fields.items()}
    tokens = LossTokens(sequence_ids=jnp.zeros((1, *logprobs.shape), jnp.int32), **fields)
    return self.objective(logprobs[None, :], row(entropy), tokens, denominators)[0]


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

  For research code without packing.

  Args:
    hidden: States after the last norm, at every token.
    head: Weights of the LM head, in the layout that `head_layout` names.
    tokens: Ids of the tokens.
    head_layout: "vd" for [V D], as files and embeddings have it, or "dv" for [D V].
    temperature: Divisor of the logits.
    return_entropy: Whether to return the entropy of every token's distribution as well.
    implementation: Name of an implementation of the fused head; None: the best for the device.

  Returns:
    Logprob log π of each token, in nats; with `return_entropy` also the entropies, in nats.
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
    partition=None,
  )


def _predictions(
  batch: Batch,
) -> tuple[Int[Array, "B N"], Int[Array, "B N"], Bool[Array, "B N"]]:
  """Returns where each loss token is predicted, its id, and whether the place is used."""
  is_real = jnp.asarray(batch.loss_places) >= 0
  places = jnp.where(is_real, batch.loss_places, 0)
  at_places = lambda x: jnp.take_along_axis(x, places, axis=-1)
  return at_places(batch.predecessors), at_places(batch.tokens), is_real


def _states(
  hidden: Float[Array, "B T D"], predecessors: Int[Array, "B N"], is_real: Bool[Array, "B N"]
) -> Float[Array, "_ D"]:
  """Gathers the predicting hidden states, flat."""
  states = jnp.take_along_axis(hidden, predecessors[:, :, None], axis=1)
  states = jnp.where(is_real[:, :, None], states, 0)  # padding may hold anything.
  return states.reshape(-1, hidden.shape[-1])


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
  partition: sharded.Partition | None,
) -> Float[Array, "B N"] | tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Gathers the predicting hidden states and sends them through the fused head."""
  rows, n = targets.shape
  op = linear_logprobs
  if partition is not None:
    op = functools.partial(sharded.linear_logprobs, partition=partition)
  outputs = op(
    _states(hidden, predecessors, is_real),
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
  """Gathers what an objective reads from a batch, at `batch.loss_places`.

  Completions are renumbered by order in their row, so that an id is always
  below N, even if completions without a token to learn from lie between.
  """
  mask = jnp.asarray(batch.loss_places) >= 0
  places = jnp.where(mask, batch.loss_places, 0)
  on_device = lambda x: None if x is None else jnp.asarray(x)
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
    old_logprobs=on_device(batch.old_logprobs),
    ref_logprobs=on_device(batch.ref_logprobs),
    teacher_logprobs=on_device(batch.teacher_logprobs),
    selected=on_device(batch.selected),
    kept=on_device(batch.kept),
    ages=on_device(batch.ages),
    weights=on_device(batch.weights),
  )
