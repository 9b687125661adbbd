"""Real SGLang servers of further families: their logprobs and experts are those of the trainer."""

import math

import numpy as np
import pytest

from grpo_jax.models.config import RopeScaling
from grpo_jax.models.mixture import Mixture
from tests.engines import sglang_fixtures, tiny
from tests.engines.test_recorded_experts import record_of, trained

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

YARN = RopeScaling(
  "yarn", 4.0, original_max_position_embeddings=16, attention_factor=0.1 * math.log(4.0) + 1.0
)

# SGLang pads feed-forward widths on a CPU to multiples of 32. Its OLMo 3 is OLMo 2 with windows.
CONFIGS = {
  "olmo3": tiny.config("olmo3", intermediate_size=64, rope_scaling=YARN),
  "gemma3_text": tiny.config(
    "gemma3_text", intermediate_size=64, rope_scaling=RopeScaling("linear", 8.0)
  ),
  "qwen3_moe": tiny.config("qwen3_moe", mixture=Mixture(8, 3, 32, normalised=True)),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_is_served_as_it_is_trained(family, tmp_path):
  """With each of two versions of the weights, and the experts of the server replayed or not.

  Gemma 3's window is of 5 tokens, that of OLMo 3 of 6, and sequences have 43 to 70.
  """
  config = CONFIGS[family]
  model = sglang_fixtures.write_model(tmp_path / "model", config=config)
  settings = {"config": config, "version": None, "record_experts": True}
  with sglang_fixtures.make(model, tmp_path, **settings) as engine:
    for version in range(2):
      tree = tiny.params(config, seed=version + 1)  # of another seed than the folder's.
      engine.load_weights(tree, version=version)
      chance = np.random.default_rng(version)
      prompts = [chance.integers(0, tiny.VOCABULARY, length) for length in (3, 9, 30)]
      requests = tiny.groups(prompts, 4, max_tokens=40)
      found = sglang_fixtures.collect(engine, requests)
      own, replayed, same = mismatch(config, tree, requests, found)
      assert {v for each in found.values() for v in each.weight_versions.tolist()} == {version}
      assert max(own, replayed) < 1e-5
      assert same > 0.998  # two experts may tie within the rounding of float32.
    info = engine._run(engine._fleet.servers[0].client.server_info())
    assert info["attention_backend"] == "torch_native"  # `server_windows` reads it.


def mismatch(config, tree, requests, found):
  """Compares the generations of a server with the trainer's forward pass of the same tokens.

  Returns:
    The mean |logprob of the server - of the trainer| with the experts that the trainer's router
    chooses, the same with those of the server, and the share of tokens and layers in which both
    chose the same experts.
  """
  own, replayed, same = [], [], []
  for request in requests:
    generation = found[request.request_id]
    logprobs, chosen = trained(config, tree, request.prompt_ids, generation)
    own.append(np.abs(logprobs - generation.logprobs))
    assert (generation.experts is None) == (config.mixture is None)
    if generation.experts is None:
      continue
    record = record_of(generation)
    logprobs, _ = trained(config, tree, request.prompt_ids, generation, record)
    replayed.append(np.abs(logprobs - generation.logprobs))
    same.append((np.sort(record[:-1], -1) == np.sort(chosen[:-1], -1)).all(-1).ravel())
  mean = lambda values, otherwise: float(np.concatenate(values).mean()) if values else otherwise
  return mean(own, 0.0), mean(replayed, 0.0), mean(same, 1.0)
