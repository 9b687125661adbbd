"""Predicts whether an update fits a chip that is not present, and what its devices exchange.

    python -m scripts.fit --target=v5e:2x4 --model=Qwen2.5-1.5B --shape=8x1024
    python -m scripts.fit --target=h100 --devices=8 --model=FOLDER --tensor=2 --shape=2x4096
    python -m scripts.fit --target=cpu --devices=8 --model=Qwen3-8B --layers=2

Compiles the gradients of one microbatch, or the scorer, for the target. No weights are made, and
neither a device nor its driver is needed, only the target's compiler: `make aot` installs those
of .venv-aot-h100 and .venv-aot-tpu; "cpu" works in any environment of the project.

A TPU's compiler takes less than a minute to reject a program that does not fit by itself, and
reports the bytes; a program that fits takes a few minutes. Exit code 0: it fits; 1: it does not
fit; 2: the arguments are wrong.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
if "xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):
  # There is no device on which variants of a kernel could be tried.
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
from grpo_kernels import implementations
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.compilation import precision
from grpo_jax.learn import optim, sharding, train_step
from grpo_jax.models import config as model_config
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_jax.planning import architectures as model_shapes
from grpo_jax.planning import collectives as hlo_collectives
from grpo_jax.planning import compiling
from grpo_jax.planning.programs import bytes_of_device
from grpo_jax.rl import objectives
from grpo_jax.types import Batch, Denominators
from scripts import targets

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
  """The program to compile, and its target.

  Attributes:
    target: "h100", a TPU slice such as "v5e:2x4", or "cpu".
    model: Sizes of the model.
    mesh: Mesh of the target's devices.
    rows: Rows of a microbatch on each device.
    row_tokens: Row length T.
    loss_tokens: Largest number N of loss tokens in a row.
    program: "update" or "scorer".
    products: Options of matrix products, including their placement on the mesh.
    remat: Activations that the backward pass recomputes; see `transformer.Transformer`.
    has_reference: Whether the run also has a frozen reference.
  """

  target: str
  model: ModelConfig
  mesh: Mesh
  rows: int
  row_tokens: int
  loss_tokens: int
  program: str
  products: Products
  remat: str
  has_reference: bool


@dataclasses.dataclass(frozen=True)
class Found:
  """The compiler's answer, in bytes of one device.

  Attributes:
    state: Bytes of the arrays that a run keeps between steps: weights, AdamW's two moments, the sum
      of the gradients and a reference policy.
    outputs: Bytes of the program's results: gradients of the microbatch, or logprobs.
    temporaries: Bytes of the program's temporaries.
    collectives: Bytes received by kind of collective. None for a TPU, whose program repeats a
      collective in every piece of what it overlaps.
    compile_s: Seconds that the compilation took.
  """

  state: int
  outputs: int
  temporaries: int
  collectives: dict[str, float] | None
  compile_s: float

  @property
  def peak(self) -> int:
    """Bytes of the program and the run's state together."""
    return self.state + self.outputs + self.temporaries


def find(case: Case) -> Found:
  """Compiles a case and reads memory and collectives from the compiler."""
  arguments = (_parameters(case), _batch(case))
  with implementations.assumed_chip(implementations.chip_of(case.mesh.devices.flat[0])):
    lowered = _program(case).lower(*arguments)
  weights = bytes_of_device(arguments[0])
  learns = case.program == "update"
  state = weights * (3 * learns + 1 * (not learns) + case.has_reference * learns)
  outputs = weights if learns else 4 * case.rows * case.loss_tokens
  began = time.monotonic()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    temporaries, moved = compiling.refused_bytes(str(error)), None
    if temporaries is None:
      raise
  else:
    moved = None
    if not case.target.startswith("v"):
      found = hlo_collectives.collectives(compiled.as_text(), devices=case.mesh.size)
      moved = hlo_collectives.by_kind(found)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
  return Found(state, outputs, temporaries, moved, time.monotonic() - began)


def _program(case: Case) -> Any:
  """Returns the jitted function (parameters, fields of a batch) → results."""
  policy_options = {
    "products": case.products,
    "remat": case.remat,
    "partition": sharding.head_partition(case.mesh),
  }
  matmul_precision = precision.resolve(None, case.products.compute_dtype)
  logprobs = train_step.make_logprobs(case.model, **policy_options)
  if case.program == "scorer":
    score = train_step.make_scorer(logprobs, matmul_precision=matmul_precision)
    return jax.jit(lambda params, fields: score(params, Batch(**fields)))
  objective = objectives.make(kl_coef=0.01 if case.has_reference else 0.0)
  update = train_step.make_update(
    logprobs,
    optim.make(1)[0],
    objective,
    report_entropy=True,
    shardings=_shardings(case),
    token_loss=train_step.make_token_loss(case.model, objective, **policy_options),
    matmul_precision=matmul_precision,
  )

  def differentiate(params, fields):
    one = jnp.float32(1.0)
    sums = update.start(params)
    return update.differentiate(params, sums, Batch(**fields), Denominators(one, one))

  return jax.jit(differentiate)


