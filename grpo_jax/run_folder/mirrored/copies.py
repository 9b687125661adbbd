"""Which run a URL and a local copy hold, so that two runs are never mixed.

`run.json` at the URL names the run, and the local copy that uploads to it. The local copy has a
record of its own, which also remembers what was uploaded.
"""

import dataclasses
import json
import pathlib
import uuid
from collections.abc import Iterable

from grpo_jax.files import atomic, remote
from grpo_jax.run_folder.mirrored import layout
from grpo_jax.values import json_text

NAME = "copy.json"  # in layout.SCRATCH.


@dataclasses.dataclass(frozen=True)
class Run:
  """What run.json says."""

  run: str  # identity of the run.
  holder: str  # identity of the local copy that last uploaded.


@dataclasses.dataclass(frozen=True)
class Copy:
  """The record of a local copy."""

  run: str  # identity of the run.
  owner: str  # identity of this copy.
  is_published: bool = False  # whether run.json has been written at the URL.
  is_whole: bool = True  # False while files are fetched, and when that was interrupted.
  # Size and time (ns) of every file when it was uploaded or fetched, by name.
  sent: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def read_run(place: remote.Place) -> Run | None:
  """Returns what run.json says; None if it is missing or was only half written."""
  content = place.read(layout.RUN)
  try:
    found = json_text.parsed(content) if content is not None else None
    return None if found is None else Run(str(found["run"]), str(found["holder"]))
  except json_text.UNEXPECTED:
    return None


def write_run(place: remote.Place, run: Run) -> None:
  """Writes run.json."""
  place.write(layout.RUN, json.dumps(dataclasses.asdict(run)).encode())


def read_copy(folder: pathlib.Path) -> Copy | None:
  """Returns the record of a local copy; None if there is none."""
  try:
    found = json_text.parsed((folder / layout.SCRATCH / NAME).read_bytes())
    sent = {name: (int(size), int(time)) for name, (size, time) in found["sent"].items()}
    flags = bool(found["is_published"]), bool(found["is_whole"])
    return Copy(found["run"], found["owner"], *flags, sent)
  except FileNotFoundError:
    return None
  except json_text.UNEXPECTED as error:
    raise remote.RemoteError(
      f"{folder / layout.SCRATCH / NAME} cannot be understood: move {folder} away"
    ) from error


def write_copy(folder: pathlib.Path, copy: Copy) -> None:
  """Writes the record of a local copy."""
  (folder / layout.SCRATCH).mkdir(exist_ok=True)
  text = json.dumps(dataclasses.asdict(copy))
  atomic.replace_file(folder / layout.SCRATCH / NAME, text)


def matched(
  url: str, names: Iterable[str], run: Run | None, folder: pathlib.Path, copy: Copy | None
) -> Copy:
  """Returns the record that the local copy of a URL's run has, or is to have.

  Args:
    url: The URL, for messages.
    names: Names of the files at the URL.
    run: Content of run.json.
    folder: Local copy, which may be empty.
    copy: Its record, if it has one.

  Raises:
    RemoteError: The URL and the local copy hold two runs, or one of them holds other things.
  """
  names = list(names)
  of_others = layout.others(names)
  has_local = layout.has_run(folder)
  if copy is None and not has_local and (stray := _stray(folder)):
    raise remote.RemoteError(
      f"{folder} holds files that are not of a run, such as {stray}: name an empty folder in"
      " --workdir.local"
    )
  is_of_run = copy is not None and run is not None and copy.run == run.run
  if copy is not None and not copy.is_published and not has_local and not is_of_run:
    copy = None  # nothing came of it.
  if run is not None:
    if copy.run != run.run if copy else has_local:
      raise remote.RemoteError(
        f"{folder} holds another run than {url}: name another folder in --workdir.local, or move"
        " that one away"
      )
    return copy or Copy(run.run, uuid.uuid4().hex, is_whole=False)
  if layout.looks_like_a_run(names):  # copied there by hand.
    if has_local and copy is None:
      raise remote.RemoteError(
        f"{url} and {folder} both hold a run: name another folder in --workdir.local"
      )
  elif of_others:
    raise remote.RemoteError(
      f"{url} holds files that are not of a run, such as {of_others[0]}: name a new folder"
    )
  elif copy is not None and copy.is_published:
    raise remote.RemoteError(
      f"{url} is empty, but {folder} holds a run that was uploaded there: move {folder} away to"
      " begin a new run, or name another URL"
    )
  is_whole = not layout.looks_like_a_run(names)
  return copy or Copy(uuid.uuid4().hex, uuid.uuid4().hex, is_whole=is_whole)


def _stray(folder: pathlib.Path) -> str | None:
  """Returns the name of a file in a folder, other than hidden ones."""
  return next((path.name for path in sorted(folder.iterdir()) if path.name[0] != "."), None)
