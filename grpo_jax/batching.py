"""Groups of rollouts → rectangular batches of packed rows with shared prefixes. Pure, NumPy.

A segment is a prompt, which stands there once, followed by completions of its
group; a row holds segments; a microbatch is a number of rows; a minibatch, the
microbatches of one optimizer step. Equal shapes come from few buckets, so that
the update compiles a bounded number of times. `packing` decides what goes where.

Minibatches are made of whole groups, in the order given: a group is never
split over two optimizer steps. Denominators count every token that the loss is
about, also those that are skipped because they add nothing.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from grpo_jax import layout, packing
from grpo_jax.types import (
  Denominators,
  Mean,
  Metrics,
  Minibatch,
  Prompt,
  Rollout,
  RolloutGroup,
)

# Why a completion is not in the loss, in the order in which reasons are tried.
LEFT_OUT = (
  "zero_weight",  # its prompt's weight is 0.
  "prompt_too_long",  # the prompt is longer than the limit, or fills a whole row.
  "unscorable",  # its reward is NaN or infinite; it is not in the baseline either.
  "empty",  # it has no token, or none that was sampled.
  "too_long",  # prompt and completion do not fit in a row.
  "truncated",  # it was cut at the token limit, and `drop_truncated` is on.
)
ZERO_ADVANTAGE = "zero_advantage"  # in the loss, where it adds nothing: not computed.


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
  """Where one completion stands."""

  minibatch: int
  microbatch: int
  row: int
  start: int  # place of its first token in the row.
  group: int  # index into the groups given.
  rollout: int  # index into that group's rollouts.


@dataclasses.dataclass(frozen=True)
class Assembled:
  """A training step's data; no minibatch at all if no completion has anything to teach."""

  minibatches: tuple[Minibatch, ...]
  placements: tuple[Placement, ...]
  metrics: Metrics  # "batch/…": see `assemble`.
  # (group, rollout), indices into the groups given, of each completion that is not computed, and
  # the reason: one of LEFT_OUT, or ZERO_ADVANTAGE.
  not_computed: Mapping[tuple[int, int], str]

  def with_minibatches(self, minibatches: Sequence[Minibatch]) -> "Assembled":
    """Returns the same with other contents at the same places."""
    return dataclasses.replace(self, minibatches=tuple(minibatches))


