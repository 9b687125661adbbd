"""Servers that would compute another model than the trainer are refused."""

import asyncio
import json
import math

import pytest

from grpo_jax import engines
from grpo_jax.engines import sglang_servers
from grpo_jax.engines.server import FleetError, Server
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.models.config import LayerKind, Rope, RopeScaling
from tests.engines import tiny

ADDRESSES = ("http://127.0.0.1:9",)
OLMO = {"wide_qk_norm": True, "pre_norms": False, "post_norms": True}
WINDOW = {"layer_kinds": (LayerKind(5, 1), LayerKind())}
# Gemma 3's: a rotary table of the layers with a window, and linear scaling in the others.
LOCAL = {"rope_scaling": RopeScaling("linear", 8.0), "further_ropes": (Rope(77.0),)}
ONE_TABLE = {"rope_scaling": None, "further_ropes": ()}
FACTOR = 0.1 * math.log(4.0) + 1.0  # of cosines and sines, for contexts of four times the length.
YARN = {
  "rope_scaling": RopeScaling("yarn", 4.0, attention_factor=FACTOR),
  "further_ropes": (Rope(10000.0),),
}


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
    ("llama", {"rope_scaling": RopeScaling("yarn", 4.0)}, "of yarn by 1.13863.*model has 1:"),
  ],
)
def test_sglang_is_refused_where_its_model_of_the_family_differs(family, options, message):
  with pytest.raises(ValueError, match=message):
    sglang_servers.refuse(SGLangOptions(addresses=ADDRESSES), tiny.config(family, **options))


@pytest.mark.parametrize(
  ("family", "options"),
  [
    ("gemma3_text", {**WINDOW, **LOCAL}),
    ("mistral", {"layer_kinds": (LayerKind(),) * 2}),
    ("olmo2", OLMO),
    ("olmo3", {**OLMO, **WINDOW, **YARN}),
    ("olmo3", {**OLMO, **ONE_TABLE, "layer_kinds": (LayerKind(5), LayerKind())}),
    ("seed_oss", {"qkv_bias": True}),
  ],
)
def test_sglang_serves_the_families_that_it_computes(family, options):
  sglang_servers.refuse(SGLangOptions(addresses=ADDRESSES), tiny.config(family, **options))


def test_a_folder_of_images_and_text_is_refused(tmp_path):
  hf = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}
  (tmp_path / "config.json").write_text(json.dumps(hf))
  folders = {"source_directory": tmp_path, "workdir": tmp_path}
  with pytest.raises(ValueError, match=r"images and text.*a folder of the text model alone"):
    engines.make("sglang", config=tiny.config("gemma3_text"), addresses=ADDRESSES, **folders)


class Asked:
  """A client of a healthy server that reports something about itself."""

  address = "http://s"

  def __init__(self, **info):
    self._info = info

  async def server_info(self):
    return self._info

  async def health(self):
    return None

  resume = abort_all = health

  async def can_update(self):
    return True


@pytest.mark.parametrize("name", ["attention_backend", "decode_attention_backend"])
def test_a_server_whose_windows_lack_a_token_is_refused(name):
  others = {"attention_backend": "fa3", "decode_attention_backend": None}
  with pytest.raises(FleetError, match="#32087.*fa3 or flashinfer"):
    asyncio.run(
      Server(0, has_windows=True).bring_up(None, Asked(**{**others, name: "triton"}), 1.0)
    )
  for has_windows, info in [(True, others), (False, {**others, name: "triton"})]:
    server = Server(0, has_windows=has_windows)
    asyncio.run(server.bring_up(None, Asked(**info), 1.0))
    assert server.is_up
