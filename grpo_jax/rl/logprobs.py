"""Hidden states to token logprobs. Pure; the only place where tokens shift by one.

A hidden state at place t predicts the token after it. Every per-token array of
this package is aligned to the token itself, so the two are brought together
here, once: in packed rows by `Batch.predecessors`, in plain rows by t - 1.

If rows are dealt out in parts over devices (`grpo_kernels.row_parts`), hidden states are of parts,
and the head computes every place of a part where it lies. Only the state that predicts a place may
lie on another device: the last of the prompt, for the first token of a completion. Losses never see
parts; what they read and return is [B N], as ever.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from grpo_kernels.linear_logprobs import linear_logprobs, sharded, token_local, truncated
from grpo_kernels.row_parts import RowParts
from grpo_kernels.truncation import Truncation
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Denominators, LossTokens


def token_logprobs(
  hidden: Float[Array, "b t D"],
  head: Float[Array, "..."],
  batch: Batch,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
  partition: sharded.Partition | None = None,
  parts: RowParts | None = None,
) -> Float[Array, "B N"] | tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Returns log π of the tokens that are learned from, at `batch.loss_places`.

  Logits are computed for these tokens only: [B·N, V], in chunks, instead of
  [B·T, V]. Places of -1 give 0 and carry no gradient.

  Args:
    hidden: Output of the transformer's final norm: of the rows [B T], or of parts of them.
    head: Weights of the LM head, [V D] or [D V], as `head_layout` says.
    batch: Batch whose `tokens`, `predecessors` and `loss_places` are read.
    head_layout: "vd" (an embedding table) or "dv".
    temperature: Temperature of the softmax; the one that the tokens were sampled at.
    return_entropy: Whether to return the entropy of each predicting distribution as well.
    implementation: Name of a `grpo_kernels.linear_logprobs` implementation; None: chosen by
      platform.
    partition: Placement of head and rows on a mesh (`learn.sharding.head_partition`); None: on one
      device, or wherever the compiler puts them.
    parts: Division of the rows over devices, which `batch.order` is for; None: they are whole.

  Returns:
    Logprobs in nats, float32; with `return_entropy` also the entropies, in nats.
  """
  return _gathered(
    hidden,
    head,
    _Predictions.of(batch, parts),
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
    partition=partition,
  )


def truncated_token_logprobs(
  hidden: Float[Array, "b t D"],
  head: Float[Array, "..."],
  batch: Batch,
  truncation: Truncation,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  partition: sharded.Partition | None = None,
  parts: RowParts | None = None,
) -> truncated.Scores:
  """Returns log π of the tokens that are learned from, under top-k, top-p and min-p.

  The same tokens as `token_logprobs`; see `truncated.linear_logprobs` for the distribution. Places
  of -1 give 0 (False) and carry no gradient.

  Args:
    hidden: Output of the transformer's final norm: of the rows [B T], or of parts of them.
    head: Weights of the LM head, [V D] or [D V], as `head_layout` says.
    batch: Batch whose `tokens`, `predecessors` and `loss_places` are read.
    truncation: Filters that the tokens were sampled with.
    head_layout: "vd" (an embedding table) or "dv".
    temperature: Temperature of the softmax; the one that the tokens were sampled at.
    return_entropy: Whether to return the entropy of each truncated distribution as well.
    partition: Placement of head and rows on a mesh; None: on one device.
    parts: Division of the rows over devices, as in `token_logprobs`.

  Returns:
    Scores whose arrays are [B N].
  """
  predictions = _Predictions.of(batch, parts)
  found = truncated.linear_logprobs(
    predictions.states(hidden),
    head,
    predictions.targets.reshape(-1),
    truncation,
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    partition=partition,
  )
  return jax.tree.map(predictions.at_loss_places, found)


