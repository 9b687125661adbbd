"""Renders chat templates in a worker process that holds no secrets and can be killed.

A template is a program that comes with a model. Jinja's sandbox denies it access to files and to
Python's internals, but does not stop it from using all memory or running forever.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.errors import ExpectedFailure
from grpo_jax.values import json_text

_WORKER = pathlib.Path(__file__).with_name("worker.py")
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")  # environment variables to keep.
_START_S = 120.0  # time to start and compile the template, in seconds.


class TemplateError(ExpectedFailure, ValueError):
  """A chat template cannot be used: it is broken, or exceeds a limit."""


class TemplateRefusal(TemplateError):
  """A chat template rejects a conversation, or fails on it; others may work."""


class ConversationTooLarge(TemplateRefusal):
  """A conversation is larger than a template may receive."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """The resources that a template may use for one conversation."""

  memory_mib: int = 2048  # address space of the worker.
  cpu_s: float = 10.0  # processor time, in seconds.
  wall_s: float = 120.0  # wall time, in seconds; generous, for a busy machine.
  input_bytes: int = 256 << 20  # size of the conversation as JSON.
  characters: int = 64 << 20  # length of the template's output.


@dataclasses.dataclass(frozen=True)
class Rendered:
  """The output of a template."""

  text: str  # cut to the requested number of characters.
  characters: int  # number of characters written, at least; more than in `text` if that is cut.


class Renderer:
  """One chat template, and the process that renders it; the process starts when first needed."""

  def __init__(self, template: str, *, where: str, limits: Limits | None = None):
    """Describes the renderer.

    Args:
      template: Jinja source of the template.
      where: Place of the template, for errors: a file.
      limits: Limits for one conversation; None: the defaults.
    """
    self._template = template
    self._where = where
    self._limits = limits or Limits()
    self._lock = threading.Lock()
    self._process: _Process | None = None

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    max_characters: int | None = None,
  ) -> Rendered:
    """Renders a conversation.

    Args:
      messages: At least one message; values that JSON lacks are replaced by the name of their type.
      variables: Further variables of the template, such as `add_generation_prompt`.
      max_characters: Length to which the text is cut; None: more than the limit is an error.

    Raises:
      TemplateRefusal: The template rejects the conversation, or fails on it.
      TemplateError: The template is broken, or uses more time or memory than allowed.
    """
    if not messages:
      raise TemplateRefusal(f"{self._where}: a conversation needs at least one message")
    limit = self._limits.characters
    limit = limit if max_characters is None else min(limit, max_characters)
    request = {
      "messages": [dict(with_objects(message, self._where)) for message in messages],
      "variables": dict(variables),
      "limit": limit,
    }
    body = _encoded(request)
    if len(body) > self._limits.input_bytes:
      raise ConversationTooLarge(
        f"{self._where}: the conversation has {len(body)} bytes; at most"
        f" {self._limits.input_bytes} are rendered"
      )
    with self._lock:
      answer = self._answer(body, 4 * limit)
    found = Rendered(answer["text"], answer["characters"])
    if found.characters > limit and max_characters is None:
      raise TemplateError(f"{self._where}: the chat template writes more than {limit} characters")
    return found

  def close(self) -> None:
    """Ends the process; the next call starts another."""
    with self._lock:
      self._end()

  def _answer(self, body: bytes, max_bytes: int) -> dict[str, Any]:
    """Sends a conversation to the process, which is started if it is not running."""
    if self._process is None:
      self._process = _Process(self._limits)
      try:
        self._checked(_encoded({"template": self._template}), 0, _START_S)
      except TemplateRefusal as error:  # it has not received a conversation yet.
        self._end()
        raise TemplateError(str(error)) from error
    return self._checked(body, max_bytes, self._limits.wall_s)

  def _checked(self, body: bytes, max_bytes: int, wall_s: float) -> dict[str, Any]:
    """Returns an answer that does not report a failure."""
    process = self._process
    assert process is not None
    try:
      answer = process.ask(body, max_bytes + (1 << 20), time.monotonic() + wall_s)
    except (EOFError, BrokenPipeError) as error:
      self._end()
      raise TemplateError(f"{self._where}: the chat template {self._fate(process)}") from error
    except TimeoutError as error:
      self._end()
      raise TemplateError(
        f"{self._where}: the chat template takes more than {wall_s:g} s"
      ) from error
    except BaseException:  # part of an answer may be left in the pipe.
      self._end()
      raise
    if "refused" in answer:
      raise TemplateRefusal(f"{self._where}: the chat template fails: {answer['refused']}")
    for kind in ("invalid", "limit"):
      if kind in answer:
        self._end()
        words = "is not valid Jinja: " if kind == "invalid" else ""
        raise TemplateError(f"{self._where}: the chat template {words}{answer[kind]}")
    return answer

  def _fate(self, process: "_Process") -> str:
    """Returns how a process has ended."""
    code = process.exit_code
    if code == -signal.SIGPROF:
      return f"takes more than {self._limits.cpu_s:g} s of processor time"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"ended its process ({how}; it may use {self._limits.memory_mib} MiB)"

  def _end(self) -> None:
    if self._process is not None:
      self._process.end()
      self._process = None


def with_objects(message: Any, where: str = "the conversation") -> Any:
  """Returns a message whose tool calls have objects as arguments, as templates expect them.

  Like in SGLang and vLLM, the arguments may be the JSON text of an object.

  Args:
    message: Message; other values are returned unchanged.
    where: Place of the conversation or of its template, for errors.

  Raises:
    TemplateRefusal: The text is not JSON, is that of another value, or is nested too deeply.
  """
  calls = message.get("tool_calls") if isinstance(message, Mapping) else None
  if not isinstance(calls, list | tuple):
    return message
  return {**message, "tool_calls": [_with_object(call, where) for call in calls]}


def _with_object(call: Any, where: str) -> Any:
  function = call.get("function") if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
    return call
  try:
    arguments = json_text.parsed_object(text) if text.strip() else {}
  except ValueError as error:
    message = f"the arguments of a tool call are not a JSON object, {text[:60]!r}: {error}"
    raise TemplateRefusal(f"{where}: {message}") from error
  return {**call, "function": {**function, "arguments": arguments}}


class _Process:
  """A worker process and the two pipes to it."""

  def __init__(self, limits: Limits):
    memory, cpu_s = str(limits.memory_mib << 20), str(limits.cpu_s)
    popen = subprocess.Popen(
      [sys.executable, "-I", str(_WORKER), memory, cpu_s],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      bufsize=0,
      cwd="/",
      start_new_session=True,  # Ctrl-C is handled by the trainer only.
      env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
    )
    self._popen = popen
    self.end = weakref.finalize(self, _end, popen)  # runs at the interpreter's exit as well.

  @property
  def exit_code(self) -> int:
    """Exit code of the process, which has ended: negative for a signal."""
    return self._popen.wait()

  def ask(self, body: bytes, max_bytes: int, deadline: float) -> dict[str, Any]:
    """Sends a request and returns the answer.

    Raises:
      TimeoutError: There is no answer in time.
      EOFError, BrokenPipeError: The process has died, or its answer is malformed.
    """
    assert self._popen.stdin is not None and self._popen.stdout is not None
    self._write(struct.pack("<I", len(body)) + body, deadline)
    (length,) = struct.unpack("<I", self._read(4, deadline))
    if length > max_bytes:
      self._popen.kill()
      raise EOFError
    answer = json.loads(self._read(length, deadline).decode("utf-8", "surrogatepass"))
    return answer

  def _write(self, data: bytes, deadline: float) -> None:
    assert self._popen.stdin is not None
    descriptor = self._popen.stdin.fileno()
    if len(data) <= _PIPE_BYTES:  # the worker is reading, and the pipe is empty.
      self._popen.stdin.write(data)
      return
    os.set_blocking(descriptor, False)
    rest = memoryview(data)
    try:
      while rest:
        _wait(descriptor, selectors.EVENT_WRITE, deadline)
        rest = rest[os.write(descriptor, rest) :]
    finally:
      os.set_blocking(descriptor, True)

  def _read(self, size: int, deadline: float) -> bytes:
    assert self._popen.stdout is not None
    pieces, missing = [], size
    while missing:
      _wait(self._popen.stdout.fileno(), selectors.EVENT_READ, deadline)
      piece = os.read(self._popen.stdout.fileno(), min(missing, 1 << 20))
      if not piece:
        raise EOFError
      pieces.append(piece)
      missing -= len(piece)
    return b"".join(pieces)


def _wait(descriptor: int, event: int, deadline: float) -> None:
  with selectors.PollSelector() as selector:
    selector.register(descriptor, event)
    if not selector.select(max(0.0, deadline - time.monotonic())):
      raise TimeoutError


def _end(popen: subprocess.Popen[bytes]) -> None:
  popen.kill()
  popen.wait()
  for pipe in (popen.stdin, popen.stdout):
    if pipe is not None:
      with contextlib.suppress(OSError):
        pipe.close()


def _encoded(request: Mapping[str, Any]) -> bytes:
  text = json.dumps(request, ensure_ascii=False, default=_plain)
  return text.encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
  """Returns a representation of a value that JSON lacks."""
  item = getattr(value, "item", None)  # NumPy's numbers.
  if callable(item) and getattr(value, "shape", None) == ():
    return item()
  return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


_PIPE_BYTES = 1 << 15  # half of a pipe's capacity: written without waiting.
