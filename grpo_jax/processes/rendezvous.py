"""Where the processes of a run meet before JAX connects them.

JAX's own way to join aborts from C++ if a process does not come, comes twice, cannot be reached or
cannot listen. So process 0 first listens at the coordinator's address itself, the others introduce
themselves, and all get the same answer: the hosts of all processes, or what is wrong. Then JAX's
coordination service takes over the port.

A connection is that of a stranger until it has proven that it has the key of this start
(`connections.py`). Of strangers, process 0 reads nothing but a random number of fixed length.

  the other process sends    process 0 sends
  a greeting                 a greeting, and the proof that it has the key
  an introduction            for how long it still waits for the others
                             the answer, once all are there

All but the greetings is signed. A process tries again until it has arrived.
"""

import contextlib
import dataclasses
import json
import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import grpo_jax
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import connections
from grpo_jax.processes.connections import JoinError, Place, WrongStartError

_log = logging.getLogger(__name__)

POLL_S = 0.25  # time between two attempts to connect, and two looks at whether to stop.
CONNECT_S = 2.0  # longest time until a connection is made.
PROVE_S = 10.0  # longest time from a connection to the proof that it is of this run.
STRANGERS = 64  # most connections without that proof; the oldest silent one makes room for another.
GRACE_S = 10.0  # time for process 0's answer once process 0 no longer waits.
LENGTH = 1 << 12  # most bytes of a line until a process has arrived.
ANSWER_LENGTH = 1 << 22
TEXT_LENGTH = 4096  # most characters of a message of process 0.
# The answer to anything but a greeting. The first version of this protocol prints its `error`.
_REFUSAL = b'{"error": "process 0 has another version of grpo_jax", "exit_code": 2}\n'


@dataclasses.dataclass(frozen=True)
class RendezvousResult:
  """What a process knows once all have met.

  Attributes:
    hosts: Names of the hosts of all processes.
    service: Host and port of JAX's coordination service, as this process reaches it.
    bind: Address at which process 0 has that service listen; "" in other processes.
    own: Address by which the other processes reach this one; "": it is not known.
  """

  hosts: list[str]
  service: tuple[str, int]
  bind: str = ""
  own: str = ""


@dataclasses.dataclass(frozen=True)
class _Introduction:
  """What a process says of itself."""

  index: int
  processes: int
  host: str
  version: str

  @classmethod
  def of(cls, place: Place) -> "_Introduction":
    return cls(place.index, place.processes, socket.gethostname(), grpo_jax.__version__)

  @classmethod
  def read(cls, content: bytes) -> "_Introduction":
    """Reads an introduction; raises ValueError if it is not one."""
    found = _object(content)
    index, processes, host, version = (found.get(f.name) for f in dataclasses.fields(cls))
    if type(index) is not int or type(processes) is not int or not 0 <= index < processes < 2**31:
      raise ValueError("numbers")
    if not _is_word(host) or not _is_word(version):
      raise ValueError("texts")
    return cls(index, processes, host, version)


def meet(
  place: Place, key: connections.Key, *, join_s: float, stop: Any = False
) -> RendezvousResult:
  """Waits until all processes are there.

  Args:
    place: This process.
    key: Key of this start of the run.
    join_s: Longest wait, in seconds.
    stop: Flag that becomes true when the run is asked to end.

  Raises:
    JoinError: A process did not come in time, cannot be reached, or cannot listen.
    WrongStartError: Two processes have one number, or they disagree on how many there are.
    Stopped: The run is asked to end.
  """

  def check() -> None:
    if stop:
      raise Stopped

  work = _receive if place.index == 0 else _arrive
  return work(place, key, join_s, check)


class _Peer:
  """One end of a connection."""

  def __init__(self, connection: socket.socket, address: str):
    self.connection = connection
    self.address = address  # of the other end.
    self.came_at = time.monotonic()
    # once both sides have sent their numbers.
    self.session: connections.MessageSigner | None = None
    self.introduction: _Introduction | None = None  # once it has proven to be of this run.
    self.limit = LENGTH  # most bytes of a line.
    self._received = b""

  def receive(self) -> None:
    """Receives what has arrived; raises OSError if that is the end."""
    data = self.connection.recv(1 << 16)
    if not data:
      raise ConnectionResetError("the connection was closed")
    self._received += data

  def line(self) -> bytes | None:
    """Returns the next line that has arrived; None if there is none yet.

    Raises:
      OSError: The line is too long.
    """
    line, end, rest = self._received.partition(b"\n")
    if len(line) > self.limit:
      raise OSError("too long a line has arrived")
    if not end:
      return None
    self._received = rest
    return line

  def send(self, role: str, value: Mapping[str, Any]) -> None:
    """Sends a signed message."""
    assert self.session is not None
    self.connection.sendall(self.session.signed(role, json.dumps(value).encode()))


