"""The place of a process among those of its run, and why processes do not find each other."""

import dataclasses
import socket

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
