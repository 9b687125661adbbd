"""A checkpoint of master weights and Adam's state, written and read."""

import pathlib
import shutil
import time

from gpu_day_parts import child, models, running


def measure(record: child.Record, settings: running.Settings, *, model: str) -> None:
  """Measures how fast a checkpoint is written and read.

  Args:
    record: Record of the measurements.
    settings: Settings of the day; the checkpoint is written below its `scratch`.
    model: Name in `models`.

  Raises:
    Skipped: The disk has too little room.
  """
  child.open_device(record, settings)
  import jax

  from grpo_jax.learn import optim, train_step
  from grpo_jax.run_folder import checkpointing

  tx, _ = optim.make(10)
  state = train_step.init(models.random_weights(models.config_of(model)), tx)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  folder = pathlib.Path(settings.scratch) / "checkpoint"
  free = shutil.disk_usage(settings.scratch).free
  record.put(model=model, bytes=size, free_bytes=free, folder=str(folder))
  if free < 1.1 * size:
    raise child.Skipped(f"{size / 1e9:.1f} GB are needed in {folder}, {free / 1e9:.1f} GB are free")
  try:
    checkpoints = checkpointing.open(folder)
    start = time.perf_counter()
    checkpoints.save(0, state, {})
    started_s = time.perf_counter() - start  # the update may continue from here.
    checkpoints.wait()
    record.put(save_returns_s=started_s, written_s=time.perf_counter() - start)
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    like = jax.tree.map(placed, state)
    del state
    checkpoints.close()
    start = time.perf_counter()
    found = checkpointing.open(folder).restore_latest(like)
    if found is None:
      raise RuntimeError(f"nothing was restored from {folder}")
    jax.block_until_ready(found[0])
    record.put(read_s=time.perf_counter() - start)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
