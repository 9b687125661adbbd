"""A loop of turns and tools as a harness of verifiers, in this process instead of one of its own.

It does what the package's harness "null" does, which starts a Python process for each attempt and
installs packages for it first.
"""

import contextlib
import functools
import json
import sys
import types
from collections.abc import Mapping
from typing import Any

from grpo_environments.policy_client import PolicyClient, Reply
from grpo_environments.verifiers_kinds.base import package
from grpo_jax.environments.base import Endpoint
from grpo_jax.http.failures import HttpFailure

_ID = "grpo_jax_chat_loop"


def session_client(endpoint: Endpoint, http: Any) -> Any:
  """Returns a client of the package for one session of our endpoint.

  Args:
    endpoint: Endpoint of the attempt.
    http: Connections, which all sessions share.
  """
  client = object.__new__(_session_client_class())
  client.base_url, client.api_key, client.headers = endpoint.base_url, endpoint.api_key, {}
  client.client = http
  return client


@functools.cache
def _session_client_class() -> type:
  class SessionClient(package("verifiers.v1.clients").EvalClient):
    """A client that shares its connections."""

    async def close(self) -> None:
      """Does nothing."""

  return SessionClient


@functools.cache
def harness_id() -> str:
  """Registers the loop with the package, and returns the id by which the package finds it."""
  module = types.ModuleType(_ID)
  vars(module).update(ChatLoop=_harness_class(), __all__=["ChatLoop"])
  sys.modules[_ID] = module
  return _ID


def _harness_class() -> type:
  harness = package("verifiers.v1.harness")
  result = package("verifiers.v1.runtimes").ProgramResult
  as_wire = package("verifiers.v1.dialects.chat").message_to_wire

  class ChatLoop(harness.Harness[harness.HarnessConfig]):
    """Turns of the policy, whose tool calls go to the task's servers, until one has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
      self,
      ctx: Any,
      trace: Any,
      runtime: Any,
      endpoint: str,
      secret: str,
      mcp_urls: Mapping[str, str],
      data: Any,
    ) -> Any:
      system, prompt = self.resolve_prompt(data)
      messages = [{"role": "system", "content": system}] if system else []
      if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
      else:
        messages += [as_wire(message) for message in prompt or ()]
      servers = {
        name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
      }
      policy = PolicyClient(Endpoint(endpoint, secret, ctx.model))
      try:
        async with policy:
          await _converse(policy, messages, servers)
      except HttpFailure as error:  # the package knows why it refused a turn.
        return result(exit_code=1, stdout="", stderr=str(error))
      return result(exit_code=0, stdout="", stderr="")

  return ChatLoop


async def _converse(
  policy: PolicyClient, messages: list[Any], servers: Mapping[str, Mapping[str, Any]]
) -> None:
  """Lets the policy answer, and calls its tools, until it calls none or has no room."""
  mcp = package("verifiers.v1.harnesses.utils.mcp")
  async with contextlib.AsyncExitStack() as stack:
    tools, names, connections = [], {}, {}
    if servers:
      tools, names, connections = await mcp.connect_mcp({"mcpServers": servers}, stack)
    while (reply := await policy.reply(messages, tools)) is not None:
      messages.append(reply.message)
      if not reply.tool_calls:
        return
      messages += await _answers(reply, names, connections)


async def _answers(
  reply: Reply, names: Mapping[str, Any], connections: Mapping[str, Any]
) -> list[Any]:
  mcp = package("verifiers.v1.harnesses.utils.mcp")
  bounded = package("verifiers.v1.harnesses.utils.compaction").bound_tool_message
  answers = []
  for call in reply.tool_calls:
    name = call["function"]["name"]
    try:
      arguments = json.loads(call["function"]["arguments"] or "{}")
      if not isinstance(arguments, dict):
        raise ValueError(f"tool arguments must be a JSON object, got {type(arguments).__name__}")
    except ValueError as error:
      content = f"error: invalid tool arguments ({error}); resend the call with a JSON object"
    else:
      content = f"error: unknown tool {name!r}"
      if name in names:
        content = await mcp.call_mcp(connections, names, name, arguments)
    message = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
    answers.append(bounded(message))
  return answers
