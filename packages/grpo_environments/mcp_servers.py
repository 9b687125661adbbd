"""Tools of MCP servers, which run as processes beside the trainer and speak over standard streams.

A server is shared by all attempts of a run. One that dies, or no longer answers, is started again
at the next call, up to `_MOST_STARTS` times. The client is that of the package `mcp`.
"""

# pyright: reportMissingImports=false

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax import registry
from grpo_jax.environments.toolbox.calling import ToolError, as_text
from grpo_jax.environments.toolbox.functions import Tool
from grpo_jax.errors import ExpectedFailure
from grpo_jax.http import redaction
from grpo_jax.processes import guard
from grpo_jax.values import checked

_MOST_STARTS = 20
_MOST_PAGES = 100  # of a list of tools.
_PING_S = 5.0  # time in which a server must answer a ping after a call that was given up.
_CLOSE_S = 15.0  # time in which a server must have ended.


class McpError(ExpectedFailure, ValueError):
  """An MCP server cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerOptions:
  """How a server is started."""

  command: Sequence[str]  # program and arguments.
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # added variables.
  inherit: Sequence[str] = ()  # variables of the trainer that it gets as well, such as keys.
  folder: str | None = None  # working folder; None: that of the run.
  tools: Sequence[str] = ()  # names of the tools to declare; empty: all.
  prefix: str = ""  # put in front of the names of its tools.
  log: str | None = None  # file to which its standard error is appended; None: nowhere.
  start_timeout_s: float = 30.0  # time in which it must have listed its tools, in seconds.


_KINDS: Mapping[str, checked.Kind] = {
  "command": checked.several(checked.text(), least=1),
  "environment": checked.mapping(),
  "inherit": checked.several(checked.text()),
  "folder": checked.text(none=True),
  "tools": checked.several(checked.text()),
  "prefix": checked.text(empty=True),
  "log": checked.text(none=True),
  "start_timeout_s": checked.number(above=0),
}


def open_servers(servers: Mapping[str, Any], stack: contextlib.ExitStack) -> list[Tool]:
  """Starts servers and returns their tools.

  Args:
    servers: Fields of `ServerOptions` by the name of the server.
    stack: Stack that ends the servers.

  Raises:
    McpError: A server cannot be started, or does not have a tool that is named.
    ValueError: A setting is unknown or has an unsuitable value.
  """
  found: list[Tool] = []
  for name, settings in servers.items():
    server = _McpServer(name, _options(name, settings))
    stack.callback(server.close)
    found += server.start()
  return found


def _options(name: str, settings: Any) -> ServerOptions:
  where = f"mcp_servers.{name}"
  if not isinstance(settings, Mapping):
    raise ValueError(f"{where} must be a mapping of settings, got {settings!r:.100}")
  registry.check_arguments(where, ServerOptions, settings)
  wrong = checked.problems(_KINDS, settings, prefix=f"{where}.")
  if wrong:
    raise ValueError("; ".join(wrong))
  return ServerOptions(**settings)


class _McpServer:
  """A server and the thread that speaks with it."""

  def __init__(self, name: str, options: ServerOptions):
    self._name = name
    self._options = options
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=f"mcp {name}")
    self._connection: _Connection | None = None
    self._starting = asyncio.Lock()
    self._starts = 0

  def start(self) -> list[Tool]:
    """Starts the server, and returns its tools."""
    try:
      importlib.import_module("mcp")  # an optional extra, whose import takes a second.
    except ImportError as error:
      raise McpError("MCP servers need the package mcp: pip install 'grpo-jax[mcp]'") from error
    self._thread.start()
    listed = asyncio.run_coroutine_threadsafe(self._list(), self._loop).result()
    known = {each["name"]: each for each in listed}
    counts = Counter(each["name"] for each in listed)
    names = self._options.tools or list(known)
    for name in names:
      if name not in known:
        raise McpError(
          f"the MCP server {self._name!r} has no tool {name!r}{registry.nearest(name, known)};"
          f" there are: {redaction.shown(', '.join(known)) or 'none'}"
        )
      if counts[name] > 1:
        raise McpError(
          f"the MCP server {self._name!r} lists {counts[name]} tools named {name!r}, and a call"
          " could mean any of them; its setting `tools` can name others"
        )
    return [self._tool(known[name]) for name in names]

  def close(self) -> None:
    """Ends the server and the thread."""
    if not self._thread.is_alive():
      self._loop.close()
      return
    with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
      asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_S)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CLOSE_S)
    if not self._thread.is_alive():
      self._loop.close()

  def _tool(self, listed: Mapping[str, Any]) -> Tool:
    name = listed["name"]

    async def run(arguments: Mapping[str, Any]) -> Any:
      return await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)
      )

    prefix = self._options.prefix
    try:
      return Tool(f"{prefix}{name}", listed["description"], listed["parameters"], run)
    except ValueError as error:
      raise McpError(f"the MCP server {self._name!r}: {error}") from error

  async def _list(self) -> list[dict[str, Any]]:
    try:
      async with asyncio.timeout(self._options.start_timeout_s):
        connection = await self._connected()
        return await connection.tools()
    except TimeoutError as error:
      seconds = self._options.start_timeout_s
      raise self._unusable(f"did not list its tools within {seconds:g} s") from error
    except McpError:
      raise
    except Exception as error:  # of the package mcp, or of the server.
      reason = redaction.shown(f"{type(error).__name__}: {error}")
      raise self._unusable(f"cannot be used: {reason}") from error

  def _unusable(self, why: str) -> McpError:
    log = self._options.log
    hint = f"its standard error is in {log}" if log else "set its `log` to see its standard error"
    return McpError(
      f"the MCP server {self._name!r} ({' '.join(self._options.command)}) {why}; {hint}"
    )

  async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
    connection = await self._connected()
    try:
      return await connection.call(name, arguments)
    except asyncio.CancelledError:  # given up, or out of time: the server may hang.
      if not connection.is_broken and connection.suspect is None:
        connection.suspect = asyncio.get_running_loop().create_task(self._probe(connection))
      raise

  async def _probe(self, connection: "_Connection") -> None:
    """Ends a connection whose server does not answer; the next call starts the server again."""
    if await connection.answers(_PING_S):
      connection.suspect = None
    else:
      await connection.close()

  async def _connected(self) -> "_Connection":
    """Returns a connection that works, as far as is known."""
    async with self._starting:
      if self._connection is not None and self._connection.suspect is not None:
        await asyncio.wait((self._connection.suspect,))
      if self._connection is not None and not self._connection.is_broken:
        await self._connection.open()
        return self._connection
      if self._connection is not None:
        await self._connection.close()
      if self._starts >= _MOST_STARTS:
        raise ToolError(f"the MCP server {self._name!r} has ended {self._starts} times")
      self._starts += 1
      self._connection = _Connection(self._options)
      await self._connection.open()
      return self._connection

  async def _end(self) -> None:
    if self._connection is not None:
      await self._connection.close()


class _Connection:
  """One process of a server, and the session with it. Used in one event loop."""

  def __init__(self, options: ServerOptions):
    self._options = options
    self._session: Any = None
    self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    self._stop = asyncio.Event()
    self._task = asyncio.create_task(self._hold())
    self.suspect: asyncio.Task[None] | None = None

  @property
  def is_broken(self) -> bool:
    """Whether no more calls can be made."""
    return self._task.done() or self._stop.is_set()

  async def open(self) -> None:
    """Waits until the server is ready."""
    await asyncio.shield(self._ready)

  async def tools(self) -> list[dict[str, Any]]:
    """Returns the tools of the server: name, description and parameters."""
    found: list[dict[str, Any]] = []
    cursor = None
    for _ in range(_MOST_PAGES):
      page = await self._page(cursor)
      for tool in page["tools"]:
        parameters = tool.get("inputSchema") or {"type": "object", "properties": {}}
        text = tool.get("description") or tool.get("title") or ""
        found.append({"name": tool["name"], "description": text, "parameters": parameters})
      cursor = page.get("nextCursor")
      if not cursor:
        break
    return found

  async def _page(self, cursor: str | None) -> dict[str, Any]:
    from mcp.types import PaginatedRequestParams

    asked = {} if cursor is None else {"params": PaginatedRequestParams(cursor=cursor)}
    return (await self._session.list_tools(**asked)).model_dump(by_alias=True, mode="json")

  async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the result of a call as text.

    Raises:
      ToolError: The tool reports an error, or the server has ended.
    """
    call = asyncio.ensure_future(self._session.call_tool(name, dict(arguments)))
    try:
      await asyncio.wait((call, self._task), return_when=asyncio.FIRST_COMPLETED)
      if not call.done():
        raise ToolError("the server of this tool has ended")
    finally:
      call.cancel()
    error = call.exception()
    if error is not None:
      if not await self.answers(_PING_S):
        self._stop.set()
        raise ToolError("the server of this tool has ended") from error
      raise ToolError(f"{name}: {error}") from error
    found = call.result().model_dump(by_alias=True, mode="json")
    text = _text_of(found)
    if found.get("isError"):
      raise ToolError(text)
    return text

  async def answers(self, within_s: float) -> bool:
    """Returns whether the server answers a ping in time."""
    try:
      async with asyncio.timeout(within_s):
        await self._session.send_ping()
    except Exception:  # whatever the package mcp raises for a lost connection.
      return False
    return True

  async def close(self) -> None:
    """Ends the server."""
    self._stop.set()
    await asyncio.wait((self._task,))
    if self.suspect is not None and self.suspect is not asyncio.current_task():
      self.suspect.cancel()

  async def _hold(self) -> None:
    """Holds the session open; contexts of the package mcp must be left by the task that entered."""
    try:
      await self._run()
    except BaseException as error:
      if not self._ready.done():
        self._ready.set_exception(_innermost(error))
        return
      if isinstance(error, asyncio.CancelledError):
        raise
    finally:
      if not self._ready.done():
        self._ready.set_exception(ToolError("the server ended before it was ready"))
      self._ready.exception()  # it is not lost if nobody waits for it.

  async def _run(self) -> None:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    options = self._options
    # It logs a traceback for every line that is not JSON.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL + 1)
    parameters = StdioServerParameters(
      command=sys.executable,
      args=["-I", guard.__file__, "--grace", "0", "--", *options.command],
      env={
        **{name: os.environ[name] for name in options.inherit if name in os.environ},
        **options.environment,
      },
      cwd=options.folder,
      encoding_error_handler="replace",
    )
    async with contextlib.AsyncExitStack() as stack:
      log = stack.enter_context(open(options.log or os.devnull, "a"))
      streams = await stack.enter_async_context(stdio_client(parameters, errlog=log))
      self._session = await stack.enter_async_context(ClientSession(*streams))
      for method in ("_validate_tool_result", "validate_tool_result"):  # of mcp 1, and of mcp 2.
        setattr(self._session, method, _accepted)
      opening = asyncio.ensure_future(self._session.initialize())
      stopping = asyncio.ensure_future(self._stop.wait())
      stack.callback(stopping.cancel)
      stack.callback(opening.cancel)
      await asyncio.wait(
        (opening, stopping), return_when=asyncio.FIRST_COMPLETED, timeout=options.start_timeout_s
      )
      if not stopping.done():
        if not opening.done():
          raise TimeoutError(f"it was not ready within {options.start_timeout_s:g} s")
        opening.result()
        self._ready.set_result(None)
        await stopping


async def _accepted(name: str, result: Any) -> None:
  """Replaces the check of a result by a schema of the server, which the package mcp makes.

  A regular expression in it can take exponential time, and no other thread runs meanwhile.
  """


def _innermost(error: BaseException) -> BaseException:
  """Returns the one error in groups of errors."""
  while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
    error = error.exceptions[0]
  return error


def _text_of(found: Mapping[str, Any]) -> str:
  """Returns a result as text; parts that are not text are named."""
  parts = []
  for part in found.get("content") or ():
    kind = part.get("type")
    resource = part.get("resource") or {}
    text = part.get("text") if kind == "text" else resource.get("text")
    parts.append(text if isinstance(text, str) else f"[{kind}: {part.get('uri') or 'not text'}]")
  if not parts and found.get("structuredContent") is not None:
    return as_text(found["structuredContent"])
  return "\n".join(parts)
