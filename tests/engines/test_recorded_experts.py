"""The embedded sampler records the experts that it chose, and the trainer can go the same way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.learn import sharding
from grpo_jax.models import transformer
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import FLOAT32
from tests.engines import tiny, updates

CONFIG = tiny.config("qwen3", num_layers=3, mixture=Mixture(8, 2, width=24, normalised=True))
pytestmark = pytest.mark.long

PROMPTS = [[5, 9, 2, 33, 7, 12, 3], [4], [40, 41]]


@functools.partial(jax.jit, static_argnums=0)
def outputs(config, tree, ids, experts=None):
  """Logprobs of the next token [T V], and the experts of all tokens [T L k], as trained."""
  ones, positions = jnp.ones_like(ids)[None], jnp.arange(len(ids))[None]
  experts = None if experts is None else experts[None]
  found = transformer.outputs(tree, config, ids[None], positions, ones, experts=experts)
  head, layout = transformer.head(tree, config)
  logits = FLOAT32.contract("td,dv->tv", found.hidden[0], head.T if layout == "vd" else head)
  chosen = jnp.moveaxis(found.extras["experts"][:, 0], 0, 1) if found.extras else None
  return jax.nn.log_softmax(logits, axis=-1), chosen


def record_of(generation):
  return np.concatenate([generation.prompt_experts, generation.experts])


def trained(config, tree, prompt, generation, experts=None):
  """Logprobs of the sampled tokens, and all experts, as the trainer has them."""
  ids = np.concatenate([prompt, generation.token_ids]).astype(np.int32)
  room = -len(ids) % 32  # of one length, which is compiled.
  if experts is not None:
    experts = np.pad(experts, ((0, room), (0, 0), (0, 0)), constant_values=-1)
  logprobs, chosen = outputs(config, tree, np.pad(ids, (0, room)), experts)
  own = np.asarray(logprobs)[len(prompt) - 1 : len(ids) - 1]
  chosen = None if chosen is None else np.asarray(chosen)[: len(ids)]
  return tiny.of_tokens(own, generation.token_ids), chosen


@pytest.mark.parametrize("form", ["ring", "rows"])
def test_a_record_is_what_the_tokens_went_through(form):
  requests = tiny.groups(PROMPTS, 3, max_tokens=10, stop_ids=(8,))
  with tiny.sampler(CONFIG, form=form, record_experts=True) as engine:
    found = tiny.run(engine, requests)
  for request in requests:
    generation, tokens = found[request.request_id], len(found[request.request_id].token_ids)
    assert generation.prompt_experts.shape == (len(request.prompt_ids), 3, 2)
    assert generation.experts.shape == (tokens, 3, 2) and generation.experts.dtype == np.int8
    assert (generation.experts[-1] == -1).all()
    logprobs, chosen = trained(CONFIG, tiny.params(CONFIG), request.prompt_ids, generation)
    np.testing.assert_array_equal(record_of(generation)[:-1], chosen[:-1])
    np.testing.assert_allclose(generation.logprobs, logprobs, atol=2e-5)
  first = found["0.0"].prompt_experts
  assert found["0.1"].prompt_experts is first  # a group has one.


def test_experts_are_those_of_the_weights_that_sampled_the_next_token():
  requests = tiny.groups([[5, 9, 2, 33, 7, 12, 3], [4]], 3, max_tokens=30)
  trees = [tiny.params(CONFIG, seed) for seed in range(3)]
  with tiny.sampler(CONFIG, version=0, max_rows=4, record_experts=True) as engine:
    found = updates.run(engine, requests, trees[1:], (1, 4))
  for request in requests:
    generation = found[request.request_id]
    versions = generation.weight_versions
    of_version = [trained(CONFIG, tree, request.prompt_ids, generation)[1] for tree in trees]
    of_tokens = np.concatenate([np.full(len(request.prompt_ids) - 1, versions[0]), versions])
    wanted = np.stack(of_version)[of_tokens, np.arange(len(of_tokens))]
    np.testing.assert_array_equal(record_of(generation)[:-1], wanted)
  seen = [set(found[request.request_id].weight_versions.tolist()) for request in requests]
  assert {0, 1, 2} in seen and any(0 not in versions for versions in seen)  # one began later.


def mismatch(config, **settings) -> dict[str, float]:
  """Mean |logprob of the sampler - of the trainer| of all sampled tokens, by what is replayed."""
  tree, requests = tiny.params(config), tiny.groups(PROMPTS * 2, 6, max_tokens=24)
  with tiny.sampler(config, record_experts=True, max_rows=36, **settings) as engine:
    found = tiny.run(engine, requests)
  differences = {"own": [], "replayed": []}
  for request in requests:
    generation = found[request.request_id]
    assert (generation.experts is None) == (config.mixture is None)  # a dense model has none.
    for name, values in differences.items():
      is_replayed = config.mixture is not None and name == "replayed"
      experts = record_of(generation) if is_replayed else None
      logprobs, _ = trained(config, tree, request.prompt_ids, generation, experts)
      values.append(np.abs(logprobs - generation.logprobs))
  return {name: float(np.concatenate(values).mean()) for name, values in differences.items()}


def test_with_replay_a_mixture_is_as_close_as_a_dense_model():
  dense = tiny.config("qwen3", num_layers=3, intermediate_size=48)
  settings = {"compute_dtype": jnp.bfloat16}
  of_dense, of_mixture = mismatch(dense, **settings), mismatch(CONFIG, **settings)
  assert of_mixture["replayed"] < 1.5 * of_dense["own"]
  assert of_mixture["own"] > 2 * of_mixture["replayed"]


def test_on_a_mesh_the_record_is_that_of_one_device():
  requests = tiny.groups(PROMPTS, 3, max_tokens=6)
  mesh = sharding.make_mesh(data=2, fsdp=1, expert=2, tensor=2)
  tree = tiny.params(CONFIG)
  shardings = sharding.param_shardings(transformer.logical_axes(CONFIG), mesh, shapes=tree)
  found = []
  for params in (tree, jax.device_put(tree, shardings)):
    with tiny.sampler(CONFIG, record_experts=True) as engine:
      engine.load_weights(params, version=2)
      found.append(tiny.run(engine, requests))
  for request in requests:
    one, many = (generations[request.request_id] for generations in found)
    np.testing.assert_array_equal(one.token_ids, many.token_ids)
    np.testing.assert_array_equal(record_of(one), record_of(many))