def _shardings(case: Case) -> Any:
  axes, shapes = transformer.logical_axes(case.model), leaves.tree(case.model)
  return sharding.param_shardings(axes, case.mesh, shapes=shapes)


def _parameters(case: Case) -> Any:
  """Returns shapes, dtypes and shardings of the parameters."""
  describe = lambda leaf, lies: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=lies)
  return jax.tree.map(describe, leaves.tree(case.model), _shardings(case))


def _batch(case: Case) -> dict[str, Any]:
  """Returns shapes, dtypes and shardings of the fields of a microbatch."""
  rows = case.rows * sharding.replicas(case.mesh)
  lies = NamedSharding(case.mesh, PartitionSpec(sharding.ROWS))
  of = lambda length, dtype: jax.ShapeDtypeStruct((rows, length), dtype, sharding=lies)
  whole, real = of(case.row_tokens, jnp.int32), of(case.row_tokens, jnp.float32)
  names = ("tokens", "segment_ids", "branch_ids", "positions", "predecessors", "rollout_ids")
  fields: dict[str, Any] = {name: whole for name in names}
  fields |= {"advantages": real, "behavior_logprobs": real}
  fields["loss_mask"] = of(case.row_tokens, jnp.bool_)
  fields["loss_places"] = of(case.loss_tokens, jnp.int32)
  if case.has_reference:
    fields["ref_logprobs"] = of(case.loss_tokens, jnp.float32)
  return fields


def table(case: Case, found: Found) -> str:
  """Returns the answer as a table for the terminal."""
  room = targets.usable_bytes(case.target)
  lines = [
    f"a run's arrays between steps {found.state / GIB:8.2f} GiB per device",
    f"results of the program       {found.outputs / GIB:8.2f}",
    f"temporaries                  {found.temporaries / GIB:8.2f}",
    f"together                     {found.peak / GIB:8.2f}",
  ]
  if room:
    verdict = "fits" if found.peak <= room else "DOES NOT FIT"
    lines.append(f"{case.target} has                {room / GIB:12.2f}: {verdict}")
  if found.collectives is not None:
    moved = found.collectives
    lines += [f"{kind:28}{moved[kind] / 1e9:9.2f} GB received per device" for kind in sorted(moved)]
  lines.append(f"compiled in {found.compile_s:.0f} s")
  return "\n".join(lines)


def parse(arguments: Sequence[str]) -> Case:
  """Makes a case from the command line; exits with code 2 if the arguments are wrong."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--target", required=True, help='"h100", "v5e:2x4", "v6e:2x4" or "cpu"')
  parser.add_argument("--devices", type=int, help="default: one h100 or CPU, all of a slice")
  parser.add_argument("--model", required=True, help="a folder, or one of model_shapes.SHAPES")
  parser.add_argument("--layers", type=int, help="instead of the model's own number")
  for axis, default in (("data", 1), ("fsdp", -1), ("tensor", 1)):
    parser.add_argument(f"--{axis}", type=int, default=default, help=f"as mesh.{axis}")
  parser.add_argument("--shape", default="8x1024", help="ROWSxTOKENS of one device's microbatch")
  parser.add_argument("--loss-tokens", type=int, help="loss tokens in a row; default: all")
  parser.add_argument("--program", choices=("update", "scorer"), default="update")
  parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
  parser.add_argument("--remat", choices=("none", "dots", "full"), default="full")
  parser.add_argument("--no-reference", action="store_true", help="for a loss without KL")
  parser.add_argument(
    "--unplaced", action="store_true", help="let the compiler place the activations"
  )
  given = parser.parse_args(arguments)
  shape = re.fullmatch(r"(\d+)x(\d+)", given.shape)
  if shape is None:
    parser.error(f"--shape={given.shape} is not ROWSxTOKENS, such as 8x1024")
  try:
    model = model_config.from_hf(model_shapes.read(given.model))
    devices = targets.devices(given.target, given.devices)
    mesh = sharding.make_mesh(
      data=given.data, fsdp=given.fsdp, tensor=given.tensor, devices=devices
    )
  except (OSError, ValueError, RuntimeError) as error:
    parser.error(str(error))
  if given.layers:
    model = dataclasses.replace(model, num_layers=given.layers)
  placement = None if given.unplaced else sharding.placement(mesh)
  return Case(
    target=given.target,
    model=model,
    mesh=mesh,
    rows=int(shape[1]),
    row_tokens=int(shape[2]),
    loss_tokens=given.loss_tokens or int(shape[2]),
    program=given.program,
    products=Products(given.dtype, placement=placement),
    remat=given.remat,
    has_reference=not given.no_reference,
  )


def main(arguments: Sequence[str]) -> int:
  """Prints the answer to one question; returns the exit code."""
  case = parse(arguments)
  found = find(case)
  print(table(case, found))
  print(json.dumps({"arguments": list(arguments), **dataclasses.asdict(found), "peak": found.peak}))
  room = targets.usable_bytes(case.target)
  return int(room is not None and found.peak > room)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
