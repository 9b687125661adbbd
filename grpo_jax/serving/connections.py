"""Connections of clients, few and for a limited time, whatever arrives on them.

Every program on this machine can reach the port. A message that is not an HTTP request is answered
with 400, counted, and not logged: it may hold a key.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web

from grpo_jax.serving.request_errors import RequestError

HEADERS_S = 20.0  # time for the headers of a request to arrive, in seconds.
IDLE_S = 75.0  # time that a connection may be open after an answer, in seconds.
WAITING = 256  # connections without a request in progress; the oldest of more is closed.
_BUFFERED = 1 << 15  # bytes of a body that are received before they are read, about.
_SHUTDOWN_S = 0.1  # time for connections to end, in seconds.

# Would print what clients send.
_SILENT = logging.Logger(f"{__name__}.silent", logging.CRITICAL + 1)


class Listener:
  """Accepts connections for a handler of requests."""

  def __init__(self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]):
    """Starts nothing.

    Args:
      handle: Function that answers a request whose headers were read.
    """
    self.malformed = 0  # messages that were not HTTP requests.
    # A client that leaves does not need its answer.
    self._requests = web.Server(handle, handler_cancellation=True)
    self._listening: asyncio.Server | None = None
    self._waiting: dict[Connection, None] = {}  # oldest first.

  async def start(self, host: str, port: int) -> tuple[str, int]:
    """Begins to listen; returns host and port.

    Raises:
      OSError: The port is taken, or the address is not of this machine.
    """
    loop = asyncio.get_running_loop()
    make = functools.partial(Connection, self, self._requests)
    self._listening = await loop.create_server(make, host, port)
    return self._listening.sockets[0].getsockname()[:2]

  async def close(self) -> None:
    """Stops listening and ends all requests."""
    if self._listening is not None:
      self._listening.close()
      await asyncio.sleep(0)  # requests that were cancelled end.
      self._requests.pre_shutdown()
      await self._requests.shutdown(_SHUTDOWN_S)

  def waits(self, connection: "Connection") -> None:
    """Adds a connection without a request in progress."""
    self._waiting[connection] = None
    if len(self._waiting) > WAITING:
      oldest = next(iter(self._waiting))
      self.works(oldest)
      oldest.force_close()

  def works(self, connection: "Connection") -> None:
    """Removes a connection from those without a request in progress."""
    self._waiting.pop(connection, None)


class Connection(web.RequestHandler):
  """One connection."""

  def __init__(self, listener: Listener, requests: web.Server):
    super().__init__(
      requests,
      loop=asyncio.get_running_loop(),
      logger=_SILENT,
      access_log=None,  # type: ignore[arg-type]
      read_bufsize=_BUFFERED,
      auto_decompress=False,  # a few bytes could become gigabytes.
    )
    self._listener = listener
    self._is_idle = False  # whether nothing has arrived since the last answer.
    self._closing: asyncio.TimerHandle | None = None

  @contextlib.contextmanager
  def answering(self) -> Iterator[None]:
    """Keeps the connection open while a request is answered."""
    self._close_in(None)
    self._listener.works(self)
    try:
      yield
    finally:
      if self.transport is not None:
        self._is_idle = True
        self._listener.waits(self)
        self._close_in(IDLE_S)

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    """Gives the client time for its first headers."""
    super().connection_made(transport)
    self._listener.waits(self)
    self._close_in(HEADERS_S)

  def data_received(self, data: bytes) -> None:
    """Gives the client time for the rest of the headers; reads what has arrived."""
    if data and self._is_idle:
      self._is_idle = False
      self._close_in(HEADERS_S)
    super().data_received(data)

  def connection_lost(self, exc: BaseException | None) -> None:
    """Forgets the connection."""
    self._close_in(None)
    self._listener.works(self)
    super().connection_lost(exc)

  def handle_error(
    self,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
  ) -> web.StreamResponse:
    """Answers what is not an HTTP request, without quoting it."""
    self._listener.malformed += 1
    if request.writer.output_size > 0:
      raise ConnectionError("a part of another answer was sent")
    error = RequestError("this is not an HTTP request that can be read", status=status)
    response = web.json_response(error.body(), status=status)
    response.force_close()
    return response

  def _close_in(self, seconds: float | None) -> None:
    """Closes the connection after that time, or not if it is None."""
    if self._closing is not None:
      self._closing.cancel()
    loop = asyncio.get_running_loop()
    self._closing = None if seconds is None else loop.call_later(seconds, self.force_close)
