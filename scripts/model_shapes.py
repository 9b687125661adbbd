"""The sizes of well-known models, as in their config.json on the hub, without files."""

import json
import pathlib
from typing import Any

_QWEN = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "max_position_embeddings": 32768}

SHAPES: dict[str, dict[str, Any]] = {
  "SmolLM2-135M": {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
  },
  "Qwen2.5-1.5B": {
    **_QWEN,
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
  },
  "Qwen2.5-7B": {
    **_QWEN,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
  },
  "Qwen3-8B": {
    "architectures": ["Qwen3ForCausalLM"],
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
  },
}


def read(name: str) -> dict[str, Any]:
  """Returns the config.json of a model's folder, or of a name in `SHAPES`.

  Raises:
    OSError: There is no such folder, or it has no config.json.
  """
  if name in SHAPES:
    return SHAPES[name]
  file = pathlib.Path(name) / "config.json"
  if not file.exists():
    raise FileNotFoundError(f"no {file}: name a folder, or one of {', '.join(SHAPES)}")
  return json.loads(file.read_text())
