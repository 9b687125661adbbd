"""What a run chooses by the memory of its devices: what it recomputes, and the sampler's rows.

Arithmetic, before anything is compiled or read: a run and `grpo-jax plan` call the same functions,
and a plan verifies the answer by what the compiler counts. All processes choose by the smallest
memory of all.
"""

import contextlib
import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from grpo_kernels.attention import Attention
from grpo_kernels.implementations import current_chip
from jax.sharding import Mesh

from grpo_jax import processes
from grpo_jax.batching.packing import Shape
from grpo_jax.building import arrays_in_memory, computation, weights_spec
from grpo_jax.building.arrays_in_memory import Arrays, bytes_of_device
from grpo_jax.config import (
  ahead_options,
  batching_options,
  chosen_options,
  configuration,
  lora_options,
  modes,
  run_options,
)
from grpo_jax.config.options import Config
from grpo_jax.engines import sampler_memory
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.engines.sampler_memory import Rows, SamplerPart
from grpo_jax.learn import adapters, operations, policy, sharding, token_scores, update_memory
from grpo_jax.learn.update_memory import Replica, UpdateMemory
from grpo_jax.models import lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.options import REMATS
from grpo_jax.models.products import Products
from grpo_jax.models.quantized import Int8, Nf4
from grpo_jax.processes import local_devices
from grpo_jax.run_folder import workdirs

_log = logging.getLogger(__name__)

GIB = 2**30
MARGIN = 0.1  # share of a device that a choice leaves free.
LEAST = REMATS[0]  # the choice with the least memory.
_ACTS = {"full": "the activations of every layer", "dots": "what follows its products with weights",
         "none": "nothing"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Learning:
  """What an update takes by each choice of `model.remat`, in bytes of one device.

  Attributes:
    room: Bytes of the device.
    beside: Arrays in memory when the update is called.
    updates: The update of the largest microbatch, by `model.remat`.
  """

  room: int
  beside: int
  updates: Mapping[str, UpdateMemory]

  def peak(self, remat: str) -> int:
    """Returns the bytes in all."""
    return self.beside + self.updates[remat].total

  def fits(self, remat: str) -> bool:
    """Returns whether a choice fits and leaves the margin free."""
    return self.peak(remat) <= (1 - MARGIN) * self.room

  @property
  def fastest(self) -> str | None:
    """The choice that recomputes least of those that fit; None: none does."""
    return next((remat for remat in reversed(REMATS) if self.fits(remat)), None)

  def remedy(self, remat: str) -> str:
    """Returns what to do if memory is short for the update with a choice."""
    smaller = REMATS[: REMATS.index(remat)]
    if not smaller:
      return token_scores.SMALLER_BATCHES
    found = next((each for each in reversed(smaller) if self.fits(each)), LEAST)
    sizes = f"{_gib(self.peak(found))} GiB by arithmetic in place of {_gib(self.peak(remat))}"
    return f"set model.remat={found!r} ({sizes}), {token_scores.SMALLER_BATCHES}"


@dataclasses.dataclass(frozen=True)
class Choices:
  """What was chosen, and why.

  Attributes:
    config: The config with the choices.
    lines: Sentences about them, for the screen.
    warnings: Sentences about what does not fit.
    learning: Memory of an update; None: the memory of the devices is not known.
    rows: Rows of the sampler and their memory; None: likewise, or rows were not chosen.
    held: Arrays of the run, the sampler's by arithmetic; None: likewise.
  """

  config: Config
  lines: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()
  learning: Learning | None = None
  rows: Rows | None = None
  held: Arrays | None = None

  def say(self) -> None:
    """Logs the sentences."""
    for line in self.lines:
      _log.info(line)
    for line in self.warnings:
      _log.warning(line)

  @property
  def remedy(self) -> str:
    """What to do if memory is short for an update."""
    remat = self.config.model.remat
    if self.learning is None or remat is None:
      least = "" if remat == LEAST else f"set model.remat={LEAST!r}, "
      return f"{least}{token_scores.SMALLER_BATCHES}"
    return self.learning.remedy(remat)


def room_of(mesh: Mesh) -> int | None:
  """Returns the memory of the smallest device of all processes; None: a device does not report it.

  Args:
    mesh: Mesh of the devices.
  """
  limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.local_devices]
  found = processes.exchange(min(limits), what="the memory of the devices")
  return min(found) if all(found) else None


