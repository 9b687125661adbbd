"""GGUF files that are broken: each ends in one line, within bounds of memory and time."""

import dataclasses
import struct
import time

import pytest

from grpo_jax.models import gguf, gguf_header, gguf_tokenizer
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields
from tests.models import test_gguf, tiny

STRING, ARRAY, UINT8, UINT32, FLOAT32, BOOL = 8, 9, 0, 4, 6, 7


def string(text):
  encoded = text if isinstance(text, bytes) else text.encode()
  return struct.pack("<Q", len(encoded)) + encoded


def pair(key, kind, value):
  return string(key) + struct.pack("<I", kind) + value


def number(value):
  return struct.pack("<I", value)


@dataclasses.dataclass
class Tensor:
  name: str | bytes = "a"
  axes: tuple = (32,)
  kind: int = 0  # F32.
  offset: int = 0


def content(*, magic=b"GGUF", version=3, pairs=(), tensors=(), counts=None, data=b""):
  num_tensors, num_pairs = counts or (len(tensors), len(pairs))
  head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(pairs)
  for t in tensors:
    axes = struct.pack(f"<I{len(t.axes)}Q", len(t.axes), *t.axes)
    head += string(t.name) + axes + struct.pack("<IQ", t.kind, t.offset)
  return head + b"\0" * (-len(head) % 32) + data


