"""Rewards of NeMo Gym: its resources servers verify what the policy does with their tasks.

Works on rows of NeMo Gym (`data.format = "nemo_gym"`), which have `responses_create_params`. The
servers run elsewhere; this module does over HTTP what NeMo Gym's agents do:

  simple_agent                 POST /seed_session; turns of the policy, each tool call of which is
                               POST /TOOL; then POST /verify {row, response} → {"reward": …}
  non_executing_simple_agent   the same with one turn, whose tool calls are verified and not made
  gymnasium_agent              POST /reset → observation; after each turn POST /step {row, response}
                               → observation, reward, terminated, truncated
  single_turn                  POST /verify for rows without tools: the completion is sampled with
                               all others, and no conversation is held

A server that fails, hangs or answers something else costs the attempt its reward; see
scoring/client.py.
"""

import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from grpo_environments.policy_client import Message, PolicyClient, Reply
from grpo_jax.environments.base import (
  AgentEnvironment,
  Endpoint,
  Environment,
  EnvironmentFactory,
  SingleTurn,
  StepResult,
)
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.environments.scoring import formats
from grpo_jax.environments.scoring.client import EndpointClient, EndpointRetryPolicy
from grpo_jax.environments.scoring.failures import (
  EndpointError,
  EndpointRefused,
  EndpointUnreadable,
)
from grpo_jax.http import addresses
from grpo_jax.registry import choose
from grpo_jax.types import Prompt

ROW = "nemo_gym_row"  # field of `Prompt.info`: the row of NeMo Gym.

_RESULTS = ("response", "output", "reward")  # of a recorded rollout; never sent.
_AGENTS = (
  *("auto", "simple_agent", "non_executing_simple_agent"),
  *("gymnasium_agent", "single_turn"),
)
_NOT_FOUND = '{"detail":"Not Found"}'  # NeMo Gym's answer to the call of an unknown tool.

Items = list[dict[str, Any]]  # of OpenAI's Responses API.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NemoGymOptions:
  """Options of the attempts; see `make`."""

  max_steps: int
  thoughts: str
  solved_reward: float | None
  fields: Mapping[str, Any]


class ResourcesServer:
  """One resources server."""

  def __init__(self, url: str, client: EndpointClient):
    """Makes no connection.

    Args:
      url: Address of the server, for messages.
      client: Client of the server.
    """
    self._url = url
    self.client = client
    self._lock = threading.Lock()
    self._routes: frozenset[str] | None = None
    self._failure = ""

  @property
  def agent(self) -> str:
    """The name of NeMo Gym's agent that the server is made for; see `make`."""
    has_steps = self._routes is not None and {"/reset", "/step"} <= self._routes
    return "gymnasium_agent" if has_steps else "simple_agent"

  def check(self) -> None:
    """Asks the server once what it can do; raises ValueError if it cannot be reached."""
    with self._lock:
      if self._routes is None and not self._failure:
        self._ask()
    if self._failure:
      raise ValueError(self._failure)

  def _ask(self) -> None:
    try:
      self._routes = self.client.get("/openapi.json", _routes)
    except EndpointRefused:
      self._routes = frozenset()  # it does not describe itself, but it answers.
    except EndpointError as error:
      self._failure = f"NeMo Gym's resources server {self._url} cannot be used: {error}"


class NemoGymEnvironments(EnvironmentFactory):
  """Makes the environments, which share the connections."""

  def __init__(
    self, servers: Mapping[str, ResourcesServer], *, agent: str, options: NemoGymOptions
  ):
    """Makes no connection.

    Args:
      servers: Servers by the agents of the rows; "": the one of all other rows.
      agent: Option of `make`.
      options: Options of the attempts.
    """
    self._servers = servers
    self._agent = agent
    self._options = options
    self.is_agent = agent != "single_turn"

  def __call__(self, prompt: Prompt) -> Environment | AgentEnvironment:
    row = {**self._options.fields, **row_of(prompt)}
    server = self._server_of(row)
    server.check()
    session = GymSession(row, server, self._options)
    if self.is_agent:
      return GymAttempt(session, prompt, self._agent)
    if tools := row["responses_create_params"].get("tools"):
      raise ValueError(
        f"prompt {prompt.prompt_id}: the row declares {len(tools)} tools, which single_turn"
        " does not call; with agent='auto' they are called"
      )
    said = lambda text: items_of(Reply({"content": text}, is_cut=False), self._options)
    return SingleTurn(lambda _, text: session.verify(said(text)), prompt)

  def metrics(self) -> dict[str, float]:
    """Returns the number of calls, tries, retries and failed calls of all servers, by kind."""
    counts: dict[str, float] = {}
    for server in self._servers.values():
      for name, value in server.client.counts().items():
        counts[f"endpoint_{name}"] = counts.get(f"endpoint_{name}", 0.0) + value
    return counts

  def close(self) -> None:
    """Aborts the calls and closes the connections."""
    for server in self._servers.values():
      server.client.close()

  def _server_of(self, row: Mapping[str, Any]) -> ResourcesServer:
    agent = row.get("agent_ref")
    name = str(agent.get("name", "")) if isinstance(agent, Mapping) else ""
    server = self._servers.get(name) or self._servers.get("")
    if server is None:
      raise ValueError(
        f"no server for the agent {name!r} of the row; urls has: {', '.join(self._servers)}"
      )
    return server


