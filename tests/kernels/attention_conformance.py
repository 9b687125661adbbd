"""What every implementation of attention is held to: slow loops in float64, and tolerances."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import core, visible
from jax.extend import core as extend_core

NAMES = ("reference", "xla_blocked")  # those that run on every platform.

# Relative to the Euclidean norm.
TOLERANCES = {"float32": 2e-6, "bfloat16": 8e-3}  # bfloat16: weights and their cotangents: 2⁻⁹.


class Row(NamedTuple):
  """Packed rows, as NumPy arrays [B T]."""

  segment_ids: np.ndarray
  branch_ids: np.ndarray
  positions: np.ndarray


class Substitute(NamedTuple):
  """A substitute for an implementation."""

  prepare: Any
  forward: Any
  backward: Any


def with_tiles(module, tile=8):
  """Returns a substitute for the blocked module that has shorter tiles."""
  prepare = functools.partial(module.prepare, tile=tile)
  return Substitute(prepare, module.forward, module.backward)


def random_rows(seed, *, rows, length):
  """Returns rows of random groups: empty completions, prompts of one token, padding."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(rows):
    groups, free = [], length - int(rng.integers(0, 4))
    while free > 0:
      sizes = [int(rng.integers(1, 12)), *rng.integers(0, 9, size=rng.integers(0, 4)).tolist()]
      while sum(sizes) > free:
        sizes.pop()
      if not sizes:
        break
      groups.append(sizes)
      free -= sum(sizes)
    made.append(packed(*groups, length=length))
  return Row(*(np.concatenate(x) for x in zip(*made, strict=True)))


def arrays(jaxpr):
  """Yields the types of all values in a program, those of inner programs included."""
  for equation in jaxpr.eqns:
    yield from (x.aval for x in equation.outvars if hasattr(x.aval, "size"))
    for inner in extend_core.jaxprs_in_params(equation.params):
      yield from arrays(inner)


def packed(*groups, length):
  """Returns one row of groups with padding on the right.

  Args:
    groups: (tokens of the prompt, tokens of its completions...) of each.
    length: Tokens of the row.
  """
  segments, branches, positions = [], [], []
  for number, (prompt, *completions) in enumerate(groups, start=1):
    for branch, count in enumerate((prompt, *completions)):
      start = prompt if branch else 0
      segments += [number] * count
      branches += [branch] * count
      positions += range(start, start + count)
  assert len(segments) <= length
  padded = lambda x: np.pad(np.asarray(x, np.int32), (0, length - len(x)))[None]
  return Row(padded(segments), padded(branches), padded(positions))


def sees(row, b, q, k, window=None):
  """Whether token q of row b attends to token k: the rule, in words of its own."""
  segment, branch, position = (x[b] for x in row)
  if segment[q] == 0 or segment[q] != segment[k] or k > q:
    return False
  if branch[k] not in (0, branch[q]):
    return False
  return window is None or position[k] > position[q] - window


def allowed(row, window=None):
  """Returns the rule as an array [B T T]."""
  batch, length = row.segment_ids.shape
  found = [
    [[sees(row, b, q, k, window) for k in range(length)] for q in range(length)]
    for b in range(batch)
  ]
  return np.array(found)


def inputs(row, *, heads=4, kv_heads=2, width=6, seed=0):
  """Returns random q, k, v and a cotangent for the rows."""
  rng = np.random.default_rng(seed)
  shape = row.segment_ids.shape
  sizes = (heads, kv_heads, kv_heads, heads)
  return [jnp.asarray(rng.normal(size=(*shape, n, width)), jnp.float32) for n in sizes]


def oracle(mask, q, k, v, g):
  """Returns output and gradients of Σ g·output in float64, by the closed forms."""
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  repeats, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
  out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
  for b, t, h in np.ndindex(*q.shape[:3]):
    seen, kv = np.flatnonzero(mask[b, t]), h // repeats
    if not len(seen):
      continue
    scores = k[b, seen, kv] @ q[b, t, h] * scale
    p = np.exp(scores - scores.max())
    p /= p.sum()
    out[b, t, h] = p @ v[b, seen, kv]
    dp = v[b, seen, kv] @ g[b, t, h]
    ds = p * (dp - p @ dp) * scale
    dq[b, t, h] = ds @ k[b, seen, kv]
    dk[b, seen, kv] += np.outer(ds, q[b, t, h])
    dv[b, seen, kv] += np.outer(p, g[b, t, h])
  return out, dq, dk, dv


def check(module, row, *, window=None, dtype="float32", seeing=visible, attending=core, **sizes):
  """Compares output and gradients of an implementation with float64.

  Args:
    module: The implementation: any object with its three functions.
    row: The rows.
    window: Number of tokens that a query sees.
    dtype: Dtype of the products' factors.
    seeing: Module that says who sees whom.
    attending: Module with the custom VJP.
    sizes: Sizes of `inputs`.
  """
  *qkv, g = inputs(row, **sizes)
  settings = core.Settings(core.Plain(dtype))

  def both(q, k, v, row):
    ids = row.segment_ids, row.branch_ids
    seen = seeing.visible(*ids, positions=row.positions, window=window)
    attend = lambda *qkv: attending.attend(module, settings, *qkv, seen)[0]
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)

  options = {"xla_backend_optimization_level": 0}
  got = jax.jit(both, compiler_options=options)(*qkv, Row(*(jnp.asarray(x) for x in row)))
  mask = allowed(row, window)
  for name, mine, right in zip(("out", "dq", "dk", "dv"), got, oracle(mask, *qkv, g), strict=True):
    assert mine.dtype == jnp.float32 and np.isfinite(mine).all()
    error, size = np.linalg.norm(np.asarray(mine, np.float64) - right), np.linalg.norm(right)
    # The absolute part is for a window of 1, where the gradient is 0 and rounding is not.
    assert error <= TOLERANCES[dtype] * size + 1e-5, f"{name}: {error} of {size}"
  nothing = ~mask.any(axis=-1)
  assert not np.asarray(got[0])[nothing].any() and not np.asarray(got[1])[nothing].any()
