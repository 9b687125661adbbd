"""Model folders that are broken or hostile: each ends in one line with the file and the reason."""

import json
import pathlib
import shutil
import struct
import time

import pytest

from grpo_jax import data
from grpo_jax.errors import ExpectedFailure
from grpo_jax.models import loading, tiny

CHAT = [{"role": "user", "content": "2 + 2?"}]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, SETTINGS, GENERATION = (
  "tokenizer.json",
  "tokenizer_config.json",
  "generation_config.json",
)
TEMPLATE = "chat_template.jinja"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return tiny.write(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def folder(whole, tmp_path):
  return pathlib.Path(shutil.copytree(whole, tmp_path / "model"))


def use(folder):
  """Does what a run does with a folder before it reads the weights."""
  config = loading.look(folder)
  tokenizer = data.load_tokenizer(folder)
  data.check_vocabulary(tokenizer, config.vocab_size)
  return tokenizer.prompt(CHAT, max_tokens=64)


def test_the_whole_folder_can_be_used(folder):
  assert use(folder).text.endswith("<|im_start|>assistant\n")


def fields(**change):
  """Changes fields of a JSON file; None removes one."""

  def apply(file):
    content = json.loads(file.read_text())
    content.update(change)
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

  return apply


def text(content):
  return lambda file: file.write_text(content)


def raw(content):
  return lambda file: file.write_bytes(content)


def remove(file):
  file.unlink()


def cut(file):
  file.write_bytes(file.read_bytes()[:-7])


def as_folder(file):
  file.unlink(missing_ok=True)
  file.mkdir()


def sparse(size, start=b""):
  def apply(file):
    with file.open("wb") as stream:
      stream.write(start)
      stream.truncate(size)

  return apply


def header(change):
  """Changes the header of a safetensors file; its data stay."""

  def apply(file):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    new = change(json.loads(content[8 : 8 + length]))
    new = new if isinstance(new, bytes) else json.dumps(new).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])

  return apply


def entry(**change):
  """Changes the header's entry of the final norm."""
  return header(lambda h: {**h, "model.norm.weight": {**h["model.norm.weight"], **change}})


def twice(h):
  """Returns a header that names the final norm a second time, with the same bytes."""
  again = json.dumps({"model.norm.weight": h["model.norm.weight"]}).encode()
  return json.dumps(h).encode()[:-1] + b", " + again[1:]


def moved(by):
  """Shifts the header's place of the final norm."""

  def change(h):
    begin, end = h["model.norm.weight"]["data_offsets"]
    return {
      **h,
      "model.norm.weight": {**h["model.norm.weight"], "data_offsets": [begin + by, end + by]},
    }

  return header(change)


def index(content):
  """Writes an index; {FILE} in it stands for the one file of weights, under another name."""

  def apply(file):
    (file.parent / WEIGHTS).rename(file.parent / "a.safetensors")
    file.write_text(json.dumps(content))

  return apply


