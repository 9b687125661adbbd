"""The requests to one SGLang server.

Endpoints and payloads as measured on SGLang 0.5.23. `http/client.py` sends them, and says how they
may fail.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from grpo_jax.engines import sglang_messages
from grpo_jax.engines.checksums import Checksums
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.http.client import CONNECT_S, JsonClient, Request
from grpo_jax.http.failures import Refused

T = TypeVar("T")

_CHECKSUMS_BYTES = 64 << 20  # an answer has some 100 bytes for each tensor and device.


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
  """Seconds to wait for answers."""

  connect_s: float = CONNECT_S
  # One request, including the time that it waits at the server.
  generate_s: float = SGLangOptions.request_timeout_s
  control_s: float = SGLangOptions.control_timeout_s  # pausing, loading weights, resuming.
  health_s: float = SGLangOptions.health_timeout_s  # SGLang gives up after 20 s and answers 503.


class Client:
  """One server.

  Each method raises `Refused` or `Unanswered` if the server does not do what is asked.
  """

  def __init__(self, http: JsonClient, address: str, *, timeouts: Timeouts = Timeouts()):
    """Makes a client; nothing is sent yet.

    Args:
      http: Client that sends the requests, shared by all servers of a fleet.
      address: "http://host:port".
      timeouts: Time-outs of all calls.
    """
    self.address = address.rstrip("/")
    self._http = http
    self._timeouts = timeouts

  async def generate(
    self,
    body: Mapping[str, Any],
    *,
    read: Callable[[Any], T],
    limit: int,
  ) -> T:
    """Returns what `read` makes of the answer to POST /generate.

    Args:
      body: Body of the request.
      read: Function from decoded JSON to the result; may raise Garbled or Aborted, and may run in
        any thread.
      limit: Largest answer, in bytes.
    """
    return await self._http.ask(
      Request(
        url=f"{self.address}/generate",
        timeout_s=self._timeouts.generate_s,
        body=body,
        limit=limit,
      ),
      read,
    )

  async def score(self, body: Mapping[str, Any], *, read: Callable[[Any], T], limit: int) -> T:
    """Returns what `read` makes of the answer to a question about a prompt; see `generate`."""
    return await self._http.ask(
      Request(
        url=f"{self.address}/generate",
        timeout_s=self._timeouts.control_s,
        body=body,
        limit=limit,
      ),
      read,
    )

  async def health(self) -> None:
    """Has the server generate a token. A paused server does not answer."""
    url = f"{self.address}/health"
    request = Request(method="GET", url=url, timeout_s=self._timeouts.health_s, is_json=False)
    await self._http.ask(request, _unchanged)

  async def model_info(self) -> Mapping[str, Any]:
    """Returns the server's description of its model; tries an older path if there is no newer."""
    try:
      return await self._control("/model_info", method="GET")
    except Refused as error:
      if error.status != 404:
        raise
    return await self._control("/get_model_info", method="GET")

  async def can_update(self) -> bool:
    """Returns whether the server has an endpoint for new weights (sglang-jax has none)."""
    try:
      await self._control("/update_weights_from_disk", {})
    except Refused as error:
      return error.status != 404  # the endpoint itself refuses an empty body.
    return True

  async def pause(self) -> None:
    """Stops generating; requests in flight wait and continue with the next weights.

    The server frees the keys and values of what they have, and computes them again then.
    """
    await self._control("/pause_generation", {"mode": "retract"})

  async def resume(self) -> None:
    """Continues generating; does nothing if the server was not paused."""
    await self._control("/continue_generation", {})

  async def abort_all(self) -> None:
    """Aborts all requests in flight, also those of clients that are gone."""
    await self._control("/abort_request", {"abort_all": True})

  async def load(self, folder: str, version: str) -> None:
    """Replaces the weights by those of a folder and clears the server's cache.

    Args:
      folder: Hugging Face folder.
      version: Version that the server reports from now on.

    Raises:
      Refused: The server cannot read the folder, or it holds another model; the old weights stay.
    """
    body = {"model_path": folder, "weight_version": version, "flush_cache": True}
    answer = await self._control("/update_weights_from_disk", body)
    if not (isinstance(answer, dict) and answer.get("success")):
      said = self.shown(answer)
      raise Refused(f"{self.address}/update_weights_from_disk: answered 200: {said}", status=200)

  async def checksums(self) -> Checksums:
    """Returns the checksum of each tensor of the server.

    Raises:
      Garbled: The answer has another form.
    """
    request = Request(
      url=f"{self.address}/weights_checker",
      timeout_s=self._timeouts.control_s,
      body={"action": "checksum"},
      limit=_CHECKSUMS_BYTES,
    )
    return await self._http.ask(request, sglang_messages.checksums_of)

  async def server_info(self) -> Any:
    """Returns the options of the server."""
    return await self._control("/server_info", method="GET")

  async def adapters(self) -> dict[str, str]:
    """Returns the folders of the adapters that the server has, by their names."""
    answer = await self._control("/v1/models", method="GET")
    listed = answer.get("data") if isinstance(answer, dict) else None
    models = [model for model in listed or () if isinstance(model, dict) and model.get("parent")]
    return {str(model.get("id")): str(model.get("root")) for model in models}

  async def load_adapter(self, name: str, folder: str) -> None:
    """Has the server load an adapter, while it continues to serve others.

    Raises:
      Refused: The server cannot read the folder, or the adapter does not fit.
    """
    await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

  async def unload_adapter(self, name: str) -> None:
    """Has the server drop an adapter; it waits for the requests that use it.

    Meanwhile the server loads no other adapter.

    Raises:
      Refused: The server does not have it.
    """
    await self._control("/unload_lora_adapter", {"lora_name": name})

  async def release_memory(self) -> None:
    """Frees the memory of weights, cache and graphs; a server that is not idle ends."""
    await self._control("/release_memory_occupation", {})

  async def resume_weights(self) -> None:
    """Takes memory for weights back, before the rest, so that both never exceed what there is."""
    await self._control("/resume_memory_occupation", {"tags": ["weights"]})

  async def resume_cache(self) -> None:
    """Takes the rest of the memory back."""
    await self._control("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

  def shown(self, said: Any) -> str:
    """Returns what the server said, for a message: without the key, in one printable line."""
    return self._http.shown(said if isinstance(said, str | bytes) else str(said))

  async def _control(
    self, path: str, body: Mapping[str, Any] | None = None, *, method: str = "POST"
  ) -> Any:
    request = Request(
      method=method, url=f"{self.address}{path}", timeout_s=self._timeouts.control_s, body=body
    )
    return await self._http.ask(request, _unchanged)


def _unchanged(answer: Any) -> Any:
  return answer
