"""PEFT folders of others: what cannot be used is refused by name, whatever the files hold."""

import json
import math
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from grpo_jax.learn import sharding
from grpo_jax.models import adapter_files, lora, peft_format, safetensors
from grpo_jax.models.errors import MissingModel, ModelError
from tests.models import tiny

CONFIG = tiny.config()
OPTIONS = lora.AdapterOptions(2, 6.0, ("q", "v"))
LAST = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"


@pytest.fixture
def folder(tmp_path):
  return adapter_files.write(adapter(), CONFIG, OPTIONS, tmp_path / "adapter", base="org/model")


def adapter(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32)
  return jax.tree.map(draw, lora.tree(CONFIG, OPTIONS))


def described(folder, **changes):
  """Changes fields of adapter_config.json."""
  file = folder / adapter_files.CONFIG_FILE
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewritten(folder, change):
  """Changes the tensors, a dict of arrays by name."""
  file = folder / adapter_files.WEIGHTS_FILE
  opened = safetensors.Folder(safetensors.open_file(file))
  values = {name: opened.read(name) for name in opened.shapes}
  change(values)
  entries = [safetensors.ToWrite(k, x.shape, x.dtype, lambda x=x: x) for k, x in values.items()]
  safetensors.write_file(file, entries)


@pytest.mark.parametrize(
  ("fields", "reason"),
  [
    ({"use_dora": True}, "use_dora=True: DoRA is not supported"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern=.*: all kernels need the same rank"),
    ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern=.*: all kernels need the same lora_alpha"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*: only adapters of kernels"),
    ({"bias": "lora_only"}, "bias needs none; trained biases are not supported, got 'lora_only'"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"layers_to_transform": 0}, "layers_to_transform=0: an adapter of all layers"),
    ({"layers_to_transform": [1]}, "layers_to_transform=.1.: an adapter of all layers"),
    ({"layer_replication": [[0, 2]]}, "layer_replication="),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices="),
    ({"target_parameters": ["experts"]}, "target_parameters needs those of experts: mlp.experts"),
    ({"target_parameters": ["gate_up_proj"]}, "target_parameters needs those of experts"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens="),
    ({"use_something_new": 1}, "use_something_new=1: this option is not known here"),
    ({"peft_type": "IA3"}, "peft_type needs LORA; .*got 'IA3'"),
    ({"peft_type": None}, "peft_type needs LORA"),
    ({"task_type": "SEQ_CLS"}, "task_type needs CAUSAL_LM, got 'SEQ_CLS'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights needs .*change the base.* got 'pissa'"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights needs"),
    ({"init_lora_weights": ["gaussian"]}, "init_lora_weights needs"),
    ({"r": 0}, "r needs a whole number from 1"),
    ({"r": 10**30}, "r needs a whole number from 1"),
    ({"r": True}, "r needs a whole number from 1"),
    ({"r": 3}, r"lora_A.weight: has shape \[2, 24\], but the model and r imply \[3, 24\]"),
    ({"lora_alpha": "16"}, "lora_alpha needs a finite number above 0, got '16'"),
    ({"lora_alpha": math.nan}, "lora_alpha needs a finite number"),
    ({"lora_alpha": math.inf}, "lora_alpha needs a finite number"),
    ({"lora_alpha": 10**400}, "lora_alpha needs a finite number"),
    ({"lora_alpha": 0}, "lora_alpha needs a finite number above 0"),
    ({"use_rslora": "yes"}, "use_rslora needs true or false"),
    ({"target_modules": None}, "target_modules needs a list of modules, or a string"),
    ({"target_modules": {"q_proj": 1}}, "target_modules needs a list of modules, or a string"),
    ({"exclude_modules": 3}, "exclude_modules needs a list of modules, or a string"),
    ({"target_modules": [1]}, "target_modules needs a list of strings"),
    ({"target_modules": ["lm_head"]}, "target_modules needs kernels of a layer: q_proj"),
    ({"target_modules": ["q_proj"]}, "unexpected: .*layers.0.self_attn.v_proj.lora_A"),
    ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "missing: .*0.self_attn.k_proj.lora_A"),
    (
      {"target_modules": ["v_proj", "0.self_attn.q_proj"]},
      "q_proj of some layers and not of layer 1",
    ),
    ({"exclude_modules": ["v_proj"]}, "unexpected: .*v_proj"),
  ],
  ids=str,
)
def test_other_adapters_are_refused_by_name(folder, fields, reason):
  described(folder, **fields)
  with pytest.raises(ModelError, match=reason):
    adapter_files.look(folder, CONFIG)


