"""What `grpo-jax plan` counts is what the arrays and programs of a run take."""

import dataclasses
import math

import jax
import pytest

from grpo_jax.learn import sharding, train_step
from grpo_jax.models import config as model_config
from grpo_jax.models import gradient_sums, leaves, transformer
from grpo_plan import architectures, compiling, plan_request, programs, search

TINY = model_config.ModelConfig("qwen2", 96, 32, 64, 2, 4, 2, 8, tie_embeddings=True, qkv_bias=True)


def run_of(model, *overrides):
  """Returns a run on one device that servers sample."""
  options = ["--config=configs/math_1b.py", "--config.engine.name=sglang", *overrides]
  mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  return programs.described(plan_request.config_of(options), model, mesh)


def parameters(model):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves.tree(model)))


@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
def test_arrays_take_as_much_as_those_of_a_real_state(kl_coef):
  run = run_of(TINY, f"--config.loss.kl_coef={kl_coef}")
  state = train_step.init(transformer.init(jax.random.key(0), TINY), run.made.tx)
  sums, _ = run.made.update.start(state.params)

  held = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
  arrays, count = run.arrays, parameters(TINY)
  assert arrays.weights == held(state.params) == 4 * count
  assert arrays.optimizer == held(state.opt_state)
  assert arrays.sums == held(sums)
  assert arrays.reference == (held(state.params) if kl_coef else 0)
  assert arrays.beside("update") / count == pytest.approx(20 if kl_coef else 16, rel=0.001)


@pytest.mark.long
def test_the_optimizer_writes_in_place():
  run = run_of(TINY)
  (job,) = (job for job in run.jobs if programs.program_of(job.name) == "optimizer")
  found = compiling.compiled(job, run.mesh)
  assert found.outputs + found.temporaries < 0.5 * run.arrays.weights  # scratch of a tiny model.


def test_shapes_are_those_of_the_models():
  """Parameters in units of 1e9, as the model cards give them."""
  counts = {name: parameters(model_config.from_hf(hf)) for name, hf in architectures.SHAPES.items()}
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
    "Gemma-3-270m": 0.27,
    "Gemma-3-1b": 1.0,
    "Gemma-3-4b": 3.88,
    "Gemma-3-12b": 11.77,
    "Gemma-3-27b": 27.01,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.09,
    "Llama-3.2-1B": 1.24,
    "Llama-3.1-8B": 8.03,
  }


@pytest.mark.long
def test_gradients_of_layers_are_added_in_place(monkeypatch):
  """The program of a microbatch has no second copy of the layers' gradients."""
  model = dataclasses.replace(TINY, num_layers=24, hidden_size=64, intermediate_size=256)

  def temporaries():
    run = run_of(model, "--config.loss.kl_coef=0", "--config.model.compute_dtype=float32")
    job = search.job_of(run, "update", rows=2, row_tokens=16, replicas=1)
    return compiling.compiled(job, run.mesh).temporaries

  in_place, gradients = temporaries(), 4 * parameters(model)
  monkeypatch.setattr(gradient_sums, "attach", gradient_sums.joined)
  assert in_place < 0.4 * gradients
  assert temporaries() > in_place + 0.8 * gradients
