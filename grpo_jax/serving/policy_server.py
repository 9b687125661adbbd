"""The HTTP server: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, for many sessions.

Every session has a key, which is the API key of its client. Requests without it are refused.
A client can spoil its own session only: what it sends is refused, a mistake of this code is
answered with 500, and only a failure of the engine ends the run.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import pathlib
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from aiohttp import web

from grpo_jax.environments.base import Endpoint
from grpo_jax.serving import answers, requests
from grpo_jax.serving.connections import Connection, Listener
from grpo_jax.serving.request_errors import RequestError
from grpo_jax.serving.request_fields import RequestOptions
from grpo_jax.serving.session import ENDINGS, EngineFailed, Session

MAX_BODY = 16 << 20  # bytes of a request.
BODY_S = 60.0  # time for the body of a request to arrive, in seconds.
ANSWER_S = 60.0  # time for the client to receive an answer, in seconds.
REQUESTS = 256  # requests of one session in progress.
BODIES = 4  # bodies of one session that are read or held at the same time.
LARGE_BODY = 1 << 18  # bytes; bodies above it, or of unknown length, are held by few at a time:
LARGE_BODIES = 8  # of all sessions together.

_log = logging.getLogger(__name__)

# Writes an answer: (answers, options, *, model, created, token_bytes) → its body, or its events.
Shape = Callable[..., Any]
# Reads a request for a session → its options, the function that samples, the shape of the answer.
Reader = Callable[
  [Session, dict[str, Any]],
  tuple[RequestOptions, Callable[[], Awaitable[list[answers.Answer]]], Shape],
]


@dataclasses.dataclass(eq=False)
class _Client:
  """A session and its requests in progress."""

  session: Session
  running: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)
  bodies: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(BODIES))


class PolicyServer:
  """Serves sessions on one port; made and used in one event loop."""

  def __init__(self, *, model: str, host: str = "127.0.0.1", port: int = 0):
    """Starts nothing.

    Args:
      model: Name of the model, which requests must have.
      host: Address to listen on.
      port: Port; 0: any that is free.
    """
    self._model = model
    self._host = host
    self._port = port
    self._clients: dict[str, _Client] = {}  # by key.
    self._large = asyncio.Semaphore(LARGE_BODIES)
    self._listener: Listener | None = None
    self._base_url = ""
    self._created = int(time.time())
    self._mistakes: collections.Counter[str] = collections.Counter()  # of this code, by place.
    # Gets the first exception of the engine: answers cannot be relied on then.
    self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

  async def start(self) -> None:
    """Begins to listen.

    Raises:
      OSError: The port is taken, or the address is not of this machine.
    """
    self._listener = Listener(self._answer)
    host, port = await self._listener.start(self._host, self._port)
    self._base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

  async def close(self) -> None:
    """Ends all requests and stops listening."""
    for key in [*self._clients]:
      self.shut(key)
    if self._listener is not None:
      await self._listener.close()
      if self._listener.malformed:
        count = self._listener.malformed
        _log.warning("the endpoint for agents got %d messages that were not HTTP requests", count)
    if not self.failed.cancel():
      self.failed.exception()  # marks it as read; the waiting task raises it.

  def open(self, session: Session, *, key: str | None = None) -> Endpoint:
    """Serves a session until `shut`; returns where.

    Args:
      session: Session that answers.
      key: Key of the session; None: a new one that cannot be guessed.
    """
    key = key or secrets.token_urlsafe(24)
    self._clients[key] = _Client(session)
    return Endpoint(self._base_url, key, self._model)

  def shut(self, key: str) -> None:
    """Ends a session: its requests in progress are cancelled, and its key is no longer known."""
    client = self._clients.pop(key, None)
    for task in client.running if client else ():
      task.cancel()

  async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
    """Answers a request; errors have OpenAI's form, and never the key."""
    try:
      return await self._routed(request)
    except RequestError as error:
      found = error
    except ConnectionError:
      raise
    except Exception as error:
      self._note(error)
      found = _failed(error)
    key = _key(request)
    hidden = key if key in self._clients else ""  # others are not part of messages.
    return web.json_response(found.body(hidden=hidden), status=found.status)

  async def _routed(self, request: web.BaseRequest) -> web.StreamResponse:
    read = _READERS.get(request.path)
    if read is None and not f"{request.path}/".startswith(f"{_MODELS}/"):
      raise RequestError(f"there is no such path; this server has {_PATHS}", status=404)
    if request.method not in (("GET", "HEAD") if read is None else ("POST",)):
      raise RequestError(f"another method is needed; this server has {_PATHS}", status=405)
    client = self._client(request)
    if read is None:
      return self._models(request, client.session)
    with self._counted(client), _connection(request).answering():
      async with self._body(client, request) as body:
        requests.check_model(body, self._model)
        options, sample, shape = read(client.session, body)
        del body  # it may be large, and is not needed while the answer is sampled.
      found = shape(
        await sample(),
        options,
        model=self._model,
        created=int(time.time()),
        token_bytes=client.session.token_bytes,
      )
      return await _sent(request, found)

  @contextlib.contextmanager
  def _counted(self, client: _Client) -> Iterator[None]:
    """Counts a request of a client among those in progress, and what comes of it.

    Raises:
      RequestError: Too many are in progress, or the request cannot be answered.
    """
    task = asyncio.current_task()
    assert task is not None
    session = client.session
    if len(client.running) >= REQUESTS:
      session.counts.refused += 1
      message = f"{REQUESTS} requests with this key are in progress"
      raise RequestError(message, status=429, kind="rate_limit_error", code="rate_limit_exceeded")
    client.running.add(task)
    try:
      yield
    except RequestError:
      session.counts.refused += 1
      raise
    except (ConnectionError, *ENDINGS):  # the client has left, or the run ends.
      raise
    except EngineFailed as error:
      if not self.failed.done():
        self.failed.set_exception(error.cause)
      raise _failed(error.cause) from error
    except BaseException as error:  # also panics of libraries in Rust.
      session.mistake = self._note(error)
      raise _failed(error) from error
    finally:
      client.running.discard(task)

  def _note(self, error: BaseException) -> str:
    """Logs a mistake of this code the first time; returns its kind and place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} at {pathlib.Path(last.filename).name}:{last.lineno}"
    self._mistakes[place] += 1
    if self._mistakes[place] == 1:
      _log.error("the endpoint for agents could not answer a request: %s", place)
    return place

  def _client(self, request: web.BaseRequest) -> _Client:
    client = self._clients.get(_key(request))
    if client is None:
      raise RequestError(
        "the API key is missing, unknown, or of an attempt that has ended",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
      )
    return client

  @contextlib.asynccontextmanager
  async def _body(self, client: _Client, request: web.BaseRequest) -> AsyncIterator[dict[str, Any]]:
    """Reads the body of a request, as soon as few enough are held.

    Raises:
      RequestError: The body cannot be read.
    """
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
      raise RequestError("a body with a Content-Encoding is not read", status=415)
    length = request.content_length
    if length is not None and length > MAX_BODY:
      raise _too_large()
    is_large = length is None or length > LARGE_BODY
    async with client.bodies, self._large if is_large else contextlib.nullcontext():
      if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun yet.
      content = await _received(request)
      if is_large:
        yield await asyncio.to_thread(requests.read_json, content)
      else:
        yield requests.read_json(content)

  def _models(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
    found = answers.models(self._model, created=self._created, max_tokens=session.max_tokens)
    name = request.path.removeprefix(_MODELS).removeprefix("/")
    if not name:
      return web.json_response(found)
    requests.check_model({"model": name}, self._model)
    return web.json_response(found["data"][0])


def _chat(
  session: Session, body: dict[str, Any]
) -> tuple[RequestOptions, Callable[[], Awaitable[list[answers.Answer]]], Shape]:
  asked = requests.read_chat(body)
  shape = answers.chat_events if asked.options.is_stream else answers.chat
  return asked.options, session.chat(asked), shape


def _complete(
  session: Session, body: dict[str, Any]
) -> tuple[RequestOptions, Callable[[], Awaitable[list[answers.Answer]]], Shape]:
  asked = requests.read_text(body)
  shape = answers.text_events if asked.options.is_stream else answers.text
  return asked.options, session.complete(asked), shape


def _key(request: web.BaseRequest) -> str:
  """Returns the key of a request; "" if it has none."""
  scheme, _, key = request.headers.get("Authorization", "").partition(" ")
  return key.strip() if scheme.lower() == "bearer" else ""


def _connection(request: web.BaseRequest) -> Connection:
  assert isinstance(request.protocol, Connection)
  return request.protocol


async def _received(request: web.BaseRequest) -> bytearray:
  """Returns the body of a request.

  Raises:
    RequestError: The body is too large, malformed, or does not arrive in time.
    ConnectionError: The client has left.
  """
  content = bytearray()
  try:
    async with asyncio.timeout(BODY_S):
      while piece := await request.content.readany():
        content += piece
        if len(content) > MAX_BODY:
          raise _too_large()
  except TimeoutError as error:
    message = f"the body of the request did not arrive within {BODY_S:g} s"
    raise RequestError(message, status=408) from error
  except (RequestError, ConnectionError):
    raise
  except Exception as error:  # of aiohttp, about what the client sends: broken chunks, for example.
    raise RequestError("the body of the request is not as its headers say") from error
  return content


def _too_large() -> RequestError:
  return RequestError(f"the request has more than {MAX_BODY} bytes", status=413)


def _failed(error: BaseException) -> RequestError:
  message = f"the policy cannot answer: {type(error).__name__}"
  return RequestError(message, status=500, kind="server_error")


async def _sent(
  request: web.BaseRequest, found: dict[str, Any] | Iterable[bytes]
) -> web.StreamResponse:
  """Sends an answer: a JSON object, or a stream of events.

  Raises:
    ConnectionError: The client has left, or does not read.
  """
  try:
    async with asyncio.timeout(ANSWER_S):
      if isinstance(found, dict):
        response: web.StreamResponse = web.json_response(found)
        await response.prepare(request)
      else:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in found:
          await response.write(event)
      await response.write_eof()
  except TimeoutError as error:
    raise ConnectionError(f"the client has not read its answer within {ANSWER_S:g} s") from error
  return response


_READERS: dict[str, Reader] = {"/v1/chat/completions": _chat, "/v1/completions": _complete}
_MODELS = "/v1/models"
_PATHS = f"{', '.join(f'POST {path}' for path in _READERS)} and GET {_MODELS}"
