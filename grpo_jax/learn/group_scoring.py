"""Logprobs of whole groups under given weights, for recorded responses and their ranking."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.learn import scoring, sharding
from grpo_jax.processes import arrays
from grpo_jax.types import Batch, ExpertShape, RolloutGroup


@dataclasses.dataclass(frozen=True)
class GroupScorer:
  """Scores groups: scorer(params, groups) → logprobs [completion] of each response of each group.

  Logprobs are at the temperature of training; they are NaN on
  tokens that were not sampled, and on responses that do not fit in a row.
  """

  score: scoring.Scorer
  mesh: Mesh
  groups_at_once: int
  shapes: tuple[packing.Shape, ...]
  cost: packing.Cost = packing.PLACES
  experts: ExpertShape | None = None  # of records of experts in `batches`; None: they have none.

  def __call__(
    self, params: Any, groups: Sequence[RolloutGroup]
  ) -> list[list[Float[np.ndarray, " _"]]]:
    """Scores the groups in chunks; the result depends only on params and groups."""
    return [
      values
      for first in range(0, len(groups), self.groups_at_once)
      for values in self._scored(params, groups[first : first + self.groups_at_once])
    ]

  def batches(
    self, groups: Sequence[RolloutGroup], *, step: int | None = None
  ) -> tuple[list[Batch], int]:
    """Packs all completions of the groups that fit in a row, and puts them on the mesh.

    Args:
      groups: Groups to pack.
      step: Number of the training step, for the ages of tokens; None: the batches have none.

    Returns:
      The batches on the mesh, and the number of loss tokens in them.
    """
    made, _ = self._assembled(groups, step, self.experts)
    batches = [batch for part in made.minibatches for batch in part.microbatches]
    tokens = sum(int((np.asarray(batch.loss_places) >= 0).sum()) for batch in batches)
    return sharding.put(batches, self.mesh), tokens

  def _scored(self, params: Any, groups: Sequence[RolloutGroup]) -> list[list[np.ndarray]]:
    """Scores several groups at once."""
    made, counting = self._assembled(groups)
    placed = sharding.put(made.minibatches, self.mesh)
    values = [[self.score(params, b) for b in part.microbatches] for part in placed]
    return batching.per_rollout(made, arrays.fetch(values), counting)

  def _assembled(
    self,
    groups: Sequence[RolloutGroup],
    step: int | None = None,
    experts: ExpertShape | None = None,
  ) -> tuple[batching.Assembled, list[RolloutGroup]]:
    """Packs groups on the host; also returns the groups in the form in which they were packed."""
    counting = [_counting(group) for group in groups]
    assembled = batching.assemble(
      counting,
      [np.zeros(len(group.rollouts)) for group in counting],
      shapes=self.shapes,
      cost=self.cost,
      skip_zero_advantage=False,
      step=step,
      experts=experts,
      parts=sharding.row_parts(self.mesh),
    )
    return assembled, counting


def _counting(group: RolloutGroup) -> RolloutGroup:
  """Returns the group with a weight and rewards that keep every response in the batch."""
  rollouts = tuple(dataclasses.replace(one, reward=0.0, weight=1.0) for one in group.rollouts)
  prompt = dataclasses.replace(group.prompt, weight=1.0)
  return dataclasses.replace(group, prompt=prompt, rollouts=rollouts, greedy=None)
