"""Checkpoints: bit for bit, across meshes, and whatever happens to the process or the disk."""

import asyncio
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.files import manifest
from grpo_jax.run_folder import (
  attached_bytes,
  checkpoint_errors,
  checkpointing,
  orbax_noise,
  step_folders,
  stored_steps,
)
from grpo_jax.run_folder.stored_leaves import UnusableCheckpoint
from grpo_jax.types import TrainState

ROOT = pathlib.Path(__file__).parents[2]


def make_state(step, *, mesh=None):
  """A state whose every bit follows from `step`, with odd sizes, bfloat16, NaN and -0.0."""
  rng = np.random.default_rng(step)
  params = {
    "embed": rng.standard_normal((16, 8)).astype(np.float32),
    "layers": {"q": rng.standard_normal((2, 8, 24)).astype(np.float32)},
    "norm": np.array([np.nan, -0.0, np.inf, 1e-42], np.float32),
    "half": rng.standard_normal((3, 5)).astype(jnp.bfloat16),
  }
  params = jax.tree.map(jnp.asarray, params)
  if mesh is not None:
    spec = {
      "embed": PartitionSpec("fsdp", "tensor"),
      "layers": {"q": PartitionSpec(None, "fsdp", "tensor")},
      "norm": PartitionSpec(),
      "half": PartitionSpec(),
    }
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, spec)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return TrainState(
    step=jnp.asarray(step, jnp.int32), params=params, opt_state=optimizer.init(params)
  )


def bits(tree):
  """Every leaf as (path, dtype, shape, bytes): equal if and only if bit-identical."""
  return [
    (jax.tree_util.keystr(path), str(x.dtype), x.shape, np.asarray(x).tobytes())
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]


def make_mesh(fsdp, tensor):
  return Mesh(np.asarray(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor), ("fsdp", "tensor"))


def as_shapes(tree):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), dict(tree)
  )


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "checkpoints"


def save_steps(folder, steps, **options):
  with checkpointing.open(folder, **{"keep_last": None, **options}) as checkpoints:
    for step in steps:
      checkpoints.save(step, make_state(step), {"cursor": step})


def test_restore_returns_the_saved_bits_and_the_extra(folder):
  with checkpointing.open(folder) as checkpoints:
    assert checkpoints.restore_latest(make_state(0)) is None and np.isnan(checkpoints.save_s())
    checkpoints.save(7, make_state(7), {"cursor": 93, "config": {"seed": 1}}, metrics={"a": 0.5})
  assert 0 < checkpoints.save_s() < 60
  with checkpointing.open(folder) as checkpoints:
    state, extra = checkpoints.restore_latest(make_state(0))
  assert bits(state) == bits(make_state(7))
  assert jax.tree.structure(state) == jax.tree.structure(make_state(7))
  assert extra == {"cursor": 93, "config": {"seed": 1}}


def test_restored_state_computes_as_the_saved_one_beside_arrays_on_a_mesh(folder):
  """The step counter is bound to no device and must stay so, or jit refuses to mix them."""
  mesh = make_mesh(4, 2)
  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(3, make_state(3, mesh=mesh), {})
    state, _ = checkpoints.restore_latest(make_state(0, mesh=mesh))
  scaled = jax.jit(lambda s: s.params["embed"] * s.step.astype(jnp.float32))(state)
  np.testing.assert_array_equal(scaled, np.asarray(make_state(3).params["embed"]) * 3)


@pytest.mark.parametrize("like_shapes", [False, True], ids=["arrays", "shapes"])
@pytest.mark.parametrize("target", [(8, 1), (2, 4), (1, 1)], ids=str)
def test_restore_onto_another_mesh_keeps_bits_and_takes_its_shardings(folder, target, like_shapes):
  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(5, make_state(5, mesh=make_mesh(4, 2)), {})
    like = vars(make_state(0, mesh=make_mesh(*target)))
    state, _ = checkpoints.restore_latest(as_shapes(like) if like_shapes else dict(like))
  assert bits(state) == bits(vars(make_state(5)))
  pairs = zip(jax.tree.leaves(state["params"]), jax.tree.leaves(like["params"]), strict=True)
  assert all(restored.sharding == wanted.sharding for restored, wanted in pairs)
  q = state["params"]["layers"]["q"]
  assert q.addressable_shards[0].data.size == q.size // (target[0] * target[1])


