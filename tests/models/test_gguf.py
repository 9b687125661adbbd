"""GGUF files: weights back in Hugging Face's layout, config, tokenizer."""

import json

import gguf as gguf_library
import numpy as np
import pytest
import tokenizers
import transformers

from grpo_jax import models
from grpo_jax.models import gguf, gguf_tokenizer, leaves, rotary
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.fields import Fields
from tests.models import tiny

# A tokenizer over bytes: GPT-2's printable stand-ins, four merges, two special tokens.
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "Ġ w"]
SPECIAL = ["<|end|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"


def permute(values, heads):
  """Does to q and k what llama.cpp's converter does: interleaves the halves of each head."""
  halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
  return halves.swapaxes(1, 2).reshape(values.shape)


def write(file, config, tensors, *, pre="smollm", quantize=None, rope_factors=None, extra=()):
  """Writes a model as llama.cpp's converter would, by the `gguf` package's own writer."""
  writer = gguf_library.GGUFWriter(str(file), config.family)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position_embeddings)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  if pre is not None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
  for add in extra:
    add(writer)
  if rope_factors is not None:
    writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
  names = {hf: name for name, hf in gguf._hf_names(config).items()}
  for name, values in tensors.items():
    if config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
      values = permute(values, config.num_heads if ".q_proj." in name else config.num_kv_heads)
    if quantize is not None and values.ndim == 2:
      writer.add_tensor(
        names[name], gguf_library.quants.quantize(values, quantize), raw_dtype=quantize
      )
    else:
      writer.add_tensor(names[name], values)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def random_tensors(config, seed=0):
  rng = np.random.default_rng(seed)
  return {s.name: rng.normal(size=s.shape).astype(np.float32) for s in leaves.stored(config)}


