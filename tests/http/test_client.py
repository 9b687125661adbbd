"""The core of the HTTP clients, against a real server that is slow, resets or redirects."""

import asyncio
import email.utils
import functools
import random
import threading
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from grpo_jax.http import failures
from grpo_jax.http.background import BackgroundLoop
from grpo_jax.http.client import JsonClient, Request, seconds
from grpo_jax.http.retries import RetryPolicy, doubling, until_answered

KEY = "sk-secret-0123456789"
LIMIT = 10_000
SHORT_S = 1.0  # for servers that keep silent; the others have time on a busy machine, too.


class Scripted:
  """Answers the n-th request by the n-th handler; after the last, by the last."""

  def __init__(self, *handlers):
    self.handlers = handlers
    self.seen = []
    self.connections = set()

  async def handle(self, request):
    self.connections.add(request.transport)
    self.seen.append((request.method, request.path, request.headers, await request.read()))
    return await self.handlers[min(len(self.seen), len(self.handlers)) - 1](request)


def talk(*handlers, then):
  """Runs a server with these handlers; returns (result or failure of `then`, the server)."""

  async def go():
    scripted = Scripted(*handlers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    async with TestServer(app) as server, JsonClient(key=KEY, connect_s=5.0) as client:
      try:
        result = await then(client, str(server.make_url("/score")))
      except failures.HttpFailure as failure:
        result = failure
    return result, scripted

  return asyncio.run(go())


def once(client, url, **options):
  request = Request(url=url, **{"timeout_s": 5.0, "body": {"a": 1}, "limit": LIMIT, **options})
  return client.ask(request, lambda answer: answer)


def patiently(client, url, *, try_s=10.0):
  return until_answered(
    lambda timeout_s: once(client, url, timeout_s=timeout_s),
    RetryPolicy(timeout_s=try_s, total_timeout_s=30.0, retries=2, backoff_s=0.01),
    randomness=random.Random(0),
  )


def says(text, status=200, **headers):
  async def handle(request):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(text=text, status=status, headers=named)

  return handle


GOOD = says('{"reward": 1}', Content_Type="application/json")


async def slow_body(request):
  response = web.StreamResponse(headers={"Content-Length": "1000000"})
  await response.prepare(request)
  try:
    while True:
      await response.write(b" ")
      await asyncio.sleep(0.02)
  except ConnectionError:  # the client has gone.
    pass
  return response


async def reset(request):
  request.transport.abort()
  return web.Response()


async def half(request):
  response = web.StreamResponse(headers={"Content-Length": "1000"})
  await response.prepare(request)
  await response.write(b'{"reward"')
  request.transport.abort()
  return response


async def then_closes(request):
  """Answers, promises to keep the connection, and closes it."""
  asyncio.get_running_loop().call_later(0.02, request.transport.close)
  return await GOOD(request)


PASSING = {
  "slow body": (slow_body, failures.TimedOut, f"no complete answer within {SHORT_S:g} s"),
  "reset": (reset, failures.Unreachable, "ServerDisconnectedError|ClientOSError"),
  "half": (half, failures.Unreachable, "ClientPayloadError"),
  "429": (says("full", 429), failures.Overloaded, "answered 429: full$"),
  "503": (says("", 503), failures.Failed, "/score: answered 503$"),
  "huge body": (says(" " * (LIMIT + 1)), failures.Unreadable, f"longer than {LIMIT} bytes"),
  "no JSON": (says("<html>"), failures.Unreadable, "not JSON: <html>$"),
}


@pytest.mark.long
@pytest.mark.parametrize(("handler", "kind", "message"), PASSING.values(), ids=PASSING)
def test_a_passing_failure_has_its_class_and_is_tried_again(handler, kind, message):
  try_s = SHORT_S if kind is failures.TimedOut else 10.0
  tried = functools.partial(patiently, try_s=try_s)
  failure, _ = talk(handler, then=lambda *at: once(*at, timeout_s=try_s))
  assert type(failure) is kind and failure.__cause__ is failure.__context__ is None
  with pytest.raises(failures.Unanswered, match=message):
    raise failure
  answer, server = talk(handler, handler, GOOD, then=tried)
  assert answer == {"reward": 1} and len(server.seen) == 3
  lasting, server = talk(handler, then=tried)
  assert type(lasting) is kind and len(server.seen) == 3


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404, 408])
def test_a_refusal_is_not_tried_again_and_a_redirect_is_not_followed(status):
  refusal = says(f"no: {KEY}\x1b[2J", status, Location="/elsewhere")
  failure, server = talk(refusal, GOOD, then=patiently)
  assert type(failure) is failures.Refused and failure.status == status
  assert str(failure).endswith(f"/score: answered {status}: no: ***\\x1b[2J")
  assert [path for _, path, _, _ in server.seen] == ["/score"]
  assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"


