"""Checkpoints: asynchronous, atomic, checked bit by bit before they are used.

The folder holds one folder per step. On a disk, a step is complete once its folder has its final
name; at a URL, once it has a manifest (`url_steps`):

    checkpoints/
      step_00000020/
        state/          the arrays, written by Orbax; one entry a leaf of the state
        info.json       step, metrics, the caller's extra, shape and dtype of every leaf
        attached.bin    the bytes of the caller's extra, if it has any
        manifest.json   size and BLAKE2b digest of every other file
      tmp_step_00000030/  a save in progress, or the remains of a killed one

`save` passes the arrays to Orbax and returns. A background thread waits until they are
written, adds the manifest, renames the folder, and deletes the checkpoints that need not be
kept. A process that is killed at any moment therefore leaves every earlier step intact.

Several processes must share the place, and make the same calls in the same order on their
main threads. Each writes and reads its own shards and digests its share of the files. The main
process does the rest, once all have reported that their shards are written: a failure of one
process fails the save on all of them. A checkpoint does not depend on how many processes wrote it.
"""

import concurrent.futures
import contextlib
import json
import logging
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from grpo_jax import processes
from grpo_jax.run_folder import (
  attached_bytes,
  checkpoint_reading,
  orbax_noise,
  state_leaves,
  step_folders,
  stored_arrays,
  stored_leaves,
  stored_steps,
)
from grpo_jax.run_folder.checkpoint_errors import CheckpointError, FolderError, OtherStateError
from grpo_jax.run_folder.options import CheckpointOptions
from grpo_jax.run_folder.step_folders import Folders

T = TypeVar("T")

SEEN_S = 60.0  # seconds until the main process sees what the others have written.

_log = logging.getLogger(__name__)


