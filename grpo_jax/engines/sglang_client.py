"""HTTP to one SGLang server: requests, what may go wrong, and the kind of each failure.

Endpoints and payloads as measured on SGLang 0.5.23. An answer is bounded in bytes and in time, and
what it says appears in errors without the API key and without control characters.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import aiohttp

from grpo_jax.engines.sglang_messages import Aborted, Garbled
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.http import bodies as http_bodies
from grpo_jax.http import redaction

T = TypeVar("T")

CONTROL_BYTES = 1 << 20  # largest answer to anything but /generate.


class Refused(RuntimeError):
  """The server refused what was asked for (3xx, 4xx): asking again would not help."""

  def __init__(self, what: str, status: int, said: str):
    super().__init__(f"{what}: refused with {status}: {said}")
    self.status = status


class Unanswered(RuntimeError):
  """No answer, half of one, or a failure of the server: another one, or later, may do better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
  """Seconds to wait for answers."""

  connect_s: float = 10.0
  # Of one request, including the time that it waits at the server.
  generate_s: float = SGLangOptions.request_timeout_s
  control_s: float = SGLangOptions.control_timeout_s  # of pausing, loading weights, resuming.
  health_s: float = SGLangOptions.health_timeout_s  # SGLang gives up after 20 s and answers 503.


