"""Bytes that a device receives in an update, by arithmetic: to compare meshes before compiling.

Counted are gathered weights, scattered and summed gradients, and what rows in parts gather: keys
and values of every layer, and hidden states once. Left out is what `tensor` and `expert` exchange,
which the compared meshes have in common.
"""

from collections.abc import Iterator

import numpy as np

from grpo_jax.learn import sharding
from grpo_jax.models.products import Products
from grpo_plan import compiling, target, workload
from grpo_plan.compiling import Moved
from grpo_plan.programs import PlannedRun

_FLOAT32 = 4
_WEIGHT_AXES = ("fsdp", "context")


def of_update(run: PlannedRun) -> tuple[Moved, ...]:
  """Returns what a device receives in the update of the largest microbatch.

  Args:
    run: The run; its programs need not be described.
  """
  found = [
    _moved(run, kind, axes, whole)
    for kind, axes, whole in (*_of_weights(run), *_of_rows(run))
    if _size(run, axes) > 1
  ]
  return tuple(found)


def _of_weights(run: PlannedRun) -> Iterator[tuple[str, tuple[str, ...], float]]:
  """Yields kind, axes and bytes of the whole arrays of weights and their gradients."""
  yield "all-gather", _WEIGHT_AXES, workload.weights_read(run)
  yield "reduce-scatter", _WEIGHT_AXES, float(run.arrays.sums * _size(run, _WEIGHT_AXES))
  yield "all-reduce", ("data",), float(run.arrays.sums)


def _of_rows(run: PlannedRun) -> Iterator[tuple[str, tuple[str, ...], float]]:
  """Yields what rows in parts exchange; docs/sharding.md has the formula of keys and values.

  They are gathered in the compute dtype for the forward and for the backward pass, and their
  gradients are summed in float32; hidden states once, and their gradients.
  """
  model, size = run.model, Products(run.config.model.compute_dtype).compute_dtype.itemsize
  places = max(s.places for s in run.made.shapes) / sharding.replicas(run.mesh)
  keys = 2 * places * model.num_layers * model.num_kv_heads * model.head_dim
  keys /= run.mesh.shape["tensor"] if model.num_kv_heads % run.mesh.shape["tensor"] == 0 else 1
  states = places * model.hidden_size
  yield "all-gather", ("context",), size * (2 * keys + states)
  yield "reduce-scatter", ("context",), _FLOAT32 * (keys + states)


def _moved(run: PlannedRun, kind: str, axes: tuple[str, ...], whole: float) -> Moved:
  """Returns what a device receives of arrays of these bytes along axes of the mesh."""
  count = _size(run, axes)
  received = whole * (count - 1) / count * (2 if kind == "all-reduce" else 1)
  shares = [compiling.far_share(kind, places) for places in _groups(run, axes)]
  return Moved(kind, "+".join(axes), received, received * max(shares), 1)


def _size(run: PlannedRun, axes: tuple[str, ...]) -> int:
  """Returns the number of devices along axes."""
  return int(np.prod([run.mesh.shape.get(axis, 1) for axis in axes]))


def _groups(run: PlannedRun, axes: tuple[str, ...]) -> list[list[int]]:
  """Returns the slice or node of each device, for each group of devices along axes."""
  names = run.mesh.axis_names
  places = np.vectorize(target.place_of, otypes=[int])(run.mesh.devices)
  inner = [names.index(axis) for axis in axes if axis in names]
  places = np.moveaxis(places, inner, range(-len(inner), 0))
  return places.reshape(-1, _size(run, axes)).tolist()
