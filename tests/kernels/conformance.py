"""What every implementation of linear_logprobs is held to: float64 by closed forms, and tolerances.

`OPERATIONS` are the implementations as functions of the reference's signature; Pallas kernels run
in the interpreters that simulate their platform's copies and barriers. `KERNELS` are the modules
themselves, for tests of the two passes.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import core, linear_logprobs

# Absolute for values, relative in the Euclidean norm for gradients.
TOLERANCES = {
  "logprob": 2e-5,  # float32 rounding of logits of size 10 and of their sum.
  "entropy": 5e-5,  # the same, times log V.
  "gradient float32": 1e-5,
  "gradient bfloat16": 4e-3,  # ∂/∂logits is rounded to bf16 once: 2⁻⁹.
}

# Implementation → where its interpreter is, if it needs one.
INTERPRETERS = {
  "reference": None,
  "xla_chunked": None,
  "mosaic_gpu": ("jax.experimental.pallas.mosaic_gpu", "InterpretGPUParams"),
  "pallas_tpu": ("jax.experimental.pallas.tpu", "InterpretParams"),
}


def why_not(implementation: str) -> str | None:
  """Returns why an implementation cannot run on a CPU here, or None if it can."""
  if (place := INTERPRETERS[implementation]) is None:
    return None
  module, name = place
  if hasattr(importlib.import_module(module), name):
    return None
  return f"jax {jax.__version__} has no {module}.{name}: a simulator of barriers and copies"


def parametrised(*names: str) -> list:
  """Returns pytest parameters for implementations; those that cannot run here are skipped."""
  reasons = {name: why_not(name) for name in names}
  return [
    pytest.param(
      name, marks=[pytest.mark.skip(reason=reason)] if (reason := reasons[name]) else [], id=name
    )
    for name in names
  ]


ALL = parametrised("reference", "xla_chunked", "mosaic_gpu", "pallas_tpu")
TWO_PASSES = parametrised("xla_chunked", "mosaic_gpu", "pallas_tpu")
INTERPRETED = parametrised("mosaic_gpu", "pallas_tpu")


def module(name: str) -> ModuleType:
  """Returns the module of an implementation with two passes."""
  return importlib.import_module(f"grpo_kernels.linear_logprobs.{name}")


def interpreted(name: str) -> bool:
  """Whether an implementation runs in an interpreter here: slow, so few cases."""
  return INTERPRETERS[name] is not None


def operation(name: str, implementation: Any = None) -> Callable[..., Any]:
  """Returns an implementation as a function that runs on a CPU.

  Args:
    name: of `INTERPRETERS`.
    implementation: takes the place of the module of that name, such as one with a fault.
  """
  if implementation is None:
    return _operation(name)
  return functools.partial(core.entry(implementation), interpret=interpreted(name))


@functools.cache
def _operation(name: str) -> Callable[..., Any]:
  """Returns the implementation of a name, the same function each time: see `compiled`."""
  if not interpreted(name):
    return functools.partial(linear_logprobs, implementation=name)
  return functools.partial(core.entry(module(name)), interpret=True)


class Outcome(NamedTuple):
  """What an implementation computes, as float64; or what it should, exactly."""

  logprobs: np.ndarray  # [N]
  entropy: np.ndarray  # [N]
  d_hidden: np.ndarray  # [N D]
  d_head: np.ndarray  # as the head.


class Exact(NamedTuple):
  """The float64 outcome, with the sizes of the gradients before cancellation."""

  outcome: Outcome
  d_hidden_uncancelled: np.ndarray  # |S| |W|
  d_head_uncancelled: np.ndarray  # |Sᵀ| |h|


def oracle(hidden, head, targets, *, head_layout, temperature, g, g_entropy) -> Exact:
  """Returns logprobs, entropy and gradients in float64, by the closed forms."""
  h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
  w = w if head_layout == "vd" else w.T
  z = h @ w.T / temperature
  shifted = z - z.max(axis=-1, keepdims=True)
  logp = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
  p = np.exp(logp)
  entropy = -(p * logp).sum(axis=-1)
  onehot = np.asarray(targets)[:, None] == np.arange(w.shape[0])
  slope = g[:, None] * (onehot - p) - g_entropy[:, None] * p * (logp + entropy[:, None])
  slope /= temperature
  chosen = np.take_along_axis(logp, np.asarray(targets)[:, None], axis=-1)[:, 0]
  of_head, of_head_uncancelled = slope.T @ h, np.abs(slope).T @ np.abs(h)
  if head_layout == "dv":
    of_head, of_head_uncancelled = of_head.T, of_head_uncancelled.T
  return Exact(
    Outcome(chosen, entropy, slope @ w, of_head),
    np.abs(slope) @ np.abs(w),
    of_head_uncancelled,
  )


def random_case(n, d, v, *, dtype, head_layout="vd", scale=3.0, seed=0):
  """Returns random hidden [n d], head and targets; logits have a standard deviation of `scale`."""
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((n, d)) * scale / np.sqrt(d)
  head = rng.standard_normal((v, d) if head_layout == "vd" else (d, v))
  targets = rng.integers(0, v, n).astype(np.int32)
  of_dtype = lambda x: jnp.asarray(x.astype(np.float32).astype(jnp.dtype(dtype)))
  return of_dtype(hidden), of_dtype(head), jnp.asarray(targets)


def cotangents(n, seed=1):
  """Returns random cotangents of logprobs and entropy."""
  rng = np.random.default_rng(seed)
  return rng.standard_normal(n), rng.standard_normal(n)


@functools.cache
def compiled(operate, **settings) -> Callable[..., Any]:
  """Returns (hidden, head, targets, cotangents) → (outputs, gradients) of an operation, jitted.

  The same operation is compiled once for a shape. One with a fault is another function.
  """

  def outputs_and_gradients(hidden, head, targets, of_outputs):
    f = lambda h, w: operate(h, w, targets, return_entropy=True, **settings)
    outputs, pull = jax.vjp(f, hidden, head)
    return outputs, pull(of_outputs)

  return jax.jit(outputs_and_gradients)


def differentiate(operate, hidden, head, targets, g, g_entropy, **settings) -> Outcome:
  """Returns what an operation gives, entropy and both gradients included."""
  of_outputs = np.asarray(g, np.float32), np.asarray(g_entropy, np.float32)
  outputs, gradients = compiled(operate, **settings)(hidden, head, targets, of_outputs)
  assert [x.dtype for x in outputs] == [jnp.float32, jnp.float32]
  assert [x.dtype for x in gradients] == [hidden.dtype, head.dtype]
  return Outcome(*(np.asarray(x, np.float64) for x in (*outputs, *gradients)))


def assert_conforms(
  got: Outcome, exact: Exact, gradient_tolerance, *, value_scale=1.0, cancels=False
):
  """Fails where an outcome is further from float64 than the tolerances allow.

  Args:
    got: what an implementation computed.
    exact: the oracle's.
    gradient_tolerance: relative to the Euclidean norm of each gradient.
    value_scale: multiplies the tolerances of logprobs and entropy.
    cancels: gradients are measured by their sizes before cancellation.
  """
  want = exact.outcome
  atol = TOLERANCES["logprob"] * value_scale
  np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=atol)
  atol = TOLERANCES["entropy"] * value_scale
  np.testing.assert_allclose(got.entropy, want.entropy, rtol=0, atol=atol)
  pairs = (
    (got.d_hidden, want.d_hidden, exact.d_hidden_uncancelled),
    (got.d_head, want.d_head, exact.d_head_uncancelled),
  )
  for mine, right, uncancelled in pairs:
    size = np.linalg.norm(uncancelled if cancels else right)
    error = np.linalg.norm(mine - right)
    # The absolute part is for V = 1, where the gradient is 0 and rounding is not.
    assert error <= gradient_tolerance * size + 1e-5, f"{error} of {size}"


def check(operate, n, d, v, *, dtype, head_layout="vd", temperature=1.0, targets=None, seed=0):
  """Compares values and gradients of an operation on one random case with float64.

  Args:
    operate: an operation.
    n: tokens.
    d: width.
    v: vocabulary.
    dtype: of hidden and head.
    head_layout: as the operation's.
    temperature: as the operation's.
    targets: in place of random ones.
    seed: of the inputs.
  """
  hidden, head, chosen = random_case(n, d, v, dtype=dtype, head_layout=head_layout, seed=seed)
  chosen = chosen if targets is None else jnp.asarray(targets, jnp.int32)
  g, g_entropy = cotangents(n)
  settings = {"head_layout": head_layout, "temperature": temperature}
  got = differentiate(operate, hidden, head, chosen, g, g_entropy, **settings)
  exact = oracle(hidden, head, chosen, g=g, g_entropy=g_entropy, **settings)
  assert_conforms(got, exact, TOLERANCES[f"gradient {dtype}"])
