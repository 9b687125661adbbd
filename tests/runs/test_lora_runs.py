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
from grpo_jax.building import adapter, exporting
from grpo_jax.config import configuration
from grpo_jax.models import adapter_files, loading, tiny

RANK, SCALE = 2, 2.0
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")
LORA = {
  "model.lora.rank": RANK,
  "model.lora.alpha": RANK * SCALE,
  "model.lora.base_dtype": "float32",
}
WHOLE = {
  "model__lora__rank": None,
  "model__lora__alpha": 32.0,
  "model__lora__base_dtype": "bfloat16",
}

pytestmark = pytest.mark.long


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
    "logging.sinks": ("jsonl", "console"),
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
  folder = tmp_path_factory.mktemp("lora")
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


@pytest.mark.long
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
    # Old logprobs are of the adapter that sampled, also after the first of two updates.
    assert line["mismatch/abs_logprob_max"] < 1e-4
    assert line["train/ratio_max"] - line["train/ratio_min"] > 1e-3


def test_the_reference_is_the_base(lines):
  assert lines[0]["all/kl_to_initial"] == 0.0
  assert lines[1]["all/kl_to_initial"] > 1e-5
  assert lines[1]["train/kl_to_reference"] > 1e-5


def test_a_run_that_begins_with_an_adapter_measures_its_distance_from_the_base(
  model, workdir, tmp_path, capsys
):
  """In the first step, too, whose weights are those that the other run ended with."""
  run(model, tmp_path, model__lora__path=str(workdir / "adapter"), loss__kl_coef=0.0)
  assert "its KL is measured to the initial weights" in capsys.readouterr().out
  found = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
  first = next(line for line in found if "weight_version" in line)
  assert first["all/kl_to_initial"] > 1e-5
  assert first["train/kl_to_reference"] == pytest.approx(first["all/kl_to_initial"], rel=1e-5)


def test_all_of_it_is_compiled_before_the_first_step(lines):
  assert lines[1]["perf/compilations"] == 0.0


@pytest.mark.slow
def test_a_run_that_was_stopped_continues_from_what_is_trained(model, tmp_path, workdir):
  """A learning rate that depends on `total_steps` would differ; the default is constant."""
  run(model, tmp_path, total_steps=1)
  run(model, tmp_path)
  one, other = (loading.load(folder / "export").params for folder in (tmp_path / "run", workdir))
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_norm_of_the_adapter_is_reported(workdir, lines, model):
  read = loading.load(model).params["layers"]
  base = np.sqrt(sum(np.square(np.float64(read[name])).sum() for name in KERNELS))
  for step, line in enumerate(lines, 1):
    found = differences(stored_adapter(workdir, step)).values()
    norm = np.sqrt(sum(np.square(each).sum() for each in found))
    np.testing.assert_allclose(line["train/adapter_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(line["lora/relative_change"], norm / base, rtol=1e-5)


# --- a checkpoint of another run ---


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model__lora__rank": 3}, r"model\.lora\.rank: was 2, is 3"),
    ({"model__lora__alpha": 8.0}, r"model\.lora\.alpha: was 4.0, is 8.0"),
    ({"model__lora__targets": ("q", "v")}, r"model\.lora\.targets: was .*, is \['q', 'v'\]"),
    ({"model__lora__rank_stabilized": True}, "rank_stabilized: was False, is True"),
    ({"model__lora__base_dtype": "bfloat16"}, "base_dtype: was float32, is bfloat16"),
    (WHOLE, r"model\.lora\.rank: was 2, is None \(every weight is trained\)"),
  ],
)
def test_another_run_is_refused_by_name_before_anything_is_written(
  changes, message, workdir, model
):
  before = digests_of(workdir)
  with pytest.raises(configuration.ConfigError, match=message) as caught:
    run(model, workdir.parent, **changes)
  assert caught.value.exit_code == 2 and str(workdir / "checkpoints") in str(caught.value)
  assert digests_of(workdir) == before


def digests_of(folder):
  """Returns the contents of what a run must not lose."""
  kept = [*folder.glob("checkpoints/**/*"), *folder.glob("export/**/*"), folder / "config.json"]
  return {path: path.read_bytes() for path in kept if path.is_file()}


def test_another_base_is_refused(workdir, tmp_path):
  other = tiny.write(tmp_path / "other", seed=5)
  with pytest.raises(configuration.ConfigError, match=r"model\.path, the frozen base: was .*, is"):
    run(other, workdir.parent)


def test_a_run_of_every_weight_does_not_continue_with_an_adapter():
  facts = {"rank": 4}
  (line,) = adapter.differences(None, facts)
  assert line == "model.lora.rank: was None (every weight is trained), is 4"
  assert not list(adapter.differences(None, None)), "older checkpoints have no such facts"
