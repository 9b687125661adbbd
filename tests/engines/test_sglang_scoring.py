"""A real SGLang server scores given tokens as our model does: a teacher at servers."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines.prompt_scoring import Passage, PromptScorer
from grpo_jax.http.retries import RetryPolicy
from grpo_jax.models import transformer
from grpo_jax.rl.logprobs import sequence_logprobs
from tests.engines import sglang_fixtures, tiny

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

PATIENCE = RetryPolicy(timeout_s=60.0, total_timeout_s=120.0, retries=1)


def passages():
  """Returns sequences of a few lengths, some of one prompt."""
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, tiny.VOCABULARY, 9)
  own = [np.concatenate([prompt, rng.integers(0, tiny.VOCABULARY, n)]) for n in (1, 7, 23)]
  return [*(Passage(ids, 9) for ids in own), Passage(rng.integers(0, tiny.VOCABULARY, 5), 1)]


def scored(address, given, **settings):
  async def ask():
    scorer = PromptScorer(
      [address], **{"key": None, "patience": PATIENCE, "concurrency": 4, **settings}
    )
    try:
      await scorer.check(np.arange(tiny.VOCABULARY))
      return await scorer.score(given)
    finally:
      await scorer.close()

  return asyncio.run(ask())


@pytest.fixture(scope="module")
def address(sglang_server, sglang_model, tmp_path_factory):
  """The server with the weights of seed 0: tests of other files leave their own there."""
  folder = tmp_path_factory.mktemp("weights")
  with sglang_fixtures.make(sglang_model, folder, addresses=(sglang_server.address,)):
    pass
  return sglang_server.address


@pytest.mark.parametrize(
  ("api", "path", "model"), [("sglang", "", None), ("openai", "/v1", "default")]
)
def test_logprobs_are_those_of_our_model(address, api, path, model):
  given = passages()
  found = scored(address + path, given, api=api, model=model)
  again = scored(address + path, given, api=api, model=model)  # from the cache.
  params, config = tiny.params(tiny.config()), tiny.config()
  head, layout = transformer.head(params, config)
  for one, values, others in zip(given, found, again, strict=True):
    ids = jnp.asarray(one.tokens)[None]
    places = jnp.arange(ids.shape[1])[None]
    module = transformer.Transformer(config)
    hidden = module.apply({"params": params}, ids, places, jnp.ones_like(ids))
    expected = sequence_logprobs(hidden, head, ids, head_layout=layout)[0, one.first :]
    np.testing.assert_allclose(values, expected, atol=1e-4)
    np.testing.assert_allclose(others, expected, atol=1e-4)
