"""Environments of OpenEnv (Meta, Hugging Face), which servers run and offer over a WebSocket.

    ws://HOST:PORT/ws    {"type": "reset", "data": {…}} → {"type": "observation", "data": {…}}
                         {"type": "step", "data": action}  → observation, reward, done

An attempt is one session, i.e. one connection. The observation of the reset is the first message
of the user, unless the row has messages of its own; each turn of the policy becomes an action, and
each observation the next message. Rewards of the steps add up. No package of OpenEnv is needed
here: the server may be any that `openenv.core.create_app` makes, in a container or not.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from grpo_environments.policy_client import Message, PolicyClient
from grpo_jax import registry
from grpo_jax.environments.base import Endpoint, EnvironmentFactory, StepResult
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.environments.scoring.client import EndpointClient, EndpointRetryPolicy
from grpo_jax.environments.scoring.failures import EndpointError, EndpointRefused
from grpo_jax.http import addresses, redaction
from grpo_jax.models.chat import untrusted_json
from grpo_jax.types import Prompt

# (text of the policy, JSON schema of the actions) → action
MakeAction = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
# (observation) → text that the policy reads
ShowObservation = Callable[[Mapping[str, Any]], str]

_LARGEST_BYTES = 64 << 20
_FENCED = re.compile(r"(`{3,20}+|~{3,20}+)[^\n]*\n(?P<content>.*?)\n?\1", re.DOTALL)
_OF_THE_PROTOCOL = ("done", "reward", "metadata")  # fields of every observation.


class BadAction(ValueError):
  """The text of the policy is not an action. The policy reads the message, and may try again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvOptions:
  """Options of the attempts; see `make`."""

  reset: Mapping[str, Any]
  make_action: MakeAction
  show: ShowObservation
  max_steps: int
  solved_reward: float | None
  timeout_s: float


class OpenEnvServer:
  """One OpenEnv server."""

  def __init__(self, url: str, client: EndpointClient, *, key: str | None, concurrency: int):
    """Makes no connection.

    Args:
      url: Address of the server, "http://HOST:PORT".
      client: Client of the server.
      key: Key of the server's API; None: no key.
      concurrency: Largest number of sessions.
    """
    self.url = url
    self.client = client
    self.headers = {"Authorization": f"Bearer {key}"} if key else {}
    self.places = threading.BoundedSemaphore(concurrency)
    self._key = key
    self._lock = threading.Lock()
    self._schema: Mapping[str, Any] | None = None
    self._failure = ""

  def action_schema(self) -> Mapping[str, Any]:
    """Returns the JSON schema of the server's actions; raises ValueError without a server."""
    with self._lock:
      if self._schema is None and not self._failure:
        self._ask()
    if self._failure:
      raise ValueError(self._failure)
    return self._schema or {}

  def _ask(self) -> None:
    try:
      self._schema = self.client.get("/schema", _action_schema)
    except EndpointRefused:
      self._schema = {}  # older servers do not describe themselves.
    except EndpointError as error:
      self._failure = f"the OpenEnv server {self.url} cannot be used: {error}"

  def shown(self, text: object) -> str:
    """Returns text of the server for a message."""
    return redaction.shown(str(text), self._key)


class OpenEnvEnvironments(EnvironmentFactory):
  """Makes the environments, which share one server."""

  is_agent = True

  def __init__(self, server: OpenEnvServer, options: OpenEnvOptions):
    self._server = server
    self._options = options

  def __call__(self, prompt: Prompt) -> "Episode":
    return Episode(prompt, self._server, self._options, self._server.action_schema())

  def close(self) -> None:
    """Closes the connections."""
    self._server.client.close()