@pytest.mark.parametrize(
  "fields",
  [
    {"lora_dropout": 0.1, "peft_version": "0.21.2", "revision": "main"},
    {"use_dora": False, "rank_pattern": {}, "modules_to_save": [], "loftq_config": {}},
    {"target_modules": ["q_proj", "self_attn.v_proj", "query_key_value"]},
    {"target_modules": "all-linear", "auto_mapping": {"parent_library": "x"}},
    {"inference_mode": False, "init_lora_weights": "gaussian", "task_type": None, "bias": None},
  ],
  ids=str,
)
def test_what_does_not_change_the_adapter_is_accepted(folder, fields):
  described(folder, **fields)
  assert adapter_files.look(folder, CONFIG).targets == ("q", "v")
  found = adapter_files.read(folder, CONFIG)
  assert jax.tree.all(jax.tree.map(np.array_equal, found, adapter()))


def test_a_pattern_of_a_file_is_never_executed(folder):
  """This one takes exponential time; the tensors say what it has matched."""
  rewritten(folder, lambda x: x.update({"base_model.model." + "a" * 5000: np.zeros(1, np.float32)}))
  described(folder, target_modules="(a+)+$", exclude_modules="(a|a)*b")
  started = time.monotonic()
  with pytest.raises(ModelError, match="unexpected: base_model.model.aaa"):
    adapter_files.look(folder, CONFIG)
  assert time.monotonic() - started < 5


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    (lambda x: x.pop(LAST), r"missing: .*layers.2.self_attn.v_proj.lora_B.weight \[16, 2\]"),
    (lambda x: x.update({LAST: x[LAST].T.copy()}), r"has shape \[2, 16\], .* imply \[16, 2\]"),
    (lambda x: x.update({LAST: x[LAST][:-1]}), r"has shape \[15, 2\]"),
    (lambda x: x.update(head=x[LAST]), r"unexpected: head \[16, 2\]"),
    (
      lambda x: x.update({LAST.replace("lora_B", "lora_magnitude_vector"): x[LAST]}),
      "unexpected: .*lora_magnitude_vector",
    ),
    (lambda x: x.update({LAST.replace(".2.", ".3."): x[LAST]}), "unexpected: .*layers.3"),
    (lambda x: x.clear(), "no tensor is an adapter of a kernel"),
  ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, reason):
  rewritten(folder, change)
  with pytest.raises(ModelError, match=reason):
    adapter_files.look(folder, CONFIG)


def test_an_adapter_of_a_model_of_another_size_is_refused(folder):
  with pytest.raises(
    ModelError, match=r"does not fit this llama model .*made for 'org/model'.*\[2, 24"
  ):
    adapter_files.look(folder, tiny.config(hidden_size=30))
  with pytest.raises(ModelError, match="missing: .*layers.3.self_attn"):
    adapter_files.look(folder, tiny.config(num_layers=4))
  with pytest.raises(ModelError, match="unexpected: .*layers.2.self_attn"):
    adapter_files.look(folder, tiny.config(num_layers=2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(folder, value):
  rewritten(folder, lambda x: x[LAST].__setitem__((0, 0), value))
  assert adapter_files.look(folder, CONFIG) == adapter_files.options(folder)  # reads no values.
  with pytest.raises(ModelError, match="v_proj.lora_B.weight has values that are not finite"):
    adapter_files.read(folder, CONFIG)


def test_values_too_large_for_the_dtype_are_refused(folder):
  rewritten(folder, lambda x: x.update({LAST: np.full(x[LAST].shape, 1e300)}))
  with pytest.raises(ModelError, match="not finite numbers of float32"):
    adapter_files.read(folder, CONFIG)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_dtypes_are_read_as_float32(folder, dtype):
  rewritten(folder, lambda x: x.update({name: values.astype(dtype) for name, values in x.items()}))
  found = adapter_files.read(folder, CONFIG)
  wanted = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), adapter())
  assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))
  assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (b"{", "is not JSON"),
    (b"[1]", "must be a JSON object"),
    (b'{"r": 1, "r": 2}', "'r' appears twice"),
    (b'{"a":' * 100_000, "nested too deeply|is not JSON"),
    (b'{"peft_type": "\xff"}', "is not JSON|not text in UTF-8"),
    (b" " * (17 << 20), "at most 16777216 are read"),
  ],
  ids=["cut", "list", "twice", "deep", "bytes", "long"],
)
def test_a_damaged_description_is_refused(folder, content, reason):
  (folder / adapter_files.CONFIG_FILE).write_bytes(content)
  with pytest.raises(ModelError, match=reason):
    adapter_files.options(folder)


