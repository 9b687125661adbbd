"""Tiny random models, ours and transformers', for the tests of this folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from grpo_jax import models
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import LayerKind, ModelConfig, Rope
from tests.models import families
from tests.models.families import SIZES

# Options of `config` for Gemma 3: what its config.json describes.
GEMMA3 = {
  "family": "gemma3_text",
  "qk_norm": True,
  "rope_theta": 50.0,
  "further_ropes": (Rope(9.0),),
  "layer_kinds": (LayerKind(5, 1), LayerKind(), LayerKind(5, 1)),
  "activation": "gelu_tanh",
  "norm_offset": 1.0,
  "post_norms": True,
  "embedding_scale": 24**0.5,
  "query_scalar": 21.0,
}


def hf_model(family, seed=0, **options):
  """Returns transformers' model with every weight random, norms and biases too."""
  of = families.CLASSES[family]
  model = of.model(of.config(**{**SIZES, **options})).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator) * 0.15
      weight.copy_(noise + 1.0 if "norm" in name else noise)
  return model


def hf_logits(model, tokens):
  """Returns transformers' logits of unpadded rows."""
  with torch.no_grad():
    return model(torch.tensor(np.array(tokens))).logits.numpy()


def saved(model, directory, **options):
  """Writes transformers' model as a folder, reads it with ours."""
  model.save_pretrained(directory, **options)
  return models.load(directory)


def config(**options):
  """Returns a small config of ours."""
  sizes = {
    "family": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "tie_embeddings": True,
  }
  return ModelConfig(**{**sizes, **options})


def random_params(config, seed=0, scale=0.15):
  """Returns parameters that are random everywhere, norms (around 1) and biases too."""
  rng = np.random.default_rng(seed)

  def draw(leaf):
    values = rng.normal(size=leaf.shape) * scale + (leaf.kind == "norm")
    return jnp.asarray(values.astype(np.float32))

  return jax.tree.map(draw, leaves.tree(config))


def plain(tokens, segment_ids=None):
  """Returns tokens, positions and segment_ids of rows that hold one sequence each."""
  tokens = jnp.asarray(tokens)
  segment_ids = jnp.ones_like(tokens) if segment_ids is None else jnp.asarray(segment_ids)
  positions = jnp.maximum(jnp.cumsum(segment_ids != 0, axis=1) - 1, 0)
  return tokens, positions, segment_ids


def logits(params, config, *inputs, **settings):
  """Returns our logits; inputs as `Transformer` takes them."""
  return _logits(config, tuple(settings.items()))(params, *inputs)


@functools.cache
def _logits(config, settings):
  def run(params, *inputs):
    hidden = transformer.Transformer(config, **dict(settings)).apply({"params": params}, *inputs)
    head, layout = transformer.head(params, config)
    return hidden @ (head.T if layout == "vd" else head)

  return jit(run)


def tokens(shape, seed=0, vocab_size=61):
  return np.random.default_rng(seed).integers(0, vocab_size, shape)


def jit(function, **options):
  """Compiles with little optimisation: three times quicker, and as right."""
  return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def relative_error(got, wanted):
  """Returns max |got - wanted| / max |wanted|."""
  got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
  return float(np.abs(got - wanted).max() / np.abs(wanted).max())
