"""Reads parameters from the tensors of a checkpoint, directly into their sharding (I/O).

Each leaf has a dtype of its own, or a format in which it is quantised while it is read.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models import leaves, quantized, safetensors, transformer
from grpo_jax.models.config import ModelConfig

# Dtype of all parameters, or those of the kinds of `leaves.Leaf`; others are float32. Kernels may
# have a format of `quantized`.
Dtypes = Any


@dataclasses.dataclass
class Rounding:
  """How far the weights that this process has read differ from those in the files.

  Each process counts its share of what several of them have read, so that the sums over all
  processes are those of the model. Tensors whose dtype holds every value of the file are left out.
  """

  squared_error: float = 0.0  # ‖read − file‖².
  squared_norm: float = 0.0  # ‖file‖².
  share: float = 1.0  # of this process in what is being read.

  @property
  def relative(self) -> float:
    """‖read − file‖ / ‖file‖; 0 if nothing was rounded."""
    return math.sqrt(self.squared_error / self.squared_norm) if self.squared_error else 0.0

  def add(self, values: np.ndarray, read: np.ndarray) -> None:
    """Counts values of a file, and what was made of them."""
    exact = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32).ravel()
    error = np.asarray(read, exact.dtype).ravel() - exact
    self.squared_error += self.share * float(np.dot(error, error))
    self.squared_norm += self.share * float(np.dot(exact, exact))


def read_params(
  tensors: safetensors.Tensors,
  config: ModelConfig,
  *,
  sharding: Callable[[Any], Any] | None = None,
  dtype: Dtypes = jnp.float32,
  rounding: Rounding | None = None,
) -> transformer.Params:
  """Reads all parameters, leaf by leaf, after `loading.check`.

  The arguments are those of `loading.load`. What the dtype does to the values is added to
  `rounding`.
  """
  rounding = Rounding() if rounding is None else rounding
  tree = leaves.tree(config)
  shardings = sharding(transformer.logical_axes(config)) if sharding else None
  sources: dict[tuple[str, ...], list[leaves.Stored]] = {}
  for stored in leaves.stored(config):
    sources.setdefault(stored.path, []).append(stored)
  params: transformer.Params = {"layers": {}}
  for path, parts in sources.items():
    below, shape, at = params, tree, shardings
    for key in path[:-1]:
      below, shape, at = below[key], shape[key], at and at[key]
    placed = at[path[-1]] if at else None
    entry = shape[path[-1]]
    form = form_of(entry, dtype)
    read: Any = _read_leaf if isinstance(form, np.dtype) else _read_quantized
    leaf = read(tensors, parts, entry.shape, placed, form, rounding)
    # Placement is asynchronous: the host's copy of this leaf must be freed before the next is read.
    below[path[-1]] = jax.block_until_ready(leaf)
  return params


def form_of(leaf: leaves.Leaf, dtypes: Dtypes) -> Any:
  """Returns the dtype of a leaf, or its format of `quantized`."""
  own = dtypes.get(leaf.kind, np.float32) if isinstance(dtypes, Mapping) else dtypes
  is_format = any(own is form for form in quantized.FORMATS.values())
  return own if is_format else np.dtype(own)


def described(leaf: leaves.Leaf, sharding: Any, dtypes: Dtypes) -> Any:
  """Returns shape, dtype and sharding of a leaf as it is read.

  Args:
    leaf: Leaf of the tree of all parameters.
    sharding: Its sharding, if it were an array.
    dtypes: Dtypes as in `loading.load`.

  Returns:
    A `jax.ShapeDtypeStruct`; for a quantised leaf, those of its fields.

  Raises:
    ModelError: The mesh splits the leaf within a block of its format.
  """
  form = form_of(leaf, dtypes)
  if isinstance(form, np.dtype):
    return jax.ShapeDtypeStruct(leaf.shape, form, sharding=sharding)
  return quantized.described(leaf.shape, form, sharding)


def rounded(rows: np.ndarray, leaf: leaves.Leaf, *, dtypes: Dtypes) -> np.ndarray:
  """Returns values of a tensor, rounded or quantised as they would be read, in float32 on the host.

  Args:
    rows: Rows of the tensor, as in the file.
    leaf: Leaf that the tensor is of.
    dtypes: Dtypes as in `loading.load`.
  """
  form = form_of(leaf, dtypes)
  if isinstance(form, np.dtype):
    return rows.astype(form).astype(np.float32)
  return quantized.on_host(quantized.quantize(rows.T, form)).T


def _read_leaf(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  sharding: jax.sharding.Sharding | None,
  dtype: np.dtype,
  rounding: Rounding,
) -> jax.Array:
  """Reads one leaf of the tree: each device's part separately, equal parts once."""
  rounding.share = 1.0
  if sharding is None:
    whole = (slice(None),) * len(shape)
    return jax.device_put(_read_part(tensors, parts, shape, dtype, whole, rounding))
  made: dict[tuple, np.ndarray] = {}
  shares = _shares(sharding, shape)

  def part(index):
    key = _key(index, shape)
    if key not in made:
      rounding.share = shares[key]
      made[key] = _read_part(tensors, parts, shape, dtype, index, rounding)
    return made[key]

  return jax.make_array_from_callback(shape, sharding, part)


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple:
  return tuple(s.indices(n) for s, n in zip(index, shape, strict=True))


