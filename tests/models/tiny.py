"""Tiny random models, ours and transformers', for the tests of this folder."""

import jax
import numpy as np
import torch
import transformers

SIZES = {
  "vocab_size": 61,
  "hidden_size": 24,
  "intermediate_size": 37,
  "num_hidden_layers": 3,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
}

CLASSES = {
  "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
  "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
  "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def hf_model(family, seed=0, **options):
  """Returns transformers' model with every weight random, norms and biases too."""
  config_class, model_class = CLASSES[family]
  model = model_class(config_class(**{**SIZES, **options})).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator) * 0.15
      weight.copy_(noise + 1.0 if "norm" in name else noise)
  return model


def relative_error(got, wanted):
  """Returns max |got - wanted| / max |wanted|."""
  got, wanted = np.asarray(got), np.asarray(wanted)
  return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def tokens(shape, vocab_size, seed=0):
  return jax.random.randint(jax.random.key(seed), shape, 0, vocab_size)
