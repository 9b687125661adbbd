"""The bytes of the arrays that lie in the memory of a device while each program of a run is called.

The run chooses by them what fits (`memory_choices`), and a plan shows them.
"""

import dataclasses
import math
from typing import Any

import jax
from grpo_kernels.implementations import current_chip

from grpo_jax.building.computation import Computation


@dataclasses.dataclass(frozen=True)
class Arrays:
  """Bytes that the arrays of a run take on one device, without those of its programs.

  Attributes:
    weights: Weights of the model: float32, or a frozen base and its adapter.
    optimizer: State of the optimizer.
    reference: The frozen reference policy; 0 if the loss needs none.
    sampler: The embedded sampler's copy of the weights, freed before gradients are computed.
    kept: The part of it that is not freed: that of a base which has an adapter beside it.
    caches: The sampler's keys and values, the most that they grow to; also freed.
    initial: The initial policy, read again to measure how far the policy has moved; 0 if that is
      not measured, or there is a reference.
    gradients: The sum of the gradients; None: as much as the weights.
    teacher: Weights of a teacher in the trainer.
    keeps_caches: Whether the caches stay while gradients are computed, as on CPUs.
    adapter: The part of the weights that is an adapter; 0: every weight is trained.
    keeps_sampler: Whether the sampler's weights and caches are never freed, because it samples
      while the trainer learns.
  """

  weights: int
  optimizer: int
  reference: int = 0
  sampler: int = 0
  kept: int = 0
  caches: int = 0
  initial: int = 0
  gradients: int | None = None
  teacher: int = 0
  keeps_caches: bool = False
  adapter: int = 0
  keeps_sampler: bool = False

  @property
  def always(self) -> int:
    """Bytes that the run holds from its beginning to its end."""
    return self.weights + self.optimizer + self.reference + self.teacher

  @property
  def sums(self) -> int:
    """Bytes of the sum of the gradients."""
    return self.weights if self.gradients is None else self.gradients

  @property
  def sampling(self) -> int:
    """Bytes of the sampler."""
    return self.sampler + self.caches

  def beside(self, program: str) -> int:
    """Returns the bytes of all arrays in memory when a program is called.

    Args:
      program: Name of the program without its shapes, one of `PROGRAMS`.
    """
    is_learning = program in ("watch", "update", "optimizer")
    if self.keeps_sampler:
      own = self.sampling
    else:
      own = self.kept + (self.caches if self.keeps_caches else 0)
    kept = own if is_learning else 0
    return self.always + PROGRAMS[program](self) + kept


# Programs of a run that take memory, and the arrays besides those that are always there.
COPYING = "copying the weights to each process"
COPYING_ADAPTER = "copying the adapter to each process"
PROGRAMS = {
  COPYING: lambda arrays: 0,  # its results are the sampler's weights.
  COPYING_ADAPTER: lambda arrays: arrays.kept,
  "reading prompts": lambda arrays: arrays.sampling,
  "sampling": lambda arrays: arrays.sampling,
  "reading completions again": lambda arrays: arrays.sampling,
  "growing keys and values": lambda arrays: arrays.sampling,  # it returns a longer layer.
  "score": lambda arrays: arrays.sampling,
  "teacher": lambda arrays: arrays.sampling,
  "proof of new weights": lambda arrays: arrays.sampling,
  "watch": lambda arrays: arrays.initial,
  "update": lambda arrays: arrays.sums,  # the sum to which gradients are added in place.
  "optimizer": lambda arrays: arrays.sums,
}


def held_by(made: Computation) -> Arrays:
  """Returns the bytes of what the trainer keeps."""
  state, weights = made.state, bytes_of_device(made.full)
  is_whole, needs_ref = made.composition is None, made.objective.needs_ref
  reads_again = bool(made.config.learn.report_kl_every_steps) and not needs_ref and is_whole
  return Arrays(
    weights=weights,
    optimizer=bytes_of_device(state.opt_state),
    reference=weights * (needs_ref and is_whole),
    initial=weights * reads_again,
    gradients=bytes_of_device(state.params),
    teacher=0 if made.teacher is None else bytes_of_device(made.teacher.weights),
    keeps_caches=current_chip().platform == "cpu",
    adapter=0 if is_whole else bytes_of_device(state.params),
  )


def bytes_of_device(tree: Any) -> int:
  """Returns the bytes of described arrays on one device."""
  return sum(_held(leaf) for leaf in jax.tree.leaves(tree))


def _held(leaf: Any) -> int:
  shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
  return math.prod(shape) * leaf.dtype.itemsize