class Client:
  """One server. Lives in one event loop; `session` is shared by all clients of a fleet."""

  def __init__(
    self, session: aiohttp.ClientSession, address: str, *, key: str | None, timeouts: Timeouts
  ):
    """Makes a client; nothing is sent yet.

    Args:
      session: Session from `http_bodies.open_session`; closed by the caller that opened it.
      address: "http://host:port".
      key: Key of the server's API; sent as a header, never part of a message.
      timeouts: Time-outs of all calls.
    """
    self.address = address.rstrip("/")
    self._session = session
    self._key = key
    self._headers = {"Authorization": f"Bearer {key}"} if key else {}
    self._timeouts = timeouts

  async def generate(
    self,
    body: Mapping[str, Any],
    headers: Mapping[str, str] = {},
    *,
    read: Callable[[Any], T],
    limit: int,
  ) -> T:
    """Returns what `read` makes of the answer of POST /generate.

    Args:
      body: Body of the request.
      headers: Headers of the request, in addition to the key.
      read: decoded JSON -> what is wanted of it; may raise Garbled or Aborted, and may run in
        any thread.
      limit: most bytes of an answer.
    """
    call = _Call("POST", "/generate", self._timeouts.generate_s, body, headers, limit)
    return await self._ask(call, read)

  async def score(self, body: Mapping[str, Any], *, read: Callable[[Any], T], limit: int) -> T:
    """Returns what `read` makes of the answer to a question about a prompt; see `generate`."""
    call = _Call("POST", "/generate", self._timeouts.control_s, body, limit=limit)
    return await self._ask(call, read)

  async def health(self) -> None:
    """Has the server generate a token, or raises. Not to be asked while it is paused."""
    await self._ask(_Call("GET", "/health", self._timeouts.health_s, is_json=False), _as_it_is)

  async def model_info(self) -> Mapping[str, Any]:
    """Returns what the server says of its model (an older path is tried where there is none)."""
    try:
      return await self._ask(_Call("GET", "/model_info", self._timeouts.control_s), _as_it_is)
    except Refused as error:
      if error.status != 404:
        raise
    return await self._ask(_Call("GET", "/get_model_info", self._timeouts.control_s), _as_it_is)

  async def can_update(self) -> bool:
    """Returns whether there is an endpoint for new weights (sglang-jax has none)."""
    try:
      await self._control("/update_weights_from_disk", {})
    except Refused as error:
      return error.status != 404  # an empty body is refused by the endpoint itself.
    return True

  async def pause(self) -> None:
    """Stops generating; requests under way wait, and are computed on with the next weights."""
    await self._control("/pause_generation", {"mode": "retract"})

  async def resume(self) -> None:
    """Continues generating; does nothing if the server was not paused."""
    await self._control("/continue_generation", {})

  async def abort_all(self) -> None:
    """Ends all requests under way, also those of clients that are gone."""
    await self._control("/abort_request", {"abort_all": True})

  async def load(self, folder: str, version: int) -> None:
    """Replaces the weights by those of a folder and forgets all that was cached.

    Raises:
      Refused: the folder cannot be read there, or is of another model; the old weights stay.
    """
    body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
    answer = await self._control("/update_weights_from_disk", body)
    if not (isinstance(answer, dict) and answer.get("success")):
      raise Refused(f"{self.address}/update_weights_from_disk", 200, self.shown(answer))

  async def release_memory(self) -> None:
    """Gives the memory of weights, cache and graphs back; ends a server that is not idle."""
    await self._control("/release_memory_occupation", {})

  async def resume_weights(self) -> None:
    """Takes memory for weights back, before the rest, so that both never exceed what there is."""
    await self._control("/resume_memory_occupation", {"tags": ["weights"]})

  async def resume_cache(self) -> None:
    """Takes the rest of the memory back."""
    await self._control("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

  def shown(self, said: Any) -> str:
    """Returns what the server said, for a message: without the key, in one printable line."""
    return redaction.shown(said if isinstance(said, str | bytes) else str(said), self._key)

  async def _control(self, path: str, body: Mapping[str, Any]) -> Any:
    return await self._ask(_Call("POST", path, self._timeouts.control_s, body), _as_it_is)

  async def _ask(self, call: "_Call", read: Callable[[Any], T]) -> T:
    """Returns what `read` makes of the decoded body of an answer of status 200.

    Args:
      call: what is asked. Its time is that of the whole exchange, reading included.
      read: decoded JSON -> what is wanted of it.

    Raises:
      Refused: a status of 300 to 499.
      Unanswered: no connection, a time-out, half an answer or too long a one, another status, or
        a body that is not JSON.
      Garbled, Aborted: what `read` raised.
    """
    what = f"{self.address}{call.path}"
    try:
      async with asyncio.timeout(call.timeout_s):
        status, content = await self._exchange(what, call)
        if status == 200:
          return await http_bodies.parse(content if call.is_json else b"", read)
      failure = self._failure(what, status, content)
    except (Garbled, Aborted) as error:
      failure = type(error)(self.shown(str(error)))
    except aiohttp.ConnectionTimeoutError:
      failure = Unanswered(f"{what}: no connection in {self._timeouts.connect_s:g} s")
    except TimeoutError:
      failure = Unanswered(f"{what}: no whole answer in {call.timeout_s:g} s")
    except http_bodies.NotJson as error:
      failure = Unanswered(f"{what}: {error}: {self.shown(error.content)}")
    except http_bodies.UnreadableBody as error:
      failure = Unanswered(f"{what}: {error}")
    except (aiohttp.ClientError, OSError) as error:
      failure = Unanswered(f"{what}: {type(error).__name__}: {self.shown(str(error))}")
    raise failure  # outside of `except`: those errors hold the request's headers, the key in them.

  async def _exchange(self, what: str, call: "_Call") -> tuple[int, bytes]:
    """Returns the status and the body of an answer."""
    async with self._session.request(
      call.method,
      what,
      json=call.body,
      headers={**self._headers, **call.headers},
      timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
      allow_redirects=False,
    ) as response:
      return response.status, await http_bodies.read(response, limit=call.limit)

  def _failure(self, what: str, status: int, content: bytes) -> Exception:
    said = self.shown(content)
    if 300 <= status < 500:
      return Refused(what, status, said)
    return Unanswered(f"{what}: answered {status}: {said}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
  """One request."""

  method: str
  path: str
  timeout_s: float
  body: Mapping[str, Any] | None = None
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  limit: int = CONTROL_BYTES  # bytes of the answer.
  is_json: bool = True  # False: the body of the answer does not matter.


def _as_it_is(answer: Any) -> Any:
  return answer
