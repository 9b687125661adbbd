"""A whole run whose policy is a frozen base with a trained difference of low rank.

What a later adapter needs: sampling, scores, monitoring, checkpoints and export see the weights
that they should.
"""

import functools
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import configs.base
from grpo_jax import train
from grpo_jax.building import computation
from grpo_jax.learn import policy
from grpo_jax.models import loading

RANK = 2


def full(own, frozen):
  layers = frozen["layers"]
  difference = jnp.einsum("ldr,lrn->ldn", own["down"], own["up"])
  return {**frozen, "layers": {**layers, "q": layers["q"] + difference}}


def split(read):
  count, width, heads = read["layers"]["q"].shape
  down = jax.random.normal(jax.random.key(0), (count, width, RANK))
  return {"down": down, "up": jnp.zeros((count, RANK, heads))}, read


def described(read):
  q = read["layers"]["q"]
  whole = jax.sharding.NamedSharding(q.sharding.mesh, jax.sharding.PartitionSpec())
  own, frozen = jax.eval_shape(split, read)
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
  return jax.tree.map(place, own), jax.tree.map(lambda _, x: x, frozen, read)


LOW_RANK = policy.Composition(split=split, described=described, full=full, base=lambda x: x)


def run(model, folder, *, total_steps=2):
  """Trains in folder/run, with all programs compiled ahead."""
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(9)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = configs.base.get_config()
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  settings = {
    "total_steps": total_steps,
    "model.path": str(model),
    "model.compute_dtype": "float32",
    "data.path": str(folder / "rows.jsonl"),
    "data.environment": "own",
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 8,
    "rollout.max_tokens": 96,
    "sampling.max_tokens": 8,
    "engine.max_rows": 16,
    "batching.row_tokens": 128,
    "batching.microbatch_tokens": 128,
    "loss.kl_coef": 0.05,
    "learn.minibatches": 2,
    "learn.report_all_every_steps": 1,
    "learn.report_kl_every_steps": 1,
    "optim.learning_rate": 0.1,
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "checkpoint.every_steps": 1,
    "logging.tensorboard": False,
  }
  config.update_from_flattened_dict(settings)
  first, make = jax.devices()[:1], computation.make
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: first)
    patch.setattr(computation, "make", functools.partial(make, composition=LOW_RANK))
    train.train(config, folder / "run")


@pytest.fixture(scope="module")
def workdir(model, tmp_path_factory) -> pathlib.Path:
  """The folder of such a run of two steps."""
  folder = tmp_path_factory.mktemp("composed")
  run(model, folder)
  return folder / "run"


@pytest.fixture(scope="module")
def lines(workdir):
  found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in found if "weight_version" in line]


def test_checkpoints_hold_what_is_trained_and_the_export_the_full_weights(workdir, model):
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Orbax misses shardings, which arrays on the host have not.
    stored = ocp.PyTreeCheckpointer().restore(workdir / "checkpoints" / "step_00000002" / "state")
  assert {name for name in stored if name.startswith("params")} == {"params.down", "params.up"}
  assert all(np.size(leaf) <= stored["params.down"].size for leaf in stored.values())
  read = loading.load(model).params
  difference = np.einsum("ldr,lrn->ldn", stored["params.down"], stored["params.up"])
  written = loading.load(workdir / "export").params
  np.testing.assert_allclose(
    written["layers"]["q"], read["layers"]["q"] + difference, rtol=1e-5, atol=1e-6
  )
  assert np.abs(difference).max() > 1e-3
  written["layers"]["q"] = read["layers"]["q"]
  jax.tree.map(np.testing.assert_array_equal, written, read)


def test_the_engine_samples_from_the_full_weights(lines):
  assert [line["weight_version"] for line in lines] == [0, 1]
  for line in lines:  # on the frozen base alone the second would be off by far more.
    assert line["all/abs_logprob_max"] < 1e-4


def test_the_reference_is_the_base(lines):
  assert lines[0]["all/kl_to_initial"] == 0.0
  assert lines[1]["all/kl_to_initial"] > 1e-5
  assert lines[1]["train/kl_to_reference"] > 1e-5


def test_all_of_it_is_compiled_before_the_first_step(lines):
  assert lines[1]["perf/compilations"] == 0.0


@pytest.mark.slow
def test_a_run_that_was_stopped_continues_from_what_is_trained(model, tmp_path, workdir):
  """A learning rate that depends on `total_steps` would differ; the default is constant."""
  run(model, tmp_path, total_steps=1)
  run(model, tmp_path)
  one, other = (loading.load(folder / "export").params for folder in (tmp_path / "run", workdir))
  jax.tree.map(np.testing.assert_array_equal, one, other)