class Episode:
  """One attempt: an episode of the server's environment."""

  def __init__(
    self, prompt: Prompt, server: OpenEnvServer, options: OpenEnvOptions, schema: Mapping[str, Any]
  ):
    self._prompt = prompt
    self._server = server
    self._options = options
    self._schema = schema

  async def start(self) -> None:
    """Does nothing; the episode begins with the conversation."""

  async def close(self) -> None:
    """Does nothing; the session ends with the conversation."""

  async def run(self, endpoint: Endpoint) -> StepResult:
    """Plays the episode, and returns the sum of its rewards."""
    reset = {**self._options.reset, **(self._prompt.info.get("reset") or {})}
    async with _place(self._server.places), _session(self._server) as session:
      seen = await session.ask("reset", reset, self._options.timeout_s)
      async with PolicyClient(endpoint) as policy:
        return await self._play(policy, session, seen)

  async def _play(
    self, policy: PolicyClient, session: "_EpisodeConnection", seen: Mapping[str, Any]
  ) -> StepResult:
    messages = _opening(self._prompt, self._show(seen))
    reward, steps, bad = float(seen.get("reward") or 0.0), 0, 0
    is_done = bool(seen.get("done"))
    while not is_done and steps < self._options.max_steps:
      reply = await policy.reply(messages)
      if reply is None:
        break
      steps += 1
      messages.append(reply.message)
      try:
        action = dict(self._options.make_action(reply.text, self._schema))
      except BadAction as error:
        bad += 1
        messages.append({"role": "user", "content": str(error)})
        continue
      seen = await session.ask("step", action, self._options.timeout_s)
      reward += float(seen.get("reward") or 0.0)
      is_done = bool(seen.get("done"))
      messages.append({"role": "user", "content": self._show(seen)})
    solved = self._options.solved_reward
    accuracy = {} if solved is None else {"accuracy": float(reward >= solved)}
    ends = {"done": float(is_done), "steps": float(steps), "bad_actions": float(bad)}
    return StepResult(reward, done=True, metrics={**accuracy, **ends})

  def _show(self, seen: Mapping[str, Any]) -> str:
    observation = seen.get("observation")
    return self._options.show(observation if isinstance(observation, Mapping) else {})


