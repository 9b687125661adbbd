"""Checks whether a whole run fits chips that are not present, by compiling all its programs.

    python -m scripts.fit_run --config=configs/math_1b.py --target=v5e:2x4
    python -m scripts.fit_run --config=configs/math_1b.py --target=h100 --config.engine.max_rows=256

The shapes are those that the run compiles, from its config and the sizes of its model. No weights
are made, and neither a device nor its driver is needed, only the target's compiler; see
`scripts.fit`. Each program is compiled in its largest shape, or in all with --all-shapes, and
its memory is added to that of the arrays that the run holds at that time.

Exit code 0: everything fits; 1: something does not; 2: the arguments or the config are wrong.
"""

import argparse
import dataclasses
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scripts import fit, targets  # first: sets variables that JAX reads on import.

import jax  # isort: skip

from grpo_kernels.attention import Attention

from grpo_jax.building import computation
from grpo_jax.compilation.programs import Job
from grpo_jax.config import command_line, modes, run_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.engines import decoding, jax_sampler
from grpo_jax.learn import sharding
from grpo_jax.models import config as model_config
from grpo_jax.models.config import ModelConfig
from grpo_jax.planning import architectures as model_shapes

WRONG_USE = 2

# An ml_collections.ConfigDict, whose fields are unknown to a type checker.
Config = Any


@dataclasses.dataclass(frozen=True)
class Arrays:
  """Bytes that the arrays of a run take on one device, without those of its programs.

  Attributes:
    weights: Float32 weights. The sum of the gradients takes as many.
    optimizer: State of the optimizer.
    reference: The frozen reference policy; 0 if the loss needs none.
    sampler: The embedded sampler's copy of the weights, freed before gradients are computed.
    caches: The sampler's keys and values, also freed.
    initial: The initial policy, read again to measure how far the policy has moved; 0 if that is
      not measured, or there is a reference.
  """

  weights: int
  optimizer: int
  reference: int = 0
  sampler: int = 0
  caches: int = 0
  initial: int = 0

  @property
  def always(self) -> int:
    """Bytes that the run holds from its beginning to its end."""
    return self.weights + self.optimizer + self.reference

  def beside(self, program: str) -> int:
    """Returns the bytes of all arrays in memory when a program is called.

    Args:
      program: Name of the program without its shapes, one of `PROGRAMS`.
    """
    return self.always + PROGRAMS[program](self)


# Programs of a run that take memory, and the arrays besides weights, optimizer and reference.
PROGRAMS = {
  "reading prompts": lambda arrays: arrays.sampler + arrays.caches,
  "sampling": lambda arrays: arrays.sampler + arrays.caches,
  "score": lambda arrays: arrays.sampler + arrays.caches,
  "watch": lambda arrays: arrays.initial,
  "update": lambda arrays: arrays.weights,  # the sum to which gradients are added in place.
  "optimizer": lambda arrays: arrays.weights,
}


@dataclasses.dataclass(frozen=True)
class Need:
  """Memory of one program of a run, in bytes of one device.

  Attributes:
    name: Name of the program and its shape.
    beside: Arrays in memory when it is called, its arguments included.
    arguments: Its arguments.
    outputs: Its results, without those in the memory of donated arguments.
    temporaries: Its temporaries.
    is_refused: Whether the compiler rejects the program alone as too large; `outputs` are then
      not known, and 0.
    compile_s: Seconds of its compilation.
  """

  name: str
  beside: int
  arguments: int
  outputs: int
  temporaries: int
  is_refused: bool
  compile_s: float

  @property
  def peak(self) -> int:
    """The largest memory of the run while the program runs."""
    return self.beside + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class Question:
  """The input: a config, the sizes of its model, and a mesh of the target's devices."""

  target: str
  config: Config
  model: ModelConfig
  mesh: Any
  all_shapes: bool = False


def program_of(job: str) -> str | None:
  """Returns which of `PROGRAMS` a job compiles; None for one that takes little memory.

  Args:
    job: Name of the job, with its shapes: "update 24 × 2304 (2304)".
  """
  return next((name for name in PROGRAMS if re.fullmatch(rf"{name}( \d.*)?", job)), None)


