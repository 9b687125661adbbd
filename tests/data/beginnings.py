"""Folders of small tokenizers that begin a text differently: with BOS, without, and with blanks."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from grpo_jax.models import gguf_tokenizer
from grpo_jax.models.fields import Fields

_MARKS = ["<unk>", "<s>", "</s>"]
_BOS, _EOS = ("<s>", 1), ("</s>", 2)
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+=?.\n"


def write(kind, folder):
  """Writes the tokenizer of a kind, a key of `KINDS`; returns the folder."""
  if kind == "gguf":
    return _write_gguf(folder)
  made, settings = KINDS[kind]()
  made.save(str(folder / "tokenizer.json"))
  settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  return folder


def _byte_level(post_processor=None, tokenizer_class="PreTrainedTokenizerFast"):
  """Bytes as tokens: Llama 3 with `post_processor`, else Qwen."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate([*_MARKS, *alphabet])}
  made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(_MARKS)
  made.post_processor = post_processor or processors.ByteLevel(trim_offsets=False)
  return made, {"tokenizer_class": tokenizer_class}


def _pieces(scheme, tokenizer_class="PreTrainedTokenizerFast", **settings):
  """SentencePiece's BPE, which begins words with ▁: "normalizer" (the first Llamas: also after a
  special token), or a scheme of Metaspace."""
  letters = ["▁", *_LETTERS]
  merges = [("▁", letter) for letter in "abc12"]
  tokens = [*_MARKS, *letters, *("".join(pair) for pair in merges)]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
  if scheme == "normalizer":
    made.normalizer = normalizers.Sequence(
      [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
  else:
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
  made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
  made.add_special_tokens(_MARKS)
  made.post_processor = _template("<s> $A")
  return made, {"tokenizer_class": tokenizer_class, **settings}


def _template(single):
  return processors.TemplateProcessing(single=single, special_tokens=[_BOS, _EOS])


def _write_gguf(folder):
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = [*_MARKS, *alphabet]
  metadata = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [3] * len(_MARKS) + [1] * len(alphabet),
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_eos_token": True,
  }
  for name, content in gguf_tokenizer.files(Fields(metadata, "a"), vocab_size=len(tokens)).items():
    (folder / name).write_text(json.dumps(content))
  return folder


KINDS = {
  "qwen": _byte_level,
  "llama3": lambda: _byte_level(
    processors.Sequence([processors.ByteLevel(trim_offsets=False), _template("<s> $A")])
  ),
  "bos_and_eos": lambda: _byte_level(_template("<s> $A </s>")),
  "eos": lambda: _byte_level(_template("$A </s>")),
  "two_first": lambda: _byte_level(_template("<s> </s> $A")),
  "bert": lambda: _byte_level(processors.BertProcessing(_EOS, _BOS)),
  "first_llama": lambda: _pieces("normalizer"),
  "prefix_first": lambda: _pieces("first"),
  "prefix_always": lambda: _pieces("always"),
  "prefix_never": lambda: _pieces("never"),
  "llama_class": lambda: _pieces("first", "LlamaTokenizer", add_bos_token=True, legacy=False),
  "old_llama_class": lambda: _pieces("normalizer", "LlamaTokenizer", add_bos_token=True),
  "gemma_class": lambda: _pieces("never", "GemmaTokenizer", add_bos_token=True),
  "gguf": None,
}
