"""Weights on their way to the servers: versioned folders on fast storage.

A run has a folder of its own, and holds a lock in it until it ends, in whatever way; the next run
removes the folders that dead runs left. A version's folder appears whole or not at all.

If a run has several processes, those that see the same folder write one copy into it: each of them
a file with its share of the tensors. A copy is whole once all processes have written. An adapter is
small: one process writes a copy of it.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from grpo_jax import processes
from grpo_jax.engines import multihost, served_adapter
from grpo_jax.engines.base import EngineFailure
from grpo_jax.engines.checksums import Changes
from grpo_jax.engines.version_changes import Comparison
from grpo_jax.files import atomic, shared_places
from grpo_jax.models import adapter_files, export, lora, safetensors
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.transformer import Params

T = TypeVar("T")

MEMORY = pathlib.Path("/dev/shm")
_SPARE, _GONE = ".spare", ".gone"
_BASE = "base"
_VERSIONS_AT_ONCE = 2  # one in use and one being written; their folders are reused.
_LOCK = ".lock"
# Name of what processes exchange: hosts may have folders of different names.
_PLACES = "the folders of the weights for servers"


class TransferError(EngineFailure):
  """Weights could not be written for the servers."""


def fast_folder(needed: int, otherwise: pathlib.Path) -> pathlib.Path:
  """Returns the folder to which each step writes `needed` bytes: in memory if there is room.

  Args:
    needed: Size of one version in bytes; two versions exist at the same time.
    otherwise: Folder on a disk, used if memory has no room.
  """
  if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
    if shutil.disk_usage(MEMORY).free > 1.1 * _VERSIONS_AT_ONCE * needed:
      return MEMORY / f"grpo_jax-{os.getuid()}"
  return otherwise


@dataclasses.dataclass(frozen=True)
class Written:
  """What it took to write a version.

  Attributes:
    bytes: Size of the tensors that were written.
    copied_bytes: Bytes of all copies that were made of them, the one in the file included.
    gather_s: Seconds in which the writing waited for tensors.
    write_s: The other seconds.
  """

  bytes: int = 0
  copied_bytes: int = 0
  gather_s: float = 0.0
  write_s: float = 0.0

  def metrics(self) -> dict[str, float]:
    """Returns it as metrics of a sync."""
    return {
      "perf/sync_gather_s": self.gather_s,
      "perf/sync_write_s": self.write_s,
      "perf/sync_bytes": float(self.bytes),
      "perf/sync_copies": self.copied_bytes / max(self.bytes, 1),
    }


class _Watch:
  """Measures how long the writing of tensors waits for them, and how large they are."""

  def __init__(self):
    self._waited_s = 0.0
    self._bytes = self._copied_bytes = 0

  def on(self, tensor: safetensors.ToWrite) -> safetensors.ToWrite:
    """Returns the same tensor, whose fetches are measured."""
    return dataclasses.replace(
      tensor,
      values=functools.partial(self._measure, tensor.values, tensor),
      take_part=functools.partial(self._measure, tensor.take_part, tensor),
    )

  def _measure(self, work: Callable[[], T], tensor: safetensors.ToWrite) -> T:
    began = time.perf_counter()
    self._bytes += tensor.nbytes
    self._copied_bytes += tensor.nbytes * tensor.copies
    try:
      return work()
    finally:
      self._waited_s += time.perf_counter() - began

  def written(self, took_s: float) -> Written:
    """Returns what was measured, of a writing that took `took_s` seconds."""
    return Written(
      bytes=self._bytes,
      copied_bytes=self._copied_bytes,
      gather_s=self._waited_s,
      write_s=took_s - self._waited_s,
    )


class _Origins:
  """The arrays from which the tensors of a folder were made.

  An array never changes, and is known by identity: a tensor that is made of the same ones is the
  same. They are not kept alive.
  """

  def __init__(self, tensors: Sequence[safetensors.ToWrite] = ()):
    self._of: dict[str, tuple[Any, list[weakref.ref[Any]]]] = {}
    for tensor in tensors:
      arrays, structure = jax.tree.flatten(tensor.made_of)
      if arrays and all(isinstance(array, jax.Array) for array in arrays):
        self._of[tensor.name] = structure, [weakref.ref(array) for array in arrays]

  def has(self, tensor: safetensors.ToWrite) -> bool:
    """Returns whether the folder has this very tensor."""
    if tensor.name not in self._of:
      return False
    structure, known = self._of[tensor.name]
    arrays, wanted = jax.tree.flatten(tensor.made_of)
    return structure == wanted and all(
      reference() is array for reference, array in zip(known, arrays, strict=True)
    )


class WeightFolders:
  """The versions of the weights of one run, each a Hugging Face folder until it is discarded.

  If the run has several processes, all of them make the same calls in the same order, on their main
  threads; an error on one of them is raised on all.

  Attributes:
    folder: Folder that holds the versions.
    is_owner: Whether this process makes and removes the folders of this copy.
    written: Seconds, bytes and copies of writing the newest version.
    changes: Tensors in which the newest version differs from the one before; None: not known.
  """

  def __init__(
    self,
    root: pathlib.Path,
    config: ModelConfig,
    *,
    source_directory: pathlib.Path | None,
    dtype: Any,
  ):
    """Makes the folder of the run, and removes those of runs that have ended.

    Args:
      root: Folder of all runs of this user; made if it is missing.
      config: Config of the model.
      source_directory: Hugging Face folder that the model came from, as in `export`.
      dtype: Dtype of the files.

    Raises:
      TransferError: `root` cannot be made, is a link, or others may write it.
    """
    self._config = config
    self._source = source_directory
    self._dtype = dtype
    self._lock: Any = None
    self.written = Written()
    self.changes: Changes | None = None
    self._origins: dict[str, _Origins] = {}  # of the folders of whole versions, by their names.
    self._newest: tuple[int, pathlib.Path] | None = None  # whole version that was written last.
    _together(lambda: _making(root, lambda: shared_places.private_folder(root)), _PLACES)
    self._writers = multihost.sharers(root)
    self.is_owner = processes.index() == self._writers[0]
    name = _together(lambda: _making(root, lambda: self._make(root)), _PLACES)
    self.folder = root / processes.exchange(name, what=_PLACES)[self._writers[0]]

  def _make(self, root: pathlib.Path) -> str:
    """Makes and locks the folder of this run; returns its name, "" if another process makes it."""
    if not self.is_owner:
      return ""
    with shared_places.open_lock(root / _LOCK) as held:
      atomic.lock(held)  # or another run removes a folder that is not locked yet.
      _remove_leftovers(root)
      folder = atomic.new_folder(root, "run-")
      self._lock = shared_places.open_lock(folder / _LOCK)
      atomic.lock(self._lock)
    return folder.name

  def write(self, params: Params, *, version: int) -> pathlib.Path:
    """Writes a version; it appears whole or not at all.

    Kernels are transposed to the layout of the files on the devices that hold them. The folder
    of a discarded version is written over: allocating memory in a tmpfs takes longer than writing.
    What it was written from then and is the same array now, such as the embedding beside trained
    adapters, is neither fetched nor written.

    Raises:
      TransferError: The version does not fit or cannot be written; the message says where, and how
        much was needed and free.
    """
    tensors = export.to_write(params, self._config, dtype=self._dtype)
    name, what = f"v{version:06d}", f"version {version} of the weights"
    there = self._origins.pop(_SPARE, _Origins())
    fill = functools.partial(self._fill, there=there)
    comparison, compared = None, tensors
    if self._newest is not None:
      since, before = self._newest
      comparison = Comparison(before, since)
      origins = self._origins.get(before.name, _Origins())
      compared = [comparison.on(each, is_same=origins.has(each)) for each in tensors]
    folder = self._write(name, what, compared, self._begin, fill)
    self.changes = comparison.changes() if comparison else None
    self._newest = version, folder
    if processes.count() == 1:
      self._origins[name] = _Origins(tensors)
    return folder

  def write_base(self, params: Params) -> pathlib.Path:
    """Writes the base of adapters, as `write` does; it stays until the folders are closed.

    Args:
      params: Weights of `lora.join`, whose adapter is left out.
    """
    tensors = export.to_write(lora.base_of(params), self._config, dtype=self._dtype)
    fill = functools.partial(self._fill, there=_Origins())
    return self._write(_BASE, "the base of the adapters", tensors, self._begin, fill)

  def write_adapter(self, params: Params, *, version: int) -> pathlib.Path:
    """Writes the adapter of a version as a PEFT folder, in files that nothing has used before.

    SGLang keeps such files mapped as long as it has the adapter, so writing into them would change
    an adapter that completions still use.

    Args:
      params: Weights of `lora.join`.
      version: Version of the adapter.

    Raises:
      TransferError: As in `write`.
    """
    adapter, options = served_adapter.completed(params, self._config)
    tensors = adapter_files.to_write(adapter, self._config, options, dtype=self._dtype)
    fill = functools.partial(self._fill_adapter, options=options)
    name, what = f"v{version:06d}", f"version {version} of the adapter"
    return self._write(name, what, tensors, self._make_empty, fill)

  def _write(
    self,
    name: str,
    what: str,
    tensors: Sequence[safetensors.ToWrite],
    begin: Callable[[pathlib.Path], object],
    fill: Callable[[pathlib.Path, Sequence[safetensors.ToWrite]], object],
  ) -> pathlib.Path:
    """Makes a folder that appears whole or not at all; raises TransferError as `write` does."""
    target, scratch = self.folder / name, self.folder / f".{name}"
    watch = _Watch()
    began, tensors = time.perf_counter(), [watch.on(tensor) for tensor in tensors]
    stages: tuple[Callable[[], object], ...] = (
      lambda: begin(scratch),
      lambda: fill(scratch, tensors),
      lambda: self._finish(scratch, target),
    )
    try:
      for stage in stages:
        _together(functools.partial(self._reporting, stage, tensors, what), what)
    except EngineFailure:
      if self.is_owner:
        shutil.rmtree(scratch, ignore_errors=True)
      raise
    self.written = watch.written(time.perf_counter() - began)
    return target

  def _begin(self, scratch: pathlib.Path) -> None:
    spare = self.folder / _SPARE
    if self.is_owner and spare.exists():
      atomic.move(spare, scratch)
    else:
      self._make_empty(scratch)

  def _make_empty(self, scratch: pathlib.Path) -> None:
    if self.is_owner:
      scratch.mkdir()

  def _fill(
    self, scratch: pathlib.Path, tensors: Sequence[safetensors.ToWrite], *, there: _Origins
  ) -> None:
    """Writes the files of this process; fetches all tensors, as the other processes do.

    Args:
      scratch: Folder to fill.
      tensors: Tensors to write.
      there: Tensors that the folder has already; used if the run has one process.
    """
    if processes.count() == 1:
      new = [dataclasses.replace(tensor, is_there=there.has(tensor)) for tensor in tensors]
      export.write_files(new, self._config, scratch, source=self._source)
      return
    shares = _Shares(tensors, self._writers)
    try:
      if self.is_owner:
        export.write_description(self._config, scratch, source=self._source, dtype=self._dtype)
        if len(shares.files) > 1:
          safetensors.write_index(scratch, shares.files)
      if shares.own_file is not None:
        safetensors.write_file(scratch / shares.own_file, shares.files[shares.own_file])
    finally:
      shares.fetch_rest()  # also if the disk is full: the others wait.

  def _fill_adapter(
    self,
    scratch: pathlib.Path,
    tensors: Sequence[safetensors.ToWrite],
    *,
    options: lora.AdapterOptions,
  ) -> None:
    """Writes the files of an adapter on one process; the others take part in fetching it."""
    shares = _Shares(tensors, self._writers[:1])
    try:
      if shares.own_file is not None:
        own = shares.files[shares.own_file]
        adapter_files.write_files(own, self._config, options, scratch, base=str(self._source or ""))
    finally:
      shares.fetch_rest()

  def _finish(self, scratch: pathlib.Path, target: pathlib.Path) -> None:
    if self.is_owner:
      atomic.move(scratch, target)

  def _reporting(
    self,
    stage: Callable[[], object],
    tensors: Sequence[safetensors.ToWrite],
    what: str,
  ) -> None:
    """Does a part of the writing.

    Raises:
      TransferError: The disk refused a file.
    """
    try:
      stage()
    except OSError as error:
      needed = sum(tensor.nbytes for tensor in tensors)
      free = shutil.disk_usage(self.folder).free
      raise TransferError(
        f"{what} could not be written to {self.folder}: {error.strerror};"
        f" {needed / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free there;"
        " engine.sglang.weights_folder can name another place"
      ) from error

  def discard(self, folder: pathlib.Path) -> None:
    """Removes a version that no server needs any more, or keeps its folder for the next one."""
    if self._newest is not None and self._newest[1] == folder:
      self._newest = None
    if not self.is_owner:
      return
    spare = self.folder / _SPARE
    origins = self._origins.pop(folder.name, _Origins())
    if spare.exists():
      shutil.rmtree(folder, ignore_errors=True)
    else:
      atomic.move(folder, spare)
      self._origins[_SPARE] = origins

  def discard_adapter(self, folder: pathlib.Path) -> None:
    """Removes an adapter that no server loads any more: its path disappears at once.

    A server that has unloaded an adapter loads it again from its path if a request names it.
    Then this must fail, and servers that still have it must keep its values.
    """
    if self.is_owner:
      gone = self.folder / _GONE
      atomic.move(folder, gone)
      shutil.rmtree(gone, ignore_errors=True)

  def close(self) -> None:
    """Removes all versions. May be called twice."""
    if self.is_owner:
      shutil.rmtree(self.folder, ignore_errors=True)
      self._lock.close()


class _Shares:
  """The tensors of a model, dealt to the processes that write a copy of it.

  All processes fetch all tensors in the same order, the largest first, since each fetch is work of
  all devices. The writers of a copy fetch one tensor for each of them, and then write at the same
  time. A process holds one tensor at a time.

  Attributes:
    files: Tensors by the name of their file.
    own_file: Name of the file of this process; None: it has none.
  """

  def __init__(self, tensors: Sequence[safetensors.ToWrite], writers: Sequence[int]):
    ordered = sorted(tensors, key=lambda tensor: -tensor.nbytes)
    self._tensors = [
      dataclasses.replace(tensor, values=lambda at=at: self._fetch(at))
      for at, tensor in enumerate(ordered)
    ]
    self._ordered = ordered
    self._fetched = 0
    self._at_once = len(writers)
    used = min(len(writers), len(ordered))
    names = safetensors.file_names(used)
    self.files = {name: self._tensors[at :: len(writers)] for at, name in enumerate(names)}
    me = [*writers].index(processes.index()) if processes.index() in writers else used
    self.own_file = names[me] if me < used else None

  def _fetch(self, at: int) -> np.ndarray:
    """Returns one tensor; fetches those of the other writers of the same round, too."""
    return self._fetch_until(at - at % self._at_once + self._at_once, keep=at)

  def fetch_rest(self) -> None:
    """Fetches what this process has not fetched yet, since the others wait for it."""
    self._fetch_until(len(self._ordered), keep=None)

  def _fetch_until(self, end: int, *, keep: int | None) -> Any:
    """Takes part in all fetches before `end`; returns the values of the one to keep."""
    kept = None
    for at, tensor in enumerate(self._ordered[self._fetched : end], start=self._fetched):
      self._fetched = at + 1
      if at == keep:
        kept = tensor.values()
      else:
        tensor.take_part()
    return kept


def _together(work: Callable[[], T], what: str) -> T:
  return multihost.together(lambda _: work(), what=what, failure=TransferError)


def _making(root: pathlib.Path, work: Callable[[], T]) -> T:
  """Does what makes the folder of a run.

  Raises:
    TransferError: The folder cannot be made.
  """
  try:
    return work()
  except shared_places.NotOurs as error:
    raise TransferError(
      f"no folder for weights can be made in {root}, since others could exchange them: {error};"
      " engine.sglang.weights_folder can name another place"
    ) from error
  except OSError as error:
    raise TransferError(f"no folder for weights can be made in {root}: {error}") from error


def _remove_leftovers(root: pathlib.Path) -> None:
  """Removes the folders of runs that have ended: those whose lock is free."""
  for folder in root.glob("run-*"):
    if folder.is_symlink():
      continue
    try:
      with shared_places.open_lock(folder / _LOCK) as held:
        if atomic.try_lock(held):
          shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # gone in the meantime, or not ours.
      continue
