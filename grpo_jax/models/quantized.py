"""Quantised kernels of a frozen base: int8 and nf4 codes with float32 scales. Pure.

A quantised kernel is in place of an array [.. i o], whose last two axes are inputs and outputs;
stacked kernels have the layers before them. `dequantized` is its only reader, so that the trainer
and every engine multiply with the same numbers. Codes and scales are split over a mesh as the
kernel itself would be.

Reference:
  Dettmers et al. 2022, "LLM.int8()", arXiv:2208.07339, for absmax scales; Dettmers et al. 2023,
  "QLoRA", arXiv:2305.14314, appendix E, for NF4.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels import rounding
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from grpo_jax.models import barriers
from grpo_jax.models.errors import ModelError

BLOCK = 64  # inputs that share a scale of nf4.

# The 16 values of NF4: quantiles of N(0, 1), scaled to [-1, 1], with an exact 0.
NF4_VALUES = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
  *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
  """A kernel W ≈ c s with one scale for each output: s = max |W| / 127 over the inputs."""

  codes: Any  # c: int8 [.. i o]
  scale: Any  # s: float32 [.. 1 o]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel."""
    return tuple(self.codes.shape)

  @property
  def dtype(self) -> np.dtype:
    """Dtype that holds the kernel's values exactly."""
    return np.dtype(np.float32)

  @property
  def sharding(self) -> Any:
    """Sharding of the kernel."""
    return self.codes.sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nf4:
  """A kernel W ≈ v(c) s with a scale for each output and `BLOCK` inputs: s = max |W| in the block.

  The function v is the table `NF4_VALUES`. The last block is shorter if `BLOCK` does not divide the
  number of inputs. With the scales a weight takes 4.5 bits.
  """

  codes: Any  # uint8 [.. i/2 o]: that of input 2j in the low four bits, of 2j + 1 in the high.
  scale: Any  # s: float32 [.. ⌈i/BLOCK⌉ o]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel."""
    *before, pairs, outputs = self.codes.shape
    return (*before, 2 * pairs, outputs)

  @property
  def dtype(self) -> np.dtype:
    """Dtype that holds the kernel's values exactly."""
    return np.dtype(np.float32)

  @property
  def sharding(self) -> Any:
    """Sharding of the kernel."""
    return self.codes.sharding


# A quantised kernel; its type is the format.
Quantized = Int8 | Nf4
Format = type[Int8] | type[Nf4]
FORMATS: dict[str, Format] = {"int8": Int8, "nf4": Nf4}


def dequantized(kernel: Any, dtype: Any = jnp.float32) -> Array:
  """Returns the values of a kernel, quantised or not, rounded once.

  Args:
    kernel: Kernel [.. i o]: an array, `Int8` or `Nf4`.
    dtype: Dtype of the result: float32 or bfloat16.
  """
  kernel = jax.tree.map(jnp.asarray, kernel)
  if isinstance(kernel, Int8):
    return rounding.written(kernel.codes.astype(jnp.float32) * kernel.scale, dtype)
  if isinstance(kernel, Nf4):
    inputs = kernel.shape[-2]
    scale = jnp.repeat(kernel.scale, BLOCK, axis=-2)[..., :inputs, :]
    return rounding.written(_looked_up(_unpacked(kernel.codes)) * scale, dtype)
  return kernel.astype(dtype)


def on_host(kernel: Any) -> Float[np.ndarray, "..."]:
  """Returns the values of a quantised kernel of NumPy arrays, in float32: those of `dequantized`.

  No device takes part.

  Args:
    kernel: Kernel [.. i o], as `quantize` returns it.
  """
  if isinstance(kernel, Int8):
    return kernel.codes.astype(np.float32) * kernel.scale
  *before, inputs, outputs = kernel.shape
  pairs = np.stack([kernel.codes & 15, kernel.codes >> 4], axis=-2)
  codes = pairs.reshape(*before, inputs, outputs)
  scale = np.repeat(kernel.scale, BLOCK, axis=-2)[..., :inputs, :]
  return np.asarray(NF4_VALUES, np.float32)[codes] * scale


