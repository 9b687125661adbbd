"""Layers with a window keep their window only, and sample what the trainer computes."""

import dataclasses

import numpy as np
import pytest

from grpo_jax.models.config import LayerKind, Rope
from tests.engines import tiny, updates

# Windows shorter and longer than a prompt, a page, a block of columns and a completion.
CONFIG = tiny.config(
  "qwen2",
  num_layers=3,
  layer_kinds=(LayerKind(5), LayerKind(None, None), LayerKind(70, 1)),
  further_ropes=(Rope(77.0),),
)
LENGTHS = (1, 66, 150)


def requests_of():
  """Returns two completions of prompts of these lengths, each with 250 tokens in all."""
  rng = np.random.default_rng(0)
  return [
    tiny.request(f"{length}.{g}", rng.integers(0, 61, length), seed=g, max_tokens=250 - length)
    for length in LENGTHS
    for g in range(2)
  ]


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_completions_longer_than_windows_have_the_trainers_logprobs(form):
  """The caches grow under way, and new weights read them again."""
  engine = tiny.sampler(CONFIG, form=form, version=0, max_rows=8)
  engine._sizes = dataclasses.replace(engine._sizes, prefill=128)  # several calls for a row.
  requests, trees = requests_of(), [tiny.params(CONFIG, seed) for seed in range(2)]
  found = updates.run(engine, requests, trees[1:], (55,))
  assert {v for g in found.values() for v in g.weight_versions.tolist()} == {0, 1}
  wanted = updates.trainer_logprobs(CONFIG, trees, requests, found)
  assert updates.mismatch(found, wanted) < 2e-5
