"""What a run holds and compiles, from its config and the sizes of its model.

The programs are the run's own (`building/computation.py`, `engines/jax_sampler.py`): a plan cannot
be of another program than the run compiles.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from grpo_kernels.attention import Attention
from jax.sharding import Mesh

from grpo_jax.building import computation, memory_choices, router_replay, weights_spec
from grpo_jax.building.arrays_in_memory import PROGRAMS, Arrays, bytes_of_device, held_by
from grpo_jax.building.memory_choices import Choices
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.config import ahead_options, lora_options, modes, run_options
from grpo_jax.config.options import Config
from grpo_jax.engines import jax_sampler, kv_cache, local_weights, sampler_inputs
from grpo_jax.learn import adapters, sharding
from grpo_jax.models import lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.errors import ModelError
from grpo_jax.models.products import Products
from grpo_plan import target

# Programs of one host's sampler.
_OF_SAMPLER = (
  "sampling",
  "reading prompts",
  "reading completions again",
  "growing keys and values",
)
# Programs of each place of a batch: their shapes are those of the microbatches.
OF_BATCHES = ("score", "teacher", "watch", "update")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """A run on a mesh of devices that need not exist.

  Attributes:
    config: Config of the run.
    model: Sizes of the model.
    mesh: Mesh of all devices.
    host: Devices of one host; see `target.assumed`.
    made: The programs of the update.
    arrays: Bytes of the arrays that lie in memory.
    jobs: Compilations of all programs; none if the arrays alone do not fit.
    sizes: Options of the sampler's sizes; empty: the run does not use the embedded sampler.
    sampler_mesh: Mesh of the sampler of one host; None: the run has none.
    weights_read: Bytes of the weights that one device reads in each decode step.
    cache_token: Bytes of keys and values of one token by the window of the layers, on all devices
      together.
    choices: Options that the run chooses by the memory of the machine; None: not asked.
    teacher: Sizes of the teacher in the trainer; None: there is none.
  """

  config: Config
  model: ModelConfig
  mesh: Mesh
  host: Sequence[Any]
  made: computation.Computation
  arrays: Arrays
  jobs: tuple[CompileJob, ...]
  sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  sampler_mesh: Mesh | None = None
  weights_read: int = 0
  cache_token: Mapping[int | None, int] = dataclasses.field(default_factory=dict)
  choices: Choices | None = None
  teacher: ModelConfig | None = None

  @property
  def prefill(self) -> int:
    """Tokens of prompts that the sampler reads at once."""
    names = [job.name for job in self.jobs if program_of(job.name) == "reading prompts"]
    return size_of(names[0])

  @property
  def samples_whole(self) -> bool:
    """Whether each device of a host holds all weights for its sampler, though the run splits them.

    So it is where the devices of a host are not a block of the mesh (`processes.local_devices`).
    """
    if self.sampler_mesh is None or self.sampler_mesh.size in (1, self.mesh.size):
      return False
    axes = ("fsdp", "expert", "context", "tensor")
    parts = lambda mesh: math.prod(mesh.shape.get(axis, 1) for axis in axes)
    return parts(self.mesh) > 1 and parts(self.sampler_mesh) == 1

  @property
  def is_spread(self) -> bool:
    """Whether each host has a copy of all weights for its sampler, quantised ones included."""
    return self.sampler_mesh is not None and self.sampler_mesh.size < self.mesh.size

  def assumed(self) -> Any:
    """Returns the context in which code runs as on the machine."""
    return target.assumed(list(self.mesh.devices.flat), self.host)


def mesh_of(run: PlannedRun, job: CompileJob) -> Mesh:
  """Returns the mesh of a program: that of one host for the sampler's, else that of the run."""
  is_local = program_of(job.name) in _OF_SAMPLER
  return run.sampler_mesh if is_local and run.sampler_mesh is not None else run.mesh


def program_of(job: str) -> str | None:
  """Returns which of `PROGRAMS` a job compiles; None for one that takes little memory.

  Args:
    job: Name of the job, with its shapes: "update 24 × 2304 (2304)".
  """
  return next((name for name in PROGRAMS if re.fullmatch(rf"{name}( \d.*)?", job)), None)


def largest(jobs: Sequence[CompileJob]) -> list[CompileJob]:
  """Returns one job of each program: the one with the most rows × tokens.

  Of those of a cache that grows (`JaxSampler.later`) it returns one for each number of columns.
  """
  best: dict[tuple[str, str], CompileJob] = {}
  for job in jobs:
    name, found = program_of(job.name), re.search(r"× \d+ columns", job.name)
    key = name or "", found[0] if found else ""
    if name is not None and (key not in best or size_of(job.name) > size_of(best[key].name)):
      best[key] = job
  grown = {name for name, columns in best if columns}
  return [job for (name, columns), job in best.items() if columns or name not in grown]


def smaller(jobs: Sequence[CompileJob]) -> list[CompileJob]:
  """Returns the jobs of programs in other shapes than those of `largest`."""
  names = {job.name for job in largest(jobs)}
  return [job for job in jobs if program_of(job.name) is not None and job.name not in names]


def size_of(job: str) -> int:
  """Returns the product of the numbers that a job's name has outside of parentheses."""
  words = job.partition("(")[0].split()
  return math.prod(int(word) for word in words if word.isdigit())


def adapter_bytes(run: PlannedRun, rank: int) -> int:
  """Returns the bytes of an adapter of all kernels in float32, on one device.

  Args:
    run: The run; it need not have an adapter.
    rank: Rank of the adapter.
  """
  tree = lora.tree(run.model, lora.AdapterOptions(rank))
  axes = jax.tree.map(lambda leaf: leaf.axes, tree)
  placed = sharding.param_shardings(axes, run.mesh, shapes=tree)
  describe = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=where)
  return bytes_of_device(jax.tree.map(describe, tree, placed))


