"""The weights of a run: which checkpoint is meant, and that its tensors are what was saved."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.building import stored
from grpo_jax.errors import ExpectedFailure
from grpo_jax.models import tiny
from grpo_jax.run_folder import stored_weights
from tests import stored_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  accuracies = {10: 0.25, 20: 0.75, 30: 0.75, 40: 0.5, 41: None}
  return stored_runs.write(tmp_path_factory.mktemp("runs") / "first", accuracies)


@pytest.mark.parametrize(
  ("suffix", "step"), [("", 41), (":latest", 41), (":best", 30), (":10", 10), (":00020", 20)]
)
def test_a_reference_names_one_checkpoint(run, suffix, step):
  found = stored.find(f"{run}{suffix}")
  assert (found.step, found.label) == (step, f"{run}:{step}")
  assert found.metrics.get(stored_runs.ACCURACY) == {30: 0.75, 10: 0.25, 20: 0.75}.get(step)


def test_the_best_step_is_by_the_metric_and_mode_of_the_run(tmp_path):
  run = stored_runs.write(tmp_path / "run", {1: 0.3, 2: 0.1, 3: 0.2}, checkpoint__best_mode="min")
  assert stored.find(f"{run}:best").step == 2


@pytest.mark.parametrize(
  ("suffix", "reason"),
  [
    (":15", "no checkpoint of step 15; .* has checkpoints of the steps 10, 20, 30, 40, 41"),
    (":bset", "a number, 'best' or 'latest' must follow .*not 'bset' .did you mean 'best'.*"),
    (":-1", "a number, 'best' or 'latest' must follow"),
    (f":{'9' * 5000}", "a number, 'best' or 'latest' must follow"),
  ],
)
def test_errors_name_the_steps_that_there_are(run, suffix, reason):
  with pytest.raises(stored.NoWeights, match=reason):
    stored.find(f"{run}{suffix}")


def test_a_run_that_is_not_there_is_named(tmp_path):
  with pytest.raises(stored.NoWeights, match=f"there is no run folder {tmp_path / 'none'}"):
    stored.find(f"{tmp_path / 'none'}:best")
  with pytest.raises(stored.NoWeights, match="copy gs://bucket/run to a folder first"):
    stored.find("gs://bucket/run:20")
  (tmp_path / "empty").mkdir()
  with pytest.raises(stored.NoWeights, match="empty is not a run folder"):
    stored.find(f"{tmp_path / 'empty'}:3")


def test_without_checkpoints_the_export_is_named(tmp_path):
  run = stored_runs.write(tmp_path / "run", {1: None})
  with pytest.raises(stored.NoWeights, match="eval/heldout/accuracy .* the steps 1$"):
    stored.find(f"{run}:best")
  shutil.rmtree(run / "checkpoints")
  (run / "export").mkdir()
  with pytest.raises(stored.NoWeights, match=f"no checkpoint; .* {run / 'export'}"):
    stored.find(str(run))


def test_a_folder_of_a_model_is_read_as_one(tmp_path):
  model = tiny.write(tmp_path / "model:7")  # a colon in a name is nothing but a letter.
  found = stored.find(str(model))
  assert found.step is None and found.directory == model
  leaves = jax.tree.leaves(stored.load(found).params)
  again = jax.tree.leaves(stored.load(stored.find(str(model))).params)
  assert all(np.array_equal(a, b) for a, b in zip(leaves, again, strict=True))


def test_the_weights_are_those_that_were_saved_bit_for_bit(run):
  loaded = stored.load(stored.find(f"{run}:20"))
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, stored_runs.params_of(20)))
  assert loaded.generation["eos_token_id"] == 258


def test_weights_that_several_devices_saved_are_the_same(tmp_path):
  """The values of a leaf are then cut on several axes; zeros are not stored at all."""
  mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
  saved = stored_runs.params_of(1)
  saved["layers"]["o"] = np.zeros_like(saved["layers"]["o"])
  split = jax.tree.map(
    lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*(None, "a", "b")[-x.ndim :]))),
    saved,
  )
  run = stored_runs.write(tmp_path / "run", {1: None}, params={1: split})
  loaded = stored.load(stored.find(str(run)))
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, saved))


def test_arrays_of_another_layout_are_read_as_well(tmp_path, monkeypatch):
  """Other versions of Orbax may compress, or cut the values differently."""
  run = stored_runs.write(tmp_path / "run", {1: None})
  monkeypatch.setattr(stored_weights, "_plain_chunk", lambda meta: None)
  loaded = stored.load(stored.find(str(run)))
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, stored_runs.params_of(1)))


def test_only_one_layer_of_a_leaf_is_in_memory(run, monkeypatch):
  read = []
  values = stored_weights._Arrays._part
  monkeypatch.setattr(
    stored_weights._Arrays,
    "_part",
    lambda self, *arguments: read.append(values(self, *arguments)) or read[-1],
  )
  found = stored.find(str(run))
  for name in found.tensors.shapes:
    found.tensors.read(name, slice(0, 1))
    found.tensors.read(name, slice(1, 2))
  wanted = [int(np.prod(shape)) for shape in found.tensors.shapes.values()]
  assert [part.size for part in read] == wanted  # each once, and never all layers.


@pytest.mark.parametrize("damage", ["bytes", "file", "model"])
def test_a_checkpoint_that_cannot_be_used_says_why(tmp_path, damage):
  run = stored_runs.write(tmp_path / "run", {1: None, 2: None})
  folder = run / "checkpoints" / "step_00000002"
  if damage == "bytes":
    file = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    reason = "step_00000002 cannot be used: .* digest differs"
  elif damage == "file":
    (folder / "manifest.json").unlink()
    reason = "step_00000002 cannot be used: manifest.json is missing"
  else:
    tiny.write(tmp_path / "model", family="qwen2")
    reason = "does not hold the weights of this model: .*params.layers.k_bias: saved nothing"
  with pytest.raises(stored_weights.WeightsError, match=reason):
    stored.find(str(run))
  assert issubclass(stored_weights.WeightsError, ExpectedFailure)


def test_the_model_that_a_run_began_with_can_be_named(tmp_path):
  run = stored_runs.write(tmp_path / "run", {1: None})
  moved = tmp_path / "moved"
  (tmp_path / "model").rename(moved)
  with pytest.raises(stored.NoWeights, match="began with, .*model: there is no such.*--base=MODEL"):
    stored.find(str(run))
  assert stored.find(str(run), base=str(moved)).directory == moved