def test_json_is_read_whatever_its_content_type():
  for kind in ("application/json", "text/plain; charset=latin-1", "image/png"):
    answer, _ = talk(says('{"é": 1}', 201, Content_Type=kind), then=once)
    assert answer in ({"é": 1}, {"\ufffd": 1})
  answer, _ = talk(says("", 204), then=once)
  assert answer is None
  answer, _ = talk(says("not JSON"), then=lambda *at: once(*at, is_json=False))
  assert answer is None


def test_a_kept_connection_is_used_again_unless_the_server_closed_it():
  async def twice(client, url):
    answers = [await once(client, url)]
    await asyncio.sleep(0.1)
    return [*answers, await once(client, url)]

  answers, server = talk(GOOD, then=twice)
  assert answers == [{"reward": 1}] * 2 and len(server.connections) == 1
  answers, server = talk(then_closes, GOOD, then=twice)
  assert answers == [{"reward": 1}] * 2 and len(server.connections) == 2


def test_what_the_reader_rejects_is_shown_without_the_key():
  class Odd(failures.Unusable):
    pass

  def read(answer):
    raise Odd(f"expected a number, got {answer!r}")

  async def ask(client, url):
    return await client.ask(Request(url=url, timeout_s=5.0), read)

  failure, _ = talk(says(f'["{KEY}"]'), then=ask)
  assert type(failure) is Odd and str(failure) == "expected a number, got ['***']"
  assert failure.__cause__ is failure.__context__ is None


def test_an_answer_too_deep_for_its_reader_is_unreadable():
  def read(answer):
    return read(answer)

  async def ask(client, url):
    return await client.ask(Request(url=url, timeout_s=5.0), read)

  failure, _ = talk(says("[]"), then=ask)
  assert type(failure) is failures.Unreadable and "nested too deeply" in str(failure)


@pytest.mark.parametrize("status", [429, 503])
def test_the_server_says_how_long_to_wait_up_to_a_bound(status):
  async def timed(client, url):
    started = time.monotonic()
    await until_answered(
      lambda timeout_s: once(client, url),
      RetryPolicy(backoff_s=0.0, max_backoff_s=0.15),
      randomness=random.Random(0),
    )
    return time.monotonic() - started

  pause, _ = talk(says("", status, Retry_After="60"), GOOD, then=timed)
  assert isinstance(pause, float) and 0.15 <= pause < 5.0
  failure, _ = talk(says("", status, Retry_After="7"), then=once)
  assert failure.retry_after_s == 7.0


def test_retry_after_is_a_number_or_a_date():
  assert seconds(" 12 ") == 12.0
  date = email.utils.formatdate(time.time() + 100, usegmt=True)
  assert 90.0 < seconds(date) <= 100.0
  for text in ("", "soon", "-3", "1e9", "9" * 40, "nan", "Thu, 01 Jan 1970 00:00:00 GMT", "٣", ","):
    assert seconds(text) == 0.0


def test_pauses_double_up_to_the_longest():
  pauses = [doubling(n, first_s=1.0, longest_s=60.0) for n in (1, 2, 3, 7, 5000)]
  assert pauses == [1.0, 2.0, 4.0, 60.0, 60.0]


def test_all_tries_have_one_time_and_thousands_of_retries_do_not_overflow():
  timeouts = []

  async def attempt(timeout_s):
    timeouts.append(timeout_s)
    raise failures.Failed("no")

  async def ask(patience):
    await until_answered(attempt, patience, randomness=random.Random(0))

  with pytest.raises(failures.Failed):
    asyncio.run(ask(RetryPolicy(retries=2000, backoff_s=0.0, total_timeout_s=60.0)))
  assert len(timeouts) == 2001 and max(timeouts) == 30.0
  timeouts.clear()
  with pytest.raises(failures.Failed):
    asyncio.run(
      ask(RetryPolicy(retries=9, backoff_s=0.05, max_backoff_s=0.05, total_timeout_s=0.12))
    )
  assert 2 <= len(timeouts) <= 5 and timeouts == sorted(timeouts, reverse=True)
  with pytest.raises(ValueError, match="must be above 0"):
    RetryPolicy(timeout_s=0.0)
  with pytest.raises(ValueError, match="must be at least 0"):
    RetryPolicy(retries=-1)


def test_a_loop_in_the_background_cancels_its_work_and_ends_its_thread():
  events = []

  async def forever():
    try:
      await asyncio.sleep(60)
    finally:
      events.append("cancelled")

  async def last():
    events.append("last")

  threads = threading.active_count()
  loop = BackgroundLoop("test")
  work = loop.submit(forever())
  loop.call(events.append, "called")
  loop.close(last())
  assert events == ["called", "cancelled", "last"] and work.cancelled()
  assert threading.active_count() == threads
  with pytest.raises(RuntimeError, match="closed"):
    loop.submit(last())
