"""Keys and values in a dtype of their own: how they are stored, and what is sampled with them."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs.base
from grpo_jax.config import run_options
from grpo_jax.engines import given_tokens, sampler_inputs, stored_keys
from grpo_jax.models.config import LayerKind, Rope
from grpo_jax.models.products import FLOAT32, Products
from tests.engines import tiny, updates

# A window shorter than a prompt, a page and a block of columns.
CONFIG = tiny.config(
  "qwen2", layer_kinds=(LayerKind(20), LayerKind(None, 1)), further_ropes=(Rope(77.0),)
)


def options_of(cache_dtype, compute_dtype="float32"):
  products = Products(compute_dtype)
  return sampler_inputs.ProgramOptions(CONFIG, products, chunk=1, cache_dtype=cache_dtype)


def test_codes_and_scales_of_a_few_vectors():
  x = jnp.asarray([[1.0, -2.54, 0.009, 0.011], [0.0] * 4, [np.inf, 1.0, 1.0, 1.0]])
  found = stored_keys.stored(x, options_of("int8"))
  assert found.codes.dtype == jnp.int8 and found.scales.dtype == jnp.float32
  np.testing.assert_allclose(found.scales[:2, 0], [0.02, 0.0], rtol=1e-6)
  assert found.codes[:2].tolist() == [[50, -127, 0, 1], [0, 0, 0, 0]]
  read = stored_keys.read(found, options_of("int8"))
  np.testing.assert_allclose(read[0], [1.0, -2.54, 0.0, 0.02], rtol=1e-6)
  assert not read[1].any() and not jnp.isfinite(read[2]).all()


def test_a_float_cache_is_one_array_that_is_rounded_once():
  x = jnp.asarray([1.0, 1.001953125, 3e-9])
  plain, rounded = (stored_keys.stored(x, options_of(name)) for name in (None, "bfloat16"))
  assert plain.dtype == jnp.float32 and plain.tolist() == x.tolist()
  assert rounded.dtype == jnp.bfloat16
  assert stored_keys.read(rounded, options_of("bfloat16")).tolist()[:2] == [1.0, 1.0]
  with pytest.raises(ValueError, match="engine.cache_dtype must be one of .* got 'int4'"):
    options_of("int4")


@pytest.mark.parametrize(
  ("spec", "mix", "shape", "axis"),
  [
    ("rkme,rkce->rkmc", "rkmc,rkce->rkme", (2, 3, 5, 8), -1),
    ("bkme,bkec->bkmc", "bkmc,bkce->bkme", (2, 3, 5, 8), -2),
    ("bkme,bnkpe->bkmnp", "bkmnp,bnkpe->bkme", (2, 4, 3, 5, 8), -1),
  ],
)
def test_scales_of_scores_and_weights_are_those_of_keys_and_values(spec, mix, shape, axis):
  options, rng = options_of("int8"), np.random.default_rng(0)
  some = lambda *sizes: jnp.asarray(rng.normal(size=sizes).astype(np.float32))
  keys, values = (stored_keys.stored(some(*shape), options) for _ in range(2))
  last = lambda stored: jax.tree.map(lambda x: jnp.moveaxis(x, -1, axis), stored)
  asked = some(2, 3, 6, 8)
  read = lambda stored: stored_keys.read(stored, options)
  wanted = jnp.einsum(spec, asked, jnp.moveaxis(read(keys), -1, axis))
  found = stored_keys.scores(FLOAT32.contract, spec, asked, last(keys))
  np.testing.assert_allclose(found, wanted, atol=1e-5)
  wanted = jnp.einsum(mix, found, read(values))
  found = stored_keys.mixed(FLOAT32.contract, mix, found, values)
  np.testing.assert_allclose(found, wanted, atol=1e-4)


def requests_of():
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 61, length) for length in (1, 70)]
  return [
    tiny.request(f"{p}.{g}", prompt, seed=10 * p + g, max_tokens=30 + 25 * g)
    for p, prompt in enumerate(prompts)
    for g in range(4)
  ]


def differences(found, wanted):
  return np.abs(np.concatenate([x.logprobs - wanted[name] for name, x in found.items()]))


# Mean |sampler - trainer| in nats, at least and at most.
BOUNDS = {"bfloat16": (1e-3, 1e-2), "int8": (2e-3, 2e-2)}


def planned(cache_dtype, form):
  """Returns a sampler whose caches keep their sizes."""
  sizes = {"prompt_tokens": 80, "completion_tokens": 140, "group_size": 4}
  return tiny.sampler(CONFIG, form=form, version=0, cache_dtype=cache_dtype, **sizes)


def mismatch_of(found, requests, cache_dtype):
  """Returns the mean difference from the trainer, which is within the bounds."""
  wanted, tree = {}, tiny.params(CONFIG)
  for request in requests:
    ids = found[request.request_id].token_ids
    logprobs = tiny.model_logprobs(CONFIG, tree, request.prompt_ids, ids)
    wanted[request.request_id] = tiny.of_tokens(logprobs, ids)
  mean = differences(found, wanted).mean()
  low, high = BOUNDS[cache_dtype]
  assert low < mean < high
  return mean


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_a_cache_in_bfloat16_differs_from_a_trainer_in_float32_by_its_rounding(form):
  requests = requests_of()
  mismatch_of(tiny.run(planned("bfloat16", form), requests), requests, "bfloat16")


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_logprobs_are_those_of_the_codes_whatever_happens_to_them(form):
  """They differ from the trainer's by the rounding of codes, from each other by the order of sums.

  One sampler has caches that grow, and reads its tokens again under way, by the same weights; rows
  move when others end. The other one has caches of the planned sizes. Then the tokens are given.
  """
  requests, tree = requests_of(), tiny.params(CONFIG)
  growing = tiny.sampler(CONFIG, form=form, version=0, cache_dtype="int8")
  found = updates.run(growing, requests, [tree], (11,))
  assert growing.stats.recomputed_tokens > 0
  engine = planned("int8", form)
  wanted = tiny.run(engine, requests)
  for name, generation in wanted.items():
    assert found[name].token_ids.tolist() == generation.token_ids.tolist()
  order = differences(found, {name: x.logprobs for name, x in wanted.items()}).mean()
  mismatch = mismatch_of(found, requests, "int8")
  assert order < 0.02 * mismatch
  longest, scorer = requests[-1], given_tokens.GivenTokenScorer(engine, max_length=200)
  generation = found[longest.request_id]
  ids = np.concatenate([longest.prompt_ids, generation.token_ids]).astype(np.int32)
  scored = asyncio.run(scorer.score(ids, np.ones(len(ids) - 1, np.float32))).logprobs
  given = np.abs(scored[len(longest.prompt_ids) - 1 :] - generation.logprobs).mean()
  assert given < 0.02 * mismatch


def test_the_dtype_is_refused_for_other_engines():
  config = configs.base.get_config()
  config.engine.update({"name": "sglang", "cache_dtype": "int8"})
  config.engine.cache_gib = 2.0
  found = [x for x in run_options.validate(config) if "engine.cache" in x]
  assert "engine.cache_dtype='int8' is that of the embedded sampler" in found[0]
  assert "engine.cache_gib=2.0 is that" in found[1] and "--mem-fraction-static" in found[1]
