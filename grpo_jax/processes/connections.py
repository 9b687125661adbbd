"""Where the processes of a run connect, and the proofs of who connects.

Process 0 listens at the addresses of the coordinator, and at no others.

All processes of a start have a key, made from the secret of the run. Each side of a connection
sends a random number, and signs what follows with the key, its role and both numbers
(HMAC-SHA256). So a recorded message is worth nothing on another connection, and what one side has
signed is worth nothing if it is sent back. Content is not encrypted.
"""

import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence

from grpo_jax.errors import ExpectedFailure


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
  is_one_host: bool = False  # whether all processes are known to be on this host.

  @property
  def named(self) -> str:
    """Returns "process 1 of 2 (host)"."""
    return f"process {self.index} of {self.processes} ({socket.gethostname()})"

  @property
  def address(self) -> str:
    """Returns "host:port"."""
    return joined(self.host, self.port)


def joined(host: str, port: int) -> str:
  """Returns "host:port", with brackets around an IPv6 address."""
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parsed(address: str, named: str = "distributed.coordinator") -> tuple[str, int]:
  """Returns the host and the port of "host:port" or "[2001:db8::1]:port".

  Args:
    address: Address of process 0.
    named: Option or variable with the address, for the message.

  Raises:
    WrongStartError: The address has another form.
  """
  host, _, port = address.rpartition(":")
  bare = host.removeprefix("[").removesuffix("]")
  is_wrong = ":" in bare and not host.startswith("[")
  is_number = port.isascii() and port.isdigit() and 0 < int(port) < 65536
  if is_wrong or not bare or not is_number:
    raise WrongStartError(
      f"{named} must be the address of process 0 with a port, such as node1:12345, got {address!r}"
    )
  return bare, int(port)


# --- where process 0 listens ---


_log = logging.getLogger(__name__)

RETRY_S = 1.0  # time between two attempts to find the coordinator's name.
_EVERYWHERE = ("0.0.0.0", "::")
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own, for the same purpose.


def listeners(place: Place, deadline: float, check: Callable[[], None]) -> list[socket.socket]:
  """Returns sockets that listen at the coordinator's address.

  A name that is not known yet, or not yet as one of this host, as of a pod that has just started,
  is tried until the deadline.

  Args:
    place: Process 0.
    deadline: End of the wait, by the monotonic clock.
    check: Function that raises if the run is asked to end.

  Raises:
    JoinError: The address is not one of this host, or taken.
  """
  given = os.environ.get(_BIND_VARIABLE)
  host, port = parsed(given, _BIND_VARIABLE) if given else (place.host, place.port)
  has_warned = False
  while True:
    check()
    try:
      return _opened(_addresses(host, port, place), port)
    except OSError as error:
      reason = _explained(error, host, port, place)
      may_change = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
      if not may_change or is_address(host) or time.monotonic() > deadline:
        raise JoinError(reason) from error
    except UnicodeError as error:
      raise JoinError(f"{place.named}: {host!r} is not the name of a host: {error}") from error
    if not has_warned:
      _log.warning("%s (trying again for distributed.join_s)", reason)
      has_warned = True
    time.sleep(RETRY_S)


def _addresses(host: str, port: int, place: Place) -> Sequence[str]:
  """Returns the addresses of a name; all of this host if the name is that of the host itself only.

  Debian's /etc/hosts gives a host its own name as 127.0.1.1, where no other host reaches it.
  """
  if host in _EVERYWHERE:
    return _EVERYWHERE
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
  is_name = not is_address(host) and host.partition(".")[0].lower() != "localhost"
  if not is_name or place.is_one_host or not all(map(is_loopback, addresses)):
    return addresses
  _log.warning(
    "%s: %s is %s on this host, where other hosts cannot reach it: listening at all addresses until"
    " the processes have met; set distributed.coordinator to the address that the others reach",
    place.named,
    host,
    " and ".join(addresses),
  )
  return _EVERYWHERE


def _opened(addresses: Sequence[str], port: int) -> list[socket.socket]:
  """Returns sockets that listen at those of the addresses that are this host's, at least one."""
  opened: list[socket.socket] = []
  missing: OSError | None = None
  with contextlib.ExitStack() as stack:
    for address in addresses:
      family = socket.AF_INET6 if ":" in address else socket.AF_INET
      try:
        listener = socket.create_server((address, port), family=family, backlog=1024)
      except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
          raise
        missing = error
      else:
        opened.append(stack.enter_context(listener))
    if missing is not None and not opened:
      raise missing
    stack.pop_all()
  return opened