def base_bytes(run: PlannedRun, dtype: str) -> int | None:
  """Returns the bytes of a frozen base on one device; None if the mesh cannot split this dtype.

  Args:
    run: The run; it need not have an adapter.
    dtype: One of `lora.BASE_DTYPES`.
  """
  dtypes = adapters.read_dtypes(lora.AdapterOptions(rank=1, base_dtype=dtype))
  placed = weights_spec.shardings_of(run.model, run.mesh)
  try:
    return bytes_of_device(weights_spec.described_weights(run.model, placed, dtype=dtypes))
  except ModelError:  # nf4 has blocks of inputs.
    return None


def described(
  config: Config,
  model: ModelConfig,
  mesh: Mesh,
  *,
  host: Sequence[Any] | None = None,
  teacher: ModelConfig | None = None,
) -> PlannedRun:
  """Returns what a run holds and compiles; nothing is compiled for the target.

  Args:
    config: Valid config of the run.
    model: Sizes of the model.
    mesh: Mesh of the target's devices.
    host: Devices of one host; None: all are of one.
    teacher: Sizes of the teacher in the trainer; None: there is none.

  Raises:
    ValueError: The options cannot work together, or with the model.
  """
  devices = list(mesh.devices.flat)
  host = devices if host is None else host
  with target.assumed(devices, host):
    made = computation.make(config, model, mesh, run_options.objective(config), teacher=teacher)
    arrays, jobs = held_by(made), made.jobs()
    run = PlannedRun(config, model, mesh, host, made, arrays, tuple(jobs), teacher=teacher)
    if config.engine.name != "jax_sampler" or modes.is_offline(config):
      return run
    return _with_sampler(run)


def without_programs(
  choices: Choices,
  model: ModelConfig,
  mesh: Mesh,
  *,
  host: Sequence[Any],
  teacher: ModelConfig | None = None,
) -> PlannedRun:
  """Returns a run whose arrays are known by arithmetic, and whose programs are not described.

  Args:
    choices: Valid config of the run, with what it chooses.
    model: Sizes of the model.
    mesh: Mesh of the target's devices.
    host: Devices of one host.
    teacher: Sizes of the teacher in the trainer; None: there is none.
  """
  config = choices.config
  with target.assumed(list(mesh.devices.flat), host):
    made = computation.make(config, model, mesh, run_options.objective(config), teacher=teacher)
    held = held_by(made) if choices.held is None else choices.held
  sizes = run_options.sampler_sizes(config) if memory_choices.samples(config) else {}
  return PlannedRun(
    config, model, mesh, host, made, held, (), sizes, choices=choices, teacher=teacher
  )


def _with_sampler(run: PlannedRun) -> PlannedRun:
  """Adds the embedded sampler of one host."""
  config, params = run.config, run.made.full
  sizes = run_options.sampler_sizes(config)
  sampler = jax_sampler.JaxSampler(
    run.model,
    compute_dtype=config.model.compute_dtype,
    product_dtype=config.model.product_dtype,
    matmul_precision=config.model.matmul_precision,
    attention=Attention(config.model.attention),
    unmerged=lora_options.is_unmerged(config),
    **router_replay.engine_options(config, run.model),
    **sizes,
  )
  is_spread = local_weights.is_spread(params)
  # Caches on one device are made without naming it.
  with sampler, jax.default_device(run.host[0]):
    weights, caches = sampler.described(params)
    jobs, later = sampler.programs(params), sampler.later(params)
  is_shared = not is_spread and weights.head.dtype == params["embed"].dtype
  kept = [weights.layers, () if is_shared else weights.head]
  keeps_sampler = ahead_options.is_ahead(config)
  if is_spread or keeps_sampler:  # nothing is the trainer's, and a tied head is the embedding.
    is_tied = run.model.tie_embeddings and (is_spread or is_shared)
    head = () if is_tied else weights.head
    kept = [weights.layers, weights.quantized, weights.final_norm, weights.embed, head]
  copies = bytes_of_device(kept)
  arrays = dataclasses.replace(
    run.arrays,
    sampler=copies + bytes_of_device(weights.adapters),
    kept=copies if weights.adapters else 0,
    caches=max(bytes_of_device(each) for each in (caches, *(grown for grown, _ in later))),
    keeps_sampler=keeps_sampler,
  )
  return dataclasses.replace(
    run,
    arrays=arrays,
    jobs=(*jobs, *(job for _, of_level in _decisive(later) for job in of_level), *run.jobs),
    sizes=sizes,
    sampler_mesh=jax.tree.leaves(weights)[0].sharding.mesh,
    weights_read=bytes_of_device(
      [weights.layers, weights.quantized, weights.adapters, weights.head]
    ),
    cache_token=_token_bytes(config, run.model),
  )


def _decisive(later: Sequence[tuple[Any, Sequence[CompileJob]]]) -> list[Any]:
  """Returns of longer caches the one with the most bytes, then that of the longest completion."""
  if not later:
    return []
  most = max(later, key=lambda level: bytes_of_device(level[0]))
  return [most] if most is later[-1] else [most, later[-1]]


def _token_bytes(config: Config, model: ModelConfig) -> dict[int | None, int]:
  """Returns the bytes of the sampler's keys and values of one token; see `kv_cache.token_bytes`."""
  products = Products(config.model.compute_dtype, config.model.product_dtype)
  return kv_cache.token_bytes(
    sampler_inputs.ProgramOptions(model, products, chunk=1, cache_dtype=config.engine.cache_dtype)
  )
