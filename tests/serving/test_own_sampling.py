"""Outside of training a request's own sampling counts: evaluators ask the embedded sampler."""

import asyncio
import dataclasses

import numpy as np
import pytest
from made_agents import SAMPLING, against, client_of, served, user

from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.engines.given_tokens import GivenTokenScorer
from grpo_jax.serving.terms import RequestDecides
from tests.engines import tiny

MODEL = tiny.config(vocab_size=ByteTokenizer.vocab_size)
LENGTH = 256  # tokens of prompt and completion; two chunks of the scorer.
OWN = dataclasses.replace(SAMPLING, max_tokens=8, stop_ids=(), logprobs="full")
PROMPTS = ["What is 2 + 3?", "é", "a" * 150]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def policy():
  """Yields the engine and the fields of a policy that is tried by hand."""
  yield from made("ring")


@pytest.fixture(scope="module")
def accelerators():
  """Yields the same, with the cache of accelerators."""
  yield from made("rows")


def made(form):
  engine = tiny.sampler(MODEL, form=form)
  scorer = GivenTokenScorer(engine, max_length=LENGTH)
  fields = {"sampling": OWN, "terms": RequestDecides(), "max_tokens": LENGTH, "scorer": scorer}
  yield engine, fields
  engine.close()


def asked(policy, *bodies, path="completions"):
  """Returns the answers to requests that come at the same time."""
  engine, fields = policy

  async def talk(post, session):
    found = await asyncio.gather(*(post(path, **body) for body in bodies))
    assert {status for status, _ in found} == {200}, found
    return [answer for _, answer in found]

  return against(engine, talk, **fields)


def without_name(answer):
  """Returns an answer without its name and time."""
  return {key: value for key, value in answer.items() if key not in ("id", "created")}


def trainers(ids, temperatures):
  """Returns the trainer's log-softmax after each token but the last, [n V]."""
  return tiny.model_logprobs(
    MODEL, tiny.params(MODEL), ids[:1], ids[1:], temperature=np.asarray(temperatures)[:, None]
  )


@pytest.mark.parametrize(
  ("made_by", "sampled"), [("policy", 0), ("policy", 4), ("accelerators", 0)]
)
def test_echoed_logprobs_are_the_trainers(request, made_by, sampled):
  policy = request.getfixturevalue(made_by)
  body = {"echo": True, "logprobs": 3, "max_tokens": sampled, "return_token_ids": True}
  (answer,) = asked(policy, {"prompt": PROMPTS, "temperature": 0.5, **body})
  texts = zip(answer["choices"], PROMPTS, strict=True)
  assert all(choice["text"].startswith(prompt) for choice, prompt in texts)
  assert answer["usage"]["prompt_tokens"] == sum(len(p.encode()) for p in PROMPTS)
  assert answer["usage"]["completion_tokens"] == sampled * len(PROMPTS)
  for choice in answer["choices"]:
    ids = np.asarray(choice["prompt_token_ids"] + choice["token_ids"])
    given, logprobs = len(choice["prompt_token_ids"]), choice["logprobs"]
    wanted = trainers(ids, np.repeat([1.0, 0.5], [given - 1, sampled]))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    np.testing.assert_allclose(
      logprobs["token_logprobs"][1:], tiny.of_tokens(wanted, ids[1:]), atol=1e-5
    )
    parts = (logprobs[part][1:] for part in ("tokens", "token_logprobs", "top_logprobs"))
    for row, name, logprob, top in zip(wanted, *parts, strict=True):
      assert top[name] == logprob and len(top) in (3, 4) and sum(np.exp([*top.values()])) < 1 + 1e-6
      np.testing.assert_allclose(max(top.values()), row.max(), atol=1e-5)


def test_characters_of_several_tokens_are_named_by_their_bytes(policy):
  (answer,) = asked(policy, {"prompt": "é!", "echo": True, "logprobs": 0, "max_tokens": 0})
  (choice,) = answer["choices"]
  assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
  assert choice["logprobs"]["text_offset"] == [0, 1, 1] and choice["text"] == "é!"
  assert choice["logprobs"]["top_logprobs"] is None and choice["finish_reason"] == "length"


GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.5, "seed": 7}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED | {"top_p": 0.9, "top_k": 50}])
def test_the_same_request_has_the_same_answer_beside_others(policy, sampling):
  body = {"prompt": PROMPTS[0], "logprobs": 0, "n": 2, **sampling}
  alone, again = (without_name(answer) for answer in asked(policy, body) + asked(policy, body))
  others = [{"prompt": p, "max_tokens": 30} for p in [*PROMPTS, PROMPTS[0]]]
  _, _, beside, *_ = asked(policy, *others[:2], body, *others[2:])
  assert alone == again
  for one, other in zip(alone["choices"], without_name(beside)["choices"], strict=True):
    assert one["text"] == other["text"]
    wanted = one["logprobs"].pop("token_logprobs")
    np.testing.assert_allclose(other["logprobs"].pop("token_logprobs"), wanted, atol=1e-5)
  first, second = (choice["text"] for choice in alone["choices"])
  assert (first == second) == (sampling is GREEDY)
  (changed,) = asked(policy, body | {"seed": 8})
  assert (changed["choices"][0]["text"] == first) == (sampling is GREEDY)


