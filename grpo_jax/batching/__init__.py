"""Groups of rollouts → rectangular batches of packed rows with shared prefixes. Pure, NumPy.

A segment is a prompt followed by completions of its group, which share it. A row
holds segments, a microbatch rows, and a minibatch the microbatches of one optimizer
step. Microbatches have the shapes that the run has planned, and no others. `packing`
decides what goes where.

Minibatches are made of whole groups, in the order given: a group is never
split over two optimizer steps. Denominators count every token of the loss, by the weight of its
completion, also those that are skipped because they add nothing.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo_jax.batching import dealing, layout, packing
from grpo_jax.errors import ExpectedFailure
from grpo_jax.types import (
  Denominators,
  ExpertShape,
  Mean,
  Metrics,
  Minibatch,
  Rollout,
  RolloutGroup,
)

# Reasons why a completion is not in the loss, in the order in which they are checked.
LEFT_OUT = (
  "zero_weight",  # its weight, or that of its prompt, is 0.
  "prompt_too_long",  # the prompt is longer than the limit, or fills a whole row.
  "unscorable",  # its reward is NaN or infinite; it is not in the baseline either.
  "empty",  # it has no token, or none that was sampled.
  "too_long",  # prompt and completion do not fit in a row.
  "truncated",  # it was cut at the token limit, and `drop_truncated` is on.
)
ZERO_ADVANTAGE = "zero_advantage"  # in the loss, where it adds nothing: not computed.


class AdvantageError(ExpectedFailure, ValueError):
  """An advantage is not finite; the estimator may be the user's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
  """Position of one completion in the batches."""

  minibatch: int
  microbatch: int
  row: int
  start: int  # place of its first token in the row.
  group: int  # index into the groups given.
  rollout: int  # index into that group's rollouts.


@dataclasses.dataclass(frozen=True)
class Assembled:
  """The data of a training step; without minibatches if there is nothing to learn from."""

  minibatches: tuple[Minibatch, ...]
  placements: tuple[Placement, ...]
  metrics: Metrics  # "batch/…": see `assemble`.
  # (group, rollout), indices into the groups given, of each completion that is not computed, and
  # the reason: one of LEFT_OUT, or ZERO_ADVANTAGE.
  not_computed: Mapping[tuple[int, int], str]

  def with_minibatches(self, minibatches: Sequence[Minibatch]) -> "Assembled":
    """Returns a copy with other contents at the same places."""
    return dataclasses.replace(self, minibatches=tuple(minibatches))


