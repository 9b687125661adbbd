"""OpenEnv's protocol, against a WebSocket server that answers as openenv 0.10.0 does."""

import asyncio
import contextlib
import json
import threading

import pytest
from aiohttp import web

from grpo_environments import openenv
from grpo_jax import environments
from grpo_jax.environments.isolation import EnvironmentFailure
from tests.packages.grpo_environments.http_routes import (
  CHAT,
  endpoint,
  policy,
  prompt_of,
  run,
  serving,
)

SCHEMA = {
  "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
  "required": ["number"],
}


class Sockets:
  """A server of sessions in a thread, each of which answers as it is told."""

  def __init__(self, answer):
    self.asked: list[list[dict]] = []  # requests of each session.
    self._answer = answer
    self._loop = asyncio.new_event_loop()
    self._runner = web.AppRunner(self._app())
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()
    self.url = self._wait(self._start())

  def _app(self):
    app = web.Application()
    app.router.add_get("/schema", _schema)
    app.router.add_get("/ws", self._session)
    return app

  async def _session(self, request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    asked = []
    self.asked.append(asked)
    async for message in socket:
      asked.append(json.loads(message.data))
      answer = self._answer(asked)
      if answer is None:
        break
      if answer != "silence":
        await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
    return socket

  async def _start(self):
    await self._runner.setup()
    site = web.TCPSite(self._runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

  def close(self):
    self._wait(self._runner.cleanup())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def _wait(self, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)


async def _schema(_):
  return web.json_response({"action": SCHEMA})


@contextlib.contextmanager
def sockets(answer):
  server = Sockets(answer)
  try:
    yield server
  finally:
    server.close()


def seen(text, *, reward=0.0, done=False):
  """Returns an observation as the server writes it."""
  data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
  return {"type": "observation", "data": data}


def guessing(asked):
  """A game: the number is 1 more than the seed of the reset."""
  if asked[-1]["type"] == "reset":
    return seen("Guess.", reward=None)
  number = 1 + asked[0]["data"].get("seed", 0)
  said = asked[-1]["data"]["number"]
  if said == number:
    return seen("Right.", reward=1.0, done=True)
  return seen("Higher." if said < number else "Lower.", reward=-0.25)


def attempt(answer, reply, info=None, **settings):
  """Returns the result of an attempt, the game's server and the policy's."""
  with sockets(answer) as game, serving({CHAT: policy(reply)}) as server:
    made = environments.make(made=dict(module="openenv", url=game.url, timeout_s=1.0, **settings))
    with made:
      row = {"messages": [{"role": "user", "content": openenv.PLACEHOLDER}], **(info or {})}
      prompt = prompt_of(row, *row["messages"])
      return run(made["made"], prompt, endpoint(server)), game, server


def counting(messages, tools):
  """A policy that says 1, 2, 3."""
  return str(sum(message["role"] == "assistant" for message in messages) + 1)


def test_an_episode_is_a_conversation():
  row = openenv.rows(seed=2)
  result, game, server = attempt(guessing, counting, row, reset={"level": 4})
  assert result.total == pytest.approx(0.5)
  assert result.metrics == {"accuracy": 0, "done": 1, "steps": 3, "bad_actions": 0}
  (asked,) = game.asked
  assert [each["type"] for each in asked] == ["reset", *["step"] * 3]
  assert asked[0]["data"] == {"level": 4, "seed": 2} and asked[1]["data"] == {"number": 1}
  said = [message["content"] for message in server.sent(CHAT)[-1]["messages"]]
  assert said == ["Guess.", "1", "Higher.", "2", "Higher."]


def test_messages_of_the_row_come_before_the_first_observation():
  row = {"messages": [{"role": "system", "content": "Play."}]}
  result, _, server = attempt(guessing, counting, row, solved_reward=0.5)
  assert result.metrics["accuracy"] == 1
  first = server.sent(CHAT)[0]["messages"]
  assert [m["content"] for m in first] == ["Play.", "Guess."]


def test_what_is_not_an_action_is_answered_and_counted():
  number = lambda text, schema: {"number": int(text)} if text.isdigit() else _refuse(text, schema)
  turns = iter(["What?", "1"])
  made = pytest.MonkeyPatch()
  with made.context() as patch:
    patch.setattr(openenv, "our_own", number, raising=False)
    result, game, server = attempt(
      guessing, lambda *_: next(turns), action="grpo_environments.openenv.our_own"
    )
  assert result.metrics["bad_actions"] == 1 and result.total == 1.0
  assert server.sent(CHAT)[1]["messages"][-1] == {"role": "user", "content": "What? is no number"}


def _refuse(text, schema):
  assert schema == SCHEMA
  raise openenv.BadAction(f"{text} is no number")


@pytest.mark.parametrize(
  "settings, reply, steps",
  [(dict(max_steps=2), counting, 2), ({}, lambda m, _: 400 if len(m) > 1 else "5", 1)],
  ids=["max_steps", "no_room"],
)
def test_an_episode_that_does_not_end_has_the_reward_so_far(settings, reply, steps):
  result, *_ = attempt(guessing, reply, openenv.rows(seed=8), **settings)
  assert result.total == -0.25 * steps and result.metrics["done"] == 0


@pytest.mark.parametrize(
  "answer, kind",
  [
    ({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}, "EndpointFailed"),
    (None, "EndpointUnreachable"),
    ("silence", "timeout"),
    ("<html>", "EndpointUnreadable"),
    ({"type": "state", "data": {}}, "EndpointUnreadable"),
    (seen("x", reward="much"), "EndpointUnreadable"),
  ],
  ids=["error", "lost", "silence", "html", "type", "reward"],
)
def test_a_server_that_fails_costs_the_attempt(answer, kind):
  with pytest.raises(EnvironmentFailure) as caught:
    attempt(lambda asked: answer, counting)
  assert caught.value.kind == kind and "http://127.0.0.1" in str(caught.value)


def test_a_server_that_is_not_there_is_said_before_the_run():
  made = environments.make(made=dict(module="openenv", url="http://127.0.0.1:9"))
  with made, pytest.raises(ValueError, match="OpenEnv server http://127.0.0.1:9 cannot be used"):
    environments.check(made, [prompt_of({})])


@pytest.mark.parametrize(
  "text, schema, action",
  [
    ('{"number": 3}', SCHEMA, {"number": 3}),
    ("```json\n4\n```", SCHEMA, {"number": 4}),
    ("~~~~\n4\n~~~~", SCHEMA, {"number": 4}),
    ("<think>5?</think> 6", SCHEMA, {"number": 6}),
    ("42", {"properties": {"message": {"type": "string"}}}, {"message": "42"}),
    ("say [up]", {"properties": {"message": {"type": "string"}}}, {"message": "say [up]"}),
  ],
)
def test_text_becomes_an_action(text, schema, action):
  assert openenv.action_of(text, schema) == action


def test_text_that_could_be_several_fields_is_refused():
  with pytest.raises(openenv.BadAction, match="with the fields x, y"):
    openenv.action_of("up", {"properties": {"x": {}, "y": {}}})


def test_observations_are_shown_as_their_text_or_as_json():
  assert openenv.text_of({"text": "Hello", "metadata": {}, "done": False}) == "Hello"
  assert openenv.text_of({"board": [1], "turn": "x"}) == '{"board": [1], "turn": "x"}'
