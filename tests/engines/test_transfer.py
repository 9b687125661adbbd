"""Weights for servers: whole or not there, bit for bit, and nothing stays behind."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from grpo_jax.engines import transfer
from grpo_jax.engines.transfer import TransferError, WeightFolders
from grpo_jax.models import export, leaves, lora
from grpo_jax.models import safetensors as ours
from tests.engines import sglang_fixtures, tiny

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = tiny.config()


@pytest.fixture
def source(tmp_path):
  return sglang_fixtures.write_model(tmp_path / "source")


@pytest.fixture
def folders(tmp_path, source):
  made = WeightFolders(tmp_path / "root", CONFIG, source_directory=source, dtype="float32")
  yield made
  made.close()


def content(folder):
  return {
    f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
  }


def test_a_version_is_read_back_by_safetensors_as_it_is_in_the_trainer(folders):
  tree = tiny.params(CONFIG)
  folder = folders.write(tree, version=7)
  stored = safetensors.numpy.load_file(folder / "model.safetensors")
  down = stored["model.layers.1.mlp.down_proj.weight"]  # [out, in]; not square.
  assert down.shape == (CONFIG.hidden_size, CONFIG.intermediate_size)
  np.testing.assert_array_equal(down, np.asarray(tree["layers"]["down"])[1].T)
  wanted = {t.name: t.values() for t in export.to_write(tree, CONFIG)}
  assert stored.keys() == wanted.keys()
  for name, values in wanted.items():
    assert values.flags.c_contiguous
    np.testing.assert_array_equal(stored[name], values)


def test_a_version_computes_in_transformers_what_it_does_in_the_trainer(folders):
  import torch

  folder = folders.write(tiny.params(CONFIG), version=0)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  ids = [5, 17, 3, 60, 2, 2, 41]
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, :-1]
  theirs = torch.log_softmax(logits, -1).numpy()
  ours = tiny.model_logprobs(CONFIG, tiny.params(CONFIG), ids[:1], ids[1:])
  np.testing.assert_allclose(theirs, ours, atol=2e-5)


def test_a_folder_that_is_written_over_holds_what_a_new_one_would(folders):
  first = folders.write(tiny.params(CONFIG, seed=1), version=1)
  inode = (first / "model.safetensors").stat().st_ino
  folders.discard(first)
  again = folders.write(tiny.params(CONFIG, seed=2), version=2)
  assert (again / "model.safetensors").stat().st_ino == inode  # its memory was used again.
  assert not first.exists()
  new = folders.write(tiny.params(CONFIG, seed=2), version=3)
  assert content(again) == content(new)


def test_what_a_folder_has_of_the_same_arrays_is_not_written_again(folders, monkeypatch):
  fetched = []
  fetch = export._fetch
  monkeypatch.setattr(export, "_fetch", lambda made: fetched.append(0) or fetch(made))
  options = lora.AdapterOptions(rank=2, targets=("q", "down"))
  base, other = tiny.params(CONFIG, seed=1), tiny.params(CONFIG, seed=2)
  adapters = [lora.init(jax.random.key(i), CONFIG, options) for i in range(6)]
  adapters = [jax.tree.map(lambda x: x + 0.1, adapter) for adapter in adapters]
  trees = [lora.join(base, adapter, 2.0) for adapter in adapters]
  trees[2]["embed"] = other["embed"]  # the folder of version 0 has another one, ...
  trees[3]["embed"] = other["embed"]  # ... and so has that of version 1,
  trees[5]["embed"] = other["embed"]  # ... but not that of version 3.
  kernels = sum(math.prod(t.shape) for t in leaves.stored(CONFIG) if is_target(t.name))
  previous, sizes = None, []
  for version, tree in enumerate(trees):
    fetched.clear()
    folder = folders.write(tree, version=version)
    sizes.append(folders.written.bytes / 4 - kernels)
    count = len(fetched)
    whole = WeightFolders(
      folders.folder.parent, CONFIG, source_directory=folders._source, dtype="float32"
    )
    assert content(folder) == content(whole.write(tree, version=0)), version
    whole.close()
    if previous is not None:
      folders.discard(previous)
    previous = folder
  rest = sum(math.prod(t.shape) for t in leaves.stored(CONFIG)) - kernels
  embed = base["embed"].size
  assert sizes == [rest, rest, embed, embed, embed, 0]
  assert count == 2 * CONFIG.num_layers


def is_target(name):
  return name.endswith(("q_proj.weight", "down_proj.weight"))


def test_what_differs_from_the_version_before_is_known(folders):
  first = tiny.params(CONFIG)
  copied = jax.tree.map(jnp.copy, first)  # other arrays of the same values.
  q = first["layers"]["q"].at[1, -1, -1].add(1e-3)
  second = {**copied, "layers": {**copied["layers"], "q": q}}
  third = {**second, "final_norm": second["final_norm"] + 1.0}  # the rest are the same arrays.
  written = [folders.write(first, version=0)]
  assert folders.changes is None
  for version, tree, name in [
    (1, second, "model.layers.1.self_attn.q_proj.weight"),
    (2, third, "model.norm.weight"),
  ]:
    written.append(folders.write(tree, version=version))
    found = folders.changes
    assert found.since == version - 1
    assert found.is_changed == {t.name: t.name == name for t in leaves.stored(CONFIG)}
  for folder in written:
    folders.discard(folder)
  folders.write(first, version=3)
  assert folders.changes is None  # what it would be compared with is gone.


def test_of_other_arrays_everything_is_written(folders):
  for version in range(4):
    folder = folders.write(tiny.params(CONFIG, seed=version), version=version)
    assert folders.written.bytes == sum(4 * math.prod(t.shape) for t in leaves.stored(CONFIG))
    folders.discard(folder)


def test_nothing_is_taken_for_granted_in_a_file_with_another_header(tmp_path):
  def tensor(name, value, *, is_there):
    values = np.full(4, value, np.float32)
    return ours.ToWrite(name, (4,), values.dtype, lambda: values, is_there=is_there)

  file = tmp_path / "model.safetensors"
  ours.write_file(file, [tensor("a", 1, is_there=True), tensor("b", 2, is_there=False)])
  ours.write_file(file, [tensor("a", 3, is_there=True), tensor("b", 4, is_there=False)])
  stored = safetensors.numpy.load_file(file)
  assert [stored[name][0] for name in "ab"] == [1, 4]
  ours.write_file(file, [tensor("c", 5, is_there=True), tensor("d", 6, is_there=True)])
  stored = safetensors.numpy.load_file(file)
  assert [stored[name][0] for name in "cd"] == [5, 6]


def test_what_a_version_took_to_write_is_measured(folders, monkeypatch):
  tensors = export.to_write(tiny.params(CONFIG), CONFIG)

  def slowly(tensor):
    def values():
      time.sleep(0.01)
      return tensor.values()

    return dataclasses.replace(tensor, values=values)

  monkeypatch.setattr(export, "to_write", lambda *_, **__: [slowly(each) for each in tensors])
  began = time.perf_counter()
  folders.write(None, version=1)
  took, written = time.perf_counter() - began, folders.written
  assert 0.01 * len(tensors) <= written.gather_s < took
  assert 0 < written.write_s and written.gather_s + written.write_s <= took
  assert written.bytes == sum(4 * x.size for x in jax.tree.leaves(tiny.params(CONFIG)))


def test_copies_are_counted_as_they_are_made(folders):
  """A CPU's arrays are read where they are: only the layout of the files is a copy."""
  tree = tiny.params(CONFIG)
  for tensor in export.to_write(tree, CONFIG):
    is_its_own = not any(
      np.shares_memory(tensor.values(), np.asarray(x)) for x in jax.tree.leaves(tree)
    )
    assert tensor.copies == is_its_own + 1, tensor.name
  folders.write(tree, version=1)
  own = sum(tree[name].nbytes for name in ("embed", "final_norm"))
  total = folders.written.bytes
  assert folders.written.metrics()["perf/sync_copies"] == pytest.approx(2 - own / total)


