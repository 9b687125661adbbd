"""The options of LoRA: what is taken, what cannot work and why, what an adapter folder gives."""

import json
import re

import jax
import pytest

import configs.base
from grpo_jax import configuration, train
from grpo_jax.config import command_line, lora_options, run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.models import adapter_files, loading, lora


def config_of(**settings):
  config = configs.base.get_config()
  of_section = {f"model.lora.{name}": x for name, x in settings.items() if "." not in name}
  config.update_from_flattened_dict(
    {**of_section, **{name: x for name, x in settings.items() if "." in name}}
  )
  return config


def complaints(**settings):
  return [x for x in train.validate(config_of(**settings)) if "lora" in x]


# --- what is taken ---


def test_without_a_rank_every_weight_is_trained():
  assert lora_options.load(typed(config_of())) is None and not complaints()


def test_the_defaults_of_the_config_are_those_of_the_class():
  assert lora_options.load(typed(config_of(rank=8))) == lora.AdapterOptions(
    rank=8, targets=lora.targets((lora.ALL,))
  )


@pytest.mark.parametrize(
  ("word", "kernels"),
  [("all", 7), ("q,v", 2), ("q_proj,self_attn.v_proj", 2), ("mlp.*", 3), ("*_proj", 7), ("q", 1)],
)
def test_targets_from_the_command_line(word, kernels):
  arguments = ["--config=base", "--config.model.lora.rank=4", f"--config.model.lora.targets={word}"]
  config = command_line.parse(arguments).config
  options = lora_options.load(typed(config))
  assert options is not None and len(options.targets) == kernels
  assert not [x for x in train.validate(config) if "lora" in x]


def test_one_string_of_all_targets_is_taken_in_python_too():
  config = configuration.load("base")
  configuration.override(config, {"model.lora.rank": 4, "model.lora.targets": "all"})
  assert len(lora_options.load(typed(config)).targets) == 7
  with pytest.raises(ConfigError, match="targets must be 'all', or a list"):
    configuration.override(config, {"model.lora.targets": "q"})


@pytest.mark.parametrize(
  ("settings", "expected"),
  [
    ({"model.compute_dtype": "bfloat16"}, "adapter"),
    ({"model.compute_dtype": "float32"}, "merged"),
    ({"model.compute_dtype": "float32", "base_dtype": "int8"}, "adapter"),
    ({"model.compute_dtype": "float32", "base_dtype": "nf4"}, "adapter"),
    ({"model.compute_dtype": "float32", "sync": "adapter"}, "adapter"),
    ({"model.compute_dtype": "bfloat16", "sync": "merged"}, "merged"),
  ],
)
def test_what_engines_get(settings, expected):
  config = config_of(rank=4, **settings)
  assert lora_options.sync(typed(config)) == expected
  assert lora_options.is_unmerged(typed(config)) == (expected == "adapter")
  assert not lora_options.is_unmerged(typed(config_of(**settings)))


# --- what cannot work ---


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"alpha": 16.0}, "lora.alpha=16.0 would never be read: model.lora.rank is None"),
    ({"targets": ("q",)}, r"lora.targets=\('q',\) would never be read"),
    ({"rank_stabilized": True}, "rank_stabilized=True would never be read"),
    ({"base_dtype": "int8"}, "base_dtype='int8' would never be read"),
    ({"sync": "adapter"}, "sync='adapter' would never be read"),
    ({"rank": 0}, "lora.rank must be"),
    ({"rank": 4, "alpha": 0.0}, "lora.alpha must be"),
    ({"rank": 4, "base_dtype": "int4"}, "lora.base_dtype must be"),
    ({"rank": 4, "sync": "both"}, "lora.sync must be"),
    ({"rank": 4, "targets": ()}, "lora.targets must be"),
    ({"rank": 4, "targets": ("qproj",)}, r"'qproj' is not the name of a kernel .did you mean"),
    ({"rank": 4, "targets": ("lm_head",)}, "'lm_head' is not the name of a kernel"),
    ({"rank": 4, "base_dtype": "nf4", "sync": "merged"}, "sync='merged' cannot work with"),
    ({"rank": 4, "reference.update_every_steps": 5}, "a policy with a frozen base is that base"),
  ],
)
def test_options_that_cannot_work_are_named(settings, message):
  found = complaints(**settings)
  assert len(found) == 1, found
  assert re.search(message, found[0]), found