def test_save_holds_what_the_state_was_although_an_update_donates_it_at_once(folder):
  update = jax.jit(
    lambda s: jax.tree.map(lambda x: (x * 0 - 7).astype(x.dtype), s), donate_argnums=0
  )
  shape = (512, 1024)
  for attempt in range(3):
    expected = np.random.default_rng(attempt).standard_normal(shape).astype(np.float32)
    with checkpointing.open(folder / str(attempt)) as checkpoints:
      state = {"w": jnp.array(expected)}
      checkpoints.save(1, state, {})
      for _ in range(3):
        state = update(state)
      jax.block_until_ready(state)
      restored, _ = checkpoints.restore_latest(state)
    np.testing.assert_array_equal(restored["w"], expected)


def test_extra_is_taken_as_it_is_when_save_is_called(folder):
  cursor = {"position": 1}
  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(1, make_state(1), cursor)
    cursor["position"] = 2
    _, extra = checkpoints.restore_latest(make_state(0))
  assert extra == {"position": 1}


def test_random_keys_and_host_leaves_keep_their_kind(folder):
  state = {"key": jax.random.key(3), "host": np.arange(3), "count": 4, "rate": 0.25}
  like = {"key": jax.random.key(0), "host": np.zeros(3, int), "count": 0, "rate": 0.0}
  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(1, state, {})
    restored, _ = checkpoints.restore_latest(like)
  assert jax.random.uniform(restored["key"]) == jax.random.uniform(jax.random.key(3))
  assert isinstance(restored["host"], np.ndarray) and restored["host"].tolist() == [0, 1, 2]
  assert (restored["count"], restored["rate"]) == (4, 0.25)
  assert isinstance(restored["count"], int)


# --- retention ---


@pytest.mark.parametrize(
  "options, expected",
  [
    (dict(keep_last=2, keep_best=0), {50, 60}),
    (dict(keep_last=0, keep_best=0), {60}),
    (dict(keep_last=1, keep_best=1), {60, 40}),  # 40 ties with 10, and is newer.
    (dict(keep_last=1, keep_best=2), {60, 40, 10}),
    (dict(keep_last=1, keep_best=1, mode="min"), {60, 20}),
    (dict(keep_last=1, keep_best=4), {60, 40, 10, 50, 20}),  # NaN (30) and None (60) rank last.
    (dict(keep_last=1, keep_best=5), {60, 40, 10, 50, 20}),
    (dict(keep_last=1, keep_best=6), {60, 40, 10, 50, 20, 30}),
    (dict(keep_last=None, keep_best=0), {10, 20, 30, 40, 50, 60}),
  ],
)
def test_kept_is_the_newest_and_the_best(options, expected):
  metric_of = {10: 0.9, 20: 0.1, 30: float("nan"), 40: 0.9, 50: 0.5, 60: None}
  assert stored_steps.kept(metric_of, **options) == expected


def test_the_first_metric_that_was_measured_ranks(folder):
  names = ("eval/a/accuracy", "eval/a/reward_mean")
  with checkpointing.open(folder, keep_last=1, keep_best=1, best_metric=names) as checkpoints:
    for step, value in enumerate((1.0, 3.0, 2.0, 0.5)):
      checkpoints.save(step, make_state(step), {}, metrics={"eval/a/reward_mean": value})
  assert checkpoints.steps() == [1, 3]


