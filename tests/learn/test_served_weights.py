"""What the trainer scores when it proves new weights: the weights as an engine rounds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.learn import served_weights
from grpo_jax.models import lora
from grpo_jax.models.products import LowRank
from tests.engines import proofs, tiny

CONFIG = tiny.config()
OPTIONS = lora.AdapterOptions(rank=2, alpha=4.0, targets=("q", "down"))


@pytest.fixture(scope="module")
def adapted():
  """Weights with an adapter."""
  return proofs.adapters(tiny.params(CONFIG), CONFIG, OPTIONS, scale=0.1, change=0.01)[0]


def test_merged_kernels_are_added_before_they_are_rounded(adapted):
  found = served_weights.rounded(adapted, jnp.bfloat16, is_merged=True)["layers"]
  for name, kernel in adapted["layers"].items():
    whole = lora.merged(kernel) if isinstance(kernel, LowRank) else kernel
    np.testing.assert_array_equal(found[name], whole.astype(jnp.bfloat16))


def test_an_adapter_beside_its_base_is_rounded_with_it(adapted):
  found = served_weights.rounded(adapted, jnp.bfloat16, is_merged=False)
  assert isinstance(found["layers"]["q"], LowRank)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(adapted), strict=True):
    np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))


@pytest.mark.long
def test_scores_are_those_of_rounded_weights_in_float32():
  params = tiny.params(CONFIG)
  held = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
  groups = [proofs.group_of(0.0, 1.0)]
  scored = proofs.scorer(CONFIG, jnp.bfloat16)(params, groups)
  exact = proofs.scorer(CONFIG, jnp.float32)
  np.testing.assert_array_equal(scored, exact(held, groups))
  assert np.abs(np.subtract(scored, exact(params, groups))).max() > 1e-4
