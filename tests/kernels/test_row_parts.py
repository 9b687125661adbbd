"""Rows dealt out in parts over devices: values and gradients are those of whole rows."""

import functools

import attention_conformance as conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import row_parts
from grpo_kernels.attention import Attention, Partition, core, sharded, visible, xla_blocked
from grpo_kernels.row_parts import RowParts
from jax.sharding import Mesh

T = 32
ROWS = conformance.random_rows(5, rows=4, length=T)


def over(rows, context, tensor=1):
  """Returns a partition over axes of these sizes."""
  sizes = (rows, context, tensor)
  devices = np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  mesh = Mesh(devices, ("fsdp", "context", "tensor"))
  axes: tuple[str, ...] = ("fsdp", "context")
  return Partition(mesh, row_axes=axes, head_axis="tensor", place_axis="context")


def orders(rows=4, chunks=8, seed=0):
  """Returns places of slots: the chunks of each row in any order."""
  rng = np.random.default_rng(seed)
  whole = np.arange(T, dtype=np.int32).reshape(chunks, -1)
  return jnp.asarray(np.stack([whole[rng.permutation(chunks)].reshape(-1) for _ in range(rows)]))


def test_parts_of_rows_come_back_and_a_vector_is_taken_from_any_of_them():
  parts = over(2, 4).parts
  order = orders()
  x = jnp.asarray(np.random.default_rng(1).normal(size=(4, T)), jnp.float32)

  @jax.jit
  def both(x, g):
    dealt = parts.dealt(x, order)
    there = lambda y: parts.collected(y, parts.slots(order))
    back, pull = jax.vjp(there, dealt)
    return dealt, back, *pull(g)

  dealt, back, of_dealt = both(x, 3 * x)
  assert dealt.shape == (16, T // 4)
  np.testing.assert_array_equal(back, x)
  np.testing.assert_array_equal(of_dealt, 3 * np.asarray(dealt))
  # The first group of devices has rows 0 and 1, its device 1 their parts 1.
  right = np.take_along_axis(np.asarray(x), np.asarray(order), 1)
  np.testing.assert_array_equal(dealt[2:4], right[:2, 8:16])
  np.testing.assert_array_equal(dealt[8:10], right[2:, :8])


@pytest.mark.parametrize("slices", [1, 3])
def test_a_gradient_is_summed_over_all_that_took_a_vector(slices, monkeypatch):
  monkeypatch.setattr(row_parts, "MOST_BYTES", {1: 1 << 28, 3: 2 * T * 3 * 4 // 3}[slices])
  assert row_parts.slices_of(2 * T, 3) == slices
  parts, order = over(2, 4).parts, orders()
  rng = np.random.default_rng(2)
  x, g = (jnp.asarray(rng.normal(size=(4, T, 3)), jnp.float32) for _ in range(2))
  before = jnp.asarray(rng.integers(0, T, size=(4, T)))  # places, many of them several times.

  every = jnp.broadcast_to(jnp.arange(T), (4, T))  # so that each place is predicted in turn.

  @jax.jit
  def divided(x, g):
    slots = jnp.take_along_axis(parts.slots(order), before, axis=1)
    take = lambda y: parts.taken(y, parts.dealt(slots, every))
    out, pull = jax.vjp(take, parts.dealt(x, order))
    return out, *pull(parts.dealt(g, every))

  out, of_x = divided(x, g)
  right, pull = jax.vjp(lambda x: jnp.take_along_axis(x, before[..., None], axis=1), x)
  np.testing.assert_array_equal(out, parts.dealt(right, every))
  np.testing.assert_allclose(of_x, parts.dealt(*pull(g), order), atol=1e-6)


def run(partition, heads, kv_heads, implementation, *, window=5):
  """Returns output and gradients at the places of rows."""
  *qkv, g = conformance.inputs(ROWS, heads=heads, kv_heads=kv_heads)
  segments, branches, positions = map(jnp.asarray, ROWS)
  order = orders()

  @jax.jit
  def whole(q, k, v, g):
    seen = visible.visible(segments, branches, positions=positions, window=window)
    attend = lambda *qkv: core.attend(implementation, core.Settings(), *qkv, seen)[0]
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)

  @jax.jit
  def divided(q, k, v, g):
    parts = partition.parts
    of_devices = sharded.Sharded(implementation, partition)
    seen = visible.visible(segments, branches, positions=positions, window=window)
    seen = Attention(partition=partition).dealt(seen, order)
    seen = seen._replace(tiles=of_devices.prepare(seen, q.shape[-1]))
    attend = lambda *qkv: core.attend(of_devices, core.Settings(), *qkv, seen)[0]
    q, k, v, g = (parts.dealt(x, order) for x in (q, k, v, g))
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)

  if partition is None:
    return whole(*qkv, g)
  # Parts 0 of the rows of a group of devices come first.
  groups, count = partition.parts.groups, partition.parts.count

  def in_rows(x):
    x = x.reshape(groups, count, 4 // groups, T // count, *x.shape[2:]).swapaxes(1, 2)
    x = np.asarray(x).reshape(4, T, *x.shape[4:])
    found = np.empty_like(x)
    np.put_along_axis(found, np.asarray(order)[:, :, None, None], x, axis=1)
    return found

  return tuple(map(in_rows, divided(*qkv, g)))


@functools.cache
def alone(heads, kv_heads):
  return run(None, heads, kv_heads, conformance.with_tiles(xla_blocked))


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "heads", "kv_heads"),
  [
    ((1, 2, 1), 4, 2),
    ((1, 8, 1), 4, 2),
    ((2, 2, 2), 4, 2),  # rows and heads, too.
    ((1, 2, 4), 8, 2),  # more devices than key/value heads.
  ],
)
def test_a_mesh_changes_nothing(sizes, heads, kv_heads):
  found = run(over(*sizes), heads, kv_heads, conformance.with_tiles(xla_blocked))
  for mine, right in zip(found, alone(heads, kv_heads), strict=True):
    np.testing.assert_allclose(mine, right, atol=2e-6)


def test_rows_that_cannot_be_divided_are_refused():
  with pytest.raises(ValueError, match="rows of 30 places cannot be divided over 4 devices"):
    over(2, 4).parts.dealt(orders()[:, :30], orders()[:, :30])
  with pytest.raises(ValueError, match="need a partition with a place_axis"):
    Attention().dealt(visible.visible(jnp.ones((1, 8), jnp.int32)), orders())


def test_a_partition_without_such_an_axis_has_no_parts():
  assert Partition(over(2, 4).mesh, row_axes=("fsdp",)).parts is None
  assert over(2, 4).parts == RowParts(over(2, 4).mesh, ("fsdp",), "context")
