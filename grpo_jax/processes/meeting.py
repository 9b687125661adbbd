"""Where the processes of a run meet before JAX connects them.

JAX's own way to join aborts from C++ if a process does not come, comes twice, cannot be reached or
cannot listen. So process 0 first listens at the coordinator's address itself, the others introduce
themselves, and all get the same answer: the hosts of all processes, or what is wrong. Then JAX's
coordination service takes over the port.
"""

import contextlib
import dataclasses
import json
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_jax.errors import ExpectedFailure
from grpo_jax.interrupts import Stopped

POLL_S = 0.25  # time between two attempts to connect, and two looks at `stop`.
LENGTH = 4096  # most bytes of an introduction.


class JoinError(ExpectedFailure, TimeoutError):
  """The processes of a run could not join each other."""


class WrongStartError(ExpectedFailure, ValueError):
  """The processes of a run were started with options that contradict each other."""

  exit_code = 2


@dataclasses.dataclass(frozen=True)
class Place:
  """One process among those of a run."""

  host: str  # of the coordinator.
  port: int
  processes: int
  index: int

  @property
  def named(self) -> str:
    """Returns "process 1 of 2 (host)"."""
    return f"process {self.index} of {self.processes} ({socket.gethostname()})"

  @property
  def address(self) -> str:
    """Returns "host:port"."""
    return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def meet(place: Place, *, join_s: float, stop: Any = False) -> list[str]:
  """Waits until all processes are there; returns the names of their hosts.

  Args:
    place: This process.
    join_s: Longest wait, in seconds.
    stop: Flag that becomes true when the run is asked to end.

  Raises:
    JoinError: A process did not come in time, cannot be reached, or cannot listen.
    WrongStartError: Two processes have one number, or they disagree on how many there are.
    Stopped: The run is asked to end.
  """
  work = _receive if place.index == 0 else _introduce
  return work(place, time.monotonic() + join_s, join_s, stop)


# --- process 0 ---


def _receive(place: Place, deadline: float, join_s: float, stop: Any) -> list[str]:
  with _listening(place) as listener, contextlib.ExitStack() as connections:
    guests: dict[socket.socket, dict[str, Any]] = {}
    own = {"index": 0, "processes": place.processes, "host": socket.gethostname()}
    try:
      while len({guest["index"] for guest in guests.values()}) < place.processes - 1:
        _check(stop)
        if time.monotonic() > deadline:
          raise JoinError(_absent(place, guests, join_s))
        for ready in select.select([listener, *guests], [], [], POLL_S)[0]:
          if ready is not listener:
            raise JoinError(f"process {guests[ready]['index']} ({guests[ready]['host']}) ended")
          connection = connections.enter_context(listener.accept()[0])
          guest = _introduction(connection)
          if guest is not None:
            guests[connection] = guest
            _check_guest(guest, [own, *list(guests.values())[:-1]])
    except (JoinError, WrongStartError) as error:
      _answer(guests, {"error": str(error), "exit_code": error.exit_code})
      raise
    except Stopped:
      _answer(guests, {"stopped": True})
      raise
    hosts = {0: own["host"], **{guest["index"]: guest["host"] for guest in guests.values()}}
    listed = [hosts[number] for number in range(place.processes)]
    _answer(guests, {"hosts": listed})
    return listed


@contextlib.contextmanager
def _listening(place: Place) -> Iterator[socket.socket]:
  try:
    if socket.has_dualstack_ipv6():
      listener = socket.create_server(
        ("", place.port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
      )
    else:
      listener = socket.create_server(("", place.port), backlog=1024)
  except OSError as error:
    raise JoinError(
      f"{place.named} cannot listen at port {place.port} of the coordinator's address"
      f" {place.address}: {error.strerror}; does another process 0 or another program have it?"
    ) from error
  with listener:
    yield listener


def _introduction(connection: socket.socket) -> dict[str, Any] | None:
  """Returns what a process says of itself; None if that is not one of a run."""
  connection.settimeout(5)
  try:
    found = json.loads(connection.makefile("rb").readline(LENGTH))
    return found if isinstance(found, dict) and found.get("run") == "grpo_jax" else None
  except (OSError, ValueError):
    return None


def _check_guest(guest: Mapping[str, Any], others: list[dict[str, Any]]) -> None:
  """Raises WrongStartError if a process contradicts those that came before."""
  first = others[0]
  if guest["processes"] != first["processes"]:
    raise WrongStartError(
      f"distributed.processes is {first['processes']} in process 0 ({first['host']}) and"
      f" {guest['processes']} in process {guest['index']} ({guest['host']})"
    )
  for other in others:
    if other["index"] == guest["index"]:
      raise WrongStartError(
        f"two processes have the number {guest['index']} (distributed.index): one on"
        f" {other['host']}, one on {guest['host']}"
      )


def _absent(place: Place, guests: Mapping[Any, Mapping[str, Any]], join_s: float) -> str:
  came = {0, *(guest["index"] for guest in guests.values())}
  missing = [number for number in range(place.processes) if number not in came]
  listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
  noun = "processes" if len(missing) > 1 else "process"
  return (
    f"{noun} {listed} of {place.processes} did not come to process 0 at {place.address} on"
    f" {socket.gethostname()} within {join_s:g} s (distributed.join_s)"
  )


def _answer(guests: Mapping[socket.socket, Any], answer: Mapping[str, Any]) -> None:
  """Answers all, and waits until they have hung up: then the port can be used again at once."""
  for connection in guests:
    with contextlib.suppress(OSError):
      connection.sendall(json.dumps(answer).encode() + b"\n")
  for connection in guests:
    with contextlib.suppress(OSError):
      connection.settimeout(5)
      connection.recv(1)


# --- the others ---


def _introduce(place: Place, deadline: float, join_s: float, stop: Any) -> list[str]:
  with _connected(place, deadline, join_s, stop) as connection:
    sent = {
      "run": "grpo_jax",
      "index": place.index,
      "processes": place.processes,
      "host": socket.gethostname(),
      "pid": os.getpid(),
    }
    answer = _asked(connection, sent, place, stop)
  if answer.get("stopped"):
    raise Stopped
  if "error" in answer:
    raise (WrongStartError if answer["exit_code"] == WrongStartError.exit_code else JoinError)(
      answer["error"]
    )
  return answer["hosts"]


def _connected(place: Place, deadline: float, join_s: float, stop: Any) -> socket.socket:
  while True:
    _check(stop)
    try:
      return socket.create_connection((place.host, place.port), timeout=5)
    except OSError as error:
      if time.monotonic() > deadline:
        raise JoinError(
          f"{place.named} did not reach process 0 at {place.address} within {join_s:g} s"
          f" (distributed.join_s): {error.strerror or error}"
        ) from error
    time.sleep(POLL_S)


def _asked(
  connection: socket.socket, sent: Mapping[str, Any], place: Place, stop: Any
) -> dict[str, Any]:
  """Returns process 0's answer; it comes when all are there, or the time of process 0 is over."""
  try:
    connection.sendall(json.dumps(sent).encode() + b"\n")
    while not select.select([connection], [], [], POLL_S)[0]:
      _check(stop)
    connection.settimeout(5)
    return json.loads(connection.makefile("rb").readline())
  except (OSError, ValueError) as error:
    raise JoinError(
      f"{place.named}: process 0 at {place.address} ended while the processes joined it, or is not"
      " of this run"
    ) from error


def _check(stop: Any) -> None:
  if stop:
    raise Stopped
