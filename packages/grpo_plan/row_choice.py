"""The choice of `mesh.context`: over how many devices a plan divides the places of a row, and why.

A device holds 1/n of a row that n devices share, and gathers the keys and values of the others.
Weights and optimizer state are split over `fsdp` × `context`, so the axis takes devices from `fsdp`
without any array of the state growing. Of the values that the mesh allows and that hold a row, the
plan chooses the one with the least modelled time, and of equal ones the least. All of this is
arithmetic, by the functions with which a run chooses what it recomputes; where the chosen mesh is
not that of the config, its update is compiled, too.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from grpo_jax.building.memory_choices import GIB
from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.learn import sharding
from grpo_plan import roofline, row_traffic, workload
from grpo_plan.compiling import Compiled
from grpo_plan.programs import PlannedRun
from grpo_plan.topologies import Topology
from grpo_plan.workload import Lengths

# Times that differ by less than this share count as equal.
_EQUAL = 0.01
_MICROBATCH = "batching.microbatch_tokens"


@dataclasses.dataclass(frozen=True)
class Alternative:
  """A mesh of the same devices with another number of parts of a row.

  Attributes:
    run: The run on this mesh, without its programs.
    changes: Options that differ from those of the config; empty: none does.
    counted: Bytes of a device in an update, by arithmetic.
    seconds: Least time of the updates of a step; None: the rates of the chip are not known.
    compiled: The compiler's numbers for the largest update; None: it was not compiled.
  """

  run: PlannedRun
  changes: Mapping[str, int]
  counted: int
  seconds: float | None
  compiled: Compiled | None = None

  @property
  def parts(self) -> int:
    """Number of devices that share a row: `mesh.context`."""
    return sharding.row_parts(self.run.mesh)

  @property
  def row_tokens(self) -> int:
    """Places of the longest row."""
    return max(shape.row_tokens for shape in self.run.made.shapes)

  @property
  def peak(self) -> int:
    """Bytes of a device in an update, by the compiler if it was asked."""
    if self.compiled is None:
      return self.counted
    return self.run.arrays.beside("update") + self.compiled.own

  @property
  def options(self) -> str:
    """The changes as words, such as "mesh.context=4 mesh.fsdp=2"."""
    return " ".join(f"{name}={value}" for name, value in self.changes.items())

  def fits(self, room: int) -> bool:
    """Returns whether an update takes at most these bytes of a device."""
    return self.peak <= room and not (self.compiled is not None and self.compiled.is_refused)


@dataclasses.dataclass(frozen=True)
class RowChoice:
  """The alternatives, and which of them is chosen.

  Attributes:
    alternatives: Alternatives by their number of parts, that of the config among them.
    room: Bytes of a device available to the run.
  """

  alternatives: tuple[Alternative, ...]
  room: int

  @property
  def own(self) -> Alternative:
    """What the config has."""
    return next(each for each in self.alternatives if not each.changes)

  @property
  def chosen(self) -> Alternative | None:
    """The fastest that holds a row, of equally fast ones the one with least parts; None: none."""
    fitting = [each for each in self.alternatives if each.fits(self.room)]
    least = min((each.seconds for each in fitting if each.seconds is not None), default=0.0)
    fast = [each for each in fitting if (each.seconds or 0.0) <= (1 + _EQUAL) * least]
    return min(fast, key=lambda each: each.parts, default=None)

  @property
  def smallest(self) -> Alternative:
    """The one whose update takes least memory."""
    return min(self.alternatives, key=lambda each: each.peak)


Describe = Callable[[Config], PlannedRun]
CompileUpdate = Callable[[PlannedRun], Compiled]


def choose(
  run: PlannedRun,
  config: Config,
  describe: Describe,
  topology: Topology,
  *,
  assumed: Lengths,
  update: Compiled | None,
  compile_update: CompileUpdate,
) -> RowChoice | None:
  """Returns the choice; None: there is one device, or its memory is not known.

  Args:
    run: The run as configured.
    config: Its config, without what it chooses by memory.
    describe: Function from a config to its run on the same devices, by arithmetic.
    topology: The machine.
    assumed: Assumed lengths of prompts and completions.
    update: The compiler's numbers for the run's largest update; None: nothing was compiled.
    compile_update: Function that compiles the largest update of a run.
  """
  room = topology.chip.usable
  own = _alternative(run, {}, topology, assumed)
  if topology.devices == 1 or own is None:
    return None
  own = dataclasses.replace(own, compiled=update)
  found = [own]
  shape = max(run.made.shapes, key=lambda shape: shape.places)
  # Of a replica. If these do not fit, one row is the least that a microbatch may have.
  tokens = shape.places // sharding.replicas(run.mesh)
  tokens = tokens if own.fits(room) else own.row_tokens
  for changes in _meshes(run, topology, tokens):
    try:
      other = describe(configuration.replaced(config, changes))
    except ConfigError:  # the mesh does not divide the model, or a row.
      continue
    alternative = _alternative(other, changes, topology, assumed)
    found += [] if alternative is None else [alternative]
  made = RowChoice(tuple(sorted(found, key=lambda each: each.parts)), room)
  return _verified(made, compile_update)


def _verified(made: RowChoice, compile_update: CompileUpdate) -> RowChoice:
  """Compiles the update of the chosen alternative, and of the next one if it does not fit."""
  while (chosen := made.chosen) is not None and chosen.compiled is None:
    counted = dataclasses.replace(chosen, compiled=compile_update(chosen.run))
    others = tuple(counted if each is chosen else each for each in made.alternatives)
    made = dataclasses.replace(made, alternatives=others)
  return made


def _meshes(run: PlannedRun, topology: Topology, tokens: int) -> Iterator[dict[str, int]]:
  """Yields the options of each other mesh of the same devices.

  Devices come from `data` first, whose replicas each hold all weights; on several slices or nodes
  from `fsdp`, so that no row is divided over the network as long as a slice has enough devices.
  What fewer parts leave goes to `fsdp`.
  """
  sizes = run.mesh.shape
  own = {axis: sizes.get(axis, 1) for axis in ("context", "data", "fsdp")}
  pool = math.prod(own.values())
  for parts in (n for n in range(1, pool + 1) if pool % n == 0):
    rest = pool // parts
    kept = "data" if topology.slices > 1 or parts <= own["context"] else "fsdp"
    given = {"context": parts, kept: math.gcd(own[kept], rest)}
    given["fsdp" if kept == "data" else "data"] = rest // given[kept]
    changes = {f"mesh.{axis}": given[axis] for axis in own if given[axis] != own[axis]}
    limit, wanted = run.config.batching.microbatch_tokens, -(-tokens // parts)
    if wanted != limit and (changes or limit is None or wanted < limit):
      changes[_MICROBATCH] = wanted
    if any(name.startswith("mesh.") for name in changes) or _has_several_rows(run, tokens):
      yield changes


def _has_several_rows(run: PlannedRun, tokens: int) -> bool:
  """Returns whether a microbatch of a replica has more than these tokens."""
  most = max(shape.places for shape in run.made.shapes)
  return most // sharding.replicas(run.mesh) > tokens


def _alternative(
  run: PlannedRun, changes: Mapping[str, int], topology: Topology, assumed: Lengths
) -> Alternative | None:
  """Returns an alternative with its numbers; None: the memory of the devices is not known."""
  choices, remat = run.choices, run.config.model.remat
  if choices is None or choices.learning is None or remat is None:
    return None
  phases = roofline.phases(
    [workload.of_updates(run, assumed)],
    {"update": Compiled("update", moved=row_traffic.of_update(run))},
    topology.chip,
    devices=topology.devices,
    dtype=run.config.model.compute_dtype,
  )
  seconds = phases[0].total_s if phases else None
  return Alternative(run, changes, choices.learning.peak(remat), seconds)


def lines(found: RowChoice) -> Iterator[str]:
  """Yields the choice and its reason as lines of the plan."""
  own, chosen = found.own, found.chosen
  size = f"a row of {own.row_tokens} tokens"
  if chosen is own and own.parts == 1:
    yield (
      f"rows over several devices: mesh.context=1 is chosen, as the config has it: {size} fits"
      f" whole (an update takes {_gib(own.counted)} of {_gib(found.room)} GiB by arithmetic), and"
      f" {_more(found, own)}"
    )
    return
  yield (
    "rows over several devices (mesh.context), by arithmetic: GiB of a device in an update, least"
    " time of the updates of a step"
  )
  yield "  " + "   ".join(_shown(each, found.room) for each in found.alternatives)
  if chosen is None:
    least = found.smallest
    state = _gib(least.run.arrays.beside("update"))
    yield (
      f"chosen: none, for none holds {size}: mesh.context={least.parts} takes least,"
      f" {_gib(least.peak)} of {_gib(found.room)} GiB, {state} of them arrays of the run, which the"
      " axis divides as mesh.fsdp does"
    )
  else:
    whose = ", as the config has it" if chosen is own else ""
    yield f"chosen: mesh.context={chosen.parts}{whose}, {_reason(found, chosen, size)}"
    if chosen is not own:
      yield "to set: " + " ".join(f"--config.{word}" for word in chosen.options.split())
  for each in found.alternatives:
    if each is not own and each.compiled is not None:
      yield _agreement(each, found.room)


def _shown(each: Alternative, room: int) -> str:
  by = f" ({_gib(each.peak)} by the compiler)" if each.compiled is not None else ""
  time = "fits" if each.seconds is None else f"{each.seconds:.2f} s"
  return f"{each.parts}: {_gib(each.counted)}{by}, {time if each.fits(room) else 'does not fit'}"


def _reason(found: RowChoice, chosen: Alternative, size: str) -> str:
  smaller = [each for each in found.alternatives if each.parts < chosen.parts]
  slower = [each for each in smaller if each.fits(found.room)]
  if not slower:
    first = f"the least that holds {size}" if smaller else f"{size} fits whole"
    return f"{first}; {_more(found, chosen)}"
  other = min(slower, key=lambda each: each.seconds or 0.0)
  why = "it recomputes less" if _recomputes_less(chosen, other) else "fewer places stay empty"
  return (
    f"the fastest that holds {size}: {why} than with mesh.context={other.parts}, which also fits"
  )


def _recomputes_less(one: Alternative, other: Alternative) -> bool:
  return one.run.config.model.remat != other.run.config.model.remat


def _more(found: RowChoice, chosen: Alternative) -> str:
  """Returns what more parts would do."""
  more = [each for each in found.alternatives if each.parts > chosen.parts]
  if not more:
    return "the devices allow no more"
  return "more only gathers keys and values of more devices"


def _agreement(each: Alternative, room: int) -> str:
  assert each.compiled is not None
  name = f"mesh.context={each.parts}"
  if each.compiled.is_refused:
    return f"the compiler does not agree: it refuses the update with {name}"
  agrees = "agrees" if each.fits(room) else "does not agree"
  return (
    f"the compiler {agrees}: the update with {name} takes {_gib(each.peak)} of {_gib(room)} GiB,"
    f" arithmetic {_gib(each.counted)}"
  )


def to_json(found: RowChoice | None) -> dict[str, object] | None:
  """Returns the choice as plain values; sizes are in bytes of one device, times in seconds."""
  if found is None:
    return None
  chosen = found.chosen
  return {
    "chosen": None if chosen is None else chosen.parts,
    "changes": None if chosen is None else dict(chosen.changes),
    "reason": list(lines(found)),
    "alternatives": [
      {
        "mesh.context": each.parts,
        "mesh.data": each.run.mesh.shape["data"],
        "mesh.fsdp": each.run.mesh.shape["fsdp"],
        "changes": dict(each.changes),
        "model.remat": each.run.config.model.remat,
        "update_bytes_by_arithmetic": each.counted,
        "update_bytes_by_compiler": None if each.compiled is None else each.peak,
        "updates_bound_s": each.seconds,
        "fits": each.fits(found.room),
      }
      for each in found.alternatives
    ],
  }


def _gib(size: float) -> str:
  return f"{size / GIB:.1f}"
