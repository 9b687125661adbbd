"""The client of SGLang against servers that flood, drip, compress, redirect and echo the key."""

import asyncio
import gzip
import json
import logging
import threading
import time
import traceback
import zlib

import pytest

from grpo_jax.engines.sglang_client import Client, Timeouts
from grpo_jax.engines.sglang_messages import Garbled
from grpo_jax.http.client import SMALL_BYTES, JsonClient
from grpo_jax.http.failures import Refused, Unanswered
from tests.environments.scripted_server import answer, drip, flood, half, raw, serving

KEY = "sk-secret-0123456789-abcdef"
LIMIT = 100_000


def ask(server, *, generate_s=5.0, read=lambda found: found, body=None, meanwhile=None):
  """Asks for a completion, and returns what comes of it."""

  async def go():
    async with JsonClient(key=KEY) as http:
      client = Client(http, server.url, timeouts=Timeouts(generate_s=generate_s))
      asking = asyncio.ensure_future(client.generate(body or {}, read=read, limit=LIMIT))
      if meanwhile:
        await meanwhile(asking)
      return await asking

  return asyncio.run(go())


def shown(error):
  """Returns everything that is ever printed of an error, its causes and contexts included."""
  chain, texts = error, []
  while chain is not None:
    texts += [str(chain), repr(chain), repr(chain.args), repr(vars(chain))]
    chain = chain.__cause__ or chain.__context__
  return "\n".join([*texts, *traceback.format_exception(error)])


def compressed(content, *, encoding="gzip"):
  packed = gzip.compress(content, 1) if encoding == "gzip" else zlib.compress(content, 1)
  return raw(packed, Content_Encoding=encoding)


BIG = b'{"meta_info": "' + b" " * 10 * LIMIT + b'"}'


@pytest.mark.parametrize(
  "script",
  [
    raw(BIG),
    flood,
    compressed(BIG),
    compressed(BIG, encoding="deflate"),
    compressed(b"[" * 10_000_000),
    raw(BIG, 500),
    raw(BIG, 400),
  ],
)
def test_an_answer_longer_than_any_honest_one_is_given_up(script):
  with serving(script) as server, pytest.raises(Unanswered, match=f"longer than {LIMIT} bytes"):
    ask(server)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_answer_within_the_bound_is_read(encoding):
  with serving(compressed(b'{"a": [1]}', encoding=encoding)) as server:
    assert ask(server) == {"a": [1]}
    assert server.requests[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
  ("script", "message"),
  [
    (raw(gzip.compress(b"{}")[:-4], Content_Encoding="gzip"), "breaks off"),
    (raw(gzip.compress(b"{}") + b"more", Content_Encoding="gzip"), "continues after its end"),
    (raw(b"{}", Content_Encoding="gzip"), "is broken"),
    (raw(b"{}", Content_Encoding="br"), "other than gzip and deflate"),
    (raw(b"<html>"), "not JSON: <html>"),
    (raw(b"[" * 50_000), "not JSON"),
    (raw(b"9" * 50_000), "not JSON"),
    (half, "Payload"),
    (raw(b"no", 503), "answered 503: no"),
    (raw(b"later", 429), "answered 429: later"),
  ],
)
def test_an_unreadable_answer_does_not_count_as_an_answer(script, message):
  with serving(script) as server, pytest.raises(Unanswered, match=message):
    ask(server)


@pytest.mark.parametrize("script", [drip, lambda handler, server: server.released.wait(30)])
def test_the_time_out_is_that_of_the_whole_exchange(script):
  began = time.monotonic()
  message = "no complete answer within 0.3 s"
  with serving(script) as server, pytest.raises(Unanswered, match=message):
    ask(server, generate_s=0.3)
  assert time.monotonic() - began < 5.0


@pytest.mark.long
def test_the_time_out_holds_while_an_answer_is_read():
  with serving(raw(b"[" + b"1," * 40_000 + b"1]")) as server:
    with pytest.raises(Unanswered, match="no complete answer within 0.3 s"):
      ask(server, generate_s=0.3, read=lambda found: time.sleep(1.0))


