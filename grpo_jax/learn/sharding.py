"""The sharding of a run's state and batches over the device mesh. Pure.

`models.placement` defines the axes of the mesh and the tables of shardings, `learn.device_mesh` the
order of its devices.
"""

import math
from typing import Any

import jax
import numpy as np
import optax
from grpo_kernels.linear_logprobs.sharded import Partition
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.learn.device_mesh import make_mesh, mesh_sizes
from grpo_jax.models.placement import (
  AXES,
  CONTEXT,
  RULES,
  MeshPlacement,
  parts_of,
  row_axes,
  rule,
  whole_row_axes,
)
from grpo_jax.processes import arrays

__all__ = [
  "AXES",
  "head_partition",
  "make_mesh",
  "mesh_of",
  "mesh_sizes",
  "of_rows",
  "opt_state_shardings",
  "param_shardings",
  "placement",
  "put",
  "replicas",
  "row_parts",
  "unsplit",
  "whole",
]


def unsplit(logical_axes: Any, mesh: Mesh, *, shapes: Any) -> dict[str, dict[str, int]]:
  """Returns the axes that are not split, because a mesh axis does not divide their length.

  Args:
    logical_axes: Logical axis names, as in `param_shardings`.
    mesh: Mesh made by `make_mesh`.
    shapes: Shapes of the parameters, as in `param_shardings`.

  Returns:
    The lengths, by the first mesh axis of the rule and by logical axis.
  """
  found: dict[str, dict[str, int]] = {}
  is_names = lambda node: isinstance(node, tuple)
  for names, like in zip(
    jax.tree.leaves(logical_axes, is_leaf=is_names), jax.tree.leaves(shapes), strict=True
  ):
    for name, length in zip(names, like.shape, strict=True):
      if length % parts_of(mesh, rule(mesh, name)):
        found.setdefault(RULES[name][0], {})[name] = length
  return found


def replicas(mesh: Mesh) -> int:
  """Returns the number of devices over which rows are split; B must be a multiple of it."""
  return math.prod(mesh.shape[axis] for axis in whole_row_axes(mesh))


def row_parts(mesh: Mesh) -> int:
  """Returns the number of parts in which the places of a row are dealt out; 1: rows are whole."""
  return mesh.shape.get(CONTEXT, 1)


def param_shardings(logical_axes: Any, mesh: Mesh, *, shapes: Any) -> Any:
  """Returns the sharding of each parameter, by `RULES`.

  Args:
    logical_axes: Tree of tuples with one logical name, or None, for each axis of a parameter.
    mesh: Mesh made by `make_mesh`.
    shapes: Tree of the same structure, of arrays or other objects with a `shape`.

  Raises:
    ValueError: A parameter has more or fewer axes than names.
  """
  return jax.tree.map(
    lambda names, like: NamedSharding(mesh, MeshPlacement(mesh).weight(names, like.shape)),
    logical_axes,
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def opt_state_shardings(
  tx: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh
) -> Any:
  """Returns the sharding of the optimizer's state: arrays shaped like a parameter follow it.

  Args:
    tx: Optimizer.
    params: Tree of arrays or shapes.
    shardings: Shardings of the parameters.
    mesh: Mesh of devices; everything else (step counts) is copied to all of them.
  """
  everywhere = whole(mesh)
  return optax.tree_utils.tree_map_params(
    tx,
    lambda _, sharding: sharding,
    jax.eval_shape(tx.init, params),
    shardings,
    transform_non_params=lambda _: everywhere,
  )


def whole(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def mesh_of(shardings: Any) -> Mesh:
  """Returns the mesh of a tree of shardings."""
  return jax.tree.leaves(shardings)[0].mesh


def of_rows(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays whose first axis is the rows of a batch."""
  return NamedSharding(mesh, PartitionSpec(whole_row_axes(mesh)))


def placement(mesh: Mesh) -> MeshPlacement | None:
  """Returns the placement of weights and activations; None on a mesh of one device."""
  return None if mesh.size == 1 else MeshPlacement(mesh)


def head_partition(mesh: Mesh) -> Partition | None:
  """Returns how the LM head and its tokens are split: V by "tensor", D and tokens like rows.

  None on a mesh of one device.
  """
  if mesh.size == 1:
    return None
  (vocab_axis,) = RULES["vocab"]
  return Partition(
    mesh,
    vocab_axis=vocab_axis if mesh.shape[vocab_axis] > 1 else None,
    token_axes=tuple(axis for axis in row_axes(mesh) if mesh.shape[axis] > 1),
    width_axis=rule(mesh, "embed"),
  )


def put(tree: Any, mesh: Mesh) -> Any:
  """Puts batches (trees of arrays [B ...]) on the mesh with rows split; scalars stay unchanged.

  Each process holds all rows and puts those of its own devices.

  Raises:
    ValueError: B is not a multiple of `replicas(mesh)`.
  """
  parts = replicas(mesh)

  def put_one(x):
    if np.ndim(x) == 0:
      return x
    if x.shape[0] % parts:
      raise ValueError(
        f"{x.shape[0]} rows cannot be split evenly over {parts} replicas of {dict(mesh.shape)}"
      )
    return arrays.put(x, of_rows(mesh))

  return jax.tree.map(put_one, tree)