def assemble(
  groups: Sequence[RolloutGroup],
  advantages: Sequence[Float[np.ndarray, " _"]],
  *,
  shapes: Sequence[packing.Shape],
  cost: packing.Cost = packing.PLACES,
  max_prompt_tokens: int | None = None,
  minibatches: int = 1,
  passes: int = 1,
  share_prefixes: bool = True,
  pack: bool = True,
  drop_truncated: bool = False,
  skip_zero_advantage: bool,
  step: int | None = None,
  weighted: bool = False,
  experts: ExpertShape | None = None,
  parts: int = 1,
) -> Assembled:
  """Packs groups into microbatches of the shapes given, as cheaply as they allow.

  A completion that is left out of the loss for a reason in `LEFT_OUT` is
  counted under it; whether its reward is in its group's baseline was decided
  when the advantages were computed. A group is split into several segments, each
  with the prompt, if it does not fit in a row or if a part of it fills one. Of the
  options here, the loss depends only on `minibatches`, `drop_truncated` and the
  limits of length.

  Args:
    groups: Groups of one training step.
    advantages: Advantage of each rollout, an array per group; not read where unscorable.
    shapes: Shapes that microbatches may have, made by `packing.plan`; microbatches of a step may
      differ. The longest row is the limit of a prompt with a completion.
    cost: Cost of a microbatch; see `learn.operations`.
    max_prompt_tokens: Largest number of tokens of a prompt; None: what fits in a row.
    minibatches: Number of optimizer steps, over which the groups are split evenly, in
      order. Fewer are made if there are fewer groups or if one would learn nothing.
    passes: Number of times that the update goes through the minibatches; only counted.
    share_prefixes: Whether completions of a group may share a segment.
    pack: Whether a row may hold several segments.
    drop_truncated: Whether truncated completions are left out of the loss ("overlong filtering").
    skip_zero_advantage: Whether completions with an advantage of exactly 0 are not computed.
      Exact if their loss is 0, i.e. without KL and entropy terms; their tokens stay in
      the denominators.
    step: Number of the training step, with which the batches get the ages of their tokens; None:
      they have no ages.
    weighted: Whether the batches have weights even if that of every completion in the loss is 1,
      so that all steps of a run use the same programs.
    experts: Shape of the records of experts that the batches have; None: they have none.
    parts: Number of devices to which the places of a row are dealt out; 1: rows are whole.

  Returns:
    Minibatches, placements, and the metrics "batch/packing_efficiency" (tokens per
    place), "batch/repeated_prompt_tokens" (of prompts beyond their first copy), "batch/rows",
    "batch/row_tokens" (mean length of the rows), "batch/skipped_zero_advantage",
    "batch/left_out/REASON" (completions); of all passes, "batch/loss_tokens", "batch/microbatches"
    and "batch/optimizer_steps"; with experts "router/replayed_share"; and with parts
    "batch/busiest_part" (live tiles of the device that has most of a row, relative to the mean).

  Raises:
    ValueError: Lengths disagree, an advantage is not finite, a prompt has no
      token, an option makes no sense, or a token is newer than the step.
  """
  row_tokens = max((shape.row_tokens for shape in shapes), default=0)
  _check(groups, advantages, row_tokens, minibatches)
  prompt_limit = min(max_prompt_tokens or row_tokens, row_tokens - 1)
  weighted = weighted or has_weights(groups)
  not_computed: dict[tuple[int, int], str] = {}
  contents = []
  for members in np.array_split(np.arange(len(groups)), max(min(minibatches, len(groups)), 1)):
    part = _Part()
    for g in members:
      group, live = groups[g], []
      for r, rollout in enumerate(group.rollouts):
        reason = _reason(group, r, prompt_limit, row_tokens, drop_truncated)
        if reason is None:
          part.count(rollout, group.weight_of(r))
          if _finite(float(advantages[g][r]), group, r) == 0 and skip_zero_advantage:
            reason = ZERO_ADVANTAGE
        if reason is None:
          live.append(r)
        else:
          not_computed[int(g), r] = reason
      part.add(int(g), live, share_prefixes)
    contents.append(part)
  made, placements, used = [], [], _Used()
  for part in contents:
    packed = packing.pack(part.sizes(groups), shapes, cost=cost, one_piece=not pack)
    if packed:
      options = {"step": step, "has_weights": weighted, "experts": experts}
      minibatch, placed = _minibatch(len(made), part, packed, groups, advantages, used, **options)
      if parts > 1:
        minibatch = used.dealt(minibatch, parts, cost)
      made.append(minibatch)
      placements += placed
  counts = collections.Counter(not_computed.values())
  metrics = _metrics(made, used, counts, passes=passes)
  return Assembled(tuple(made), tuple(placements), metrics, not_computed)


def has_weights(groups: Sequence[RolloutGroup]) -> bool:
  """Returns whether a completion that may be learned from has a weight other than 1."""
  return any(g.weight_of(r) not in (0, 1) for g in groups for r in range(len(g.rollouts)))


def per_rollout(
  assembled: Assembled,
  values: Sequence[Sequence[Float[np.ndarray, "_ _"]]],
  groups: Sequence[RolloutGroup],
) -> list[list[Float[np.ndarray, " _"]]]:
  """Returns per-token values by completion.

  Args:
    assembled: Data on which the values were computed.
    values: Values (such as logprobs) at `loss_places` of each microbatch of each minibatch.
    groups: Groups that were assembled.

  Returns:
    For each rollout of each group one value per completion token; NaN where
    nothing was computed.
  """
  result = [
    [np.full(len(r.completion_ids), np.nan, np.float32) for r in g.rollouts] for g in groups
  ]
  spread = [
    [
      layout.spread(batch, at_places)
      for batch, at_places in zip(minibatch.microbatches, for_minibatch, strict=True)
    ]
    for minibatch, for_minibatch in zip(assembled.minibatches, values, strict=True)
  ]
  for p in assembled.placements:
    out = result[p.group][p.rollout]
    out[:] = spread[p.minibatch][p.microbatch][p.row, p.start : p.start + len(out)]
  return result