def test_save_deletes_what_is_neither_recent_nor_best(folder):
  scores = {1: 0.3, 2: 0.8, 3: float("nan"), 4: None, 5: 0.1}
  with checkpointing.open(folder, keep_last=1, keep_best=1, best_metric="eval/a") as checkpoints:
    for step, score in scores.items():
      metrics = {} if score is None else {"eval/a": score}
      checkpoints.save(step, make_state(step), {}, metrics=metrics)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5]
  assert sorted(path.name for path in folder.iterdir()) == ["step_00000002", "step_00000005"]


def test_save_of_a_saved_step_writes_nothing_and_one_of_another_run_is_refused(folder):
  with checkpointing.open(folder) as checkpoints:
    assert checkpoints.save(1, make_state(1), {"cursor": 1})
    assert not checkpoints.save(1, make_state(2), {"cursor": 2})
    state, extra = checkpoints.restore_latest(make_state(0))
  assert (bits(state), extra) == (bits(make_state(1)), {"cursor": 1})
  with checkpointing.open(folder) as other, pytest.raises(FileExistsError, match="restore_latest"):
    other.save(1, make_state(2), {})


# --- damage ---


def largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(step):
  path = largest(step / "state")
  os.truncate(path, path.stat().st_size // 2)


def flip_one_bit(step):
  path = largest(step / "state")
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def flip_a_bit_of_info(step):
  text = (step / "info.json").read_text()
  (step / "info.json").write_text(text.replace('"cursor": 3', '"cursor": 2'))


def remove_a_file(step):
  largest(step / "state").unlink()


def remove_all(step):
  shutil.rmtree(step)
  step.mkdir()


def garble_manifest(step):
  (step / "manifest.json").write_text('{"files": {"info.json": ')


DAMAGE = {
  truncate: "bytes instead of",
  flip_one_bit: "digest differs",
  flip_a_bit_of_info: "info.json has changed",
  remove_a_file: "is missing",
  remove_all: "it is empty",
  garble_manifest: "cannot be parsed",
  lambda step: (step / "manifest.json").unlink(): "manifest.json is missing",
  lambda step: (step / "manifest.json").write_text('{"files": {}}'): "lists no files",
  lambda step: shutil.rmtree(step / "state"): "is missing",
  lambda step: (shutil.rmtree(step), step.write_text("")): "not a folder",
}


@pytest.mark.parametrize("harm, reason", DAMAGE.items(), ids=DAMAGE.values())
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(folder, noticed, harm, reason):
  save_steps(folder, [2, 3])
  harm(folder / "step_00000003")
  with checkpointing.open(folder) as checkpoints:
    state, extra = checkpoints.restore_latest(make_state(0))
    assert (bits(state), extra) == (bits(make_state(2)), {"cursor": 2})
    assert "step_00000003" in noticed[0] and reason in noticed[0]
    assert "step_00000002" in noticed[-1]
    assert checkpoints.save(3, make_state(3), {"cursor": 3}), "the damaged step is replaced"
    state, _ = checkpoints.restore_latest(make_state(0))
  assert bits(state) == bits(make_state(3))
  assert (folder / "broken_step_00000003").exists()


def test_every_flipped_byte_of_a_checkpoint_is_noticed(folder):
  save_steps(folder, [1])
  step = folder / "step_00000001"
  rng = random.Random(0)
  for path in sorted(p for p in step.rglob("*") if p.is_file() and p.name != manifest.NAME):
    good = path.read_bytes()
    for place in rng.sample(range(len(good)), min(len(good), 3)):
      bad = bytearray(good)
      bad[place] ^= 1 << rng.randrange(8)
      path.write_bytes(bad)
      assert manifest.damage(step) is not None, f"{path} at {place}"
    path.write_bytes(good)
  assert manifest.damage(step) is None


def test_unfinished_save_is_removed_and_reported(folder, noticed):
  save_steps(folder, [2])
  shutil.copytree(folder / "step_00000002", folder / "tmp_step_00000003")
  with checkpointing.open(folder) as checkpoints:
    state, _ = checkpoints.restore_latest(make_state(0))
  assert bits(state) == bits(make_state(2))
  assert ["tmp_step_00000003" in line for line in noticed] == [True]
  assert not (folder / "tmp_step_00000003").exists()


def test_nothing_usable_is_an_error_unless_a_fresh_start_is_allowed(folder, noticed):
  save_steps(folder, [2, 3])
  truncate(folder / "step_00000003")
  remove_all(folder / "step_00000002")
  with checkpointing.open(folder) as checkpoints:
    with pytest.raises(checkpoint_errors.CheckpointError, match=r"(?s)00003: .*00002: it is empty"):
      checkpoints.restore_latest(make_state(0))
    assert checkpoints.restore_latest(make_state(0), allow_restart=True) is None
    checkpoints.save(2, make_state(2), {})
    assert checkpoints.restore_latest(make_state(0)) is not None


def test_renamed_folder_is_not_taken_for_another_step(folder, noticed):
  save_steps(folder, [2, 3])
  (folder / "step_00000003").rename(folder / "step_00000009")
  with checkpointing.open(folder) as checkpoints:
    state, _ = checkpoints.restore_latest(make_state(0))
  assert int(state.step) == 2
  assert "it holds step 3" in noticed[0]


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda p: {**p, "embed": jnp.zeros((16, 9))}, r"params.embed: saved \(\(16, 8\), 'float32'\)"),
    (lambda p: {**p, "half": jnp.zeros((3, 5))}, "'bfloat16'.*'float32'"),
    (lambda p: {**p, "extra": jnp.zeros(2)}, "params.extra: saved nothing"),
    (lambda p: {k: v for k, v in p.items() if k != "norm"}, "params.norm.*needed nothing"),
  ],
  ids=["shape", "dtype", "missing", "surplus"],
)
def test_restore_into_another_model_names_the_leaves_instead_of_falling_back(
  folder, noticed, change, message
):
  save_steps(folder, [1, 2])
  like = make_state(0)
  like = TrainState(step=like.step, params=change(like.params), opt_state=like.opt_state)
  with checkpointing.open(folder) as checkpoints:
    with pytest.raises(ValueError, match=message):
      checkpoints.restore_latest(like)
  assert noticed == []