def of_layer(kernel: Any, dtype: Any) -> Array:
  """Returns what `dequantized` does, for a frozen kernel of one layer in a scan over the layers.

  A barrier keeps compilers from converting the whole stack ahead of the scan, which would hold the
  base once more in a larger dtype. XLA for CPUs multiplies bfloat16 in float32, so it would do that
  even where nothing is converted here.
  """
  is_array = not isinstance(kernel, Quantized)
  if is_array and kernel.dtype == jnp.float32:
    return kernel.astype(dtype)
  if is_array and kernel.dtype == dtype:
    return barriers.materialize(kernel)
  return dequantized(jax.lax.optimization_barrier(kernel), dtype)


def quantize(kernel: Float[np.ndarray, "..."], form: Format) -> Any:
  """Quantises a kernel on the host.

  Args:
    kernel: Kernel [.. i o], of any float dtype, with all its inputs. The result for an output does
      not depend on the other outputs.
    form: Format of the result.

  Returns:
    The quantised kernel, of numpy arrays.

  Raises:
    ModelError: The number of inputs is odd, which nf4 cannot pack.
  """
  rows = np.ascontiguousarray(np.swapaxes(kernel, -1, -2), np.float32)
  made = _int8_rows(rows) if form is Int8 else _nf4_rows(rows)
  return jax.tree.map(lambda x: np.ascontiguousarray(np.swapaxes(x, -1, -2)), made)