def test_a_large_answer_is_read_beside_the_loop():
  threads, went_round, is_reading = [], threading.Event(), threading.Event()

  async def watch(asking):
    rounds = 0
    while not asking.done():
      await asyncio.sleep(0.005)
      rounds += is_reading.is_set()
      if rounds == 20:
        went_round.set()

  def read(found):
    threads.append(threading.current_thread())
    is_reading.set()
    assert went_round.wait(20.0)  # the loop goes round meanwhile.
    return len(found)

  with serving(raw(b"[" + b"1," * 40_000 + b"1]")) as server:
    assert ask(server, read=read, meanwhile=watch) == 40_001
  assert threads[0] is not threading.main_thread()


def test_other_answers_are_bounded_too():
  async def go(server):
    async with JsonClient() as http:
      client = Client(http, server.url)
      for call in (client.pause(), client.load("w", 1), client.can_update()):
        with pytest.raises(Unanswered, match=f"longer than {SMALL_BYTES} bytes"):
          await call

  with serving(raw(b" " * (SMALL_BYTES + 1))) as server:
    asyncio.run(go(server))


# --- the key ---


def reason_phrase(handler, server):
  handler.wfile.write(f"HTTP/1.1 401 {KEY}\x1b[31m\r\nContent-Length: 0\r\n\r\n".encode())


def bad_header(handler, server):
  handler.wfile.write(f"HTTP/1.1 200 OK\r\nbad header {KEY}\r\n\r\n".encode())
  handler.close_connection = True


def bad_status_line(handler, server):
  handler.wfile.write(f"{KEY} {KEY}\r\n\r\n".encode())
  handler.close_connection = True


def bad_chunk(handler, server):
  handler.wfile.write(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{KEY}\r\n".encode())
  handler.close_connection = True


ECHOES = {
  "a refusal": raw(f"bad key: Bearer {KEY} \x1b]0;owned\x07\u202e".encode(), 401),
  "a failure": raw(f"bad key: Bearer {KEY} \x1b[2J".encode(), 500),
  "no JSON": raw(f"bad key: Bearer {KEY} \x9b2J".encode()),
  "another form": answer({"error": f"bad key: {KEY} \x1b[2J"}),
  "a reason": reason_phrase,
  "a header": bad_header,
  "a status line": bad_status_line,
  "a chunk": bad_chunk,
  "a redirect": raw(b"", 307, Location=f"http://127.0.0.1:9/{KEY}"),
  "a cookie": raw(b"bad", 401, Set_Cookie=f"{KEY}@[]=1; {KEY}"),
  "a compression": raw(b"bad", 401, Content_Encoding=KEY),
  "half an answer": raw(f"bad key {KEY}".encode(), 401, Content_Length="1000"),
}


@pytest.mark.parametrize("script", ECHOES.values(), ids=ECHOES.keys())
def test_a_key_that_the_server_echoes_is_in_no_message_and_in_no_cause(script, caplog, capfd):
  caplog.set_level(logging.DEBUG)

  def read(found):
    raise Garbled(f"expected another form, got {found}")

  def then_closes(handler, server):
    script(handler, server)
    handler.close_connection = True

  with serving(then_closes) as server:
    with pytest.raises((Refused, Unanswered, Garbled)) as caught:
      ask(server, read=read)
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
  assert str(caught.value).isprintable()
  out, err = capfd.readouterr()
  everything = shown(caught.value) + caplog.text + out + err
  assert KEY not in everything and KEY[:10] not in everything


def test_a_redirect_is_not_followed():
  with serving(answer({})) as elsewhere:
    with serving(raw(b"", 307, Location=f"{elsewhere.url}/generate")) as server:
      with pytest.raises(Refused, match="answered 307"):
        ask(server)
    assert elsewhere.requests == []


def test_bodies_travel_as_json():
  with serving(answer([1.5, None])) as server:
    assert ask(server, body={"input_ids": [1]}) == [1.5, None]
    assert json.dumps(server.requests[0][2]) == '{"input_ids": [1]}'
