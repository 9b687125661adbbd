"""What blocks of the `mosaic_gpu` kernels are made of: rings, products, the mask. Hopper only.

A block has two consumers and a producer (`hopper`). The tile of tokens that a block keeps lies in
shared memory, half for each consumer; tiles of other tokens come by in rings of a few slots.

    full[slot]   the copy engine arrives when the bytes of a slot are there   consumers wait
    free[slot]   each consumer arrives when it has read a slot                the producer waits

Scores and weights stay in registers, spread over threads as wgmma leaves them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_kernels import hopper
from grpo_kernels.attention import mosaic_gpu_tiles as tiling
from grpo_kernels.hopper import CONSUMERS

LOG2_E = math.log2(math.e)
# The score of a pair that is not allowed: 2 to the power of it is 0, whatever is subtracted.
ABSENT = -1e30

# Functions that load one number for each row, or for each column, of a tile of scores.
Numbers = Sequence[Callable[[], Any]]


class Ring(NamedTuple):
  """Slots of shared memory and their barriers; or the types that they are made from.

  Attributes:
    slots: Content of the slots: references whose first axis is the slot.
    full: Barriers of full slots.
    free: Barriers of free slots.
  """

  slots: tuple[Any, ...]
  full: Any
  free: Any


def ring(stages: int, matrix: tuple[int, int], *dtypes: Any) -> Ring:
  """Returns the types of a ring whose slots hold a matrix, and one number for each of its rows.

  Args:
    stages: Number of slots.
    matrix: Shape of the matrix, in bfloat16.
    dtypes: Dtype of each kind of number.
  """
  numbers = (plgpu.SMEM((stages, matrix[0]), dtype) for dtype in dtypes)
  slots = hopper.swizzled((stages, *matrix), jnp.bfloat16), *numbers
  full = plgpu.Barrier(num_arrivals=len(slots), num_barriers=stages)
  return Ring(slots, full, plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages))


def run(consume: Callable[..., None], produce: Callable[..., None], *scratch: Any) -> None:
  """Runs the three warpgroups of a block.

  Args:
    consume: Function (number of the consumer, *references).
    produce: Function (*references).
    *scratch: Types of the references in shared memory.
  """

  def block(*scratch):
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _consumers():
      plgpu.set_max_registers(hopper.CONSUMER_REGISTERS, action="increase")
      consume(warpgroup, *scratch)

    @pl.when(warpgroup == CONSUMERS)
    def _producer():
      plgpu.set_max_registers(hopper.PRODUCER_REGISTERS, action="decrease")
      produce(*scratch)

  pl.run_scoped(block, *scratch, collective_axes="warpgroup")


def fill(rings: Sequence[tuple[Ring, Sequence[Callable[[Any], Any]]]], count, place) -> None:
  """Copies tile after tile into rings, each as soon as its slot is free. Producer.

  Args:
    rings: Each ring, and for what its slots hold functions from a place to a reference.
    count: Number of tiles.
    place: Function from the number of a tile to its place.
  """
  stages = rings[0][0].slots[0].shape[0]

  @pl.loop(0, count)
  def _tiles(step):
    slot, at = lax.rem(step, stages), place(step)
    for one, sources in rings:
      await_free(one.free, slot, step, stages)
      for source, slots in zip(sources, one.slots, strict=True):
        plgpu.copy_gmem_to_smem(source(at), slots.at[slot], one.full.at[slot])

  # Each phase of a barrier must be awaited: none may be pending when the block ends.
  @pl.loop(lax.max(count - stages, 0), count)
  def _drain(step):
    for one, _ in rings:
      plgpu.barrier_wait(one.free.at[lax.rem(step, stages)])


def await_free(free, slot, step, stages: int) -> None:
  """Waits until both consumers have read what a slot held before; the first round has nothing."""

  @pl.when(step >= stages)
  def _wait():
    plgpu.barrier_wait(free.at[slot])


def await_full(full, slot) -> None:
  """Waits until the copy engine has filled a slot."""
  plgpu.barrier_wait(full.at[slot])


def masked(scores, entry, queries: Numbers, keys: Numbers, *, query_axis: int):
  """Returns scores with `ABSENT` where a query may not see a key, if the entry has such pairs.

  Args:
    scores: Scores of a tile.
    entry: Entry of the tile in its list.
    queries: Places of the queries and, with a window, `Visible.positions`.
    keys: Places of the keys, `Visible.until` and, with a window, `Visible.limit`.
    query_axis: Axis of the scores along which queries lie.
  """

  def cut(scores):
    asking, *positions = (across(load(), scores, query_axis) for load in queries)
    asked, until, *limits = (across(load(), scores, 1 - query_axis) for load in keys)
    allowed = (asked <= asking) & (asking < until)
    for position, limit in zip(positions, limits, strict=True):
      allowed &= position < limit
    return jnp.where(allowed, scores, ABSENT)

  return lax.cond(tiling.is_partial(entry), cut, lambda x: x, scores)


def places(first, size: int, layout: Any):
  """Returns the places of consecutive tokens."""
  return first + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def softmax_step(scores, highest, total):
  """Returns (weights, fade, highest, total) of an online softmax after a tile, in units of log 2.

  The highest is rounded up to an integer, as `parts.softmax_shift` says: what fades, fades by a
  power of two, so that weights in bfloat16 are rounded as in one softmax over all keys.
  """
  newest = jnp.maximum(highest, rounded_up(jnp.max(scores, axis=1) * LOG2_E))
  weights = jnp.exp2(scores * LOG2_E - across(newest, scores, 0))
  fade = power_of_two(highest - newest)
  return weights, fade, newest, total * fade + jnp.sum(weights, axis=1)


def rounded_up(x):
  """Returns the smallest integers that are not below x; kernels have no ceil."""
  nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
  return jnp.where(nearest < x, nearest + 1.0, nearest)


def power_of_two(x):
  """Returns 2 to the power of integers ≤ 0, exactly (0 below 2⁻¹²⁶), where exp2 is approximate."""
  biased = jnp.maximum(x, -127.0).astype(jnp.int32) + 127
  return lax.bitcast_convert_type(biased * (1 << 23), jnp.float32)


def product(a, b):
  """Returns a · b of references to shared memory, in float32."""

  def multiplied(acc):
    plgpu.wgmma(acc, a, b)
    return acc[...]  # waits for it.

  return pl.run_scoped(multiplied, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def spare(interpret: bool, rows: int, columns: int) -> list[Any]:
  """Returns the type of shared memory that `add_product` needs in the interpreter, if any."""
  return [hopper.swizzled((CONSUMERS, rows, columns), jnp.bfloat16)] if interpret else []


def add_product(acc, a, b, spare) -> None:
  """Adds a · b to an accumulator, where a is in registers, and waits for it.

  The interpreter of jax 0.11 knows operands in shared memory only: there a goes by way of it.
  """
  if spare:
    (memory,) = spare
    memory[...] = a
    plgpu.commit_smem()
    a = memory
  plgpu.wgmma(acc, a, b)
  plgpu.wgmma_wait(0)


def plus_product(values, a, b, *, interpret: bool) -> Any:
  """Returns values + a · b, where values, and a perhaps, are in registers.

  The interpreter of jax 0.11 has no accumulators that begin with values: there it is a plain dot.
  """
  if interpret:
    return values + jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
  multiplied = lambda acc: plgpu.wgmma(acc, a, b)
  return pl.run_state(multiplied)(plgpu.WGMMAAccumulatorRef.init(values))


def store(memory, values, target) -> None:
  """Writes a matrix to device memory in bfloat16, by way of shared memory, and waits for it."""
  memory[...] = values.astype(jnp.bfloat16)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(memory, target)
  plgpu.wait_smem_to_gmem(0)


def across(numbers, like, axis: int):
  """Returns one number for each row (axis 0) or column (1) as a matrix of the shape of another."""
  return lax.broadcast_in_dim(numbers, like.shape, (axis,))
