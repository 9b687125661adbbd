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
    yield
