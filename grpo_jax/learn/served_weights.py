"""Logprobs in float32 of the weights that an engine has after a sync: the policy's, rounded. Pure.

An engine rounds the weights to its dtype once, and everything that it computes with them after
that. Only the first is the same in every engine, so it is what these programs do, too.
"""

from typing import Any

import jax
from grpo_kernels.attention import Attention
from jax.sharding import Mesh

from grpo_jax.compilation.programs import Program
from grpo_jax.learn import scoring, sharding, token_scores
from grpo_jax.models import lora, quantized
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.placement import attention_partition
from grpo_jax.models.products import LowRank, Products
from grpo_jax.types import Batch


def make_scorer(config: ModelConfig, mesh: Mesh, *, dtype: Any, is_merged: bool) -> Program:
  """Makes score(weights, batch) → logprobs at temperature 1; a `scoring.Scorer`.

  Args:
    config: Sizes of the model.
    mesh: Mesh of the devices.
    dtype: Dtype of the weights in the engine.
    is_merged: Whether the engine gets kernels with an adapter merged, before they are rounded.
  """
  logprobs = token_scores.make_logprobs(
    config,
    products=Products("float32", None, sharding.placement(mesh)),
    attention=Attention(None, attention_partition(mesh)),
    partition=sharding.head_partition(mesh),
  )

  def of_served(params: Any, batch: Batch, with_entropy: bool) -> Any:
    return logprobs(rounded(params, dtype, is_merged=is_merged), batch, with_entropy)

  return scoring.make_scorer(
    of_served, matmul_precision="float32", mesh=mesh, name="proof of new weights"
  )


def rounded(params: Any, dtype: Any, *, is_merged: bool) -> Any:
  """Returns full weights in the dtype of an engine.

  Args:
    params: Full weights; kernels may be `LowRank`, and their bases quantised.
    dtype: Dtype of the engine's weights.
    is_merged: Whether it gets all such kernels merged, and not only those of experts.
  """
  is_quantized = lambda x: isinstance(x, quantized.Quantized)
  always = lora.merged_always(params["layers"]).values()
  is_one = lambda x: isinstance(x, LowRank) and (is_merged or any(x is each for each in always))
  is_whole = lambda x: is_quantized(x) or is_one(x)

  def one(leaf: Any) -> Any:
    if isinstance(leaf, LowRank):
      return jax.lax.map(lambda kernel: lora.merged(kernel).astype(dtype), leaf)  # layer by layer.
    return leaf if is_quantized(leaf) else leaf.astype(dtype)

  return jax.tree.map(one, params, is_leaf=is_whole)
