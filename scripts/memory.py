"""Prints how much memory a run's update takes on a device, computed from the program.

    python -m scripts.memory --config=configs/math_1b_gpu.py --shape=Qwen2.5-1.5B
    python -m scripts.memory --config=configs/math_1b.py --config.model.path=FOLDER

Nothing is downloaded, and no weights are made: shapes are traced, and the jitted functions of the
update are compiled for them. The compiler is that of the platform on which this runs. On a CPU,
its numbers for temporaries are an estimate for a GPU, because other kernels are chosen there; the
arrays of the size of the model are the same. One device holds the whole model, or its share of
mesh.fsdp.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels.attention import Attention

from grpo_jax.building import computation
from grpo_jax.commands import cli
from grpo_jax.config import batching_options, command_line, run_options
from grpo_jax.learn import operations, train_step
from grpo_jax.models import config as model_config
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_jax.planning import architectures as model_shapes
from grpo_jax.rl import objectives
from grpo_jax.types import Batch, Denominators


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of all arrays that the update holds on one device.

  Attributes:
    parameters: Number of parameters of the model.
    weights: Master weights.
    optimizer: State of the optimizer.
    reference: Frozen reference policy; 0 if the loss needs none.
    gradients: Sum over the microbatches of a step, to which each adds its own in place.
    differentiating: Temporaries of the gradients of a microbatch.
    stepping: Temporaries of the optimizer step, with what it does not write in place.
  """

  parameters: int
  weights: int
  optimizer: int
  reference: int
  gradients: int
  differentiating: int
  stepping: int

  @property
  def model_sized(self) -> int:
    """Bytes of arrays of the model's size, while a microbatch is computed."""
    return self.weights + self.optimizer + self.reference + self.gradients

  @property
  def peak(self) -> int:
    """Largest number of bytes that are alive at a time."""
    return self.model_sized + max(self.differentiating, self.stepping)


def count(model: ModelConfig, config: Any) -> Memory:
  """Computes the memory of an update.

  Args:
    model: Sizes of the model.
    config: Whole configuration; the sections loss, optim, learn, model and batching are read.
  """
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), model))
  tx, schedule = run_options.optimizer(config)
  opt_state = jax.eval_shape(tx.init, params)
  objective = run_options.objective(config)
  update = _update(model, config, objective, tx, schedule)
  batch = _batch(model, config, with_reference=objective.needs_ref)
  inputs = (params, batch, Denominators(1.0, 1.0))
  sums = gradients, _ = jax.eval_shape(update.start, params)
  differentiate = _compiled(_flat(update.differentiate, inputs), sums, *jax.tree.leaves(inputs))
  step = _compiled(update.apply, params, opt_state, gradients, jnp.zeros(()))
  return Memory(
    parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    weights=nbytes(params),
    optimizer=nbytes(opt_state),
    reference=nbytes(params) if objective.needs_ref else 0,
    gradients=nbytes(gradients),
    differentiating=differentiate.temp_size_in_bytes,
    stepping=step.temp_size_in_bytes + step.output_size_in_bytes - step.alias_size_in_bytes,
  )


def nbytes(tree: Any) -> int:
  """Returns the bytes of arrays, or of anything with shapes and dtypes."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _flat(differentiate: Any, inputs: Any) -> Any:
  """Returns a function of the sums, which it consumes, and of the leaves of the other arguments.

  The compiler's records of arguments are not arrays, so the types of a batch would reject them.
  """
  structure = jax.tree.structure(inputs)

  def function(sums: Any, *leaves: Any) -> list[Any]:
    params, *others = structure.unflatten(leaves)
    return jax.tree.leaves(differentiate(params, sums, *others))

  return jax.jit(function, donate_argnums=0)


def _compiled(function: Any, *arguments: Any) -> Any:
  """Returns the compiler's figures for the memory of a jitted function."""
  return function.lower(*arguments).compile().memory_analysis()


def _update(
  model: ModelConfig, config: Any, objective: objectives.Objective, tx: Any, schedule: Any
) -> train_step.Update:
  """Makes the update for one device, like `computation`."""
  policy_options = {
    "attention": Attention(config.model.attention),
    "temperature": config.sampling.temperature,
    "products": Products(config.model.compute_dtype, config.model.product_dtype),
    "remat": config.model.remat,
  }
  token_loss = None
  if computation.takes_one_sweep(config, objective):
    token_loss = train_step.make_token_loss(model, objective, **policy_options)
  return train_step.make_update(
    train_step.make_logprobs(model, implementation=config.model.logprobs, **policy_options),
    tx,
    objective,
    epochs=config.learn.epochs,
    report_entropy=config.learn.report_entropy,
    schedule=schedule,
    token_loss=token_loss,
  )


def _batch(model: ModelConfig, config: Any, *, with_reference: bool) -> Batch:
  """Returns a full microbatch of zeros, in which every token is learned from."""
  cost = operations.update_cost(model, remat=config.model.remat)
  largest = batching_options.plan(config, cost=cost, replicas=1)[0]
  rows, columns = largest.rows, largest.row_tokens
  whole = jnp.zeros((rows, columns), jnp.int32)
  real = jnp.zeros((rows, columns), jnp.float32)
  return Batch(
    tokens=whole,
    segment_ids=whole,
    branch_ids=whole,
    positions=whole,
    predecessors=whole,
    loss_mask=jnp.ones((rows, columns), jnp.bool_),
    rollout_ids=whole,
    advantages=real,
    behavior_logprobs=real,
    loss_places=whole,
    ref_logprobs=real if with_reference else None,
  )


def table(memory: Memory) -> str:
  """Returns the result as lines of text."""
  rows = [
    ("weights", memory.weights),
    ("state of the optimizer", memory.optimizer),
    ("reference policy", memory.reference),
    ("sum of the gradients", memory.gradients),
    ("arrays of the model's size", memory.model_sized),
    ("temporaries of a microbatch", memory.differentiating),
    ("temporaries of the optimizer step", memory.stepping),
    ("peak", memory.peak),
  ]
  lines = [f"{'':36}{'bytes/parameter':>18}{'GB':>8}"]
  lines += [
    f"{name:36}{size / memory.parameters:18.2f}{size / 1e9:8.2f}" for name, size in rows if size
  ]
  return "\n".join(lines)


def _shape(name: str) -> ModelConfig:
  try:
    return model_config.from_hf(model_shapes.read(name))
  except OSError as error:
    raise SystemExit(f"{error}; name a model with --config.model.path or --shape") from error


def main(arguments: Sequence[str]) -> None:
  """Prints the table of one configuration."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument(
    "--shape", choices=model_shapes.SHAPES, help="in place of the folder model.path"
  )
  own, config_arguments = parser.parse_known_args(arguments)
  config: Any = command_line.parse(config_arguments).config
  model = _shape(own.shape or config.model.path)
  memory = count(model, config)
  rows, columns = jnp.shape(_batch(model, config, with_reference=False).tokens)
  print(
    f"{own.shape or config.model.path}: {memory.parameters / 1e9:.3f}e9 parameters, products in"
    f" {config.model.compute_dtype}, microbatches of {rows} rows of {columns} tokens, compiled for"
    f" {jax.devices()[0].platform}"
  )
  print(table(memory))


if __name__ == "__main__":
  sys.exit(cli.reported(main, sys.argv[1:]))