# --- the disk and the process ---


def test_full_disk_stops_the_save_at_once_with_the_path(folder, monkeypatch):
  usage = shutil.disk_usage(folder.parent)._replace(free=100)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  with checkpointing.open(folder) as checkpoints:
    with pytest.raises(
      checkpoint_errors.CheckpointError, match=r"tmp_step_00000001: the disk is full"
    ):
      checkpoints.save(1, make_state(1), {})


def test_failure_while_writing_surfaces_at_the_next_check_with_the_path(folder, monkeypatch):
  def fail(path, **_):
    raise OSError(28, "No space left on device", str(path))

  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    monkeypatch.setattr(manifest, "write", fail)
    checkpoints.save(2, make_state(2), {})
    with pytest.raises(checkpoint_errors.CheckpointError, match="step_00000002.*No space left"):
      while True:
        checkpoints.check()
    monkeypatch.undo()
    checkpoints.check()  # told once.
    assert checkpoints.steps() == [1]
    assert checkpoints.save(2, make_state(2), {}), "the failed step can be tried again"


def test_unwritable_place_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(checkpoint_errors.FolderError, match="file"):
    checkpointing.open(tmp_path / "file")
  with checkpointing.open(tmp_path / "file" / "checkpoints") as checkpoints:
    with pytest.raises(checkpoint_errors.CheckpointError, match="file/checkpoints"):
      checkpoints.save(1, make_state(1), {})


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(keep_last=-1), "keep_last"),
    (dict(keep_best=1), "best_metric"),
    (dict(mode="best"), "mode"),
  ],
)
def test_open_refuses_what_makes_no_sense(folder, options, message):
  with pytest.raises(ValueError, match=message):
    checkpointing.open(folder, **options)


