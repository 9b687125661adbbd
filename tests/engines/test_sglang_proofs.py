"""Proofs of new weights at a real SGLang server in bfloat16, and loads that go wrong there."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.building import sync_check
from grpo_jax.building.sync_check import SyncCheck
from grpo_jax.engines.base import WrongWeights
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.sglang_client import Client
from grpo_jax.models import export
from tests.engines import proofs, sglang_fixtures, tiny

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CONFIG = tiny.config()


@pytest.fixture(scope="module")
def server(sglang_model, tmp_path_factory):
  """An engine that has launched a server in bfloat16."""
  workdir = tmp_path_factory.mktemp("proofs")
  settings = {"version": None, "compute_dtype": "bfloat16"}
  with sglang_fixtures.make(sglang_model, workdir, **settings) as engine:
    engine.load_weights(tiny.params(CONFIG), version=0)
    yield engine


@pytest.fixture(scope="module")
def steps():
  """The weights of two optimizer steps, and what was sampled before each."""
  with JaxSampler(CONFIG, max_rows=16, max_length=128) as sampler:
    return proofs.two_steps(sampler, CONFIG, jnp.bfloat16, groups=12, tokens=24)


def half_of(one, other):
  """Returns weights whose kernels have half of their columns of one and half of the other."""

  def mix(name, x):
    half = x.shape[-1] // 2
    return x.at[..., half:].set(other["layers"][name][..., half:]) if x.ndim == 3 else x

  return {**one, "layers": {name: mix(name, x) for name, x in one["layers"].items()}}


def test_each_load_that_goes_wrong_is_named_and_a_right_one_is_proven(
  server, steps, tmp_path, monkeypatch
):
  """The server reports the new version each time, since the load itself was answered."""
  monkeypatch.setattr(sync_check, "_COST_SHARE", 1e9)  # every time, whatever it costs.
  initial, old, new, groups = steps.initial, steps.old, steps.new, steps.groups
  check = SyncCheck(server, proofs.scorer(CONFIG, jnp.bfloat16), tokens=1024, begins_new=True)
  proofs.checked(server, check, initial, old, groups[0], old, 1)
  faults = {
    "still samples from the weights before the update": old,
    "samples from the initial weights": initial,
    "neither the new weights nor|only a part of its tensors": half_of(new, old),
  }
  loaded = Client.load
  for number, (message, weights) in enumerate(faults.items()):
    folder = export.to_huggingface(weights, CONFIG, tmp_path / str(number), dtype=jnp.bfloat16)
    at = 2 * number + 2
    with monkeypatch.context() as patch:
      load = lambda self, _, version, folder=folder: loaded(self, str(folder), version)
      patch.setattr(Client, "load", load)
      with pytest.raises(WrongWeights, match=f"server 0 does not .*: .*{message}"):
        proofs.checked(server, check, old, new, groups[1], new, at)
    assert server.weight_version == at  # the version says nothing.
    server.load_weights(old, version=at + 1)
  found = proofs.checked(server, check, old, new, groups[1], new, 20)
  assert found["mismatch/sync_proven"] == 1.0
  assert abs(found["mismatch/sync_share"] - 1.0) <= max(
    6 * found["mismatch/sync_share_error"], 0.02
  )


def test_passages_are_scored_while_completions_are_under_way(server):
  passages = [
    Passage(np.asarray(ids), 3 + number)
    for number, ids in enumerate(proofs.prompts_for(CONFIG, 5, 12))
  ]
  idle = server.score_given(passages)
  requests = tiny.groups(proofs.prompts_for(CONFIG, 8), 8, max_tokens=100)
  thread = threading.Thread(target=sglang_fixtures.collect, args=(server, requests))
  thread.start()
  try:
    busy = server.score_given(passages)
  finally:
    thread.join()
  assert list(idle) == list(busy) == ["server 0"]
  for passage, one, other in zip(passages, idle["server 0"], busy["server 0"], strict=True):
    assert len(one) == len(passage.tokens) - passage.first
    np.testing.assert_allclose(one, other, atol=0.05)
  wanted = tiny.model_logprobs(
    CONFIG, server_weights(), passages[0].tokens[:3], passages[0].tokens[3:]
  )
  assert np.abs(tiny.of_tokens(wanted, passages[0].tokens[3:]) - idle["server 0"][0]).max() < 1.0


def server_weights():
  return tiny.params(CONFIG)
