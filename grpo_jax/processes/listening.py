"""The addresses at which process 0 of a run listens: those of the coordinator, and no others."""

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence

from grpo_jax.processes.places import JoinError, Place, parsed

_log = logging.getLogger(__name__)

RETRY_S = 1.0  # time between two attempts to find the coordinator's name.
_EVERYWHERE = ("0.0.0.0", "::")
_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own, for the same purpose.


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
  given = os.environ.get(_VARIABLE)
  host, port = parsed(given, _VARIABLE) if given else (place.host, place.port)
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
      f" host of process 0; where that is translated on the way (NAT, a service), {_VARIABLE}="
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
