"""Run folders with checkpoints and without a run: what commands read later."""

import dataclasses
import pathlib

import jax
import numpy as np

from grpo_jax.building import adapter
from grpo_jax.config import base, configuration
from grpo_jax.config.configuration import typed
from grpo_jax.models import loading, lora, tiny, transformer
from grpo_jax.run_folder import checkpointing

LORA = lora.AdapterOptions(3, 5.0, ("q", "v", "down"), base_dtype="float32")
ACCURACY = "eval/heldout/accuracy"


def write(folder: pathlib.Path, accuracies, *, params=None, model=None, **fields):
  """Writes a run of a tiny model that has checkpoints.

  Args:
    folder: Run folder.
    accuracies: step → accuracy of its evaluation; None: it was not evaluated.
    params: step → parameters; None: random ones, by `params_of`.
    model: Folder of the model; None: a new one beside the run.
    **fields: Fields of the config, with __ in place of dots.
  """
  model = model or tiny.write(folder.parent / "model")
  config = configuration.replaced(
    base.get_config(),
    {"model.path": str(model)} | {name.replace("__", "."): x for name, x in fields.items()},
  )
  folder.mkdir(parents=True, exist_ok=True)
  configuration.write(config, folder / "config.json")
  (folder / "metrics.jsonl").touch()
  with checkpointing.open(folder / "checkpoints", keep_last=None) as checkpoints:
    for step, accuracy in accuracies.items():
      tree = params[step] if params else params_of(step)
      state = {"step": np.asarray(step), "params": tree, "opt_state": {"mu": tree}}
      metrics = {} if accuracy is None else {ACCURACY: accuracy}
      checkpoints.save(step, state, {}, metrics=metrics)
  return folder


def write_lora(folder: pathlib.Path, steps, *, options=None, model=None, **fields):
  """Writes a run that trains an adapter of a tiny model; see `write`.

  Args:
    folder: Run folder.
    steps: Steps that have a checkpoint, with adapters by `adapter_of`.
    options: Options of the adapter; None: `LORA`.
    model: Folder of the base; None: a new one beside the run.
    **fields: Fields of the config, with __ in place of dots.
  """
  options, model = options or LORA, model or tiny.write(folder.parent / "model")
  own = {name: value for name, value in dataclasses.asdict(options).items()}
  lora_fields = {f"model__lora__{name}": value for name, value in own.items()}
  write(folder, {}, model=model, **lora_fields, **fields)
  config = configuration.replaced(
    base.get_config(), {name.replace("__", "."): value for name, value in lora_fields.items()}
  )
  facts = adapter.facts(typed(config), loading.read_facts(model))
  with checkpointing.open(folder / "checkpoints", keep_last=None) as checkpoints:
    for step in steps:
      tree = adapter_of(step, loading.read_config(model), options)
      state = {"step": np.asarray(step), "params": tree, "opt_state": {"mu": tree}}
      checkpoints.save(step, state, facts, metrics={})
  return folder


def adapter_of(step, config, options=None):
  """Returns a random adapter, as NumPy arrays."""
  rng = np.random.default_rng(step)
  draw = lambda leaf: (rng.standard_normal(leaf.shape) * 0.3).astype(np.float32)
  return jax.tree.map(draw, lora.tree(config, options or LORA))


def params_of(step, family="llama"):
  """Returns random parameters of the tiny model that `tiny.write` makes, as NumPy arrays."""
  config = tiny._config(family, 32)
  rng = np.random.default_rng(step)
  shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
  return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes)
