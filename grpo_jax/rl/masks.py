"""Masked sums and means, over tokens and over the sequences of a row. Pure.

A sequence is one completion. In packed rows `sequence_ids` gives the sequence of
its row that a token belongs to (0 <= id < N); None means that every row is
one sequence. A token under a False mask may hold anything, including NaN and
infinities: it affects neither a value nor a gradient of the functions here.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl import arrays
from grpo_jax.rl.numerics import safe_divide


def fill(x: arrays.Numbers, mask: arrays.Mask, value: float = 0.0) -> Float[Array, "*shape"]:
  """Returns `x` with `value` wherever `mask` is False; the gradient stops there, too.

  Applied to the *inputs* of a formula it is the first half of the "double
  where": the formula then never sees a NaN, whose gradient would survive a
  mask on the output alone.

  Args:
    x: Values of any shape.
    mask: True where `x` is kept.
    value: Value of the other elements.

  Returns:
    `x` with `value` under the mask.
  """
  (x,) = arrays.tokens(x=x, mask=mask)
  return jnp.where(arrays.mask(mask), x, jnp.asarray(value, x.dtype))


def masked_sum(x: arrays.Numbers, mask: arrays.Mask) -> Float[Array, ""]:
  """Returns the sum of `x` where `mask` is True; 0 if `mask` is False everywhere."""
  return jnp.sum(fill(x, mask))


def masked_max(x: arrays.Numbers, mask: arrays.Mask) -> Float[Array, ""]:
  """Returns the largest `x` where `mask` is True; -inf if `mask` is False everywhere."""
  return jnp.max(fill(x, mask, -jnp.inf), initial=-jnp.inf)


def masked_min(x: arrays.Numbers, mask: arrays.Mask) -> Float[Array, ""]:
  """Returns the smallest `x` where `mask` is True; inf if `mask` is False everywhere."""
  return jnp.min(fill(x, mask, jnp.inf), initial=jnp.inf)


def sequence_totals(
  x: arrays.Numbers, mask: arrays.Mask, sequence_ids: Int[Array, "B N"] | None = None
) -> Float[Array, "B S"]:
  """Returns the sum over the unmasked tokens of each sequence.

  Args:
    x: Value of each token.
    mask: True on the tokens that count.
    sequence_ids: Sequence of each token within its row; None: every row is one sequence.

  Returns:
    One sum per sequence slot: S is N with `sequence_ids`, else 1. Unused slots hold 0.
  """
  kept = fill(x, mask)
  if sequence_ids is None:
    return jnp.sum(kept, axis=-1, keepdims=True)
  arrays.tokens(x=kept, sequence_ids=sequence_ids)
  slots = kept.shape[-1]
  return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=slots))(
    kept, sequence_ids
  )


def sequence_lengths(
  mask: arrays.Mask, sequence_ids: Int[Array, "B N"] | None = None, dtype=jnp.float32
) -> Float[Array, "B S"]:
  """Returns the number of unmasked tokens of each sequence slot.

  Args:
    mask: True on the tokens that count.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    dtype: Type of the result.

  Returns:
    Number of tokens of each of S = N sequence slots of a row, or of S = 1 without `sequence_ids`.
  """
  arrays.tokens(mask=mask, sequence_ids=sequence_ids)
  mask = arrays.mask(mask)
  return sequence_totals(mask.astype(dtype), mask, sequence_ids)


def sequence_means(
  x: arrays.Numbers, mask: arrays.Mask, sequence_ids: Int[Array, "B N"] | None = None
) -> Float[Array, "B S"]:
  """Returns the mean over the unmasked tokens of each sequence; 0 in empty slots.

  Args:
    x: A value for each token.
    mask: True on the tokens that count.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    The mean of each sequence slot.
  """
  totals = sequence_totals(x, mask, sequence_ids)
  return safe_divide(totals, sequence_lengths(mask, sequence_ids, totals.dtype))


def count_sequences(
  mask: arrays.Mask, sequence_ids: Int[Array, "B N"] | None = None
) -> Float[Array, ""]:
  """Returns the number of sequences with at least one unmasked token."""
  return jnp.sum(sequence_lengths(mask, sequence_ids) > 0, dtype=jnp.float32)


def to_tokens(
  per_sequence: Float[Array, "B S"],
  like: Float[Array, "B N"] | Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N"]:
  """Returns the value of its sequence for every token; the inverse of the reductions above.

  Args:
    per_sequence: A value for each sequence slot.
    like: An array with the shape of the result.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    For each token the value of its sequence, masked or not.
  """
  per_sequence = arrays.floats(per_sequence, "per_sequence")
  if sequence_ids is None:
    return jnp.broadcast_to(per_sequence, like.shape)
  arrays.tokens(sequence_ids=sequence_ids, marks={"like": like})
  return jnp.take_along_axis(per_sequence, sequence_ids, axis=-1)


def until_stop(tokens: Int[Array, "B N"], stop_ids: Sequence[int]) -> Bool[Array, "B N"]:
  """Returns True up to and including the first stop id of each row; all True if there is none.

  The stop id itself is learned from: a policy that is never rewarded for
  stopping would not learn to stop. All ids in `stop_ids` end a completion.

  Raises:
    ValueError: `stop_ids` is not a sequence.
  """
  if np.ndim(stop_ids) != 1:
    raise ValueError(f"stop_ids must be a sequence of token ids, such as (2,), got {stop_ids!r}")
  tokens = jnp.asarray(tokens)
  is_stop = jnp.isin(tokens, jnp.asarray(tuple(stop_ids), tokens.dtype))
  stops_before = jnp.cumsum(is_stop, axis=-1) - is_stop
  return stops_before == 0


def loss_mask(
  completion: arrays.Mask, is_sampled: arrays.Mask, keep: arrays.Mask
) -> Bool[Array, "B N"]:
  """Returns True on the tokens that are learned from.

  Args:
    completion: True on the tokens after the prompt, up to the stop id.
    is_sampled: True on tokens that the policy wrote; False on those of the environment.
    keep: False for a completion that is excluded as a whole.
  """
  completion = arrays.mask(completion, name="completion")
  is_sampled = arrays.mask(is_sampled, completion.shape, "is_sampled")
  keep = arrays.mask(keep, completion.shape[:1], "keep")
  return completion & is_sampled & keep[:, None]


def overlong_filter(mask: arrays.Mask, is_truncated: arrays.Mask) -> Bool[Array, "B N"]:
  """Removes the completions that the token limit cut from the loss mask.

  Their rewards stay in the baseline of their group: filter the loss mask and not
  the mask of rewards. The loss's denominators are counted after this.

  Reference:
    DAPO, arXiv:2503.14476, section 3.4; NeMo RL's `overlong_filtering`.
  """
  mask = arrays.mask(mask)
  return mask & ~arrays.mask(is_truncated, mask.shape[:1], "is_truncated")[:, None]


def top_entropy(entropy: arrays.Numbers, mask: arrays.Mask, share: float) -> Bool[Array, "B N"]:
  """Returns True on the `share` of unmasked tokens whose entropy is largest.

  The threshold is the (1 - share) quantile, linearly interpolated, over all
  unmasked tokens of the arrays given. It is not a sum: compute it over the
  whole optimizer batch, before that is split into microbatches.

  Args:
    entropy: Entropy of the policy at each token, in nats.
    mask: True on the tokens that are learned from.
    share: Share of the tokens to keep, in (0, 1]; 0.2 in the paper, 1 keeps every token.

  Raises:
    ValueError: `share` is not in (0, 1].

  Reference:
    Wang et al. 2025, "Beyond the 80/20 rule", arXiv:2506.01939.
  """
  (entropy,), mask = arrays.tokens(entropy=entropy, mask=mask), arrays.mask(mask)
  if not 0.0 < share <= 1.0:
    raise ValueError(f"the share of high-entropy tokens must be in (0, 1], got {share}")
  threshold = jnp.nanquantile(jnp.where(mask, entropy, jnp.nan), 1.0 - share)
  return mask & (jnp.where(mask, entropy, -jnp.inf) >= threshold)
