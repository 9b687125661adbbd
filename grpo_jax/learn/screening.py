"""Leaves out completions whose logprobs differ between engine and trainer, before the update. Pure.

The decision is made once, for all of the step, and the completions count in no denominator.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float

from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.learn import sharding
from grpo_jax.processes import arrays
from grpo_jax.rl import aggregate, importance
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.types import Batch, Denominators, Minibatch


def screened(minibatches: Sequence[Minibatch], *, threshold: float) -> tuple[Minibatch, ...]:
  """Marks the completions whose logprob error is at most `threshold` as `kept`.

  Args:
    minibatches: Minibatches of one training step, with `old_logprobs`.
    threshold: Largest mean of exp |log μ - log π_old| over the tokens of a completion.

  Returns:
    The minibatches with `Batch.kept`, and denominators without the completions left out.

  Raises:
    ValueError: The old logprobs were not scored.
  """
  return tuple(_screened(minibatch, threshold) for minibatch in minibatches)


def _screened(minibatch: Minibatch, threshold: float) -> Minibatch:
  batches = minibatch.microbatches
  if any(batch.old_logprobs is None for batch in batches):
    raise ValueError("seq_logprob_error_threshold needs old_logprobs, but they were not scored")
  found = [_program(_rows(batch))(batch, threshold=threshold) for batch in batches]
  tokens, sequences = sum(arrays.fetch([dropped for _, dropped in found]), np.zeros(2))
  whole = minibatch.denominators
  return Minibatch(
    tuple(
      dataclasses.replace(batch, kept=kept) for batch, (kept, _) in zip(batches, found, strict=True)
    ),
    Denominators(
      tokens=_less(whole.tokens, tokens),
      sequences=_less(whole.sequences, sequences),
    ),
  )


def _less(count: float | Array | np.ndarray, lost: float) -> float:
  return float(count) - float(lost)


def jobs(batches: Mapping[str, Batch], *, threshold: float) -> list[CompileJob]:
  """Returns the compilations of `screened`.

  Args:
    threshold: Argument of `screened`.
    batches: Shapes, dtypes and shardings of a microbatch of every planned shape, with
      `old_logprobs` and without `kept`, by its description.
  """
  return [
    _program(_rows(batch)).job(batch, threshold=threshold, detail=detail)
    for detail, batch in batches.items()
  ]


def _kept_of(batch: Batch, *, threshold: float) -> tuple[Bool[Array, "B N"], Float[Array, "2"]]:
  """Returns the tokens that are kept, and the counts of tokens and sequences that are not."""
  tokens = gather_loss_tokens(batch)
  assert tokens.old_logprobs is not None and tokens.behavior_logprobs is not None
  mask, ids = tokens.mask, tokens.sequence_ids
  inputs = (tokens.old_logprobs, tokens.behavior_logprobs, mask, ids)
  kept = importance.seq_logprob_error_mask(*inputs, threshold=threshold)
  dropped = aggregate.local_denominators(mask & ~kept, ids, tokens.weights)
  return kept, jnp.stack([jnp.asarray(dropped.tokens), jnp.asarray(dropped.sequences)])


def _rows(batch: Batch) -> NamedSharding | None:
  """Returns the sharding of the rows of a batch; None: it is not on a mesh."""
  found = getattr(batch.loss_places, "sharding", None)
  return found if isinstance(found, NamedSharding) else None


@functools.cache
def _program(rows: NamedSharding | None) -> Program:
  """Returns the program of `_kept_of` for batches whose rows are split in this way."""
  placed = None if rows is None else (rows, sharding.whole(sharding.mesh_of(rows)))
  jitted = jax.jit(_kept_of, static_argnames="threshold", out_shardings=placed)
  return Program(jitted, name="screening", static=("threshold",))
