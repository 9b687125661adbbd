"""Requests with JSON in both directions; what every HTTP client of the package is built on.

Written once here: the session and its connections, time-outs, the bound of an answer, which status
is which failure, and what a message may show of an answer. The clients add the paths of their
servers and what the answers mean; `retries.py` tries again.
"""

import asyncio
import dataclasses
import email.utils
import http.cookies
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from grpo_jax.http import bodies, redaction
from grpo_jax.http.failures import (
  Failed,
  HttpFailure,
  Overloaded,
  Refused,
  TimedOut,
  Unreachable,
  Unreadable,
  Unusable,
)

T = TypeVar("T")

CONNECT_S = 10.0
SMALL_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
  """One request."""

  method: str = "POST"
  url: str
  timeout_s: float  # whole exchange: connecting, waiting, and reading the answer.
  body: Mapping[str, Any] | None = None  # sent as JSON.
  limit: int = SMALL_BYTES  # largest answer that is accepted, in bytes after decompression.
  is_json: bool = True  # False: the body of the answer does not matter.
  # Sent with the request, and updated with those that the answer sets; None: no cookies.
  cookies: MutableMapping[str, str] | None = None


class _NoCookies(aiohttp.DummyCookieJar):
  def update_cookies_from_headers(self, headers: Sequence[str], response_url: URL) -> None:
    """Does nothing; the inherited one parses them, and logs what it cannot parse."""


def _open_session() -> aiohttp.ClientSession:
  """Opens a session in the running loop.

  It follows no proxy of the environment, keeps no cookies of its own, asks for answers that are not
  compressed, and leaves decompression to `bodies.read`.
  """
  return aiohttp.ClientSession(
    connector=aiohttp.TCPConnector(limit=0),  # callers bound the number of their requests.
    timeout=aiohttp.ClientTimeout(total=None),
    cookie_jar=_NoCookies(),
    headers={"Accept-Encoding": "identity"},
    auto_decompress=False,
    trust_env=False,
  )


class JsonClient:
  """Sends requests. All are sent in one event loop, in which the client is also closed."""

  def __init__(self, *, key: str | None = None, connect_s: float = CONNECT_S):
    """Makes a client; its session is opened by the first request.

    Args:
      key: Key of the server's API, sent as "Authorization: Bearer KEY"; never in a message.
      connect_s: Longest time until a connection is made, in seconds.
    """
    self._key = key
    self._headers = {"Authorization": f"Bearer {key}"} if key else {}
    self._connect_s = connect_s
    self._session: aiohttp.ClientSession | None = None

  async def ask(self, request: Request, read: Callable[[Any], T]) -> T:
    """Sends a request once.

    Args:
      request: Request to send. Redirects are not followed.
      read: Function from the answer's JSON to the result; may raise `Unusable`, and may run in any
        thread. An empty body is None.

    Returns:
      The result of `read` for the body of an answer of status 200 to 299.

    Raises:
      HttpFailure: There is no result; see the classes of `failures`. The failure has no cause and
        no context, because errors of aiohttp hold the headers of the request, with the key.
    """

    async def result(response: aiohttp.ClientResponse, content: bytes) -> T:
      if 200 <= response.status < 300:
        return await bodies.parse(content if request.is_json else b"", read)
      raise self._failure(self.shown(request.url), response, content)

    return await self._sent(request, result)

  async def text(self, request: Request) -> tuple[int, str]:
    """Sends a request once, for servers whose answers are text of any status.

    Returns:
      Status and body of the answer. Bytes that are not UTF-8 are replaced.

    Raises:
      HttpFailure: There is no answer; see `ask`.
    """

    async def result(response: aiohttp.ClientResponse, content: bytes) -> tuple[int, str]:
      return response.status, content.decode("utf-8", errors="replace")

    return await self._sent(request, result)

  async def close(self) -> None:
    """Closes the connections; requests in flight fail."""
    if self._session is not None:
      await self._session.close()

  async def __aenter__(self) -> "JsonClient":
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  def shown(self, text: str | bytes) -> str:
    """Returns text of the server for a message: without the key, in one printable line."""
    return redaction.shown(text, self._key)

  async def _sent(
    self, request: Request, result: Callable[[aiohttp.ClientResponse, bytes], Awaitable[T]]
  ) -> T:
    """Returns the result for an answer; raises HttpFailure, without cause and context."""
    what = self.shown(request.url)
    try:
      async with asyncio.timeout(request.timeout_s):
        return await result(*await self._exchange(request))
    except Unusable as error:
      failure = type(error)(self.shown(str(error)))
    except HttpFailure as error:
      failure = error.with_traceback(None)
    except aiohttp.ConnectionTimeoutError:
      failure = Unreachable(f"{what}: no connection within {self._connect_s:g} s")
    except TimeoutError:
      failure = TimedOut(f"{what}: no complete answer within {round(request.timeout_s, 3):g} s")
    except bodies.NotJson as error:
      failure = Unreadable(f"{what}: {error}{self._after_colon(error.content)}")
    except bodies.UnreadableBody as error:
      failure = Unreadable(f"{what}: {error}")
    except RecursionError:  # of the function that reads the answer.
      failure = Unreadable(f"{what}: the answer is nested too deeply")
    except (aiohttp.ClientError, OSError) as error:
      failure = Unreachable(f"{what}: {type(error).__name__}{self._after_colon(str(error))}")
    raise failure

  async def _exchange(self, request: Request) -> tuple[aiohttp.ClientResponse, bytes]:
    """Returns an answer and its body."""
    if self._session is None:
      self._session = _open_session()
    async with self._session.request(
      request.method,
      request.url,
      json=request.body,
      headers={**self._headers, **_cookie_header(request.cookies)},
      timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
      allow_redirects=False,
    ) as response:
      _keep_cookies(response, request.cookies)
      return response, await bodies.read(response, limit=request.limit)

  def _failure(self, what: str, response: aiohttp.ClientResponse, content: bytes) -> HttpFailure:
    message = f"{what}: answered {response.status}{self._after_colon(content)}"
    wait_s = seconds(response.headers.get("Retry-After", ""))
    if response.status == 429:
      return Overloaded(message, retry_after_s=wait_s)
    if 300 <= response.status < 500:
      return Refused(message, status=response.status)
    return Failed(message, retry_after_s=wait_s)

  def _after_colon(self, text: str | bytes) -> str:
    shown = self.shown(text)
    return f": {shown}" if shown else ""


def _cookie_header(cookies: Mapping[str, str] | None) -> dict[str, str]:
  return {"Cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())} if cookies else {}


def _keep_cookies(
  response: aiohttp.ClientResponse, cookies: MutableMapping[str, str] | None
) -> None:
  """Updates the cookies with those that an answer sets; what is not a cookie is left out."""
  if cookies is None:
    return
  for line in response.headers.getall("Set-Cookie", []):
    try:
      found = http.cookies.SimpleCookie(line)
    except http.cookies.CookieError:
      continue
    cookies.update({name: morsel.coded_value for name, morsel in found.items()})


def seconds(retry_after: str) -> float:
  """Returns the pause of a Retry-After header in seconds; 0 if it is neither number nor date."""
  text = retry_after.strip()
  if re.fullmatch(r"[0-9]{1,6}", text):
    return float(text)
  try:
    until = email.utils.parsedate_to_datetime(text)
    return max(0.0, until.timestamp() - time.time())
  except (ValueError, TypeError, LookupError, OverflowError):
    return 0.0