def largest(jobs: Sequence[Job]) -> list[Job]:
  """Returns one job of each program: the one with the most rows × tokens."""
  best: dict[str, Job] = {}
  for job in jobs:
    name = program_of(job.name)
    if name is not None and (name not in best or _size(job.name) > _size(best[name].name)):
      best[name] = job
  return list(best.values())


def _size(job: str) -> int:
  """Returns the product of the numbers that a job's name has outside of parentheses."""
  words = job.partition("(")[0].split()
  return math.prod(int(word) for word in words if word.isdigit())


def bytes_of_device(tree: Any) -> int:
  """Returns the bytes of described arrays on one device."""
  return sum(_held(leaf) for leaf in jax.tree.leaves(tree))


def _held(leaf: Any) -> int:
  shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
  return math.prod(shape) * leaf.dtype.itemsize


def needs(question: Question, arrays: Arrays, jobs: Sequence[Job]) -> Iterator[Need]:
  """Compiles the programs of a run, one after the other, and yields the memory of each.

  Args:
    question: The target, and whether all shapes are compiled.
    arrays: Arrays of the run, as `plan` returns them.
    jobs: Compilations of the run, as `plan` returns them.

  Raises:
    jax.errors.JaxRuntimeError: A compilation fails for another reason than memory.
  """
  for job in jobs if question.all_shapes else largest(jobs):
    name = program_of(job.name)
    if name is not None:
      yield _need(job, arrays.beside(name), question)


def _need(job: Job, beside: int, question: Question) -> Need:
  began = time.monotonic()
  with fit.on_chip(question.mesh.devices.flat[0]):
    try:
      found = job.run().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
      temporaries = fit.refused_bytes(str(error))
      if temporaries is None:
        raise
      return Need(job.name, beside, 0, 0, temporaries, True, time.monotonic() - began)
  return Need(
    name=job.name,
    beside=beside,
    arguments=found.argument_size_in_bytes,
    outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
    temporaries=found.temp_size_in_bytes,
    is_refused=False,
    compile_s=time.monotonic() - began,
  )


def plan(question: Question) -> tuple[Arrays, list[Job]]:
  """Returns the bytes of a run's arrays, and the compilations of all its programs."""
  config, model, mesh = question.config, question.model, question.mesh
  with fit.on_chip(mesh.devices.flat[0]):
    made = computation.make(config, model, mesh, run_options.objective(config))
    state, jobs = made.state, made.jobs()
    weights, needs_ref = bytes_of_device(state.params), made.objective.needs_ref
    reads_again = bool(config.learn.report_kl_every_steps) and not needs_ref
    arrays = Arrays(
      weights=weights,
      optimizer=bytes_of_device(state.opt_state),
      reference=weights * needs_ref,
      initial=weights * reads_again,
    )
    if config.engine.name != "jax_sampler" or modes.is_offline(config):
      return arrays, jobs
    sampler, caches, sampler_jobs = _sampler(config, model, state.params)
  return dataclasses.replace(arrays, sampler=sampler, caches=caches), sampler_jobs + jobs


def _sampler(config: Config, model: ModelConfig, params: Any) -> tuple[int, int, list[Job]]:
  """Returns the bytes of the sampler's weights, those of its caches, and its compilations."""
  sampler = jax_sampler.JaxSampler(
    model,
    compute_dtype=config.model.compute_dtype,
    product_dtype=config.model.product_dtype,
    matmul_precision=config.model.matmul_precision,
    attention=Attention(config.model.attention),
    **run_options.sampler_sizes(config),
  )
  # Caches on one device are made without naming it.
  with sampler, jax.default_device(jax.tree.leaves(params)[0].sharding.mesh.devices.flat[0]):
    weights, caches = sampler.described(params)
    jobs = sampler.programs(params)
  own = [weights.layers, () if _is_shared(weights, params) else weights.head]
  return bytes_of_device(own), bytes_of_device(caches), jobs


