"""Runs code as it would run on a machine that is not present."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_kernels import implementations

from grpo_jax.processes import local_devices


@contextlib.contextmanager
def assumed(devices: Sequence[Any], host: Sequence[Any]) -> Iterator[None]:
  """Makes code that asks for the chip, or for the devices of its process, see those of the target.

  Args:
    devices: All devices of the target.
    host: Devices of one host, which are the local devices of a process. For several hosts they are
      those of a machine of one host, since a compiler for a TPU slice takes all of its devices.
  """
  chip = implementations.chip_of(devices[0])
  with implementations.assumed_chip(chip), local_devices.assumed_host(host):
    yield


def place_of(device: Any) -> int:
  """Returns the TPU slice or the node of GPUs of a device; devices of one are connected fast."""
  if device.platform == "tpu":
    return getattr(device, "slice_index", None) or 0
  return device.process_index