def continued(config: Config, workdir: pathlib.Path) -> Config:
  """Returns the config with what an earlier part of the run chose, if it has a checkpoint.

  Args:
    config: Config of the run.
    workdir: Run folder; the main process reads it for all.
  """
  stored, file = None, workdir / "config.json"
  if processes.is_main() and file.exists() and workdirs.steps(workdir):
    with contextlib.suppress(configuration.ConfigError):  # `checks.log_differences` refuses it.
      stored = configuration.read(file)
  stored = processes.broadcast(stored)
  return config if stored is None else chosen_options.continued(config, stored)


def choose(
  config: Config,
  model: ModelConfig,
  mesh: Mesh,
  *,
  room: int | None,
  teacher: ModelConfig | None = None,
) -> Choices:
  """Chooses what the config leaves open.

  Args:
    config: Config of the run.
    model: Sizes of the model.
    mesh: Mesh of the trainer's devices.
    room: Bytes of memory of a device; None: not known.
    teacher: Sizes of the teacher in the trainer; None: there is none.
  """
  platform = current_chip().platform
  if platform == "cpu" or room is None:
    is_cpu = platform == "cpu"
    reason = "for a CPU" if is_cpu else "because a device does not report its memory"
    return _without_memory(config, reason)
  given = configuration.replaced(config, {chosen_options.REMAT: LEAST})
  made = computation.make(given, model, mesh, run_options.objective(config), teacher=teacher)
  held = arrays_in_memory.held_by(made)
  replica = _replica(made)
  of_update = lambda remat: update_memory.of_update(replica.with_shape(_shape(made, remat)), remat)
  least = of_update(LEAST)
  lines, warnings, rows = [], [], None
  if samples(config):
    sampler = _with_sampler(config, made.full, made.mesh, held)
    is_ahead, is_apart = ahead_options.is_ahead(config), config.engine.devices is not None
    free = int((1 - MARGIN) * room) - sampler.sampler - (0 if is_apart else held.always)
    beside = 0 if is_apart else least.total + (held.sums if is_ahead else 0)
    # Where programs copy the cache, they need more than the arithmetic says: 2.5 GiB on a v5e-8.
    if is_ahead or is_apart or sampler_memory.copies_cache(current_chip()):
      left = _Left(free - beside, free - beside)
    else:  # a teacher's scores have no arithmetic of their own.
      scores = update_memory.of_scores(replica) if teacher is None else least.total
      left = _Left(free - beside, free, scores)
    wanted = run_options.completions_of_step(config, _hosts(mesh))
    rows, config = _with_rows(config, model, mesh, left, wanted)
    held = held if is_apart else dataclasses.replace(sampler, caches=rows.caches)
    lines.append(_of_rows(config, rows, sampler, room))
  updates = {remat: of_update(remat) for remat in REMATS[1:]}
  learning = Learning(room, held.beside("update"), {LEAST: least, **updates})
  chosen = {chosen_options.REMAT: learning.fastest or LEAST}
  config = chosen_options.resolved(config, chosen)
  remat = config.model.remat
  assert remat is not None
  lines.append(_of_remat(learning, remat))
  if learning.peak(remat) > room:
    warnings.append(too_large(learning, remat))
  return Choices(config, tuple(lines), tuple(warnings), learning, rows, held)


def samples(config: Config) -> bool:
  """Returns whether the run has the embedded sampler."""
  return config.engine.name == "jax_sampler" and not modes.is_offline(config)


def _without_memory(config: Config, reason: str) -> Choices:
  """Returns the choices where memory does not decide."""
  rows = {chosen_options.ROWS: USUAL_ROWS} if samples(config) else {}
  values = {chosen_options.REMAT: LEAST, **rows}
  open_ones = [name for name in values if name in chosen_options.open_fields(config)]
  shown = ", ".join(f"{name}={values[name]!r}" for name in open_ones)
  lines = (f"{shown}: chosen {reason} (docs/memory.md)",) if open_ones else ()
  return Choices(chosen_options.resolved(config, values), lines)


