"""Runs whose rows are divided over devices equal one on one device, whatever mesh goes on."""

import contextlib
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax import configuration, train
from tests.conftest import only_device

SETTINGS = {
  "data.dataset": None,
  "data.split_validation_size": 0.0,
  "data.prompt_template": None,
  "data.max_prompt_tokens": 32,
  "model.compute_dtype": "float32",
  "data.environment": "own",
  "rollout.prompts_per_step": 3,
  "rollout.group_size": 4,
  "rollout.max_tokens": 64,
  "sampling.max_tokens": 8,
  "engine.max_rows": 16,
  "batching.row_tokens": 64,
  "batching.microbatch_tokens": 64,
  "loss.loss": "gspo",
  "loss.aggregation": "sequence_mean",
  "loss.kl_coef": 0.1,
  "optim.optimizer": "sgd",
  "optim.learning_rate": 2.0,
  "optim.warmup_steps": 0,
  "optim.weight_decay": 0.0,
  "evaluation.every_steps": 0,
  "evaluation.at_start": False,
  "evaluation.at_end": False,
  "checkpoint.every_steps": 1,
  "logging.sinks": ("jsonl",),
}


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
  """Returns a function that trains up to a step on a mesh; it returns weights and metrics."""
  folder = tmp_path_factory.mktemp("context")
  rows = folder / "rows.jsonl"
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(23)]
  rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

  def train_on(name, steps, **mesh):
    config = configuration.load("long_context").unlock()
    config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
    paths = {"model.path": str(model), "data.path": str(rows), "total_steps": steps}
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    config.update_from_flattened_dict({**SETTINGS, **paths, **sizes})
    train.train(config, folder / name)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    weights = load_file(folder / name / "export" / "model.safetensors")
    return weights, {row["step"]: row for row in map(json.loads, lines)}

  return train_on


@contextlib.contextmanager
def first_devices(count):
  """Leaves some of the devices."""
  devices = jax.devices()[:count]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: devices)
    yield


@pytest.mark.long
def test_a_run_and_what_continues_it_on_fewer_and_more_devices_equal_one_device(trained, model):
  with only_device():
    weights, wanted = trained("whole", 3, context=1)
  trained("divided", 1, fsdp=2, context=2, tensor=2)
  with first_devices(4):
    trained("divided", 2, context=4)
  found, rows = trained("divided", 3)  # the mesh of the config: eight parts.
  for name, value in weights.items():
    np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
  initial = load_file(model / "model.safetensors")
  assert max(np.abs(initial[name] - value).max() for name, value in weights.items()) > 1e-4
  for step, row in wanted.items():
    for name in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/kl_to_reference"):
      np.testing.assert_allclose(rows[step][name], row[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert rows[step]["mismatch/abs_logprob_mean"] < 1e-5
    assert rows[step]["batch/busiest_part"] >= 1 and "batch/busiest_part" not in row
