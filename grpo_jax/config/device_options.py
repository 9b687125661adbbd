"""How `engine.devices` divides the devices between the trainer and the embedded sampler."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from grpo_jax.config import modes
from grpo_jax.config.options import Config
from grpo_jax.learn import sharding
from grpo_jax.values import options


def trainer_mesh(config: Config) -> Mesh:
  """Returns the mesh of the trainer: of all devices but those of the sampler.

  Raises:
    ValueError: The sizes of the mesh do not match the devices; see `sharding.make_mesh`.
  """
  sizes = options.values(config.mesh)
  if config.engine.devices is None:
    return sharding.make_mesh(**sizes)
  return sharding.make_mesh(**sizes, devices=_of_trainer(config, jax.devices()))


def of_sampler(config: Config) -> list[Any] | None:
  """Returns the sampler's own devices; None: it samples where the trainer's weights are."""
  if config.engine.devices is None:
    return None
  return [jax.devices()[index] for index in config.engine.devices]


def problems(config: Config, devices: Sequence[Any]) -> Iterator[str]:
  """Yields reasons why the devices cannot be divided, or why the mesh does not fit the trainer's.

  Args:
    config: Config whose fields are valid each by itself.
    devices: Devices of the run.
  """
  if config.engine.devices is None:
    yield from _misfit(config, devices)
    return
  taken, count = list(config.engine.devices), len(devices)
  given = f"engine.devices={tuple(taken)}"
  absent = [index for index in taken if index >= count]
  processes = max(
    config.distributed.processes or 1, len({device.process_index for device in devices})
  )
  if modes.is_offline(config):
    yield f"{given}: mode='offline' has no engine"
  elif config.engine.name != "jax_sampler":
    yield (
      f"{given} are devices of the embedded sampler, but engine.name={config.engine.name!r}: set it"
      " to None (GPUs of SGLang servers: engine.sglang.gpus)"
    )
  elif processes > 1:
    yield (
      f"{given} needs a run of one process, there are {processes}: set it to None, or sample with"
      " SGLang servers"
    )
  elif len(set(taken)) < len(taken):
    yield f"{given} names a device twice"
  elif absent:
    yield (
      f"{given} needs devices that do not exist: {', '.join(map(str, absent))}; they are numbered"
      f" from 0 to {count - 1}"
    )
  elif len(taken) == count:
    yield f"{given} takes all {count} devices, the trainer needs at least one"
  else:
    left = _of_trainer(config, devices)
    for reason in _misfit(config, left):
      yield f"{reason} ({given} leaves the trainer {len(left)} of {count} devices)"


def _of_trainer(config: Config, devices: Sequence[Any]) -> list[Any]:
  taken = set(config.engine.devices or ())
  return [device for index, device in enumerate(devices) if index not in taken]


def _misfit(config: Config, devices: Sequence[Any]) -> Iterator[str]:
  """Yields why the mesh does not fit the devices."""
  try:
    sharding.mesh_sizes(devices, **options.values(config.mesh))
  except ValueError as error:
    yield str(error)
