"""Attention over a mesh of eight devices is that of one, and moves nothing between them."""

import functools
import re

import attention_conformance as conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import Attention, Partition, core, sharded, visible, xla_blocked
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = conformance.random_rows(5, rows=4, length=32)


def over(sizes):
  """Returns a partition over data, fsdp and tensor axes of these sizes."""
  devices = np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  mesh = Mesh(devices, ("data", "fsdp", "tensor"))
  return Partition(mesh, row_axes=("data", "fsdp"), head_axis="tensor")


def run(partition, heads, kv_heads, *, rows=ROWS, window=5):
  """Returns output and gradients, with tiles of 8 tokens prepared once as for several layers."""
  *qkv, g = conformance.inputs(rows, heads=heads, kv_heads=kv_heads)
  segments, branches, positions = map(jnp.asarray, rows)
  implementation = conformance.with_tiles(xla_blocked)
  if partition is not None:
    implementation = sharded.Sharded(implementation, partition)

  @jax.jit
  def both(q, k, v, g):
    seen = visible.visible(segments, branches, positions=positions, window=window)
    seen = seen._replace(tiles=implementation.prepare(seen, q.shape[-1]))
    attend = lambda *qkv: core.attend(implementation, core.Settings(), *qkv, seen)[0]
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)

  return both(*qkv, g)


@functools.cache
def alone(heads, kv_heads):
  return run(None, heads, kv_heads)


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "heads", "kv_heads"),
  [
    ((2, 2, 1), 4, 2),  # rows.
    ((1, 2, 2), 4, 2),  # rows and heads.
    ((1, 1, 4), 8, 2),  # more devices than key/value heads.
    ((1, 2, 4), 6, 3),  # heads that nothing divides.
    ((2, 4, 1), 4, 2),  # rows that nothing divides.
  ],
)
def test_a_mesh_changes_nothing(sizes, heads, kv_heads):
  for mine, right in zip(run(over(sizes), heads, kv_heads), alone(heads, kv_heads), strict=True):
    np.testing.assert_allclose(mine, right, atol=2e-6)


def test_heads_are_split_where_they_can_be():
  heads = over((1, 1, 4)).heads
  assert heads(8, 4) == ("tensor", "tensor") and heads(8, 2) == ("tensor", None)
  assert heads(6, 2) == (None, None) and heads(12, 3) == (None, None)
  assert over((2, 2, 1)).heads(4, 2) == (None, None)
  assert over((2, 2, 1)).rows(8) == ("data", "fsdp") and over((2, 2, 1)).rows(6) is None


@pytest.mark.long
def test_nothing_moves_between_devices():
  partition = over((1, 2, 2))
  put = lambda x, *spec: jax.device_put(x, NamedSharding(partition.mesh, PartitionSpec(*spec)))
  of_rows = ("data", "fsdp")
  q, k, v, g = (put(x, of_rows, None, "tensor") for x in conformance.inputs(ROWS))
  segments, branches, _ = (put(x, of_rows) for x in ROWS)

  @jax.jit
  def both(q, k, v, g, segments, branches):
    attend = Attention("xla_blocked", partition)
    seen = attend.prepared(visible.visible(segments, branches), width=6)
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, seen), q, k, v)
    return out, *pull(g)

  text = both.lower(q, k, v, g, segments, branches).compile().as_text()
  assert not re.search(r"all-(gather|reduce|to-all)|reduce-scatter|collective-permute", text)
