"""A process that calls one function again and again. Run as a file, never imported.

    python worker.py GRADER.py MEMORY_BYTES

Nothing of the package is imported, JAX least of all: a worker starts in the time that
the grader's own libraries take. Requests come pickled on standard input, from the trainer
alone: (seconds, function name, arguments). Answers go out as JSON, so that nothing that a
model wrote is ever unpickled. Both are preceded by their length, 4 bytes.
"""

import importlib.util
import json
import logging
import os
import pickle
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

_GRACE_S = 5.0  # beyond the time-out: the trainer kills first, unless it is dead.


def main(grader: str, memory_bytes: str) -> None:
  """Serves requests until standard input ends.

  Args:
    grader: path of the Python file that holds the functions.
    memory_bytes: limit of the address space; 0: none.
  """
  requests = os.fdopen(os.dup(0), "rb")
  answers = os.fdopen(os.dup(1), "wb")
  _silence()
  if int(memory_bytes):
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
  try:
    functions = _load(grader)
  except Exception as error:
    _send(answers, {"error": f"{type(error).__name__}: {error}"})
    return
  _send(answers, {"value": sorted(sys.modules)})
  while header := requests.read(4):
    seconds, name, arguments = pickle.loads(requests.read(*struct.unpack("<I", header)))
    # SIGALRM's default ends the process, whatever it is in: the last guard against a
    # worker that spins on after the trainer has died.
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_S)
    answer = _call(functions, name, arguments)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send(answers, answer)


def _call(functions: dict[str, Any], name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
  try:
    return {"value": functions[name](*arguments)}
  except Exception as error:
    return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _load(path: str) -> dict[str, Any]:
  spec = importlib.util.spec_from_file_location("grader", path)
  if spec is None or spec.loader is None:
    raise ImportError(f"{path} is no Python file")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return vars(module)


def _silence() -> None:
  """Points the standard streams to nowhere: libraries print, and answers must not mix."""
  nowhere = os.open(os.devnull, os.O_RDWR)
  for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
  logging.disable(logging.CRITICAL)


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
  body = json.dumps(answer).encode()
  answers.write(struct.pack("<I", len(body)) + body)
  answers.flush()


if __name__ == "__main__":
  main(*sys.argv[1:])