def _is_shared(weights: decoding.Weights, params: Any) -> bool:
  """Returns whether the sampler's head is the trainer's own array."""
  return weights.head.dtype == params["embed"].dtype


def table(found: Sequence[Need], arrays: Arrays, room: int | None, target: str) -> str:
  """Returns the answer as lines of text, in GiB of one device."""
  gib = lambda size: f"{size / fit.GIB:10.2f}"
  lines = [
    "GiB of one device",
    f"weights, float32             {gib(arrays.weights)}",
    f"optimizer's state            {gib(arrays.optimizer)}",
    f"reference policy             {gib(arrays.reference)}",
    f"sampler's copy of the weights{gib(arrays.sampler)}",
    f"sampler's caches             {gib(arrays.caches)}",
    "",
    f"{'program':32}{'arrays':>10}{'results':>10}{'temporaries':>13}{'together':>10}",
  ]
  for need in found:
    numbers = f"{gib(need.beside)}{gib(need.outputs)}{gib(need.temporaries):>13}{gib(need.peak)}"
    note = "  refused by the compiler" if need.is_refused else ""
    lines.append(f"{need.name:32}{numbers}{note}")
  most = max(found, key=lambda need: (need.is_refused, need.peak))
  if room is None:
    lines.append(f"needs {most.peak / fit.GIB:.2f} GiB ({most.name})")
  else:
    verdict = "fits" if fits(found, room) else "DOES NOT FIT"
    of = f"{most.peak / fit.GIB:.2f} of {room / fit.GIB:.2f} GiB"
    lines.append(f"{verdict} {target}: {of} ({most.name})")
  return "\n".join(lines)


def fits(found: Sequence[Need], room: int) -> bool:
  """Returns whether every program fits in addition to the arrays of the run."""
  return all(need.peak <= room and not need.is_refused for need in found)


def parse(arguments: Sequence[str]) -> Question:
  """Makes a question from the command line; exits with code 2 if the arguments are invalid."""
  parser = argparse.ArgumentParser(
    description=(__doc__ or "").partition("\n")[0],
    epilog="--config=FILE.py and --config.SECTION.FIELD=VALUE are those of grpo_jax.main",
    allow_abbrev=False,
  )
  parser.add_argument("--target", required=True, help='"h100", "v5e:2x4", "v6e:2x4" or "cpu"')
  parser.add_argument("--devices", type=int, help="default: one h100 or CPU, all of a slice")
  parser.add_argument(
    "--model", help="a folder, or one of model_shapes.SHAPES; default: the config's model.path"
  )
  parser.add_argument(
    "--all-shapes", action="store_true", help="compile each program in every shape, not only one"
  )
  given, rest = parser.parse_known_args(arguments)
  try:
    config = run_options.resolved(command_line.parse(rest).config)
    model = model_config.from_hf(model_shapes.read(given.model or _known(config.model.path)))
    devices = targets.devices(given.target, given.devices)
    mesh = sharding.make_mesh(**config.mesh, devices=devices)
  except (ConfigError, OSError, ValueError, RuntimeError) as error:
    parser.error(str(error))
  return Question(given.target, config, model, mesh, given.all_shapes)


def _known(path: str) -> str:
  """Returns the name in `model_shapes.SHAPES` that a hub name means; other paths unchanged."""
  name = path.rpartition("/")[2].removesuffix("-Instruct")
  return name if name in model_shapes.SHAPES else path


def main(arguments: Sequence[str]) -> int:
  """Prints the answer; returns the exit code."""
  question = parse(arguments)
  try:
    arrays, jobs = plan(question)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE
  found = []
  for need in needs(question, arrays, jobs):
    print(f"{need.name}: compiled in {need.compile_s:.0f} s", file=sys.stderr, flush=True)
    found.append(need)
  room = targets.usable_bytes(question.target)
  print(table(found, arrays, room, question.target))
  return int(room is not None and not fits(found, room))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