def of_inputs(kernel: Any, first: int, last: int) -> Any:
  """Returns the part of a quantised kernel for the inputs from `first` to before `last`.

  Args:
    kernel: Quantised kernel of all inputs.
    first: First input; for nf4 the first of a block.
    last: Input after the last; for nf4 the first of a block, or the number of inputs.
  """
  if isinstance(kernel, Int8):
    return Int8(kernel.codes[..., first:last, :], kernel.scale)
  blocks = slice(first // BLOCK, -(-last // BLOCK))
  return Nf4(kernel.codes[..., first // 2 : last // 2, :], kernel.scale[..., blocks, :])


def described(shape: tuple[int, ...], form: Format, sharding: Any = None) -> Any:
  """Returns shapes, dtypes and shardings of the fields of a quantised kernel.

  Args:
    shape: Shape [.. i o] of the kernel.
    form: Format of the kernel.
    sharding: Sharding of the kernel, if it were an array; None: not placed.

  Raises:
    ModelError: The number of inputs is odd, or the mesh splits the inputs within a block of nf4.
  """
  fields = _fields(shape, form)
  if not isinstance(sharding, NamedSharding):
    return jax.tree.map(lambda x: _placed(x, sharding), fields)
  _check_split(shape, form, sharding)
  specs = partition(fields, sharding.spec)
  return jax.tree.map(lambda x, s: _placed(x, NamedSharding(sharding.mesh, s)), fields, specs)


def partition(kernel: Any, spec: PartitionSpec) -> Any:
  """Returns the partition of each field of a kernel, from that of the kernel.

  Args:
    kernel: Kernel, quantised or not: arrays or their descriptions.
    spec: Partition of the kernel, if it were an array.

  Returns:
    The partition itself for an array; a quantised kernel of partitions for a quantised kernel.
  """
  if not isinstance(kernel, Quantized):
    return spec
  *before, inner, outer = (*spec, *[None] * (len(kernel.shape) - len(spec)))
  if isinstance(kernel, Int8):
    return Int8(PartitionSpec(*before, inner, outer), PartitionSpec(*before, None, outer))
  return Nf4(PartitionSpec(*before, inner, outer), PartitionSpec(*before, inner, outer))


def _fields(shape: tuple[int, ...], form: Format) -> Any:
  """Returns shapes and dtypes of the fields of a quantised kernel of this shape."""
  *before, inputs, outputs = shape
  of = lambda rows, dtype: jax.ShapeDtypeStruct((*before, rows, outputs), dtype)
  if form is Int8:
    return Int8(of(inputs, jnp.int8), of(1, jnp.float32))
  _check_even(inputs)
  return Nf4(of(inputs // 2, jnp.uint8), of(-(-inputs // BLOCK), jnp.float32))


def _placed(field: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=sharding)


def _check_split(shape: tuple[int, ...], form: Format, sharding: NamedSharding) -> None:
  """Raises ModelError if a device would get a part of a block of nf4."""
  inputs, part = shape[-2], sharding.shard_shape(shape)[-2]
  if form is Nf4 and part != inputs and part % BLOCK:
    axes = sharding.spec[len(shape) - 2]
    names = (axes,) if isinstance(axes, str) else axes or ()
    named = " × ".join(f"mesh.{axis}" for axis in names)
    raise ModelError(
      f"model.lora.base_dtype='nf4' has a scale for every {BLOCK} inputs of a kernel, but"
      f" {named} splits the {inputs} inputs of a kernel of shape {list(shape[-2:])} into parts"
      f" of {part}: use a {named} for which they are a multiple of {BLOCK}, or"
      " base_dtype='int8'"
    )


def _check_even(inputs: int) -> None:
  if inputs % 2:
    raise ModelError(
      f"model.lora.base_dtype='nf4' packs pairs of inputs, but a kernel has {inputs}: use"
      " base_dtype='int8'"
    )


def _int8_rows(values: Float[np.ndarray, "..."]) -> Int8:
  """Returns codes and scales of rows [.. o i], with the axes of the rows."""
  scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
  return Int8(np.rint(values / _divisor(scale)).astype(np.int8), scale)


def _nf4_rows(values: Float[np.ndarray, "..."]) -> Nf4:
  """Returns codes and scales of rows [.. o i], with the axes of the rows."""
  *before, inputs = values.shape
  _check_even(inputs)
  missing = -inputs % BLOCK
  padded = np.pad(values, [(0, 0)] * len(before) + [(0, missing)]) if missing else values
  blocks = padded.reshape(*before, -1, BLOCK)
  scale = np.abs(blocks).max(axis=-1, keepdims=True)
  codes = np.zeros(blocks.shape, np.uint8)
  relative = blocks / _divisor(scale)
  for bound in _NF4_BOUNDS:
    codes += relative > bound
  codes = codes.reshape(*before, -1)[..., :inputs]
  return Nf4(codes[..., 0::2] | codes[..., 1::2] << 4, scale[..., 0])


def _divisor(scale: np.ndarray) -> np.ndarray:
  """Returns scales without zeros: all codes of such a block stand for 0."""
  return np.where(scale == 0, np.float32(1), scale)


def _unpacked(codes: Array) -> Array:
  """Returns the codes [.. i o] of bytes [.. i/2 o]."""
  *before, pairs, outputs = codes.shape
  both = jnp.stack([codes & 15, codes >> 4], axis=-2)
  return both.reshape(*before, 2 * pairs, outputs)


def _looked_up(codes: Array) -> Array:
  """Returns the values of codes of nf4, float32.

  Four rounds of selections by the bits of a code in place of a gather, which is slow on TPUs.
  """
  values = [jnp.float32(value) for value in NF4_VALUES]
  for bit in range(4):
    is_set = (codes >> bit) & 1 == 1
    pairs = zip(values[::2], values[1::2], strict=True)
    values = [jnp.where(is_set, high, low) for low, high in pairs]
  return values[0]


# Between neighbours of `NF4_VALUES`: a value above the i-th has a code above i.
_NF4_BOUNDS = (
  np.asarray(NF4_VALUES, np.float32)[1:] + np.asarray(NF4_VALUES, np.float32)[:-1]
) / np.float32(2)
