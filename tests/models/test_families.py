"""Every family of `families.CASES` against transformers, and under change."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import transformers

from grpo_jax.learn import sharding
from grpo_jax.models import adapter_files, export, lora, transformer
from grpo_jax.models import config as model_config
from grpo_jax.models.errors import ModelError
from grpo_jax.models.products import FLOAT32, Products
from tests.models import families, tiny

# PEFT 0.21 uses names that transformers 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

# tests/models/test_peft.py and test_config.py have the other families.
HERE = ("mistral", "ministral", "olmo2", "olmo3", "seed_oss")
CASES_HERE = [name for name, (family, _) in families.CASES.items() if family in HERE]
ONE_OF_EACH = [families.ONE_OF_EACH[family] for family in HERE]


@pytest.fixture(scope="module")
def distances():
  """Distances from transformers in float64, of every case: see `tests.models.float64`."""
  command = [sys.executable, "-m", "tests.models.float64", *families.CASES]
  done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path.cwd())
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("case", families.CASES)
def test_logits_and_all_gradients_are_those_of_transformers_in_float64(case, distances):
  """Packed with a shared prompt here, each sequence alone there."""
  found = distances[case]
  assert found["zeros"] == []
  assert found["logits"] < 1e-9
  assert max(found["gradients"].values()) < 1e-9, found["gradients"]


@pytest.mark.long
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_an_export_has_the_same_logits_in_transformers(case, tmp_path):
  """Also with an adapter on every kernel, read by PEFT and merged into an export."""
  family, options = families.CASES[case]
  model = tiny.hf_model(family, **options)
  loaded = tiny.saved(model, tmp_path / "theirs")
  tokens = tiny.tokens((2, 17))
  export.to_huggingface(loaded.params, loaded.config, tmp_path / "ours")
  read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
  assert type(read) is type(model)
  assert np.array_equal(tiny.hf_logits(read, tokens), tiny.hf_logits(model, tokens))

  settings = lora.AdapterOptions(3, 5.0)
  rng = np.random.default_rng(1)
  draw = lambda leaf: (rng.standard_normal(leaf.shape) * 0.15).astype(np.float32)
  adapter = {
    kernel: {part: draw(leaf) for part, leaf in own.items()}
    for kernel, own in lora.tree(loaded.config, settings).items()
  }
  adapter_files.write(adapter, loaded.config, settings, tmp_path / "adapter", base="base")
  joined = lora.join(loaded.params, adapter, settings.scale)
  got = tiny.logits(joined, loaded.config, *tiny.plain(tokens))
  adapted = peft.PeftModel.from_pretrained(read, tmp_path / "adapter")
  assert tiny.relative_error(got, tiny.hf_logits(adapted, tokens)) < 1e-5
  back = adapter_files.read(tmp_path / "adapter", loaded.config)
  assert all(
    np.array_equal(back[kernel][part], adapter[kernel][part])
    for kernel in adapter
    for part in adapter[kernel]
  )


def hf(family, **changes):
  """Returns a config.json of a family, with changes."""
  sizes = {**families.SIZES, "head_dim": 4}
  architecture = families.CLASSES[family].model.__name__
  return {**sizes, "architectures": [architecture], **changes}


WINDOWS = {"sliding_window": 5, "layer_types": [families.SLIDING, families.FULL]}
ON_DEVICES = {
  "gemma3_text": tiny.config(**{**tiny.GEMMA3, "num_heads": 4, "head_dim": 6}),
  **{
    family: model_config.from_hf(
      hf(family, intermediate_size=38, tie_word_embeddings=True, **options)
    )
    for family, options in {
      "mistral": {"sliding_window": 5},
      "olmo3": WINDOWS,
      "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    }.items()
  },
}


@pytest.mark.long
@pytest.mark.parametrize("family", ON_DEVICES)
def test_packed_rows_on_eight_devices_have_the_gradients_of_sequences_alone(family):
  """A prompt of 5 that two completions share, in windows of 5; rows, heads and widths are split."""
  config = ON_DEVICES[family]
  params = tiny.random_params(config)
  rng = np.random.default_rng(3)
  tokens = rng.integers(0, 61, (4, 22))
  positions = np.concatenate([np.arange(5), 5 + np.arange(9), 5 + np.arange(8)])
  branches = np.repeat([0, 1, 2], [5, 9, 8])
  packed = [np.broadcast_to(x, (4, 22)) for x in (positions, np.ones(22, int), branches)]
  weights = rng.normal(size=(4, 22, 24))

  def loss(params, tokens, weights, *inputs, products=FLOAT32):
    hidden = transformer.hidden_states(params, config, tokens, *inputs, products=products)
    return jnp.sum(hidden * weights)

  def apart(params):
    found = 0.0
    for begin, end in ((5, 14), (14, 22)):
      own = np.r_[0:5, begin:end]
      shared = weights[:, own] * np.where(own < 5, 0.5, 1.0)[:, None]  # once in the packed row.
      found += loss(params, tokens[:, own], shared, *tiny.plain(tokens[:, own])[1:])
    return found

  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  products = Products(placement=sharding.placement(mesh))
  placed = sharding.param_shardings(transformer.logical_axes(config), mesh, shapes=params)
  on_mesh = lambda params: loss(params, tokens, weights, *packed, products=products)
  got = tiny.jit(jax.value_and_grad(on_mesh))(jax.device_put(params, placed))
  wanted = tiny.jit(jax.value_and_grad(apart))(params)
  for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert tiny.relative_error(mine, right) < 2e-5


@pytest.mark.parametrize("case", CASES_HERE)
def test_what_is_left_out_is_what_transformers_assumes(case):
  """Windows, types of layers, biases, ε and the table: of the fields alone that a case has."""
  family, options = families.CASES[case]
  config = model_config.from_hf(hf(family, **options))
  theirs = families.CLASSES[family].config(**{**families.SIZES, **options})
  types = getattr(theirs, "layer_types", None)
  if types is None:
    types = ["sliding_attention"] * 9 if getattr(theirs, "sliding_window", None) else ["full"] * 9
  windows = [theirs.sliding_window if "sliding" in each else None for each in types]
  assert [kind.window for kind in config.kinds] == windows[: config.num_layers]
  assert config.rms_norm_eps == theirs.rms_norm_eps
  assert config.tie_embeddings == theirs.tie_word_embeddings
  bias = getattr(theirs, "attention_bias", False)
  assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (
    bias,
    getattr(theirs, "attention_out_bias", bias),
    getattr(theirs, "mlp_bias", False),
  )
  parameters = theirs.rope_parameters
  full = parameters.get("full_attention", parameters)
  assert config.rope_theta == full["rope_theta"]
  assert model_config.from_hf(model_config.to_hf(config)) == config


@pytest.mark.parametrize(
  ("family", "change", "message"),
  [
    ("mistral", {"layer_types": [families.SLIDING, families.FULL]}, "MinistralForCausalLM"),
    ("mistral", {"use_sliding_window": False}, "use_sliding_window needs true"),
    ("mistral", {"sliding_window": None, "layer_types": [families.SLIDING] * 2}, "layer_types"),
    ("ministral", {"sliding_window": 0}, "sliding_window needs a whole number from 1"),
    ("ministral", {"layer_types": [families.FULL]}, "layer_types needs one of.*each of 2 layers"),
    ("olmo2", {"layer_types": [families.SLIDING] * 2}, "only full_attention in this family"),
    ("olmo3", {"sliding_window": None}, "sliding_window needs a whole number"),
    ("olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0 at the top level"),
    ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "full_attention and sliding_attention"),
    ("seed_oss", {"attention_out_bias": "no"}, "attention_out_bias needs true or false"),
  ],
)
def test_variants_that_transformers_would_not_compute_are_refused(family, change, message):
  with pytest.raises(ModelError, match=message):
    model_config.from_hf(hf(family, **change))


@pytest.mark.parametrize("family", ["mistral", "olmo2", "seed_oss"])
@pytest.mark.parametrize("change", [{"qk_norm": True}, {"norm_offset": 1.0}])
def test_a_model_that_the_family_does_not_have_is_not_written(family, change):
  config = dataclasses.replace(model_config.from_hf(hf(family)), wide_qk_norm=False, **change)
  with pytest.raises(ValueError, match="cannot describe this model's"):
    model_config.to_hf(config)