def test_many_versions_take_the_room_of_two(folders):
  newest = folders.write(tiny.params(CONFIG), version=0)
  for version in range(1, 6):
    previous, newest = newest, folders.write(tiny.params(CONFIG), version=version)
    assert len(list(folders.folder.glob("*/model.safetensors"))) <= 2
    folders.discard(previous)
  assert sorted(p.name for p in folders.folder.iterdir()) == [".lock", ".spare", "v000005"]


def test_a_version_appears_whole_or_not_at_all(folders, monkeypatch):
  seen = []
  fill = export.write_files

  def watched(*arguments, **keywords):
    seen.append((folders.folder / "v000001").exists())
    fill(*arguments, **keywords)
    seen.append((folders.folder / "v000001").exists())

  monkeypatch.setattr(export, "write_files", watched)
  folder = folders.write(tiny.params(CONFIG), version=1)
  assert seen == [False, False] and folder.name == "v000001" and folder.exists()


def test_closing_removes_all_and_may_be_done_twice(tmp_path, folders):
  folders.write(tiny.params(CONFIG), version=1)
  folders.close()
  folders.close()
  assert [p.name for p in (tmp_path / "root").iterdir()] == [".lock"]


# --- runs that died -----------------------------------------------------------------------------

# Holds a run's folder, as a trainer does, until it is killed.
OTHER_RUN = """
import pathlib, sys, time
from grpo_jax.engines.transfer import WeightFolders
from tests.engines import tiny
made = WeightFolders(
  pathlib.Path(sys.argv[1]), tiny.config(), source_directory=None, dtype="float32"
)
made.write(tiny.params(tiny.config()), version=1)
print(made.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_what_a_killed_run_left_is_removed_and_what_a_living_one_has_is_not(tmp_path, source):
  root = tmp_path / "root"
  environment = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}",
    "JAX_PLATFORMS": "cpu",
  }
  other = subprocess.Popen(
    [sys.executable, "-c", OTHER_RUN, root], stdout=subprocess.PIPE, text=True, env=environment
  )
  try:
    theirs = pathlib.Path(other.stdout.readline().strip())
    assert (theirs / "v000001" / "model.safetensors").exists()
    with_living = WeightFolders(root, CONFIG, source_directory=source, dtype="float32")
    assert (theirs / "v000001" / "model.safetensors").exists()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (theirs / "v000001").exists()  # a killed run cannot tidy up.
    mine = WeightFolders(root, CONFIG, source_directory=source, dtype="float32")
    assert not theirs.exists()
    assert with_living.folder.exists() and mine.folder.exists()
    mine.close()
    with_living.close()
  finally:
    other.kill()
    other.wait()
    other.stdout.close()


def test_a_folder_whose_removal_was_interrupted_is_removed(tmp_path, source):
  (tmp_path / "root" / "run-dead" / "v000003").mkdir(parents=True)
  made = WeightFolders(tmp_path / "root", CONFIG, source_directory=source, dtype="float32")
  assert not (tmp_path / "root" / "run-dead").exists()
  made.close()


# --- disks that are full ------------------------------------------------------------------------


def test_a_full_disk_is_reported_and_the_next_write_works_once_there_is_room(small_disk, source):
  made = WeightFolders(small_disk / "w", CONFIG, source_directory=source, dtype="float32")
  ballast = small_disk / "ballast"
  ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 60_000))
  with pytest.raises(TransferError) as caught:
    made.write(tiny.params(CONFIG), version=4)
  message = str(caught.value)
  assert "version 4" in message and str(made.folder) in message
  assert "No space left on device" in message and "MiB are needed" in message
  assert "MiB are free" in message and "engine.sglang.weights_folder" in message
  assert [p.name for p in made.folder.iterdir()] == [".lock"]  # nothing partial.
  ballast.unlink()
  folder = made.write(tiny.params(CONFIG), version=4)
  assert safetensors.numpy.load_file(folder / "model.safetensors")
  made.close()


def test_a_disk_that_becomes_full_leaves_the_version_in_use(small_disk, source):
  made = WeightFolders(small_disk / "w", CONFIG, source_directory=source, dtype="float32")
  first = made.write(tiny.params(CONFIG), version=1)
  before = content(first)
  (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 30_000))
  with pytest.raises(TransferError):
    made.write(tiny.params(CONFIG), version=2)
  assert content(first) == before
  assert sorted(p.name for p in made.folder.iterdir()) == [".lock", "v000001"]
  made.close()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, source):
  (tmp_path / "file").write_text("")
  with pytest.raises(TransferError, match="no folder for weights can be made in .*file"):
    WeightFolders(tmp_path / "file", CONFIG, source_directory=source, dtype="float32")


def test_memory_is_used_where_two_versions_fit(tmp_path):
  assert transfer.fast_folder(2**60, tmp_path) == tmp_path
  if not os.access(transfer.MEMORY, os.W_OK):
    pytest.skip(f"there is no {transfer.MEMORY} here")
  chosen = transfer.fast_folder(1, tmp_path)
  assert chosen.parent == transfer.MEMORY and str(os.getuid()) in chosen.name


def test_a_version_keeps_the_model_s_own_config_and_tokenizer(folders, source):
  folder = folders.write(jax.tree.map(lambda x: x, tiny.params(CONFIG)), version=1)
  reported, own = (json.loads((f / "config.json").read_text()) for f in (folder, source))
  assert {k: v for k, v in reported.items() if "dtype" not in k} == {
    k: v for k, v in own.items() if "dtype" not in k
  }
  assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
