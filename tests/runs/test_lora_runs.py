"""Whole runs that train an adapter: what samples, scores, checkpoints, exports and metrics see."""

import json
import pathlib
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import configs.base
import grpo_jax
from grpo_jax import train
from grpo_jax.building import exporting
from grpo_jax.models import adapter_files, loading

RANK, SCALE = 2, 2.0
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")
LORA = {
  "model.lora.rank": RANK,
  "model.lora.alpha": RANK * SCALE,
  "model.lora.base_dtype": "float32",
}


def run(model, folder, *, total_steps=2, **changes):
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
    "optim.learning_rate": 0.02,
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "checkpoint.every_steps": 1,
    "logging.tensorboard": False,
    **LORA,
    **{name.replace("__", "."): value for name, value in changes.items()},
  }
  config.update_from_flattened_dict(settings)
  first = jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: first)
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


def stored_adapter(folder, step):
  """Returns the arrays of a checkpoint by name."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Orbax misses shardings, which arrays on the host have not.
    return ocp.PyTreeCheckpointer().restore(folder / "checkpoints" / f"step_{step:08}" / "state")


def differences(stored):
  """Returns s A B of every kernel, in float64."""
  parts = {
    name: [np.asarray(stored[f"params.{name}.{part}"], np.float64) for part in "ab"]
    for name in KERNELS
  }
  return {name: SCALE * a @ b for name, (a, b) in parts.items()}


def test_checkpoints_hold_what_is_trained_and_the_export_the_full_weights(workdir, model):
  stored = stored_adapter(workdir, 2)
  assert {name for name in stored if name.startswith("params")} == {
    f"params.{name}.{part}" for name in KERNELS for part in "ab"
  }
  largest = max(stored[f"params.{name}.{part}"].size for name in KERNELS for part in "ab")
  assert all(np.size(leaf) <= largest for leaf in stored.values())
  read, written = loading.load(model).params, loading.load(workdir / "export").params
  for name, difference in differences(stored).items():
    assert np.abs(difference).max() > 1e-4, name
    expected = read["layers"][name] + difference
    np.testing.assert_allclose(written["layers"][name], expected, rtol=1e-5, atol=1e-6)
    written["layers"][name] = read["layers"][name]
  jax.tree.map(np.testing.assert_array_equal, written, read)


def test_a_checkpoint_says_of_what_it_is_the_adapter(workdir, model):
  info = json.loads((workdir / "checkpoints" / "step_00000002" / "info.json").read_text())
  digest = info["extra"]["adapter"].pop("base_digest")
  assert len(digest) == 16
  assert info["extra"]["adapter"] == {
    "base": str(model.resolve()),
    "rank": RANK,
    "alpha": RANK * SCALE,
    "targets": list(KERNELS),
    "rank_stabilized": False,
    "base_dtype": "float32",
  }


def test_the_adapter_is_written_beside_the_export(workdir, model):
  stored = stored_adapter(workdir, 2)
  found = adapter_files.read(workdir / "adapter", loading.read_config(model))
  for name in KERNELS:
    for part in "ab":
      np.testing.assert_array_equal(found[name][part], stored[f"params.{name}.{part}"])
  options = adapter_files.options(workdir / "adapter")
  assert (options.rank, options.scale, options.targets) == (RANK, SCALE, tuple(KERNELS))
  assert adapter_files.base_of(workdir / "adapter") == str(model.resolve())


def test_a_checkpoint_is_read_as_the_export_was_written(workdir, model, tmp_path):
  """By hand on the host, and by the object of the run on the devices."""
  wanted = loading.load(workdir / "export").params
  exporting.run(f"{workdir}:2", tmp_path / "again")
  for found in (loading.load(tmp_path / "again").params, grpo_jax.open(workdir).params):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
  alone = exporting.run(f"{workdir}:2", tmp_path / "alone", only_adapter=True).folder
  for path in (workdir / "adapter").iterdir():
    assert (alone / path.name).read_bytes() == path.read_bytes()


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
