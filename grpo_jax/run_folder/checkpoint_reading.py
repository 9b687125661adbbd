"""Reads one checkpoint: its bytes are checked, its parts are compared, and its arrays are placed.

All processes of a run make the same calls and come to the same verdict.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from grpo_jax import processes
from grpo_jax.run_folder import (
  attached_bytes,
  orbax_noise,
  state_leaves,
  stored_arrays,
  stored_leaves,
)
from grpo_jax.run_folder.checkpoint_errors import CheckpointError
from grpo_jax.run_folder.step_folders import Folders

T = TypeVar("T")

# (state, extra) → why a run cannot continue from them, or None if it can.
Refusal = Callable[[Any, Any], str | None]

# What Orbax and its readers raise for corrupt files.
READING_FAILS = (
  *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError),
  *(NotImplementedError, RecursionError),
)


def restored(
  folders: Folders, arrays: stored_arrays.Store, step: int, like: Any, refuse: Refusal | None
) -> tuple[Any, Any]:
  """Returns the (state, extra) of a checkpoint.

  What one process finds unusable is unusable for all.

  Args:
    folders: Place of the checkpoints.
    arrays: Reader of the arrays.
    step: Step of a complete checkpoint.
    like: Tree of the state's structure, or a function that returns one; see
      `Checkpoints.restore_latest`.
    refuse: Function (state, extra) → why a run cannot continue from them, or None if it can.

  Raises:
    UnusableCheckpoint: The checkpoint is damaged, contradicts itself, is refused, or is of
      another model or optimizer.
    CheckpointError: A file may not be read.
  """
  _alike(lambda: _check_files(folders, step), what=f"the digests of step {step}")

  def read() -> tuple[Any, Any]:
    info = _readable(lambda: folders.info(step))
    if info.step != step:
      raise stored_leaves.UnusableCheckpoint(f"it holds step {info.step}: the folder was renamed")
    state, extra = _read(folders, arrays, info, like), info.extra
    if attached_bytes.is_in(extra):
      extra = attached_bytes.put_back(extra, _readable(lambda: folders.attached(step)))
    if refuse and (reason := refuse(state, extra)):
      raise stored_leaves.UnusableCheckpoint(reason)
    return state, extra

  return _alike(read, what=f"the arrays of step {step}")


def _read(
  folders: Folders, arrays: stored_arrays.Store, info: stored_leaves.Info, like: Any
) -> Any:
  """Restores the arrays of an intact checkpoint into the structure of `like`."""
  path = folders.path(info.step)
  like = like(info.leaves) if callable(like) else like
  wanted = state_leaves.named_leaves(like)
  raw = {name: state_leaves.raw(leaf) for name, leaf in wanted.items()}
  needed = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in raw.items()}
  stored_leaves.check_needed(info.leaves, needed)
  try:
    stored_leaves.check_stored(arrays.listed(path / "state"), info.leaves)
    found = arrays.read(path / "state", raw)
  except READING_FAILS as error:
    raise folders.unreadable(info.step, orbax_noise.reason(error)) from error
  # One leaf at a time, so that there is never a second copy of the whole state.
  leaves = [state_leaves.placed(found.pop(name), leaf) for name, leaf in wanted.items()]
  state = jax.tree.unflatten(jax.tree.structure(like), leaves)
  counted = state_leaves.named_leaves(state).get("step")
  if counted is not None and int(counted) != info.step:
    raise stored_leaves.UnusableCheckpoint(
      f"its state is of step {int(counted)}, not of step {info.step}"
    )
  return state


def _check_files(folders: Folders, step: int) -> None:
  """Compares a checkpoint with its manifest; each process digests its share of the files.

  Raises:
    UnusableCheckpoint: A file differs from the manifest.
    CheckpointError: A file may not be read.
  """
  share = processes.index(), processes.count()
  if reason := _readable(lambda: folders.damage(step, share)):
    raise stored_leaves.UnusableCheckpoint(reason)


def _alike(work: Callable[[], T], *, what: str) -> T:
  """Does what may find a checkpoint unusable on some processes only; then it is for all."""
  found: Any = None
  failure: Exception | None = None
  try:
    found = work()
  except (stored_leaves.UnusableCheckpoint, CheckpointError) as error:
    failure = error
  verdict = None if failure is None else [type(failure).__name__, str(failure)]
  verdicts = processes.exchange(verdict, what=what)
  if failure is not None and processes.count() == 1:
    raise failure
  for name, reason in filter(None, verdicts):
    raise processes.of_all(_VERDICTS[name](reason)) from failure
  return found


_VERDICTS: dict[str, type[Exception]] = {
  kind.__name__: kind
  for kind in (stored_leaves.UnusableCheckpoint, stored_leaves.OtherState, CheckpointError)
}


def _readable(read: Callable[[], T]) -> T:
  """Reads a file; one without permission to read is not a damaged checkpoint to pass over.

  Raises:
    CheckpointError: A file may not be read.
  """
  try:
    return read()
  except PermissionError as error:
    raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
