"""Runs that train an adapter, read later: merged, alone, and on devices as they were trained."""

import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import transformers

import grpo_jax
from grpo_jax import evaluation
from grpo_jax.api import sampling
from grpo_jax.building import exporting, stored, stored_engine
from grpo_jax.config import base as defaults
from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.learn import adapters, sharding
from grpo_jax.models import adapter_files, export, loading, lora, quantized, safetensors, tiny
from grpo_jax.run_folder import evaluation_log, stored_weights
from tests import stored_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return stored_runs.write_lora(tmp_path_factory.mktemp("runs") / "first", [1, 2])


def joined(run, step=2, options=stored_runs.LORA):
  """Returns the weights of a step, as an engine gets them."""
  base = loading.load(run.parent / "model", dtype=adapters.read_dtypes(options))
  adapter = stored_runs.adapter_of(step, base.config, options)
  return base.config, lora.join(base.params, adapter, options.scale)


def tensors(folder):
  opened = safetensors.open_folder(folder)
  return {name: opened.read(name) for name in opened.shapes}


def assert_alike(found, wanted):
  assert {*found} == {*wanted}
  for name, values in wanted.items():
    assert found[name].dtype == values.dtype
    np.testing.assert_allclose(
      found[name].astype(np.float32), values.astype(np.float32), rtol=0, atol=2e-6, err_msg=name
    )


def test_an_export_is_the_one_that_training_would_have_written(run, tmp_path):
  done = exporting.run(f"{run}:2", tmp_path / "out")
  config, params = joined(run)
  model = run.parent / "model"
  export.to_huggingface(params, config, tmp_path / "own", source_directory=model)
  assert done.dtype == "float32"
  assert_alike(tensors(tmp_path / "out"), tensors(tmp_path / "own"))
  others = [path.name for path in (tmp_path / "own").iterdir() if path.suffix != ".safetensors"]
  assert {"config.json", "tokenizer.json"} < {*others}
  for name in others:
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
  untouched = tensors(model)
  assert all(
    np.array_equal(values, untouched[name]) != any(f"{k}_proj" in name for k in ("q", "v", "down"))
    for name, values in tensors(tmp_path / "out").items()
  )


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["bfloat16", "int8", "nf4"])
def test_a_base_is_rounded_as_it_was_in_training(tmp_path, base_dtype):
  """The export is float32 for all, so the adapter is not rounded away."""
  options = dataclasses.replace(stored_runs.LORA, base_dtype=base_dtype, rank_stabilized=True)
  run = stored_runs.write_lora(tmp_path / "run", [2], options=options)
  exporting.run(str(run), tmp_path / "out")
  config, params = joined(run, options=options)
  export.to_huggingface(params, config, tmp_path / "own", source_directory=tmp_path / "model")
  found = tensors(tmp_path / "out")
  assert_alike(found, tensors(tmp_path / "own"))
  assert {values.dtype for values in found.values()} == {np.dtype(np.float32)}
  assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "float32"
  own = quantized.dequantized(jax.tree.map(lambda x: x[0], params["layers"]["k"]))  # no adapter.
  assert np.array_equal(found["model.layers.0.self_attn.k_proj.weight"], own.T)
  exact = loading.load(tmp_path / "model").params["layers"]["k"][0]
  assert not np.array_equal(own, exact)


def test_the_adapter_alone_is_that_of_the_checkpoint(run, tmp_path):
  done = exporting.run(f"{run}:1", tmp_path / "out", only_adapter=True)
  config = loading.read_config(run.parent / "model")
  assert adapter_files.base_of(done.folder) == str(run.parent / "model")
  wanted = stored_runs.adapter_of(1, config)
  found = adapter_files.read(done.folder, config)
  assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))
  adapter_files.write(
    wanted, config, stored_runs.LORA, tmp_path / "own", base=str(run.parent / "model")
  )
  for path in (tmp_path / "own").iterdir():
    assert (done.folder / path.name).read_bytes() == path.read_bytes()
  half = exporting.run(f"{run}:1", tmp_path / "half", only_adapter=True, dtype="bfloat16")
  assert 2 * half.num_bytes == done.num_bytes
  with pytest.raises(ConfigError, match="one file, without --max-shard-gb"):
    exporting.run(f"{run}:1", tmp_path / "new", only_adapter=True, max_shard_gb=1.0)


