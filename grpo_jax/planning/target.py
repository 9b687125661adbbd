"""Runs code as it would run on a machine that is not present."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.linear_logprobs import choice
from jax.sharding import Mesh


@contextlib.contextmanager
def assumed(devices: Sequence[Any]) -> Iterator[None]:
  """Makes code that asks for the chip, the backend or the devices see those of the target.

  A process is the one of the first device: its local devices are those of that host.

  Args:
    devices: All devices of the target.
  """
  chip = choice.chip_of(devices[0])
  host = devices[0].process_index
  local = property(lambda mesh: [d for d in mesh.devices.flat if d.process_index == host])
  with contextlib.ExitStack() as stack:
    for module in (choice, attention_choice):
      stack.enter_context(mock.patch.object(module, "current_chip", lambda: chip))
    stack.enter_context(mock.patch.object(jax, "default_backend", lambda: chip.platform))
    stack.enter_context(mock.patch.object(jax, "devices", lambda *_: list(devices)))
    stack.enter_context(mock.patch.object(Mesh, "local_devices", local))
    yield
