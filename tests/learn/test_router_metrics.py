"""The balance of experts, over tokens and without padding."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.learn import token_scores
from grpo_jax.metrics import merge, to_floats


def test_balance_is_that_of_the_tokens():
  segment_ids = jnp.asarray([[1, 1, 2, 0]])
  # Layer 0: each of 6 experts once. Layer 1: all tokens have the same two. Padding has others.
  experts = jnp.asarray([[[[0, 1], [2, 3], [4, 5], [5, 5]]], [[[0, 4], [4, 0], [0, 4], [1, 2]]]])
  found = token_scores.balance_metrics(experts, segment_ids, 6)
  values = to_floats(merge([found]))
  np.testing.assert_allclose(values["router/largest_load"], (1 + 3) / 2, rtol=1e-6)
  entropy = (1 + np.log(2) / np.log(6)) / 2
  np.testing.assert_allclose(values["router/load_entropy"], entropy, rtol=1e-6)

  nothing = token_scores.balance_metrics(experts, segment_ids * 0, 6)  # a microbatch of padding.
  again = to_floats(merge([found, nothing]))
  np.testing.assert_allclose(again["router/largest_load"], values["router/largest_load"], rtol=1e-6)


def test_balance_takes_the_memory_of_one_layer():
  """Of Qwen3-30B-A3B and 16,384 tokens the choices of all layers, one-hot, are 3 GiB."""
  experts = jax.ShapeDtypeStruct((48, 16, 1024, 8), jnp.int32)
  segment_ids = jax.ShapeDtypeStruct((16, 1024), jnp.int32)
  lowered = jax.jit(token_scores.balance_metrics, static_argnums=2).lower(experts, segment_ids, 128)
  memory = lowered.compile().memory_analysis()
  assert memory is not None and memory.temp_size_in_bytes < 100 << 20
