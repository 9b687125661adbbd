"""Servers that would compute another model than the trainer are refused."""

import pytest

from grpo_jax import engines
from grpo_jax.engines import sglang_servers
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.models.config import LayerKind, Rope, RopeScaling
from tests.engines import tiny

ADDRESSES = ("http://127.0.0.1:9",)
OLMO = {"wide_qk_norm": True, "pre_norms": False, "post_norms": True}
WINDOW = {"layer_kinds": (LayerKind(5, 1), LayerKind())}
YARN = {"rope_scaling": RopeScaling("yarn", 4.0), "further_ropes": (Rope(10000.0),)}


@pytest.mark.parametrize("kind", [LayerKind(window=5), LayerKind(rope=None)])
def test_sglang_is_refused_for_a_model_whose_layers_it_does_not_know(kind, tmp_path):
  config = tiny.config(layer_kinds=(LayerKind(), kind))
  folders = {"source_directory": tmp_path, "workdir": tmp_path}
  with pytest.raises(ValueError, match=r"sliding windows or layers.*engine\.name='jax_sampler'"):
    engines.make("sglang", config=config, addresses=ADDRESSES, **folders)


@pytest.mark.parametrize(
  ("family", "options", "message"),
  [
    ("mistral", {"layer_kinds": (LayerKind(5),) * 2}, "Mistral ignore windows"),
    ("olmo2", {**OLMO, "head_dim": 10}, "heads of hidden_size / num_attention_heads, 32 / 4"),
    ("olmo3", {**OLMO, **WINDOW, "further_ropes": (Rope(7.0),)}, "no scaling.*theta=7.0"),
  ],
)
def test_sglang_is_refused_where_its_model_of_the_family_differs(family, options, message):
  with pytest.raises(ValueError, match=message):
    sglang_servers.refuse(SGLangOptions(addresses=ADDRESSES), tiny.config(family, **options))


@pytest.mark.parametrize(
  ("family", "options"),
  [
    ("mistral", {}),
    ("olmo2", OLMO),
    ("olmo3", {**OLMO, **WINDOW, **YARN}),
    ("olmo3", {**OLMO, "layer_kinds": (LayerKind(5), LayerKind())}),
    ("seed_oss", {"qkv_bias": True}),
  ],
)
def test_sglang_serves_the_families_that_it_computes(family, options):
  sglang_servers.refuse(SGLangOptions(addresses=ADDRESSES), tiny.config(family, **options))