def _explained(error: OSError, host: str, port: int, place: Place) -> str:
  at = f"{place.named} cannot listen at port {port} of the coordinator's address {place.address}"
  if isinstance(error, socket.gaierror):
    return f"{at}: {host} is not known on this host: {error.strerror}"
  if error.errno == errno.EADDRNOTAVAIL:
    return (
      f"{at}: {host} is not an address of this host. distributed.coordinator is the address of the"
      f" host of process 0; where that is translated on the way (NAT, a service), {_BIND_VARIABLE}="
      f"ADDRESS:PORT says where to listen, with 0.0.0.0 for all addresses"
    )
  return (
    f"{at}: {os.strerror(error.errno or 0)}; does another process 0 or another program have it?"
  )


def for_service(arrivals: Collection[str]) -> tuple[str, str]:
  """Returns where JAX's service listens, and the address that processes of this host use for it.

  Args:
    arrivals: Addresses of this host at which the other processes have arrived.

  Returns:
    The address at which all can reach it; "::" and "" if there are several such addresses.
  """
  outside = sorted(each for each in arrivals if not is_loopback(each))
  if len(outside) > 1:
    return "::" if socket.has_ipv6 else "0.0.0.0", ""
  found = outside[0] if outside else min(arrivals)
  return found, found


def is_loopback(address: str) -> bool:
  """Returns whether an address is reached from this host only."""
  return ipaddress.ip_address(address).is_loopback


def is_address(host: str) -> bool:
  """Returns whether a host is given as a number, and not by its name."""
  try:
    return bool(ipaddress.ip_address(host))
  except ValueError:
    return False


# --- who connects ---


SECRET_VARIABLE = "GRPO_JAX_RUN_SECRET"  # environment variable with the secret of a run.
PROTOCOL = 2  # changes whenever what the processes say to each other does.
_GREETING = re.compile(rb"grpo_jax %d ([0-9a-f]{64})" % PROTOCOL)


@dataclasses.dataclass(frozen=True)
class Key:
  """Key of one start of a run.

  Attributes:
    secret: Secret of the run; "": it has none, and anyone can make its proofs.
    start: Name of the start by its launcher, such as a job with the number of its restarts.
  """

  secret: str = dataclasses.field(default="", repr=False)
  start: str = ""

  @property
  def described(self) -> str:
    """Returns "has the secret of VARIABLE", or that there is none."""
    if self.secret:
      return f"has the secret of {SECRET_VARIABLE}"
    return f"has no secret, as {SECRET_VARIABLE} is not set"

  def proof(self, message: bytes) -> bytes:
    """Returns the proof that the owner of this key has written a message."""
    key = hmac.digest(os.fsencode(self.secret), os.fsencode(self.start), "sha256")
    return hmac.digest(key, message, "sha256").hex().encode()


@dataclasses.dataclass(frozen=True)
class MessageSigner:
  """What both ends of a connection sign their messages with.

  Attributes:
    key: Key of the run.
    numbers: Random numbers of the process that has connected and of process 0.
  """

  key: Key
  numbers: tuple[bytes, bytes]

  def signed(self, role: str, content: bytes) -> bytes:
    """Returns a line with a message and its proof.

    Args:
      role: Kind of message; each is sent in one direction only.
      content: Message, without line breaks.
    """
    return b"%s %s\n" % (self._proof(role, content), content)

  def content(self, role: str, line: bytes) -> bytes | None:
    """Returns the message of a line; None if its proof is wrong."""
    proof, _, content = line.partition(b" ")
    return content if hmac.compare_digest(proof, self._proof(role, content)) else None

  def _proof(self, role: str, content: bytes) -> bytes:
    return self.key.proof(b"\n".join((role.encode(), *self.numbers, content)))


def random_number() -> bytes:
  """Returns a random number for one end of a connection, as 64 hexadecimal digits."""
  return secrets.token_hex(32).encode()


def greeting(own: bytes) -> bytes:
  """Returns the first line that either side sends, with its random number."""
  return b"grpo_jax %d %s\n" % (PROTOCOL, own)


def greeted(line: bytes) -> bytes | None:
  """Returns the random number of a greeting; None if a line is not one of this protocol."""
  match = _GREETING.fullmatch(line)
  return match[1] if match else None
