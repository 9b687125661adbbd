"""The weights of a run's policy: what is trained, what is frozen, and the full weights. Pure.

`TrainState.params` holds what is trained. By default that is every weight, so the trained arrays
are the full weights of the policy. A `Composition` divides the weights of the model in two: an
adapter is trained, and its frozen base stays as it was read. Then nothing but `full_weights` joins
the two:

* Programs (the update, scores, monitoring) take the two parts in a `Composed` and begin with
  `full_weights`. In the update it stands between the trained arrays and the loss, so the gradients
  are those of the trained arrays alone.
* Engines and files take the full weights of `Policy.full`, whose kernels may be `LowRank`: they
  merge such a kernel with its adapter, one tensor at a time, or keep the two apart.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import struct

from grpo_jax.compilation.programs import CompileJob
from grpo_jax.models import gradient_sums
from grpo_jax.types import TrainState


@dataclasses.dataclass(frozen=True)
class Composition:
  """How full weights are made of what is trained and what is frozen. Hashable: static in programs.

  Attributes:
    split: Function (full weights as they were read, what is trained) → (trainable, frozen), two
      trees of arrays. Without what is trained it is new, and the full weights of the two are the
      weights that were read.
    described: Function (shapes, dtypes and shardings of the full weights) → those of (trainable,
      frozen), as trees of `jax.ShapeDtypeStruct`.
    full: Function (trainable, frozen) → full weights. It copies and computes nothing, so that it
      can be called inside of programs, where it is differentiated in its first argument, and
      outside of them.
    base: Function (frozen) → full weights of the reference policy. It returns leaves of its
      argument, so nothing is copied.
    jobs: Function that returns the compilations of `split`.
  """

  split: Callable[[Any, Any], tuple[Any, Any]]
  described: Callable[[Any], tuple[Any, Any]]
  full: Callable[[Any, Any], Any]
  base: Callable[[Any], Any]
  jobs: Callable[[], list[CompileJob]] = list


@struct.dataclass
class Composed:
  """Weights in two parts, as programs take them in place of the full weights.

  Attributes:
    trainable: Tree of what is trained.
    frozen: Tree of what training never changes.
    composition: Composition of the full weights from the two.
  """

  trainable: Any
  frozen: Any
  composition: Composition = struct.field(pytree_node=False)


def full_weights(weights: Any) -> Any:
  """Returns the full weights; called inside of programs, and differentiable.

  Args:
    weights: Full weights, which are returned as they are, or a `Composed`.
  """
  if isinstance(weights, Composed):
    return weights.composition.full(weights.trainable, weights.frozen)
  return weights


def trainable_of(weights: Any) -> Any:
  """Returns the part of the weights that is trained: all of them, unless they are `Composed`."""
  return weights.trainable if isinstance(weights, Composed) else weights


def attach(weights: Any, sums: Any) -> Any:
  """Returns weights whose gradients are added to `sums`; see `gradient_sums.attach`.

  Args:
    weights: Full weights, or a `Composed`.
    sums: Gradients so far: a tree of the shapes of what is trained.
  """
  if isinstance(weights, Composed):
    trainable = gradient_sums.joined(weights.trainable, sums)
    return dataclasses.replace(weights, trainable=trainable)
  return gradient_sums.attach(weights, sums)


@dataclasses.dataclass(frozen=True)
class Policy:
  """The policy of a run.

  Attributes:
    reference: Full weights of a reference policy that never changes; None: they are not kept,
      because the loss needs no reference, or it follows the policy and is in `TrainState`.
    frozen: Part of the full weights that is not trained; None: there is none.
    composition: Composition of the full weights from the two; None: every weight is trained.
  """

  reference: Any = None
  frozen: Any = None
  composition: Composition | None = None

  def reference_of(self, state: TrainState) -> Any:
    """Returns the full weights of the present reference policy; None: the loss needs none."""
    return self.reference if state.reference is None else state.reference

  def weights(self, trainable: Any) -> Any:
    """Returns the policy's weights as programs take them. Nothing is copied or computed.

    Args:
      trainable: Trained arrays, as in `TrainState.params`; updates donate them.
    """
    if self.composition is None:
      return trainable
    return Composed(trainable, self.frozen, self.composition)

  def full(self, trainable: Any) -> Any:
    """Returns the full weights, for engines and files. Nothing is copied or computed.

    Without a composition these are the trained arrays themselves.

    Args:
      trainable: Trained arrays, as in `TrainState.params`; updates donate them.
    """
    return full_weights(self.weights(trainable))


def begin(
  params: Any,
  composition: Composition | None,
  *,
  copy: Callable[[Any], Any] | None,
  trained: Any = None,
) -> tuple[Any, Policy]:
  """Returns what is trained, and the policy around it.

  Args:
    params: Full weights as they were read.
    composition: Division of the weights; None: every weight is trained.
    copy: Function that copies full weights, for the reference; None: the loss needs no reference.
      With a composition nothing is copied: the reference is the frozen base.
    trained: Trained part to begin with; None: a new one.
  """
  if composition is None:
    return params, Policy(reference=copy(params) if copy else None)
  trainable, frozen = composition.split(params, trained)
  return trainable, Policy(composition.base(frozen), frozen, composition)


def followed(reference: Any, full: Any, *, share: float) -> Any:
  """Computes the next reference policy, θ_ref ← α θ + (1 - α) θ_ref. A pure function of arrays.

  Args:
    reference: Full weights θ_ref of the reference policy.
    full: Full weights θ of the policy.
    share: Share α of the policy; 1: the reference becomes a copy of the policy, bit for bit.

  Reference:
    Gorbatovski et al. 2024, "Learn Your Reference Model", arXiv:2404.09656 (TR-DPO, soft and hard
    update); TRL's `sync_ref_model`.
  """

  def mixed(old: Any, new: Any) -> Any:
    if share == 1:  # `old` is read, so that a donated reference gives its memory.
      return jax.lax.optimization_barrier((old, new))[1]
    return share * new + (1 - share) * old

  return jax.tree.map(mixed, reference, full)


def described(full: Any, composition: Composition | None) -> tuple[Any, Any]:
  """Describes the weights of the policy and of its reference, as programs take them.

  Args:
    full: Shapes, dtypes and shardings of the full weights.
    composition: Division of the weights; None: every weight is trained, and both are alike.
  """
  if composition is None:
    return full, full
  trainable, frozen = composition.described(full)
  return Composed(trainable, frozen, composition), composition.base(frozen)


def shardings_of(tree: Any) -> Any:
  """Returns the sharding of every leaf of a tree of arrays, or of their descriptions."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)
