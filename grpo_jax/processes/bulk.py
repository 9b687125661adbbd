"""Bytes that all processes exchange, from none to gigabytes, with a check of what arrived.

Lengths and digests, and short data with them, go through the key-value store of the coordination
service, which has a time-out that names who is missing. Only when all processes have sent theirs do
long data follow, in pieces, by a collective of the devices, which has no time-out but is many times
as fast.
"""

import base64
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax import processes
from grpo_jax.errors import ExpectedFailure
from grpo_jax.processes import digests, exchanges

# Most bytes of a process that go through the key-value store, whose values one process serves.
SMALL = 1 << 17
PIECE = 1 << 22  # bytes that each process sends at once by a collective.
_WORD = np.dtype(np.uint32)


class DamagedError(ExpectedFailure, RuntimeError):
  """What arrived from another process is not what it sent."""


@exchanges.counted
def exchange_bytes(
  data: bytes, *, what: str, timeout_s: float | None = None
) -> list[bytes | bytearray]:
  """Returns the bytes of all processes, in their order.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    data: Bytes of this process, of any length; others may have another length.
    what: Description of the data, for messages: "the groups of step 3".
    timeout_s: Seconds to wait for the others; None: `exchanges.wait_s`.

  Raises:
    ProcessesError: A process did not send its lengths in time; the message names it.
    OtherProcessError: Another process has failed, or has received damaged bytes.
    DamagedError: The bytes that arrived here differ from those that were sent.
  """
  if processes.count() == 1:
    return [data]
  is_small = len(data) <= SMALL
  head = {
    "length": len(data),
    "digest": digests.of_bytes(data),
    "data": base64.b64encode(data).decode("ascii") if is_small else None,
  }
  heads = processes.exchange(head, what=what, timeout_s=timeout_s)
  received = _gathered(data, heads)
  received[processes.index()] = data
  check = f"the check of {what}"
  processes.together(lambda: _verify(received, heads, what), what=check, timeout_s=timeout_s)
  return received


def prepare() -> None:
  """Compiles the collective; otherwise the first exchange of long data would do it."""
  if processes.count() > 1:
    _program()


def _gathered(data: bytes, heads: Sequence[Mapping[str, Any]]) -> list[bytes | bytearray]:
  """Returns the bytes of all processes: from `heads`, or by a collective if they are not there."""
  received: list[bytes | bytearray] = [
    bytearray(head["length"]) if head["data"] is None else base64.b64decode(head["data"])
    for head in heads
  ]
  is_large = [head["data"] is None for head in heads]
  longest = max((head["length"] for head in heads if head["data"] is None), default=0)
  for start in range(0, longest, PIECE):
    own = data[start : start + PIECE] if is_large[processes.index()] else b""
    pieces = _exchanged_piece(own)
    for into, piece in zip(received, pieces, strict=True):
      if isinstance(into, bytearray) and start < len(into):
        length = min(PIECE, len(into) - start)
        into[start : start + length] = piece[:length].data
  return received


def _exchanged_piece(piece: bytes) -> np.ndarray:
  """Returns at most `PIECE` bytes of each process, padded with zeros; [processes PIECE], uint8."""
  mesh, shape = _mesh(), _shape()
  own = np.zeros(shape[1:], _WORD)
  own.reshape(-1).view(np.uint8)[: len(piece)] = np.frombuffer(piece, np.uint8)
  sent = jax.make_array_from_single_device_arrays(
    shape,
    _sharding("processes", "devices"),
    [
      jax.device_put(own[None, at : at + 1], device)
      for at, device in enumerate(mesh.devices[processes.index()])
    ],
  )
  found = np.empty(shape, _WORD)
  for shard in _program()(sent).addressable_shards:
    found[shard.index] = np.asarray(shard.data)
  return found.reshape(shape[0], -1).view(np.uint8)


@functools.cache
def _mesh() -> Mesh:
  """Returns all devices, a row for each process."""
  devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
  grid = np.asarray(devices, dtype=object).reshape(processes.count(), -1)
  return Mesh(grid, ("processes", "devices"))


def _shape() -> tuple[int, ...]:
  """Returns the shape of a piece of all processes: each of its devices sends a part."""
  count, devices = _mesh().devices.shape
  return count, devices, -(-PIECE // (devices * _WORD.itemsize))


def _sharding(*axes: str | None) -> NamedSharding:
  return NamedSharding(_mesh(), PartitionSpec(*axes))


@functools.cache
def _program() -> Any:
  """Returns the program that gives each process the parts of all, still split over its devices."""
  piece = jax.ShapeDtypeStruct(_shape(), _WORD, sharding=_sharding("processes", "devices"))
  everywhere = jax.jit(lambda x: x, out_shardings=_sharding(None, "devices"))
  return everywhere.lower(piece).compile()


def _verify(
  received: Sequence[bytes | bytearray], heads: Sequence[Mapping[str, Any]], what: str
) -> None:
  """Raises DamagedError if what arrived is not what was sent."""
  for number, (data, head) in enumerate(zip(received, heads, strict=True)):
    if number == processes.index():
      continue
    found = digests.of_bytes(data)
    if (len(data), found) != (head["length"], head["digest"]):
      raise DamagedError(
        f"{what}: what {processes.named()} received from process {number} is not what was sent:"
        f" {len(data)} bytes with digest {found}, and not {head['length']} with {head['digest']}"
      )
