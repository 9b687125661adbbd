"""Writes a tiny random model with a byte tokenizer, for dry runs and tests (I/O).

    python -m grpo_jax.models.tiny FOLDER [FAMILY] [reward_model]

Use the folder in place of any model (or reward model): any config then runs in seconds.
"""

import json
import math
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from grpo_jax.files import atomic
from grpo_jax.models import config as model_config
from grpo_jax.models import export, loading, safetensors, transformer
from grpo_jax.models.config import LayerKind, ModelConfig, Rope
from grpo_jax.models.mixture import Mixture

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OLMO = {"wide_qk_norm": True, "pre_norms": False, "post_norms": True}
FAMILIES: dict[str, dict[str, Any]] = {
  "gemma3_text": {
    "tie_embeddings": True,
    "qk_norm": True,
    "rope_theta": 1e6,
    "further_ropes": (Rope(1e4),),
    "layer_kinds": (LayerKind(64, 1), LayerKind()),
    "activation": "gelu_tanh",
    "norm_offset": 1.0,
    "post_norms": True,
  },
  "llama": {"tie_embeddings": True},
  "qwen2": {"tie_embeddings": True, "qkv_bias": True},
  "qwen3": {"tie_embeddings": True, "qk_norm": True},
  "qwen2_moe": {"qkv_bias": True, "mixture": Mixture(8, 2, 16, shared_width=24)},
  "qwen3_moe": {"qk_norm": True, "mixture": Mixture(8, 2, 16, normalised=True)},
  "smollm3": {"tie_embeddings": True, "layer_kinds": (LayerKind(), LayerKind(rope=None))},
  "mistral": {"layer_kinds": (LayerKind(16),) * 2},
  "ministral": {"layer_kinds": (LayerKind(16), LayerKind())},
  "olmo2": _OLMO,
  "olmo3": {**_OLMO, "rope_theta": 500000.0, "layer_kinds": (LayerKind(16), LayerKind())},
  "seed_oss": {"qkv_bias": True},
}

_SCALED = ("gemma3_text",)  # families whose embeddings are multiplied by √hidden_size.


def write(
  directory: str | pathlib.Path, *, family: str = "llama", seed: int = 0, hidden_size: int = 32
) -> pathlib.Path:
  """Writes a Hugging Face folder: 2 layers, 256 bytes and 3 special tokens.

  Args:
    directory: Folder to write.
    family: Key of `FAMILIES`.
    seed: Random seed of the weights.
    hidden_size: Width of the model; a multiple of 8.

  Returns:
    The folder.
  """
  config = _config(family, hidden_size)
  params = transformer.init(jax.random.key(seed), config)
  folder = export.to_huggingface(params, config, directory)
  write_tokenizer(folder)
  return folder


def write_reward_model(
  directory: str | pathlib.Path, *, family: str = "llama", seed: int = 0, hidden_size: int = 32
) -> pathlib.Path:
  """Writes the same as a sequence classifier of one label, whose score matrix is random.

  Args:
    directory: Folder to write.
    family: Key of `FAMILIES`.
    seed: Random seed of the weights.
    hidden_size: Width of the model; a multiple of 8.

  Returns:
    The folder.
  """
  config = _config(family, hidden_size)
  body, head = jax.random.split(jax.random.key(seed))
  params = transformer.init(body, config)
  score = np.asarray(jax.random.normal(head, (1, hidden_size)))
  entry = safetensors.ToWrite(loading.SCORE_NAME, score.shape, score.dtype, lambda: score)
  (architecture,) = (
    name for name, of in model_config.CLASSIFIERS.items() if of.MODEL_TYPE == family
  )
  labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
  settings = {**model_config.to_hf(config), **labels, "architectures": [architecture]}
  settings["pad_token_id"] = 256 + SPECIAL.index("<pad>")

  def fill(folder: pathlib.Path) -> None:
    export.write_json(folder / "config.json", settings)
    safetensors.write_folder(folder, [*export.to_write(params, config), entry])
    write_tokenizer(folder)

  return atomic.replace_folder(pathlib.Path(directory), fill)


def _config(family: str, hidden_size: int) -> ModelConfig:
  return ModelConfig(
    family=family,
    vocab_size=264,
    hidden_size=hidden_size,
    intermediate_size=2 * hidden_size,
    num_layers=2,
    num_heads=hidden_size // 8,
    num_kv_heads=hidden_size // 16 or 1,
    head_dim=8,
    max_position_embeddings=2048,
    embedding_scale=math.sqrt(hidden_size) if family in _SCALED else 1.0,
    **FAMILIES[family],
  )


def write_tokenizer(folder: pathlib.Path) -> None:
  """Writes a tokenizer whose ids are bytes, then the special tokens."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
  tokenizer.save(str(folder / "tokenizer.json"))
  pad, _, end = SPECIAL
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": pad,
    "eos_token": end,
    "chat_template": CHAT_TEMPLATE,
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
  eos = {"eos_token_id": tokenizer.token_to_id(end), "pad_token_id": tokenizer.token_to_id(pad)}
  (folder / "generation_config.json").write_text(json.dumps(eos, indent=2))


if __name__ == "__main__":
  writer = write_reward_model if "reward_model" in sys.argv[2:] else write
  named = [word for word in sys.argv[2:] if word != "reward_model"]
  print(writer(sys.argv[1], family=named[0] if named else "llama"))