def test_close_waits_for_the_save_under_way(folder):
  checkpoints = checkpointing.open(folder)
  checkpoints.save(1, make_state(1), {})
  checkpoints.close()
  checkpoints.close()
  assert manifest.damage(folder / "step_00000001") is None


SAVER = """
import os, shutil, signal, sys
from grpo_jax.files import atomic, manifest
from grpo_jax.run_folder import checkpointing, step_folders
from tests.run_folder.test_checkpointing import make_state

folder, moment = sys.argv[1:]

def die(*_, **__):
  os.kill(os.getpid(), signal.SIGKILL)

with checkpointing.open(folder, keep_last=1) as checkpoints:
  checkpoints.save(1, make_state(1), {"cursor": 1})
  checkpoints.wait()
  if moment == "before the manifest":
    manifest.write = die
  elif moment == "within the manifest":
    manifest.digest = die
  elif moment == "before the final name":
    move = atomic.move
    atomic.move = lambda a, b, **o: (move if b.name == manifest.NAME else die)(a, b, **o)
  elif moment == "before deleting the old":
    step_folders.OnDisk.delete = die
  elif moment == "while deleting the old":
    shutil.rmtree = lambda path: ((path / "info.json").unlink(), die())
  print("ready", flush=True)
  for step in range(2, 10_000):
    checkpoints.save(step, make_state(step), {"cursor": step})
"""


def start_saver(folder, moment):
  return subprocess.Popen(
    [sys.executable, "-c", SAVER, str(folder), moment],
    cwd=ROOT,
    env={
      **os.environ,
      "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}",
      "JAX_PLATFORMS": "cpu",
    },
    stdout=subprocess.PIPE,
    text=True,
  )


def assert_newest_is_whole(folder, at_least):
  with checkpointing.open(folder) as checkpoints:
    assert [manifest.damage(path) for path in folder.glob("step_*")].count(None) == len(
      checkpoints.steps()
    ), "a folder with a final name is whole"
    state, extra = checkpoints.restore_latest(make_state(0))
    step = int(state.step)
    assert step >= at_least
    assert extra == {"cursor": step}
    assert bits(state) == bits(make_state(step))
    assert not list(folder.glob("tmp_*"))
    assert not checkpoints._broken
    checkpoints.save(step + 1, make_state(step + 1), {})


@pytest.mark.long
@pytest.mark.parametrize(
  "moment, survivor",
  [
    ("before the final name", 1),
    pytest.param("before the manifest", 1, marks=pytest.mark.slow),
    pytest.param("within the manifest", 1, marks=pytest.mark.slow),
    pytest.param("before deleting the old", 2, marks=pytest.mark.slow),
    ("while deleting the old", 2),
  ],
)
def test_kill_at_a_chosen_moment_of_a_save_leaves_a_whole_checkpoint(folder, moment, survivor):
  with start_saver(folder, moment) as process:
    assert process.wait(timeout=120) == -signal.SIGKILL
  assert_newest_is_whole(folder, survivor)


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_whole_checkpoint(folder):
  delays = random.Random(0)
  for attempt in range(6):
    with start_saver(folder / str(attempt), "any") as process:
      assert process.stdout.readline() == "ready\n"
      time.sleep(delays.uniform(0.0, 0.4))
      process.kill()
    assert_newest_is_whole(folder / str(attempt), 1)


def test_info_is_readable_without_this_package(folder):
  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(4, make_state(4), {"cursor": 9}, metrics={"eval/a": 0.5})
  info = json.loads((folder / "step_00000004" / "info.json").read_text())
  assert (info["step"], info["metrics"], info["extra"]) == (4, {"eval/a": 0.5}, {"cursor": 9})
  assert info["leaves"]["params.layers.q"] == [[2, 8, 24], "float32"]


# --- edited together with its manifest ---


def edit_info(change):
  """Returns what edits info.json, and then writes the manifest again."""

  def harm(step):
    info = json.loads((step / "info.json").read_text())
    changed = change(info)
    (step / "info.json").write_text(json.dumps(info if changed is None else changed))
    manifest.write(step)

  return harm