def _shape(made: computation.Computation, remat: str) -> Shape:
  """Returns the rows, or parts of rows, of one device in the largest microbatch of a choice."""
  replicas, parts = sharding.replicas(made.mesh), sharding.row_parts(made.mesh)
  cost = operations.update_cost(made.model, remat=remat)
  shapes = batching_options.plan(made.config, cost=cost, replicas=replicas, parts=parts)
  largest = max(shapes, key=lambda shape: shape.places)
  tokens, loss_tokens = largest.row_tokens // parts, largest.loss_tokens // parts
  return Shape(largest.rows // replicas, tokens, loss_tokens)


def _replica(made: computation.Computation) -> Replica:
  """Returns what a device computes of an update."""
  config, mesh = made.config, made.mesh
  experts = mesh.shape.get("expert", 1)
  local = _local(made.model, mesh.shape["tensor"], experts)
  adapter = lora_options.load(config)
  placed = weights_spec.shardings_of(local, mesh)
  full = weights_spec.described_weights(local, placed, dtype=made.read.dtype)
  parts = None if adapter is None else adapters.composition(local, mesh, adapter, seed=config.seed)
  weights, _ = policy.described(full, parts)
  trained = made.state.params if adapter is not None else made.state.params["layers"]
  return Replica(
    local,
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights),
    _shape(made, LEAST),
    Products(config.model.compute_dtype, config.model.product_dtype),
    Attention(config.model.attention),
    platform=current_chip().platform,
    gradients=bytes_of_device(trained),
    trains_head=adapter is None,
    expert_parts=experts,
    row_parts=sharding.row_parts(mesh),
  )


def _local(model: ModelConfig, tensor: int, experts: int = 1) -> ModelConfig:
  """Returns the sizes of a model as one device has them; what is not divisible stays whole.

  A device computes the experts of tokens of all devices with which it shares them: for each of its
  own tokens it has room for all choices of as many.
  """
  divided = lambda size: size // tensor if size % tensor == 0 else size
  heads, kv_heads = divided(model.num_heads), divided(model.num_kv_heads)
  if heads % kv_heads:
    heads, kv_heads = model.num_heads, model.num_kv_heads
  mixture = model.mixture
  if mixture is not None:
    chosen = min(experts * mixture.experts_per_token, mixture.num_experts)
    shared = None if mixture.shared_width is None else divided(mixture.shared_width)
    width = divided(mixture.width)
    mixture = Mixture(mixture.num_experts, chosen, width, mixture.normalised, shared)
  return dataclasses.replace(
    model,
    mixture=mixture,
    num_heads=heads,
    num_kv_heads=kv_heads,
    intermediate_size=divided(model.intermediate_size),
    vocab_size=divided(model.vocab_size),
  )


def choose_rows(
  config: Config, model: ModelConfig, full: Any, mesh: Mesh, *, room: int | None
) -> Choices:
  """Chooses the rows of a sampler beside which nothing is trained.

  Args:
    config: Config of the sampler.
    model: Sizes of the model.
    full: Shapes, dtypes and shardings of its weights.
    mesh: Mesh of the devices.
    room: Bytes of memory of a device; None: not known.
  """
  is_open = chosen_options.ROWS in chosen_options.open_fields(config)
  if not is_open or not samples(config) or current_chip().platform == "cpu" or room is None:
    return Choices(config)
  held = Arrays(weights=bytes_of_device(full), optimizer=0)
  sampler = _with_sampler(config, full, mesh, held)
  left = int((1 - MARGIN) * room) - sampler.sampler - held.always
  wanted = config.evaluation.num_prompts * config.evaluation.group_size
  rows, config = _with_rows(config, model, mesh, _Left(left, left), wanted)
  return Choices(config, (_of_rows(config, rows, sampler, room),), rows=rows)


def _hosts(mesh: Mesh) -> int:
  """Returns the number of processes that share the prompts of a step."""
  part = local_devices.part_of(mesh)
  return 1 if part is None else mesh.size // part.mesh.size


def _with_sampler(config: Config, full: Any, mesh: Mesh, held: Arrays) -> Arrays:
  """Adds the sampler's copies of the weights, by arithmetic."""
  dtype = Products(config.model.compute_dtype).compute_dtype
  part, own = local_devices.part_of(mesh), config.engine.devices
  base = lora.base_of(full)
  is_unmerged = bool(lora_options.is_unmerged(config))
  merged = lora.merged_always(full["layers"]) if is_unmerged else {}
  left_out = lambda name, x: isinstance(x, (Int8, Nf4)) or name in merged
  copied = {name: x for name, x in base["layers"].items() if not left_out(name, x)}
  heads = {"embed": base["embed"], **({"head": base["head"]} if "head" in base else {})}
  keeps = ahead_options.is_ahead(config)
  copies_heads = part is not None or own is not None or keeps
  if not copies_heads:
    table = heads.get("head", heads["embed"])
    heads = {} if table.dtype == dtype else {"head": table}
  scale = _split(mesh) / (len(own) if own else _split(part.mesh if part else mesh))
  copies = int(scale * _bytes_as(dtype.itemsize, (copied, heads)))
  adapter = 0
  if is_unmerged:  # what changes with it: the merged experts, and the adapters of other kernels.
    of_experts = int(scale * _bytes_as(dtype.itemsize, [x.base for x in merged.values()]))
    factors = {id(part): part for x in merged.values() for part in (x.a, x.b)}
    apart = held.adapter - bytes_of_device([*factors.values()])
    adapter = of_experts + apart * dtype.itemsize // 4
  return dataclasses.replace(
    held, sampler=copies + adapter, kept=copies if is_unmerged else 0, keeps_sampler=keeps
  )