DEEP = "[" * 100_000 + "]" * 100_000
JSON_FILES = (CONFIG, TOKENIZER, SETTINGS, GENERATION)
DIGITS = '{"a": ' + "9" * 5000 + "}"
BROKEN = [
  *((name, f"{name}-{kind}", change) for name in JSON_FILES for kind, change in (
    ("empty", text("")), ("list", text("[]")), ("number", text("7")), ("null", text("null")),
    ("torn", cut), ("bytes", raw(bytes(range(256)))), ("deep", text(DEEP)),
    ("huge", sparse(20 << 30)), ("folder", as_folder), ("digits", text(DIGITS)),
  )),
  (CONFIG, "removed", remove),
  (CONFIG, "architectures-number", fields(architectures=3)),
  (CONFIG, "architectures-string", fields(architectures="LlamaForCausalLM")),
  (CONFIG, "architectures-numbers", fields(architectures=[3])),
  (CONFIG, "architectures-lists", fields(architectures=[["LlamaForCausalLM"]])),
  (CONFIG, "model-type-list", fields(architectures=None, model_type=[])),
  (CONFIG, "another-architecture", fields(architectures=["MambaForCausalLM"])),
  *((CONFIG, f"{name}-{value}", fields(**{name: value})) for name, values in {
    "num_attention_heads": (0, -4, "4", 1.5, True, [4], 10**9),
    "num_key_value_heads": (0, -1, "1", 3, 10**9),
    "num_hidden_layers": (0, -1, "2", 10**9, 3, 1e400),
    "hidden_size": (0, "32", 10**9, 33),
    "intermediate_size": (0, {}, 10**18),
    "vocab_size": (0, -1, "264", 10**12, 7),
    "head_dim": (0, 7, "8", 10**9),
    "rms_norm_eps": (0, -1e-6, "1e-6", 1e400, True),
    "max_position_embeddings": (0, "2048", 10**12),
    "tie_word_embeddings": ("false", 1, "no"),
    "attention_bias": ("false", 0),
    "layer_types": ("full_attention", 5, [5]),
    "hidden_act": (5, ["silu"]),
    "use_sliding_window": ("false",),
    "partial_rotary_factor": ("1", 0),
    "rope_scaling": (5, [], "linear"),
    "eos_token_id": ("2", [[2]], 1.5, True, {}),
  }.items() for value in values),
  *((CONFIG, f"theta-{value}", fields(rope_parameters=None, rope_theta=value))
    for value in (0, -1, "1e4", [])),
  *((CONFIG, f"linear-{value}", fields(rope_parameters=None, rope_scaling=dict(
    type="linear", factor=value))) for value in (0, "2", -1, True)),
  (CONFIG, "rope-type-list", fields(rope_parameters={"rope_type": ["linear"]})),
  (CONFIG, "rope-theta-0", fields(rope_parameters={"rope_theta": 0, "rope_type": "default"})),
  (WEIGHTS, "removed", remove),
  (WEIGHTS, "empty", raw(b"")),
  (WEIGHTS, "torn", cut),
  (WEIGHTS, "longer", lambda file: file.write_bytes(file.read_bytes() + b"\0" * 8)),
  (WEIGHTS, "folder", as_folder),
  (WEIGHTS, "header-of-20-GB", sparse(21 << 30, struct.pack("<Q", 20 << 30))),
  (WEIGHTS, "header-length-2^63", raw(struct.pack("<Q", 2**63) + b"{}")),
  (WEIGHTS, "header-list", header(lambda h: [])),
  (WEIGHTS, "header-number", header(lambda h: 5)),
  (WEIGHTS, "header-null", header(lambda h: None)),
  (WEIGHTS, "header-bytes", header(lambda h: b"\xff\xfe{")),
  (WEIGHTS, "header-deep", header(lambda h: DEEP.encode())),
  (WEIGHTS, "metadata-list", header(lambda h: {**h, "__metadata__": []})),
  (WEIGHTS, "entry-null", header(lambda h: {**h, "model.norm.weight": None})),
  (WEIGHTS, "entry-list", header(lambda h: {**h, "model.norm.weight": []})),
  (WEIGHTS, "entry-missing", header(lambda h: {k: v for k, v in h.items() if "norm" not in k})),
  (WEIGHTS, "dtype-missing", entry(dtype=None)),
  (WEIGHTS, "dtype-NaN", entry(dtype=float("nan"))),
  (WEIGHTS, "dtype-other", entry(dtype="F8_E5M2")),
  (WEIGHTS, "dtype-list", entry(dtype=["F32"])),
  (WEIGHTS, "shape-other", entry(shape=[16])),
  (WEIGHTS, "shape-string", entry(shape="32")),
  (WEIGHTS, "shape-negative", entry(shape=[-32])),
  (WEIGHTS, "shape-huge", entry(shape=[2**62, 2**62])),
  (WEIGHTS, "shape-floats", entry(shape=[32.0])),
  (WEIGHTS, "offsets-words", entry(data_offsets=["0", "128"])),
  (WEIGHTS, "offsets-one", entry(data_offsets=[0])),
  (WEIGHTS, "offsets-reversed", entry(data_offsets=[128, 0])),
  (WEIGHTS, "offsets-null", entry(data_offsets=None)),
  (WEIGHTS, "overlapping", moved(-8)),
  (WEIGHTS, "gap", moved(8)),
  (WEIGHTS, "tensor-twice", header(twice)),
  (INDEX, "without-weight-map", index({})),
  (INDEX, "weight-map-list", index({"weight_map": []})),
  (INDEX, "weight-map-empty", index({"weight_map": {}})),
  (INDEX, "weight-map-numbers", index({"weight_map": {"a": 5}})),
  (INDEX, "outside", index({"weight_map": {"a": "../whole/model.safetensors"}})),
  (INDEX, "absolute", index({"weight_map": {"a": "/etc/passwd"}})),
  (INDEX, "missing-file", index({"weight_map": {"a": "b.safetensors"}})),
  (INDEX, "wrong-file", index({"weight_map": {"a": "a.safetensors"}})),
  (INDEX, "number", index(5)),
  (TOKENIZER, "removed", remove),
  (TOKENIZER, "model-list", fields(model=[])),
  (TOKENIZER, "model-empty", fields(model={})),
  (TOKENIZER, "model-unknown", fields(model={"type": "Nonsense"})),
  (TOKENIZER, "vocab-list", fields(model={"type": "BPE", "vocab": [], "merges": []})),
  (TOKENIZER, "added-tokens-number", fields(added_tokens=5)),
  (TOKENIZER, "normalizer-bomb", fields(normalizer={"type": "Sequence", "normalizers": [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40})),
  (SETTINGS, "eos-number", fields(eos_token=5)),
  (SETTINGS, "length-word", fields(model_max_length="x")),
  (SETTINGS, "template-half-a-pair", fields(chat_template="\ud800")),
  (CONFIG, "long-names", fields(architectures=["a" * 10_000])),
  (CONFIG, "long-act", fields(hidden_act="a" * 10_000)),
  (SETTINGS, "template-number", fields(chat_template=5)),
  (SETTINGS, "templates-without-default", fields(chat_template=[{"name": "a", "template": "b"}])),
  (GENERATION, "eos-string", fields(eos_token_id="2")),
  (GENERATION, "eos-outside", fields(eos_token_id=10**6)),
  (GENERATION, "eos-huge", fields(eos_token_id=10**30)),
  (TEMPLATE, "syntax", text("{% if")),
  (TEMPLATE, "unknown-filter", text("{{ messages | nonsense }}")),
  (TEMPLATE, "undefined", text("{{ nothing.at.all }}")),
  (TEMPLATE, "raises", text("{{ raise_exception('no') }}")),
  (TEMPLATE, "include", text("{% include '/etc/passwd' %}")),
  (TEMPLATE, "bytes", raw(b"\xff\xfe\xfd")),
  (TEMPLATE, "huge", sparse(20 << 30)),
  (TEMPLATE, "multiplied", text("{{ 'a' * 10 ** 18 }}")),
  (TEMPLATE, "dunder", text("{{ messages.__class__.__mro__ }}")),
]  # fmt: skip


def test_enough_is_tried():
  assert len(BROKEN) >= 150 and len({(name, case) for name, case, _ in BROKEN}) == len(BROKEN)


@pytest.mark.filterwarnings("ignore")  # of transformers, about what it reads.
@pytest.mark.parametrize(
  ("name", "damage"),
  [(name, damage) for name, _, damage in BROKEN],
  ids=[f"{name.split('.')[0]}-{case}" for name, case, _ in BROKEN],
)
def test_a_broken_folder_ends_in_one_line(name, damage, folder):
  damage(folder / name)
  start = time.monotonic()
  with pytest.raises(ExpectedFailure) as raised:
    use(folder)
  assert time.monotonic() - start < 60
  message = str(raised.value)
  assert str(folder) in message and len(message) < 2000 and "\n" not in message
  assert isinstance(raised.value, ValueError)
