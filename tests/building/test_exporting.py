"""Exports of checkpoints: what training itself would write, whole or not at all."""

import collections
import json
import math
import pathlib
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest

from grpo_jax.building import exporting
from grpo_jax.config.configuration import ConfigError
from grpo_jax.files.disk import WriteError
from grpo_jax.models import export, loading, safetensors, tiny
from grpo_jax.models.config import ModelConfig
from tests import stored_runs


def content(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return stored_runs.write(tmp_path_factory.mktemp("runs") / "first", {1: 0.5, 2: 0.25, 3: None})


@pytest.mark.parametrize(
  "options",
  [{}, {"dtype": "bfloat16", "max_shard_gb": 2e-5}, {"dtype": "float16", "max_shard_gb": math.inf}],
  ids=str,
)
def test_every_file_is_the_one_that_training_would_have_written(run, tmp_path, options):
  done = exporting.run(f"{run}:best", tmp_path / "new" / "out", **options)
  limit = options.get("max_shard_gb", 5.0)
  model = run.parent / "model"
  export.to_huggingface(
    jax.tree.map(jax.numpy.asarray, stored_runs.params_of(1)),
    loading.read_config(model),
    tmp_path / "own",
    source_directory=model,
    dtype=np.dtype(options["dtype"]) if options else None,
    max_shard_bytes=int(limit * 1e9) if limit < math.inf else None,
  )
  wanted = content(tmp_path / "own")
  assert content(done.folder) == wanted
  assert {"config.json", "generation_config.json", "tokenizer.json"} < {*wanted}
  weights = [name for name in wanted if name.endswith(".safetensors")]
  assert done.num_files == len(weights) and (len(weights) > 2) == (limit == 2e-5)
  assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_families_are_exported_alike(tmp_path, family):
  model = tiny.write(tmp_path / "model", family=family)
  params = {1: stored_runs.params_of(1, family)}
  run = stored_runs.write(tmp_path / "run", {1: None}, params=params, model=model)
  exporting.run(str(run), tmp_path / "out")
  loaded = loading.load(tmp_path / "out")
  assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, params[1]))


def test_the_options_of_the_run_are_the_defaults(tmp_path):
  fields = {"export__dtype": "bfloat16", "export__max_shard_gb": 2e-5}
  run = stored_runs.write(tmp_path / "run", {1: None}, **fields)
  done = exporting.run(str(run), tmp_path / "out")
  assert done.dtype == "bfloat16" and done.num_files > 1
  assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_nothing_is_overwritten(run, tmp_path):
  for name, make in {
    "file": lambda path: path.write_text("mine"),
    "full": lambda path: (path.mkdir(), (path / "mine").touch()),
    "link": lambda path: path.symlink_to(tmp_path / "elsewhere"),
  }.items():
    make(tmp_path / name)
    with pytest.raises(exporting.ExportError, match="choose another name"):
      exporting.run(str(run), tmp_path / name)
  assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "full" / "mine").exists()
  (tmp_path / "empty").mkdir()
  assert exporting.run(str(run), tmp_path / "empty").num_files == 1


def test_an_export_that_another_process_wrote_meanwhile_stays(run, tmp_path):
  def write(done, total):
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "theirs").touch()

  with pytest.raises(exporting.ExportError, match="nothing is overwritten"):
    exporting.run(str(run), tmp_path / "out", on_progress=write)
  assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing(run, tmp_path, error):
  def fail(done, total):
    if done == 3:
      raise error

  with pytest.raises(WriteError if isinstance(error, OSError) else KeyboardInterrupt):
    exporting.run(str(run), tmp_path / "out", on_progress=fail)
  assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_before_anything_is_written(run, tmp_path, monkeypatch):
  free = collections.namedtuple("usage", "free")
  monkeypatch.setattr(exporting.shutil, "disk_usage", lambda path: free(1000))
  with pytest.raises(exporting.ExportError, match=r"needs 0\.00 GB, and its disk has 0\.00 GB"):
    exporting.run(str(run), tmp_path / "out")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    ({"dtype": "int8"}, "export.dtype must be one of 'float32', 'bfloat16', 'float16'"),
    ({"max_shard_gb": 0.0}, "export.max_shard_gb must be a finite number > 0"),
    ({"max_shard_gb": math.nan}, "export.max_shard_gb must be"),
  ],
)
def test_options_are_checked_as_in_a_config(run, tmp_path, options, reason):
  with pytest.raises(ConfigError, match=reason):
    exporting.run(str(run), tmp_path / "out", **options)


def test_a_model_is_not_a_run(run, tmp_path):
  with pytest.raises(ConfigError, match="model: a run folder is needed, as RUN"):
    exporting.run(str(run.parent / "model"), tmp_path / "out")


@pytest.mark.slow
def test_memory_is_that_of_a_few_tensors(tmp_path):
  """A model of 12 layers: a leaf, which holds all layers of a kernel, is as large as 12 tensors."""
  config = ModelConfig(
    family="llama",
    vocab_size=264,
    hidden_size=256,
    intermediate_size=256,
    num_layers=12,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    max_position_embeddings=512,
    tie_embeddings=True,
  )
  model, run = tmp_path / "model", tmp_path / "run"
  model.mkdir()
  export.write_json(model / "config.json", export.model_config.to_hf(config))
  is_leaf = lambda x: isinstance(x, export.leaves.Leaf)
  ones = lambda leaf: np.ones(leaf.shape, np.float32)
  tree = jax.tree.map(ones, export.leaves.tree(config), is_leaf=is_leaf)
  stored_runs.write(run, {1: None}, params={1: tree}, model=model)
  del tree
  largest = 264 * 256 * 4
  tracemalloc.start()
  try:  # from the first tensor on: reading config.json reserves 16 MiB for a moment.
    start = lambda done, total: done == 1 and tracemalloc.reset_peak()
    done = exporting.run(str(run), tmp_path / "out", on_progress=start)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert done.num_bytes > 80 * largest
  # Up to 7.3 in the whole suite; a whole leaf is 12 tensors more.
  assert peak < 10 * largest, f"{peak / largest:.1f} tensors"
  tensors = safetensors.open_folder(tmp_path / "out")
  assert all(tensors.read(name).all() for name in tensors.shapes)


@pytest.mark.long
def test_no_device_is_touched(run, tmp_path):
  """A process that exports starts no platform: the accelerator may belong to the run."""
  code = (
    "import pathlib, sys; from grpo_jax.building import exporting\n"
    "run, lora, out = map(pathlib.Path, sys.argv[1:])\n"
    "exporting.run(str(run), out / 'all')\n"
    "exporting.run(str(lora), out / 'merged')\n"
    "exporting.run(str(lora), out / 'adapter', only_adapter=True)\n"
    "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
  )
  lora = stored_runs.write_lora(tmp_path / "lora", [1], model=run.parent / "model")
  command = [sys.executable, "-c", code, str(run), str(lora), str(tmp_path / "out")]
  done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path.cwd())
  assert done.stdout == "False\n", done.stderr
