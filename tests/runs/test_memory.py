"""What scripts/memory.py counts is what the arrays of a run take."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

from configs import base
from grpo_jax.config import run_options
from grpo_jax.learn import train_step
from grpo_jax.models import config as model_config
from grpo_jax.models import gradient_sums, transformer
from grpo_jax.types import Denominators, Minibatch
from scripts import memory


def make_config(kl_coef):
  config = base.get_config()
  config.loss.kl_coef = kl_coef
  config.model.compute_dtype = "float32"
  config.batching.row_tokens = 16
  config.batching.microbatch_tokens = 32
  return config


TINY = model_config.ModelConfig("qwen2", 96, 32, 64, 2, 4, 2, 8, tie_embeddings=True, qkv_bias=True)


@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
def test_the_count_is_that_of_real_arrays(kl_coef):
  config = make_config(kl_coef)
  counted = memory.count(TINY, config)
  params = transformer.init(jax.random.key(0), TINY)
  tx, _ = run_options.optimizer(config)
  state = train_step.init(params, tx)
  objective = run_options.objective(config)
  update = memory._update(TINY, config, objective, tx, None)
  shapes = memory._batch(TINY, config, with_reference=objective.needs_ref)
  batch = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
  minibatch = Minibatch((batch, batch), Denominators(1.0, 1.0))
  (gradients, _), *_ = update.gradients(state.params, minibatch)

  held = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  assert counted.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
  assert counted.weights == held(state.params) == 4 * counted.parameters
  assert counted.optimizer == held(state.opt_state)
  assert counted.gradients == held(gradients)
  assert counted.reference == (held(params) if kl_coef else 0)
  of_model = counted.model_sized / counted.parameters
  assert of_model == pytest.approx(20 if kl_coef else 16, rel=0.001)
  assert counted.stepping < 0.5 * counted.weights  # in place, but for scratch of a tiny model.
  assert counted.peak >= counted.model_sized + counted.differentiating > counted.model_sized


def test_shapes_are_those_of_the_models():
  """Parameters in units of 1e9, as the model cards give them."""
  counts = {}
  for name, hf in memory.model_shapes.SHAPES.items():
    model = model_config.from_hf(hf)
    shapes = jax.eval_shape(lambda model=model: transformer.init(jax.random.key(0), model))
    counts[name] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert {name: round(n / 1e9, 2) for name, n in counts.items()} == {
    "SmolLM2-135M": 0.13,
    "SmolLM2-360M": 0.36,
    "SmolLM2-1.7B": 1.71,
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.62,
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Llama-3.2-1B": 1.24,
    "Llama-3.1-8B": 8.03,
  }


def test_a_folder_without_a_model_is_one_line(tmp_path):
  config = pathlib.Path(base.__file__).with_name("math_1b_gpu.py")
  with pytest.raises(SystemExit, match="config.json does not exist.*name a model with"):
    memory.main([f"--config={config}", f"--config.model.path={tmp_path}"])


@pytest.mark.long
def test_gradients_of_layers_are_added_in_place(monkeypatch):
  """The program of a microbatch has no second copy of the layers' gradients."""
  model = dataclasses.replace(TINY, num_layers=24, hidden_size=64, intermediate_size=256)

  def temporaries():
    return memory.count(model, make_config(0.0)).differentiating

  in_place = temporaries()
  monkeypatch.setattr(gradient_sums, "attach", gradient_sums.joined)
  counted = memory.count(model, make_config(0.0))
  assert in_place < 0.4 * counted.gradients
  assert counted.differentiating > in_place + 0.8 * counted.gradients
