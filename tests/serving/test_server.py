"""The endpoint as clients and attackers see it: OpenAI's form, its errors, its limits."""

import asyncio
import json

import aiohttp
import numpy as np
from made_agents import TOOL, against, bigrams, client_of, said, served, user
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.serving import policy_server
from grpo_jax.serving.session import Session
from grpo_jax.serving.terms import RequestDecides


def words(text="word"):
  return ScriptedEngine(lambda request: text)


CHAT = {"messages": [user("a")]}


def test_a_chat_completion_has_openais_form():
  async def talk(post, session):
    return await post("chat/completions", **CHAT, logprobs=True, return_token_ids=True)

  status, answer = against(words("hi"), talk)
  created = answer.pop("created")
  ids = [*b"hi", END]
  assert status == 200 and created > 0
  prompt = TOKENIZER.apply_chat_template(CHAT["messages"]).tolist()
  tokens = ["h", "i", "<end>"]
  assert answer == {
    "id": "chatcmpl-p#0.0",
    "object": "chat.completion",
    "model": "policy",
    "choices": [
      {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "logprobs": {
          "content": [
            {"token": t, "logprob": -(i + 1) / 8, "bytes": [*t.encode()], "top_logprobs": []}
            for i, t in enumerate(tokens)
          ],
          "refusal": None,
        },
        "token_ids": ids,
        "weight_versions": [7, 7, 7],
      }
    ],
    "usage": {
      "prompt_tokens": len(prompt),
      "completion_tokens": 3,
      "total_tokens": len(prompt) + 3,
    },
    "prompt_token_ids": prompt,
  }


def test_a_completion_of_text_has_openais_form():
  async def talk(post, session):
    return await post("completions", prompt="a", logprobs=0, return_tokens_as_token_ids=True)

  status, answer = against(words("hi"), talk)
  assert status == 200 and answer["object"] == "text_completion"
  (choice,) = answer["choices"]
  assert choice["text"] == "hi" and choice["finish_reason"] == "stop"
  assert choice["logprobs"]["tokens"] == ["token_id:104", "token_id:105", f"token_id:{END}"]
  assert choice["logprobs"]["token_logprobs"] == [-0.125, -0.25, -0.375]


async def streamed(endpoint, path, **body):
  headers = {"Authorization": f"Bearer {endpoint.api_key}"}
  async with aiohttp.ClientSession(headers=headers) as http:
    body = {"model": "policy", "stream": True, **body}
    async with http.post(f"{endpoint.base_url}/{path}", json=body) as response:
      assert response.content_type == "text/event-stream"
      text = await response.text()
  events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
  assert events.pop() == "[DONE]"
  return [json.loads(event) for event in events]


