"""Reads a GGUF file: configuration and dequantised weights; `gguf_tokenizer` reads the rest (I/O).

`convert` turns it into a Hugging Face folder, which is what everything else reads.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.models import config as model_config
from grpo_jax.models import export, gguf_tokenizer, layers, leaves, loading, safetensors
from grpo_jax.models.config import ModelConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """The metadata and the tensors of a GGUF file, the latter under their Hugging Face names."""

  metadata: Mapping[str, Any]
  config: ModelConfig
  tensors: Mapping[str, Any]  # Hugging Face name → gguf.ReaderTensor.

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    # GGUF lists dimensions from the fastest to the slowest.
    return {name: tuple(int(n) for n in t.shape[::-1]) for name, t in self.tensors.items()}

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Returns a tensor dequantised to float32, rotary pairs in Hugging Face's order."""
    import gguf

    tensor = self.tensors[name]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    heads = _rotary_heads(name, self.config)
    if heads:
      values = _unpermute(values, heads)
    return np.ascontiguousarray(values[rows])


def open_file(file: str | pathlib.Path) -> GgufFile:
  """Reads the metadata of a GGUF file, and no tensor yet.

  Raises:
    ValueError: if it is no GGUF file, is cut short, or holds a model that is not supported.
  """
  import gguf

  try:
    reader = gguf.GGUFReader(str(file))
  except (ValueError, IndexError, OverflowError) as error:  # what the reader meets in broken files.
    raise ValueError(f"{file}: is cut short or no GGUF file: {error}") from error
  metadata = {name: field.contents() for name, field in reader.fields.items()}
  by_name = {tensor.name: tensor for tensor in reader.tensors}
  factors = by_name.pop("rope_freqs.weight", None)
  config = config_from_metadata(
    metadata,
    vocab_size=int(by_name["token_embd.weight"].shape[-1]) if "token_embd.weight" in by_name else 0,
    tie_embeddings="output.weight" not in by_name,
    rope_factors=None if factors is None else np.asarray(factors.data, np.float32),
    has_qkv_bias="blk.0.attn_q.bias" in by_name,
    has_o_bias="blk.0.attn_output.bias" in by_name,
    has_mlp_bias="blk.0.ffn_up.bias" in by_name,
  )
  names = _hf_names(config)
  return GgufFile(metadata, config, {names.get(name, name): by_name[name] for name in by_name})


def config_from_metadata(
  metadata: Mapping[str, Any],
  *,
  vocab_size: int,
  tie_embeddings: bool,
  rope_factors: np.ndarray | None = None,
  has_qkv_bias: bool = False,
  has_o_bias: bool = False,
  has_mlp_bias: bool = False,
) -> ModelConfig:
  """Builds our configuration from GGUF metadata and from which tensors there are.

  Args:
    metadata: values by their GGUF keys.
    vocab_size: rows of the embedding.
    tie_embeddings: whether the file holds no head.
    rope_factors: what `rope_freqs.weight` divides the rotary frequencies by; None: not there.
    has_qkv_bias: whether q, k and v have biases.
    has_o_bias: whether the attention's output has one.
    has_mlp_bias: whether the MLP has them.

  Raises:
    ValueError: for an architecture or an option that is not supported, or a missing key.
  """
  family = str(metadata.get("general.architecture"))
  if family not in model_config.FAMILIES_BY_NAME:
    have = sorted(model_config.FAMILIES_BY_NAME)
    raise ValueError(f"GGUF architecture {family!r} is not supported; supported are {have}")
  if metadata.get(f"{family}.expert_count"):
    raise ValueError("mixture of experts is not supported; supported are dense models")

  def number(key: str, default: Any = None) -> Any:
    value = metadata.get(f"{family}.{key}", default)
    if value is None:
      raise ValueError(f"GGUF metadata lacks {family}.{key}")
    return _decimal(value) if isinstance(value, float) else int(value)

  heads, width = number("attention.head_count"), number("embedding_length")
  head_dim = number("attention.key_length", width // heads)
  theta = float(number("rope.freq_base", 10000.0))
  if number("rope.dimension_count", head_dim) != head_dim:
    raise ValueError("rotary embeddings of a part of each head are not supported")
  return ModelConfig(
    family=family,
    vocab_size=vocab_size,
    hidden_size=width,
    intermediate_size=number("feed_forward_length"),
    num_layers=number("block_count"),
    num_heads=heads,
    num_kv_heads=number("attention.head_count_kv", heads),
    head_dim=head_dim,
    rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
    rope_theta=theta,
    rope_scaling=_rope_scaling(metadata, family, head_dim, theta, rope_factors),
    tie_embeddings=tie_embeddings,
    qkv_bias=has_qkv_bias,
    o_bias=has_o_bias,
    mlp_bias=has_mlp_bias,
    qk_norm=family == "qwen3",
    max_position_embeddings=number("context_length"),
  )


def convert(file: str | pathlib.Path, directory: str | pathlib.Path) -> pathlib.Path:
  """Writes a GGUF file as a Hugging Face folder in float32, tokenizer and chat template included.

  The folder appears whole or not at all.

  Args:
    file: the GGUF file; quantised weights are dequantised, exactly.
    directory: to be written.

  Raises:
    ValueError: if the file is broken, or its model or its tokenizer is not supported.
  """
  source = open_file(file)
  loading.check(source, source.config, str(file))
  tokenizer = gguf_tokenizer.files(source.metadata, vocab_size=source.config.vocab_size)
  float32 = np.dtype(np.float32)
  tensors = [
    safetensors.ToWrite(stored.name, stored.shape, float32, _reader(source, stored.name))
    for stored in leaves.stored(source.config)
  ]

  def fill(folder: pathlib.Path) -> None:
    ids = gguf_tokenizer.special_ids(source.metadata)
    hf = {**model_config.to_hf(source.config), **ids, "dtype": "float32"}
    export.write_json(folder / "config.json", hf)
    for name, content in tokenizer.items():
      export.write_json(folder / name, content)
    safetensors.write_folder(folder, tensors)

  return export.write_atomically(pathlib.Path(directory), fill)


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

  Only files of the "llama" architecture are, as llama.cpp rotates neighbours there.
  """
  if config.family != "llama":
    return 0
  if ".q_proj." in hf_name:
    return config.num_heads
  return config.num_kv_heads if ".k_proj." in hf_name else 0


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
  """Puts the components of each head from GGUF's order (0, E/2, 1, E/2 + 1, ...) into ours."""
  pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
  return pairs.swapaxes(1, 2).reshape(values.shape)


def _rope_scaling(
  metadata: Mapping[str, Any],
  family: str,
  head_dim: int,
  theta: float,
  factors: np.ndarray | None,
) -> RopeScaling | None:
  kind = metadata.get(f"{family}.rope.scaling.type", "none")
  if kind == "linear":
    return RopeScaling("linear", _decimal(metadata[f"{family}.rope.scaling.factor"]))
  if kind != "none":
    raise ValueError(f"GGUF rope scaling {kind!r} is not supported; supported: none, linear")
  if factors is None:
    return None
  # Llama 3's scaling is stored as its result. Every published model has the same other settings.
  scaling = RopeScaling("llama3", _decimal(factors.max()))
  plain = layers.rope_frequencies(head_dim, theta, None)
  scaled = layers.rope_frequencies(head_dim, theta, scaling)
  if not np.allclose(plain / factors.reshape(-1), scaled, rtol=1e-4):
    raise ValueError("rope_freqs.weight is not Llama 3's scaling with its published settings")
  return scaling


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
