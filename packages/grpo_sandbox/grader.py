"""The sandboxed process of a grader: calls one function on what a model wrote.

The functions are loaded once, before any text of a model arrives, and called in forks, so that no
text can affect the next one.
"""

import importlib.util
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

from grpo_sandbox import candidate, wire

MAX_REPLY = 1 << 20
_MESSAGE = 1000  # characters of an error that are sent.

Functions = dict[str, Callable[..., Any]]


def load(path: str) -> Functions:
  """Returns the functions of a Python file, after calling its `prepare`, if it has one.

  Raises:
    Exception: Anything that the file raises when it is loaded.
  """
  spec = importlib.util.spec_from_file_location("grader", path)
  if spec is None or spec.loader is None:
    raise ImportError(f"{path} is not a Python file")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  functions = {name: each for name, each in vars(module).items() if callable(each)}
  functions.get("prepare", lambda: None)()
  logging.disable(logging.CRITICAL)
  return {"loaded_modules": lambda: sorted(sys.modules), **functions}


def answer(functions: Functions) -> None:
  """Reads a request from standard input, and writes what the function returned.

  The request comes from the trainer only, and is pickled: (seconds, function, arguments). The
  reply is JSON, so that nothing that a model wrote is ever unpickled: {"value": …} or
  {"error": message}.
  """
  seconds, name, arguments = pickle.loads(_read_all())
  channel = os.dup(1)
  for stream in (0, 1):  # libraries print.
    candidate.silence(stream)
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process, whatever it is doing.
  reply = _called(functions[name], arguments)
  signal.setitimer(signal.ITIMER_REAL, 0)
  wire.send(channel, reply, MAX_REPLY)
  os._exit(0)


def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
  try:
    reply = {"value": function(*arguments)}
    json.dumps(reply)
    return reply
  except Exception as error:
    return {"error": f"{type(error).__name__}: {error}"[:_MESSAGE]}


def _read_all() -> bytes:
  pieces = []
  while piece := os.read(0, 1 << 20):
    pieces.append(piece)
  return b"".join(pieces)
