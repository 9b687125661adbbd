"""Which config fits which machine: the cells of docs/machines.md, and what they are computed from.

A cell is a machine, a model, and full training or LoRA. Its options are the first of a ladder with
which the run fits. machines.json has what the compilers said; scripts/machines.py writes it.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_plan.chips import GIB

FILE = "machines.json"

MACHINES = ("t4:1", "l4:1", "4090:1", "5090:1", "a100-40:1", "a100:1", "h100:1", "h200:1", "h100:8",
            "v5e-1", "v6e-1", "v5e-8", "v6e-8")  # fmt: skip
MODELS = {
  "Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
  "Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
  "Qwen3-4B": "Qwen/Qwen3-4B",
  "Qwen3-8B": "Qwen/Qwen3-8B",
}
# Training → its config.
CONFIGS = {"full": "math_1b", "LoRA": "math_1b_lora"}

# Marks of options in the table.
MARKS = {
  "a": ("loss.kl_coef=0",),
  "b": ("batching.row_tokens=1024", "batching.microbatch_tokens=1024"),
  "c": ("optim.optimizer=lion",),
  "d": ("model.lora.base_dtype=int8",),
  "e": ("model.lora.base_dtype=nf4",),
  "f": ("model.compute_dtype=float32",),
}
# What is tried, in this order: first what changes least of what is learned and how fast.
_LADDERS = {"full": ("", "a", "ab", "abc"), "LoRA": ("", "d", "e", "eb")}


@dataclasses.dataclass(frozen=True)
class Tried:
  """What a run takes with some options, in bytes of one device.

  Attributes:
    marks: Its options, letters of `MARKS`.
    state: Weights, optimizer state, reference and the sum of the gradients.
    learning: Arrays in memory while an update runs.
    sampling: Arrays while it samples, and the most that a decode step may need, by arithmetic.
    update: The update itself, by the compiler; None: not compiled.
    shape: Name of the update and its shape.
    remat: Value that the run chooses for `model.remat`.
    rows: Value that the run chooses for `engine.max_rows`.
    counted: Bytes of learning in all, by arithmetic, where no compiler answers; 0: one does.
  """

  marks: str
  state: int
  learning: int
  sampling: int
  update: int | None
  shape: str
  remat: str
  rows: int
  counted: int = 0

  @property
  def needed(self) -> int:
    """Bytes of a device that it needs, or needs at least if its arrays alone do not fit."""
    return max(self.learning + (self.update or 0), self.counted, self.sampling)

  def fits(self, usable: int) -> bool:
    """Returns whether it fits into these bytes of a device."""
    return (self.update is not None or self.counted > 0) and self.needed <= usable


@dataclasses.dataclass(frozen=True)
class Cell:
  """A machine, a model and a training.

  Attributes:
    machine: One of `MACHINES`.
    model: One of `MODELS`.
    training: One of `CONFIGS`.
    usable: Bytes of a device that a run has.
    tried: Attempts in the order of the ladder; only the last one may fit.
  """

  machine: str
  model: str
  training: str
  usable: int
  tried: tuple[Tried, ...]

  @property
  def last(self) -> Tried:
    """What was tried last."""
    return self.tried[-1]

  @property
  def fits(self) -> bool:
    """Whether the run fits with the options that were tried last."""
    return self.last.fits(self.usable)


def ladder(machine: str, training: str) -> tuple[str, ...]:
  """Returns the options to try, as letters of `MARKS`, the best ones first.

  A T4 multiplies bfloat16 as float32, so LoRA on it begins with float32.

  Args:
    machine: One of `MACHINES`.
    training: One of `CONFIGS`.
  """
  begin = ("f",) if machine.startswith("t4") and training == "LoRA" else ()
  return (*begin, *_LADDERS[training])


def overrides(marks: str) -> list[str]:
  """Returns the options of the command line."""
  return [f"--config.{option}" for mark in marks for option in MARKS[mark]]


def command(cell: Cell) -> str:
  """Returns the command that trains as a cell says."""
  model = f"--config.model.path={MODELS[cell.model]}"
  return " ".join(["grpo-jax train", CONFIGS[cell.training], model, *overrides(cell.last.marks)])


@functools.cache
def cells() -> Mapping[tuple[str, str, str], Cell]:
  """Returns the cells that were computed, by machine, model and training."""
  file = importlib.resources.files("grpo_plan") / FILE
  return {key(cell): cell for cell in map(of_json, json.loads(file.read_text())["cells"])}


def key(cell: Cell) -> tuple[str, str, str]:
  """Returns what names a cell."""
  return cell.machine, cell.model, cell.training


def of_json(fields: Mapping[str, Any]) -> Cell:
  """Returns the cell of an object of machines.json."""
  tried = tuple(Tried(**each) for each in fields["tried"])
  return Cell(**{**fields, "tried": tried})


def table(found: Mapping[tuple[str, str, str], Cell], usable: Mapping[str, int]) -> list[str]:
  """Returns the lines of the table of docs/machines.md.

  Args:
    found: Cells, by machine, model and training.
    usable: Machine → bytes of a device that a run has.
  """
  columns = [(model, training) for model in MODELS for training in CONFIGS]
  head = [f"{model.partition('-')[2]}, {training}" for model, training in columns]
  lines = [_row(["machine", "GiB", *head]), _row(["---"] * (len(head) + 2))]
  for machine in MACHINES:
    shown = [_shown(found.get((machine, *column))) for column in columns]
    lines.append(_row([f"`{machine}`", _gib(usable[machine]), *shown]))
  return lines


def _row(words: Sequence[str]) -> str:
  return f"| {' | '.join(words)} |"


def _shown(cell: Cell | None) -> str:
  if cell is None:
    return ""
  if not cell.fits:
    return f"no: {_gib(cell.last.needed)}"
  about = "" if cell.last.update is not None else "~"
  marks = f" {' '.join(cell.last.marks)}" if cell.last.marks else ""
  return f"**{about}{_gib(cell.last.needed)}**{marks}"


def _gib(size: int) -> str:
  return f"{size / GIB:.1f}"