ALIGNMENT = "general.alignment"
BROKEN = {
  "empty": b"",
  "magic": content(magic=b"GGUX"),
  "version-1": content(version=1),
  "big-endian": content(version=3 << 24),
  "cut-in-counts": content()[:12],
  "tensors-2^60": content(counts=(2**60, 0)),
  "keys-2^60": content(counts=(0, 2**60)),
  "keys-more": content(counts=(0, 1)),
  "key-length-2^60": content(pairs=[struct.pack("<Q", 2**60)]),
  "key-not-utf-8": content(pairs=[pair(b"\xff\xfe", UINT32, number(1))]),
  "key-twice": content(pairs=[pair("k", UINT32, number(1))] * 2),
  "value-type-99": content(pairs=[pair("k", 99, number(1))]),
  "string-2^60": content(pairs=[pair("k", STRING, struct.pack("<Q", 2**60))]),
  "string-not-utf-8": content(pairs=[pair("k", STRING, string(b"\xff"))]),
  "array-2^60": content(pairs=[pair("k", ARRAY, struct.pack("<IQ", UINT32, 2**60))]),
  "strings-2^60": content(pairs=[pair("k", ARRAY, struct.pack("<IQ", STRING, 2**60))]),
  "arrays-in-arrays": content(pairs=[pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000)]),
  "array-of-99": content(pairs=[pair("k", ARRAY, struct.pack("<IQ", 99, 1))]),
  "alignment-0": content(pairs=[pair(ALIGNMENT, UINT32, number(0))]),
  "alignment-3": content(pairs=[pair(ALIGNMENT, UINT32, number(3))]),
  "alignment-string": content(pairs=[pair(ALIGNMENT, STRING, string("32"))]),
  "alignment-true": content(pairs=[pair(ALIGNMENT, BOOL, b"\1")]),
  "axes-2^31": content(counts=(1, 0)) + string("a") + number(2**31) + bytes(64),
  "size-2^63": content(tensors=[Tensor(axes=(2**63, 2**63))], data=bytes(128)),
  "type-999": content(tensors=[Tensor(kind=999)], data=bytes(128)),
  "blocks": content(tensors=[Tensor(kind=8, axes=(33,))], data=bytes(128)),
  "name-twice": content(tensors=[Tensor(), Tensor(offset=128)], data=bytes(256)),
  "name-not-utf-8": content(tensors=[Tensor(name=b"\xff")], data=bytes(128)),
  "offset-2^63": content(tensors=[Tensor(offset=2**63)], data=bytes(128)),
  "data-cut": content(tensors=[Tensor()], data=bytes(127)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_refused_in_one_line(name, tmp_path):
  (tmp_path / "a.gguf").write_bytes(BROKEN[name])
  start = time.monotonic()
  with pytest.raises(ModelError, match="a.gguf: is cut short or not a GGUF file") as raised:
    gguf_header.read(tmp_path / "a.gguf")
  assert "\n" not in str(raised.value) and time.monotonic() - start < 5


def test_a_whole_header_is_read(tmp_path):
  pairs = [
    pair("n", UINT32, number(7)),
    pair("s", STRING, string("é")),
    pair("f", FLOAT32, struct.pack("<f", 0.5)),
    pair("b", BOOL, b"\1"),
    pair("a", ARRAY, struct.pack("<IQ3I", UINT32, 3, 1, 2, 3)),
    pair("t", ARRAY, struct.pack("<IQ", STRING, 2) + string("x") + string("")),
  ]
  tensors = [Tensor("one", (31,)), Tensor("two", (4, 8), offset=128)]
  (tmp_path / "a.gguf").write_bytes(content(pairs=pairs, tensors=tensors, data=bytes(256)))
  header = gguf_header.read(tmp_path / "a.gguf")
  wanted = {"n": 7, "s": "é", "f": 0.5, "b": True, "a": [1, 2, 3], "t": ["x", ""]}
  assert header.metadata == wanted
  assert [(e.shape, e.data.shape) for e in header.tensors.values()] == [((31,),) * 2, ((8, 4),) * 2]


def test_a_header_of_more_values_than_any_vocabulary_has_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(gguf_header, "MOST_READS", 100)
  many = pair("k", ARRAY, struct.pack("<IQ", UINT8, 200) + bytes(200))
  (tmp_path / "a.gguf").write_bytes(content(pairs=[many]))
  with pytest.raises(ModelError, match="more than 100 numbers and strings before the tensors"):
    gguf_header.read(tmp_path / "a.gguf")


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("llama.block_count", 10**9),
    ("llama.block_count", 0),
    ("llama.attention.head_count", 0),
    ("llama.attention.head_count_kv", 0),
    ("llama.attention.key_length", 1),
    ("llama.embedding_length", 2**60),
    ("llama.context_length", 2**60),
    ("llama.rope.freq_base", 0),
    ("llama.attention.layer_norm_rms_epsilon", 0),
    ("general.architecture", 5),
    ("tokenizer.ggml.eos_token_id", 10**6),
    ("tokenizer.ggml.tokens", 5),
    ("tokenizer.ggml.merges", 5),
    ("tokenizer.ggml.token_type", 5),
    ("tokenizer.chat_template", 5),
    ("tokenizer.ggml.pre", 5),
  ],
)
def test_metadata_out_of_range_is_refused_by_its_key(key, value, tmp_path, monkeypatch):
  config = tiny.config(vocab_size=len(test_gguf.TOKENS), num_layers=1)
  test_gguf.write(tmp_path / "a.gguf", config, test_gguf.random_tensors(config))
  read = gguf_header.read

  def changed(file):
    header = read(file)
    return dataclasses.replace(header, metadata={**header.metadata, key: value})

  monkeypatch.setattr(gguf_header, "read", changed)
  with pytest.raises(ModelError, match=r"a.gguf.*") as raised:
    gguf.convert(tmp_path / "a.gguf", tmp_path / "a")
  assert "\n" not in str(raised.value)
  assert key in str(raised.value) or key.rpartition(".")[2] in str(raised.value)
  assert not (tmp_path / "a").exists()


def test_the_tokenizer_of_a_gguf_file_has_to_fit_together(tmp_path):
  config = tiny.config(vocab_size=len(test_gguf.TOKENS), num_layers=1)
  test_gguf.write(tmp_path / "a.gguf", config, test_gguf.random_tensors(config))
  metadata = gguf_header.read(tmp_path / "a.gguf").metadata
  for change, message in (
    ({"tokenizer.ggml.token_type": [1]}, "token_type needs a list"),
    ({"tokenizer.ggml.merges": ["abc"]}, "merges needs a list of pairs"),
    ({"tokenizer.ggml.tokens": []}, "0 tokens"),
    ({"tokenizer.ggml.tokens": ["a"] * 10**4}, "10000 tokens, but the embedding"),
    ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token needs true or false"),
  ):
    with pytest.raises(ModelError, match=message):
      fields = Fields({**metadata, **change}, "a.gguf")
      gguf_tokenizer.files(fields, vocab_size=len(test_gguf.TOKENS))