def test_a_repeatable_answer_does_not_depend_on_earlier_ones(policy):
  """Sampled tokens are rarely those that their text is encoded to, with a random model of bytes."""
  engine, fields = policy

  async def run():
    async with served(engine, **fields) as (_, _, endpoint), client_of(endpoint) as post:
      _, first = await post("completions", prompt="a", **SEEDED, return_token_ids=True)
      (choice,) = first["choices"]
      text, ids = f"a{choice['text']}", [*b"a", *choice["token_ids"]]
      assert ByteTokenizer().encode(text).tolist() != ids
      bodies = ({}, GREEDY, SEEDED, {"echo": True})
      asks = [post("completions", prompt=text, **b, return_token_ids=True) for b in bodies]
      texts = [
        answer["choices"][0]["prompt_token_ids"] for _, answer in await asyncio.gather(*asks)
      ]

      _, first = await post("chat/completions", messages=[user("a")], **SEEDED)
      chat = [user("a"), first["choices"][0]["message"], user("b")]
      asks = [
        post("chat/completions", messages=chat, **b, return_token_ids=True) for b in bodies[:3]
      ]
      chats = [answer["prompt_token_ids"] for _, answer in await asyncio.gather(*asks)]
      return ids, text, texts, chat, chats

  ids, text, texts, chat, chats = asyncio.run(run())
  encoded = ByteTokenizer().encode(text).tolist()
  assert texts == [ids, encoded, encoded, encoded]
  rendered = ByteTokenizer().apply_chat_template(chat).tolist()
  assert chats[0] != rendered and chats[1:] == [rendered, rendered]


def test_choices_are_ordered_by_prompt(policy):
  ids = [[*b"one"], [*b"two"]]
  bodies = [{"prompt": prompt, "n": 3, **SEEDED} for prompt in (["one", "two"], ids, "two")]
  texts, tokens, second = asked(policy, *bodies)
  found = [choice["text"] for choice in texts["choices"]]
  assert [choice["index"] for choice in texts["choices"]] == [*range(6)]
  assert len(set(found)) == 6 and found[3:] == [choice["text"] for choice in second["choices"]]
  assert without_name(texts) == without_name(tokens)
  assert texts["usage"] == {"prompt_tokens": 6, "completion_tokens": 48, "total_tokens": 54}


def test_a_chat_has_choices_and_alternatives(policy):
  body = {"messages": [user("hi")], "n": 2, "logprobs": True, "top_logprobs": 4, **SEEDED}
  (answer,) = asked(policy, body | {"return_token_ids": True}, path="chat/completions")
  assert [choice["index"] for choice in answer["choices"]] == [0, 1]
  for choice in answer["choices"]:
    ids = np.asarray([*answer["prompt_token_ids"], *choice["token_ids"]])
    wanted = trainers(ids, np.full(len(ids) - 1, SEEDED["temperature"]))[-8:]
    content = choice["logprobs"]["content"]
    assert [bytes(place["bytes"]) for place in content] == [
      ByteTokenizer().token_bytes(token) for token in choice["token_ids"]
    ]
    for row, place, token in zip(wanted, content, choice["token_ids"], strict=True):
      np.testing.assert_allclose(place["logprob"], row[token], atol=1e-5)
      top = [each["logprob"] for each in place["top_logprobs"]]
      np.testing.assert_allclose(top, np.sort(row)[::-1][:4], atol=1e-5)


def test_temperatures_and_numbers_that_overflow_are_refused(policy):
  engine, fields = policy
  wrong = {
    "temperature": [1e-40, -1, 1e9, "hot", True],
    "top_p": [0, 1.5],
    "top_k": [1 << 40, 0.5, -2],
    "min_p": [2],
    "seed": [1 << 70, 0.5],
    "n": [0, 4096],
    "logprobs": [21, -1],
    "max_tokens": [0, -1],
  }

  async def talk(post, session):
    for name, values in wrong.items():
      for value in values:
        status, answer = await post("completions", prompt="a", **{name: value})
        assert (status, answer["error"]["param"]) == (400, name), (value, answer)
    for low in (1e-6, 100):
      status, _ = await post("completions", prompt="a", temperature=low, top_k=(1 << 31) - 1)
      assert status == 200

  against(engine, talk, **fields)
