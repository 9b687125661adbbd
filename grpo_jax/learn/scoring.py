"""Programs that score batches without gradients, and the minibatches with their scores. Pure."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from grpo_jax.compilation import precision
from grpo_jax.compilation.programs import Program
from grpo_jax.learn import sharding
from grpo_jax.learn.policy import full_weights
from grpo_jax.learn.token_scores import (
  SMALLER_BATCHES,
  LogprobsFn,
  OnMicrobatch,
  TokenScores,
  truncation_metrics,
)
from grpo_jax.rl import diagnostics, masks
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.types import Batch, Metrics, Minibatch

# Programs, in runs. Their weights are full weights, or a `policy.Composed`.
Scorer = Callable[[Any, Batch], Float[Array, "B N"]]
Watcher = Callable[[Any, Batch], tuple[Metrics, TokenScores]]


def make_scorer(
  logprobs: LogprobsFn,
  *,
  matmul_precision: str | None = None,
  mesh: Mesh | None = None,
  name: str = "score",
) -> Program:
  """Makes score(weights, batch) → logprobs at `batch.loss_places`, without gradient.

  Args:
    logprobs: Function made by `token_scores.make_logprobs`.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    mesh: Mesh over which rows are split; None: one device.
    name: Name of the program, shown to the user.
  """

  def score(weights: Any, batch: Batch) -> Float[Array, "B N"]:
    return TokenScores(*logprobs(full_weights(weights), batch, False)).logprobs

  of_rows = None if mesh is None else sharding.of_rows(mesh)
  jitted = jax.jit(precision.scoped(score, matmul_precision), out_shardings=of_rows)
  return Program(jitted, name=name, remedy=SMALLER_BATCHES)


def make_watcher(
  logprobs: LogprobsFn,
  *,
  with_entropy: bool = True,
  matmul_precision: str | None = None,
  mesh: Mesh | None = None,
) -> Program:
  """Makes watch(weights, batch) → metrics of the policy, and its scores at `batch.loss_places`.

  Args:
    logprobs: Function made by `token_scores.make_logprobs`.
    with_entropy: Whether the metrics include the entropy.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    mesh: Mesh over which rows are split; None: one device.

  Returns:
    A program. Its metrics are "all/entropy", "all/approx_entropy" and those of
    `diagnostics.mismatch` under "all/", over the tokens of the batch. Its scores have logprobs, and
    those of the whole softmax if other ones are trained.
  """

  def watch(weights: Any, batch: Batch) -> tuple[Metrics, TokenScores]:
    scores = TokenScores(*logprobs(full_weights(weights), batch, with_entropy))
    policy, entropy = scores.logprobs, scores.entropy
    tokens = gather_loss_tokens(batch)
    behavior, mask, found = tokens.behavior_logprobs, tokens.mask, {}
    if behavior is not None:
      found["approx_entropy"] = diagnostics.approx_entropy(policy, behavior, mask)
      found |= diagnostics.mismatch(policy, behavior, mask)
    if entropy is not None:
      found["entropy"] = diagnostics.token_average(masks.fill(entropy, mask), mask)
    found |= truncation_metrics(scores, mask)
    renamed = {f"all/{name.rpartition('/')[2]}": value for name, value in found.items()}
    return renamed, TokenScores(policy, full=scores.full)

  placed = None if mesh is None else (sharding.whole(mesh), sharding.of_rows(mesh))
  jitted = jax.jit(precision.scoped(watch, matmul_precision), out_shardings=placed)
  return Program(jitted, name="watch", remedy=SMALLER_BATCHES)


def with_logprobs(
  minibatches: Sequence[Minibatch],
  score: Scorer,
  *,
  old_score: Scorer | None = None,
  old_params: Any = None,
  ref_params: Any = None,
  on_microbatch: OnMicrobatch = lambda logprobs: None,
) -> tuple[Minibatch, ...]:
  """Returns the minibatches with old and reference logprobs, each scored once.

  Args:
    minibatches: Minibatches of one training step.
    score: Program made by `make_scorer`.
    old_score: The same for `old_params`; None: `score`.
    old_params: Policy's weights before this step's first update; None: `old_logprobs` stay as they
      are.
    ref_params: Weights of the frozen reference; None: `ref_logprobs` stay as they are.
    on_microbatch: Function called after a microbatch was requested, with its logprobs.
  """

  score_old = old_score or score

  def scored(batch: Batch) -> Batch:
    read = bare(batch)  # by both: a batch with other fields would compile another program.
    old = batch.old_logprobs if old_params is None else score_old(old_params, read)
    ref = batch.ref_logprobs if ref_params is None else score(ref_params, unreplayed(read))
    on_microbatch(old if ref_params is None else ref)
    return dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref)

  return tuple(
    Minibatch(tuple(scored(batch) for batch in minibatch.microbatches), minibatch.denominators)
    for minibatch in minibatches
  )


def bare(batch: Batch) -> Batch:
  """Returns a batch without the fields that only the update reads, so one program scores all."""
  return dataclasses.replace(batch, ages=None, weights=None)


def unreplayed(batch: Batch) -> Batch:
  """Returns a batch without experts, for weights whose router chooses: those of other policies."""
  return dataclasses.replace(batch, experts=None)
