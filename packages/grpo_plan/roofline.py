"""A lower bound of the time of a step from peak rates.

Of each phase: max(operations / peak, bytes / bandwidth) + received bytes / bandwidth of the
connection. No program reaches these rates, and nothing here was measured.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from grpo_plan.chips import Chip
from grpo_plan.compiling import Compiled, Moved
from grpo_plan.workload import PhaseWork


@dataclasses.dataclass(frozen=True)
class Phase:
  """Bound of the time of one phase of a step, in seconds.

  Attributes:
    name: Name of the phase.
    compute_s: Operations at the peak rate.
    memory_s: Bytes at the peak bandwidth of the memory.
    near_s: Bytes received from chips of the same slice or node.
    far_s: Bytes received from other slices or nodes.
    operations: Operations on one device.
    received: Bytes that one device receives.
  """

  name: str
  compute_s: float
  memory_s: float
  near_s: float
  far_s: float
  operations: float
  received: float

  @property
  def total_s(self) -> float:
    """Bound of the phase."""
    return max(self.compute_s, self.memory_s) + self.near_s + self.far_s

  @property
  def bound(self) -> str:
    """What takes longest."""
    found = {
      "compute": self.compute_s,
      "memory": self.memory_s,
      "links": self.near_s,
      "network": self.far_s,
    }
    return max(found, key=lambda name: found[name])


def phases(
  work: Sequence[PhaseWork],
  compiled: Mapping[str, Compiled],
  chip: Chip,
  *,
  devices: int,
  dtype: str,
) -> list[Phase]:
  """Returns the bound of each phase; an empty list if the chip's rates are not known.

  Args:
    work: Phases of a step.
    compiled: The compiler's numbers for each program, by the program's name.
    chip: The chip.
    devices: Number of devices.
    dtype: Dtype of the products' factors.
  """
  peak = chip.bfloat16 if dtype == "bfloat16" else chip.float32
  if not (peak and chip.bandwidth and chip.link and chip.network):
    return []
  return [_phase(each, compiled.get(each.program), chip, peak, devices) for each in work]


def _phase(
  work: PhaseWork, compiled: Compiled | None, chip: Chip, peak: float, devices: int
) -> Phase:
  moved: Sequence[Moved] = compiled.moved if compiled else ()
  far = work.calls * sum(one.far for one in moved)
  near = work.calls * sum(one.bytes for one in moved) - far
  return Phase(
    work.phase,
    compute_s=work.operations / devices / peak,
    memory_s=work.bytes / chip.bandwidth,
    near_s=near / chip.link,
    far_s=far / chip.network,
    operations=work.operations / devices,
    received=near + far,
  )
