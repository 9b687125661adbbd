"""The machine that a plan is made on: its accelerators, and which configs fit them.

Nothing here starts JAX or opens a device; `compilation.accelerators` finds them, as for
`grpo-jax doctor`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from grpo_jax.compilation import accelerators
from grpo_jax.compilation.accelerators import Accelerators
from grpo_plan import chips, machines, topologies
from grpo_plan.chips import CHIPS, GIB, Chip
from grpo_plan.topologies import PlanError

_OTHER = "another machine: grpo-jax plan CONFIG --topology=h100:8 (docs/plan.md has the names)"
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Here:
  """What was found.

  Attributes:
    line: Sentence about its accelerators.
    topology: Name of the machine for a plan; None: its chip is not known.
    chip: Kind of its accelerators; None: it has none, or one that is not known.
  """

  line: str
  topology: str | None
  chip: Chip | None = None


def found(
  root: pathlib.Path = pathlib.Path("/"), environment: Mapping[str, str] = os.environ
) -> Here:
  """Returns what this machine has.

  Args:
    root: Root of the file system.
    environment: Environment variables; CUDA_VISIBLE_DEVICES may hide GPUs.
  """
  if gpus := accelerators.gpus(root):
    return _of_gpus(gpus, environment)
  if tpus := accelerators.tpus(root):
    return _of_tpus(tpus)
  return Here("this machine has no GPU and no TPU", "cpu:1")


def named() -> str:
  """Returns the name of this machine for `--topology`.

  Raises:
    PlanError: The chip of the machine is not one that can be planned for.
  """
  here = found()
  if here.topology is None:
    raise PlanError(f"{here.line}; {_nearest(here)}")
  return here.topology


def _of_gpus(gpus: Accelerators, environment: Mapping[str, str]) -> Here:
  names = _visible(gpus.names, environment.get("CUDA_VISIBLE_DEVICES"))
  if not names:
    hidden = accelerators.counted(gpus.names)
    return Here(f"this machine has {hidden}, hidden by CUDA_VISIBLE_DEVICES", "cpu:1")
  chip = chips.of_kind(names[0]) if len({*names}) == 1 else None
  line = f"this machine has {accelerators.counted(names)}"
  line += f" (driver {gpus.driver})" if gpus.driver else ""
  if chip is None:
    return Here(f"{line}, for which there are no rates", None)
  return Here(line, f"{chip.name}:{min(len(names), topologies.MOST_GPUS)}", chip)


def _visible(names: Sequence[str], wanted: str | None) -> Sequence[str]:
  """Returns the GPUs that CUDA shows: the list ends at the first entry that is not one of them."""
  if wanted is None:
    return names
  shown: list[str] = []
  for entry in map(str.strip, wanted.split(",")):
    by_uuid = entry.startswith(("GPU-", "MIG-"))  # of which no index is known.
    index = len(shown) if by_uuid else int(entry) if entry.isdecimal() else -1
    if not 0 <= index < len(names):
      break
    shown.append(names[index])
  return shown


def _of_tpus(tpus: Accelerators) -> Here:
  chip = chips.of_kind(tpus.names[0])
  line = f"this machine has {accelerators.counted(tpus.names)}"
  if chip is None or chip.platform != "tpu":
    return Here(f"{line}, for which there are no rates", None)
  more = "; if it is one host of a larger slice, name the slice by --topology"
  return Here(f"{line}{more}", topologies.slice_of(chip.name, len(tpus.names)), chip)


def _nearest(here: Here) -> str:
  """Returns which machine of the table has the memory that nvidia-smi reports, or a little less."""
  rows = accelerators.smi("memory.total")
  memory = min((int(row[0]) for row in rows if row[0].isdigit()), default=0) * _MIB
  smaller = [chip for chip in CHIPS.values() if chip.platform == "gpu" and chip.memory <= memory]
  if not smaller:
    return _OTHER
  nearest = max(smaller, key=lambda chip: chip.memory)
  return (
    f"{nearest.name} has no more memory ({nearest.memory / GIB:.1f} of {memory / GIB:.1f} GiB):"
    f" --topology={nearest.name}:{max(len(rows), 1)}"
  )


def text() -> str:
  """Returns what this machine has, which configs fit it, and how to plan another run."""
  here = found()
  lines = [here.line]
  if here.topology is None:
    return "\n".join([*lines, _nearest(here)])
  if here.chip is None:
    lines += [
      "what runs here: grpo-jax train quickstart (135 million parameters, minutes), and"
      " quickstart_lora; models of more than about 0.5B are slow on a CPU",
      "a run of yours here: grpo-jax plan CONFIG (compiles for this CPU)",
      _OTHER,
      "which config fits which GPU or TPU: docs/machines.md",
    ]
    return "\n".join(lines)
  lines += _fitting(here.topology, here.chip)
  try:
    topologies.check_compiler(topologies.parse(here.topology))
    lines.append(f"a run of yours: grpo-jax plan CONFIG, which plans for {here.topology}")
  except PlanError as error:
    lines.append(f"a run of yours: grpo-jax plan CONFIG; {error}")
  return "\n".join([*lines, _OTHER])


def _fitting(topology: str, chip: Chip) -> list[str]:
  """Returns the lines of the cells of docs/machines.md for this machine."""
  of = topology
  if not any(machine == of for machine, *_ in machines.cells()):
    of = f"{chip.name}:1" if chip.platform == "gpu" else topologies.slice_of(chip.name, 1) or ""
  cells = [cell for cell in machines.cells().values() if cell.machine == of]
  if not cells:
    return [f"docs/machines.md has no row for {topology}"]
  each = f"{of}, one of its devices" if of != topology else of
  lines = [f"what fits {each}, in GiB of {cells[0].usable / GIB:.1f} (docs/machines.md):"]
  for cell in cells:
    name = f"{cell.model}, {cell.training}"
    if cell.fits:
      lines.append(f"  {name:20} {cell.last.needed / GIB:5.1f}  {machines.command(cell)}")
    else:
      lines.append(f"  {name:20}        does not fit")
  return lines
