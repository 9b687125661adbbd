"""A plan: whether a run fits a machine, what it moves, and how long a step takes at least."""

import dataclasses
import pathlib
from collections.abc import Callable

from jax.sharding import Mesh

from grpo_jax.building import checks
from grpo_jax.building.arrays_in_memory import Arrays
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.config.options import Config
from grpo_jax.learn import sharding
from grpo_jax.models import loading
from grpo_plan import programs, roofline, row_choice, search, workload
from grpo_plan.compiling import Compiled
from grpo_plan.programs import PlannedRun
from grpo_plan.roofline import Phase
from grpo_plan.row_choice import RowChoice
from grpo_plan.search import Limit, Point
from grpo_plan.topologies import Topology
from grpo_plan.workload import Lengths, PhaseWork

_OF_OTHERS = tuple(name for name in programs.OF_BATCHES if name != "update")


@dataclasses.dataclass(frozen=True)
class Need:
  """Memory of a run while one program runs, in bytes of one device.

  Attributes:
    program: One of `programs.PROGRAMS`.
    beside: Arrays in memory when the program is called, its arguments included.
    compiled: The compiler's numbers for the program.
  """

  program: str
  beside: int
  compiled: Compiled

  @property
  def peak(self) -> int:
    """Bytes in all."""
    return self.beside + self.compiled.own


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run needs on a machine.

  Attributes:
    run: The run.
    topology: The machine.
    needs: Memory of each program: first in its largest shape, then in others that were compiled.
    assumed: Assumed lengths of prompts and completions.
    work: Phases of a step.
    phases: Bounds of their times; empty: the chip's rates are not known.
    microbatch: The largest microbatch that fits; None: not searched.
    row: The longest row that fits; None: not searched.
    rows: The choice of `mesh.context`; None: it was not asked for, or there is none.
  """

  run: PlannedRun
  topology: Topology
  needs: tuple[Need, ...]
  assumed: Lengths
  work: tuple[PhaseWork, ...]
  phases: tuple[Phase, ...]
  microbatch: Limit | None = None
  row: Limit | None = None
  rows: RowChoice | None = None

  @property
  def worst(self) -> Need:
    """The program at which most memory is used."""
    return max(self.needs, key=lambda need: (need.compiled.is_refused, need.peak))

  @property
  def room(self) -> int:
    """Bytes of a device available to the run."""
    return self.topology.chip.usable

  @property
  def is_of_arrays(self) -> bool:
    """Whether nothing was compiled, because the arrays alone do not fit."""
    return not self.run.jobs

  @property
  def fits(self) -> bool:
    """Whether every program fits in addition to the arrays of the run."""
    return all(need.peak <= self.room and not need.compiled.is_refused for need in self.needs)

  def need(self, program: str) -> Need | None:
    """Returns the memory of a program in its largest shape; None if the run does not have it."""
    return next((need for need in self.needs if need.program == program), None)

  @property
  def replicas(self) -> int:
    """Number of groups of devices over which rows are split."""
    return sharding.replicas(self.run.mesh)

  @property
  def parts(self) -> int:
    """Number of devices over which the places of a row are divided."""
    return sharding.row_parts(self.run.mesh)


Compile = Callable[[CompileJob], Compiled]


def make(
  run: PlannedRun,
  topology: Topology,
  compile_job: Compile,
  *,
  assumed: Lengths,
  searches: bool = True,
  all_shapes: bool = False,
) -> Plan:
  """Compiles the programs of a run, and searches what fits.

  Args:
    run: The run, on a mesh of the machine's devices.
    topology: The machine.
    compile_job: Function that compiles a program, such as `compiling.compiled`.
    assumed: Assumed lengths of prompts and completions.
    searches: Whether to search the largest microbatch and the longest row.
    all_shapes: Whether each program is compiled in every shape, not only in its largest.
  """
  if not run.jobs:
    return Plan(run, topology, _of_arrays(run.arrays), assumed, (), ())
  largest = [_need(run, job, compile_job) for job in programs.largest(run.jobs)]
  others = programs.smaller(run.jobs) if all_shapes else []
  needs = [*largest, *(_need(run, job, compile_job) for job in others)]
  work = workload.of_step(run, assumed, hosts=topology.hosts)
  phases = roofline.phases(
    work,
    {need.program: need.compiled for need in largest},
    topology.chip,
    devices=topology.devices,
    dtype=run.config.model.compute_dtype,
  )
  plan = Plan(run, topology, tuple(needs), assumed, tuple(work), tuple(phases))
  return _searched(plan, compile_job) if searches else plan


def with_rows(
  plan: Plan,
  config: Config,
  describe: row_choice.Describe,
  compile_job: Callable[[PlannedRun, CompileJob], Compiled],
) -> Plan:
  """Adds the choice of `mesh.context`; compiles its update if it is not that of the plan.

  Args:
    plan: The plan.
    config: Config of the run, without what it chooses by memory.
    describe: Function from a config to its run on the same devices, by arithmetic.
    compile_job: Function that compiles a program of a run.
  """

  def compile_update(run: PlannedRun) -> Compiled:
    with run.assumed():
      jobs = [job for job in run.made.jobs() if programs.program_of(job.name) == "update"]
    return compile_job(run, *programs.largest(jobs))

  need = plan.need("update")
  found = row_choice.choose(
    plan.run,
    config,
    describe,
    plan.topology,
    assumed=plan.assumed,
    update=None if need is None or plan.is_of_arrays else need.compiled,
    compile_update=compile_update,
  )
  return dataclasses.replace(plan, rows=found)


def largest_arrays(arrays: Arrays) -> int:
  """Returns the bytes of a device that the arrays take where they take most, without programs."""
  return max(need.beside for need in _of_arrays(arrays))


def _of_arrays(arrays: Arrays) -> tuple[Need, ...]:
  """Returns what a run needs at least, if its programs took nothing."""
  programs_of = ("update", "sampling") if arrays.sampling else ("update",)
  return tuple(Need(name, arrays.beside(name), Compiled(name)) for name in programs_of)


def _need(run: PlannedRun, job: CompileJob, compile_job: Compile) -> Need:
  program = programs.program_of(job.name)
  assert program is not None, job.name
  return Need(program, run.arrays.beside(program), compile_job(job))


def _searched(plan: Plan, compile_job: Compile) -> Plan:
  """Adds the largest microbatch and the longest row."""
  run, room = plan.run, plan.room
  if run.arrays.beside("update") > room or run.arrays.beside("optimizer") > room:
    return dataclasses.replace(plan, microbatch=Limit(None), row=Limit(None))
  planned = max(run.made.shapes, key=lambda shape: shape.places)
  need = plan.need("update")
  assert need is not None
  rows = planned.rows // plan.replicas
  seen = {(rows, planned.row_tokens): _point(need, rows, planned.row_tokens)}

  def measure(rows: int, row_tokens: int) -> Point:
    if (rows, row_tokens) not in seen:
      job = search.job_of(run, "update", rows, row_tokens, plan.replicas)
      point = _point(_need(run, job, compile_job), rows, row_tokens)
      share = point.places * plan.replicas / planned.places
      others = [_scaled(each, share) for each in plan.needs if each.program in _OF_OTHERS]
      seen[rows, row_tokens] = dataclasses.replace(point, peak=max([point.peak, *others]))
    return seen[rows, row_tokens]

  start = seen[rows, planned.row_tokens]
  shapes = workload.microbatches(run, plan.assumed)
  places = sum(shape.places * count for shape, count in shapes.items())
  most_rows = max(-(-places // (plan.replicas * planned.row_tokens)), 1)
  microbatch = search.largest_microbatch(measure, room, start=start, most_rows=most_rows)
  most_tokens = run.model.context
  one = measure(1, planned.row_tokens)
  each = search.slope(point for point in seen.values() if not point.is_refused)
  line = {"start": one, "per_place": each}
  row = search.longest_row(measure, room, **line, most_tokens=most_tokens, parts=plan.parts)
  return dataclasses.replace(plan, microbatch=microbatch, row=row)


def _scaled(need: Need, share: float) -> int:
  """Returns the memory of a program of another microbatch, whose own bytes grow with its places."""
  return need.beside + int(need.compiled.own * max(share, 1.0))


def _point(need: Need, rows: int, row_tokens: int) -> Point:
  return Point(rows, row_tokens, need.peak, need.compiled.is_refused)


def check(config: Config, mesh: Mesh, folder: pathlib.Path) -> None:
  """Refuses what the run would refuse of its model and mesh.

  Raises:
    ConfigError: The mesh does not divide the model, or completions exceed its context.
  """
  checks.check_kernels(config, mesh)
  checks.check_model(config, mesh, loading.read_facts(folder))