def token_objective(
  hidden: Float[Array, "b t D"],
  head: Float[Array, "..."],
  batch: Batch,
  objective: Objective,
  denominators: Denominators,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  partition: sharded.Partition | None = None,
  parts: RowParts | None = None,
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
    parts: Division of the rows over devices, as in `token_logprobs`.

  Returns:
    The loss; log π of the tokens that are learned from, as `token_logprobs` gives them, and the
    entropies or None. Only the loss can be differentiated.

  Raises:
    ValueError: The objective is not token-local.
  """
  if not objective.is_token_local:
    raise ValueError(f"a loss that is not token-local has no one-pass gradient: {objective}")
  predictions = _Predictions.of(batch, parts)
  tokens, is_real = gather_loss_tokens(batch), predictions.is_real
  states = predictions.states(hidden)
  fields = {field: getattr(tokens, field) for field in _Share.FIELDS}
  per_token: dict[str, Any] = {
    field: None if x is None else predictions.flat(x) for field, x in fields.items()
  }
  per_token["targets"] = predictions.targets.reshape(-1)
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

  def at_places(x):
    return predictions.at_loss_places(x if back is None else x[back])

  return loss, at_places(logprobs), None if entropy is None else at_places(entropy)


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
    _Predictions(jnp.maximum(places - 1, 0), tokens, places > 0),
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
    partition=None,
  )


class _Predictions(NamedTuple):
  """The tokens whose logprobs the head computes: those of the loss, or all places of parts.

  Attributes:
    predecessors: Place, or slot in the whole row, of the state that predicts each.
    targets: Id of each.
    is_real: Whether each is learned from; the others have no gradient.
    parts: Division of the rows over devices; None: they are whole, and m = N.
    batch: Batch of the tokens; None: all of plain rows are meant.
  """

  predecessors: Int[Array, "b m"]
  targets: Int[Array, "b m"]
  is_real: Bool[Array, "b m"]
  parts: RowParts | None = None
  batch: Batch | None = None

  @classmethod
  def of(cls, batch: Batch, parts: RowParts | None) -> "_Predictions":
    """Returns those of a batch."""
    if parts is None:
      is_real = jnp.asarray(batch.loss_places) >= 0
      places = jnp.where(is_real, batch.loss_places, 0)
      at_places = lambda x: jnp.take_along_axis(x, places, axis=-1)
      return cls(at_places(batch.predecessors), at_places(batch.tokens), is_real)
    order: Any = batch.order
    before = jnp.take_along_axis(parts.slots(order), batch.predecessors, axis=-1)
    dealt = lambda x: parts.dealt(jnp.asarray(x), order)
    return cls(dealt(before), dealt(batch.tokens), dealt(batch.loss_mask), parts, batch)

  def states(self, hidden: Float[Array, "b t D"]) -> Float[Array, "_ D"]:
    """Gathers the predicting hidden states, flat."""
    if self.parts is None:
      states = jnp.take_along_axis(hidden, self.predecessors[:, :, None], axis=1)
    else:
      states = self.parts.taken(hidden, self.predecessors)
    states = jnp.where(self.is_real[:, :, None], states, 0)  # padding may hold anything.
    return states.reshape(-1, hidden.shape[-1])

  def flat(self, x: Array) -> Array:
    """Returns what belongs to the tokens of the loss, [B N], flat as the states are."""
    if self.parts is None or self.batch is None:
      return x.reshape(-1)
    mask = jnp.asarray(self.batch.loss_mask)
    numbers = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1  # of the tokens of the loss, in order.
    at_places = jnp.take_along_axis(x, jnp.where(mask, numbers, 0), axis=-1)
    at_places = jnp.where(mask, at_places, jnp.zeros((), x.dtype))
    order: Any = self.batch.order
    return self.parts.dealt(at_places, order).reshape(-1)

  def at_loss_places(self, x: Array) -> Array:
    """Returns what the head computed, flat as the states are, for the tokens of the loss."""
    x = jnp.where(self.is_real, x.reshape(self.is_real.shape), 0)
    if self.parts is None or self.batch is None:
      return x
    order: Any = self.batch.order
    at_places = self.parts.collected(x, self.parts.slots(order))
    places = jnp.asarray(self.batch.loss_places)
    found = jnp.take_along_axis(at_places, jnp.maximum(places, 0), axis=-1)
    return jnp.where(places >= 0, found, jnp.zeros((), x.dtype))


def _gathered(
  hidden: Float[Array, "b t D"],
  head: Float[Array, "..."],
  predictions: _Predictions,
  *,
  head_layout: str,
  temperature: float,
  return_entropy: bool,
  implementation: str | None,
  partition: sharded.Partition | None,
) -> Float[Array, "B N"] | tuple[Float[Array, "B N"], Float[Array, "B N"]]:
  """Gathers the predicting hidden states and sends them through the fused head."""
  op = linear_logprobs
  if partition is not None:
    op = functools.partial(sharded.linear_logprobs, partition=partition)
  outputs = op(
    predictions.states(hidden),
    head,
    predictions.targets.reshape(-1),
    head_layout=head_layout,
    temperature=temperature,
    return_entropy=return_entropy,
    implementation=implementation,
  )
  if not isinstance(outputs, tuple):
    return predictions.at_loss_places(outputs)
  logprobs, entropy = map(predictions.at_loss_places, outputs)
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