class GymSession:
  """What one attempt says to its resources server."""

  def __init__(self, row: Mapping[str, Any], server: ResourcesServer, options: NemoGymOptions):
    self.row = row
    self.server = server
    self.options = options
    self._cookies: dict[str, str] = {}  # they name the session.

  @property
  def params(self) -> Mapping[str, Any]:
    """The request that the policy answers, as the row has it."""
    return self.row["responses_create_params"]

  async def post(self, path: str, read: Callable[[Any], Any], **fields: Any) -> Any:
    """Posts the row and further fields. Only what can be repeated without harm is repeated."""
    return await self.server.client.post(
      {**self.row, **fields},
      read,
      path=path,
      cookies=self._cookies,
      is_repeatable=path != "/step",
    )

  async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Calls a tool; returns the answer of whatever status, as NeMo Gym's agents do."""
    known = {tool.get("name") for tool in self.params.get("tools") or ()}
    if name not in known:
      return _NOT_FOUND
    path = f"/{name}"
    return (await self.server.client.text(arguments, path=path, cookies=self._cookies))[1]

  async def verify(self, output: Items, *, is_cut: bool = False) -> StepResult:
    """Has the server score what the policy, and its tools, wrote."""
    response = self.response(output, is_cut=is_cut)
    answer = await self.post("/verify", _verified, response=response)
    new = {name: value for name, value in answer.items() if name not in self.row}
    return self.result(float(answer["reward"]), new)

  def response(self, output: Items, *, is_cut: bool = False) -> dict[str, Any]:
    """Returns an answer of OpenAI's Responses API."""
    params = self.params
    return {
      "id": f"resp_{uuid.uuid4().hex}",
      "created_at": time.time(),
      "model": params.get("model") or "policy",
      "object": "response",
      "output": output,
      "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
      "tool_choice": params.get("tool_choice") or "auto",
      "tools": params.get("tools") or [],
      "status": "incomplete" if is_cut else "completed",
      "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
    }

  def result(self, reward: float, answer: Mapping[str, Any]) -> StepResult:
    """Returns a reward, with the numbers in the server's answer as metrics."""
    metrics = {
      name: float(value)
      for name, value in answer.items()
      if isinstance(value, bool | int | float) and name != "reward"
    }
    solved = self.options.solved_reward
    accuracy = {} if solved is None else {"accuracy": float(reward >= solved)}
    return StepResult(reward, done=True, metrics={**accuracy, **metrics})


