"""What the compiler makes of the gradients of products on CPUs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.models import barriers, layers
from grpo_jax.models.products import Products
from tests.models import tiny

ARITHMETIC = re.compile(r" (?:multiply|add|subtract|divide|negate|exponential|logistic)\(")


def fusions(text):
  """Returns the bodies of the fused computations of a compiled program."""
  return re.findall(r"\n%fused_computation.*?\n}", text, re.DOTALL)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU backend")
@pytest.mark.parametrize("batch", [(4, 16), (1, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_gate_is_computed_once_for_all_products_that_read_it(dtype, batch):
  shapes = {"gate": (32, 96), "up": (32, 96), "down": (96, 32)}
  params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  settings: dict[str, Any] = {"config": tiny.config()}
  settings["products"] = Products(jnp.dtype(dtype), jnp.float32)
  total = lambda params, x: jnp.sin(layers.mlp(params, x, **settings)).sum()
  x = jax.ShapeDtypeStruct((*batch, 32), jnp.float32)
  compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, x).compile()
  # The derivative of silu takes seven operations; no other fusion has so many.
  large = [body for body in fusions(compiled.as_text()) if len(ARITHMETIC.findall(body)) >= 6]
  assert len(large) == 1


def test_a_settled_array_is_a_barrier_to_fusion_on_cpus_alone():
  def text(platform):
    traced = jax.jit(lambda x: barriers.materialize(2 * x)).trace(jnp.ones(3))
    return traced.lower(lowering_platforms=(platform,)).as_text()

  assert "optimization_barrier" in text("cpu")
  assert "optimization_barrier" not in text("tpu")
  assert "optimization_barrier" not in text("cuda")
