"""Posts JSON to one HTTP server: time-outs, retries with back-off, an end to endless failure.

One thread with one event loop owns the connections; calls come from the loops of any thread.
"""

import asyncio
import concurrent.futures
import dataclasses
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp

from grpo_jax.environments.scoring.failures import (
  EndpointError,
  EndpointFailed,
  EndpointGivenUp,
  EndpointOverloaded,
  EndpointRefused,
  EndpointTimeout,
  EndpointUnreachable,
  EndpointUnreadable,
)
from grpo_jax.http import bodies as http_bodies
from grpo_jax.http import redaction

T = TypeVar("T")

_MAX_BYTES = 4 << 20  # of an answer.
_SHOWN_CHARS = 300  # of an answer, in errors.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
  """How long and how often a server is asked."""

  timeout_s: float = 30.0  # one try, from the connection to the last byte.
  total_timeout_s: float = 50.0  # one call, with all its tries and the pauses between them.
  retries: int = 3  # tries after the first one.
  backoff_s: float = 0.5  # the first pause; it doubles, and is drawn from its upper half.
  max_backoff_s: float = 10.0  # longest pause, also if the server asks for more (Retry-After).
  max_failed_calls: int = 16  # in a row, tries included; then no more are made.
  concurrency: int = 32  # calls at the same time; others wait for a place.

  def __post_init__(self):
    if min(self.timeout_s, self.total_timeout_s, self.max_failed_calls, self.concurrency) <= 0:
      raise ValueError(
        f"timeout_s, total_timeout_s, max_failed_calls and concurrency must be above 0: {self}"
      )
    if min(self.retries, self.backoff_s, self.max_backoff_s) < 0:
      raise ValueError(f"retries, backoff_s and max_backoff_s must be at least 0: {self}")


