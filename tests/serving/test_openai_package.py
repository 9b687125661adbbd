"""The openai package against an endpoint; `make test-environments` installs it."""

import asyncio
import dataclasses

import numpy as np
import pytest
from made_agents import SAMPLING, served, user

from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.engines.given_tokens import GivenTokenScorer
from grpo_jax.serving.terms import RequestDecides, RunDecides
from tests.engines import tiny

openai = pytest.importorskip("openai", reason="`make test-environments` installs openai")

MODEL = tiny.config(vocab_size=ByteTokenizer.vocab_size)
OWN = dataclasses.replace(SAMPLING, max_tokens=8, stop_ids=(), logprobs="full")

pytestmark = [
  pytest.mark.slow,
  pytest.mark.environments,
  pytest.mark.filterwarnings("default"),  # of other people's packages.
]


def asked(talk, **fields):
  """Runs talk(client) against a server of a tiny model."""
  engine = tiny.sampler(MODEL)

  async def run():
    scorer = GivenTokenScorer(engine, max_length=256)
    policy = {"sampling": OWN, "max_tokens": 256, "scorer": scorer, **fields}
    async with served(engine, **policy) as (_, _, endpoint):
      place = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
      async with openai.AsyncOpenAI(**place, max_retries=0) as client:
        return await talk(client)

  try:
    return asyncio.run(run())
  finally:
    engine.close()


def test_by_hand_the_fields_of_a_request_count():
  async def talk(client):
    chat = lambda **fields: client.chat.completions.create(
      model="policy", messages=[user("Say something.")], **fields
    )
    text = lambda prompt, **fields: client.completions.create(
      model="policy", prompt=prompt, **fields
    )
    for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": 7}):
      first, again = [(await chat(**sampling)).choices[0].message.content for _ in range(2)]
      assert first == again
    several = await chat(n=2, seed=1, logprobs=True, top_logprobs=3, max_completion_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].message.content != several.choices[1].message.content
    for token in several.choices[0].logprobs.content:
      assert 3 <= len(token.top_logprobs) <= 4
      assert sum(np.exp(each.logprob) for each in token.top_logprobs) < 1 + 1e-6
    listed = await text(["one", "two"], n=2, max_tokens=2, echo=True)
    assert [choice.text[:3] for choice in listed.choices] == ["one", "one", "two", "two"]
    read = await text("read me", max_tokens=0, echo=True, logprobs=1)
    logprobs = read.choices[0].logprobs
    assert logprobs.tokens == [*"read me"] and logprobs.token_logprobs[0] is None
    assert all(each < 0 for each in logprobs.token_logprobs[1:])
    assert read.usage.completion_tokens == 0 and read.choices[0].text == "read me"
    with pytest.raises(
      openai.BadRequestError, match="presence_penalty=1 is not supported"
    ) as found:
      await chat(presence_penalty=1)
    assert found.value.param == "presence_penalty"

  asked(talk, terms=RequestDecides())


@pytest.mark.parametrize(
  "field", [{"temperature": 0}, {"seed": 1}, {"top_p": 0.5}, {"n": 2}, {"top_logprobs": 1}]
)
def test_a_run_refuses_by_name_what_would_change_its_distribution(field):
  async def talk(client):
    with pytest.raises(openai.BadRequestError) as found:
      await client.chat.completions.create(
        model="policy", messages=[user("Hi.")], logprobs=True, **field
      )
    assert found.value.param == next(iter(field))

  asked(talk, terms=RunDecides())
