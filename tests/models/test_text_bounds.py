"""The bound on characters: never below what so many tokens can have, whatever the tokenizer."""

import json

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from grpo_jax.models.chat import text_bounds, token_bytes

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(normalizer=None, merges=(("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("a", "b")), **added):
  vocab = {letter: i for i, letter in enumerate(LETTERS)}
  for left, right in merges:
    vocab[left + right] = len(vocab)
  made = tokenizers.Tokenizer(models.BPE(vocab, list(merges)))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  if normalizer is not None:
    made.normalizer = normalizer
  if added:
    made.add_special_tokens([AddedToken("<|a_long_special_token|>", special=True, **added)])
  return made


def byte_fallback():
  vocab = {**BYTES, "▁": 256, "a": 257, "▁a": 258}
  model = models.BPE(vocab, [("▁", "a")], byte_fallback=True, fuse_unk=True, unk_token="a")
  made = tokenizers.Tokenizer(model)
  made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
  return made


def words(pre):
  made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
  made.pre_tokenizer = pre
  return made


CERTAIN = {
  "byte-level": byte_level(),
  "NFC": byte_level(normalizers.NFC()),
  "NFKC-lower": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
  "replace": byte_level(normalizers.Replace("aaaaaaaa", "b")),
  "added": byte_level(lstrip=False),
  "byte-fallback": byte_fallback(),
}
DROPPING = {
  "strip": byte_level(normalizers.Strip()),
  "removed": byte_level(normalizers.Replace("a", "")),
  "regex": byte_level(normalizers.Replace(tokenizers.Regex("a+"), "a")),
  "lstrip": byte_level(lstrip=True),
  "whitespace": words(pre_tokenizers.Whitespace()),
  "split": words(pre_tokenizers.Split(" ", "removed")),
  "unknown-words": words(pre_tokenizers.Digits()),
}
PIECES = ("a", "ab", " ", "    ", "\u03b1\u0313\u0301\u0345", "é", "🙂", "aaaaaaaa", "日本", "A",
          "<|a_long_special_token|>", "\u0061\u0300", "ﬃ", "\n", "1")  # fmt: skip


def described(tokenizer):
  return json.loads(tokenizer.to_str())


def test_entries_of_a_byte_fallback_vocabulary_have_their_bytes():
  backend = byte_fallback()
  backend.decoder = decoders.ByteFallback()
  made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
  assert token_bytes.of_token(made, 0xC3) == b"\xc3" and token_bytes.of_token(made, 257) == b"a"


@pytest.mark.parametrize("name", CERTAIN)
def test_no_text_has_more_characters_than_its_tokens_allow(name):
  tokenizer = CERTAIN[name]
  each, is_certain = text_bounds.characters_per_token(described(tokenizer))
  assert is_certain
  rng = np.random.default_rng(0)
  texts = [piece * 64 for piece in PIECES]
  texts += ["".join(rng.choice(PIECES, 50)) for _ in range(300)]
  for text in texts:
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(text) <= text_bounds.longest_text(each, is_certain, tokens)


@pytest.mark.parametrize("name", DROPPING)
def test_where_characters_vanish_only_what_is_far_too_long_is_refused(name):
  each, is_certain = text_bounds.characters_per_token(described(DROPPING[name]))
  assert not is_certain
  # A text of a million blanks may be a short prompt, and has to be encoded to know it.
  assert text_bounds.longest_text(each, is_certain, 8) >= 1 << 20
  assert text_bounds.longest_text(each, is_certain, 1 << 20) >= 16 * each << 20


def test_a_vocabulary_without_some_byte_is_not_certain():
  description = described(byte_level())
  del description["model"]["vocab"]["!"]
  assert not text_bounds.characters_per_token(description)[1]


def test_the_bound_is_close_where_it_is_certain():
  assert text_bounds.characters_per_token(described(byte_level())) == (4, True)
  assert text_bounds.characters_per_token(described(byte_level(normalizers.NFC()))) == (16, True)
  assert text_bounds.longest_text(4, True, 512) == 2048


def test_steps_that_multiply_text_are_known():
  twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
  steps = lambda count: {"normalizer": {"type": "Sequence", "normalizers": [twice] * count}}
  assert text_bounds.growth(steps(4)) == 16
  assert text_bounds.is_bomb(steps(40)) and not text_bounds.is_bomb(steps(4))
  assert not text_bounds.is_bomb(described(byte_fallback()))