class GymAttempt:
  """An attempt that holds a conversation, in the way of one of NeMo Gym's agents."""

  def __init__(self, session: GymSession, prompt: Prompt, agent: str):
    self._session = session
    self._messages: list[Message] = list(prompt.messages)
    self._tools = [_chat_tool(tool) for tool in session.params.get("tools") or ()]
    self._agent = agent

  async def start(self) -> None:
    """Does nothing."""

  async def close(self) -> None:
    """Does nothing: a session ends with its server, or with the episode."""

  async def run(self, endpoint: Endpoint) -> StepResult:
    """Holds the conversation, and returns its reward."""
    agent = self._session.server.agent if self._agent == "auto" else self._agent
    async with PolicyClient(endpoint) as policy:
      if agent == "gymnasium_agent":
        return await self._play(policy)
      return await self._answer(policy, calls_tools=agent == "simple_agent")

  async def _answer(self, policy: PolicyClient, *, calls_tools: bool) -> StepResult:
    session = self._session
    seeded = await session.post("/seed_session", _mapping)
    if seeded.get("mcp"):
      raise EnvironmentFailure("mcp", "this resources server offers its tools over MCP only")
    output: Items = []
    is_cut = False
    for _ in range(session.options.max_steps):
      reply = await policy.reply(self._messages, self._tools)
      if reply is None:
        is_cut = True
        break
      is_cut = reply.is_cut
      output += items_of(reply, session.options)
      if is_cut or not reply.tool_calls or not calls_tools:
        break
      output += await self._call_tools(reply)
    return await session.verify(output, is_cut=is_cut)

  async def _call_tools(self, reply: Reply) -> Items:
    """Calls the tools of a turn one after the other, and appends turn and answers."""
    self._messages.append(reply.message)
    answers: Items = []
    for call in reply.tool_calls:
      said = await self._called(call["function"])
      self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
      answers.append({"type": "function_call_output", "call_id": call["id"], "output": said})
    return answers

  async def _called(self, function: Mapping[str, Any]) -> str:
    try:
      arguments = json.loads(function["arguments"] or "{}")
      if not isinstance(arguments, dict):
        raise ValueError(f"not an object: {function['arguments']}")
    except ValueError as error:
      return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
    return await self._session.call(function["name"], arguments)

  async def _play(self, policy: PolicyClient) -> StepResult:
    session = self._session
    first = await session.post("/reset", _mapping)
    if observation := first.get("observation"):
      self._deal(observation)
    reward, last, is_over = 0.0, {}, False
    for _ in range(session.options.max_steps):
      reply = await policy.reply(self._messages, self._tools)
      if reply is None:
        break
      items = items_of(reply, session.options)
      response = session.response(items, is_cut=reply.is_cut)
      last = await session.post("/step", _stepped, response=response)
      reward += float(last["reward"])
      is_over = bool(last.get("terminated") or last.get("truncated"))
      if is_over:
        break
      self._messages.append(reply.message)
      self._observe(last)
    numbers = _object(last.get("info"))
    ends = {"terminated": bool(last.get("terminated")), "truncated": not last.get("terminated")}
    return session.result(reward, {**numbers, **ends})

  def _deal(self, observation: str) -> None:
    """Appends the observation of a reset, in place of the one in a recorded rollout's input."""
    roles = [message["role"] for message in self._messages]
    if "terminated" in self._session.row and roles[-2:] == ["user", "user"]:
      self._messages.pop()
    self._messages.append({"role": "user", "content": observation})

  def _observe(self, step: Mapping[str, Any]) -> None:
    """Appends what a step answered."""
    for output in _object(step.get("info")).get("tool_outputs") or ():
      said = {"tool_call_id": output["call_id"], "content": output["output"]}
      self._messages.append({"role": "tool", **said})
    if observation := step.get("observation"):
      self._messages.append({"role": "user", "content": str(observation)})


def row_of(prompt: Prompt) -> dict[str, Any]:
  """Returns the row of NeMo Gym that a prompt is from, without recorded results.

  Raises:
    ValueError: The prompt is not from such a row.
  """
  row = prompt.info.get(ROW, prompt.info)
  if not isinstance(row.get("responses_create_params"), Mapping):
    raise ValueError(
      f"prompt {prompt.prompt_id}: the nemo_gym environment needs rows of NeMo Gym, with"
      " responses_create_params (data.format='nemo_gym')"
    )
  return {name: value for name, value in row.items() if name not in _RESULTS}


def items_of(reply: Reply, options: NemoGymOptions) -> Items:
  """Returns a turn of the policy as items of OpenAI's Responses API.

  Args:
    reply: Turn of the policy.
    options: Options of the attempt; with thoughts="reasoning", thoughts become an item of their
      own, as NeMo Gym's model servers write them.
  """
  items: Items = []
  thoughts, text = _parted(reply)
  if thoughts and options.thoughts == "reasoning":
    summary = [{"type": "summary_text", "text": thoughts}]
    items.append({"type": "reasoning", "id": _id("rs"), "summary": summary})
  elif thoughts:
    text = f"<think>{thoughts}</think>\n{text}"
  if text or not reply.tool_calls:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": _id("msg"), "role": "assistant", "status": "completed", "content": content}
    items.append({"type": "message", **message})
  for call in reply.tool_calls:
    function = call["function"]
    called = {"name": function["name"], "arguments": function["arguments"]}
    items.append({"type": "function_call", "call_id": call["id"], "status": "completed", **called})
  return items


def _parted(reply: Reply) -> tuple[str, str]:
  """Returns the thoughts and the text of a turn."""
  if reply.thoughts:
    return reply.thoughts, reply.text
  return split_thoughts(reply.text)


