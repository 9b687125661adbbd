"""The composition of a policy that trains a LoRA adapter on a frozen base. Pure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.compilation.programs import Program
from grpo_jax.learn import policy, sharding
from grpo_jax.models import lora, quantized
from grpo_jax.models.config import ModelConfig


def composition(
  model: ModelConfig, mesh: Mesh, options: lora.Options, *, seed: int
) -> policy.Composition:
  """Returns how the weights of a policy are made of an adapter, which is trained, and a base.

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


def read_dtypes(options: lora.Options) -> dict[str, Any]:
  """Returns the dtypes of the base by kinds of leaves, as `loading.load` takes them.

  With a quantised base, embedding and head are bfloat16. Norms and biases are always float32.
  """
  form = quantized.FORMATS.get(options.base_dtype)
  dtype = jnp.dtype(options.base_dtype if form is None else jnp.bfloat16)
  return {"kernel": form or dtype, "embedding": dtype, "head": dtype}


def _described(model: ModelConfig, mesh: Mesh, options: lora.Options) -> Any:
  """Returns shapes, dtypes and shardings of the adapter."""
  tree = lora.tree(model, options)
  axes = jax.tree.map(lambda leaf: leaf.axes, tree)
  placed = sharding.param_shardings(axes, mesh, shapes=tree)
  describe = lambda leaf, where: jax.ShapeDtypeStruct(
    leaf.shape, np.dtype(jnp.float32), sharding=where
  )
  return jax.tree.map(describe, tree, placed)
