"""Requests that are malformed, hostile or too large: each is refused, and others are served."""

import asyncio
import contextlib
import gzip
import json
import re

import numpy as np
import pytest
from made_agents import (
  Agents,
  bigrams,
  client_of,
  collected,
  policy_of,
  prompts,
  served,
  solved,
  user,
)
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.engines.fake import FakeEngine
from grpo_jax.serving import completions, connections, policy_server, turns
from grpo_jax.serving.session import Session

CHAT = "/v1/chat/completions"
TOOL_TEXT = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def words():
  return ScriptedEngine(lambda request: TOOL_TEXT)


def chat(**fields) -> bytes:
  return json.dumps({"model": "policy", "messages": [user("a")], **fields}).encode()


def request(body=None, *headers, path=CHAT, method="POST", authorization="Bearer KEY") -> bytes:
  body = chat() if body is None else body
  lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: {authorization}", *headers]
  if not any(line.startswith(("Content-Length", "Transfer-Encoding")) for line in headers):
    lines.append("Content-Length: LENGTH")
  return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body


def content(text: bytes) -> bytes:
  return b'{"model": "policy", "messages": [{"role": "user", "content": "' + text + b'"}]}'


def nested(depth, opening="[", closing="]") -> str:
  return opening * depth + closing * depth


def with_arguments(arguments) -> bytes:
  call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
  said = {"role": "assistant", "tool_calls": [call]}
  answer = {"role": "tool", "tool_call_id": "1", "content": "x"}
  return chat(messages=[user("a"), said, answer])


def hostile():
  """Yields (name, bytes of a request, statuses that are right)."""
  for coding in ("gzip", "deflate", "br", "zstd", "x", "identity, gzip"):
    for body in (b"none", gzip.compress(chat())):
      yield coding, request(body, f"Content-Encoding: {coding}"), {415}
  yield "identity", request(chat(), "Content-Encoding: Identity"), {200}
  for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-32-be", "latin-1"):
    for text in (b"\xe9", b"\\ud800\xe9"):
      yield encoding, request(content(text).decode("latin-1").encode(encoding)), {400}
  for text in (b"\xed\xa0\x80", b"\xc0\x80", b"\xf0\x80\x80\xaf", b"\xf4\x90\x80\x80", b"\xff"):
    yield f"bytes {text}", request(content(text)), {400}
  for text in (b"\\ud800", b"\\udfff", b"\\uD83D", b"\\udc00\\ud800", b"\n", b"\0"):
    yield f"string {text}", request(content(text)), {400}
    yield f"name {text}", request(b'{"' + text + b'": 1}'), {400}
    yield f"prompt {text}", request(b'{"model": "policy", "prompt": "' + text + b'"}'), {400}
  yield "pair", request(content(b"\\ud83d\\ude00\\u0000")), {200}
  for body in (b"", b" ", b"null", b"1", b'"a"', b"[]", b"{", chat() + b"x", chat() + chat()):
    yield f"body {body[:9]}", request(body), {400}
  for innermost in ("", "1"):
    for depth, right in ((63, {200}), (64, {400})):  # within the object that is the request.
      lists = nested(depth, opening="[", closing="]").replace("[]", f"[{innermost}]")
      yield f"lists {depth}", request(chat()[:-1] + f', "metadata": {lists}}}'.encode()), right
  for depth in (65, 975, 100_000):
    for opening, closing in (("[", "]"), ('{"a":', "}")):
      value = nested(depth, opening, closing).replace(":}", ":1}").encode()
      for field in (b"tools", b"metadata", b"stop", b"response_format", b"messages"):
        yield f"{field} {depth}", request(b'{"' + field + b'": ' + value + b"}"), {400}
      yield f"arguments {depth}", request(with_arguments(value.decode())), {200, 400}
  for number in ("1e400", "NaN", "-Infinity", "9" * 100_000):
    for field in ("max_tokens", "n", "seed", "tools", "messages", "logit_bias", "unknown"):
      yield f"{field}={number[:9]}", request(f'{{"{field}": {number}}}'.encode()), {400}
  yield "twice", request(b'{"model": "policy", "model": "policy"}'), {400}
  for value in (None, 1, "x", [], {}, [None], {"properties": {"a": 1}}, {"anyOf": [1]}, True):
    tool = {"type": "function", "function": {"name": "f", "parameters": value}}
    yield f"parameters {value}", request(chat(tools=[tool])), {200}
    for field in ("tools", "messages", "stop", "stream", "stream_options", "tool_choice"):
      yield f"{field} {value}", request(chat(**{field: value})), {200, 400}
    for field in ("role", "content", "name", "tool_calls", "reasoning_content", "tool_call_id"):
      message = {"role": "assistant", "content": "a", field: value}
      yield f"message {field} {value}", request(chat(messages=[message])), {200, 400}
    is_object = value is None or isinstance(value, dict)
    yield f"arguments {value}", request(with_arguments(value)), {200 if is_object else 400}
  for text in ("[", "[1]", '{"a": NaN}', '{"a": "\\ud800"}'):
    yield f"arguments {text}", request(with_arguments(text)), {400}
  yield "messages", request(chat(messages=[user("")] * 5000)), {400}
  yield "stops", request(chat(stop=["a"] * 65)), {400}
  yield "stop", request(chat(stop="a" * 1001)), {400}
  yield "17 MB", request(b" " * (17 << 20)), {413}
  yield "said length", request(b"{}", f"Content-Length: {1 << 40}"), {413}
  for method in ("GET", "PUT", "OPTIONS", "CONNECT", "TRACE"):
    yield method, request(method=method), {400, 404, 405}
  for path in ("/", "/v1/KEY", "/v1/models/KEY", "/v1//models", f"{CHAT}/"):
    yield path, request(b"", path=path, method="GET"), {404}
  for authorization in ("", "KEY", "Basic KEY", "Bearer KEYx", "Bearer x KEY"):
    yield authorization, request(authorization=authorization), {401}
  for header in ("Expect: KEY", "Transfer-Encoding: KEY", "Content-Length: KEY", "KEY", " KEY"):
    yield header, request(chat(), header), {200, 400, 417, 501}
  yield "expected", request(chat(), "Expect: 100-continue"), {100}
  yield "upgrade", request(chat(), "Upgrade: websocket"), {200, 400}
  for field in ("model", "role", "stop", "n", "tool_choice", "stream", "max_tokens"):
    for value in ("KEY", f"{'x' * 70}KEY", ["KEY"], {"KEY": "KEY"}):
      yield f"key in {field}", request(chat(**{field: value})), {200, 400, 404}
  chunked = request(b"KEY\r\nab", "Transfer-Encoding: chunked")
  for raw in (chunked, b"KEY KEY KEY\r\n\r\n", b"\x16\x03\x01\0\x01" * 9, b"\0KEY" * 99):
    yield f"raw {raw[:9]}", raw, {400}
  yield "HTTP/9.9", b"GET /KEY HTTP/9.9\r\nAuthorization: Bearer KEY\r\n\r\n", {400}
  yield "headers", b"GET / HTTP/1.1\r\n" + b"a: KEY\r\n" * 20_000 + b"\r\n", {400, 413}