# --- process 0 ---


def _receive(
  place: Place, key: connections.Key, join_s: float, check: Callable[[], None]
) -> RendezvousResult:
  deadline = time.monotonic() + join_s
  with _Reception(place, key, deadline, check) as reception:
    try:
      while len(reception.came()) < place.processes:
        check()
        if time.monotonic() > deadline:
          raise JoinError(reception.absent(join_s))
        reception.step()
    except (JoinError, WrongStartError) as error:
      reception.answer({"error": str(error), "exit_code": error.exit_code})
      raise
    except Stopped:
      reception.answer({"stopped": True})
      raise
    arrivals = {peer.connection.getsockname()[0] for peer in reception.guests}
    bind, for_this_host = connections.for_service(arrivals)
    came = reception.came()
    hosts = [came[number].host for number in range(place.processes)]
    reception.stop_listening()  # JAX's service takes over the port.
    reception.answer({"hosts": hosts, "address": for_this_host})
    return RendezvousResult(
      hosts, (for_this_host or "127.0.0.1", reception.port), bind, for_this_host
    )


class _Reception:
  """The connections of process 0, read side by side."""

  def __init__(
    self, place: Place, key: connections.Key, deadline: float, check: Callable[[], None]
  ):
    self.guests: list[_Peer] = []  # of this run.
    self._strangers: list[_Peer] = []
    self._place, self._key, self._deadline = place, key, deadline
    self._own = _Introduction.of(place)
    self._turned_away = ""  # the last process that looked like one of this run.
    self._listeners = connections.listeners(place, deadline, check)
    self.port = self._listeners[0].getsockname()[1]
    self._selector = selectors.DefaultSelector()
    for listener in self._listeners:
      listener.setblocking(False)
      self._selector.register(listener, selectors.EVENT_READ)

  def __enter__(self) -> "_Reception":
    return self

  def __exit__(self, *_: object) -> None:
    self._selector.close()
    for each in (*self._listeners, *(peer.connection for peer in self._strangers + self.guests)):
      each.close()

  def came(self) -> dict[int, _Introduction]:
    """Returns the processes that are there, by their numbers."""
    others = [peer.introduction for peer in self.guests if peer.introduction]
    return {each.index: each for each in (self._own, *others)}

  def step(self) -> None:
    """Reads what has arrived, for at most `POLL_S`.

    Raises:
      JoinError: A process that was there has ended.
      WrongStartError: A process contradicts the others.
    """
    for ready, _ in self._selector.select(POLL_S):
      if ready.data is None:
        self._accept(ready.fileobj)
      elif ready.data.connection.fileno() >= 0:  # not closed since it was found.
        self._read(ready.data)
    late = time.monotonic() - PROVE_S
    for peer in [each for each in self._strangers if each.came_at < late]:
      self._close(peer)

  def stop_listening(self) -> None:
    """Ends listening, and closes the connections of strangers."""
    for listener in self._listeners:
      listener.close()
    for peer in list(self._strangers):
      self._close(peer)

  def answer(self, answer: Mapping[str, Any]) -> None:
    """Gives all processes that are there the same answer."""
    deadline = time.monotonic() + GRACE_S / 2
    for peer in self.guests:
      with contextlib.suppress(OSError):
        peer.connection.settimeout(max(0.01, deadline - time.monotonic()))
        peer.send("answer", answer)

  def absent(self, join_s: float) -> str:
    """Returns which processes have not come."""
    place, came = self._place, self.came()
    missing = [number for number in range(place.processes) if number not in came]
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    noun = "processes" if len(missing) > 1 else "process"
    return (
      f"{noun} {listed} of {place.processes} did not come to process 0 at {place.address} on"
      f" {self._own.host} within {join_s:g} s (distributed.join_s)"
      + (self._turned_away and f"; {self._turned_away}")
    )

  def _accept(self, listener: Any) -> None:
    if len(self._strangers) >= STRANGERS:
      silent = (peer for peer in self._strangers if peer.session is None)
      self._close(next(silent, self._strangers[0]))
    with contextlib.suppress(OSError):  # it has left, or there are no more file descriptors.
      connection, address = listener.accept()
      connection.setblocking(False)
      peer = _Peer(connection, address[0])
      self._strangers.append(peer)
      self._selector.register(connection, selectors.EVENT_READ, peer)

  def _close(self, peer: _Peer) -> None:
    self._selector.unregister(peer.connection)
    self._strangers.remove(peer)
    peer.connection.close()

  def _read(self, peer: _Peer) -> None:
    if peer.introduction is not None:
      raise JoinError(
        f"process {peer.introduction.index} ({peer.introduction.host}) ended while the processes"
        " joined"
      )
    try:
      peer.receive()
      while peer.introduction is None and (line := peer.line()) is not None:
        self._take(peer, line)
    except BlockingIOError:
      return
    except OSError:
      if peer.session is not None:
        self._turn_away(peer, "did not prove that it is of this start of the run")
      self._close(peer)

  def _take(self, peer: _Peer, line: bytes) -> None:
    """Takes a line of a stranger; raises OSError if the connection is to be closed."""
    if peer.session is None:
      number, own = connections.greeted(line), connections.random_number()
      if number is None:
        if b"grpo_jax" in line:
          self._turn_away(peer, "uses another version of grpo_jax")
        peer.connection.sendall(_REFUSAL)
        raise ConnectionRefusedError
      peer.session = connections.MessageSigner(self._key, (number, own))
      peer.connection.sendall(connections.greeting(own))
      peer.send("process 0", {})
      return
    content = peer.session.content("introduction", line)
    if content is None:
      raise ConnectionRefusedError
    try:
      introduction = _Introduction.read(content)
    except ValueError as error:
      raise ConnectionRefusedError from error
    peer.send("arrived", {"left_s": max(0.0, self._deadline - time.monotonic())})
    self._strangers.remove(peer)
    self.guests.append(peer)
    peer.introduction = introduction
    others = [self._own, *(each.introduction for each in self.guests[:-1] if each.introduction)]
    _check_guest(introduction, others)

  def _turn_away(self, peer: _Peer, reason: str) -> None:
    """Remembers, and logs once, that what may be a process of this run is not let in."""
    is_first = not self._turned_away
    self._turned_away = (
      f"a process at {peer.address} was turned away: it {reason}; this process"
      f" {self._key.described}"
    )
    if is_first:
      _log.warning("%s: %s", self._place.named, self._turned_away)