def test_streams_have_the_answer_in_chunks():
  text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

  async def run():
    async with served(words(text)) as (_, session, endpoint):
      options = {"stream_options": {"include_usage": True}}
      chat = await streamed(endpoint, "chat/completions", **CHAT, tools=[TOOL], **options)
      plain = await streamed(endpoint, "completions", prompt="a")
      return chat, plain, session

  chat, plain, session = asyncio.run(run())
  first, last, usage = chat
  assert {event["object"] for event in chat} == {"chat.completion.chunk"}
  delta = first["choices"][0]["delta"]
  assert delta["role"] == "assistant" and delta["tool_calls"][0]["index"] == 0
  assert json.loads(delta["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
  assert last["choices"][0]["finish_reason"] == "tool_calls"
  assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(text) + 1
  assert plain[0]["choices"][0]["text"] == text
  assert len(session.turns) == 2


def test_the_model_is_listed():
  async def run():
    async with served(words()) as (_, _, endpoint), aiohttp.ClientSession() as http:
      headers = {"Authorization": f"bearer {endpoint.api_key}"}
      found = []
      for path in ("models", "models/policy", "models/other", "nothing"):
        async with http.get(f"{endpoint.base_url}/{path}", headers=headers) as response:
          found.append((response.status, await response.json()))
      return found

  listed, one, other, nothing = asyncio.run(run())
  assert listed[1]["data"] == [one[1]] and one[1]["id"] == "policy"
  assert other[0] == 404 and other[1]["error"]["code"] == "model_not_found"
  assert nothing[0] == 404 and "GET /v1/models" in nothing[1]["error"]["message"]


WRONG = {
  "no_messages": ({}, 400, "messages"),
  "empty": ({"messages": []}, 400, "messages"),
  "a_string": ({"messages": "hi"}, 400, "messages"),
  "role": ({"messages": [{"role": "god", "content": ""}]}, 400, "messages[0].role"),
  "image": (
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    400,
    "messages[0].content[0]",
  ),
  "number": ({"messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content"),
  "surrogate": ({"messages": [user("\ud800")]}, 400, None),
  "model": ({**CHAT, "model": "gpt-5"}, 404, "model"),
  "several": ({**CHAT, "n": 2}, 400, "n"),
  "penalty": ({**CHAT, "presence_penalty": 0.5}, 400, "presence_penalty"),
  "bias": ({**CHAT, "logit_bias": {"5": 1}}, 400, "logit_bias"),
  "grammar": ({**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
  "guided": ({**CHAT, "guided_regex": "a*"}, 400, "guided_regex"),
  "forced": ({**CHAT, "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
  "tools": ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
  "max_tokens": ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
  "stop": ({**CHAT, "stop": [""]}, 400, "stop"),
  "alternatives": ({**CHAT, "logprobs": True, "top_logprobs": 3}, 400, "top_logprobs"),
  "stream": ({**CHAT, "stream": "yes"}, 400, "stream"),
  "cold": ({**CHAT, "temperature": 0.1}, 400, "temperature"),
  "narrow": ({**CHAT, "top_p": 0.5}, 400, "top_p"),
  "few": ({**CHAT, "top_k": 5}, 400, "top_k"),
  "likely": ({**CHAT, "min_p": 0.1}, 400, "min_p"),
  "seed": ({**CHAT, "seed": 3}, 400, "seed"),
  "least": ({**CHAT, "min_tokens": 3}, 400, "min_tokens"),
  "one_call": (
    {**CHAT, "tools": [TOOL], "parallel_tool_calls": False},
    400,
    "parallel_tool_calls",
  ),
  "two_limits": ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
  "of_prompt": ({**CHAT, "prompt_logprobs": 0}, 400, "prompt_logprobs"),
  "chat_echo": ({**CHAT, "echo": True}, 400, "echo"),
  "unknown": ({**CHAT, "typical_p": 0.5}, 400, "typical_p"),
  "too_long": ({"messages": [user("a" * 1024)]}, 400, "messages"),
  "much_too_long": ({"messages": [user("a" * 1_000_000)]}, 400, "messages"),
}


def test_wrong_requests_are_refused_in_openais_form():
  engine = words()

  async def talk(post, session):
    found = {}
    for name, (body, _, _) in WRONG.items():
      found[name] = await post("chat/completions", **body)
    for name, prompt in [("outside", [999]), ("empty", ""), ("two", ["a", "b"]), ("bool", [True])]:
      found[f"prompt_{name}"] = await post("completions", prompt=prompt)
    for name, value in [("echo", True), ("logprobs", 1), ("n", 2), ("best_of", 2)]:
      found[name] = await post("completions", prompt="a", **{name: value})
      assert found[name][1]["error"]["param"] == name
    assert session.counts.refused == len(found) and session.turns == []
    return found

  found = against(engine, talk)
  for name, (_, status, param) in WRONG.items():
    assert found[name][0] == status, name
    error = found[name][1]["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error", name
  for name in ("too_long", "much_too_long"):
    assert found[name][1]["error"]["code"] == "context_length_exceeded"
  assert {status for name, (status, _) in found.items() if name not in WRONG} == {400}
  assert engine.calls == []


def test_what_changes_nothing_is_accepted():
  engine = words()
  neutral = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": False,  # without tools.
    "user": "me",
    "metadata": {"a": "b"},
    "seed": None,
    # Of the run itself:
    "temperature": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0,
  }

  async def talk(post, session):
    for fields in ({}, neutral, {"max_tokens": 1_000_000}):
      status, answer = await post("chat/completions", **CHAT, **fields)
      assert status == 200, answer

  against(engine, talk)
  plain, *others = (call[0].sampling for call in engine.calls)
  assert [plain, plain] == others


async def raw(endpoint, content, *, key=None, path="chat/completions"):
  headers = {} if key == "" else {"Authorization": f"Bearer {key or endpoint.api_key}"}
  async with (
    aiohttp.ClientSession(headers=headers) as http,
    http.post(f"{endpoint.base_url}/{path}", data=content) as response,
  ):
    return response.status, await response.json()


def test_bodies_that_are_not_json_are_refused():
  contents = [b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 100_000, b"null"]

  async def run():
    async with served(words()) as (_, _, endpoint):
      return [await raw(endpoint, content) for content in contents]

  found = asyncio.run(run())
  assert {status for status, _ in found} == {400}
  assert all("JSON" in answer["error"]["message"] for _, answer in found)


def test_keys_open_their_own_session_only():
  engine = words()

  async def run():
    async with served(engine) as (server, mine, endpoint):
      other = Session(mine._policy, name="q#1", seed=lambda turn: turn)
      shut = server.open(other)
      server.shut(shut.api_key)
      keys = ["", "nonsense", shut.api_key, endpoint.api_key[:-1], f"{endpoint.api_key} x"]
      content = json.dumps({"model": "policy", **CHAT}).encode()
      found = [await raw(endpoint, content, key=key) for key in keys]
      return found, mine, other, repr(endpoint), endpoint.api_key

  found, mine, other, shown, key = asyncio.run(run())
  assert {status for status, _ in found} == {401} and engine.calls == []
  assert mine.turns == other.turns == [] and key not in shown and len(key) >= 32
  assert key not in json.dumps(found)


def test_50_megabytes_are_refused_and_others_are_served():
  async def run():
    async with served(words()) as (_, session, endpoint):

      async def chunks():
        for _ in range(50):
          yield b" " * (1 << 20)

      async def big():
        try:
          return (await raw(endpoint, chunks()))[0]
        except aiohttp.ClientError:  # the connection was closed while it was still sending.
          return 413

      async with client_of(endpoint) as post:
        status, answer = await asyncio.gather(big(), post("chat/completions", **CHAT))
      return status, answer, session

  status, answer, session = asyncio.run(run())
  assert status == 413 and answer[0] == 200 and len(session.turns) == 1


def test_a_body_that_never_ends_is_given_up(monkeypatch):
  monkeypatch.setattr(policy_server, "BODY_S", 0.1)

  async def run():
    async with served(words()) as (_, _, endpoint):

      async def endless():
        yield b'{"model": '
        await asyncio.sleep(60)

      async with asyncio.timeout(10):
        return await raw(endpoint, endless())

  status, answer = asyncio.run(run())
  assert status == 408 and "did not arrive" in answer["error"]["message"]


class Stuck(FakeEngine):
  """Samples nothing until it is told to."""

  def __init__(self):
    super().__init__(bigrams())
    self.asked = asyncio.Event()
    self.go = asyncio.Event()
    self.left = 0

  async def _stream(self, requests, on_progress):
    self.asked.set()
    try:
      await self.go.wait()
    except (asyncio.CancelledError, GeneratorExit):
      self.left += 1
      raise
    async for generation in super()._stream(requests, on_progress):
      yield generation


def test_a_client_that_leaves_cancels_its_request_and_may_ask_again():
  async def run():
    engine = Stuck()
    async with served(engine) as (_, session, endpoint), client_of(endpoint) as post:
      async with client_of(endpoint) as leaving:
        task = asyncio.create_task(leaving("chat/completions", **CHAT))
        await engine.asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
      async with asyncio.timeout(10):
        while not engine.left:
          await asyncio.sleep(0.01)
      assert session.turns == []
      engine.go.set()
      status, answer = await post("chat/completions", **CHAT)
      return status, said(answer), session, engine

  status, _, session, engine = asyncio.run(run())
  assert status == 200 and len(session.turns) == 1
  alone = ScriptedEngine(lambda request: "")
  against(alone, lambda post, session: post("chat/completions", **CHAT))
  assert engine.requests[0].seed == alone.calls[0][0].seed  # as if the first had never come.


def test_shutting_a_session_ends_its_requests():
  async def run():
    engine = Stuck()
    async with served(engine) as (server, _, endpoint), client_of(endpoint) as post:
      task = asyncio.create_task(post("chat/completions", **CHAT))
      await engine.asked.wait()
      server.shut(endpoint.api_key)
      async with asyncio.timeout(10):
        (error,) = await asyncio.gather(task, return_exceptions=True)
      return error, engine.left

  error, left = asyncio.run(run())
  assert isinstance(error, aiohttp.ClientError) and left == 1


def test_prompts_of_token_ids_reach_the_engine_as_they_are():
  engine = words()

  async def talk(post, session):
    await post("completions", prompt=[[5, 6, 7]])

  against(engine, talk)
  np.testing.assert_array_equal(engine.calls[0][0].prompt_ids, [5, 6, 7])


def test_a_request_by_hand_is_sampled_as_it_says():
  engine = words("hi")
  own = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 500}

  async def talk(post, session):
    status, answer = await post("completions", prompt=["a", [98, 99]], n=2, **own)
    assert status == 200, answer
    status, again = await post("completions", prompt=[98, 99], n=2, **own)
    assert status == 200, again
    return answer, again

  answer, again = against(engine, talk, terms=RequestDecides())
  assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
  assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
  found = [call[0] for call in engine.calls]
  for request in found:
    asked = {name: getattr(request.sampling, name) for name in own if name != "seed"}
    assert asked == {name: value for name, value in own.items() if name != "seed"}
  seeds = [request.seed for request in found]
  assert len({*seeds[:4]}) == 4 and seeds[4:] == seeds[2:4]
  assert [request.prompt_ids.tolist() for request in found[:3]] == [[97], [97], [98, 99]]


def test_text_by_hand_continues_earlier_tokens_unless_it_is_to_be_repeatable():
  engine = words("é")

  async def talk(post, session):
    await post("completions", prompt="a")
    session._turns.begun_by_text("aé").generation.token_ids[:] = [1, 2, END]
    for fields in ({}, {"seed": 1}, {"temperature": 0}):
      await post("completions", prompt="aé", **fields)

  against(engine, talk, terms=RequestDecides())
  found = [call[0].prompt_ids.tolist() for call in engine.calls[1:]]
  assert found[1] == found[2] == [*"aé".encode()] != found[0]
