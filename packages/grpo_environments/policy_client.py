"""Asks the policy over its endpoint, for environments that drive their own conversation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.environments.base import Endpoint
from grpo_jax.http.client import JsonClient, Request
from grpo_jax.http.failures import Refused, Unusable

_LONGEST_S = 86_400.0  # the attempt has its own limit.
_MAX_BYTES = 64 << 20
_FULL = "context_length_exceeded"  # OpenAI's code for a conversation that is too long.

Message = Mapping[str, Any]  # of OpenAI's chat completions.


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
  """One turn of the policy.

  Attributes:
    message: Message as the endpoint wrote it; later requests send it back.
    is_cut: Whether the token limit ended it.
  """

  message: Message
  is_cut: bool

  @property
  def text(self) -> str:
    """The text of the turn, without tool calls."""
    return self.message.get("content") or ""

  @property
  def thoughts(self) -> str:
    """The thoughts of the turn, where the endpoint separates them from the text."""
    return self.message.get("reasoning_content") or ""

  @property
  def tool_calls(self) -> Sequence[Mapping[str, Any]]:
    """The tool calls of the turn; their arguments are JSON as a string."""
    return self.message.get("tool_calls") or ()


class PolicyClient:
  """The policy, as one attempt may ask it. Close it in the event loop in which it was used."""

  def __init__(self, endpoint: Endpoint):
    self._endpoint = endpoint
    self._http = JsonClient(key=endpoint.api_key)

  async def __aenter__(self) -> "PolicyClient":
    return self

  async def __aexit__(self, *_: object) -> None:
    await self._http.close()

  async def reply(
    self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
  ) -> Reply | None:
    """Returns the next turn of the policy; None if the conversation leaves no room for it.

    Args:
      messages: Conversation so far.
      tools: Tools that the chat template receives, in OpenAI's form.

    Raises:
      HttpFailure: The endpoint did not answer.
    """
    body = {"model": self._endpoint.model, "messages": list(messages)}
    request = Request(
      url=f"{self._endpoint.base_url}/chat/completions",
      body={**body, "tools": list(tools)} if tools else body,
      timeout_s=_LONGEST_S,
      limit=_MAX_BYTES,
    )
    try:
      return await self._http.ask(request, _read)
    except Refused as error:
      if _FULL in str(error):
        return None
      raise


def _read(answer: Any) -> Reply:
  try:
    choice = answer["choices"][0]
    return Reply(dict(choice["message"]), choice.get("finish_reason") == "length")
  except (KeyError, IndexError, TypeError, ValueError) as error:
    raise Unusable(f"the answer is not a chat completion: {answer!r:.200}") from error