class Checkpoints:
  """The checkpoints of one run. Made by `open`. Leaving the context waits for the last save."""

  def __init__(
    self,
    folders: Folders,
    *,
    keep_last: int | None,
    keep_best: int,
    best_metric: tuple[str, ...],
    mode: str,
    facts: Mapping[str, Any],
  ):
    self._folders = folders
    self._facts = dict(facts)
    self._retention = {"keep_last": keep_last, "keep_best": keep_best, "mode": mode}
    self._best_metric = best_metric
    self._own: set[int] = set()  # steps saved or restored by this object.
    self._broken: set[int] = set()  # steps found unusable; set aside by the next save.
    self._pending: tuple[int, concurrent.futures.Future] | None = None
    self._is_abandoned = False
    self._save_s = math.nan
    self._lock = threading.RLock()  # saves may come from the thread that a signal wakes.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    self._quiet = contextlib.ExitStack()
    self._quiet.enter_context(orbax_noise.silenced())
    self._arrays = stored_arrays.Store()
    self._channel = processes.Channel("checkpoints")  # of the background threads.

  @property
  def directory(self) -> Any:
    """The folder of the checkpoints: a path, on a disk or at a URL."""
    return self._folders.directory

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    try:
      self.close()
    except CheckpointError as error:
      if kind is None:
        raise
      # Not raised: the exception that ended the block propagates.
      _log.error("and the last save failed: %s", error)

  def save_s(self) -> float:
    """Returns how many seconds the last save took to be complete; NaN if there was none."""
    return self._save_s

  def steps(self) -> list[int]:
    """Returns the complete steps in ascending order; does not check whether they are intact.

    The main process looks for them.
    """
    return _by_main(self._folders.steps, what="the list of checkpoints")

  def newest(self) -> int | None:
    """Returns the newest complete step that this process sees; None if there is none."""
    return max(self._folders.steps(), default=None)

  def newest_extra(self) -> Mapping[str, Any] | None:
    """Returns the `extra` of the newest complete step whose info.json can be read, without bytes.

    The main process reads it; None if there is no such step.
    """
    return _by_main(self._newest_extra, what="the newest checkpoint")

  def _newest_extra(self) -> Mapping[str, Any] | None:
    for step in reversed(self._folders.steps()):
      with contextlib.suppress(stored_leaves.UnusableCheckpoint, OSError):
        return self._folders.info(step).extra
    return None

  def save(
    self,
    step: int,
    state: Any,
    extra: Mapping[str, Any],
    *,
    metrics: Mapping[str, float] | None = None,
  ) -> bool:
    """Starts saving `state`; returns once its arrays may be donated or dropped.

    Waits first for the previous save. The arrays are read while the next phase
    runs: on a CPU they are not copied (an update that donates them meanwhile makes JAX
    copy them, or wait), elsewhere they are copied to the host once.

    Args:
      step: Number of optimizer batches done; names the checkpoint.
      state: Tree of JAX or NumPy arrays.
      extra: Other state that a resumed run needs, as JSON that may hold bytes: the data cursor, the
        config.
      metrics: Metrics measured at this step; `best_metric` names the one that ranks the checkpoint.

    Returns:
      False if this object has already saved or restored this step; then nothing is written.

    Raises:
      CheckpointError: This save could not be started, or the previous one failed (disk
        full, no permission); the message names the folder.
      FolderError: Another run has already saved this step here.
      TypeError: `extra` or `metrics` cannot be written as JSON.
    """
    with self._lock:
      return self._save(step, state, extra, metrics or {})

  def _save(
    self, step: int, state: Any, extra: Mapping[str, Any], metrics: Mapping[str, float]
  ) -> bool:
    """Saves as `save` does; only one thread at a time."""
    self.wait()
    if step in self._own:
      return False
    began = time.monotonic()
    leaves = {
      name: stored_arrays.to_write(state_leaves.raw(leaf))
      for name, leaf in state_leaves.named_leaves(state).items()
    }
    extra_json, attached = attached_bytes.taken_out({**self._facts, **extra})
    info = {
      "step": step,
      "metrics": dict(metrics),
      "extra": extra_json,
      "leaves": {name: [list(x.shape), str(x.dtype)] for name, x in leaves.items()},
    }
    text = json.dumps(info, indent=1)  # now: the caller may change `extra` during the save.
    temporary = self._folders.unfinished(step)
    num_bytes = sum(x.nbytes for x in leaves.values())
    what = f"saving step {step}"
    # In a thread, which can run Orbax's event loop also where this one has a loop, as in notebooks.
    begun = lambda: self._thread.submit(self._arrays.begin, temporary / "state", leaves)
    writing: list[stored_arrays.Writing] = []
    try:
      make_place = lambda: self._make_place(step, text, attached, num_bytes)
      processes.together(make_place, what=what)
      processes.together(lambda: writing.append(begun().result()), what=what)
    except (OSError, ValueError, processes.OtherProcessError) as error:
      self._remove(step, writing)
      if isinstance(error, FolderError):
        raise
      raise CheckpointError(_not_saved(step, temporary, error)) from error
    self._pending = step, self._thread.submit(self._commit, step, writing[0], began)
    self._own.add(step)
    return True

  def restore_latest(
    self,
    like: Any,
    *,
    allow_restart: bool = False,
    refuse: checkpoint_reading.Refusal | None = None,
  ) -> tuple[Any, Any] | None:
    """Restores the newest usable checkpoint.

    First every byte is checked against the manifest, then the parts of the checkpoint against
    each other. If a step cannot be used, a warning says why, and the step before it is tried.

    Args:
      like: Tree of the same structure: arrays, or `jax.ShapeDtypeStruct`s to hold only
        one copy in memory. The restored arrays take its shardings, whichever mesh saved
        them; a leaf that is not bound to a device stays unbound. Or a function that returns such
        a tree, given shape and dtype of the leaves of a checkpoint by name.
      allow_restart: Whether to return None also if there are checkpoints but none can be used.
      refuse: Function (state, extra) → why a run cannot continue from them, or None if it can.

    Returns:
      (state, extra), bit for bit as saved; or None if nothing was saved here yet.

    Raises:
      CheckpointError: There are checkpoints, but none can be used.
      OtherStateError: All of them are of another model or optimizer; the message names the leaves.
    """
    self.wait()
    self._clear_unfinished()  # by the main process, before it lists the steps for all.
    reasons: dict[int, stored_leaves.UnusableCheckpoint] = {}
    for step in reversed(self.steps()):
      try:
        found = checkpoint_reading.restored(self._folders, self._arrays, step, like, refuse)
      except stored_leaves.UnusableCheckpoint as reason:
        reasons[step] = reason
        continue
      for broken, reason in reasons.items():
        self._broken.add(broken)
        _log.warning("checkpoint %s cannot be used: %s", self._path(broken), reason)
      if reasons:
        _log.info("continuing from %s", self._path(step))
      self._own.add(step)
      return found
    if not reasons:
      return None
    self._broken |= reasons.keys()
    listed = [f"{self._path(step)}: {reason}" for step, reason in reasons.items()]
    if all(isinstance(reason, stored_leaves.OtherState) for reason in reasons.values()):
      self._broken.clear()
      raise OtherStateError(
        f"{listed[0]}\nSet model and optim as they were, or choose another --workdir"
      )
    if allow_restart:
      return None
    raise CheckpointError(
      "no checkpoint can be used:\n  " + "\n  ".join(listed) + f"\nMove {self.directory} away to"
      " begin at step 0 (what the run has written is kept), or choose another --workdir"
    )

  def check(self) -> None:
    """Raises CheckpointError if the current save has failed; cheap, and does not wait.

    A save ends on all processes with the same outcome, but not at the same moment.
    """
    if self._pending is None:
      return
    if processes.any_of(self._pending[1].done(), what="the end of a save"):
      self.wait()

  def wait(self) -> None:
    """Waits until the current save is complete.

    Raises:
      CheckpointError: The save failed; the message names the folder and the cause. Raised once.
    """
    with self._lock:
      if self._pending is None:
        return
      step, future = self._pending
      error = future.exception()
      self._pending = None
      if error:
        self._own.discard(step)
        raise CheckpointError(f"saving {self._path(step)} failed: {_reason(error)}") from error

  def abandon(self) -> None:
    """Abandons the current save: nothing waits for it, not even `close`."""
    self._pending = None
    self._is_abandoned = True

  def close(self) -> None:
    """Waits for the current save, then ends the background thread. Idempotent."""
    if self._is_abandoned:
      self._thread.shutdown(wait=False)
      return  # Orbax is still writing, so its output stays silenced.
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._arrays.close()
      self._quiet.close()

  def _path(self, step: int) -> Any:
    return self._folders.path(step)

  def _make_place(self, step: int, info: str, attached: bytes, num_bytes: int) -> None:
    """Makes the folder of a save, on the main process."""
    if not processes.is_main():
      return
    if step not in self._broken and self._folders.holds(step):
      raise FolderError(
        f"{self._path(step)} already exists and is not from this run: continue that run with"
        " restore_latest, or choose another folder"
      )
    self._folders.begin(step, info, attached, num_bytes)

  def _commit(self, step: int, writing: stored_arrays.Writing, began: float) -> None:
    """Completes a save: manifest, final name, retention. Runs in the background thread.

    The threads of all processes wait for each other, so that a checkpoint is completed only once
    all shards are written, and a failure of any process is one of all.
    """
    try:
      own = self._channel.together(
        lambda: self._written(step, writing), what=f"the arrays of step {step}"
      )
      listed: dict[str, Any] = {}
      for of_process in self._channel.exchange(own, what=f"the digests of step {step}"):
        listed |= of_process
      self._channel.together(
        lambda: self._complete(step, listed), what=f"the manifest of step {step}"
      )
      self._save_s = time.monotonic() - began
    except Exception:
      if processes.is_main():
        self._folders.discard(step)  # the disk may be full because of it.
      raise

  def _written(self, step: int, writing: stored_arrays.Writing) -> dict[str, Any]:
    """Waits until this process's shards are written; returns their entries in the manifest."""
    with _one_reason():
      writing.wait()
      if processes.count() == 1:
        return {}  # the manifest lists all files in any case.
      own = stored_arrays.written_by_this_process(self._folders.sizes(step))
      return self._folders.entries(step, own)

  def _complete(self, step: int, listed: Mapping[str, Any]) -> None:
    """Makes a checkpoint of a folder that all processes have filled, on the main process."""
    if not processes.is_main():
      return
    with _one_reason():
      self._wait_for(step, listed)
      self._arrays.complete(self._folders.unfinished(step) / "state")
      self._folders.complete(step, listed, self._broken)
      self._broken.clear()
      metric_of = {step: self._metric(step) for step in self._folders.steps()}
      for surplus in set(metric_of) - stored_steps.kept(metric_of, **self._retention):
        self._folders.delete(surplus)

  def _wait_for(self, step: int, listed: Mapping[str, Any]) -> None:
    """Waits until this process sees the files that all processes have written.

    Raises:
      CheckpointError: A file is not there, or has another size.
    """
    deadline = time.monotonic() + SEEN_S
    while unseen := _differing(self._folders.sizes(step), listed):
      if time.monotonic() > deadline:
        path = self._folders.unfinished(step) / unseen[0]
        raise CheckpointError(
          f"{path}, which another process wrote, is missing or has another size: the processes of a"
          " run must share its folder"
        )
      time.sleep(0.1)

  def _remove(self, step: int, writing: Sequence[stored_arrays.Writing]) -> None:
    """Removes what a save has written that could not begin on all processes."""
    for begun in writing:
      with contextlib.suppress(Exception):  # the save has failed already.
        begun.wait()
    processes.exchange(None, what="the end of a save")
    if processes.is_main():
      self._folders.discard(step)  # the disk may be full because of it.

  def _metric(self, step: int) -> float | None:
    """Returns the metric that ranks a step, or None."""
    return stored_steps.chosen(self._folders.metrics(step), self._best_metric)

  def _clear_unfinished(self) -> None:
    """Removes and logs what a killed process left behind."""
    if processes.is_main():
      for name in self._folders.clear_unfinished():
        _log.info("removed %s: a save that was not completed", name)


