"""Asks one HTTP server, a few requests at a time, and gives up after many failed calls.

Calls come from the event loops of any thread; connections live in a loop of their own.
"""

import asyncio
import concurrent.futures
import dataclasses
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

from grpo_jax.environments.scoring.failures import EndpointError, EndpointGivenUp, no_score
from grpo_jax.http import retries
from grpo_jax.http.background import BackgroundLoop
from grpo_jax.http.client import JsonClient, Request
from grpo_jax.http.failures import HttpFailure

T = TypeVar("T")

_MAX_BYTES = 4 << 20  # largest answer.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRetryPolicy(retries.RetryPolicy):
  """How long and how often one request is tried, and how many requests are made."""

  max_failed_calls: int = 16  # consecutive failed calls after which no more are made.
  concurrency: int = 32  # calls at the same time; others wait for a place.

  def __post_init__(self):
    retries.RetryPolicy.__post_init__(self)
    if min(self.max_failed_calls, self.concurrency) <= 0:
      raise ValueError(f"max_failed_calls and concurrency must be above 0: {self}")


class EndpointClient:
  """Calls of one server. Close it, or the thread and the connections stay."""

  def __init__(
    self,
    url: str,
    patience: EndpointRetryPolicy,
    *,
    secret: str | None = None,
    seed: int | None = None,
  ):
    """Starts the thread; no connection is made.

    Args:
      url: Address of the server, to which the paths of requests are appended.
      patience: Time-outs, retries and bounds.
      secret: Key, sent as "Authorization: Bearer SECRET"; never in an error or a log.
      seed: Random seed of the pauses; None: from the operating system.
    """
    self._url = url
    self._patience = patience
    self._random = random.Random(seed)
    self._counts: Counter[str] = Counter()
    self._failed_in_row = 0
    self._given_up: str | None = None
    self._http = JsonClient(key=secret)
    self._places = asyncio.Semaphore(patience.concurrency)
    self._is_closed = False
    self._loop = BackgroundLoop("reward endpoint")

  async def post(
    self,
    body: Mapping[str, Any],
    read: Callable[[Any], T],
    *,
    path: str = "",
    cookies: MutableMapping[str, str] | None = None,
    is_repeatable: bool = True,
  ) -> T:
    """Posts a body until an answer can be read.

    Args:
      body: Body of the request, as JSON.
      read: Function from the answer's JSON to the result; raises EndpointUnreadable.
      path: Path that is appended to the address of the server.
      cookies: Cookies of the session, which the answer may change; None: no cookies.
      is_repeatable: Whether the request may be sent again after a failure.

    Raises:
      EndpointError: There is no result; the class says why the last try failed.
      RuntimeError: The client is closed.
    """
    fields: dict[str, Any] = dict(method="POST", body=dict(body), cookies=cookies)
    ask = lambda timeout_s: self._http.ask(self._request(timeout_s, path, **fields), read)
    return await asyncio.wrap_future(self._submit(ask, is_repeatable=is_repeatable))

  async def text(
    self, body: Mapping[str, Any], *, path: str, cookies: MutableMapping[str, str] | None = None
  ) -> tuple[int, str]:
    """Posts a body once; returns status and text of the answer, whatever the status."""
    fields: dict[str, Any] = dict(method="POST", body=dict(body), cookies=cookies)
    ask = lambda timeout_s: self._http.text(self._request(timeout_s, path, **fields))
    return await asyncio.wrap_future(self._submit(ask, is_repeatable=False))

  def get(self, path: str, read: Callable[[Any], T]) -> T:
    """Gets what is at a path of the server, and waits for it; otherwise like `post`."""
    ask = lambda timeout_s: self._http.ask(self._request(timeout_s, path, method="GET"), read)
    return self._submit(ask).result()

  def counts(self) -> dict[str, float]:
    """Returns how many calls, tries, retries and failed calls, by kind, there were."""
    names = ("calls", "tries", "retries", "failed_calls")
    return {name: 0.0 for name in names} | {k: float(v) for k, v in self._counts.items()}

  def close(self) -> None:
    """Cancels the calls, closes the connections, ends the thread; later calls do nothing."""
    if not self._is_closed:
      self._is_closed = True
      self._loop.close(self._http.close())

  def _submit(
    self, ask: Callable[[float], Awaitable[T]], *, is_repeatable: bool = True
  ) -> "concurrent.futures.Future[T]":
    if self._is_closed:
      raise RuntimeError("the client is closed")
    return self._loop.submit(self._call(ask, is_repeatable=is_repeatable))

  def _request(self, timeout_s: float, path: str, **fields: Any) -> Request:
    return Request(url=self._url + path, timeout_s=timeout_s, limit=_MAX_BYTES, **fields)

  async def _call(self, ask: Callable[[float], Awaitable[T]], *, is_repeatable: bool) -> T:
    """Makes one call, with its tries. Counts it, and gives up after too many failed ones."""
    patience = self._patience
    async with self._places:
      if self._given_up:
        raise EndpointGivenUp(self._given_up)
      self._counts["calls"] += 1
      try:
        result = await retries.until_answered(
          lambda timeout_s: self._try(ask, timeout_s),
          patience if is_repeatable else dataclasses.replace(patience, retries=0),
          randomness=self._random,
          on_retry=lambda: self._counts.update(["retries"]),
        )
      except HttpFailure as error:
        failure = no_score(error)
        self._note_failure(failure)
        raise failure from None
      self._failed_in_row = 0
      return result

  async def _try(self, ask: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
    self._counts["tries"] += 1
    return await ask(timeout_s)

  def _note_failure(self, error: EndpointError) -> None:
    self._counts["failed_calls"] += 1
    self._counts[type(error).__name__] += 1
    self._failed_in_row += 1
    if self._failed_in_row >= self._patience.max_failed_calls and not self._given_up:
      self._given_up = (
        f"no more calls are made, since {self._failed_in_row} in a row have failed; the last:"
        f" {error}"
      )
