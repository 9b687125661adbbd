"""Chooses tokens of a minibatch by scores of all its tokens, right before its optimizer step. Pure.

The scores come from the weights that are about to be updated. They are fetched, and the choice is
made on the host (`rl.selection`), over all microbatches and devices: packing, microbatches and the
mesh change it only where rounding moves a token across a threshold.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, UInt64

from grpo_jax.compilation import precision
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.learn import sharding
from grpo_jax.learn.policy import full_weights
from grpo_jax.learn.token_scores import SMALLER_BATCHES, LogprobsFn, TokenScores
from grpo_jax.processes import arrays
from grpo_jax.rl import proximal, selection
from grpo_jax.rl.objective_options import ResolvedOptions
from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Minibatch

_FIELDS = ("loss_places", "advantages", "behavior_logprobs", "old_logprobs", "kept", "ages")
_OF_TEXT = ("tokens", "predecessors")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers keep all bits.


@dataclasses.dataclass(frozen=True)
class Selector:
  """Chooses the tokens of minibatches; made by `make_selector`.

  Attributes:
    options: Options of the objective.
    score: Program (weights, batch) → log πθ [B N], and the entropy [B N] or None.
  """

  options: ResolvedOptions
  score: Program

  def __call__(self, weights: Any, minibatch: Minibatch, place: tuple[int, int, int]) -> Minibatch:
    """Returns the minibatch with `selected` tokens.

    Args:
      weights: Weights before the optimizer step, as programs take them.
      minibatch: Minibatch of the optimizer step.
      place: Training step, epoch and number of the minibatch, on which random choices depend.
    """
    batches = minibatch.microbatches
    bare = [dataclasses.replace(batch, weights=None) for batch in batches]  # one program for all.
    scored = arrays.fetch([self.score(weights, batch) for batch in bare])
    known = arrays.fetch([self.fetched(batch) for batch in batches])
    parts = [
      self._tokens(logprobs, entropy, fields)
      | ({"keys": _drawn(fields, place)} if self._is_random else {})
      for (logprobs, entropy), fields in zip(scored, known, strict=True)
    ]
    masks = [_in_loss(fields) for fields in known]
    flat: dict[str, Any] = {
      name: np.concatenate([part[name][mask] for part, mask in zip(parts, masks, strict=True)])
      for name in parts[0]
    }
    chosen = selection.choose(self.options, flat.pop("logprobs"), **flat)
    return dataclasses.replace(minibatch, microbatches=_marked(batches, known, chosen))

  def fetched(self, batch: Batch) -> dict[str, Any]:
    """Returns the fields of a batch that the choice depends on."""
    return {
      name: getattr(batch, name) for name in (*_FIELDS, *(_OF_TEXT if self._is_random else ()))
    }

  @property
  def _is_random(self) -> bool:
    return self.options.loss == "clip_cov"

  def jobs(self, weights: Any, batches: Mapping[str, Batch]) -> list[CompileJob]:
    """Returns the compilations, for batches without `selected`.

    Args:
      weights: Shapes, dtypes and shardings of the policy's weights.
      batches: The same of a microbatch of every planned shape, by its description.
    """
    return [self.score.job(weights, batch, detail=detail) for detail, batch in batches.items()]

  def _tokens(
    self, logprobs: np.ndarray, entropy: np.ndarray | None, fields: Mapping[str, Any]
  ) -> dict[str, np.ndarray]:
    """Returns what is known of the tokens of a batch, and matters to the choice."""
    places = np.maximum(fields["loss_places"], 0)
    at_places = lambda name: np.take_along_axis(fields[name], places, axis=-1)
    old = fields["old_logprobs"]
    if self.options.use_behavior_logprobs:
      old = at_places("behavior_logprobs")
    if self.options.interpolates:
      old = proximal.interpolated(logprobs, at_places("behavior_logprobs"), fields["ages"])
    values = {
      "logprobs": logprobs,
      "advantages": at_places("advantages"),
      "old_logprobs": None if self.options.force_on_policy_ratio else old,
      "entropy": entropy,
    }
    return {name: np.asarray(x) for name, x in values.items() if x is not None}


def make_selector(
  logprobs: LogprobsFn,
  objective: Objective,
  *,
  matmul_precision: str | None = None,
  mesh: Mesh | None = None,
) -> Selector:
  """Makes what chooses tokens before each optimizer step; it costs one more forward pass.

  Args:
    logprobs: Function made by `token_scores.make_logprobs`.
    objective: The loss, with `selects`.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    mesh: Mesh over which rows are split; None: one device.
  """

  def score(weights: Any, batch: Batch) -> tuple[Array, Array | None]:
    found = TokenScores(*logprobs(full_weights(weights), batch, objective.selects_by_entropy))
    return found.logprobs, found.entropy

  of_rows = None if mesh is None else sharding.of_rows(mesh)
  jitted = jax.jit(precision.scoped(score, matmul_precision), out_shardings=of_rows)
  program = Program(jitted, name="scores of the selection", remedy=SMALLER_BATCHES)
  return Selector(objective.options, program)


def random_keys(
  tokens: np.ndarray, predecessors: np.ndarray, place: Sequence[int]
) -> UInt64[np.ndarray, "B T"]:
  """Returns a random number for each token; it does not depend on where the token is stored.

  It depends on the ids of the token and of all tokens before it, prompt included, and on `place`.
  Completions of a prompt that begin alike have the same numbers there.

  Args:
    tokens: Ids of the tokens of packed rows, [B T].
    predecessors: Place, in the row, of the token before each token; the first is its own.
    place: Numbers that tell draws apart.
  """
  rows, length = tokens.shape
  # A place behind the row ends all chains: it counts 0, so that longer rows change nothing.
  own = np.arange(length)
  before = np.where(predecessors == own, length, predecessors)
  before = np.concatenate([before, np.full((rows, 1), length)], axis=1)
  sums = np.concatenate([tokens.astype(np.uint64) + 1, np.zeros((rows, 1), np.uint64)], axis=1)
  power = _BASE
  with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴.
    for _ in range(max(length, 1).bit_length()):  # sums over chains of 1, 2, 4, ... tokens.
      sums = sums + power * np.take_along_axis(sums, before, axis=1)
      before = np.take_along_axis(before, before, axis=1)
      power = power * power
    for number in place:
      sums = _mixed(sums + np.uint64(number))
  return sums[:, :length]


def _drawn(fields: Mapping[str, Any], place: tuple[int, int, int]) -> UInt64[np.ndarray, "B N"]:
  keys = random_keys(fields["tokens"], fields["predecessors"], place)
  return np.take_along_axis(keys, np.maximum(fields["loss_places"], 0), axis=-1)


def _mixed(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
  """Returns 64 bits, each of which depends on all bits of `x` (SplitMix64)."""
  x = x + _BASE
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def _in_loss(fields: Mapping[str, Any]) -> Bool[np.ndarray, "B N"]:
  in_loss = fields["loss_places"] >= 0
  return in_loss if fields["kept"] is None else in_loss & fields["kept"]


def _marked(
  batches: Sequence[Batch], known: Sequence[Mapping[str, Any]], chosen: Bool[np.ndarray, " n"]
) -> tuple[Batch, ...]:
  """Returns the batches with the choice, on their own devices."""
  marked, at = [], 0
  for batch, fields in zip(batches, known, strict=True):
    mask = _in_loss(fields)
    marks = np.zeros(mask.shape, bool)
    marks[mask] = chosen[at : at + mask.sum()]
    at += mask.sum()
    marked.append(dataclasses.replace(batch, selected=like(marks, batch.loss_places)))
  return tuple(marked)


def like(values: np.ndarray, other: Any) -> Any:
  """Returns values where another array of the batch is: on its devices, or on the host.

  Args:
    values: Array on the host.
    other: Array of the same batch.
  """
  return arrays.put(values, other.sharding) if isinstance(other, jax.Array) else values
