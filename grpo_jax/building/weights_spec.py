"""Shapes, dtypes and shardings of the weights of a model, before they are read."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.learn import policy, sharding
from grpo_jax.models import leaves, parameter_reading, transformer
from grpo_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class WeightsSpec:
  """How the weights of the model are read.

  Attributes:
    described: Shapes, dtypes and shardings of the weights.
    dtype: Their dtypes; see `parameter_reading.Dtypes`.
  """

  described: Any
  dtype: Any

  @property
  def shardings(self) -> Any:
    """Shardings of the weights."""
    return policy.shardings_of(self.described)


def shardings_of(model: ModelConfig, mesh: Mesh) -> Any:
  """Returns the sharding of each parameter."""
  axes = transformer.logical_axes(model)
  return sharding.param_shardings(axes, mesh, shapes=leaves.tree(model))


def described_weights(model: ModelConfig, shardings: Any, *, dtype: Any = np.float32) -> Any:
  """Returns shapes, dtypes and shardings of all weights of a model."""

  def described(leaf: leaves.Leaf, sharding: Any) -> Any:
    return parameter_reading.described(leaf, sharding, dtype)

  return jax.tree.map(described, leaves.tree(model), shardings)
