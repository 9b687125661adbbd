"""The configuration of a decoder-only transformer, read from and written to config.json. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.models import (
  gemma3,
  hf_rope,
  llama,
  ministral,
  mistral,
  multimodal,
  olmo2,
  olmo3,
  qwen2,
  qwen2_moe,
  qwen3,
  qwen3_moe,
  seed_oss,
  smollm3,
  unsupported,
)
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields, short
from grpo_jax.models.layer_kinds import PLAIN, LayerKind, Rope, RopeScaling
from grpo_jax.models.mixture import Mixture
from grpo_jax.types import ExpertShape

__all__ = [
  "ACTIVATIONS",
  "CLASSIFIERS",
  "FAMILIES",
  "FAMILIES_BY_NAME",
  "LayerKind",
  "ModelConfig",
  "Rope",
  "RopeScaling",
  "classifier_from_hf",
  "from_hf",
  "to_hf",
]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and switches of one decoder; hashable, so it can be a static argument of jit."""

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
  qk_norm: bool = False  # whether queries and keys are normed, each head alone.
  wide_qk_norm: bool = False  # whether queries and keys are normed, all heads together.
  max_position_embeddings: int = 2048
  layer_kinds: tuple[LayerKind, ...] = ()  # of each layer; (): every layer is `LayerKind()`.
  further_ropes: tuple[Rope, ...] = ()  # tables 1.. of `ropes`, for layers that use them.
  activation: str = "silu"  # of the gated MLP; a value of `ACTIVATIONS`.
  norm_offset: float = 0.0  # added to the weights of all norms; Gemma's have 1.
  pre_norms: bool = True  # whether norms precede attention and MLP.
  post_norms: bool = False  # whether norms follow attention and MLP.
  embedding_scale: float = 1.0  # multiplies the embedding of each token.
  query_scalar: float | None = None  # scores are q·k / √query_scalar; None: / √head_dim.
  mixture: Mixture | None = None  # experts in place of the MLP, whose width then means nothing.

  @property
  def expert_shape(self) -> ExpertShape | None:
    """Shape of the records of experts; None: the model has none."""
    mixture = self.mixture
    if mixture is None:
      return None
    return ExpertShape(self.num_layers, mixture.experts_per_token, mixture.num_experts)

  def __post_init__(self):
    if self.family not in FAMILIES_BY_NAME:
      raise ModelError(f"unknown model family {self.family!r}; have {sorted(FAMILIES_BY_NAME)}")
    if self.num_heads % self.num_kv_heads:
      raise ModelError(
        f"num_heads must be a multiple of num_kv_heads: {self.num_heads}, {self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ModelError(f"rotary embeddings need an even head_dim, got {self.head_dim}")
    if self.activation not in ACTIVATIONS.values():
      known = sorted(set(ACTIVATIONS.values()))
      raise ModelError(f"unknown activation {self.activation!r}; have {known}")
    if self.qk_norm and self.wide_qk_norm:
      raise ModelError("queries and keys are normed by heads or over all of them, not both")
    self._check_ropes()
    self._check_kinds()

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Tables of rotary frequencies, which `LayerKind.rope` refers to."""
    return (Rope(self.rope_theta, self.rope_scaling), *self.further_ropes)

  @property
  def rotary_bound(self) -> int | None:
    """Longest sequence whose rotary angles are those of its tables; None: any."""
    bounds = [rope.scaling.longest for rope in self.ropes if rope.scaling is not None]
    return min((bound for bound in bounds if bound is not None), default=None)

  @property
  def context(self) -> int:
    """Longest sequence that the model reads: max_position_embeddings, or `rotary_bound`."""
    return min(self.max_position_embeddings, self.rotary_bound or self.max_position_embeddings)

  @property
  def kinds(self) -> tuple[LayerKind, ...]:
    """Kind of each layer."""
    return self.layer_kinds or (PLAIN,) * self.num_layers

  def _check_ropes(self) -> None:
    """Raises ModelError for a table of frequencies that does not fit the width of a head."""
    for scaling in (rope.scaling for rope in self.ropes):
      if scaling is None or scaling.kind != "longrope":
        continue
      lengths = len(scaling.short_factor), len(scaling.long_factor)
      if lengths != (self.head_dim // 2,) * 2:
        raise ModelError(
          f"short_factor and long_factor of longrope need {self.head_dim // 2} numbers each, half"
          f" of head_dim, got {lengths[0]} and {lengths[1]}"
        )

  def _check_kinds(self) -> None:
    """Raises ModelError for kinds that do not fit; replaces kinds that are all plain by ()."""
    if len(self.kinds) != self.num_layers:
      raise ModelError(f"{len(self.kinds)} layer_kinds are given for {self.num_layers} layers")
    for number, kind in enumerate(self.kinds):
      if kind.rope is not None and not 0 <= kind.rope < len(self.ropes):
        have = len(self.ropes)
        raise ModelError(f"layer {number} has rope {kind.rope}, but the model has {have} tables")
      if kind.window is not None and kind.window < 1:
        raise ModelError(f"the window of layer {number} must be at least 1, got {kind.window}")
    if set(self.kinds) == {PLAIN}:
      object.__setattr__(self, "layer_kinds", ())


def from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
  """Reads the content of a Hugging Face config.json, old style or that of transformers 5.

  Args:
    hf: Parsed config.json, of a text model or of a model of several modalities around one
      (`multimodal`). Rotary settings are read as in transformers 5 from `rope_scaling`, else
      `rope_parameters`, and `rope_theta`; they may not contradict each other.
    where: Place of the content, for errors.

  Returns:
    The configuration.

  Raises:
    ModelError: An architecture, an option or a kind of rotary scaling is not supported (the message
      names those that are); a field is missing, has the wrong type, or is out of range.
  """
  hf = multimodal.text_config(hf, where)
  family = _family(Fields(hf, where))
  given = {name: value for name, value in hf.items() if value is not None}
  nulls = {name for name in _NULL_IS_NOT_DEFAULT if name in hf and hf[name] is None}
  if "sliding_window" in nulls:
    given["use_sliding_window"] = False
  defaults = {name: value for name, value in family.DEFAULTS.items() if name not in nulls}
  fields = Fields({**defaults, **given}, where)
  _refuse_unsupported(fields, family)
  missing = [name for name in _REQUIRED if name not in fields]
  if missing:
    raise ModelError(f"{where}: {family.ARCHITECTURE} lacks {missing}")
  heads = fields.integer("num_attention_heads", low=1, high=MOST_HEADS)
  width = fields.integer("hidden_size", low=1, high=WIDEST)
  layers = fields.integer("num_hidden_layers", low=1, high=MOST_LAYERS)
  context = fields.integer("max_position_embeddings", low=1, high=2**31 - 1)
  ropes, kinds = hf_rope.without_copies(
    family.ROPES.read(Fields(hf, where), context), family.layer_kinds(fields, layers)
  )
  try:
    return ModelConfig(
      family=family.MODEL_TYPE,
      vocab_size=fields.integer("vocab_size", low=1, high=LARGEST_VOCABULARY),
      hidden_size=width,
      intermediate_size=fields.integer("intermediate_size", low=1, high=WIDEST),
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=fields.integer("num_key_value_heads", heads, low=1, high=heads),
      head_dim=_head_dim(fields, width, heads),
      rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0.0),
      rope_theta=ropes[0].theta,
      rope_scaling=ropes[0].scaling,
      further_ropes=ropes[1:],
      tie_embeddings=fields.boolean("tie_word_embeddings", default=False),
      max_position_embeddings=context,
      layer_kinds=kinds,
      **{
        "activation": ACTIVATIONS[fields.string("hidden_act") or "silu"],
        **family.switches(fields),
      },
    )
  except ModelError as error:
    message = str(error)
    raise ModelError(message if message.startswith(where) else f"{where}: {message}") from error


def classifier_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
  """Reads the config.json of a sequence classifier, such as a reward model, as that of its body.

  Args:
    hf: Parsed config.json; its architecture is one of `CLASSIFIERS`.
    where: Place of the content, for errors.

  Returns:
    The decoder under the score matrix. It has no LM head: `tie_embeddings` is True.

  Raises:
    ModelError: As for `from_hf`; or the architecture is not a supported classifier.
  """
  architecture = next(iter(Fields(hf, where).strings("architectures")), None)
  if architecture not in CLASSIFIERS:
    raise ModelError(
      f"{where}: architecture {short(architecture)} is not a supported sequence classifier (reward"
      f" model); supported are {sorted(CLASSIFIERS)}"
    )
  body = CLASSIFIERS[architecture].ARCHITECTURE
  return from_hf({**hf, "architectures": [body], "tie_word_embeddings": True}, where=where)


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """Returns the fields of a config.json that `transformers` 4.56 and 5 read in the same way.

  Rotary settings are written in both styles. The caller adds token ids (`eos_token_id`, ...), which
  are not part of the configuration; those whose default is beyond the vocabulary are null.

  Raises:
    ValueError: The family's config.json cannot describe this model.
  """
  family = FAMILIES_BY_NAME[config.family]
  written = {
    "architectures": [family.ARCHITECTURE],
    "model_type": family.MODEL_TYPE,
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "intermediate_size": config.intermediate_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": next(name for name, of in ACTIVATIONS.items() if of == config.activation),
    "rms_norm_eps": config.rms_norm_eps,
    **family.ROPES.write(config.ropes),
    "tie_word_embeddings": config.tie_embeddings,
    "max_position_embeddings": config.max_position_embeddings,
    **family.hf_switches(config),
  }
  written |= missing_ids(written, config)
  again = dataclasses.asdict(from_hf(written))
  lost = [name for name, value in dataclasses.asdict(config).items() if again[name] != value]
  if lost:
    raise ValueError(f"a config.json of {family.ARCHITECTURE} cannot describe this model's {lost}")
  return written


def missing_ids(hf: Mapping[str, Any], config: ModelConfig) -> dict[str, None]:
  """Returns the token ids that must be null in a config.json so that transformers loads it: those
  whose value, or transformers' default if they are missing, is beyond the vocabulary."""
  defaults = {**FAMILIES_BY_NAME[config.family].DEFAULTS, **hf}
  ids = {name: defaults.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
  return {
    name: None for name, value in ids.items() if type(value) is int and value >= config.vocab_size
  }


def _family(fields: Fields) -> Any:
  architectures, model_type = fields.strings("architectures"), fields.string("model_type")
  if architectures and architectures[0] in FAMILIES:
    return FAMILIES[architectures[0]]
  if not architectures and model_type in FAMILIES_BY_NAME:
    return FAMILIES_BY_NAME[model_type]
  asked = architectures[0] if architectures else model_type
  reason = unsupported.reason(asked, [*FAMILIES, *multimodal.ARCHITECTURES])
  raise ModelError(f"{fields.where}: architecture {short(asked)} {reason}")


def _head_dim(fields: Fields, width: int, heads: int) -> int:
  """Returns the width of a head: `head_dim`, else the model's width divided by the heads."""
  if "head_dim" in fields:
    return fields.integer("head_dim", low=2, high=WIDEST)
  if width % heads:
    raise ModelError(
      f"{fields.where}: hidden_size {width} is not a multiple of num_attention_heads {heads},"
      " and there is no head_dim"
    )
  return width // heads


def _refuse_unsupported(fields: Fields, family: Any) -> None:
  """Raises ModelError for options of config.json that would silently change the computation."""
  refused = []
  if fields.string("hidden_act") not in (None, *ACTIVATIONS):
    asked, known = short(fields.get("hidden_act")), ", ".join(ACTIVATIONS)
    refused.append(f"hidden_act={asked} (supported: {known})")
  if fields.get("quantization_config"):
    refused.append("quantization_config (supported: plain float32, bfloat16, float16 weights)")
  has_experts = fields.get("num_experts") or fields.get("num_local_experts")
  if has_experts and family not in _WITH_EXPERTS:
    known = ", ".join(each.ARCHITECTURE for each in _WITH_EXPERTS)
    refused.append(f"mixture of experts (supported in {known})")
  if refused:
    raise ModelError(f"{fields.where} has unsupported options: " + "; ".join(refused))


# The largest accepted value: far above every published model, but small enough to list.
MOST_LAYERS = 4096
MOST_HEADS = 1 << 14
WIDEST = 1 << 20  # hidden_size, intermediate_size, head_dim.
LARGEST_VOCABULARY = 1 << 24

_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)

# Fields in which null means no window, or that the value follows from others, and not the default.
_NULL_IS_NOT_DEFAULT = ("sliding_window", "num_key_value_heads", "head_dim")

# `hidden_act` of config.json → `ModelConfig.activation`; the first name of each is written.
ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
}

# By config.json's architectures[0], and by its model_type (= `ModelConfig.family`).
_WITH_EXPERTS = (qwen2_moe, qwen3_moe)
_FAMILIES = (
  *(gemma3, llama, qwen2, qwen3, smollm3, mistral, ministral, olmo2, olmo3, seed_oss),
  *_WITH_EXPERTS,
)
FAMILIES = {family.ARCHITECTURE: family for family in _FAMILIES}
FAMILIES_BY_NAME = {family.MODEL_TYPE: family for family in _FAMILIES}

# Sequence classifiers: transformers' name → the family of the body.
CLASSIFIERS = {family.CLASSIFIER: family for family in _FAMILIES}
