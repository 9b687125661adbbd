"""HTTP to one SGLang server: what is asked, what may go wrong, and of which kind it is.

Endpoints and payloads as measured on SGLang 0.5.23.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

SAID = 500  # characters of a server's answer that are repeated in a message.


class Refused(RuntimeError):
  """The server refused what was asked for (4xx): asking again would not help."""

  def __init__(self, what: str, status: int, said: str):
    super().__init__(f"{what}: refused with {status}: {said}")
    self.status = status


class Unanswered(RuntimeError):
  """No answer, half of one, or a failure of the server: another one, or later, may do better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
  """Seconds to wait for answers."""

  connect_s: float = 10.0
  generate_s: float = 1800.0  # of one request, queueing at the server included.
  control_s: float = 300.0  # of pausing, loading weights, going on.
  health_s: float = 60.0  # SGLang itself gives up after 20 s, and answers 503.


class Client:
  """One server. Lives in one event loop; `session` is shared by all clients of a fleet."""

  def __init__(
    self, session: aiohttp.ClientSession, address: str, *, key: str | None, timeouts: Timeouts
  ):
    """Makes a client; nothing is sent yet.

    Args:
      session: closed by whoever made it.
      address: "http://host:port".
      key: of the server's API; sent as a header, never part of a message.
      timeouts: of all calls.
    """
    self.address = address.rstrip("/")
    self._session = session
    self._headers = {"Authorization": f"Bearer {key}"} if key else {}
    self._timeouts = timeouts

  async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> Any:
    """Returns the decoded answer of POST /generate."""
    return await self._call("POST", "/generate", body, self._timeouts.generate_s, headers)

  async def score(self, body: Mapping[str, Any]) -> Any:
    """Returns the decoded answer of POST /generate to a question about a prompt."""
    return await self._control("/generate", body)

  async def health(self) -> None:
    """Has the server generate a token, or raises. Not to be asked while it is paused."""
    await self._answer("GET", "/health", None, self._timeouts.health_s)

  async def model_info(self) -> Mapping[str, Any]:
    """Returns what the server says of its model (an older path is tried where there is none)."""
    try:
      return await self._call("GET", "/model_info", None, self._timeouts.control_s)
    except Refused as error:
      if error.status != 404:
        raise
    return await self._call("GET", "/get_model_info", None, self._timeouts.control_s)

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
    """Goes on generating; does nothing if the server was not paused."""
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
      raise Refused(f"{self.address}/update_weights_from_disk", 200, _short(answer))

  async def release_memory(self) -> None:
    """Gives the memory of weights, cache and graphs back; ends a server that is not idle."""
    await self._control("/release_memory_occupation", {})

  async def resume_weights(self) -> None:
    """Takes memory for weights back, before the rest, so that both never exceed what there is."""
    await self._control("/resume_memory_occupation", {"tags": ["weights"]})

  async def resume_cache(self) -> None:
    """Takes the rest of the memory back."""
    await self._control("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

  async def _control(self, path: str, body: Mapping[str, Any]) -> Any:
    return await self._call("POST", path, body, self._timeouts.control_s)

  async def _call(
    self,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float,
    headers: Mapping[str, str] = {},
  ) -> Any:
    """Returns the decoded body of an answer; None of an empty one.

    Raises:
      Refused, Unanswered: see `_answer`; the latter also if the body is no JSON.
    """
    text = await self._answer(method, path, body, timeout_s, headers)
    try:
      return json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
      what = f"{self.address}{path}"
      raise Unanswered(f"{what}: the answer is no JSON: {_short(text)}") from error

  async def _answer(
    self,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float,
    headers: Mapping[str, str] = {},
  ) -> str:
    """Returns the body of an answer of status 200.

    Raises:
      Refused: a status of 400 to 499.
      Unanswered: no connection, a time-out, half an answer, another status.
    """
    what = f"{self.address}{path}"
    limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._timeouts.connect_s)
    try:
      async with self._session.request(
        method, what, json=body, headers={**self._headers, **headers}, timeout=limits
      ) as response:
        text = await response.text(errors="replace")
        status = response.status
    except TimeoutError as error:
      raise Unanswered(f"{what}: no answer in {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
      raise Unanswered(f"{what}: {type(error).__name__}: {error}") from error
    if 400 <= status < 500:
      raise Refused(what, status, _short(text))
    if status != 200:
      raise Unanswered(f"{what}: answered {status}: {_short(text)}")
    return text


def _short(said: Any) -> str:
  text = " ".join(str(said).split())
  return text if len(text) <= SAID else f"{text[:SAID]} ..."
