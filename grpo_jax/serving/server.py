"""The HTTP server: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, for many sessions.

Every session has a key, which is the API key of its client. Requests without it are refused.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from grpo_jax.environments.base import Endpoint
from grpo_jax.serving import answers, requests
from grpo_jax.serving.requests import Options, RequestError
from grpo_jax.serving.session import Session

MAX_BODY = 16 << 20  # bytes of a request.
BODY_S = 60.0  # time for the body of a request to arrive, in seconds.

Handler = Callable[[web.Request, Session, dict[str, Any]], Awaitable[web.StreamResponse]]


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
    self._sessions: dict[str, Session] = {}
    self._running: dict[str, set[asyncio.Task[Any]]] = {}  # handlers, by key.
    self._runner: web.AppRunner | None = None
    self._base_url = ""
    self._created = int(time.time())
    # Gets the first exception that is not the client's fault: answers cannot be relied on then.
    self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

  async def start(self) -> None:
    """Begins to listen.

    Raises:
      OSError: The port is taken, or the address is not of this machine.
    """
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_as_openai])
    app.router.add_post("/v1/chat/completions", self._with_session(self._chat))
    app.router.add_post("/v1/completions", self._with_session(self._complete))
    app.router.add_get("/v1/models", self._models)
    app.router.add_get("/v1/models/{name:.+}", self._models)
    self._runner = web.AppRunner(
      app,
      access_log=None,
      handler_cancellation=True,  # a client that leaves does not need its answer.
      shutdown_timeout=0.0,
    )
    await self._runner.setup()
    await web.TCPSite(self._runner, self._host, self._port).start()
    host, port = self._runner.addresses[0][:2]
    self._base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

  async def close(self) -> None:
    """Ends all requests and stops listening."""
    for key in [*self._sessions]:
      self.shut(key)
    if self._runner is not None:
      await self._runner.cleanup()
    if not self.failed.cancel():
      self.failed.exception()  # marks it as read; the waiting task raises it.

  def open(self, session: Session, *, key: str | None = None) -> Endpoint:
    """Serves a session until `shut`; returns where.

    Args:
      session: Session that answers.
      key: Its key; None: a new one, which cannot be guessed.
    """
    key = key or secrets.token_urlsafe(24)
    self._sessions[key] = session
    self._running[key] = set()
    return Endpoint(self._base_url, key, self._model)

  def shut(self, key: str) -> None:
    """Ends a session: its requests in progress are cancelled, and its key is no longer known."""
    self._sessions.pop(key, None)
    for task in self._running.pop(key, ()):
      task.cancel()

  def _with_session(self, handle: Handler) -> Callable[[web.Request], Any]:
    """Returns a handler that finds the session of a request and reads its body."""

    async def answer(request: web.Request) -> web.StreamResponse:
      key, session = self._session(request)
      task = asyncio.current_task()
      assert task is not None
      self._running[key].add(task)
      try:
        body = await _body(request)
        requests.check_model(body, self._model)
        return await handle(request, session, body)
      except (RequestError, web.HTTPException, asyncio.CancelledError, ConnectionError) as error:
        session.counts.refused += isinstance(error, RequestError | web.HTTPException)
        raise
      except Exception as error:  # of the engine, the tokenizer or this code: the run must end.
        if not self.failed.done():
          self.failed.set_exception(error)
        raise RequestError(
          f"the policy cannot answer: {type(error).__name__}", status=500, kind="server_error"
        ) from error
      finally:
        if key in self._running:
          self._running[key].discard(task)

    return answer

  def _session(self, request: web.Request) -> tuple[str, Session]:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or key not in self._sessions:
      raise RequestError(
        "the API key is missing, unknown, or of an attempt that has ended",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
      )
    return key, self._sessions[key]

  async def _chat(
    self, request: web.Request, session: Session, body: dict[str, Any]
  ) -> web.StreamResponse:
    asked = requests.read_chat(body)
    answer = await session.chat(asked)()
    shape = answers.chat_events if asked.options.is_stream else answers.chat
    return await self._written(request, session, shape, answer, asked.options)

  async def _complete(
    self, request: web.Request, session: Session, body: dict[str, Any]
  ) -> web.StreamResponse:
    asked = requests.read_text(body)
    answer = await session.complete(asked)()
    shape = answers.text_events if asked.options.is_stream else answers.text
    return await self._written(request, session, shape, answer, asked.options)

  async def _written(
    self,
    request: web.Request,
    session: Session,
    shape: Callable[..., Any],
    answer: answers.Answer,
    options: Options,
  ) -> web.StreamResponse:
    """Sends an answer in its shape: a JSON object, or a stream of events."""
    found = shape(
      answer, options, model=self._model, created=int(time.time()), decode=session.decode_token
    )
    if not options.is_stream:
      return web.json_response(found)
    return await _streamed(request, found)

  async def _models(self, request: web.Request) -> web.StreamResponse:
    _, session = self._session(request)
    found = answers.models(self._model, created=self._created, max_tokens=session.max_tokens)
    name = request.match_info.get("name")
    if name is None:
      return web.json_response(found)
    requests.check_model({"model": name}, self._model)
    return web.json_response(found["data"][0])


async def _body(request: web.Request) -> dict[str, Any]:
  try:
    async with asyncio.timeout(BODY_S):
      content = await request.read()
  except TimeoutError as error:
    message = f"the body of the request did not arrive within {BODY_S:g} s"
    raise RequestError(message, status=408) from error
  return requests.read_json(content)


async def _streamed(request: web.Request, events: Iterable[bytes]) -> web.StreamResponse:
  response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
  await response.prepare(request)
  for event in events:
    await response.write(event)
  await response.write_eof()
  return response


@web.middleware
async def _as_openai(request: web.Request, handler: Any) -> web.StreamResponse:
  """Answers errors in OpenAI's form."""
  try:
    return await handler(request)
  except RequestError as error:
    return web.json_response(error.body, status=error.status)
  except web.HTTPException as error:
    message = f"{request.method} {request.path}: {error.reason}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
      message = f"the request has more than {MAX_BODY} bytes"
    return web.json_response(RequestError(message).body, status=error.status)
