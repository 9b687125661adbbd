"""What a run with an adapter checks, reads and says before anything is trained."""

import json
import logging
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs.base
from grpo_jax import data
from grpo_jax.building import adapter, computation
from grpo_jax.config import run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.learn import sharding
from grpo_jax.models import adapter_files, export, leaves, loading, lora, parameter_reading, tiny
from grpo_jax.run_folder import checkpointing


def config_of(model, **settings):
  config = configs.base.get_config()
  given = {f"model.lora.{name}": value for name, value in settings.items()}
  config.update_from_flattened_dict({"model.path": str(model), **given})
  return config


def made_of(config, model, devices=1):
  mesh = sharding.make_mesh(fsdp=devices, data=1, devices=jax.devices()[:devices])
  return computation.make(
    typed(config), loading.read_config(model), mesh, run_options.objective(typed(config))
  )


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory):
  """A PEFT folder of rank 4 on three kernels, and its adapter; B is not 0."""
  options = lora.AdapterOptions(rank=4, alpha=8.0, targets=("q", "o", "down"))
  sizes = loading.read_config(model)
  made = jax.tree.map(lambda x: x + 0.5, lora.init(jax.random.key(0), sizes, options))
  folder = tmp_path_factory.mktemp("peft") / "adapter"
  return adapter_files.write(made, sizes, options, folder, base=str(model)), made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "nf4"])
def test_the_rounding_of_the_base_is_measured_while_it_is_read(model, dtype, caplog):
  """On one device, and on a mesh that splits some weights and copies others."""
  config = run_options.resolved(config_of(model, rank=2, base_dtype=dtype))
  found = []
  for devices in (1, 1 if dtype == "nf4" else 4):  # its blocks are as long as the model is wide.
    read = made_of(config, model, devices=devices).read
    sharding = lambda _, read=read: read.shardings
    loaded = loading.load(model, sharding=sharding, dtype=read.dtype)
    found.append(adapter.with_rounding(typed(config), loaded).rounding.relative)
  tensors, sizes = loading.safetensors.open_folder(model), loading.read_config(model)
  exact, error = 0.0, 0.0
  for stored in leaves.stored(sizes):
    if stored.leaf.kind in read.dtype:
      values = tensors.read(stored.name).astype(np.float64)
      rounded = parameter_reading.rounded(tensors.read(stored.name), stored.leaf, dtypes=read.dtype)
      exact += np.sum(values**2)
      error += np.sum((rounded - values) ** 2)
  np.testing.assert_allclose(found, np.sqrt(error / exact), rtol=1e-4)
  lines = [record.getMessage() for record in caplog.records]
  assert len(lines) == (0 if dtype == "float32" else 2)
  if lines:
    assert f"base_dtype={dtype!r} rounds the weights of {model} by a relative" in lines[0]
    assert f"{found[0]:.1e}" in lines[0] and "export/" in lines[0]


def test_weights_that_the_dtype_holds_are_not_rounded(model, tmp_path):
  loaded = loading.load(model, dtype=jnp.bfloat16)
  assert loaded.rounding.relative > 1e-4
  export.to_huggingface(loaded.params, loaded.config, tmp_path / "a")
  for dtype in (jnp.bfloat16, jnp.float32):
    assert loading.load(tmp_path / "a", dtype=dtype).rounding.relative == 0.0
  assert loading.load(tmp_path / "a", dtype=jnp.float16).rounding.relative > 0.0