def test_a_run_without_an_adapter_has_none_to_export(tmp_path):
  run = stored_runs.write(tmp_path / "run", {1: None})
  with pytest.raises(ConfigError, match="run:1 has no adapter: every weight was trained"):
    exporting.run(str(run), tmp_path / "out", only_adapter=True)


@pytest.mark.parametrize("base_dtype", ["bfloat16", "int8"])
def test_engines_get_the_base_and_the_adapter(tmp_path, base_dtype):
  options = dataclasses.replace(stored_runs.LORA, base_dtype=base_dtype)
  run = stored_runs.write_lora(tmp_path / "run", [2], options=options)
  weights = stored.find(str(run))
  mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
  like = stored_engine.described(weights, mesh)
  loaded = stored.load(weights, like=like)
  _, wanted = joined(run, options=options)
  assert jax.tree.structure(loaded.params) == jax.tree.structure(wanted)
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, wanted))
  found = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), loaded.params)
  assert found == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), like)
  default = stored.load(weights).params
  assert jax.tree.all(jax.tree.map(np.array_equal, default, wanted))


def test_the_model_of_before_is_the_frozen_base_as_training_reads_it(tmp_path):
  options = dataclasses.replace(stored_runs.LORA, base_dtype="int8")
  run = stored_runs.write_lora(tmp_path / "run", [2], options=options)
  sampler = sampling.Sampler(run, grpo_jax.open(run).config)
  before = sampler.load(None, before=True).params
  frozen = lora.base_of(sampler.load(None, before=False).params)
  assert jax.tree.structure(before) == jax.tree.structure(frozen)
  assert jax.tree.all(jax.tree.map(np.array_equal, before, frozen))


def test_a_config_follows_the_weights(run):
  """Two weights that are compared have one config, though only one of them has an adapter."""
  config = configuration.replaced(defaults.get_config(), stored.fields(stored.find(str(run))))
  own = config.model.lora
  assert (own.rank, own.alpha, tuple(own.targets)) == (3, 5.0, ("q", "v", "down"))
  assert (own.base_dtype, own.path) == ("float32", None)
  plain = stored.find(str(run.parent / "model"))
  without = configuration.replaced(config, stored.fields(plain)).model.lora
  assert without.to_dict() == defaults.get_config().model.lora.to_dict()


def test_another_base_is_refused_by_name(run, tmp_path):
  other = tiny.write(tmp_path / "other", seed=1)
  with pytest.raises(
    stored_weights.WeightsError, match=r"adapter of .*model .* in .*other are"
  ) as e:
    stored.find(str(run), base=str(other))
  assert "--base=MODEL" in str(e.value)
  same = shutil.copytree(run.parent / "model", tmp_path / "same")
  assert stored.find(str(run), base=str(same)).directory == same


@pytest.mark.parametrize(
  ("facts", "reason"),
  [
    ({"rank": 4}, "does not hold the weights of this model: .*params.down.a: saved"),
    ({"rank": "3"}, "rank needs a whole number"),
    ({"alpha": -1}, "alpha needs a finite number above 0"),
    ({"targets": ["q", "v"]}, "params.down.a: saved .* needed nothing"),
    ({"targets": ["nothing"]}, "'nothing' is not the name of a kernel"),
    ({"base_dtype": "int3"}, "base_dtype needs one of bfloat16, float32"),
    (None, "'adapter' in info.json is not an object"),
  ],
  ids=str,
)
def test_a_checkpoint_that_says_something_else_is_refused(tmp_path, monkeypatch, facts, reason):
  model = tiny.write(tmp_path / "model")
  given = stored_runs.adapter.facts
  changed = lambda *args: {"adapter": facts and given(*args)["adapter"] | facts}
  monkeypatch.setattr(stored_runs.adapter, "facts", changed)
  run = stored_runs.write_lora(tmp_path / "run", [1], model=model)
  with pytest.raises(stored_weights.WeightsError, match=reason):
    stored.find(str(run))