def _split(mesh: Any) -> int:
  """Returns the number of parts of the weights on a mesh."""
  return math.prod(mesh.shape.get(axis, 1) for axis in ("fsdp", "context", "tensor"))


def _bytes_as(itemsize: int, tree: Any) -> int:
  """Returns the bytes of described arrays on one device, in a dtype of this size."""
  leaves = jax.tree.leaves(tree)
  return sum(bytes_of_device(x) // x.dtype.itemsize * itemsize for x in leaves)


class _Left(NamedTuple):
  """Bytes of a device that the rest of a run leaves to the sampler.

  Attributes:
    first: For the first caches and a decode step; the least update would fit beside them.
    later: For caches that have grown, and a decode step or the scores.
    scores: Bytes of the scores, which are computed before the caches are freed.
  """

  first: int
  later: int
  scores: int = 0


def _with_rows(
  config: Config, model: ModelConfig, mesh: Mesh, left: _Left, wanted: int
) -> tuple[Rows, Config]:
  """Chooses the sampler's rows and the memory of sampled tokens, unless the config has them.

  Args:
    config: Config of the run.
    model: Sizes of the model.
    mesh: Mesh of the trainer's devices.
    left: Bytes of a device that the rest of the run leaves to the sampler.
    wanted: Completions that are sampled at the same time.
  """
  part, own = local_devices.part_of(mesh), config.engine.devices
  local = mesh if part is None else part.mesh
  devices = len(own) if own else local.size
  heads = devices if own else local.shape["tensor"]
  heads = heads if model.num_kv_heads % heads == 0 else 1
  sampler = SamplerPart(
    model,
    Products(config.model.compute_dtype, config.model.product_dtype),
    run_options.lengths_of_sampler(config),
    heads=heads,
    rows=devices // heads,
    cache_dtype=config.engine.cache_dtype,
    copies_cache=sampler_memory.copies_cache(current_chip()),
  )
  if config.engine.max_rows is None:
    rows = sampler_memory.most_rows(sampler, wanted, left.first)
  else:
    sizes = run_options.sampler_sizes(config)
    rows = sampler.of(sizes["max_rows"], whole_caches=sizes["whole_caches"])
  most = sampler.most_sampled(
    rows.count, left.later, whole_caches=rows.whole_caches, others=left.scores
  )
  chosen = {chosen_options.ROWS: rows.count, chosen_options.CACHE: most}
  return rows, chosen_options.resolved(config, chosen)


def _of_remat(learning: Learning, remat: str) -> str:
  others = ", ".join(
    f"{each!r} would take {_gib(learning.peak(each))}" for each in REMATS if each != remat
  )
  return (
    f"an update recomputes {_ACTS[remat]} (model.remat={remat!r}): by arithmetic it takes"
    f" {_gib(learning.peak(remat))} of {_gib(learning.room)} GiB, and a tenth is to stay free;"
    f" {others}"
  )


def _of_rows(config: Config, rows: Rows, held: Arrays, room: int) -> str:
  most = f" (of sampled tokens later up to {config.engine.cache_gib}: engine.cache_gib)"
  whole = "" if rows.whole_caches else f" at first{most}"
  return (
    f"{rows.count} completions are sampled at the same time (engine.max_rows"
    f"={config.engine.max_rows}): by arithmetic keys and values take {_gib(rows.caches)}{whole} of"
    f" {_gib(room)} GiB, the sampler's weights {_gib(held.sampler)}, and what stays beside them"
    f" {_gib(held.always)}"
  )


def too_large(learning: Learning, remat: str) -> str:
  """Returns the warning of a choice that does not fit, with the one that would."""
  found = learning.fastest
  what = f"model.remat={found!r} fits" if found else f"no choice of model.remat fits; {LEAST!r}"
  size = _gib(learning.peak(found or LEAST))
  more = "" if found else f". What to do: {token_scores.SMALLER_BATCHES}"
  return (
    f"model.remat={remat!r} may not fit: by arithmetic an update takes"
    f" {_gib(learning.peak(remat))} GiB and the device has {_gib(learning.room)};"
    f" {what} with {size}{more}"
  )


def _gib(size: float) -> str:
  return f"{size / GIB:.1f}"
