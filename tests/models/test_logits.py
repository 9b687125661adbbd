"""Our logits against transformers', float32: at most 2e-4 of the largest logit apart."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.products import Products
from tests.models import tiny

LLAMA3_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
SLIDING = "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
CASES = {
  "llama": ("llama", {}),
  "llama-tied": ("llama", {"tie_word_embeddings": True}),
  "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
  "llama-mha": ("llama", {"num_key_value_heads": 6}),
  "llama-mqa-odd": ("llama", {"num_key_value_heads": 1, "hidden_size": 30, "head_dim": 14}),
  "llama-theta": ("llama", {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}),
  "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
  "llama-linear-rope": (
    "llama",
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}},
  ),
  "llama-eps": ("llama", {"rms_norm_eps": 0.05}),
  "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
  "qwen2": ("qwen2", {}),
  "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
  "qwen3": ("qwen3", {"head_dim": 10}),
  "qwen3-tied-biases": (
    "qwen3",
    {"head_dim": 6, "tie_word_embeddings": True, "attention_bias": True},
  ),
  "qwen2-late-windows": ("qwen2", {**WINDOW, "num_hidden_layers": 3, "max_window_layers": 1}),
  "qwen2-all-windows": ("qwen2", {**WINDOW, "max_window_layers": 0}),
  "qwen3-mixed-windows": (
    "qwen3",
    {**WINDOW, "num_hidden_layers": 3, "layer_types": [SLIDING, "full_attention", SLIDING]},
  ),
  "qwen2-gelu": ("qwen2", {"hidden_act": "gelu_pytorch_tanh"}),
  "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
  "smollm3-windows": (
    "smollm3",
    {**WINDOW, "pad_token_id": 0, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0]},
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, tmp_path):
  family, options = CASES[case]
  model = tiny.hf_model(family, **options)
  loaded = tiny.saved(model, tmp_path)
  tokens = tiny.tokens((2, 53))
  wanted = tiny.hf_logits(model, tokens)
  got = tiny.logits(loaded.params, loaded.config, *tiny.plain(tokens))
  assert tiny.relative_error(got, wanted) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_padded_and_packed_rows_have_the_logits_of_sequences_alone(family, tmp_path):
  model = tiny.hf_model(family)
  loaded = tiny.saved(model, tmp_path)
  first, second = tiny.tokens((1, 11), seed=1), tiny.tokens((1, 17), seed=2)
  pad = np.zeros((1, 3), int)
  # Padding on the left, between and on the right; two segments in one row.
  row = np.concatenate([pad, first, pad, second, pad], axis=1)
  segments = np.concatenate([pad, pad[:, :1] + first * 0 + 1, pad, second * 0 + 2, pad], axis=1)
  positions = np.concatenate([pad, np.arange(11)[None], pad, np.arange(17)[None], pad], axis=1)
  arrays = [jnp.asarray(x) for x in (row, positions, segments)]
  got = tiny.logits(loaded.params, loaded.config, *arrays)
  assert tiny.relative_error(got[:, 3:14], tiny.hf_logits(model, first)) < 1e-5
  assert tiny.relative_error(got[:, 17:34], tiny.hf_logits(model, second)) < 1e-5


@pytest.mark.long
def test_bfloat16_compute_stays_near_float32(tmp_path):
  model = tiny.hf_model("qwen2")
  loaded = tiny.saved(model, tmp_path)
  inputs = tiny.plain(tiny.tokens((2, 20)))
  exact = tiny.logits(loaded.params, loaded.config, *inputs)
  rough = tiny.logits(loaded.params, loaded.config, *inputs, products=Products(jnp.bfloat16))
  # bfloat16 has 8 bits: rounding of 2⁻⁹ a factor, over a few layers; equality would mean that
  # nothing was rounded.
  assert 1e-4 < tiny.relative_error(rough, exact) < 0.03
