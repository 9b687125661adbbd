"""Chips for which XLA can compile without the chip, and the memory of a program on them."""

from typing import Any

from jax.experimental import topologies as jax_topologies

from grpo_jax.planning import topologies
from grpo_jax.planning.chips import CHIPS, GIB

__all__ = ["GIB", "devices", "usable_bytes"]


def devices(target: str, count: int | None = None) -> list[Any]:
  """Returns devices of a machine that is not present.

  Args:
    target: "h100", a TPU slice such as "v5e:2x2", or "cpu": simulated devices of this machine.
    count: Number of devices; None: one H100 or CPU, or all of a slice.
  """
  if target in ("cpu", "h100"):
    return topologies.devices(topologies.parse(f"{target}:{count or 1}"))
  topology = jax_topologies.get_topology_desc(target, platform="tpu")
  return list(topology.devices)[: count or None]


def usable_bytes(target: str) -> int | None:
  """Returns the bytes of a chip's memory available to a program; None if unknown."""
  chip = CHIPS.get(target.partition(":")[0])
  return None if chip is None else chip.usable