async def sent(endpoint, data: bytes) -> bytes:
  """Returns what the server answers to bytes; KEY is replaced by the key."""
  data = data.replace(b"KEY", endpoint.api_key.encode())
  head, end, body = data.partition(b"\r\n\r\n")
  data = head.replace(b"LENGTH", b"%d" % len(body)) + end + body
  address = endpoint.base_url.split("/")[2].split(":")
  reader, writer = await asyncio.open_connection(*address)
  try:
    writer.write(data)
    async with asyncio.timeout(30):
      head = await reader.readuntil(b"\r\n\r\n")
      length = re.search(rb"(?i)content-length: (\d+)", head)
      return head + await reader.readexactly(int(length[1]) if length else 0)
  except asyncio.IncompleteReadError as error:
    return error.partial
  finally:
    writer.close()


@pytest.mark.long
def test_no_request_ends_the_run_or_shows_a_key(caplog, capfd):
  async def run():
    found = []
    async with served(words()) as (server, session, endpoint):
      for name, data, right in hostile():
        try:
          answer = await sent(endpoint, data)
        except ConnectionError:  # it was closed while the request was still being sent.
          answer = b"HTTP/1.1 413"
        status = int(answer[9:12] or 0)
        shown = endpoint.api_key[:9].encode() in answer or b"Traceback" in answer
        if status not in right or shown or session.mistake or server.failed.done():
          found.append((name, status, session.mistake))
          session.mistake = ""
      other = server.open(Session(policy_of(words()), name="q#0", seed=lambda turn: turn))
      async with client_of(other) as post:
        assert (await post("chat/completions", messages=[user("a")]))[0] == 200
      return found, endpoint.api_key

  found, key = asyncio.run(run())
  assert found == []
  printed = caplog.text + "".join(capfd.readouterr())
  assert key[:9] not in printed and "Traceback" not in printed


def test_connections_without_a_request_are_few_and_end(monkeypatch):
  monkeypatch.setattr(connections, "HEADERS_S", 0.5)
  monkeypatch.setattr(connections, "WAITING", 8)

  async def run():
    async with served(words()) as (_, _, endpoint), contextlib.AsyncExitStack() as stack:
      address = endpoint.base_url.split("/")[2].split(":")
      readers = []
      for _ in range(20):
        reader, writer = await asyncio.open_connection(*address)
        stack.callback(writer.close)
        writer.write(b"GET /v1/models HTTP/1.1\r\nA: ")
        readers.append(reader)
        await asyncio.sleep(0)
      async with asyncio.timeout(10):
        await asyncio.gather(*(reader.read() for reader in readers[:12]))
        open_ones = sum(not reader.at_eof() for reader in readers)
        async with client_of(endpoint) as post:
          status, _ = await post("chat/completions", messages=[user("a")])
        await asyncio.gather(*(reader.read() for reader in readers))
      return open_ones, status

  assert asyncio.run(run()) == (8, 200)


