"""Computes the table of docs/machines.md by `grpo_plan`: which config fits which machine.

    .venv-aot-h100/bin/python scripts/machines.py --only 4090:1     # compiles what is missing
    .venv-aot-tpu/bin/python scripts/machines.py --only v5e-1
    python scripts/machines.py --page                               # writes the table into the page

GPUs need the extra plan-cuda, TPUs plan-tpu. Of each run it compiles the update in its largest
shape. Sampling is arithmetic, by which the run chooses its rows, and which is meant to be above
what a compiler counts. machines.json of grpo_plan is written after each cell. A cell that was
compiled is not compiled again unless --again is given.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "packages" / "grpo_plan" / "machines.json"
PAGE = ROOT / "docs" / "machines.md"
BEGIN, END = "<!-- machines: begin -->", "<!-- machines: end -->"

if importlib.util.find_spec("grpo_plan") is None:  # not installed: the folders of this checkout.
  sys.path[:0] = [str(ROOT / name) for name in (".", "kernels", "packages")]

from grpo_jax.files.cache import default_cache  # noqa: E402
from grpo_plan import machines  # noqa: E402
from grpo_plan.machines import Cell, Tried  # noqa: E402

KEPT = default_cache() / "plans"


def main(arguments: Sequence[str]) -> int:
  """Computes cells, or writes the page; returns the exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--only", default="", help="machines, models or trainings, with commas")
  parser.add_argument(
    "--arithmetic", action="store_true", help="compile nothing: the numbers of the run's own choice"
  )
  parser.add_argument("--again", action="store_true", help="also compute cells that are there")
  parser.add_argument("--page", action="store_true", help="write the table into docs/machines.md")
  options = parser.parse_args(arguments)
  if options.page:
    PAGE.write_text(with_table(PAGE.read_text()))
    return 0
  from grpo_plan import command

  command.prepare()
  wanted = {word for word in options.only.split(",") if word}
  known = {*machines.MACHINES, *machines.MODELS, *machines.CONFIGS}
  if wrong := sorted(wanted - known):
    parser.error(f"--only={','.join(wrong)} names none of {', '.join(sorted(known))}")
  for machine in _chosen(machines.MACHINES, wanted):
    for model in _chosen(machines.MODELS, wanted):
      for training in _chosen(machines.CONFIGS, wanted):
        known = _stored().get((machine, model, training))
        is_known = known is not None and (options.arithmetic or known.last.counted == 0)
        if options.again or not is_known:
          _write(cell_of(machine, model, training, compiles=not options.arithmetic))
  return 0


def with_table(page: str) -> str:
  """Returns the page with the table of machines.json."""
  before, _, rest = page.partition(BEGIN)
  _, _, after = rest.partition(END)
  lines = machines.table(machines.cells(), {each: usable(each) for each in machines.MACHINES})
  return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def usable(machine: str) -> int:
  """Returns the bytes of a device that a run with the embedded sampler has."""
  from grpo_plan import chips, topologies

  return chips.in_run(topologies.parse(machine).chip, "jax_sampler").usable


def cell_of(machine: str, model: str, training: str, *, compiles: bool = True) -> Cell:
  """Tries the options of the ladder, until the run fits."""
  room, tried = usable(machine), []
  for marks in machines.ladder(machine, training):
    tried.append(attempt(machine, model, training, marks, compiles=compiles))
    print(machine, model, training, tried[-1], flush=True)
    if tried[-1].fits(room):
      break
  return Cell(machine, model, training, room, tuple(tried))


def attempt(
  machine: str,
  model: str,
  training: str,
  marks: str,
  *,
  compiles: bool = True,
  folder: pathlib.Path | None = KEPT,
) -> Tried:
  """Returns what a run takes with some options; it is not compiled if its arrays do not fit.

  Args:
    machine: One of `machines.MACHINES`.
    model: One of `machines.MODELS`.
    training: One of `machines.CONFIGS`.
    marks: Its options, letters of `machines.MARKS`.
    compiles: Whether the update is compiled; else the answer is arithmetic.
    folder: Folder of what compilers said before; None: compiled again.
  """
  from grpo_plan import compiling, plan_request, programs, topologies

  words = [f"--config={machines.CONFIGS[training]}", *machines.overrides(marks)]
  config = plan_request.config_of(words)
  topology = plan_request.in_run(topologies.parse(machine), config)
  with tempfile.TemporaryDirectory() as scratch:
    place = pathlib.Path(scratch)
    sizes, source = plan_request.model_of(config, model, place)
    run = plan_request.by_arithmetic(config, sizes, topology, place, source=source)
  with run.assumed():
    jobs = programs.largest(run.made.jobs())
  (job,) = (job for job in jobs if programs.program_of(job.name) == "update")
  arrays, choices = run.arrays, run.choices
  assert choices is not None and choices.rows is not None and choices.learning is not None
  found = Tried(
    marks,
    state=arrays.always + arrays.sums,
    learning=arrays.beside("update"),
    sampling=arrays.beside("sampling") + choices.rows.program,
    update=None,
    shape=job.name,
    remat=run.config.model.remat or "",
    rows=choices.rows.count,
  )
  if found.needed > topology.chip.usable:
    return found
  if not compiles:
    return dataclasses.replace(found, counted=choices.learning.peak(found.remat))
  made = compiling.compiled(job, run.mesh, host=run.host, folder=folder)
  return dataclasses.replace(found, update=made.own)


def _chosen(names: Iterable[str], wanted: set[str]) -> list[str]:
  return [name for name in names if name in wanted] or list(names)


def _stored() -> dict[tuple[str, str, str], Cell]:
  if not FILE.exists():
    return {}
  found = map(machines.of_json, json.loads(FILE.read_text())["cells"])
  return {machines.key(cell): cell for cell in found}


def _write(cell: Cell) -> None:
  """Adds a cell to the file, in which another process may have written others meanwhile."""
  from grpo_plan import compiling

  stored = _stored() | {machines.key(cell): cell}
  order = [(m, n, t) for m in machines.MACHINES for n in machines.MODELS for t in machines.CONFIGS]
  before = json.loads(FILE.read_text()) if FILE.exists() else {"versions": {}}
  versions = before["versions"] | compiling.versions()
  cells = [stored[each] for each in order if each in stored]
  temporary = FILE.with_suffix(f".{os.getpid()}")
  temporary.write_text(file_of(f"{datetime.date.today()}", versions, cells))
  temporary.replace(FILE)


def file_of(date: str, versions: Mapping[str, str], cells: Iterable[Cell]) -> str:
  """Returns the content of machines.json, a cell a line."""
  lines = ",\n".join(json.dumps(dataclasses.asdict(cell)) for cell in cells)
  head = json.dumps({"date": date, "versions": dict(versions)})
  return f'{head[:-1]}, "cells": [\n{lines}\n]}}\n'


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