def split_thoughts(text: str) -> tuple[str, str]:
  """Returns what precedes the first "</think>", and what follows it; without one, all is text."""
  thoughts, closing, rest = text.partition("</think>")
  return (thoughts.lstrip().removeprefix("<think>"), rest.lstrip()) if closing else ("", text)


def make(
  *,
  url: str | None = None,
  urls: Mapping[str, str] | None = None,
  agent: str = "auto",
  max_steps: int = 10,
  thoughts: str = "reasoning",
  solved_reward: float | None = 1.0,
  fields: Mapping[str, Any] | None = None,
  api_key_env: str | None = None,
  timeout_s: float = 30.0,
  total_timeout_s: float = 50.0,
  retries: int = 3,
  backoff_s: float = 0.5,
  max_backoff_s: float = 10.0,
  max_failed_calls: int = 16,
  concurrency: int = 32,
) -> NemoGymEnvironments:
  """Makes the environment of NeMo Gym's resources servers.

  Args:
    url: Address of the resources server, "http://HOST:PORT".
    urls: Addresses by the `agent_ref.name` of the rows, for files of several environments; rows of
      other agents go to `url`.
    agent: One of NeMo Gym's agents that is done here: "simple_agent",
      "non_executing_simple_agent", "gymnasium_agent"; "auto": the last or the first, whichever the
      server is made for; "single_turn": no agent, for rows without tools.
    max_steps: Largest number of turns of the policy.
    thoughts: Form in which the server receives what precedes "</think>": "reasoning" (an item of
      its own) or "text" (a part of the message).
    solved_reward: Smallest reward of an attempt that counts as solved (metric accuracy), unless
      the server answers with an `accuracy` of its own; None: no accuracy.
    fields: Fields that are sent with every row that does not have them.
    api_key_env: Name of the environment variable with the key, sent as a bearer token.
    timeout_s: Longest time of one try, in seconds.
    total_timeout_s: Longest time of one call, with all tries and pauses, in seconds; less than
      `rollout.environment_timeout_s`.
    retries: Number of tries after the first. Steps and calls of tools are never repeated.
    backoff_s: First pause, in seconds; it doubles with each try.
    max_backoff_s: Longest pause, in seconds, even if the server asks for more (Retry-After).
    max_failed_calls: Number of consecutive failed calls of a server after which it is not called
      any more, and `rollout.max_error_share` stops the run.
    concurrency: Number of simultaneous requests of a server.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, and the numbers in the server's
    answer that are not fields of the row.

  Raises:
    ValueError: An address is invalid, the key is not set, or an option is unknown.
  """
  if not url and not urls:
    raise ValueError("url must be the address of a resources server of NeMo Gym")
  choose("agent", agent, dict.fromkeys(_AGENTS))
  choose("thoughts", thoughts, dict.fromkeys(("reasoning", "text")))
  patience = EndpointRetryPolicy(
    timeout_s=timeout_s,
    total_timeout_s=total_timeout_s,
    retries=retries,
    backoff_s=backoff_s,
    max_backoff_s=max_backoff_s,
    max_failed_calls=max_failed_calls,
    concurrency=concurrency,
  )
  secret = addresses.key(api_key_env)
  given = {**(urls or {}), **({"": url} if url else {})}
  found = {name: addresses.address(one.rstrip("/")) for name, one in given.items()}
  servers = {
    name: ResourcesServer(one, EndpointClient(one, patience, secret=secret))
    for name, one in found.items()
  }
  options = NemoGymOptions(
    max_steps=max_steps, thoughts=thoughts, solved_reward=solved_reward, fields=fields or {}
  )
  return NemoGymEnvironments(servers, agent=agent, options=options)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a tool of the Responses API in the form of chat completions."""
  kept = ("name", "description", "parameters")
  return {"type": "function", "function": {key: tool[key] for key in kept if tool.get(key)}}


def _id(kind: str) -> str:
  return f"{kind}_{uuid.uuid4().hex}"


def _routes(answer: Any) -> frozenset[str]:
  paths = answer.get("paths") if isinstance(answer, dict) else None
  return frozenset(paths if isinstance(paths, dict) else ())


def _object(value: Any) -> Mapping[str, Any]:
  """Returns a field that may be an object."""
  return value if isinstance(value, Mapping) else {}


def _mapping(answer: Any) -> Mapping[str, Any]:
  if not isinstance(answer, dict):
    raise EndpointUnreadable(f"the answer is not an object: {answer!r:.200}")
  return answer


def _verified(answer: Any) -> Mapping[str, Any]:
  formats.rewarded(answer)
  return answer


_stepped = _verified