def test_missing_and_pickled_files_are_named(folder):
  weights = folder / adapter_files.WEIGHTS_FILE
  weights.rename(folder / adapter_files.PICKLED_FILE)
  with pytest.raises(MissingModel, match=r"weights are in adapter_model.bin, a pickle"):
    adapter_files.look(folder, CONFIG)
  (folder / adapter_files.PICKLED_FILE).unlink()
  with pytest.raises(MissingModel, match="adapter_model.safetensors does not exist"):
    adapter_files.look(folder, CONFIG)
  (folder / adapter_files.CONFIG_FILE).unlink()
  with pytest.raises(MissingModel, match="adapter_config.json does not exist"):
    adapter_files.look(folder, CONFIG)


def test_a_file_that_is_cut_short_is_refused(folder):
  weights = folder / adapter_files.WEIGHTS_FILE
  weights.write_bytes(weights.read_bytes()[:-1])
  with pytest.raises(ModelError, match="cut short"):
    adapter_files.look(folder, CONFIG)


def test_an_adapter_is_read_into_its_sharding_and_written_from_it(folder, tmp_path):
  mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
  tree = lora.tree(CONFIG, OPTIONS)
  places = sharding.param_shardings(jax.tree.map(lambda x: x.axes, tree), mesh, shapes=tree)
  found = adapter_files.read(folder, CONFIG, sharding=places)
  assert jax.tree.all(jax.tree.map(np.array_equal, found, adapter()))
  assert jax.tree.map(lambda x: x.sharding, found) == places
  assert any(place.spec != PartitionSpec() for place in jax.tree.leaves(places))
  again = adapter_files.write(found, CONFIG, OPTIONS, tmp_path / "again", base="org/model")
  for path in folder.iterdir():
    assert (again / path.name).read_bytes() == path.read_bytes()


def test_an_adapter_is_replaced_as_a_whole(folder, monkeypatch):
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  monkeypatch.setattr(adapter_files.safetensors, "write_file", lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    adapter_files.write(adapter(1), CONFIG, OPTIONS, folder, base="other")
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
  monkeypatch.undo()
  adapter_files.write(adapter(1), CONFIG, OPTIONS, folder, base="other")
  assert adapter_files.base_of(folder) == "other"
  assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_only_one_leaf_is_on_the_host(monkeypatch):
  fetched = []
  fetch = adapter_files.arrays.fetch
  monkeypatch.setattr(adapter_files.arrays, "fetch", lambda x: fetched.append(x.shape) or fetch(x))
  for tensor in adapter_files.to_write(adapter(), CONFIG, OPTIONS):
    tensor.values()
  assert fetched == [leaf.shape for leaf in jax.tree.leaves(adapter())]  # each once.


def test_a_rank_stabilised_scale_is_one_that_every_reader_multiplies_by():
  options = lora.AdapterOptions(9, 8.0, rank_stabilized=True)
  written = peft_format.to_peft(CONFIG, options, base="x")
  assert written["use_rslora"] is False
  assert written["lora_alpha"] / written["r"] == pytest.approx(options.scale, rel=1e-15)
  assert written["lora_alpha"] == 24 and type(written["lora_alpha"]) is int
