"""HTTP servers of a few routes, one of which may be the policy, for environments elsewhere."""

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from grpo_jax.engines.base import SamplingParams
from grpo_jax.environments.base import AnyFactory, Endpoint, StepResult
from grpo_jax.environments.isolation import IsolatedEnvironment
from grpo_jax.serving.request_errors import RequestError
from grpo_jax.serving.request_fields import read_chat_options
from grpo_jax.serving.terms import RunDecides
from grpo_jax.types import Prompt

# (body of a request, its headers) → status, JSON or text of the answer, headers
Route = Callable[[Any, Mapping[str, str]], tuple[int, Any, Mapping[str, str]]]


class Server:
  """Answers requests by their path, and keeps them."""

  def __init__(self, routes: Mapping[str, Route]):
    self.requests: list[tuple[str, Any, dict[str, str]]] = []  # path, body, headers.
    server = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_GET(self):
        self.reply(None)

      def do_POST(self):
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

      def reply(self, body):
        server.requests.append((self.path, body, dict(self.headers)))
        unknown = lambda body, headers: (404, {"detail": "Not Found"}, {})
        status, value, headers = routes.get(self.path, unknown)(body, self.headers)
        content = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(content))}.items():
          self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

      def log_message(self, *_):
        pass

    self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._http.daemon_threads = True
    self.url = f"http://127.0.0.1:{self._http.server_port}"
    self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
    self._thread.start()

  def sent(self, path: str) -> list[Any]:
    """Returns the bodies of the requests for a path."""
    return [body for one, body, _ in self.requests if one == path]

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()
    self._thread.join()


@contextlib.contextmanager
def serving(routes: Mapping[str, Route]) -> Iterator[Server]:
  """Runs a server with these routes."""
  server = Server(routes)
  try:
    yield server
  finally:
    server.close()


def says(value: Any, status: int = 200, **headers: str) -> Route:
  """Returns a route that always answers the same."""
  return lambda body, _: (status, value, {k.replace("_", "-"): v for k, v in headers.items()})


def policy(reply: Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]) -> Route:
  """Returns the route of a policy; what a run would refuse is refused here, too.

  Args:
    reply: Function (messages, tools) → text of the answer, or a message with tool calls; a number
      is the status of an answer without room for a completion.
  """

  def route(body, headers):
    try:
      RunDecides().granted(read_chat_options(body), SamplingParams(max_tokens=64))
    except RequestError as error:
      return error.status, error.body(), {}
    found = reply(body["messages"], body.get("tools") or [])
    if isinstance(found, int):
      return found, {"error": {"message": "too long", "code": "context_length_exceeded"}}, {}
    message = {"content": found} if isinstance(found, str) else found
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "usage": counts}
    return 200, {**head, "choices": [choice], "model": body["model"]}, {}

  return route


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
  """Returns a message that calls a tool."""
  text = arguments if isinstance(arguments, str) else json.dumps(arguments)
  function = {"name": name, "arguments": text}
  one = {"id": f"call_{number}", "type": "function", "function": function}
  return {"content": None, "tool_calls": [one]}


CHAT = "/v1/chat/completions"


def endpoint(server: Server) -> Endpoint:
  """Returns the endpoint of a server that is the policy."""
  return Endpoint(f"{server.url}/v1", "key-of-the-attempt", "policy")


def prompt_of(info: Mapping[str, Any], *messages: Mapping[str, Any]) -> Prompt:
  """Returns a prompt with these messages."""
  given = messages or ({"role": "user", "content": "Begin."},)
  return Prompt("p:0:0", np.zeros(1, np.int32), "made", info, messages=tuple(given))


def run(
  factory: AnyFactory, prompt: Prompt, at: Endpoint, *, timeout_s: float = 30.0
) -> StepResult:
  """Makes one attempt in a thread of its own, as a rollout does."""

  async def attempt():
    environment = IsolatedEnvironment(factory, prompt, timeout_s=timeout_s)
    try:
      await environment.start()
      return await environment.run(at, timeout_s=timeout_s)
    finally:
      await environment.close()

  return asyncio.run(attempt())