def test_processes_that_read_the_same_weights_count_them_once(monkeypatch):
  """Two of four processes have each half of an array."""

  class Sharding:
    def devices_indices_map(self, shape):
      devices = [mock.Mock(process_index=process) for process in range(4)]
      return {each: (slice(0, 2),) for each in devices[:2]} | {
        each: (slice(2, 4),) for each in devices[2:]
      }

  assert parameter_reading._shares(Sharding(), (4,)) == {((0, 2, 1),): 0.5, ((2, 4, 1),): 0.5}
  parts = [[1.0, 8.0], [2.0, 8.0], [1.0, 8.0], [5.0, 12.0]]
  monkeypatch.setattr(adapter.processes, "exchange", lambda own, *, what: parts)
  read = loading.Loaded(tiny._config("llama", 32), {}, pathlib.Path(), {})
  whole = adapter.with_rounding(typed(config_of("m", rank=2)), read)
  assert whole.rounding.relative == 0.5
  assert adapter.with_rounding(typed(config_of("m")), read) is read


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_an_adapter_of_another_chat_template_warns(model, tmp_path, template, caplog):
  (tmp_path / "adapter").mkdir()
  templates = {"default": template} if template else None
  adapter_files.write_tokenizer(tmp_path / "adapter", model, templates)
  config = config_of(model, path=str(tmp_path / "adapter"))
  adapter.check_prompts(typed(config), data.load_tokenizer(model), model)
  assert ("was trained with another chat template" in caplog.text) == bool(template)


def test_a_run_begins_with_the_adapter_of_a_folder(model, stored):
  folder, wanted = stored
  config = run_options.resolved(config_of(model, path=str(folder)))
  made = made_of(config, model, devices=4)
  read = adapter.read(typed(config), made)
  assert jax.tree.map(lambda x: x.sharding, read) == made.trainable_shardings
  jax.tree.map(np.testing.assert_array_equal, read, wanted)
  params = loading.load(model, dtype=made.read.dtype).params
  trainable, policy = made.begin(params, read)
  assert trainable is read
  full = policy.full(trainable)["layers"]["down"]
  assert full.a is read["down"]["a"] and full.scale == 2.0
  assert policy.reference is params, "the reference is the base, without the adapter"


def test_the_log_says_that_a_run_begins_apart_from_its_reference(model, stored, caplog):
  caplog.set_level(logging.INFO)
  adapter.log_beginning(typed(config_of(model, rank=2)))
  assert not caplog.messages
  config = config_of(model, path=str(stored[0]))
  config.loss.kl_coef = 0.1
  adapter.log_beginning(typed(config))
  (line,) = caplog.messages
  assert str(stored[0]) in line and "is not 0 at the first step" in line
  assert line.endswith("(all/kl_to_initial, and the KL of the loss)")


@pytest.mark.long
def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_alone(model):
  config = config_of(model, rank=2)
  made = made_of(config, model, devices=4)
  assert adapter.read(typed(config), made) is None
  one, policy = made.begin({"layers": {}}, None)
  other, _ = made_of(config, model).begin({"layers": {}}, None)
  jax.tree.map(np.testing.assert_array_equal, one, other)
  assert not any(np.any(parts["b"]) for parts in one.values())
  assert jax.tree.map(lambda x: x.sharding, one) == made.trainable_shardings
  config.seed = 7
  changed, _ = made_of(config, model).begin({"layers": {}}, None)
  assert np.any(np.asarray(changed["q"]["a"]) != np.asarray(one["q"]["a"]))


def test_ranks_that_the_kernels_do_not_have(model, caplog):
  facts = loading.read_facts(model)
  adapter.check(typed(config_of(model, rank=16)), facts)  # as wide as the smallest kernel.
  assert not caplog.records
  adapter.check(typed(config_of(model, rank=32)), facts)
  assert "rank=32 is larger than needed for k 32 × 16, v 32 × 16" in caplog.text
  with pytest.raises(ConfigError, match="rank=33 is larger .* at most 32 can be of use"):
    adapter.check(typed(config_of(model, rank=33)), facts)
  with pytest.raises(ConfigError, match="rank=17 is larger .*k 32 × 16; .* at most 16"):
    adapter.check(typed(config_of(model, rank=17, targets=("k",))), facts)
  adapter.check(typed(config_of(model)), facts)


