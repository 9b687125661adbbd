"""Hugging Face folders: read, refused when wrong, written, and the two together the identity."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from grpo_jax import models
from grpo_jax.building import exporting
from grpo_jax.models import config as model_config
from grpo_jax.models import export, leaves, loading, transformer
from grpo_jax.models import safetensors as ours
from grpo_jax.models import tiny as tiny_models
from grpo_jax.models.mixture import Mixture
from tests import stored_runs
from tests.models import families, tiny

CONFIGS = {
  "llama-untied": tiny.config(tie_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True),
  "qwen2-tied": tiny.config(family="qwen2", qkv_bias=True),
  "qwen3-untied": tiny.config(family="qwen3", qk_norm=True, tie_embeddings=False),
  "gemma3": tiny.config(**tiny.GEMMA3),
  "qwen3_moe": tiny.config(family="qwen3_moe", qk_norm=True, mixture=Mixture(5, 2, 8, True)),
  "qwen2_moe": tiny.config(
    family="qwen2_moe", qkv_bias=True, mixture=Mixture(3, 1, 8, shared_width=9)
  ),
}


def assert_same(got, wanted):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(
      np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
    ),
    got,
    wanted,
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CONFIGS)
def test_export_and_import_are_the_identity_bit_for_bit(case, dtype, tmp_path):
  config = CONFIGS[case]
  params = jax.tree.map(lambda x: x.astype(dtype), tiny.random_params(config))
  export.to_huggingface(params, config, tmp_path / "a", max_shard_bytes=4000)
  loaded = models.load(tmp_path / "a", dtype=dtype)
  assert loaded.config == config
  assert_same(loaded.params, params)
  assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1


def test_import_and_export_are_the_identity_of_the_file(tmp_path):
  model = tiny.hf_model("qwen2")
  loaded = tiny.saved(model, tmp_path / "a")
  export.to_huggingface(
    loaded.params, loaded.config, tmp_path / "b", source_directory=tmp_path / "a"
  )
  first = safetensors.numpy.load_file(tmp_path / "a" / "model.safetensors")
  second = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
  assert first.keys() == second.keys()
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("case", CONFIGS)
def test_transformers_computes_the_same_from_an_exported_folder(case, tmp_path):
  config = CONFIGS[case]
  params = tiny.random_params(config)
  export.to_huggingface(params, config, tmp_path / "a", max_shard_bytes=9000)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "a", dtype=torch.float32, output_loading_info=True
  )
  assert not report["missing_keys"]
  assert not report["unexpected_keys"]
  tokens = tiny.tokens((2, 13))
  got = tiny.logits(params, config, *tiny.plain(tokens))
  assert tiny.relative_error(got, tiny.hf_logits(model.eval(), tokens)) < 1e-5


@pytest.mark.long
def test_transformers_loads_an_exported_checkpoint(tmp_path):
  run = stored_runs.write(tmp_path / "run", {3: None})
  exporting.run(f"{run}:3", tmp_path / "out", max_shard_gb=2e-5)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
  config, tokens = loading.read_config(tmp_path / "out"), tiny.tokens((2, 13))
  params = jax.tree.map(jnp.asarray, stored_runs.params_of(3))
  got = tiny.logits(params, config, *tiny.plain(tokens))
  assert tiny.relative_error(got, tiny.hf_logits(theirs.eval(), tokens)) < 1e-5
  assert theirs.generation_config.eos_token_id == 258
  shown = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
    [{"role": "user", "content": "2"}], tokenize=False
  )
  assert shown == "<|im_start|>user\n2<|im_end|>\n"


def test_export_keeps_the_sources_config_tokenizer_and_generation_settings(tmp_path):
  loaded = tiny.saved(tiny.hf_model("llama"), tmp_path / "a")
  for name, change in (
    ("config.json", {"my_field": [1]}),
    ("generation_config.json", {"top_k": 7}),
  ):
    file = tmp_path / "a" / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **change}))
  (tmp_path / "a" / "tokenizer.json").write_text("{}")
  export.to_huggingface(
    loaded.params,
    loaded.config,
    tmp_path / "b",
    source_directory=tmp_path / "a",
    dtype=jnp.bfloat16,
  )
  before, after = (json.loads((tmp_path / x / "config.json").read_text()) for x in "ab")
  assert after == {**before, "dtype": "bfloat16"}
  assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
  assert models.load(tmp_path / "b").generation["top_k"] == 7
  stored = ours.open_folder(tmp_path / "b").entries.values()
  assert {entry.dtype for entry in stored} == {np.dtype(ml_dtypes.bfloat16)}


def test_every_dtype_of_config_json_is_that_of_the_export(tmp_path):
  """Transformers 4 reads torch_dtype and 5 dtype; the oracle is the dtype that it loads."""
  loaded = tiny.saved(tiny.hf_model("llama"), tmp_path / "a")
  file = tmp_path / "a" / "config.json"
  content = {k: v for k, v in json.loads(file.read_text()).items() if k != "dtype"}
  old, new = {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}
  for stated in ({}, old, new, {**old, **new}, {"text_config": {**old, **new}, **new}):
    file.write_text(json.dumps({**content, **stated}))
    for dtype in ("float32", "bfloat16", "float16"):
      made = tmp_path / "b"
      export.to_huggingface(
        loaded.params,
        loaded.config,
        made,
        source_directory=tmp_path / "a",
        dtype=jnp.dtype(dtype),
      )
      written = json.loads((made / "config.json").read_text())
      wanted = json.loads(json.dumps(stated or new).replace("bfloat16", dtype))
      assert {name: written[name] for name in wanted} == wanted
      assert len({"dtype", "torch_dtype"} & {*written}) == len({**old, **new} & wanted.keys())
      if "text_config" not in stated:
        config = transformers.AutoConfig.from_pretrained(made)
        assert str(config.dtype) == f"torch.{dtype}"


@pytest.mark.long
@pytest.mark.parametrize("family", families.CLASSES)
def test_transformers_loads_small_models_of_every_family(family, tmp_path):
  """The defaults for token ids may be beyond the vocabulary: 128004 for the padding of SmolLM3.

  The model is made here, or is a folder in which the ids are missing.
  """
  ids = ("bos_token_id", "eos_token_id", "pad_token_id")
  tiny_models.write(tmp_path / "own", family=family)
  tiny.hf_model(family, **{**families.options(family), "pad_token_id": 0}).save_pretrained(
    tmp_path / "theirs"
  )
  file = tmp_path / "theirs" / "config.json"
  content = {k: v for k, v in json.loads(file.read_text()).items() if k not in ids}
  file.write_text(json.dumps(content))
  (tmp_path / "theirs" / "generation_config.json").unlink()
  loaded = models.load(tmp_path / "theirs")
  export.to_huggingface(
    loaded.params, loaded.config, tmp_path / "again", source_directory=tmp_path / "theirs"
  )
  for name in ("own", "again"):
    loaded = models.load(tmp_path / name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
    tokens = tiny.tokens((2, 13))
    got = tiny.logits(loaded.params, loaded.config, *tiny.plain(tokens))
    assert tiny.relative_error(got, tiny.hf_logits(theirs.eval(), tokens)) < 1e-5
    for settings in (theirs.config, theirs.generation_config):
      found = [getattr(settings, each) for each in ids]
      assert all(each is None or each < loaded.config.vocab_size for each in found), found


def test_export_refuses_a_source_of_another_model(tmp_path):
  tiny.hf_model("llama").save_pretrained(tmp_path / "a")
  config = tiny.config()
  with pytest.raises(ValueError, match="describes"):
    export.to_huggingface(
      tiny.random_params(config), config, tmp_path / "b", source_directory=tmp_path / "a"
    )


def test_an_export_that_fails_leaves_the_old_folder_and_no_scratch(tmp_path):
  config = tiny.config()
  params = tiny.random_params(config)
  export.to_huggingface(params, config, tmp_path / "a")
  broken = {**params, "embed": params["embed"][:5]}  # of another shape than the config says.
  with pytest.raises(ValueError, match="reshape"):
    export.to_huggingface(broken, config, tmp_path / "a")
  assert_same(models.load(tmp_path / "a").params, params)
  assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_export_replaces_a_folder_that_is_there(tmp_path):
  config = tiny.config()
  for seed in (0, 1):
    export.to_huggingface(tiny.random_params(config, seed), config, tmp_path / "a")
  assert_same(models.load(tmp_path / "a").params, tiny.random_params(config, 1))
  assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_safetensors_writes_transposed_views_and_the_library_reads_them(tmp_path):
  values = {
    "transposed": np.arange(35, dtype=np.float32).reshape(5, 7).T,
    "strided": np.arange(40, dtype=np.float16).reshape(4, 10)[::2, 1::3],
    "scalar": np.array(3.0, np.float32),
    "empty": np.zeros((0, 4), np.float32),
  }
  tensors = [
    ours.ToWrite(name, value.shape, value.dtype, lambda value=value: value)
    for name, value in values.items()
  ]
  ours.write_file(tmp_path / "model.safetensors", tensors)
  theirs = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  folder = ours.open_folder(tmp_path)
  for name, value in values.items():
    np.testing.assert_array_equal(theirs[name], value)
    np.testing.assert_array_equal(folder.read(name), value)
  np.testing.assert_array_equal(folder.read("transposed", slice(2, 4)), values["transposed"][2:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_files_are_read_exactly(dtype, tmp_path):
  model = tiny.hf_model("llama").to(dtype)
  loaded = tiny.saved(model, tmp_path)
  wanted = model.model.layers[1].self_attn.q_proj.weight.detach().float().numpy().T
  got = loaded.params["layers"]["q"]
  assert got.dtype == jnp.float32
  np.testing.assert_array_equal(got[1], wanted)


def edit(directory, change):
  """Rewrites the tensors of a folder."""
  tensors = safetensors.numpy.load_file(directory / "model.safetensors")
  safetensors.numpy.save_file(change(tensors), directory / "model.safetensors", {"format": "pt"})


def test_wrong_tensors_are_all_reported_by_name(tmp_path):
  tiny.hf_model("llama").save_pretrained(tmp_path)

  def change(tensors):
    tensors.pop("model.norm.weight")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
    return {**tensors, "model.layers.0.extra.weight": np.zeros(2, np.float32)}

  edit(tmp_path, change)
  with pytest.raises(ValueError) as caught:
    models.load(tmp_path)
  message = str(caught.value)
  assert "missing: model.norm.weight [24]" in message
  assert (
    "model.layers.1.mlp.up_proj.weight: has shape [3, 4], but the config implies [37, 24]"
    in message
  )
  assert "unexpected: model.layers.0.extra.weight [2]" in message


def test_a_tied_checkpoint_may_store_its_head_if_it_is_the_embedding(tmp_path):
  loaded = tiny.saved(tiny.hf_model("llama", tie_word_embeddings=True), tmp_path)
  edit(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].copy()})
  assert_same(models.load(tmp_path).params, loaded.params)
  edit(tmp_path, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] + 1})
  with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
    models.load(tmp_path)


def test_old_rotary_buffers_are_ignored(tmp_path):
  loaded = tiny.saved(tiny.hf_model("llama"), tmp_path)
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  edit(tmp_path, lambda t: {**t, name: np.zeros(2, np.float32)})
  assert_same(models.load(tmp_path).params, loaded.params)


def test_missing_broken_and_cut_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="config.json"):
    models.load(tmp_path / "nowhere")
  model = tiny.hf_model("llama")
  model.save_pretrained(tmp_path / "cut")
  file = tmp_path / "cut" / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-10])
  with pytest.raises(ValueError, match="model.safetensors: is cut short"):
    models.load(tmp_path / "cut")
  file.write_bytes(b"abc")
  with pytest.raises(ValueError, match="not a safetensors file"):
    models.load(tmp_path / "cut")
  file.unlink()
  with pytest.raises(FileNotFoundError, match="needs.*model.safetensors"):
    models.load(tmp_path / "cut")
  (tmp_path / "cut" / "config.json").write_text("{oops")
  with pytest.raises(ValueError, match="config.json is not JSON"):
    models.load(tmp_path / "cut")


def test_a_shard_that_is_missing_is_named(tmp_path):
  config = tiny.config()
  export.to_huggingface(tiny.random_params(config), config, tmp_path / "a", max_shard_bytes=9000)
  shard = sorted((tmp_path / "a").glob("*.safetensors"))[1]
  shard.unlink()
  with pytest.raises(FileNotFoundError, match=shard.name):
    models.load(tmp_path / "a")


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (8, 1, 1), (1, 2, 4)], ids=str)
def test_loading_puts_on_every_device_its_part_only(shape, tmp_path):
  config = tiny.config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_heads=8, num_kv_heads=4, head_dim=8
  )
  params = tiny.random_params(config)
  export.to_huggingface(params, config, tmp_path / "a")
  mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"))
  rules = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
  }

  def sharding(axes):
    place = lambda names: jax.NamedSharding(mesh, jax.P(*(rules.get(name) for name in names)))
    return jax.tree.map(place, axes, is_leaf=lambda x: isinstance(x, tuple))

  loaded = models.load(tmp_path / "a", sharding=sharding)
  assert_same(loaded.params, params)
  total = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
  held = dict.fromkeys(jax.devices(), 0)
  for leaf in jax.tree.leaves(loaded.params):
    for shard in leaf.addressable_shards:
      held[shard.device] += shard.data.nbytes
  # Norms are split over fsdp only; they are 1 in 100 of the bytes.
  assert max(held.values()) <= 1.06 * total / (shape[1] * shape[2])
  assert loaded.params["layers"]["q"].sharding.spec == jax.P(None, "fsdp", "tensor")


MEASURE = """
import sys, pathlib, jax, numpy as np
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from grpo_jax import models
def peak():
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.split("VmHWM:")[1].split()[0]) * 1024
jax.block_until_ready(jnp.ones(8) + 1)
before = peak()
loaded = models.load(sys.argv[1])
jax.block_until_ready(loaded.params)
print(peak() - before, sum(x.nbytes for x in jax.tree.leaves(loaded.params)))
"""


@pytest.mark.long
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads VmHWM of Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_never_holds_two_copies_of_the_model(dtype, tmp_path):
  config = tiny.config(
    vocab_size=4000,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=12,
    num_heads=8,
    head_dim=64,
  )
  file_dtype = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
  zeros = [
    ours.ToWrite(s.name, s.shape, file_dtype, lambda s=s: np.ones(s.shape, file_dtype))
    for s in leaves.stored(config)
  ]
  ours.write_folder(tmp_path, zeros, max_shard_bytes=50_000_000)
  export.write_json(tmp_path / "config.json", model_config.to_hf(config))
  command = [sys.executable, "-c", MEASURE, str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  grown, model = map(int, done.stdout.split())
  assert model > 100e6
  # The model, one leaf that is being read (a fifth of it here), and what the allocator keeps of
  # leaves read before; two copies would be more than 2.
  assert grown < 1.6 * model


def test_check_accepts_what_stored_lists(tmp_path):
  config = tiny.config(tie_embeddings=False)
  export.to_huggingface(tiny.random_params(config), config, tmp_path / "a")
  loading.check(ours.open_folder(tmp_path / "a"), config, "here")
  assert transformer.logical_axes(config)["head"] == ("embed", "vocab")