def assemble(
  groups: Sequence[RolloutGroup],
  advantages: Sequence[Float[np.ndarray, " _"]],
  *,
  row_tokens: int,
  max_prompt_tokens: int | None = None,
  minibatches: int = 1,
  microbatch_tokens: int | None = None,
  rows_multiple: int = 1,
  row_buckets: Sequence[int] | None = None,
  share_prefixes: bool = True,
  pack: bool = True,
  drop_truncated: bool = False,
  skip_zero_advantage: bool = False,
) -> Assembled:
  """Packs groups into microbatches of one shape [B T], N.

  A completion that is left out of the loss for a reason in `LEFT_OUT` is
  counted under it; that its reward is in its group's baseline is the business
  of whoever made the advantages. A group that does not fit in a row is split
  over several segments, each with the prompt. The loss does not depend on any
  option here but `minibatches`, `drop_truncated` and the limits of length.

  Args:
    groups: of one training step.
    advantages: one per rollout, an array per group; not read where unscorable.
    row_tokens: longest row, in tokens.
    max_prompt_tokens: longer prompts are left out; None: what fits in a row.
    minibatches: optimizer steps; the groups are split evenly, in order. Fewer
      if there are fewer groups; one in which nothing is learned is not made.
    microbatch_tokens: row places of a microbatch, per data-parallel replica;
      at least one row is taken. None: one microbatch holds all rows.
    rows_multiple: number of data-parallel replicas; B is a multiple of it.
    row_buckets: allowed T; None: multiples of 32, about four per octave.
    share_prefixes: False gives every completion a segment of its own.
    pack: False gives every segment a row of its own.
    drop_truncated: leave truncated completions out of the loss ("overlong filtering").
    skip_zero_advantage: do not compute what has an advantage of exactly 0. Exact
      if such a token's loss is 0, i.e. without KL and entropy terms; its tokens
      stay in the denominators.

  Returns:
    Minibatches, placements, and the metrics "batch/packing_efficiency" (tokens per
    place), "batch/loss_tokens", "batch/rows", "batch/row_tokens", "batch/microbatches",
    "batch/optimizer_steps", "batch/skipped_zero_advantage" and
    "batch/left_out/REASON" (completions).

  Raises:
    ValueError: lengths disagree, an advantage is not finite, a prompt has no
      token, or an option makes no sense.
  """
  _check(groups, advantages, row_tokens, minibatches, rows_multiple)
  prompt_limit = min(max_prompt_tokens or row_tokens, row_tokens - 1)
  not_computed: dict[tuple[int, int], str] = {}
  parts = []
  for members in np.array_split(np.arange(len(groups)), max(min(minibatches, len(groups)), 1)):
    part = _Part()
    for g in members:
      group, live = groups[g], []
      for r, rollout in enumerate(group.rollouts):
        reason = _reason(group.prompt, rollout, prompt_limit, row_tokens, drop_truncated)
        if reason is None:
          part.count(rollout)
          if _finite(float(advantages[g][r]), group, r) == 0 and skip_zero_advantage:
            reason = ZERO_ADVANTAGE
        if reason is None:
          live.append(r)
        else:
          not_computed[int(g), r] = reason
      part.segments += _segments(int(g), group, live, row_tokens, share_prefixes)
    parts.append(part)
  parts = [part for part in parts if part.segments]
  shape = packing.choose_shape(
    [[s.tokens for s in part.segments] for part in parts],
    [[s.loss_tokens for s in part.segments] for part in parts],
    candidates=tuple(row_buckets) if row_buckets else packing.row_lengths(row_tokens),
    microbatch_tokens=microbatch_tokens,
    rows_multiple=rows_multiple,
    pack=pack,
  )
  made, placements = [], []
  for m, part in enumerate(parts):
    minibatch, placed = _minibatch(m, part, groups, advantages, shape, pack)
    made.append(minibatch)
    placements += placed
  used = sum(s.tokens for part in parts for s in part.segments)
  counts = collections.Counter(not_computed.values())
  return Assembled(tuple(made), tuple(placements), _metrics(made, used, counts), not_computed)