@pytest.mark.long
def test_experts_have_adapters_and_are_not_quantised(tmp_path):
  folder = tiny.write(tmp_path / "mixture", family="qwen3_moe")
  facts = loading.read_facts(folder)
  own = {"rank": 4, "targets": ("q", "o")}
  adapter.check(typed(config_of(folder, **own)), facts)
  config = config_of(folder, rank=4)
  adapter.check(typed(config), facts)
  with pytest.raises(ConfigError, match=r"of a mixture without expert_up: .*\(.*mixture\)$"):
    adapter.check(typed(config_of(folder, rank=4, targets=("gate",))), facts)
  config.engine.name = "sglang"
  config.model.compute_dtype = "bfloat16"
  with pytest.raises(ConfigError, match=r"SGLang servers get merged only: set model.lora.sync='me"):
    adapter.check(typed(config), facts)
  config.model.lora.sync = "merged"
  adapter.check(typed(config), facts)
  with pytest.raises(ConfigError, match=r"base_dtype='nf4' needs a model without experts"):
    adapter.check(typed(config_of(folder, **own, base_dtype="nf4")), facts)


def test_an_adapter_of_another_model_is_refused(stored, tmp_path):
  other = tiny.write(tmp_path / "wider", hidden_size=64)
  config = run_options.resolved(config_of(other, path=str(stored[0])))
  with pytest.raises(ConfigError, match=r"model\.lora\.path: .*q"):
    adapter.check(config, loading.read_facts(other))


def test_facts_name_the_base_by_its_weights(model, tmp_path):
  facts = adapter.facts(typed(config_of(model, rank=2)), loading.read_facts(model))["adapter"]
  assert adapter.facts(typed(config_of(model)), loading.read_facts(model)) == {}
  moved = tmp_path / "moved"
  moved.mkdir()
  for file in model.iterdir():
    (moved / file.name).write_bytes(file.read_bytes())
  elsewhere = adapter.facts(typed(config_of(moved, rank=2)), loading.read_facts(moved))["adapter"]
  assert elsewhere["base"] != facts["base"]
  assert not list(adapter.differences(facts, elsewhere)), "a base that was moved is the same"
  other = tiny.write(tmp_path / "other", seed=3)
  changed = adapter.facts(typed(config_of(other, rank=2)), loading.read_facts(other))["adapter"]
  (line,) = adapter.differences(facts, changed)
  assert str(model) in line and str(other) in line


def test_the_sizes_are_logged(model, caplog):
  caplog.set_level(logging.INFO)
  adapter.log_sizes(made_of(config_of(model, rank=2, targets=("q",)), model))
  count = 2 * 2 * (32 + 32)
  assert f"LoRA: rank 2 on q trains {count} of " in caplog.text
  assert f"adapter {4 * count / 1e3:.1f} kB" in caplog.text and "(bfloat16)" in caplog.text
  caplog.clear()
  adapter.log_sizes(made_of(config_of(model), model))
  assert not caplog.records


def test_checkpoints_of_another_kind_are_refused_by_name(tmp_path):
  facts = {
    "base": "/a",
    "base_digest": "0",
    "rank": 4,
    "alpha": 32.0,
    "targets": ["q"],
    "rank_stabilized": False,
    "base_dtype": "int8",
  }

  def check(name, extra, now):
    if extra is not None:
      (tmp_path / name / "step_00000002").mkdir(parents=True)
      info = {"step": 2, "metrics": {}, "extra": extra, "leaves": {}}
      (tmp_path / name / "step_00000002" / "info.json").write_text(json.dumps(info))
    with checkpointing.open(tmp_path / name) as checkpoints:
      adapter.check_same(checkpoints, now)

  own = {"adapter": facts}
  check("new", None, own)  # nothing was saved yet.
  check("older", {"stream": {}}, {})  # of full training, before there were facts.
  check("same", own, own)
  with pytest.raises(ConfigError, match="was None .every weight is trained., is 4"):
    check("of all weights", {"stream": {}}, own)
  with pytest.raises(ConfigError, match="was 4, is None .every weight is trained."):
    check("of an adapter", own, {})
  both = {**facts, "rank": 8, "base_dtype": "nf4"}
  with pytest.raises(ConfigError, match=r"(?s)rank: was 4, is 8.*base_dtype: was int8, is nf4"):
    check("another", own, {"adapter": both})
