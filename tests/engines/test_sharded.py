"""The embedded sampler on parameters that are split over eight devices."""

import jax
import numpy as np
import pytest

from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import transformer
from tests.engines import tiny

MESHES = [
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"data": 1, "fsdp": 2, "tensor": 4},  # four parts of two key/value heads: kept whole.
]


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape.values())))
def test_split_parameters_sample_the_tokens_of_one_device(shape):
  model_config = tiny.config(vocab_size=64)
  tree = tiny.params(model_config)
  mesh = sharding.make_mesh(**shape)
  placement = sharding.param_shardings(transformer.logical_axes(model_config), mesh, shapes=tree)
  split = JaxSampler(model_config, max_rows=8, chunk_tokens=4)
  split.load_weights(jax.device_put(tree, placement), version=1)
  whole = JaxSampler(model_config, max_rows=8, chunk_tokens=4)
  whole.load_weights(tree, version=1)
  requests = tiny.groups([[1, 2, 3], [5, 6, 7, 8]], 4, stop_ids=(11,), max_tokens=20)
  wanted, got = tiny.run(whole, requests), tiny.run(split, requests)
  for name, generation in wanted.items():
    assert got[name].token_ids.tolist() == generation.token_ids.tolist()
    np.testing.assert_allclose(got[name].logprobs, generation.logprobs, atol=1e-5)
