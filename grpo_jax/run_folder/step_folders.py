"""The folders of checkpoints on a disk, and what makes one of them complete.

`checkpointing` decides what is saved and kept; this module and `url_steps` know where it is. On a
disk a step is complete once its folder has its final name.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from grpo_jax.files import atomic, manifest
from grpo_jax.run_folder import attached_bytes, stored_leaves, stored_steps


@runtime_checkable
class Folders(Protocol):
  """Where the checkpoints of a run are. The main process alone changes what is there."""

  @property
  def directory(self) -> Any:
    """The folder of all checkpoints."""
    ...

  def path(self, step: int) -> Any:
    """Returns the folder of a complete checkpoint."""
    ...

  def unfinished(self, step: int) -> Any:
    """Returns the folder of a checkpoint that is being written."""
    ...

  def steps(self) -> list[int]:
    """Returns the complete steps in ascending order; does not check whether they are intact."""
    ...

  def holds(self, step: int) -> bool:
    """Returns whether there is a checkpoint of this step."""
    ...

  def info(self, step: int) -> stored_leaves.Info:
    """Reads the info.json of a complete checkpoint.

    Raises:
      UnusableCheckpoint: The file is missing or cannot be understood.
      OSError, CheckpointError: The file cannot be read.
    """
    ...

  def metrics(self, step: int) -> dict[str, float]:
    """Returns the metrics that were measured at a checkpoint; empty if its info.json is damaged."""
    ...

  def attached(self, step: int) -> bytes:
    """Reads the attached.bin of a complete checkpoint; see `attached_bytes`.

    Raises:
      UnusableCheckpoint: The file is missing.
      OSError, CheckpointError: The file cannot be read.
    """
    ...

  def begin(self, step: int, info: str, attached: bytes, num_bytes: int) -> None:
    """Makes an empty folder for the arrays of a checkpoint, beside its info.json.

    Args:
      step: Step of the checkpoint.
      info: Content of info.json.
      attached: Content of attached.bin; b"": the file is not written.
      num_bytes: Size of the arrays.

    Raises:
      OSError: The folder cannot be made, or `num_bytes` do not fit.
    """
    ...

  def sizes(self, step: int) -> dict[str, int]:
    """Returns the sizes of the files of an unfinished checkpoint in bytes, by name.

    Locks and temporary files of other processes, which still write, may be among them or not.
    """
    ...

  def entries(self, step: int, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the entries of the manifest for some files of an unfinished checkpoint."""
    ...

  def complete(self, step: int, listed: Mapping[str, Any], broken: Iterable[int]) -> None:
    """Makes an unfinished checkpoint complete.

    Args:
      step: Step of the checkpoint, all of whose files are written.
      listed: Entries of the manifest for the files that other processes have written.
      broken: Steps whose checkpoints cannot be used; they give way.
    """
    ...

  def damage(self, step: int, share: tuple[int, int]) -> str | None:
    """Returns the first difference between a checkpoint and its manifest; None if there is none.

    Args:
      step: Step of the checkpoint.
      share: Number of the share of the files to digest, from 0, and the number of shares.
    """
    ...

  def unreadable(self, step: int, reason: str) -> Exception:
    """Returns what is raised if the arrays of a checkpoint cannot be read."""
    ...

  def delete(self, step: int) -> None:
    """Deletes a complete checkpoint; if it is interrupted, no part of it is complete."""
    ...

  def discard(self, step: int) -> None:
    """Deletes an unfinished checkpoint."""
    ...

  def clear_unfinished(self) -> list[str]:
    """Deletes what killed processes left; returns the names of their unfinished checkpoints."""
    ...


class OnDisk:
  """The folders of checkpoints on a disk; the methods are those of `Folders`."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory

  def path(self, step: int) -> pathlib.Path:
    return stored_steps.folder(self.directory, step)

  def unfinished(self, step: int) -> pathlib.Path:
    return self.directory / f"tmp_{self.path(step).name}"

  def steps(self) -> list[int]:
    return stored_steps.complete(self.directory)

  def holds(self, step: int) -> bool:
    return self.path(step).exists()

  def info(self, step: int) -> stored_leaves.Info:
    return stored_leaves.read(self.path(step) / "info.json")

  def metrics(self, step: int) -> dict[str, float]:
    return stored_steps.metrics(self.path(step))

  def attached(self, step: int) -> bytes:
    file = self.path(step) / attached_bytes.FILE
    if not file.exists():
      raise stored_leaves.UnusableCheckpoint(f"{file.name} is missing")
    return file.read_bytes()

  def begin(self, step: int, info: str, attached: bytes, num_bytes: int) -> None:
    temporary = self.unfinished(step)
    _make_room(temporary, num_bytes + len(attached))
    (temporary / "info.json").write_text(info)
    if attached:
      (temporary / attached_bytes.FILE).write_bytes(attached)
    (temporary / "state").mkdir()

  def sizes(self, step: int) -> dict[str, int]:
    folder = self.unfinished(step)
    found = {}
    for path in sorted(folder.rglob("*")):
      with contextlib.suppress(FileNotFoundError):  # gone meanwhile: of another process.
        if path.is_file():
          found[path.relative_to(folder).as_posix()] = path.stat().st_size
    return found

  def entries(self, step: int, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    folder = self.unfinished(step)
    return manifest.entries(folder, [folder / name for name in names])

  def complete(self, step: int, listed: Mapping[str, Any], broken: Iterable[int]) -> None:
    temporary = self.unfinished(step)
    manifest.write(temporary, known=listed)
    for each in broken:
      aside = self.directory / f"broken_{self.path(each).name}"
      shutil.rmtree(aside, ignore_errors=True)
      atomic.move(self.path(each), aside)
    atomic.move(temporary, self.path(step), is_durable=True)

  def damage(self, step: int, share: tuple[int, int]) -> str | None:
    return manifest.damage(self.path(step), share=share)

  def unreadable(self, step: int, reason: str) -> Exception:
    del step
    return stored_leaves.UnusableCheckpoint(f"its arrays cannot be read: {reason}")

  def delete(self, step: int) -> None:
    path = self.path(step)
    doomed = path.with_name(f"tmp_deleted_{path.name}")
    atomic.move(path, doomed)
    shutil.rmtree(doomed)

  def discard(self, step: int) -> None:
    shutil.rmtree(self.unfinished(step), ignore_errors=True)

  def clear_unfinished(self) -> list[str]:
    if not self.directory.is_dir():
      return []
    found = []
    for path in sorted(self.directory.glob("tmp_*")):
      if stored_steps.number(path.name.removeprefix("tmp_")) is not None:
        found.append(str(path))
      shutil.rmtree(path, ignore_errors=True)
    return found


def _make_room(temporary: pathlib.Path, needed: int) -> None:
  """Makes an empty folder, and raises OSError at once if `needed` bytes do not fit."""
  if temporary.exists():
    shutil.rmtree(temporary)
  temporary.mkdir(parents=True)
  free = shutil.disk_usage(temporary).free
  if free < needed:
    raise OSError(f"the disk is full: {_size(needed)} needed, {_size(free)} free")


def _size(count: int) -> str:
  """Returns a number of bytes as 1.23 GB or 45.6 MB."""
  return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
