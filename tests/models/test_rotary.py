"""Rotary tables of every kind: the frequencies and factors of transformers."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from grpo_jax.models import config as model_config
from grpo_jax.models import hf_rope, rotary
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields
from grpo_jax.models.layer_kinds import Rope, RopeScaling

LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 128,
  "hidden_size": 96,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 24,
  "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
  "rope_type": "longrope",
  "short_factor": [1 + 0.1 * i for i in range(12)],
  "long_factor": [2.0 + i for i in range(12)],
  "original_max_position_embeddings": 64,
}
KINDS = {
  "linear": {"rope_type": "linear", "factor": 3.0},
  "dynamic": {"rope_type": "dynamic", "factor": 2.5},
  "llama3": {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
  },
  "yarn": YARN,
  "yarn-truncated-not": {**YARN, "truncate": False},
  "yarn-betas": {**YARN, "beta_fast": 10, "beta_slow": 2, "attention_factor": 1.25},
  "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
  "yarn-one-mscale": {**YARN, "mscale": 0.7},
  "yarn-shrinks": {**YARN, "factor": 0.5},
  "yarn-long": {**YARN, "original_max_position_embeddings": 32768},
  "yarn-one-component": {**YARN, "beta_fast": 1.02, "beta_slow": 1.01, "truncate": False},
  "longrope": LONG,
  "longrope-factor": {**LONG, "factor": 9.0},
  "longrope-attention": {**LONG, "attention_factor": 1.5},
}


@pytest.mark.parametrize("theta", [100.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_factors_are_those_of_transformers(kind, theta):
  content = {**LLAMA, "rope_parameters": {**KINDS[kind], "rope_theta": theta}}
  theirs = transformers.LlamaConfig(**copy.deepcopy(content))
  init = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]]
  wanted, factor = init(theirs, "cpu")
  found = model_config.from_hf(content)
  (rope,) = found.ropes
  got = rotary.frequencies(found.head_dim, rope.theta, rope.scaling)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-6)
  assert rope.scaling.attention_factor == pytest.approx(factor, rel=1e-12)
  is_changed = np.abs(got / rotary.frequencies(24, theta, None) - 1).max() > 1e-3
  # Every frequency of the base 100 makes more than beta_fast turns in 32768 tokens.
  assert is_changed == (kind != "dynamic" and (kind, theta) != ("yarn-long", 100.0))
  again = model_config.to_hf(found)
  assert model_config.from_hf(again) == found
  wanted_again, factor_again = init(transformers.LlamaConfig(**again), "cpu")
  np.testing.assert_array_equal(wanted_again.numpy(), wanted.numpy())
  assert factor_again == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_cosines_and_sines_are_those_of_transformers_up_to_the_bound(kind):
  content = {**LLAMA, "rope_scaling": KINDS[kind]}
  found = model_config.from_hf(content)
  embedding = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(content)))
  positions = np.arange(found.context)[None]
  wanted = embedding(torch.zeros(1), torch.tensor(positions))
  for got, right in zip(rotary.angles(jnp.asarray(positions), found), wanted, strict=True):
    np.testing.assert_allclose(got, right[..., :12].numpy(), atol=2e-5)
  bound = {"dynamic": 256, "yarn": None, "longrope": 64}[kind]
  assert (found.rotary_bound, found.context) == (bound, bound or 256)
  if bound is not None:  # there the frequencies of transformers change.
    longer = embedding(torch.zeros(1), torch.arange(bound + 1)[None])[0][:, :bound, :12]
    assert np.abs(longer.numpy() - wanted[0][..., :12].numpy()).max() > 0.01


BY_TYPE = {
  "gemma3": (
    "Gemma3TextConfig",
    hf_rope.ByType(1e6, 1e4, "rope_local_base_freq"),
    [
      {},
      {"rope_theta": 5e5},
      {"rope_theta": 5e5, "rope_local_base_freq": 77.0},
      {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
      {
        "rope_theta": 1e5,
        "rope_local_base_freq": 9.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      },
    ],
  ),
  "olmo3": (
    "Olmo3Config",
    hf_rope.ByType(5e5, 5e5),
    [{}, {"rope_theta": 5e5}, {"rope_scaling": YARN}, {"rope_theta": 5e5, "rope_scaling": YARN}],
  ),
}
NESTED = [
  {"full_attention": {"rope_theta": 50.0}, "sliding_attention": None},
  {"sliding_attention": {"rope_type": "default", "rope_theta": 9.0}},
  {
    "full_attention": {**YARN, "rope_theta": 50.0},
    "sliding_attention": {**KINDS["linear"], "rope_theta": 9.0},
  },
  {"full_attention": {"rope_theta": 7.0, "rope_type": "default"}},
]
CASES = [
  (family, settings)
  for family in BY_TYPE
  for settings in (*BY_TYPE[family][2], *({"rope_parameters": each} for each in NESTED))
]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_tables_of_layer_types_are_those_of_transformers(family, settings):
  name, tables, _ = BY_TYPE[family]
  make = getattr(transformers, name)

  def theirs(settings):
    return make(head_dim=24, max_position_embeddings=256, **copy.deepcopy(settings)).rope_parameters

  read = lambda settings: tables.read(Fields(settings, "config.json"), 256)
  found = read(settings)
  wanted = theirs(settings)
  for rope, kind in zip(found, ("full_attention", "sliding_attention"), strict=True):
    scaling = rope.scaling
    assert rope.theta == wanted[kind]["rope_theta"]
    assert ("default" if scaling is None else scaling.kind) == wanted[kind]["rope_type"]
    assert scaling is None or scaling.factor == wanted[kind]["factor"]
  written = tables.write(found)
  assert read(written) == found
  again = theirs(written)
  assert [again[kind]["rope_theta"] for kind in again] == [
    wanted[kind]["rope_theta"] for kind in again
  ]


def test_tables_of_layer_types_are_written_in_the_old_style_if_it_has_them():
  gemma, olmo = BY_TYPE["gemma3"][1], BY_TYPE["olmo3"][1]
  old = {"rope_theta", "rope_scaling"}
  assert set(olmo.write((Rope(5.0), Rope(5.0)))) == {"rope_parameters", *old}
  assert set(olmo.write((Rope(5.0), Rope(6.0)))) == {"rope_parameters"}
  written = gemma.write((Rope(5.0, RopeScaling("linear", 2.0)), Rope(6.0)))
  assert (written["rope_local_base_freq"], written["rope_theta"]) == (6.0, 5.0)
  assert written["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
  ("family", "settings", "message"),
  [
    ("olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0 at the top level and 500000.0 otherwise"),
    ("olmo3", {"rope_parameters": {"rope_theta": 1.0}}, "full_attention and sliding_attention"),
    ("gemma3", {"rope_scaling": {"full_attention": {}}}, "rope_scaling needs the settings of full"),
    ("gemma3", {"rope_parameters": {"full_attention": 5}}, "full_attention needs an object"),
    (
      "gemma3",
      {"rope_local_base_freq": 3.0, "rope_parameters": {"sliding_attention": {"rope_theta": 4.0}}},
      "rope_theta is 3.0 at the top level and 4.0 otherwise",
    ),
    (
      "gemma3",
      {"rope_theta": 3.0, "rope_parameters": {"full_attention": {"rope_theta": 4.0}}},
      "rope_theta is 3.0 at the top level and 4.0 otherwise",
    ),
    (
      "olmo3",
      {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
      "partial_rotary_factor must be 1",
    ),
  ],
)
def test_tables_of_layer_types_that_contradict_each_other_are_refused(family, settings, message):
  with pytest.raises(ModelError, match=message):
    BY_TYPE[family][1].read(Fields(settings, "config.json"), 256)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({**LONG, "short_factor": [1.0] * 11}, "longrope need 12 numbers each.*got 11 and 12"),
    ({**LONG, "long_factor": [0.0] * 12}, "long_factor needs a list of finite numbers above 0"),
    ({**LONG, "long_factor": "1"}, "long_factor needs a list of finite numbers"),
    ({**YARN, "beta_fast": 0.5}, "beta_fast needs a finite number above 1"),
    ({**YARN, "truncate": 1}, "truncate needs true or false"),
    ({**YARN, "rope_theta": 0.5}, "rope_theta needs a number above 1 for yarn"),
    ({**YARN, "mscale": "x"}, "mscale needs a finite number"),
    (
      {**KINDS["dynamic"], "original_max_position_embeddings": 64},
      "original_max_position_embeddings is 64 in rope_scaling and 256 otherwise",
    ),
  ],
)
def test_settings_of_a_scaling_that_make_no_sense_are_refused(change, message):
  with pytest.raises(ModelError, match=message):
    model_config.from_hf({**LLAMA, "rope_scaling": change})


def test_an_attention_factor_multiplies_cosines_and_sines():
  plain = model_config.from_hf({**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.0}})
  scaling = dataclasses.replace(plain.rope_scaling, attention_factor=1.5)
  scaled = dataclasses.replace(plain, rope_scaling=scaling)
  positions = jnp.arange(9)[None]
  pairs = jax.tree.map(lambda x, y: (x, y), *(rotary.angles(positions, c) for c in (plain, scaled)))
  for one, other in pairs:
    np.testing.assert_allclose(other, 1.5 * one, rtol=1e-6)
