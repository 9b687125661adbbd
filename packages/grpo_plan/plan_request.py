"""From the words of the command to the run to plan: config, sizes of the model, mesh."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax

from grpo_jax import engines
from grpo_jax.building import memory_choices
from grpo_jax.config import command_line, configuration, modes, run_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn import sharding
from grpo_jax.models import config as model_config
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.errors import ModelError
from grpo_jax.values import options
from grpo_plan import architectures, chips, compiling, plan, programs, target, topologies
from grpo_plan.chips import GIB
from grpo_plan.programs import PlannedRun
from grpo_plan.topologies import PlanError, Topology

# What a plan does not need: the rows, which are not read, and the weights, which are not loaded.
_NOT_NEEDED = ("data.", "evaluation.data", "model.path", "model.fallback", "logging.")


class DoesNotFit(ExpectedFailure):
  """A run is so much too large that its programs cannot even be described."""


def config_of(arguments: Sequence[str]) -> Config:
  """Returns the config of a command line, resolved.

  Args:
    arguments: --config=… and overrides of its fields, as for training.

  Raises:
    ConfigError: The arguments are wrong, or the options cannot work together.
  """
  config = command_line.parse(arguments).config
  if lacking := run_options.missing(config):
    raise ConfigError(lacking)
  try:
    return run_options.resolved(config)
  except (TypeError, ValueError) as error:
    raise ConfigError(str(error)) from error


def model_of(
  config: Config, given: str | None, folder: pathlib.Path, *, field: str = "model.path"
) -> tuple[ModelConfig, str]:
  """Returns the sizes of the run's model, and where they are from.

  Args:
    config: Config of the run.
    given: File, folder or name in place of the field; None: the field.
    folder: Folder to which its config.json is written, for the checks of the run.
    field: Field of the config that names the model.

  Raises:
    PlanError: The model cannot be found, or is not supported.
  """
  section, _, name = field.rpartition(".")
  path = getattr(getattr(config, section), name) if given is None else given
  option = field if given is None else "--model-config"
  try:
    hf, source = architectures.find(path)
    (folder / "config.json").write_text(json.dumps(hf))
    return model_config.from_hf(hf, where=source), source
  # RuntimeError: pathlib does not know the home of a user.
  except (OSError, RuntimeError, ModelError) as error:
    reason = str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")
    raise PlanError(f"{option}={path}: {reason}") from error


def run_of(
  config: Config,
  model: ModelConfig,
  topology: Topology,
  folder: pathlib.Path,
  *,
  source: str = "the given sizes",
) -> PlannedRun:
  """Returns the run on the machine; without programs if its arrays alone do not fit.

  Args:
    config: Config of the run.
    model: Sizes of its model.
    topology: The machine.
    folder: Folder with the model's config.json.
    source: Origin of the model's sizes, for errors.

  Raises:
    ConfigError: The run would refuse its options, its mesh or its model.
    DoesNotFit: The compiler refuses what the plan begins with.
  """
  found = by_arithmetic(config, model, topology, folder, source=source)
  if plan.largest_arrays(found.arrays) > topology.chip.usable:
    return found
  try:
    run = programs.described(
      found.config, model, found.mesh, host=found.host, teacher=found.teacher
    )
    return dataclasses.replace(run, choices=found.choices)
  except jax.errors.JaxRuntimeError as error:  # where the sampler's copies lie is compiled.
    needed = compiling.refused_bytes(str(error))
    if needed is None:
      raise
    raise _too_large_to_copy(topology, needed) from error


def by_arithmetic(
  config: Config,
  model: ModelConfig,
  topology: Topology,
  folder: pathlib.Path,
  *,
  source: str = "the given sizes",
) -> PlannedRun:
  """Returns the run on the machine without its programs: arrays, mesh, and what it chooses.

  Nothing is compiled. Arguments and errors are those of `run_of`.
  """
  _check_engine(config)
  config = _with_nodes(config, topology)
  devices = topologies.devices(topology)
  host = topologies.host_of(topology)
  local = devices if host is topology else topologies.devices(host)
  with target.assumed(devices, local):
    found = run_options.validate(config, devices=devices)
    complaints = [each for each in found if not each.startswith(_NOT_NEEDED)]
    if complaints:
      raise ConfigError("\n".join(complaints))
    try:
      mesh = sharding.make_mesh(**options.values(config.mesh), devices=devices)
    except ValueError as error:
      raise PlanError(f"--topology={topology.name}: {error}") from error
    try:
      plan.check(config, mesh, folder)
    except ConfigError as error:  # the folder is a temporary one.
      raise ConfigError(str(error).replace(str(folder), source)) from error
  teacher = None
  if config.teacher.path:
    teacher, _ = model_of(config, None, folder, field="teacher.path")
  with target.assumed(devices, local):
    choices = memory_choices.choose(config, model, mesh, room=topology.chip.usable, teacher=teacher)
  return programs.without_programs(choices, model, mesh, host=local, teacher=teacher)


def in_run(topology: Topology, config: Config) -> Topology:
  """Returns a machine with the memory that JAX takes of its devices in a run.

  Raises:
    PlanError: The environment has a share of a GPU's memory that is not one.
  """
  try:
    return dataclasses.replace(topology, chip=chips.in_run(topology.chip, config.engine.name))
  except ValueError as error:
    raise PlanError(str(error)) from error


def _too_large_to_copy(topology: Topology, needed: int) -> DoesNotFit:
  """Returns the failure of a run whose weights cannot be copied for the embedded sampler."""
  return DoesNotFit(
    f"DOES NOT FIT {topology.name}: copying the layers for the embedded sampler takes"
    f" {needed / GIB:.2f} GiB by the compiler, before anything is sampled, and a device has"
    f" {topology.chip.usable / GIB:.2f} GiB. What to turn: more devices; servers elsewhere"
    " (--config.engine.name=sglang); or LoRA on a quantised base, which is not copied"
    " (--config.model.lora.rank=32 --config.model.lora.base_dtype=int8, or nf4)"
  )


def _check_engine(config: Config) -> None:
  """Raises ConfigError if the engine does not exist, or has devices of its own."""
  if config.engine.devices is not None:
    raise ConfigError(
      f"engine.devices={tuple(config.engine.devices)}: a plan describes a sampler on the trainer's"
      " devices only: set it to None"
    )
  if not modes.is_offline(config):
    try:
      engines.module(config.engine.name)
    except ValueError as error:
      raise ConfigError(f"engine.name={config.engine.name!r}: {error}") from error


def _with_nodes(config: Config, topology: Topology) -> Config:
  """Sets the number of replicas where the run would take it from the nodes of GPUs.

  GPUs that are only described do not name their NVLink domain, by which `learn.device_mesh` counts
  nodes.
  """
  is_gpu, mesh = topology.chip.platform == "gpu", config.mesh
  if not is_gpu or (mesh.data, mesh.fsdp) != (-1, -1):
    return config
  return configuration.replaced(config, {"mesh.data": topology.slices})