@dataclasses.dataclass(slots=True)
class _Part:
  """The content of one optimizer step.

  Attributes:
    units: Rollouts that may share a prompt, as (group, rollouts).
    loss_tokens: Number of loss tokens, including those skipped because they add nothing.
    weighted_tokens: The same, each by the weight of its completion.
    weighted_sequences: Number of completions with these tokens, by weight.
  """

  units: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
  loss_tokens: int = 0
  weighted_tokens: float = 0.0
  weighted_sequences: float = 0.0

  def count(self, rollout: Rollout, weight: float) -> None:
    tokens = int(rollout.loss_mask.sum())
    self.loss_tokens += tokens
    self.weighted_tokens += weight * tokens
    self.weighted_sequences += weight

  def add(self, group: int, live: Sequence[int], share_prefixes: bool) -> None:
    """Adds the completions of a group that are computed."""
    if live:
      self.units += [(group, tuple(live))] if share_prefixes else [(group, (r,)) for r in live]

  def sizes(self, groups: Sequence[RolloutGroup]) -> list[packing.Sizes]:
    return [
      packing.Sizes(
        len(groups[g].prompt.token_ids),
        tuple(len(groups[g].rollouts[r].completion_ids) for r in rollouts),
      )
      for g, rollouts in self.units
    ]

  def segment(self, piece: packing.Piece, groups: Sequence[RolloutGroup]) -> layout.Segment:
    """Returns the segment of a piece, by indices of groups and rollouts."""
    g, live = self.units[piece.group]
    rollouts = tuple(live[i] for i in piece.completions)
    lengths = (len(groups[g].rollouts[r].completion_ids) for r in rollouts)
    return layout.Segment(g, rollouts, len(groups[g].prompt.token_ids) + sum(lengths))


@dataclasses.dataclass(slots=True)
class _Used:
  """Counters of the tokens of the step."""

  loss_tokens: int = 0
  tokens: int = 0
  prompt_tokens: int = 0
  once: int = 0  # tokens of prompts if each were stored once in an optimizer step.
  work: list[np.ndarray] = dataclasses.field(default_factory=list)  # [B parts] of each microbatch.

  def count(self, segments: Sequence[layout.Segment], groups: Sequence[RolloutGroup]) -> None:
    """Adds the segments of an optimizer step."""
    lengths = [len(groups[segment.group].prompt.token_ids) for segment in segments]
    self.tokens += sum(segment.tokens for segment in segments)
    self.prompt_tokens += sum(lengths)
    self.once += sum(dict(zip((s.group for s in segments), lengths, strict=True)).values())

  def dealt(self, minibatch: Minibatch, parts: int, cost: packing.Cost) -> Minibatch:
    """Returns a minibatch whose rows are dealt out; adds the work of each part."""
    made = [dealing.dealt(x, parts, windows=cost.windows) for x in minibatch.microbatches]
    self.work += [work for _, work in made]
    return dataclasses.replace(minibatch, microbatches=tuple(batch for batch, _ in made))


def _check(groups, advantages, row_tokens: int, minibatches: int) -> None:
  """Raises ValueError if the arguments of `assemble` are wrong."""
  sizes = [len(group.rollouts) for group in groups], [len(a) for a in advantages]
  if sizes[0] != sizes[1]:
    raise ValueError(f"groups have sizes {sizes[0]}, their advantages {sizes[1]}")
  for group in groups:
    if not len(group.prompt.token_ids):
      raise ValueError(
        f"prompt {group.prompt.prompt_id!r} has no token: nothing predicts the first"
      )
  if row_tokens < 2:
    raise ValueError(f"shapes needs a shape with rows of at least 2 tokens, got {row_tokens}")
  if minibatches < 1:
    raise ValueError(f"minibatches must be at least 1, got {minibatches}")