def _shares(sharding: Any, shape: tuple[int, ...]) -> dict[tuple, float]:
  """Returns one process's share of each part of an array; several processes may have a part."""
  holders: dict[tuple, set[int]] = {}
  for device, index in sharding.devices_indices_map(shape).items():
    holders.setdefault(_key(index or (), shape), set()).add(device.process_index)
  return {key: 1 / len(processes) for key, processes in holders.items()}


def _read_quantized(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  shardings: Any,
  form: quantized.Format,
  rounding: Rounding,
) -> Any:
  """Reads and quantises one leaf of the tree: each device's part separately, equal parts once.

  Scales are of whole kernels, so the result does not depend on the mesh.
  """
  rounding.share = 1.0
  if shardings is None:
    whole = (slice(None),) * len(shape)
    return jax.device_put(_quantized_part(tensors, parts, shape, whole, form, rounding))
  made: dict[tuple, Any] = {}
  placed = []
  shares = _shares(shardings.codes, shape)
  for device, index in shardings.codes.addressable_devices_indices_map(shape).items():
    key = _key(index, shape)
    if key not in made:
      rounding.share = shares[key]
      made[key] = _quantized_part(tensors, parts, shape, index, form, rounding)
    placed.append(jax.device_put(made[key], device))

  def joined(field: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding, *own: jax.Array) -> Any:
    return jax.make_array_from_single_device_arrays(field.shape, sharding, list(own))

  return jax.tree.map(joined, quantized.described(shape, form), shardings, *placed)


def _quantized_part(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  index: tuple[slice, ...],
  form: quantized.Format,
  rounding: Rounding,
) -> Any:
  """Reads and quantises the part of stacked kernels given by `index`.

  All inputs of a few outputs are read at once, because an output may have one scale for all.
  """
  layers, outputs = range(*index[0].indices(shape[0])), index[2].indices(shape[2])
  first, last, rows = outputs[0], outputs[1], max(1, CHUNK_VALUES // shape[1])
  inputs = index[1].indices(shape[1])[:2]
  size = len(layers), inputs[1] - inputs[0], last - first
  out = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), quantized.described(size, form))
  for place, layer in enumerate(layers):
    for start in range(first, last, rows):
      stop = min(start + rows, last)
      read = tensors.read(parts[layer].name, slice(start, stop))
      made = quantized.of_inputs(quantized.quantize(read.T, form), *inputs)
      rounding.add(read.T[slice(*inputs)], quantized.on_host(made))
      for target, values in zip(jax.tree.leaves(out), jax.tree.leaves(made), strict=True):
        target[place, :, start - first : stop - first] = values
  return out


def _read_part(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  dtype: np.dtype,
  index: tuple[slice, ...],
  rounding: Rounding,
) -> np.ndarray:
  """Reads the part of a leaf given by `index`, one tensor of the file after another."""
  ranges = [range(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
  out = np.empty([len(each) for each in ranges], dtype)
  of_place = {stored.index: stored for stored in parts}
  axes = len(parts[0].index)  # those along which a leaf has a tensor for each place.
  for place in np.ndindex(out.shape[:axes]):
    stored = of_place[tuple(each[i] for each, i in zip(ranges, place, strict=False))]
    _copy(tensors, stored, index[axes:], out[place], rounding)
  return out


def _copy(
  tensors: safetensors.Tensors,
  stored: leaves.Stored,
  index: tuple[slice, ...],
  out: np.ndarray,
  rounding: Rounding,
) -> None:
  """Fills `out` with the part of one tensor, a few rows of the file at a time."""
  in_file = index[::-1] if stored.leaf.is_kernel else index  # both without the places in a stack.
  first, last, _ = in_file[0].indices(stored.shape[0])
  target = out.T if stored.leaf.is_kernel else out
  rows = max(1, CHUNK_VALUES // max(1, int(np.prod(stored.shape[1:]))))
  for start in range(first, last, rows):
    stop = min(start + rows, last)
    values = tensors.read(stored.name, slice(start, stop))[(slice(None), *in_file[1:])]
    read = target[start - first : stop - first]
    read[...] = values
    if values.dtype != out.dtype and values.itemsize >= out.itemsize:
      rounding.add(values, read)


CHUNK_VALUES = 1 << 20  # read at once: 4 MiB of float32.
