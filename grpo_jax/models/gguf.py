"""Reads a GGUF file: configuration and dequantised weights; `gguf_tokenizer` reads the rest (I/O).

`convert` turns it into a Hugging Face folder, the format that the rest of the package reads.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.files import atomic
from grpo_jax.models import config as model_config
from grpo_jax.models import (
  export,
  gguf_header,
  gguf_tokenizer,
  leaves,
  loading,
  rotary,
  safetensors,
)
from grpo_jax.models.config import ModelConfig, RopeScaling
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields, short


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """The metadata and the tensors of a GGUF file, the latter under their Hugging Face names."""

  file: pathlib.Path
  metadata: Mapping[str, Any]
  config: ModelConfig
  tensors: Mapping[str, gguf_header.GgufTensor]  # by Hugging Face name.

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in self.tensors.items()}

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Returns a tensor dequantised to float32, rotary pairs in Hugging Face's order.

    Raises:
      ModelError: The type of the tensor cannot be dequantised.
    """
    values = _dequantised(self.file, name, self.tensors[name])
    heads = _rotary_heads(name, self.config)
    if heads:
      values = _unpermute(values, heads)
    return np.ascontiguousarray(values[rows])


# Supported architectures of GGUF files; all their layers are of one kind.
_FAMILIES = ("llama", "qwen2", "qwen3")


def open_file(file: str | pathlib.Path) -> GgufFile:
  """Reads the metadata of a GGUF file, but no tensor yet.

  Raises:
    MissingModel: The file does not exist.
    ModelError: The file is not a GGUF file, is truncated, or its model is not supported.
  """
  file = pathlib.Path(file)
  header = gguf_header.read(file)
  by_name = dict(header.tensors)
  factors = by_name.pop("rope_freqs.weight", None)
  embedding = by_name.get("token_embd.weight")
  config = config_from_metadata(
    header.metadata,
    vocab_size=0 if embedding is None else embedding.shape[0],
    tie_embeddings="output.weight" not in by_name,
    rope_factors=None if factors is None else _dequantised(file, "rope_freqs.weight", factors),
    has_qkv_bias="blk.0.attn_q.bias" in by_name,
    has_o_bias="blk.0.attn_output.bias" in by_name,
    has_mlp_bias="blk.0.ffn_up.bias" in by_name,
    where=str(file),
  )
  names = _hf_names(config)
  tensors = {names.get(name, name): by_name[name] for name in by_name}
  return GgufFile(file, header.metadata, config, tensors)


def _dequantised(file: pathlib.Path, name: str, entry: gguf_header.GgufTensor) -> np.ndarray:
  """Reads a tensor as float32."""
  import gguf

  if math.prod(entry.shape) == 0:
    return np.zeros(entry.shape, np.float32)
  try:
    values = gguf.quants.dequantize(entry.data, entry.kind)
  except NotImplementedError as error:
    raise ModelError(f"{file}: {name} has the unsupported type {entry.kind.name}") from error
  return values.astype(np.float32, copy=False).reshape(entry.shape)