def _check_guest(guest: _Introduction, others: Sequence[_Introduction]) -> None:
  """Raises WrongStartError if a process contradicts those that came before."""
  first = others[0]
  for name, one, other in (
    ("the version of grpo_jax", first.version, guest.version),
    ("distributed.processes", first.processes, guest.processes),
  ):
    if one != other:
      raise WrongStartError(
        f"{name} is {one} in process 0 ({first.host}) and {other} in process {guest.index}"
        f" ({guest.host})"
      )
  for other in others:
    if other.index == guest.index:
      raise WrongStartError(
        f"two processes have the number {guest.index} (distributed.index): one on {other.host}, one"
        f" on {guest.host}"
      )


# --- the others ---


class _NotArrived(Exception):
  """What answers at the coordinator's address is not process 0 of this start of the run."""


def _arrive(
  place: Place, key: connections.Key, join_s: float, check: Callable[[], None]
) -> RendezvousResult:
  deadline = time.monotonic() + join_s
  turned_away = ""  # why what answers is not process 0: it says more than "no answer".
  logged: set[str] = set()
  while True:
    check()
    try:
      with socket.create_connection((place.host, place.port), timeout=CONNECT_S) as connection:
        peer = _Peer(connection, place.address)
        left_s = _introduce(peer, place, key, check)
        return _answered(peer, place, left_s, check)
    except JoinError:
      raise
    except _NotArrived as error:
      reason = str(error)
      if reason not in logged:
        logged.add(reason)
        _log.warning(
          "%s: %s: %s; trying again for at most %g s (distributed.join_s)",
          *(place.named, place.address, reason, join_s),
        )
      if not turned_away or error.__cause__ is None:  # a lost connection says little.
        turned_away = reason
    except OSError as error:
      reason = error.strerror or str(error)
    except UnicodeError as error:
      raise JoinError(
        f"{place.named}: {place.host!r} is not the name of a host: {error}"
      ) from error
    if time.monotonic() > deadline:
      raise JoinError(
        f"{place.named} did not reach process 0 at {place.address} within {join_s:g} s"
        f" (distributed.join_s): {turned_away or reason}"
      )
    time.sleep(POLL_S)


