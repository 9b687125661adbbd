"""The folders of checkpoints at a URL, and what makes one of them complete.

Object stores cannot rename a folder. A step is complete once it has a manifest, which is written
last, and the manifest is deleted first. Orbax writes and reads the arrays at the URL itself, in
every process; the manifest lists the sizes of all files, which Google Cloud Storage protects by
checksums of its own.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import fsspec.config
from etils import epath

from grpo_jax.files import manifest, remote
from grpo_jax.run_folder import attached_bytes, stored_leaves, stored_steps
from grpo_jax.run_folder.checkpoint_errors import CheckpointError
from grpo_jax.values import json_text

FOLDER = "checkpoints"


class AtUrl:
  """The folders of checkpoints at a URL; the methods are those of `step_folders.Folders`."""

  def __init__(
    self,
    place: remote.RemoteFolder,
    *,
    check: Callable[[], Any] = lambda: None,
    prepare: Callable[[], Any] = lambda: None,
  ):
    """Describes them; nothing is read or written yet.

    Args:
      place: The run folder at a URL.
      check: Function that raises an OSError if this run no longer owns the URL.
      prepare: Function that makes everything else at the URL at least as new as the state that is
        saved, before a checkpoint becomes complete.
    """
    # Orbax opens file systems by itself. Another process may have written since the last listing.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    self._place = place
    self._check = check
    self._prepare = prepare
    self.directory = epath.Path(place.url.removeprefix("file://")) / FOLDER

  def path(self, step: int) -> epath.Path:
    return self.directory / _name(step).rpartition("/")[2]

  def unfinished(self, step: int) -> epath.Path:
    return self.path(step)

  def steps(self) -> list[int]:
    with _one_kind():
      names = self._place.files(FOLDER)
    return sorted(step for step in _steps_in(names) if _mark(step) in names)

  def holds(self, step: int) -> bool:
    return step in self.steps()

  def info(self, step: int) -> stored_leaves.Info:
    content = self._info(step)
    if content is None:
      raise stored_leaves.UnusableCheckpoint("info.json is missing")
    return stored_leaves.parsed(content)

  def metrics(self, step: int) -> dict[str, float]:
    return stored_steps.metrics_in(self._info(step) or b"")

  def attached(self, step: int) -> bytes:
    with _one_kind():
      content = self._place.read(f"{_name(step)}/{attached_bytes.FILE}")
    if content is None:
      raise stored_leaves.UnusableCheckpoint(f"{attached_bytes.FILE} is missing")
    return content

  def begin(self, step: int, info: str, attached: bytes, num_bytes: int) -> None:
    del num_bytes
    self._check()
    self._remove(step)
    self._place.write(f"{_name(step)}/info.json", info.encode())
    if attached:
      self._place.write(f"{_name(step)}/{attached_bytes.FILE}", attached)
    if self._place.is_disk:
      (self.path(step) / "state").mkdir()

  def sizes(self, step: int) -> dict[str, int]:
    prefix = f"{_name(step)}/"
    with _one_kind():
      found = self._place.files(_name(step))
    return {name.removeprefix(prefix): size for name, size in found.items()}

  def entries(self, step: int, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    sizes = self.sizes(step)
    return {name: {"bytes": sizes[name]} for name in names}

  def complete(self, step: int, listed: Mapping[str, Any], broken: Iterable[int]) -> None:
    del listed  # each of them is among the files that are there.
    files = {name: {"bytes": size} for name, size in self.sizes(step).items()}
    self._prepare()
    self._check()
    for each in broken:
      if each != step:
        self._remove(each)
    self._place.write(_mark(step), json.dumps({"files": files}, indent=1).encode())

  def damage(self, step: int, share: tuple[int, int]) -> str | None:
    del share  # nothing is read.
    with _one_kind():
      content = self._place.read(_mark(step)) or b""
    sizes = self.sizes(step)
    try:
      files = json_text.parsed(content)["files"]
      listed = {str(name): int(entry["bytes"]) for name, entry in files.items()}
    except json_text.UNEXPECTED:
      return f"{manifest.NAME} cannot be parsed"
    for name, size in listed.items():
      if name not in sizes:
        return f"{name} is missing"
      if sizes[name] != size:
        return f"{name} has {sizes[name]} bytes instead of {size}"
    return None if listed else f"{manifest.NAME} lists no files"

  def unreadable(self, step: int, reason: str) -> Exception:
    path = self.path(step)
    return CheckpointError(
      f"the arrays of {path} cannot be read: {reason}. If the storage can be reached, they are"
      f" damaged: remove {path / manifest.NAME}, and the run continues from the checkpoint before"
    )

  def delete(self, step: int) -> None:
    self._check()
    self._remove(step)

  def discard(self, step: int) -> None:
    with contextlib.suppress(
      OSError
    ):  # it may belong to another run by now; the next start clears.
      self.delete(step)

  def clear_unfinished(self) -> list[str]:
    with _one_kind():
      names = self._place.files(FOLDER)
      unfinished = sorted(step for step in _steps_in(names) if _mark(step) not in names)
      for step in unfinished:
        self.delete(step)
    return [str(self.path(step)) for step in unfinished]

  def _remove(self, step: int) -> None:
    """Removes all files of a step, the manifest first."""
    self._place.delete([_mark(step)])
    self._place.each(lambda name: self._place.delete([name]), self._place.files(_name(step)))
    if self._place.is_disk:
      self.path(step).rmtree(missing_ok=True)

  def _info(self, step: int) -> bytes | None:
    with _one_kind():
      return self._place.read(f"{_name(step)}/info.json")


def _name(step: int) -> str:
  return f"{FOLDER}/step_{step:08d}"


def _mark(step: int) -> str:
  """Returns the name of the file that makes a checkpoint complete."""
  return f"{_name(step)}/{manifest.NAME}"


def _steps_in(names: Iterable[str]) -> set[int]:
  """Returns the steps whose folders hold any of these files."""
  found = (stored_steps.number(name.split("/")[1]) for name in names)
  return {step for step in found if step is not None}


@contextlib.contextmanager
def _one_kind() -> Iterator[None]:
  """Raises what storage raises as CheckpointError: a network that fails is not damage.

  Raises:
    CheckpointError: The storage cannot be used.
  """
  try:
    yield
  except remote.RemoteError as error:
    raise CheckpointError(str(error)) from error