def set_field(*path, to):
  def change(info):
    for name in path[:-1]:
      info = info[name]
    info[path[-1]] = to

  return edit_info(change)


def swap_arrays(step):
  other = step.parent / "step_00000002" / "state"
  shutil.rmtree(step / "state")
  shutil.copytree(other, step / "state")
  manifest.write(step)


def remove_metadata(step):
  (step / "state" / "_METADATA").unlink()
  manifest.write(step)


LEAF = "params.embed"
EDITS = {
  "a list": (edit_info(lambda info: [info]), "not an object"),
  "no step": (edit_info(lambda info: info.pop("step") and None), "'step' in info.json is missing"),
  "step is text": (set_field("step", to="3"), "'step' in info.json is '3'"),
  "step is true": (set_field("step", to=True), "'step' in info.json is True"),
  "future step": (set_field("step", to=99), "it holds step 99"),
  "metrics are a list": (set_field("metrics", to=[]), "'metrics' in info.json"),
  "extra is null": (set_field("extra", to=None), "'extra' in info.json is missing"),
  "leaves are a number": (set_field("leaves", to=3), "'leaves' in info.json"),
  "a leaf is null": (set_field("leaves", LEAF, to=None), "leaf 'params.embed'"),
  "a shape is negative": (set_field("leaves", LEAF, to=[[-1, 8], "float32"]), "leaf 'params.em"),
  "another shape": (set_field("leaves", LEAF, to=[[16, 9], "float32"]), "another model"),
  "another dtype": (set_field("leaves", LEAF, to=[[16, 8], "float64"]), "another model"),
  "a leaf is missing": (edit_info(lambda i: i["leaves"].pop(LEAF) and None), "another model"),
  "a leaf is surplus": (set_field("leaves", "more", to=[[1], "int32"]), "another model"),
  "the arrays of another step": (swap_arrays, "its state is of step 2, not of step 3"),
  "no metadata": (remove_metadata, "its arrays"),
}


@pytest.mark.parametrize("harm, reason", EDITS.values(), ids=EDITS)
def test_a_checkpoint_edited_with_its_manifest_is_passed_over(folder, noticed, harm, reason):
  save_steps(folder, [2, 3])
  harm(folder / "step_00000003")
  assert manifest.damage(folder / "step_00000003") is None
  with checkpointing.open(folder) as checkpoints:
    state, extra = checkpoints.restore_latest(make_state(0))
  assert (bits(state), extra) == (bits(make_state(2)), {"cursor": 2})
  assert "step_00000003" in noticed[0] and reason in noticed[0]
  with checkpointing.open(folder) as checkpoints:
    shutil.rmtree(folder / "step_00000002")
    with pytest.raises(checkpoint_errors.CheckpointError, match="step_00000003"):
      checkpoints.restore_latest(make_state(0))


def test_what_the_caller_refuses_is_passed_over(folder, noticed):
  save_steps(folder, [2, 3])
  refuse = lambda state, extra: f"cursor {extra['cursor']}" if extra["cursor"] > 2 else None
  with checkpointing.open(folder) as checkpoints:
    _, extra = checkpoints.restore_latest(make_state(0), refuse=refuse)
  assert extra == {"cursor": 2} and "cursor 3" in noticed[0]


def test_a_failed_save_prints_nothing_but_its_one_message(folder, monkeypatch, capfd):
  from orbax.checkpoint._src.handlers import base_pytree_checkpoint_handler as handlers
  from orbax.checkpoint._src.metadata import checkpoint as stores

  async def fail(*_, **__):
    raise ValueError("RESOURCE_EXHAUSTED: No space left on device [tensorstore_spec='{\"a\": 1}']")

  def write_late(*arguments, **named):
    time.sleep(0.2)  # as on a busy machine: after the failure, if nothing waits for it.
    return write(*arguments, **named)

  write = stores._MetadataStoreImpl.write
  monkeypatch.setattr(stores._MetadataStoreImpl, "write", write_late)
  monkeypatch.setattr(handlers.BasePyTreeCheckpointHandler, "_finalize_async", fail)
  with checkpointing.open(folder) as checkpoints:
    checkpoints.save(1, make_state(1), {})
    with pytest.raises(checkpoint_errors.CheckpointError) as caught:
      checkpoints.wait()
  path = folder / "step_00000001"
  assert str(caught.value) == f"saving {path} failed: No space left on device"
  assert capfd.readouterr() == ("", "")
  assert list(folder.iterdir()) == []


