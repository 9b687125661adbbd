"""What SGLang gets of an adapter, and which servers are refused for it."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from grpo_jax.engines import served_adapter
from grpo_jax.engines.transfer import TransferError, WeightFolders
from grpo_jax.models import lora, quantized
from tests.engines import sglang_fixtures, tiny

CONFIG = tiny.config()
OPTIONS = lora.AdapterOptions(rank=4, alpha=8.0, targets=("q", "up"), rank_stabilized=True)


def joined(options=OPTIONS, seed=0):
  make = lambda leaf: jax.random.normal(jax.random.key(seed), leaf.shape)
  adapter = jax.tree.map(make, lora.tree(CONFIG, options))
  return lora.join(tiny.params(CONFIG), adapter, options.scale)


@pytest.fixture
def folders(tmp_path):
  source = sglang_fixtures.write_model(tmp_path / "source")
  made = WeightFolders(tmp_path / "root", CONFIG, source_directory=source, dtype="float32")
  yield made
  made.close()


def test_kernels_that_sglang_joins_come_together_the_others_as_zeros(folders):
  params = joined()
  folder = folders.write_adapter(params, version=3)
  stored = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
  config = json.loads((folder / "adapter_config.json").read_text())
  assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
  assert (config["r"], config["use_rslora"]) == (4, False)
  assert config["lora_alpha"] / config["r"] == pytest.approx(8.0 / 2)  # SGLang's scale.
  assert len(stored) == 2 * CONFIG.num_layers * 5
  name = "base_model.model.model.layers.1.{}.lora_{}.weight".format
  up = params["layers"]["up"]
  np.testing.assert_array_equal(stored[name("mlp.up_proj", "A")], np.asarray(up.a[1]).T)
  np.testing.assert_array_equal(stored[name("mlp.up_proj", "B")], np.asarray(up.b[1]).T)
  for module in ("mlp.gate_proj", "self_attn.k_proj"):
    assert not stored[name(module, "A")].any() and not stored[name(module, "B")].any()
  assert folders.written.bytes == sum(x.nbytes for x in stored.values())


def test_a_server_that_maps_an_adapter_keeps_its_values_whatever_is_written_later(folders):
  first = folders.write_adapter(joined(seed=1), version=1)
  file = first / "adapter_model.safetensors"
  held = np.memmap(file, np.uint8, "r")  # as SGLang holds it.
  before = bytes(held)
  for version in range(2, 5):
    folders.discard_adapter(first)
    assert not first.exists()  # so that it cannot be loaded again.
    first = folders.write_adapter(joined(seed=version), version=version)
    assert (first / file.name).read_bytes() != before
  assert bytes(held) == before
  assert sorted(p.name for p in folders.folder.iterdir()) == [".lock", "v000004"]


def test_the_base_stays_while_adapters_follow_each_other(folders):
  base = folders.write_base(joined())
  written = safetensors.numpy.load_file(base / "model.safetensors")
  np.testing.assert_array_equal(
    written["model.layers.0.self_attn.q_proj.weight"],
    np.asarray(tiny.params(CONFIG)["layers"]["q"])[0].T,
  )
  folders.discard_adapter(folders.write_adapter(joined(), version=0))
  assert (base / "model.safetensors").exists() and (base / "tokenizer.json").exists()


def test_merged_weights_are_what_the_trainer_multiplies_by(folders):
  params = joined()
  written = safetensors.numpy.load_file(folders.write(params, version=1) / "model.safetensors")
  up = np.asarray(lora.merged(params["layers"]["up"]))[1].T
  np.testing.assert_allclose(written["model.layers.1.mlp.up_proj.weight"], up, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [quantized.Int8, quantized.Nf4])
def test_a_quantised_base_is_written_as_the_trainer_has_it(folders, form):
  plain = tiny.params(CONFIG)
  kernel = quantized.quantize(np.asarray(plain["layers"]["q"]), form)
  kernel = jax.tree.map(jax.numpy.asarray, kernel)
  base = {**plain, "layers": {**plain["layers"], "q": kernel}}
  written = safetensors.numpy.load_file(folders.write_base(base) / "model.safetensors")
  wanted = np.asarray(quantized.dequantized(kernel))[1].T
  np.testing.assert_array_equal(written["model.layers.1.self_attn.q_proj.weight"], wanted)
  assert np.abs(wanted - np.asarray(plain["layers"]["q"])[1].T).max() > 1e-4


def test_an_adapter_that_finds_the_disk_full_leaves_the_one_in_use(small_disk, tmp_path):
  source = sglang_fixtures.write_model(tmp_path / "source")
  made = WeightFolders(small_disk / "w", CONFIG, source_directory=source, dtype="float32")
  made.write_adapter(joined(), version=1)
  (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 4096))
  with pytest.raises(TransferError, match="version 2 of the adapter could not be written"):
    made.write_adapter(joined(), version=2)
  assert sorted(p.name for p in made.folder.iterdir()) == [".lock", "v000001"]
  made.close()


ABLE = {
  "enable_lora": True,
  "max_lora_rank": 4,
  "lora_target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
  "max_loras_per_batch": 2,
  "max_loaded_loras": None,
  "dp_size": 1,
}


@pytest.mark.parametrize(
  ("changes", "why"),
  [
    ({}, None),
    ({"max_lora_rank": 64, "lora_target_modules": ["all"], "max_loaded_loras": 2}, None),
    ({"max_lora_rank": None, "lora_target_modules": None}, None),  # a load says it.
    ({"enable_lora": None}, "LoRA is off there"),
    ({"enable_lora": False}, "LoRA is off there"),
    ({"max_lora_rank": 3}, "its --max-lora-rank is 3, but model.lora.rank is 4"),
    ({"lora_target_modules": ["q_proj", "gate_proj", "up_proj"]}, "are without k_proj v_proj"),
    ({"max_loras_per_batch": 1}, "its --max-loras-per-batch is 1, but two versions"),
    ({"max_loaded_loras": 1}, "its --max-loaded-loras is 1, but two versions"),
    ({"dp_size": 2}, "its --dp-size is 2"),
  ],
)
def test_servers_that_cannot_serve_the_adapters_are_refused_with_the_option(changes, why):
  found = served_adapter.refusal({**ABLE, **changes}, OPTIONS)
  assert found is None if why is None else why in found


def test_an_answer_of_another_server_is_a_refusal():
  assert served_adapter.refusal(None, OPTIONS) == "LoRA is off there"


def test_a_server_that_is_launched_is_one_that_is_not_refused():
  words = served_adapter.arguments(OPTIONS)
  targets = words[words.index("--lora-target-modules") + 1 : words.index("--max-loras-per-batch")]
  info = {
    "enable_lora": "--enable-lora" in words,
    "max_lora_rank": int(words[words.index("--max-lora-rank") + 1]),
    "lora_target_modules": [*targets],
    "max_loras_per_batch": int(words[words.index("--max-loras-per-batch") + 1]),
  }
  assert served_adapter.refusal(info, OPTIONS) is None
  assert "--lora-strict-loading" in words


def test_names_differ_between_runs_and_versions(tmp_path):
  names = {
    served_adapter.name_of(tmp_path / run / version)
    for run in ("run-a", "run-b")
    for version in ("v000001", "v000002")
  }
  assert len(names) == 4 and all(map(served_adapter.is_name_of_run, names))
  assert not served_adapter.is_name_of_run("their-own")
