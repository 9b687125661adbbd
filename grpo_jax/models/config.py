"""What a decoder-only transformer is made of, and its translation from and to config.json. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.models import llama, qwen2, qwen3


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are changed for contexts longer than those of pre-training.

  "linear" divides every frequency by `factor`. "llama3" divides the low ones, keeps the high
  ones and interpolates between the two (Llama 3.1); the remaining fields are of "llama3" only.
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and switches of one dense decoder; hashable, so it can be a static argument of jit."""

  family: str  # key of `FAMILIES_BY_NAME`.
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  tie_embeddings: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  max_position_embeddings: int = 2048

  def __post_init__(self):
    if self.family not in FAMILIES_BY_NAME:
      raise ValueError(f"unknown model family {self.family!r}; have {sorted(FAMILIES_BY_NAME)}")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads must be a multiple of num_kv_heads: {self.num_heads}, {self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"rotary embeddings need an even head_dim, got {self.head_dim}")


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Reads the content of a Hugging Face config.json, old style or that of transformers 5.

  Args:
    hf: the parsed config.json. Rotary settings are taken from `rope_parameters` (transformers 5)
      if it is there, else from `rope_theta` and `rope_scaling`.

  Returns:
    The same, in our words.

  Raises:
    ValueError: for an architecture, an option or a kind of rotary scaling that we do not compute,
      with the names of those we do; for a field that is missing.
  """
  family = _family(hf)
  _refuse_unsupported(hf)
  hf = {**family.DEFAULTS, **hf}
  missing = [name for name in _REQUIRED if hf.get(name) is None]
  if missing:
    raise ValueError(f"config.json of {family.ARCHITECTURE} lacks {missing}")
  heads = int(hf["num_attention_heads"])
  theta, scaling = _rope_from_hf(hf)
  return ModelConfig(
    family=family.MODEL_TYPE,
    vocab_size=int(hf["vocab_size"]),
    hidden_size=int(hf["hidden_size"]),
    intermediate_size=int(hf["intermediate_size"]),
    num_layers=int(hf["num_hidden_layers"]),
    num_heads=heads,
    num_kv_heads=int(hf.get("num_key_value_heads") or heads),
    head_dim=int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
    rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
    rope_theta=theta,
    rope_scaling=scaling,
    tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    max_position_embeddings=int(hf["max_position_embeddings"]),
    **family.switches(hf),
  )


def classifier_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
  """Reads the config.json of a sequence classifier, such as a reward model, as its body's.

  Args:
    hf: the parsed config.json; its architecture is one of `CLASSIFIERS`.

  Returns:
    The decoder under the score matrix. It has no LM head: `tie_embeddings` is True.

  Raises:
    ValueError: as `from_hf`, and for an architecture that is no classifier we compute.
  """
  architecture = (hf.get("architectures") or [None])[0]
  if architecture not in CLASSIFIERS:
    raise ValueError(
      f"architecture {architecture!r} is no supported sequence classifier (reward model);"
      f" supported are {sorted(CLASSIFIERS)}"
    )
  body = CLASSIFIERS[architecture].ARCHITECTURE
  return from_hf({**hf, "architectures": [body], "tie_word_embeddings": True})


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Writes the fields of a config.json that `transformers` 4.56 and 5 both read alike.

  Rotary settings are written in both styles. Token ids (`eos_token_id`, ...) are not ours to
  know: whoever has them adds them.
  """
  family = FAMILIES_BY_NAME[config.family]
  rope = _rope_to_hf(config.rope_scaling)
  return {
    "architectures": [family.ARCHITECTURE],
    "model_type": family.MODEL_TYPE,
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": config.rms_norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": rope,
    "rope_parameters": {**(rope or {"rope_type": "default"}), "rope_theta": config.rope_theta},
    "tie_word_embeddings": config.tie_embeddings,
    "max_position_embeddings": config.max_position_embeddings,
    **family.hf_switches(qkv_bias=config.qkv_bias, o_bias=config.o_bias, mlp_bias=config.mlp_bias),
  }


def _family(hf: Mapping[str, Any]) -> Any:
  architectures = hf.get("architectures") or []
  if architectures and architectures[0] in FAMILIES:
    return FAMILIES[architectures[0]]
  if not architectures and hf.get("model_type") in FAMILIES_BY_NAME:
    return FAMILIES_BY_NAME[hf["model_type"]]
  asked = architectures[0] if architectures else hf.get("model_type")
  raise ValueError(f"architecture {asked!r} is not supported; supported are {sorted(FAMILIES)}")


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
  """Raises for every option of config.json that would change the computation unseen."""
  unsupported = []
  if hf.get("use_sliding_window"):
    unsupported.append("use_sliding_window=true (supported: false)")
  kinds = set(hf.get("layer_types") or ["full_attention"]) - {"full_attention"}
  if kinds:
    unsupported.append(f"layer_types {sorted(kinds)} (supported: full_attention)")
  if hf.get("hidden_act", "silu") != "silu":
    unsupported.append(f"hidden_act={hf['hidden_act']!r} (supported: silu)")
  if hf.get("quantization_config"):
    unsupported.append("quantization_config (supported: plain float32, bfloat16, float16 weights)")
  if hf.get("num_experts") or hf.get("num_local_experts"):
    unsupported.append("mixture of experts (supported: dense models)")
  if unsupported:
    raise ValueError("config.json asks for what is not supported: " + "; ".join(unsupported))


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  new = hf.get("rope_parameters") or {}
  rope = {**(hf.get("rope_scaling") or {}), **new}
  if any(isinstance(value, Mapping) for value in rope.values()):
    raise ValueError("rope_parameters that differ by layer type are not supported")
  theta = float(new.get("rope_theta") or hf.get("rope_theta") or 10000.0)
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind not in _ROPE_KINDS:
    raise ValueError(f"rope type {kind!r} is not supported; supported are {sorted(_ROPE_KINDS)}")
  partial = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
  if float(partial) != 1.0:
    raise ValueError(f"partial_rotary_factor must be 1, got {partial}")
  if kind == "default":
    return theta, None
  missing = [name for name in _ROPE_KINDS[kind] if name not in rope]
  if missing:
    raise ValueError(f"rope type {kind!r} needs {missing} in config.json")
  fields = {name: rope[name] for name in _ROPE_KINDS[kind]}
  return theta, RopeScaling(kind=kind, **fields)


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  fields = {name: dataclasses.asdict(scaling)[name] for name in _ROPE_KINDS[scaling.kind]}
  return {"rope_type": scaling.kind, **fields}


_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)

# Kind of rotary scaling → the fields of config.json that it needs.
_ROPE_KINDS = {
  "default": (),
  "linear": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
}

# By config.json's architectures[0], and by its model_type (= `ModelConfig.family`).
FAMILIES = {family.ARCHITECTURE: family for family in (llama, qwen2, qwen3)}
FAMILIES_BY_NAME = {family.MODEL_TYPE: family for family in (llama, qwen2, qwen3)}

# Sequence classifiers: transformers' name → the family of the body.
CLASSIFIERS = {
  family.ARCHITECTURE.replace("ForCausalLM", "ForSequenceClassification"): family
  for family in (llama, qwen2, qwen3)
}
