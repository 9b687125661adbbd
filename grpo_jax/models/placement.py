"""The placement of weights and activations on a device mesh. Pure.

Three mesh axes: "data" splits rows and copies weights; "fsdp" splits rows, and the weights and the
optimizer's state with them (ZeRO-3); "tensor" splits heads, feed-forward and vocabulary. Weights
move to the activations, not the reverse: a layer's weights are gathered over "fsdp" for
each use, and the sums of their gradients are scattered over it. Two more are in a mesh only if a
run asks for them: "expert" splits rows, and the experts of mixtures (`expert_dispatch`); "context"
splits the places of each row, and its parts count as rows (`grpo_kernels.row_parts`). It splits
weights with "fsdp": what moves is as much as the sum of gradients that copies would need.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from grpo_kernels.attention import Partition
from grpo_kernels.collectives import Axes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AXES = ("data", "fsdp", "tensor")  # of every mesh.
EXPERT, CONTEXT = "expert", "context"
ALL_AXES = ("data", "fsdp", EXPERT, CONTEXT, "tensor")  # in order, with those of some meshes.
WHOLE_ROWS = ("data", "fsdp", EXPERT)  # the mesh axes that split the rows of a batch.
ROWS = (*WHOLE_ROWS, CONTEXT)  # and those of activations, of which parts of a row are rows.

# Logical axis of a parameter (models/leaves.py) → mesh axis. An axis that is not listed, or whose
# length the mesh axis does not divide, is whole on every device.
RULES: dict[str, tuple[str, ...]] = {
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "embed": ("fsdp", CONTEXT),
  "expert": (EXPERT,),
}

# Logical axis of an activation → mesh axes, in the update, the scorer and a prefill. Axes that are
# not listed are whole: "places" of a row, "embed" (the model's width) and the width of a head.
#   tokens, positions, masks, cosines      (rows, places ...)
#   residual stream, its norms, hidden     (rows, places, embed)
#   q, what it attends to                  (rows, places, heads, width of a head)
#   k, v                                   (rows, places, kv_heads, width of a head)
#   gate, up and their product             (rows, places, mlp)
#   hidden states at the head              (rows · places, embed)
#   logits                                 (rows · places, vocab)
ACTIVATIONS: dict[str, tuple[str, ...]] = {
  "rows": ROWS,
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
}


@dataclasses.dataclass(frozen=True)
class MeshPlacement:
  """The placement of all arrays on one mesh; hashable.

  Attributes:
    mesh: Mesh with axes of `ALL_AXES`, `AXES` at least, and more than one device.
  """

  mesh: Mesh

  def weight(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Returns the partition of a parameter by `RULES`; no mesh axis is used twice.

    Args:
      axes: Logical names, one for each axis of the parameter.
      shape: Shape of the parameter.

    Raises:
      ValueError: The number of names is not the number of axes.
    """
    if len(axes) != len(shape):
      raise ValueError(f"logical axes {axes} do not name the axes of a parameter of shape {shape}")
    spec: list[Axes | None] = []
    for name, length in zip(axes, shape, strict=True):
      own = rule(self.mesh, name)
      fits = length % parts_of(self.mesh, own) == 0
      spec.append(own if fits and own not in spec else None)
    return PartitionSpec(*spec)

  def activation(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Returns the partition of an activation by `ACTIVATIONS`.

    Args:
      axes: Logical names, one for each axis.
      shape: Shape of the activation. An axis that the mesh axes do not divide is not split.
    """
    return PartitionSpec(
      *(self.split(name, length) for name, length in zip(axes, shape, strict=True))
    )

  def split(self, name: str | None, length: int) -> tuple[str, ...] | None:
    """Returns the mesh axes that split an axis of an activation; None if there are none."""
    among = ACTIVATIONS.get(name or "", ())
    axes = tuple(axis for axis in among if self.mesh.shape.get(axis, 1) > 1)
    return axes if axes and length % self.parts(axes) == 0 else None

  def parts(self, axes: Sequence[str]) -> int:
    """Returns the number of parts into which these mesh axes split."""
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def place(self, x: Array, axes: Sequence[str | None]) -> Array:
    """Constrains an activation to its partition by `ACTIVATIONS`."""
    return self._constrained(x, self.activation(axes, x.shape))

  def whole(self, x: Array) -> Array:
    """Constrains an array to have a copy on every device; for small ones such as norms."""
    return self._constrained(x, PartitionSpec())

  def _constrained(self, x: Array, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def rule(mesh: Mesh, name: str | None) -> Axes | None:
  """Returns the axes of a mesh that split a logical axis of parameters, by `RULES`."""
  found = tuple(axis for axis in RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1)
  return found if len(found) > 1 else next(iter(found), None)


def parts_of(mesh: Mesh, axes: Axes | None) -> int:
  """Returns the number of parts into which axes of a mesh split."""
  names = (axes,) if isinstance(axes, str) else axes or ()
  return math.prod(mesh.shape[axis] for axis in names)


def row_axes(mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes of a mesh that split the rows of activations, parts of rows included."""
  return tuple(axis for axis in ROWS if axis in mesh.shape)


def whole_row_axes(mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes of a mesh that split the rows of a batch."""
  return tuple(axis for axis in WHOLE_ROWS if axis in mesh.shape)


def attention_partition(mesh: Mesh | None) -> Partition | None:
  """Returns how attention is split: rows and heads as `ACTIVATIONS` says; None on one device."""
  if mesh is None or mesh.size == 1:
    return None
  (head_axis,) = ACTIVATIONS["heads"]
  place_axis = CONTEXT if CONTEXT in mesh.shape else None
  return Partition(mesh, row_axes(mesh), head_axis, place_axis)
