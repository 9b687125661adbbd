"""Tiny random models and requests, for the tests of this folder."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.implementations import Chip, assumed_chip

from grpo_jax.engines.base import GenerationRequest, SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.models import transformer
from grpo_jax.models.config import LayerKind, ModelConfig, Rope, RopeScaling
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import FLOAT32

VOCABULARY = 61

FAMILIES = {
  "llama": {"tie_embeddings": True},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True, "tie_embeddings": True},
  "gemma3_text": {
    "qk_norm": True,
    "tie_embeddings": True,
    "further_ropes": (Rope(77.0),),
    "layer_kinds": (LayerKind(5, 1), LayerKind()),
    "activation": "gelu_tanh",
    "norm_offset": 1.0,
    "post_norms": True,
    "embedding_scale": 32**0.5,
    "query_scalar": 21.0,
  },
  "qwen2_moe": {"qkv_bias": True, "mixture": Mixture(4, 2, 12, shared_width=20)},
  "qwen3_moe": {"qk_norm": True, "mixture": Mixture(8, 3, 12, normalised=True)},
  "mistral": {"layer_kinds": (LayerKind(5),) * 2},
  "ministral": {"layer_kinds": (LayerKind(5), LayerKind())},
  "olmo3": {
    "wide_qk_norm": True,
    "pre_norms": False,
    "post_norms": True,
    "rope_scaling": RopeScaling("yarn", 4.0, original_max_position_embeddings=16),
    "further_ropes": (Rope(10000.0),),
    "layer_kinds": (LayerKind(6, 1), LayerKind()),
  },
  "seed_oss": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
}


def config(family="llama", **options):
  sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
  }
  return ModelConfig(family=family, **{**sizes, **FAMILIES.get(family, {}), **options})


@functools.cache
def params(model_config, seed=0):
  """Returns parameters with every leaf random, and large enough that tokens matter."""
  tree = transformer.init(jax.random.key(seed), model_config)
  leaves, structure = jax.tree.flatten(tree)
  noise = [
    jax.random.normal(jax.random.fold_in(jax.random.key(seed + 1), i), leaf.shape) * 0.2
    for i, leaf in enumerate(leaves)
  ]
  return jax.tree.unflatten(structure, [x + n for x, n in zip(leaves, noise, strict=True)])


# A chip of each form of the sampler's cache.
CHIPS = {"ring": Chip("cpu", "cpu", ""), "rows": Chip("gpu", "a test's", "")}


def sampler(model_config=None, *, version=1, seed=0, form="ring", **settings):
  """Returns a sampler with random weights, and the cache of CPUs or that of accelerators."""
  model_config = model_config or config()
  with assumed_chip(CHIPS[form]):
    engine = JaxSampler(model_config, **{"max_rows": 8, "chunk_tokens": 4, **settings})
  engine.load_weights(params(model_config, seed), version=version)
  return engine


def request(name, prompt, *, seed=0, **sampling):
  settings = SamplingParams(**{"max_tokens": 12, **sampling})
  return GenerationRequest(str(name), np.asarray(prompt, np.int32), settings, seed)


def groups(prompts, size, **sampling):
  """Returns `size` requests for each prompt, named "prompt.attempt", each with its own seed."""
  return [
    request(f"{p}.{g}", ids, seed=1000 * p + g, **sampling)
    for p, ids in enumerate(prompts)
    for g in range(size)
  ]


def run(engine, requests, **options):
  """Returns the generations of one call, by the request's id."""

  async def collect():
    return {g.request_id: g async for g in engine.generate(requests, **options)}

  return asyncio.run(collect())


def model_logprobs(model_config, tree, prompt, completion, *, temperature=1.0, products=FLOAT32):
  """Returns the log-softmax of every completion token, [n V], as the trainer computes it."""
  logits = model_logits(model_config, tree, prompt, completion, products=products)
  return np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))


def model_logits(model_config, tree, prompt, completion, *, products=FLOAT32):
  """Returns the logits that predict every completion token, [n V]."""
  ids = np.concatenate([prompt, completion]).astype(np.int32)
  padding = -len(ids) % 64  # of few lengths, each of which is compiled.
  segment_ids = np.pad(np.ones_like(ids), (0, padding))
  logits = _logits(model_config, tree, np.pad(ids, (0, padding))[None], segment_ids[None], products)
  return np.asarray(logits)[len(prompt) - 1 : len(prompt) - 1 + len(completion)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _logits(model_config, tree, ids, segment_ids, products):
  module = transformer.Transformer(model_config, products)
  positions = jnp.arange(ids.shape[1])[None]
  hidden = module.apply({"params": tree}, ids, positions, segment_ids)
  head, layout = transformer.head(tree, model_config)
  head = head.T if layout == "vd" else head
  return products.contract("td,dv->tv", hidden[0], head)


def of_tokens(logprobs, tokens):
  return logprobs[np.arange(len(tokens)), tokens]
