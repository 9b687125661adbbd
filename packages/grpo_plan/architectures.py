"""The sizes of a model: of well-known ones by name, of others from their config.json."""

import os
import pathlib
from typing import Any

from grpo_jax.files import hub, local_paths
from grpo_jax.models import files, sources
from grpo_jax.models.errors import HubFailure, MissingModel, ModelError

_QWEN2 = {
  "architectures": ["Qwen2ForCausalLM"],
  "rope_theta": 1e6,
  "max_position_embeddings": 32768,
  "vocab_size": 151936,
}
_QWEN3 = {
  "architectures": ["Qwen3ForCausalLM"],
  "rope_theta": 1e6,
  "max_position_embeddings": 40960,
  "vocab_size": 151936,
  "head_dim": 128,
}
_QWEN3_MOE = {
  **_QWEN3,
  "architectures": ["Qwen3MoeForCausalLM"],
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "norm_topk_prob": True,
  "tie_word_embeddings": False,
}
_LLAMA3 = {
  "architectures": ["LlamaForCausalLM"],
  "rope_theta": 5e5,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 131072,
  "vocab_size": 128256,
}
_GEMMA3 = {
  "architectures": ["Gemma3ForCausalLM"],
  "max_position_embeddings": 131072,
  "vocab_size": 262208,
  "head_dim": 256,
  "sliding_window": 1024,
  "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
# 270m and 1b, of text alone.
_GEMMA3_TEXT = {
  **_GEMMA3,
  "max_position_embeddings": 32768,
  "vocab_size": 262144,
  "sliding_window": 512,
  "rope_scaling": None,
}
_SMOL = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 49152,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 8192,
  "tie_word_embeddings": True,
}


def _sized(
  family: dict[str, Any], width: int, mlp: int, layers: int, heads: tuple[int, int], **more: Any
) -> dict[str, Any]:
  return {
    **family,
    "hidden_size": width,
    "intermediate_size": mlp,
    "num_hidden_layers": layers,
    "num_attention_heads": heads[0],
    "num_key_value_heads": heads[1],
    **more,
  }


_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

# As in their config.json on the hub; the sizes of "-Instruct", "-it" and "-pt" models are
# those of the base, those of models of images and text are of the text model.
SHAPES: dict[str, dict[str, Any]] = {
  "SmolLM2-135M": _sized(_SMOL, 576, 1536, 30, (9, 3), rope_theta=1e5),
  "SmolLM2-360M": _sized(_SMOL, 960, 2560, 32, (15, 5), rope_theta=1e5),
  "SmolLM2-1.7B": _sized(_SMOL, 2048, 8192, 24, (32, 32), rope_theta=1.3e5),
  "Qwen2.5-0.5B": _sized(_QWEN2, 896, 4864, 24, (14, 2), **_TIED),
  "Qwen2.5-1.5B": _sized(_QWEN2, 1536, 8960, 28, (12, 2), **_TIED),
  "Qwen2.5-3B": _sized(_QWEN2, 2048, 11008, 36, (16, 2), **_TIED),
  "Qwen2.5-7B": _sized(_QWEN2, 3584, 18944, 28, (28, 4), **_UNTIED, vocab_size=152064),
  "Qwen3-0.6B": _sized(_QWEN3, 1024, 3072, 28, (16, 8), **_TIED),
  "Qwen3-1.7B": _sized(_QWEN3, 2048, 6144, 28, (16, 8), **_TIED),
  "Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, (32, 8), **_TIED),
  "Qwen3-8B": _sized(_QWEN3, 4096, 12288, 36, (32, 8), **_UNTIED),
  "Gemma-3-270m": _sized(_GEMMA3_TEXT, 640, 2048, 18, (4, 1)),
  "Gemma-3-1b": _sized(_GEMMA3_TEXT, 1152, 6912, 26, (4, 1)),
  "Gemma-3-4b": _sized(_GEMMA3, 2560, 10240, 34, (8, 4)),
  "Gemma-3-12b": _sized(_GEMMA3, 3840, 15360, 48, (16, 8)),
  "Gemma-3-27b": _sized(
    _GEMMA3, 5376, 21504, 62, (32, 16), head_dim=128, query_pre_attn_scalar=168
  ),
  "Qwen3-30B-A3B": _sized(_QWEN3_MOE, 2048, 6144, 48, (32, 4), moe_intermediate_size=768),
  "Qwen3-235B-A22B": _sized(_QWEN3_MOE, 4096, 12288, 94, (64, 4), moe_intermediate_size=1536),
  "Llama-3.2-1B": _sized(_LLAMA3, 2048, 8192, 16, (32, 8), **_TIED, head_dim=64),
  "Llama-3.1-8B": _sized(_LLAMA3, 4096, 14336, 32, (32, 8), **_UNTIED),
}


def known(path: str) -> str | None:
  """Returns the name in `SHAPES` of a model on the hub; None if it is not there.

  Args:
    path: Name on the hub, such as "Qwen/Qwen2.5-1.5B-Instruct", or a name in `SHAPES`.
  """
  name = path.rpartition("/")[2]
  for ending in ("-Instruct", "-it", "-pt"):
    name = name.removesuffix(ending)
  by_small = {each.lower(): each for each in SHAPES}
  return by_small.get(name.lower())


def find(path: str) -> tuple[dict[str, Any], str]:
  """Returns the config.json of a model without reading its weights, and where it is from.

  Args:
    path: A folder, a config.json, a name in `SHAPES`, or a name on the hub. The table comes before
      the hub. From the hub only the config.json is read.

  Raises:
    ModelError: There is no such model, its config.json is not a JSON object, or the hub does not
      answer.
  """
  local = pathlib.Path(path).expanduser()
  if path.strip() and local.exists():
    if local.suffix.lower() == ".gguf":
      raise ModelError(f"{path}: a GGUF file has no config.json; {_others()}")
    return files.read_json(local / "config.json" if local.is_dir() else local), f"{local}"
  if (name := known(path)) is not None:
    return SHAPES[name], f"the table of grpo_jax ({name})"
  if refused := sources.refusal(path):
    raise MissingModel(f"{refused}; {_others()}")
  if local_paths.is_url(path) or path.startswith("pypi:"):
    raise ModelError(f"{path}: its config.json cannot be read without its weights; {_others()}")
  return _from_hub(path)


def _others() -> str:
  """Returns what may be named in place of a model that has no config.json."""
  return f"--model-config takes a config.json, its folder, or one of {', '.join(SHAPES)}"


def _from_hub(name: str) -> tuple[dict[str, Any], str]:
  import huggingface_hub  # only now: it takes long, and the environments of compilers lack it.

  reason = hub.unreachable()
  token = os.environ.get("HF_TOKEN")
  try:
    file = huggingface_hub.hf_hub_download(
      name, "config.json", token=token, local_files_only=bool(reason)
    )
  except hub.failures() as error:
    why = reason or " ".join(str(error).split()) or type(error).__name__
    raise HubFailure(
      f"{name}: its config.json cannot be read from the hub: {why}; {_others()}"
    ) from error
  return files.read_json(pathlib.Path(file)), f"config.json of {name} on the hub"