class JsonClient:
  """Posts to one address. Close it, or the thread and the connections stay."""

  def __init__(
    self, url: str, patience: Patience, *, secret: str | None = None, seed: int | None = None
  ):
    """Starts the thread; no connection is made.

    Args:
      url: Address of every request.
      patience: Time-outs, retries and bounds.
      secret: Key, sent as "Authorization: Bearer SECRET"; never in an error or a log.
      seed: Random seed of the pauses; None: from the operating system.
    """
    self._url = url
    self._patience = patience
    self._secret = secret
    self._random = random.Random(seed)
    self._counts: Counter[str] = Counter()
    self._failed_in_row = 0
    self._given_up: str | None = None
    self._loop = asyncio.new_event_loop()
    self._session: aiohttp.ClientSession | None = None
    self._places = asyncio.Semaphore(patience.concurrency)
    self._is_closed = False
    self._thread = threading.Thread(target=self._serve, daemon=True, name="reward endpoint")
    self._thread.start()

  async def post(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    """Posts a body until an answer can be read.

    Args:
      body: Body of the request, as JSON.
      read: Function from the answer's JSON to the result; raises EndpointUnreadable.

    Raises:
      EndpointError: see the classes above; of the last try.
    """
    return await asyncio.wrap_future(self._submit(self._call(body, read)))

  def counts(self) -> dict[str, float]:
    """Returns how many calls, tries, retries and failed calls, by kind, there were."""
    names = ("calls", "tries", "retries", "failed_calls")
    return {name: 0.0 for name in names} | {k: float(v) for k, v in self._counts.items()}

  def close(self) -> None:
    """Breaks off the calls, closes the connections, ends the thread; later calls do nothing."""
    if self._is_closed:
      return
    self._is_closed = True
    asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def _serve(self) -> None:
    asyncio.set_event_loop(self._loop)
    self._loop.run_forever()

  def _submit(self, call: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    if self._is_closed:
      call.close()
      raise RuntimeError("the client is closed")
    return asyncio.run_coroutine_threadsafe(call, self._loop)

  async def _shut(self) -> None:
    own = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not own]
    for task in others:
      task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if self._session is not None:
      await self._session.close()

  def _opened(self) -> aiohttp.ClientSession:
    """The session, which has to be made within the loop."""
    if self._session is None:
      headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
      self._session = http_bodies.open_session(headers)
    return self._session

  async def _call(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    """One call: its tries within its time. Counts it, and gives up after too many."""
    async with self._places:
      if self._given_up:
        raise EndpointGivenUp(self._given_up)
      self._counts["calls"] += 1
      try:
        result = await self._tries(body, read)
      except EndpointError as error:
        failure = type(error)(self._shown(str(error)))  # a server may echo the secret.
      else:
        self._failed_in_row = 0
        return result
      self._note_failure(failure)
      raise failure  # outside of `except`: the first one keeps what the server said.

  async def _tries(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    deadline = time.monotonic() + self._patience.total_timeout_s
    last: EndpointError | None = None
    for number in range(self._patience.retries + 1):
      rest = deadline - time.monotonic()
      if last is not None:
        pause = self._pause(number, last)
        if pause >= rest:
          break
        await asyncio.sleep(pause)
        rest -= pause
        self._counts["retries"] += 1
      try:
        return await self._try(body, read, min(rest, self._patience.timeout_s))
      except EndpointRefused:
        raise
      except EndpointError as error:
        last = error
    assert last is not None
    raise last

  async def _try(self, body: Mapping[str, Any], read: Callable[[Any], T], timeout_s: float) -> T:
    """One request: what `read` makes of the JSON of its answer."""
    self._counts["tries"] += 1
    request = self._opened().post(self._url, json=dict(body), allow_redirects=False)
    try:
      async with asyncio.timeout(timeout_s):
        async with request as response:
          content = await http_bodies.read(response, limit=_MAX_BYTES)
        if 200 <= response.status < 300:
          return await http_bodies.parse(content, read)
    except TimeoutError as error:
      raise EndpointTimeout(f"{self._url}: no whole answer within {timeout_s:.3g} s") from error
    except http_bodies.NotJson as error:
      message = f"{self._url}: {error}: {self._excerpt(error.content)}"
      raise EndpointUnreadable(message) from error
    except http_bodies.UnreadableBody as error:
      raise EndpointUnreadable(f"{self._url}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
      reason = str(error) or type(error).__name__
      raise EndpointUnreachable(f"{self._url}: {reason}") from error
    raise self._refusal(response, content)

  def _refusal(self, response: aiohttp.ClientResponse, content: bytes) -> EndpointError:
    message = f"{self._url}: answered {response.status}: {self._excerpt(content)}"
    wait_s = _seconds(response.headers.get("Retry-After", ""))
    if response.status == 429:
      return EndpointOverloaded(message, retry_after_s=wait_s)
    if response.status >= 500:
      return EndpointFailed(message, retry_after_s=wait_s)
    return EndpointRefused(message)

  def _pause(self, number: int, last: EndpointError) -> float:
    """Seconds before try `number`: doubling, random in the upper half; or what was asked for."""
    doubled = self._patience.backoff_s * 2 ** (number - 1)
    own = doubled * self._random.uniform(0.5, 1.0)
    return min(self._patience.max_backoff_s, max(own, last.retry_after_s))

  def _note_failure(self, error: EndpointError) -> None:
    self._counts["failed_calls"] += 1
    self._counts[type(error).__name__] += 1
    self._failed_in_row += 1
    if self._failed_in_row >= self._patience.max_failed_calls and not self._given_up:
      self._given_up = (
        f"no more calls are made, since {self._failed_in_row} in a row have failed; the last:"
        f" {error}"
      )

  def _shown(self, text: str) -> str:
    return redaction.shown(text, self._secret, limit=2 * redaction.SHOWN_CHARS)

  def _excerpt(self, content: bytes) -> str:
    return repr(redaction.shown(content, self._secret, limit=_SHOWN_CHARS))


def _seconds(retry_after: str) -> float:
  """Returns a Retry-After header in seconds; 0 if it is a date or not a number."""
  return float(retry_after) if re.fullmatch(r"\d{1,6}", retry_after.strip()) else 0.0
