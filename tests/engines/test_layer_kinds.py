"""Servers that would compute another model than the trainer are refused."""

import pytest

from grpo_jax import engines
from grpo_jax.models.config import LayerKind
from tests.engines import tiny


@pytest.mark.parametrize("kind", [LayerKind(window=5), LayerKind(rope=None)])
def test_sglang_is_refused_for_a_model_whose_layers_it_does_not_know(kind, tmp_path):
  config = tiny.config(layer_kinds=(LayerKind(), kind))
  folders = {"source_directory": tmp_path, "workdir": tmp_path}
  with pytest.raises(ValueError, match=r"sliding windows or layers.*engine\.name='jax_sampler'"):
    engines.make("sglang", config=config, addresses=("http://127.0.0.1:9",), **folders)