@pytest.mark.parametrize("hook", ["excepthook", "unraisablehook"])
def test_late_writes_of_a_failed_save_print_no_traceback(hook, monkeypatch):
  """TensorStore reports each write to an event loop that is closed, through one of two hooks."""
  printed = []
  monkeypatch.setattr(sys, hook, lambda *_: printed.append(1))
  loop = asyncio.new_event_loop()
  loop.close()
  try:
    loop.call_soon_threadsafe(print)
  except RuntimeError as error:
    late, trace = error, error.__traceback__.tb_next  # called from C++: no frame is above.

  def report(error, trace):
    if hook == "excepthook":
      sys.excepthook(type(error), error, trace)
    else:
      sys.unraisablehook(types.SimpleNamespace(exc_value=error, exc_traceback=trace))

  with orbax_noise.silenced():
    report(late, trace)
    assert printed == []
    report(ValueError("another"), None)
    assert printed == [1]
  report(late, trace)
  assert printed == [1, 1], "the hook is given back"


def test_a_lock_that_another_process_removes_meanwhile_does_not_fail_a_save(tmp_path, monkeypatch):
  folders = step_folders.OnDisk(tmp_path)
  folders.begin(1, "{}", b"", 1)
  lock = folders.unfinished(1) / "state" / "manifest.ocdbt.__lock"
  lock.touch()
  is_file = pathlib.Path.is_file

  def seen_last(path):
    found = is_file(path)
    if path == lock:
      path.unlink()
    return found

  monkeypatch.setattr(pathlib.Path, "is_file", seen_last)
  assert folders.sizes(1) == {"info.json": 2} and not lock.exists()


def test_bytes_of_the_callers_state_lie_beside_the_json(tmp_path):
  extra = {"groups": [[3, {"values": b"\0\xff" * 40}], [4, {"values": b""}]], "cursor": 7}
  with checkpointing.open(tmp_path, keep_last=None) as checkpoints:
    checkpoints.save(1, make_state(1), {"cursor": 6})
    checkpoints.save(2, make_state(2), extra)
  assert not (tmp_path / "step_00000001" / "attached.bin").exists()
  folder = tmp_path / "step_00000002"
  assert (folder / "attached.bin").read_bytes() == b"\0\xff" * 40
  assert "attached.bin" in json.loads((folder / manifest.NAME).read_text())["files"]
  with checkpointing.open(tmp_path, keep_last=None) as checkpoints:
    _, found = checkpoints.restore_latest(make_state(0))
    assert {name: found[name] for name in extra} == extra
  with pytest.raises(checkpoint_errors.CheckpointError):  # 1 is intact, 2 lacks its bytes.
    shutil.rmtree(tmp_path / "step_00000001")
    (folder / "attached.bin").write_bytes(b"short")
    with checkpointing.open(tmp_path, keep_last=None) as checkpoints:
      checkpoints.restore_latest(make_state(0))


def test_places_of_bytes_are_checked():
  record, data = attached_bytes.taken_out({"a": b"12", "b": [b"345"]})
  assert data == b"12345" and attached_bytes.put_back(record, data) == {"a": b"12", "b": [b"345"]}
  for place in ([2, 4], [-1, 2], [0, -1], ["x", 1], [1], None):
    with pytest.raises(UnusableCheckpoint):
      attached_bytes.put_back({"attached bytes": place}, data)