def open(
  directory: str | os.PathLike[str] | Folders,
  *,
  keep_last: int | None = CheckpointOptions.keep_last,
  keep_best: int = 0,
  best_metric: str | Sequence[str] = (),
  mode: str = "max",
  facts: Mapping[str, Any] | None = None,
) -> Checkpoints:
  """Opens a folder of checkpoints; the first save creates it.

  Args:
    directory: Folder of the checkpoints; a relative path is resolved now. Or what keeps them
      elsewhere, such as `url_steps.AtUrl`.
    keep_last: Number of newest steps to keep; None keeps every step.
    keep_best: Number of best steps, by `best_metric`, to keep as well.
    best_metric: Name of the metric that ranks the steps; of several names, the first that was
      measured counts. Required if `keep_best` > 0.
    mode: Direction of the metric: "max" if larger is better, "min" if smaller is better.
    facts: Facts on the run that the `extra` of every checkpoint holds, as JSON.

  Raises:
    ValueError: An argument is out of range, or `keep_best` is given without a metric.
    FolderError: `directory` is a file.
  """
  if (keep_last is not None and keep_last < 0) or keep_best < 0:
    raise ValueError(f"keep_last and keep_best must be >= 0, got {keep_last} and {keep_best}")
  if mode not in ("max", "min"):
    raise ValueError(f'mode must be "max" or "min", got {mode!r}')
  if keep_best and not best_metric:
    raise ValueError(f"keep_best={keep_best} needs best_metric, the name of a metric")
  return Checkpoints(
    _on_disk(directory) if isinstance(directory, str | os.PathLike) else directory,
    keep_last=keep_last,
    keep_best=keep_best,
    best_metric=(best_metric,) if isinstance(best_metric, str) else tuple(best_metric),
    mode=mode,
    facts=facts or {},
  )


