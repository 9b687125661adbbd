"""A teacher's servers: what they are asked, what is read, and what happens if they fail."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from grpo_jax.engines.prompt_scoring import Passage, PromptScorer, ScoringError
from grpo_jax.http import addresses
from grpo_jax.http.retries import RetryPolicy
from tests.environments.scripted_server import answer, half, hang, hang_up, raw, serving

IDS = (5, 6, 7, 8)
FIRST = 2
PASSAGE = Passage(np.asarray(IDS), FIRST)
PATIENCE = RetryPolicy(timeout_s=10.0, total_timeout_s=30.0, retries=1, backoff_s=0.01)


def logprob(token):
  return -token / 10


def sglang(ids=IDS[FIRST - 1 :], values=None):
  values = [None, *map(logprob, ids[1:])] if values is None else values
  entries = [[value, token, None] for value, token in zip(values, ids, strict=True)]
  return {"text": "", "meta_info": {"input_token_logprobs": entries}}


def vllm(ids=IDS, **changed):
  entries = [{str(token): {"logprob": logprob(token), "rank": 1}} for token in ids]
  return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}], **changed}


def openai(count=4):
  values = [None, *map(logprob, IDS[1:]), -9.0][:count]
  return {"choices": [{"logprobs": {"token_logprobs": values}}]}


def scored(*servers, api="sglang", passages=(PASSAGE,), check=False, **settings):
  """Scores passages at servers, or checks them."""
  route = "" if api == "sglang" else "/v1"
  given = {"model": "big", "key": None, "patience": PATIENCE, "concurrency": 4, **settings}

  async def ask():
    scorer = PromptScorer([server.url + route for server in servers], api=api, **given)
    try:
      return await (scorer.check(np.asarray(IDS)) if check else scorer.score(passages))
    finally:
      await scorer.close()

  return asyncio.run(ask())


ASKED = {
  "sglang": {
    "input_ids": [*IDS],
    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    "return_logprob": True,
    "logprob_start_len": FIRST - 1,
    "model": "big",
  },
  "vllm": {
    "model": "big",
    "prompt": [*IDS],
    "max_tokens": 1,
    "temperature": 1.0,
    "prompt_logprobs": 0,
  },
  "openai": {
    "model": "big",
    "prompt": [*IDS],
    "max_tokens": 1,
    "temperature": 1.0,
    "echo": True,
    "logprobs": 1,
  },
}


@pytest.mark.parametrize(
  ("api", "content"),
  [
    ("sglang", sglang()),
    ("sglang", sglang(ids=(6, 7, 0), values=[None, -0.7, -0.8])),  # its last id is 8.
    ("sglang", sglang(ids=IDS)),  # a server that ignores `logprob_start_len`.
    ("vllm", vllm()),
    ("openai", openai()),
    ("openai", openai(len(IDS) + 1)),  # the sampled token follows.
  ],
)
def test_ids_are_sent_and_their_logprobs_read(api, content):
  with serving(answer(content)) as server:
    (found,) = scored(server, api=api, key="secret-key-1")
  np.testing.assert_allclose(found, [logprob(7), logprob(8)])
  ((path, headers, body),) = server.requests
  assert path == {"sglang": "/generate"}.get(api, "/v1/completions")
  assert headers["Authorization"] == "Bearer secret-key-1"
  assert body == ASKED[api]


@pytest.mark.parametrize(
  ("api", "content", "message"),
  [
    ("sglang", sglang(values=[None, -1.0, float("nan")]), "finite numbers of at most 0, got nan"),
    ("sglang", sglang(values=[None, -1.0, None]), "finite numbers of at most 0, got None"),
    ("sglang", sglang(values=[None, -1.0, 0.5]), "finite numbers of at most 0, got 0.5"),
    ("sglang", sglang(values=[None, -1.0, -1e300]), "finite numbers of at most 0, got -1e+300"),
    ("sglang", sglang(values=[None, -1.0, -(10**400)]), "finite numbers of at most 0, got -100"),
    ("sglang", sglang(values=[None, True, -1.0]), "finite numbers of at most 0, got True"),
    ("sglang", sglang(ids=(7, 9)), "token 3 has the id 8, its logprob came for the id 9"),
    ("sglang", sglang(ids=(8,)), "for 2 tokens, came for 1"),
    ("sglang", {"text": "hello"}, "the answer has no meta_info.input_token_logprobs"),
    ("sglang", {"meta_info": {"input_token_logprobs": None}}, "is not a list: None"),
    ("vllm", vllm(ids=IDS[1:]), "for 4 tokens, came for 3"),
    ("vllm", vllm(ids=(5, 6, 7, 9)), "the answer has no 8.logprob"),
    ("vllm", {"choices": []}, "the answer has no choices.0.prompt_logprobs"),
    ("openai", openai(len(IDS) - 1), "for 4 tokens, came for 3"),
    ("openai", {"choices": [{"logprobs": None}]}, "has no choices.0.logprobs.token_logprobs"),
    ("openai", {"choices": [{"logprobs": {"token_logprobs": "no"}}]}, "is not a list: 'no'"),
  ],
)
def test_an_answer_that_is_not_one_logprob_for_each_token_is_named(api, content, message):
  with serving(raw(json.dumps(content).encode())) as server, pytest.raises(ScoringError) as error:
    scored(server, api=api)
  assert message in str(error.value) and server.url in str(error.value)
  assert len(server.requests) == 2 and "\n" not in str(error.value)  # it was tried again.


@pytest.mark.long
@pytest.mark.parametrize(
  ("step", "message", "tries"),
  [
    (hang, "no complete answer within 1 s", 2),
    (hang_up, "Disconnected", 2),
    (half, "Payload", 2),
    (raw(b"no json"), "the answer is not JSON", 2),
    (answer({"error": "busy"}, status=429), "answered 429", 2),
    (answer({"error": "broken"}, status=500), "answered 500", 2),
    (answer({"error": "too long"}, status=400), 'answered 400: {"error": "too long"}', 1),
  ],
)
def test_a_server_that_fails_is_named_after_its_tries(step, message, tries):
  with serving(step) as server, pytest.raises(ScoringError) as error:
    scored(server, patience=dataclasses.replace(PATIENCE, timeout_s=1.0 if step is hang else 10.0))
  assert message in str(error.value) and server.url in str(error.value)
  assert len(server.requests) == tries


def test_another_server_takes_over():
  with serving(answer({}, status=500)) as broken, serving(answer(sglang())) as good:
    found = scored(broken, good, passages=[PASSAGE] * 3)
  assert [values.tolist() for values in found] == [pytest.approx([-0.7, -0.8])] * 3
  assert len(broken.requests) == 2 and len(good.requests) == 3


def test_no_more_requests_are_open_than_allowed():
  with serving(answer(sglang())) as server:
    scored(server, passages=[PASSAGE] * 12, concurrency=3)
  assert len(server.requests) == 12 and server.at_once <= 3


def test_a_check_asks_every_server_once():
  good = answer(sglang(ids=IDS))
  with serving(good) as one, serving(good) as other:
    scored(one, other, check=True)
    assert len(one.requests) == len(other.requests) == 1
  with serving(good) as one, pytest.raises(ScoringError, match="ClientConnectorError|Connect"):
    scored(one, other, check=True)


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://host", "http://user:word@host"])
def test_an_address_that_cannot_be_used_is_refused(url):
  with pytest.raises(ValueError, match="^url "):
    addresses.address(url, "/generate")
