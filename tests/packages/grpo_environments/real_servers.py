"""Serves environments of nemo-gym and OpenEnv, for test_third_party.py: prints their addresses.

Run by the interpreter of `make test-environments`, with constraints/environments_servers.txt.
"""

import asyncio
import importlib
import json
import socket
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

RESOURCES = {
  "blackjack": "resources_servers.blackjack.app:BlackjackEnv",
  "counter": "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer",
  "reasoning_gym": "resources_servers.reasoning_gym.app:ReasoningGymResourcesServer",
}


class GuessAction(Action):
  number: int


class GuessObservation(Observation):
  text: str = ""


class Guess(Environment):
  """A game of OpenEnv: the number is one more than the seed."""

  SUPPORTS_CONCURRENT_SESSIONS = True

  def reset(self, seed=None, episode_id=None, **_):
    self._number = 1 + (seed or 0)
    return GuessObservation(text="Guess a number from 1 to 9.")

  def step(self, action, timeout_s=None, **_):
    is_right = action.number == self._number
    text = "Right." if is_right else "Higher." if action.number < self._number else "Lower."
    return GuessObservation(text=text, done=is_right, reward=float(is_right))

  @property
  def state(self):
    return State(step_count=0)


def resources_app(path, port):
  """Returns the application of one of NeMo Gym's resources servers."""
  home, name = path.split(":")
  kind = vars(importlib.import_module(home))[name]
  config = kind.model_fields["config"].annotation
  place = dict(host="127.0.0.1", port=port)
  head = BaseServerConfig(host="127.0.0.1", port=port)
  server = kind(
    config=config(name=name, entrypoint="app.py", **place),
    server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
  )
  app = server.setup_webserver()
  server.setup_exception_middleware(app)
  return app


async def main():
  addresses, servers = {}, []
  for name in [*RESOURCES, "openenv"]:
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    if name == "openenv":
      app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=4)
    else:
      app = resources_app(RESOURCES[name], port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    servers.append(asyncio.create_task(server.serve(sockets=[free])))
    addresses[name] = f"http://127.0.0.1:{port}"
    while not server.started:
      await asyncio.sleep(0.01)
  print(json.dumps(addresses), flush=True)
  await asyncio.to_thread(sys.stdin.read)  # until the test has ended.
  for server in servers:
    server.cancel()


if __name__ == "__main__":
  asyncio.run(main())