def _on_disk(directory: str | os.PathLike[str]) -> step_folders.OnDisk:
  path = pathlib.Path(directory).resolve()
  if path.exists() and not path.is_dir():
    raise FolderError(f"checkpoints need a folder, and {path} is a file")
  return step_folders.OnDisk(path)


@contextlib.contextmanager
def _one_reason() -> Iterator[None]:
  """Gives the error of a failed save the message that the other processes report as well."""
  try:
    yield
  except Exception as error:
    raise CheckpointError(orbax_noise.reason(error)) from error


def _by_main(work: Callable[[], T], *, what: str) -> T:
  """Returns what the main process finds, on all processes; a failure there is one of all."""
  found = processes.together(lambda: work() if processes.is_main() else None, what=what)
  return processes.broadcast(found)


def _differing(sizes: Mapping[str, int], listed: Mapping[str, Any]) -> list[str]:
  """Returns the names of files that are missing or do not have the size that is listed."""
  return [name for name, entry in listed.items() if sizes.get(name) != entry["bytes"]]


def _not_saved(step: int, temporary: Any, error: BaseException) -> str:
  return f"cannot save step {step} in {temporary}: {_reason(error)}"


def _reason(error: BaseException) -> str:
  """Returns why a save failed, and on which process if it was another one."""
  is_elsewhere = isinstance(error, processes.OtherProcessError)
  return str(error) if is_elsewhere else orbax_noise.reason(error)
