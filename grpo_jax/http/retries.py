"""Tries a request again, after pauses that double, within one time for all tries."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from grpo_jax.http.failures import HttpFailure, Refused

T = TypeVar("T")

_MOST_DOUBLINGS = 60


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
  """How long and how often one request is tried."""

  timeout_s: float = 30.0  # one try, from the connection to the last byte.
  total_timeout_s: float = 50.0  # one call, with all its tries and the pauses between them.
  retries: int = 3  # tries after the first one.
  backoff_s: float = 0.5  # first pause; it doubles, and a random half of it is left out.
  max_backoff_s: float = 10.0  # longest pause, also if the server asks for more (Retry-After).

  def __post_init__(self):
    if min(self.timeout_s, self.total_timeout_s) <= 0:
      raise ValueError(f"timeout_s and total_timeout_s must be above 0: {self}")
    if min(self.retries, self.backoff_s, self.max_backoff_s) < 0:
      raise ValueError(f"retries, backoff_s and max_backoff_s must be at least 0: {self}")


async def until_answered(
  attempt: Callable[[float], Awaitable[T]],
  patience: RetryPolicy,
  *,
  randomness: random.Random,
  on_retry: Callable[[], None] = lambda: None,
) -> T:
  """Returns the result of the first attempt that has one.

  Args:
    attempt: Sends the request, given its time-out in seconds.
    patience: Time-outs, number of tries and pauses.
    randomness: Source of the random part of the pauses.
    on_retry: Function called before every attempt but the first.

  Raises:
    HttpFailure: The failure of the last attempt. A refusal (`Refused`) is raised at once.
  """
  deadline = time.monotonic() + patience.total_timeout_s
  rest = patience.total_timeout_s
  number = 0
  while True:
    try:
      return await attempt(min(rest, patience.timeout_s))
    except Refused:
      raise
    except HttpFailure as error:
      failure = error
    number += 1
    pause = _pause(number, failure, patience, randomness)
    if number > patience.retries or pause >= deadline - time.monotonic():
      raise failure
    await asyncio.sleep(pause)
    rest = max(deadline - time.monotonic(), 1e-3)
    on_retry()


def doubling(number: int, *, first_s: float, longest_s: float) -> float:
  """Returns the pause after failure `number`, counted from 1, in seconds.

  Args:
    number: Number of failures so far.
    first_s: First pause; each further one is twice as long.
    longest_s: Longest pause.
  """
  return min(first_s * 2 ** min(number - 1, _MOST_DOUBLINGS), longest_s)


def _pause(
  number: int, failure: HttpFailure, patience: RetryPolicy, randomness: random.Random
) -> float:
  """Returns the pause before a retry: doubling, random in its upper half; or as asked for."""
  doubled = patience.backoff_s * 2 ** min(number - 1, _MOST_DOUBLINGS)
  own = doubled * randomness.uniform(0.5, 1.0)
  return min(patience.max_backoff_s, max(own, failure.retry_after_s))