def _finite(advantage: float, group: RolloutGroup, r: int) -> float:
  """Returns the advantage; raises AdvantageError if it is not a finite number."""
  if not np.isfinite(advantage):
    raise AdvantageError(
      f"the advantage of rollout {r} of prompt {group.prompt.prompt_id!r} must be finite, got"
      f" {advantage}; its reward is {group.rollouts[r].reward:g} (advantages.estimator)"
    )
  return float(advantage)


def _reason(
  group: RolloutGroup, r: int, prompt_limit: int, row_tokens: int, drop_truncated: bool
) -> str | None:
  """Returns the first of `LEFT_OUT` that holds for a completion; None if it is learned from."""
  rollout, length = group.rollouts[r], len(group.prompt.token_ids)
  verdicts = (
    group.weight_of(r) == 0,
    length > prompt_limit,
    not np.isfinite(rollout.reward),
    not rollout.loss_mask.any(),
    length + len(rollout.completion_ids) > row_tokens,
    drop_truncated and rollout.is_truncated,
  )
  return next((reason for reason, holds in zip(LEFT_OUT, verdicts, strict=True) if holds), None)


def _minibatch(
  m: int,
  part: _Part,
  packed: Sequence[packing.Packed],
  groups: Sequence[RolloutGroup],
  advantages: Sequence[np.ndarray],
  used: _Used,
  **options: Any,
) -> tuple[Minibatch, list[Placement]]:
  """Lays the segments of one optimizer step out in its microbatches; counts their tokens."""
  batches, placements = [], []
  for number, one in enumerate(packed):
    rows = [[part.segment(piece, groups) for piece in row] for row in one.rows]
    batch, starts = layout.batch(rows, one.shape, groups, advantages, **options)
    for b, (row, row_starts) in enumerate(zip(rows, starts, strict=True)):
      completions = [(segment.group, r) for segment in row for r in segment.rollouts]
      placements += [
        Placement(m, number, b, start, g, r)
        for start, (g, r) in zip(row_starts, completions, strict=True)
      ]
    batches.append(batch)
  pieces = (piece for one in packed for row in one.rows for piece in row)
  used.count([part.segment(piece, groups) for piece in pieces], groups)
  used.loss_tokens += part.loss_tokens
  denominators = Denominators(part.weighted_tokens, part.weighted_sequences)
  return Minibatch(tuple(batches), denominators), placements


def _metrics(
  made: Sequence[Minibatch], used: _Used, counts: collections.Counter[str], *, passes: int
) -> Metrics:
  """Returns the metrics of what was packed and what was left out."""
  batches = [batch for minibatch in made for batch in minibatch.microbatches]
  places = sum(batch.tokens.size for batch in batches)
  rows = sum(batch.tokens.shape[0] for batch in batches)
  numbers = {
    "batch/loss_tokens": passes * used.loss_tokens,
    "batch/rows": rows,
    "batch/row_tokens": places / rows if rows else 0,
    "batch/repeated_prompt_tokens": used.prompt_tokens - used.once,
    "batch/microbatches": passes * len(batches),
    "batch/optimizer_steps": passes * len(made),
    "batch/skipped_zero_advantage": counts[ZERO_ADVANTAGE],
    **{f"batch/left_out/{reason}": counts[reason] for reason in LEFT_OUT},
  }
  metrics: Metrics = {name: Mean(float(value), 1.0) for name, value in numbers.items()}
  metrics["batch/packing_efficiency"] = Mean(float(used.tokens), float(places))
  if used.work:
    work = np.concatenate(used.work)
    metrics["batch/busiest_part"] = Mean(float(work.max(1).sum()), float(work.mean(1).sum()))
  replayed = [batch.experts for batch in batches if batch.experts is not None]
  if replayed:
    known = sum(int((each >= 0).all((-2, -1)).sum()) for each in replayed)
    metrics["router/replayed_share"] = Mean(float(known), float(used.tokens))
  return metrics