@pytest.mark.parametrize(
  ("field", "reason"),
  [
    ("dropout", "recipes for GRPO set it to 0"),
    ("lora_dropout", "recipes for GRPO set it to 0"),
    ("use_dora", "SGLang cannot serve it"),
    ("dora", "SGLang cannot serve it"),
  ],
)
def test_what_is_left_out_on_purpose_says_why(field, reason):
  name = f"model.lora.{field}"
  with pytest.raises(ConfigError, match=f"no field '{name}', on purpose: .*{reason}"):
    command_line.parse(["--config=base", f"--config.{name}=0.1"])
  config = configuration.load("base")
  with pytest.raises(ConfigError, match=reason):
    configuration.override(config, {name: 0.1})
  with pytest.raises(AttributeError, match=reason):
    setattr(config.model.lora, field, 0.1)
  in_file = configs.base.get_config()
  in_file.model.lora[field] = 0.1
  (found,) = [x for x in train.validate(in_file) if "lora" in x]
  assert reason in found


# --- an adapter folder ---


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
  """A PEFT folder of rank 2 on q and v, whose scale is 3."""
  options = lora.AdapterOptions(rank=2, alpha=6.0, targets=("q", "v"))
  sizes = loading.read_config(model)
  made = lora.init(jax.random.key(0), sizes, options)
  return adapter_files.write(
    made, sizes, options, tmp_path_factory.mktemp("peft") / "adapter", base=str(model)
  )


@pytest.mark.parametrize(
  "given",
  [
    {},
    {"rank": 2},
    {"rank": 2, "alpha": 6.0, "targets": ("q_proj", "v")},
    {"alpha": 3 * 2**0.5, "rank_stabilized": True},
  ],
  ids=str,
)
def test_a_folder_gives_what_the_config_leaves_open(folder, given):
  config = config_of(path=str(folder), **given)
  assert not complaints(path=str(folder), **given)
  resolved = run_options.resolved(config)
  options = lora_options.load(resolved)
  assert (options.rank, options.targets, options.scale) == (2, ("q", "v"), 3.0)
  assert resolved.model.lora.rank == 2
  again = run_options.resolved(resolved)
  assert again == resolved


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"rank": 4}, "lora.rank=4, but the adapter has rank 2"),
    ({"targets": ("q", "k")}, r"targets=\('q', 'k'\), but the adapter has \('q', 'v'\)"),
    ({"alpha": 5.0}, "multiply by 2.5, but the adapter is multiplied by 3"),
    ({"rank_stabilized": True}, "rank_stabilized=True multiply by"),
  ],
)
def test_a_folder_that_contradicts_the_config_is_refused(folder, given, message):
  (found,) = complaints(path=str(folder), **given)
  assert re.search(message, found) and str(folder) in found


def test_a_folder_that_cannot_be_used_is_named(tmp_path, folder):
  (found,) = complaints(path=str(tmp_path / "none"))
  assert found.startswith(
    f"model.lora.path='{tmp_path}/none' is not a folder: it must be a PEFT folder, such"
    " as adapter/ of a run. A run that continues"
  )
  (found,) = complaints(path=str(folder.parent))
  assert "adapter_config.json does not exist" in found
  assert found.endswith(f"; the adapter of this run is {folder}")
  (tmp_path / "dora").mkdir()
  for file in folder.iterdir():
    (tmp_path / "dora" / file.name).write_bytes(file.read_bytes())
  stored = json.loads((folder / "adapter_config.json").read_text())
  (tmp_path / "dora" / "adapter_config.json").write_text(json.dumps({**stored, "use_dora": True}))
  (found,) = complaints(path=str(tmp_path / "dora"))
  assert found.startswith("model.lora.path: ") and "use_dora" in found