@pytest.mark.parametrize(("keys", "most"), [(1, policy_server.BODIES), (6, 8)])
def test_few_large_bodies_are_held_at_the_same_time(keys, most, monkeypatch):
  held, highest = 0, 0
  received = policy_server._received

  async def counted(request):
    nonlocal held, highest
    held, highest = held + 1, max(highest, held + 1)
    try:
      return await received(request)
    finally:
      held -= 1

  monkeypatch.setattr(policy_server, "_received", counted)
  body = chat(metadata="a" * (policy_server.LARGE_BODY + 1))

  async def run():
    async with served(words()) as (server, session, endpoint):
      made = [
        server.open(Session(session._policy, name=f"q#{n}", seed=lambda turn: turn))
        for n in range(keys - 1)
      ]
      all_keys = [endpoint, *made] * (24 // keys)
      answers = await asyncio.gather(*(sent(each, request(body)) for each in all_keys))
      return {answer[9:12] for answer in answers}

  assert asyncio.run(run()) == {b"200"}
  assert 1 < highest <= most


def test_a_mistake_of_this_program_is_logged_once_by_kind_and_place(monkeypatch, caplog):
  def fails(*_, **__):
    raise KeyError("secret words of a client")

  monkeypatch.setattr(completions, "parsed", fails)

  async def run():
    async with served(words()) as (server, session, endpoint):
      answers = [await sent(endpoint, request()) for _ in range(3)]
      return answers, session.mistake, server.failed.done()

  answers, mistake, has_failed = asyncio.run(run())
  assert all(b"500" in answer[:12] and b"secret" not in answer for answer in answers)
  assert mistake.startswith("KeyError at test_hostile_requests.py:") and not has_failed
  (record,) = caplog.records
  assert mistake in record.getMessage() and "secret" not in caplog.text


class Panic(BaseException):
  """As the panics of libraries in Rust: not an Exception."""


def raises(error):
  def fails(*_, **__):
    raise error

  return fails


PLACES = {
  "reading": (policy_server.requests, "read_chat"),
  "finding": (turns, "keys_of"),
  "rendering": (type(TOKENIZER), "prompt"),
  "decoding": (type(TOKENIZER), "decode"),
  "parsing": (completions, "parsed"),
  "writing": (policy_server.answers, "chat"),
}


def test_whatever_is_raised_around_the_engine_is_500_and_ends_no_run(monkeypatch):
  errors = (Panic("a"), RecursionError("a"), MemoryError("a"), UnicodeError("a"), KeyError("a"))

  async def run():
    found = []
    async with served(words()) as (server, session, endpoint):
      for place, (owner, name) in PLACES.items():
        for error in errors:
          with monkeypatch.context() as patch:
            patch.setattr(owner, name, raises(error))
            status = (await sent(endpoint, request()))[9:12]
          expected = f"{type(error).__name__} at test_hostile_requests.py:"
          if status != b"500" or not session.mistake.startswith(expected):
            found.append((place, error, status, session.mistake))
          session.mistake = ""
      assert not server.failed.done()
      assert (await sent(endpoint, request()))[9:12] == b"200"
    return found

  assert asyncio.run(run()) == []


@pytest.mark.parametrize("error", [Panic("a"), ValueError("a")])
def test_what_the_engine_raises_ends_the_run(error):
  async def run():
    async with served(ScriptedEngine(raises(error))) as (server, session, endpoint):
      status = (await sent(endpoint, request()))[9:12]
      return status, server.failed.exception(), session.mistake

  assert asyncio.run(run()) == (b"500", error, "")


def test_a_mistake_of_the_endpoint_costs_the_attempt_that_met_it(monkeypatch):
  keep = Session._keep

  def fails_once(session, *args):
    if session._name == "set:0:0#1":
      raise KeyError("nothing that a client could have done")
    return keep(session, *args)

  monkeypatch.setattr(Session, "_keep", fails_once)
  statuses = []

  async def talk(post, prompt):
    status, _ = await post("chat/completions", messages=[user("a")])
    statuses.append(status)
    return solved()

  (group,) = collected(FakeEngine(bigrams()), Agents(talk), prompts("x"), group_size=3)
  assert sorted(statuses) == [200, 200, 500]
  assert [rollout.failure for rollout in group.rollouts] == ["", "endpoint", ""]
  assert group.rollouts[1].error.startswith("endpoint: KeyError at test_hostile_requests.py:")
  assert np.isnan(group.rollouts[1].reward) and group.rollouts[0].reward == 1.0