CONFIGS = {
  "llama-biases": {"family": "llama", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
  "llama-untied": {"family": "llama", "tie_embeddings": False},
  "qwen2": {"family": "qwen2", "qkv_bias": True},
  "qwen3": {"family": "qwen3", "qk_norm": True},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_convert_gives_back_config_and_every_tensor(case, tmp_path):
  config = tiny.config(
    vocab_size=len(TOKENS) + 2, num_layers=2, rms_norm_eps=1e-5, rope_theta=5e5, **CONFIGS[case]
  )
  tensors = random_tensors(config)
  write(tmp_path / "a.gguf", config, tensors)
  loaded = models.load(gguf.convert(tmp_path / "a.gguf", tmp_path / "a"))
  assert loaded.config == config
  for stored in leaves.stored(config):
    own = loaded.params
    for key in stored.path:
      own = own[key]
    own = np.asarray(own if stored.layer is None else own[stored.layer])
    own = own.T if stored.leaf.is_kernel else own
    np.testing.assert_array_equal(own, tensors[stored.name], err_msg=stored.name)
  assert loaded.generation == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 0}


def test_quantised_tensors_are_dequantised(tmp_path):
  config = tiny.config(
    vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_layers=1, head_dim=32,
    num_heads=2, num_kv_heads=2,
  )  # fmt: skip
  tensors = random_tensors(config)
  write(tmp_path / "a.gguf", config, tensors, quantize=gguf_library.GGMLQuantizationType.Q8_0)
  params = models.load(gguf.convert(tmp_path / "a.gguf", tmp_path / "a")).params
  wanted = tensors["model.layers.0.self_attn.q_proj.weight"].T
  # 8 bits: half a step of the largest value in 127, of normals below 4.5.
  error = np.abs(params["layers"]["q"][0] - wanted).max()
  assert 0 < error < 4.5 / 127


def test_llama3_scaling_is_recognised_by_its_factors(tmp_path):
  scaling = RopeScaling("llama3", 32.0)
  config = tiny.config(vocab_size=len(TOKENS), head_dim=64, rope_theta=5e5, num_layers=1)
  plain = rotary.frequencies(64, 5e5, None)
  factors = plain / rotary.frequencies(64, 5e5, scaling)
  write(tmp_path / "a.gguf", config, random_tensors(config), rope_factors=factors)
  assert gguf.open_file(tmp_path / "a.gguf").config.rope_scaling == scaling
  write(tmp_path / "b.gguf", config, random_tensors(config), rope_factors=np.sqrt(factors))
  with pytest.raises(ValueError, match="rope_freqs.weight"):
    gguf.open_file(tmp_path / "b.gguf")


def test_what_is_not_supported_or_broken_is_refused(tmp_path):
  config = tiny.config(vocab_size=len(TOKENS), num_layers=1)
  tensors = random_tensors(config)
  file = tmp_path / "a.gguf"
  write(file, config, tensors, pre="mistral-v7")
  with pytest.raises(ValueError, match="pre-tokenizer 'mistral-v7'.*smollm"):
    gguf.convert(file, tmp_path / "a")
  write(file, config, tensors, extra=[lambda w: w.add_expert_count(4)])
  with pytest.raises(ValueError, match="mixture of experts"):
    gguf.convert(file, tmp_path / "a")
  missing = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
  write(file, config, missing)
  with pytest.raises(ValueError, match="missing: model.norm.weight"):
    gguf.convert(file, tmp_path / "a")
  write(file, config, tensors)
  file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(ValueError, match="cut short or not a GGUF"):
    gguf.convert(file, tmp_path / "a")
  file.write_bytes(b"GGUX" + bytes(100))
  with pytest.raises(ValueError, match="not a GGUF file"):
    gguf.convert(file, tmp_path / "a")
  assert not (tmp_path / "a").exists()


def test_the_tokenizer_merges_splits_digits_and_keeps_special_tokens(tmp_path):
  config = tiny.config(vocab_size=len(TOKENS), num_layers=1)
  write(tmp_path / "a.gguf", config, random_tensors(config))
  gguf.convert(tmp_path / "a.gguf", tmp_path / "a")
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
  pieces = lambda text: tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
  assert pieces("hell") == ["hell"]
  assert pieces("he wh") == ["he", "Ġw", "h"]
  assert pieces("a 12") == ["a", "Ġ", "1", "2"]
  assert pieces("l<|im_end|>l") == ["l", "<|im_end|>", "l"]
  for text in ("hello  world\n\n\t1234", " é 日本 😀 ½ ١٢", "<|end|>x<|im_end|>\n", ""):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
  chat = [{"role": "user", "content": "he"}]
  assert tokenizer.apply_chat_template(chat, tokenize=False) == "user:he<|im_end|>"
  assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, 1)


def test_a_file_without_tokenizer_gives_a_folder_without(tmp_path):
  config = tiny.config(num_layers=1)
  write(tmp_path / "a.gguf", config, random_tensors(config), pre=None)
  gguf.convert(tmp_path / "a.gguf", tmp_path / "a")
  names = {path.name for path in (tmp_path / "a").iterdir()}
  assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_end_of_turn_beside_end_of_text_makes_a_list():
  ids = gguf_tokenizer.special_ids(
    Fields({"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}, "a.gguf")
  )
  assert ids == {"eos_token_id": [7, 9]}


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "default"])
def test_other_pre_tokenizers_keep_their_texts(pre, tmp_path):
  metadata = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
  }
  for name, content in gguf_tokenizer.files(Fields(metadata, "a"), vocab_size=len(TOKENS)).items():
    (tmp_path / name).write_text(json.dumps(content))
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ids = tokenizer("hello 1234 é\n\n")["input_ids"]
  assert (ids[0] == 1) == (pre == "llama-bpe")
  assert tokenizer.decode(ids, skip_special_tokens=True) == "hello 1234 é\n\n"
  words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("don't 1234 DON'T")
  digits = {"qwen2": ["1", "2", "3", "4"], "llama-bpe": ["123", "4"]}.get(pre, ["Ġ1234"])
  assert [word for word, _ in words if any(c.isdigit() for c in word)] == digits
  assert ("'T" in [word for word, _ in words]) == (pre in ("qwen2", "llama-bpe"))
