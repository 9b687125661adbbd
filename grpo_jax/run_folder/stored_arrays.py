"""The arrays of a checkpoint, which Orbax writes and reads: every process its own shards.

Orbax's handler is used without its checkpointer, whose barriers are collectives of the devices or
wait for a process that has failed. Here no function waits for another process.
"""

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from grpo_jax import processes
from grpo_jax.run_folder import stored_leaves

T = TypeVar("T")

PathLike = str | os.PathLike[str]  # a path, or an `epath.Path` such as gs://bucket/folder.


class Writing:
  """Arrays that are being written in the background."""

  def __init__(self, futures: Sequence[Any]):
    self._futures = futures

  def wait(self) -> None:
    """Waits until this process has written its shards.

    Raises:
      OSError, ValueError: Something could not be written.
    """
    for future in self._futures:
      future.result()


class Store:
  """Writes and reads the folders `state` of checkpoints."""

  def __init__(self):
    self._handler = ocp.PyTreeCheckpointHandler(
      # Not compressed: float32 weights shrink by 7% and take four times as long.
      use_zarr3=True,
      use_compression=False,
      type_handler_registry=_handlers(),
    )

  def begin(self, folder: PathLike, leaves: Mapping[str, Any]) -> Writing:
    """Begins to write this process's shards; returns once the arrays may be donated or dropped.

    Args:
      folder: Existing folder, the same on all processes.
      leaves: JAX or NumPy arrays by name. One process writes the NumPy arrays.

    Raises:
      OSError, ValueError: The writing could not begin.
    """
    saving = self._handler.async_save(epath.Path(folder), args=ocp.args.PyTreeSave(dict(leaves)))
    return Writing(_ran(saving) or [])

  def complete(self, folder: PathLike) -> None:
    """Joins what the processes have written; on one process, once all have written."""
    self._handler.finalize(epath.Path(folder))

  def listed(self, folder: PathLike) -> stored_leaves.Leaves:
    """Returns shape and dtype of the arrays in a folder."""
    found: Any = self._handler.metadata(epath.Path(folder))
    return {
      str(name): (tuple(array.shape), str(np.dtype(array.dtype)))
      for name, array in dict(getattr(found, "tree", found)).items()
    }

  def read(self, folder: PathLike, like: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays; each process reads what its devices hold.

    Args:
      folder: Folder that was completed.
      like: Arrays or `jax.ShapeDtypeStruct`s by name, of all arrays in the folder. Those that are
        bound to devices are restored with their sharding, the others as NumPy arrays.
    """
    arguments = {name: _restore_args(leaf) for name, leaf in like.items()}
    return self._handler.restore(
      epath.Path(folder), args=ocp.args.PyTreeRestore(item=dict(like), restore_args=arguments)
    )

  def close(self) -> None:
    """Releases what the handler holds."""
    self._handler.close()


def written_by_this_process(names: Iterable[str]) -> list[str]:
  """Returns those of the files of a checkpoint that only this process has written."""
  own = f"process_{jax.process_index()}"
  return [name for name in names if any(own in part.split(".") for part in name.split("/"))]


def to_write(leaf: Any) -> Any:
  """Returns the array that is written for a leaf; Orbax takes no array of a single process."""
  is_own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
  return np.asarray(leaf) if is_own and processes.count() > 1 else leaf


def is_bound(leaf: Any) -> bool:
  """Returns whether a leaf is bound to particular devices."""
  if isinstance(leaf, jax.Array):
    return leaf.committed
  return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
  if is_bound(leaf):
    return ocp.ArrayRestoreArgs(
      sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
    )
  return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)


def _handlers() -> Any:
  """Returns the handlers that write and read arrays.

  By default Orbax has each replica write a slice of an array and cuts it out on the devices, which
  compiles a program for each shape. Here one replica writes the whole array.
  """
  kinds = ocp.type_handlers
  return kinds.create_type_handler_registry(
    (np.ndarray, kinds.NumpyHandler()),
    (jax.Array, kinds.ArrayHandler(use_replica_parallel=False)),
  )


def _ran(work: Coroutine[Any, Any, T]) -> T:
  """Runs a coroutine; `asyncio.run` would cancel the tasks of other threads' loops."""
  loop = asyncio.new_event_loop()
  try:
    return loop.run_until_complete(work)
  finally:
    loop.close()
