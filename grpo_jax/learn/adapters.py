"""The composition of a policy that trains a LoRA adapter on a frozen base. Pure."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.learn import policy, sharding
from grpo_jax.models import lora, quantized
from grpo_jax.models.config import ModelConfig
from grpo_jax.types import Mean, Metrics


def composition(
  model: ModelConfig, mesh: Mesh, options: lora.AdapterOptions, *, seed: int
) -> policy.Composition:
  """Returns how a policy's weights are made of an adapter, which is trained, and a base.

  Args:
    model: Sizes of the model.
    mesh: Mesh of the devices.
    options: Options of the adapter.
    seed: Random seed of a new adapter.
  """
  adapter = _described(model, mesh, options)
  shardings = policy.shardings_of(adapter)
  make = lambda: lora.init(jax.random.key(seed), model, options)
  new = Program(jax.jit(make, out_shardings=shardings), name="new adapter")

  def split(params: Any, trained: Any) -> tuple[Any, Any]:
    return (new() if trained is None else trained), params

  return policy.Composition(
    split=split,
    described=lambda full: (adapter, full),
    full=lambda trainable, frozen: lora.join(frozen, trainable, options.scale),
    base=lambda frozen: frozen,
    jobs=lambda: [new.job()],
  )


class AdapterMonitor:
  """Measures how far an adapter has moved a policy from its base."""

  def __init__(self, scale: float):
    """Makes the programs; nothing is compiled.

    Args:
      scale: Factor s of A B.
    """
    self._of_adapter = Program(
      jax.jit(functools.partial(squared_norm, scale=scale)), name="norm of the adapter"
    )
    self._of_base = Program(jax.jit(_squared_norm_of_base), name="norm of the base")
    self._base: float | None = None  # it never changes.

  def jobs(self, weights: policy.Composed) -> list[CompileJob]:
    """Returns the compilations, for weights of these shapes."""
    of_base = self._of_base.job(_adapted(weights))
    return [self._of_adapter.job(weights.trainable), of_base]

  def __call__(self, weights: policy.Composed) -> Metrics:
    """Returns train/adapter_norm and lora/relative_change."""
    norm = math.sqrt(float(self._of_adapter(weights.trainable)))
    if self._base is None:
      self._base = math.sqrt(float(self._of_base(_adapted(weights))))
    relative = norm / self._base if self._base else float("nan")
    return {"train/adapter_norm": Mean(norm, 1.0), "lora/relative_change": Mean(relative, 1.0)}


def squared_norm(adapter: Any, *, scale: float) -> Array:
  """Returns ‖s A B‖² over all kernels as s² tr((AᵀA)(B Bᵀ)): no product of the kernel's size.

  Args:
    adapter: Adapter; see `lora`.
    scale: Factor s.
  """
  exact = jax.lax.Precision.HIGHEST
  total = jnp.float32(0)
  for kernel, parts in adapter.items():
    a, b = adapter[lora.holder(kernel, "a")]["a"], parts["b"]
    inner = jnp.einsum("...ir,...is->...rs", a, a, precision=exact)
    outer = jnp.einsum("...ro,...so->...rs", b, b, precision=exact)
    total += jnp.sum(inner * outer)
  return scale**2 * jnp.maximum(total, 0.0)  # rounding may make a norm of 0 negative.


def _adapted(weights: policy.Composed) -> dict[str, Any]:
  """Returns the base's kernels with an adapter."""
  return {name: weights.frozen["layers"][name] for name in weights.trainable}


def _squared_norm_of_base(kernels: dict[str, Any]) -> Array:
  """Returns ‖W‖² over kernels, a layer at a time: never a copy of all in float32."""

  def added(total: Array, kernel: Any) -> tuple[Array, None]:
    values = quantized.of_layer(kernel, jnp.float32)
    return total + jnp.sum(jnp.square(values)), None

  sums = [jax.lax.scan(added, jnp.float32(0), kernel)[0] for kernel in kernels.values()]
  return sum(sums, start=jnp.float32(0))


def read_dtypes(options: lora.AdapterOptions) -> dict[str, Any]:
  """Returns the dtypes of the base by kinds of leaves, as `loading.load` takes them.

  With a quantised base, embedding and head are bfloat16. Norms, biases and routers are always
  float32.
  """
  form = quantized.FORMATS.get(options.base_dtype)
  dtype = jnp.dtype(options.base_dtype if form is None else jnp.bfloat16)
  return {"kernel": form or dtype, "embedding": dtype, "head": dtype, "experts": dtype}


def _described(model: ModelConfig, mesh: Mesh, options: lora.AdapterOptions) -> Any:
  """Returns shapes, dtypes and shardings of the adapter."""
  tree = lora.tree(model, options)
  axes = jax.tree.map(lambda leaf: leaf.axes, tree)
  placed = sharding.param_shardings(axes, mesh, shapes=tree)
  describe = lambda leaf, where: jax.ShapeDtypeStruct(
    leaf.shape, np.dtype(jnp.float32), sharding=where
  )
  return jax.tree.map(describe, tree, placed)