def _introduce(peer: _Peer, place: Place, key: connections.Key, check: Callable[[], None]) -> float:
  """Introduces this process; returns for how many seconds process 0 still waits for the others."""
  until, own = time.monotonic() + PROVE_S / 2, connections.random_number()
  try:
    peer.connection.sendall(connections.greeting(own))
    number = connections.greeted(_next(peer, until, check))
    if number is None:
      raise _NotArrived("what answers there is not grpo_jax, or another version of it")
    peer.session = connections.MessageSigner(key, (own, number))
    if peer.session.content("process 0", _next(peer, until, check)) is None:
      raise _NotArrived(
        "what answers there is not of this start of the run, or has another secret; this process"
        f" {key.described}"
      )
    peer.send("introduction", dataclasses.asdict(_Introduction.of(place)))
    until = time.monotonic() + 2 * PROVE_S  # by then process 0 has let it in, or hung up.
    content = peer.session.content("arrived", _next(peer, until, check))
  except ConnectionError as error:
    raise _NotArrived("what answers there has closed the connection") from error
  except OSError as error:
    raise _NotArrived(f"what answers there is not process 0: {error}") from error
  with contextlib.suppress(ValueError):
    left_s = _object(content or b"").get("left_s")
    if isinstance(left_s, int | float) and 0 <= left_s < float("inf"):
      return left_s
  raise _NotArrived("what answers there has not let this process in")


def _answered(
  peer: _Peer, place: Place, left_s: float, check: Callable[[], None]
) -> RendezvousResult:
  """Returns process 0's answer; it comes when all are there, or the time of process 0 is over."""
  assert peer.session is not None
  peer.limit = ANSWER_LENGTH
  who = f"{place.named}: process 0 at {place.address}"
  try:
    line = _next(peer, time.monotonic() + left_s + GRACE_S, check)
    answer = _object(peer.session.content("answer", line) or b"")
  except OSError as error:
    raise JoinError(f"{who} ended while the processes joined it: {error}") from error
  except ValueError as error:
    raise JoinError(f"{who} sent an answer that is not one") from error
  match answer:
    case {"stopped": True}:
      raise Stopped
    case {"error": str() as text, "exit_code": 1 | 2 as code} if _is_word(text, TEXT_LENGTH):
      raise (WrongStartError if code == WrongStartError.exit_code else JoinError)(text)
    case {"hosts": list() as hosts, "address": str() as address}:
      is_whole = len(hosts) == place.processes and all(map(_is_word, hosts))
      if is_whole and (not address or connections.is_address(address)):
        return _met(hosts, peer.connection, address)
  raise JoinError(f"{who} sent an answer that is not one")


def _met(hosts: list[str], connection: socket.socket, for_this_host: str) -> RendezvousResult:
  peer, port = connection.getpeername()[:2]
  own = connection.getsockname()[0]
  if connections.is_loopback(peer):  # process 0 is on this host; others may not be.
    peer, own = for_this_host or peer, for_this_host
  return RendezvousResult(hosts, (peer, port), own=own)


def _next(peer: _Peer, until: float, check: Callable[[], None]) -> bytes:
  """Returns the next line; raises OSError if it does not come in time."""
  peer.connection.settimeout(POLL_S)
  while (line := peer.line()) is None:
    check()
    if time.monotonic() > until:
      raise TimeoutError("no answer in time")
    with contextlib.suppress(TimeoutError):
      peer.receive()
  return line


# --- what is read ---


def _object(content: bytes) -> dict[str, Any]:
  """Returns a JSON object; raises ValueError if it is not one."""
  try:
    found = json.loads(content)
  except RecursionError as error:
    raise ValueError("too deeply nested") from error
  if not isinstance(found, dict):
    raise ValueError("not an object")
  return found


def _is_word(value: Any, length: int = 255) -> TypeGuard[str]:
  """Returns whether a value is text of one line, without control characters."""
  return isinstance(value, str) and 0 < len(value) <= length and value.isprintable()
