"""Filters of a real server, and of which distribution its logprobs are."""

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.truncation import Truncation

from grpo_jax.engines.server import FleetError
from tests.engines import sglang_fixtures, tiny

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def engine(sglang_server, sglang_model, tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  made = sglang_fixtures.make(sglang_model, folder, addresses=(sglang_server.address,))
  yield made
  made.close()


def sampled(engine, count=6, **sampling):
  """Returns completions of one prompt, and the log-softmax of the model at each of their tokens."""
  generations = tiny.run(engine, tiny.groups([PROMPT], count, **sampling))
  tree = tiny.params(tiny.config())
  for generation in generations.values():
    yield generation, tiny.model_logprobs(tiny.config(), tree, PROMPT, generation.token_ids)


@pytest.mark.parametrize("filters", [{"top_k": 12}, {"top_k": 20, "top_p": 0.7}])
def test_truncated_logprobs_are_those_that_the_trainer_computes(engine, filters):
  truncation = Truncation(**filters, is_joint=True)
  changed = 0
  for generation, table in sampled(engine, logprobs="truncated", **filters):
    weights = np.exp(table - table.max(axis=1, keepdims=True))
    threshold = np.asarray(truncation.threshold(jnp.asarray(weights)))
    mass = np.where(weights >= threshold[:, None], np.exp(table), 0).sum(axis=1)
    whole = tiny.of_tokens(table, generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, whole - np.log(mass), atol=3e-5)
    changed += (mass < 0.9).sum()
  assert changed > 10


def test_full_logprobs_are_of_the_whole_vocabulary_whatever_the_filters(engine):
  for generation, table in sampled(engine, top_k=12, top_p=0.8):
    wanted = tiny.of_tokens(table, generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=3e-5)


def test_a_call_may_mix_truncated_and_full_logprobs(sglang_server, sglang_model, tmp_path):
  address = (sglang_server.address,)
  engine = sglang_fixtures.make(sglang_model, tmp_path, addresses=address)
  try:
    requests = [
      tiny.request(kind, PROMPT, seed=1, top_k=12, logprobs=kind) for kind in ("full", "truncated")
    ]
    found = tiny.run(engine, requests)
  finally:
    engine.close()
  full, truncated = found["full"], found["truncated"]
  assert full.token_ids.tolist() == truncated.token_ids.tolist()
  assert (truncated.logprobs >= full.logprobs).all()
  assert (truncated.logprobs > full.logprobs + 0.01).any()


def test_a_top_k_above_the_servers_limit_is_refused_with_the_reason(engine):
  request = tiny.request("x", PROMPT, top_k=5000, logprobs="truncated")
  with pytest.raises(FleetError, match="sampling-mask-max-tokens"):
    tiny.run(engine, [request])


def test_truncated_logprobs_without_top_k_are_refused_before_anything_is_sent(engine):
  with pytest.raises(ValueError, match="only with top_k"):
    tiny.run(engine, [tiny.request("x", PROMPT, top_p=0.9, logprobs="truncated")])