def test_an_adapter_of_a_folder_is_used_with_its_base(run, tmp_path):
  exporting.run(f"{run}:2", tmp_path / "adapter", only_adapter=True)
  base = run.parent / "model"
  with pytest.raises(stored.NoWeights, match=f"is an adapter: .*--base={base}"):
    stored.find(str(tmp_path / "adapter"))
  exporting.run(str(tmp_path / "adapter"), tmp_path / "again", base=str(base))
  exporting.run(f"{run}:2", tmp_path / "direct")
  assert_alike(tensors(tmp_path / "again"), tensors(tmp_path / "direct"))


def test_an_adapter_brings_the_chat_template_that_it_was_trained_with(tmp_path):
  """To evaluations and merged exports of its folder; the base's other templates are not used."""
  base = tiny.write(tmp_path / "model")
  (base / "additional_chat_templates").mkdir()
  (base / "additional_chat_templates" / "tool_use.jinja").write_text("other")
  template = "{{ mark }}{{ messages[0].content }}"
  fields = {"model__chat_template": template, "model__chat_template_args": {"mark": "!"}}
  run = stored_runs.write_lora(tmp_path / "run", [1], model=base, **fields)
  exporting.run(f"{run}:1", tmp_path / "adapter", only_adapter=True)
  found = stored.find(str(tmp_path / "adapter"), base=str(base))
  with contextlib.ExitStack() as stack:
    opened = stored_engine.open_weights(Config(), found, stack)
    assert opened.tokenizer.render([{"role": "user", "content": "a"}]) == "!a"
    assert opened.tokenizer.stop_ids == (258,)
  exporting.run(str(tmp_path / "adapter"), tmp_path / "again", base=str(base))
  exporting.run(f"{run}:1", tmp_path / "direct")
  for folder in ("again", "direct"):
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
    chat = [{"role": "user", "content": "a"}]
    assert made.apply_chat_template(chat, tools=[{}], tokenize=False) == "!a"


@pytest.mark.long
def test_evaluations_and_samples_are_of_the_adapter(tmp_path, one_device):
  """The checkpoint, its export and the object of the run answer alike; the base does not."""
  row = {"problem": "2 + 2 =", "expected_answer": "4"}
  (tmp_path / "sums.jsonl").write_text(json.dumps(row) + "\n")
  (tmp_path / "trained.jsonl").write_text(json.dumps({**row, "problem": "1 + 3 ="}) + "\n")
  run = stored_runs.write_lora(
    tmp_path / "run",
    [2],
    data__path=str(tmp_path / "trained.jsonl"),
    evaluation__data__path=str(tmp_path / "sums.jsonl"),
    evaluation__name="sums",
    evaluation__num_prompts=1,
    evaluation__group_size=1,
    evaluation__sampling={"temperature": 0.0},
    rollout__max_tokens=96,
    sampling__max_tokens=8,
    model__compute_dtype="float32",
  )
  out = exporting.run(str(run), tmp_path / "out").folder
  config = grpo_jax.open(run).config
  done = evaluation.run([str(run), str(out)], config=config, workdir=tmp_path / "evaluated")
  said = []
  for model in done.models:
    ((_, _, file),) = evaluation_log.files(model.folder)
    said.append(json.loads(file.read_text())["completion"])
    stored_config = json.loads((model.folder / "config.json").read_text())
    assert stored_config["model"]["lora"]["rank"] == (3 if model is done.models[0] else None)
  assert said[0] == said[1]
  assert grpo_jax.open(run).sample("2 + 2 =", max_tokens=8) == said[0]
  assert grpo_jax.open(run).sample("2 + 2 =", max_tokens=8, before=True) != said[0]