def config_from_metadata(
  metadata: Mapping[str, Any],
  *,
  vocab_size: int,
  tie_embeddings: bool,
  rope_factors: np.ndarray | None = None,
  has_qkv_bias: bool = False,
  has_o_bias: bool = False,
  has_mlp_bias: bool = False,
  where: str = "GGUF metadata",
) -> ModelConfig:
  """Builds a configuration from GGUF metadata and from the names of the tensors.

  Args:
    metadata: Values by their GGUF keys.
    vocab_size: Number of rows of the embedding.
    tie_embeddings: Whether the file has no head.
    rope_factors: Divisors of the rotary frequencies from `rope_freqs.weight`; None: not present.
    has_qkv_bias: Whether q, k and v have biases.
    has_o_bias: Whether the attention's output has a bias.
    has_mlp_bias: Whether the MLP has biases.
    where: Place of the metadata, for errors.

  Raises:
    ModelError: An architecture or an option is not supported, or a key is missing, of another
      type, or out of range.
  """
  fields = Fields(metadata, where)
  family = fields.string("general.architecture")
  if family not in _FAMILIES:
    have = sorted(_FAMILIES)
    raise ModelError(
      f"{where}: GGUF architecture {short(family)} is not supported; supported are {have}"
    )
  if fields.get(f"{family}.expert_count"):
    raise ModelError(f"{where}: mixture of experts is not supported; supported are dense models")

  def whole(key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
    return fields.integer(f"{family}.{key}", default, low=low, high=high)

  def decimal(key: str, default: float | None = None) -> float:
    return _decimal(fields.number(f"{family}.{key}", default, above=0.0))

  widest = model_config.WIDEST
  heads = whole("attention.head_count", high=model_config.MOST_HEADS)
  width = whole("embedding_length", high=widest)
  head_dim = whole("attention.key_length", width // heads, low=2, high=widest)
  theta = decimal("rope.freq_base", 10000.0)
  if whole("rope.dimension_count", head_dim, high=widest) != head_dim:
    raise ModelError(f"{where}: rotary embeddings of a part of each head are not supported")
  try:
    return ModelConfig(
      family=family,
      vocab_size=vocab_size,
      hidden_size=width,
      intermediate_size=whole("feed_forward_length", high=widest),
      num_layers=whole("block_count", high=model_config.MOST_LAYERS),
      num_heads=heads,
      num_kv_heads=whole("attention.head_count_kv", heads, high=heads),
      head_dim=head_dim,
      rms_norm_eps=decimal("attention.layer_norm_rms_epsilon"),
      rope_theta=theta,
      rope_scaling=_rope_scaling(fields, family, head_dim, theta, rope_factors),
      tie_embeddings=tie_embeddings,
      qkv_bias=has_qkv_bias,
      o_bias=has_o_bias,
      mlp_bias=has_mlp_bias,
      qk_norm=family == "qwen3",
      max_position_embeddings=whole("context_length", high=2**31 - 1),
    )
  except ModelError as error:
    message = str(error)
    raise ModelError(message if message.startswith(where) else f"{where}: {message}") from error


def convert(file: str | pathlib.Path, directory: str | pathlib.Path) -> pathlib.Path:
  """Writes a GGUF file as a Hugging Face folder in float32, tokenizer and chat template included.

  The folder is written completely or not at all.

  Args:
    file: GGUF file; quantised weights are dequantised, exactly.
    directory: Folder to write.

  Raises:
    ModelError: The file is broken, or its model or its tokenizer is not supported.
  """
  source = open_file(file)
  loading.check(source, source.config, str(file))
  fields = Fields(source.metadata, str(file))
  tokenizer = gguf_tokenizer.files(fields, vocab_size=source.config.vocab_size)
  float32 = np.dtype(np.float32)
  tensors = [
    safetensors.ToWrite(stored.name, stored.shape, float32, _reader(source, stored.name))
    for stored in leaves.stored(source.config)
  ]

  def fill(folder: pathlib.Path) -> None:
    ids = gguf_tokenizer.special_ids(fields)
    hf = {**model_config.to_hf(source.config), **ids, "dtype": "float32"}
    export.write_json(folder / "config.json", hf)
    for name, content in tokenizer.items():
      export.write_json(folder / name, content)
    safetensors.write_folder(folder, tensors)

  return atomic.replace_folder(pathlib.Path(directory), fill)


def _reader(source: GgufFile, name: str) -> Any:
  return lambda: source.read(name)


def _hf_names(config: ModelConfig) -> dict[str, str]:
  """Returns GGUF name → Hugging Face name."""
  family = model_config.FAMILIES_BY_NAME[config.family]
  names = {gguf_name: family.TOP_NAMES[ours] for ours, gguf_name in _TOP_NAMES.items()}
  for index in range(config.num_layers):
    for ours in leaves.layer(config):
      hf_name = family.LAYER_PREFIX.format(index) + family.LAYER_NAMES[ours]
      names[f"blk.{index}.{_LAYER_NAMES[ours]}"] = hf_name
  return names


def _rotary_heads(hf_name: str, config: ModelConfig) -> int:
  """Returns the number of heads whose components GGUF stores interleaved; 0: not this tensor.

  This is only so in files of the "llama" architecture, where llama.cpp rotates neighbours.
  """
  if config.family != "llama":
    return 0
  if ".q_proj." in hf_name:
    return config.num_heads
  return config.num_kv_heads if ".k_proj." in hf_name else 0


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
  """Reorders the components of each head from GGUF's order (0, E/2, 1, E/2 + 1, ...) to ours."""
  pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
  return pairs.swapaxes(1, 2).reshape(values.shape)


def _rope_scaling(
  fields: Fields,
  family: str,
  head_dim: int,
  theta: float,
  factors: np.ndarray | None,
) -> RopeScaling | None:
  kind = fields.string(f"{family}.rope.scaling.type") or "none"
  if kind == "linear":
    return RopeScaling("linear", _decimal(fields.number(f"{family}.rope.scaling.factor", above=0)))
  if kind != "none":
    raise ModelError(
      f"{fields.where}: GGUF rope scaling {short(kind)} is not supported; supported: none, linear"
    )
  if factors is None:
    return None
  # Llama 3's scaling is stored as its result. All published models share the other settings.
  plain = rotary.frequencies(head_dim, theta, None)
  factors = factors.reshape(-1)
  if factors.shape == plain.shape and np.all(np.isfinite(factors) & (factors > 0)):
    scaling = RopeScaling("llama3", _decimal(factors.max()))
    scaled = rotary.frequencies(head_dim, theta, scaling)
    if np.allclose(plain / factors, scaled, rtol=1e-4):
      return scaling
  raise ModelError(
    f"{fields.where}: rope_freqs.weight is not Llama 3's scaling with its published settings"
  )


def _decimal(value: Any) -> float:
  """Returns the shortest decimal of a float32: 1e-05, where the file holds 9.99999975e-06."""
  return float(str(np.float32(value)))


_TOP_NAMES = {
  "embed": "token_embd.weight",
  "final_norm": "output_norm.weight",
  "head": "output.weight",
}
_LAYER_NAMES = {
  "input_norm": "attn_norm.weight",
  "q": "attn_q.weight",
  "k": "attn_k.weight",
  "v": "attn_v.weight",
  "o": "attn_output.weight",
  "q_bias": "attn_q.bias",
  "k_bias": "attn_k.bias",
  "v_bias": "attn_v.bias",
  "o_bias": "attn_output.bias",
  "q_norm": "attn_q_norm.weight",
  "k_norm": "attn_k_norm.weight",
  "mlp_norm": "ffn_norm.weight",
  "gate": "ffn_gate.weight",
  "up": "ffn_up.weight",
  "down": "ffn_down.weight",
  "gate_bias": "ffn_gate.bias",
  "up_bias": "ffn_up.bias",
  "down_bias": "ffn_down.bias",
}