class _EpisodeConnection:
  """A connection, in which every request has one answer."""

  def __init__(self, server: OpenEnvServer, socket: aiohttp.ClientWebSocketResponse):
    self._server = server
    self._socket = socket

  async def ask(self, kind: str, data: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
    """Sends a request; returns the data of its answer.

    Raises:
      EnvironmentFailure: The server answered with an error, with something else, or not in time.
    """
    try:
      async with asyncio.timeout(timeout_s):
        with contextlib.suppress(ConnectionError):  # a refused session has its reason to read.
          await self._socket.send_json({"type": kind, "data": dict(data)})
        message = await self._socket.receive()
    except TimeoutError as error:
      raise EnvironmentFailure(
        "timeout", f"{self._server.url}: no answer to {kind} within {timeout_s:g} s"
      ) from error
    if message.type is not aiohttp.WSMsgType.TEXT:
      raise EnvironmentFailure(
        "EndpointUnreachable", f"{self._server.url}: the connection was lost in {kind}"
      )
    return self._read(kind, message.data)

  def _read(self, kind: str, text: str) -> Mapping[str, Any]:
    try:
      answer = json.loads(text)
      data = answer["data"]
      if answer["type"] == "error":
        said = self._server.shown(f"{data.get('code')}: {data.get('message')}")
        raise EnvironmentFailure("EndpointFailed", f"{self._server.url}: {kind}: {said}")
      float(data.get("reward") or 0.0)
      if answer["type"] == "observation":
        return data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
      pass
    shown = self._server.shown(text)
    raise EnvironmentFailure(
      "EndpointUnreadable",
      f"{self._server.url}: the answer to {kind} is not an observation: {shown}",
    )


@contextlib.asynccontextmanager
async def _session(server: OpenEnvServer) -> AsyncIterator[_EpisodeConnection]:
  """Opens a session of the server.

  Raises:
    EnvironmentFailure: There is no connection.
  """
  address = server.url.replace("http", "ws", 1) + "/ws"
  async with aiohttp.ClientSession(trust_env=False) as client:
    try:
      socket = await client.ws_connect(
        address, headers=server.headers, max_msg_size=_LARGEST_BYTES, heartbeat=20.0
      )
    except (aiohttp.ClientError, OSError) as error:
      said = server.shown(f"{type(error).__name__}: {error}")
      raise EnvironmentFailure("EndpointUnreachable", f"{address}: {said}") from None
    async with socket:
      yield _EpisodeConnection(server, socket)


@contextlib.asynccontextmanager
async def _place(places: threading.BoundedSemaphore) -> AsyncIterator[None]:
  """Waits for one of the places; the event loops of several threads share them."""
  while not places.acquire(blocking=False):
    await asyncio.sleep(0.05)
  try:
    yield
  finally:
    places.release()


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the action in a turn of the policy: the JSON object, or the text itself.

  Args:
    text: Text of the turn. What precedes "</think>" is left out; a fence around JSON is removed.
    schema: JSON schema of the actions. Where one field is required, or is the only one, other text
      than an object becomes its value.

  Raises:
    BadAction: The text is not an object, and the schema does not have one such field.
  """
  said = text.rpartition("</think>")[2].strip()
  fenced = _FENCED.fullmatch(said)
  try:
    value = untrusted_json.read_all(fenced["content"] if fenced else said)
  except untrusted_json.JsonError:
    value = said
  if isinstance(value, dict):
    return value
  own = [name for name in schema.get("properties") or {} if name not in ("metadata", "type")]
  required = [name for name in schema.get("required") or () if name in own] or own
  if len(required) != 1:
    raise BadAction(f"Your message must be a JSON object with the fields {', '.join(own)}.")
  is_text = (schema.get("properties") or {})[required[0]].get("type") == "string"
  return {required[0]: said if is_text else value}


def text_of(observation: Mapping[str, Any]) -> str:
  """Returns an observation for the policy: its only text, or all its fields as JSON."""
  own = {k: v for k, v in observation.items() if k not in _OF_THE_PROTOCOL and v is not None}
  texts = [value for value in own.values() if isinstance(value, str)]
  is_text = len(own) == 1 and len(texts) == 1
  return texts[0] if is_text else json.dumps(own, ensure_ascii=False)


def make(
  *,
  url: str,
  reset: Mapping[str, Any] | None = None,
  action: str | None = None,
  observation: str | None = None,
  max_steps: int = 32,
  solved_reward: float | None = 1.0,
  concurrency: int = 32,
  timeout_s: float = 30.0,
  api_key_env: str | None = None,
) -> OpenEnvEnvironments:
  """Makes the environment of an OpenEnv server.

  Args:
    url: Address of the server, "http://HOST:PORT".
    reset: Arguments of every reset; a row's field `reset` adds to them (a seed, a task).
    action: Dotted path of a function (text, JSON schema of the actions) → action; it may raise
      BadAction, whose message the policy reads. None: `action_of`.
    observation: Dotted path of a function (observation) → text. None: `text_of`.
    max_steps: Largest number of turns of the policy.
    solved_reward: Smallest reward of a solved attempt (metric accuracy); None: no accuracy.
    concurrency: Largest number of sessions; a server allows one unless it was started with more
      (`max_concurrent_envs`), and refuses the others.
    timeout_s: Longest time of one answer, in seconds.
    api_key_env: Name of the environment variable with the key, sent as a bearer token.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, done, steps, bad_actions.

  Raises:
    ValueError: The address is invalid, the key is not set, or a function does not exist.
  """
  address = addresses.address(url.rstrip("/"))
  key = addresses.key(api_key_env)
  patience = EndpointRetryPolicy(timeout_s=timeout_s, total_timeout_s=timeout_s, backoff_s=0.1)
  options = OpenEnvOptions(
    reset=reset or {},
    make_action=registry.function(action) if action else action_of,
    show=registry.function(observation) if observation else text_of,
    max_steps=max_steps,
    solved_reward=solved_reward,
    timeout_s=timeout_s,
  )
  client = EndpointClient(address, patience, secret=key)
  server = OpenEnvServer(address, client, key=key, concurrency=concurrency)
  return OpenEnvEnvironments(server, options)


def rows(*, seed: int, **fields: Any) -> dict[str, Any]:
  """Returns a row for `data.kind = "function"`: an episode whose reset gets the row's seed.

  Args:
    seed: Seed of the row.
    **fields: Further fields of the row, e.g. `messages`, with which the conversation begins.
  """
  opening = [{"role": "user", "content": PLACEHOLDER}]
  return {"messages": opening, **fields, "reset": {"seed": seed, **fields.get("reset", {})}}


# In place of a prompt, where the environment writes the first message.
PLACEHOLDER = "(the environment opens the conversation)"


def _opening(prompt: Prompt, observation: str) -> list[Message]:
  """Returns the messages that the policy reads first: the row's own, then the observation."""
  own = [message for message in prompt.messages if message["content"] != PLACEHOLDER]
  return [*own, {"role": "user", "content": observation}]


def _action_schema(answer: Any) -> Mapping[str, Any]:
  schema = answer.get("action") if isinstance(answer, dict) else None
  return schema if isinstance(schema, dict) else {}