def per_rollout(
  assembled: Assembled,
  values: Sequence[Sequence[Float[np.ndarray, "_ _"]]],
  groups: Sequence[RolloutGroup],
) -> list[list[Float[np.ndarray, " _"]]]:
  """Brings per-token values back to the completions that they belong to.

  Args:
    assembled: what the values were computed on.
    values: at `loss_places`, for each microbatch of each minibatch; logprobs, say.
    groups: those that were assembled.

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
      for batch, at_places in zip(minibatch.microbatches, of_minibatch, strict=True)
    ]
    for minibatch, of_minibatch in zip(assembled.minibatches, values, strict=True)
  ]
  for p in assembled.placements:
    out = result[p.group][p.rollout]
    out[:] = spread[p.minibatch][p.microbatch][p.row, p.start : p.start + len(out)]
  return result


@dataclasses.dataclass(slots=True)
class _Part:
  """What goes into one optimizer step."""

  segments: list[layout.Segment] = dataclasses.field(default_factory=list)
  loss_tokens: int = 0
  sequences: int = 0

  def count(self, rollout: Rollout) -> None:
    self.loss_tokens += int(rollout.loss_mask.sum())
    self.sequences += 1


def _check(groups, advantages, row_tokens: int, minibatches: int, rows_multiple: int) -> None:
  """Raises ValueError for what cannot be assembled."""
  sizes = [len(group.rollouts) for group in groups], [len(a) for a in advantages]
  if sizes[0] != sizes[1]:
    raise ValueError(f"groups have sizes {sizes[0]}, their advantages {sizes[1]}")
  for group in groups:
    if not len(group.prompt.token_ids):
      raise ValueError(
        f"prompt {group.prompt.prompt_id!r} has no token: nothing predicts the first"
      )
  smallest = {"row_tokens": (row_tokens, 2), "minibatches": (minibatches, 1)}
  smallest["rows_multiple"] = (rows_multiple, 1)
  for name, (value, least) in smallest.items():
    if value < least:
      raise ValueError(f"{name} must be at least {least}, got {value}")


def _finite(advantage: float, group: RolloutGroup, r: int) -> float:
  """Returns the advantage; raises ValueError if it is not a number."""
  if not np.isfinite(advantage):
    raise ValueError(f"advantage {advantage} of rollout {r} of prompt {group.prompt.prompt_id!r}")
  return float(advantage)


def _reason(
  prompt: Prompt, rollout: Rollout, prompt_limit: int, row_tokens: int, drop_truncated: bool
) -> str | None:
  """Returns the first of `LEFT_OUT` that holds for a completion; None if it is learned from."""
  length = len(prompt.token_ids)
  verdicts = (
    prompt.weight == 0,
    length > prompt_limit,
    not np.isfinite(rollout.reward),
    not rollout.loss_mask.any(),
    length + len(rollout.completion_ids) > row_tokens,
    drop_truncated and rollout.is_truncated,
  )
  return next((reason for reason, holds in zip(LEFT_OUT, verdicts, strict=True) if holds), None)


def _segments(
  g: int, group: RolloutGroup, live: Sequence[int], row_tokens: int, share_prefixes: bool
) -> list[layout.Segment]:
  """Puts the live completions of a group into as few segments as fit into rows."""
  prompt = len(group.prompt.token_ids)
  lengths = [len(group.rollouts[r].completion_ids) for r in live]
  room = row_tokens - prompt
  bins = packing.best_fit_decreasing(lengths, room) if share_prefixes else _one_each(live)
  return [
    layout.Segment(
      group=g,
      rollouts=tuple(live[i] for i in members),
      tokens=prompt + sum(lengths[i] for i in members),
      loss_tokens=sum(int(group.rollouts[live[i]].loss_mask.sum()) for i in members),
    )
    for members in bins
  ]


def _one_each(items: Sequence) -> list[list[int]]:
  return [[i] for i in range(len(items))]


def _minibatch(
  m: int,
  part: _Part,
  groups: Sequence[RolloutGroup],
  advantages: Sequence[np.ndarray],
  shape: packing.Shape,
  pack: bool,
) -> tuple[Minibatch, list[Placement]]:
  """Lays the segments of one optimizer step out in microbatches of the given shape."""
  lengths = [s.tokens for s in part.segments]
  rows = packing.best_fit_decreasing(lengths, shape.row_tokens) if pack else _one_each(lengths)
  batches, placements = [], []
  for first in range(0, len(rows), shape.rows):
    members = [[part.segments[i] for i in row] for row in rows[first : first + shape.rows]]
    batch, starts = layout.batch(members, shape, groups, advantages)
    for b, (row, of_row) in enumerate(zip(members, starts, strict=True)):
      completions = [(segment.group, r) for segment in row for r in segment.rollouts]
      placements += [
        Placement(m, len(batches), b, start, g, r)
        for start, (g, r) in zip(of_row, completions, strict=True)
      ]
    batches.append(batch)
  denominators = Denominators(float(part.loss_tokens), float(part.sequences))
  return Minibatch(tuple(batches), denominators), placements


def _metrics(made: Sequence[Minibatch], used: int, counts: collections.Counter[str]) -> Metrics:
  """Describes what was packed and what was left out."""
  batches = [batch for minibatch in made for batch in minibatch.microbatches]
  slots = sum(batch.tokens.size for batch in batches)
  numbers = {
    "batch/loss_tokens": sum(m.denominators.tokens for m in made),
    "batch/rows": sum(batch.tokens.shape[0] for batch in batches),
    "batch/row_tokens": batches[0].tokens.shape[1] if batches else 0,
    "batch/microbatches": len(batches),
    "batch/optimizer_steps": len(made),
    "batch/skipped_zero_advantage": counts[ZERO_ADVANTAGE],
    **{f"batch/left_out/{reason}": counts[reason] for reason in LEFT_OUT},
  }
  metrics: Metrics = {name: Mean(float(value), 1.0) for name, value in numbers.items()}
  metrics["batch/packing_efficiency"] = Mean(float(used), float(slots))
  return metrics
