"""Runs code as it would run on a machine that is not present."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.linear_logprobs import choice
from jax.sharding import Mesh

from grpo_jax.learn import mesh as mesh_of_run
from grpo_jax.processes import local_devices


@contextlib.contextmanager
def assumed(devices: Sequence[Any], host: Sequence[Any]) -> Iterator[None]:
  """Makes code that asks for the chip, the backend or the devices see those of the target.

  Args:
    devices: All devices of the target.
    host: Devices of one host, which are the local devices of a process. For several hosts they are
      those of a machine of one host, since a compiler for a TPU slice takes all of its devices.
  """
  chip = choice.chip_of(devices[0])
  own = lambda mesh: list(host if mesh.size > len(host) else mesh.devices.flat)
  local = property(own)
  with contextlib.ExitStack() as stack:
    for module in (choice, attention_choice):
      stack.enter_context(mock.patch.object(module, "current_chip", lambda: chip))
    stack.enter_context(mock.patch.object(jax, "default_backend", lambda: chip.platform))
    stack.enter_context(mock.patch.object(jax, "devices", lambda *_: list(devices)))
    stack.enter_context(mock.patch.object(Mesh, "local_devices", local))
    stack.enter_context(mock.patch.object(mesh_of_run, "_domain", place_of))
    part_of = _on(host, local_devices.part_of)
    stack.enter_context(mock.patch.object(local_devices, "part_of", part_of))
    yield


def place_of(device: Any) -> int:
  """Returns the TPU slice or the node of GPUs of a device; devices of one are connected fast."""
  if device.platform == "tpu":
    return getattr(device, "slice_index", None) or 0
  return device.process_index


def _on(host: Sequence[Any], part_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """Returns `part_of` with the mesh of a process made of the devices of one host."""

  def found(mesh: Any) -> Any:
    part = part_of(mesh)
    if part is None:
      return None
    grid = np.asarray(host, dtype=object).reshape(part.mesh.devices.shape)
    own = Mesh(grid, part.mesh.axis_names, axis_types=part.mesh.axis_types)
    return dataclasses.replace(part, mesh=own)

  return found
