"""Brings back what a URL holds, so that a run can continue where the local copy is not up to date.

Checkpoints are compared with their manifests, byte by byte. One that is incomplete or damaged is
left out, with a warning; a run never begins at step 0 where there are complete checkpoints.
"""

import dataclasses
import json
import logging
import pathlib
import shutil
from typing import Any

from grpo_jax.files import atomic, manifest, remote
from grpo_jax.run_folder.mirrored import layout
from grpo_jax.values import json_text

_log = logging.getLogger(__name__)

# What a run writes again, or does not read.
_NOT_FETCHED = (*layout.READ_FIRST, "servers")


@dataclasses.dataclass(frozen=True)
class Fetched:
  """What was found at a URL."""

  broken: frozenset[int] = frozenset()  # steps whose checkpoint there cannot be used.
  # Size and time (ns) of the files that were fetched, by name; None: the local copy is ahead.
  sent: dict[str, tuple[int, int]] | None = None


def fetch(
  place: remote.Place, names: dict[str, int], folder: pathlib.Path, *, of_local: int = -1
) -> Fetched:
  """Makes a local copy hold what a URL holds.

  Args:
    place: The URL.
    names: Sizes of the files there, by name.
    folder: Local copy; empty, or of the same run.
    of_local: Newest step from which the local copy can continue if nothing newer at the URL can be
      used; -1: none.

  Raises:
    RemoteError: The URL cannot be read, or none of its checkpoints can be used.
  """
  steps = layout.complete(names)
  reasons: dict[int, str] = {}
  good = []
  for step in steps:
    size = sum(names[name] for name in layout.steps(names)[step])
    if reason := _fetch_step(place, folder, step, size):
      reasons[step] = reason
      _log.warning("%s/%s cannot be used: %s", place.url, layout.step_folder(step), reason)
    else:
      good.append(step)
  if of_local >= 0 and max(good, default=-1) <= of_local:
    return Fetched(frozenset(reasons))
  if steps and not good:
    listed = "; ".join(f"{layout.step_folder(step)}: {why}" for step, why in reasons.items())
    raise remote.RemoteError(
      f"{place.url}: no checkpoint can be used ({listed}). Move {layout.CHECKPOINTS}/ away to begin"
      " at step 0, or name another --workdir"
    )
  _set_aside(folder, good)
  sent = _fetch_others(place, folder, list(names))
  if good:
    for name in _restore_history(place, folder, max(good)):
      sent.pop(name, None)
  return Fetched(frozenset(reasons), sent)


def newest_intact(folder: pathlib.Path) -> int:
  """Returns the newest step whose local checkpoint agrees with its manifest; -1 for none."""
  for step in layout.local_steps(folder):
    if manifest.damage(folder / layout.step_folder(step)) is None:
      return step
  return -1


def history(folder: pathlib.Path) -> bytes:
  """Returns what is stored with a checkpoint, so that metrics.jsonl and config.json fit it."""
  texts = {}
  for name in ("metrics.jsonl", "config.json"):
    if (folder / name).is_file():
      texts[name] = (folder / name).read_text(errors="replace")
  return json.dumps({"files": texts, "is_whole": True}).encode()


def _fetch_step(place: remote.Place, folder: pathlib.Path, step: int, size: int) -> str | None:
  """Fetches a checkpoint unless it is here already; returns why it cannot be used, or None."""
  target = folder / layout.step_folder(step)
  listed = place.read(layout.commit_mark(step))
  if listed is None:
    return f"{manifest.NAME} is missing"
  if target.exists():
    own = target / manifest.NAME
    if own.is_file() and own.read_bytes() == listed and manifest.damage(target) is None:
      return None
  _log.info("fetching the checkpoint of step %d (%.2f GB) from %s", step, size / 1e9, place.url)
  scratch = folder / layout.SCRATCH / f"fetched_{target.name}"
  scratch.mkdir(parents=True, exist_ok=True)
  reason = _fill(place, scratch, step, listed) and _fill(place, scratch, step, listed)
  if reason:
    shutil.rmtree(scratch)
    return reason
  if target.exists():
    shutil.rmtree(target)
  target.parent.mkdir(exist_ok=True)
  atomic.move(scratch, target, is_durable=True)
  return None


def _fill(place: remote.Place, scratch: pathlib.Path, step: int, listed: bytes) -> str | None:
  """Fetches the files of a manifest that are not here yet; returns what is wrong then."""
  try:
    files: dict[str, dict[str, Any]] = json_text.parsed(listed)["files"]
    digests = {name: str(recorded["blake2b"]) for name, recorded in files.items()}
  except json_text.UNEXPECTED:
    return f"{manifest.NAME} cannot be understood"
  if unsafe := [name for name in digests if not layout.is_safe(name)]:
    return f"{manifest.NAME} lists {unsafe[0]!r}"
  missing: list[str] = []

  def get(name: str) -> None:
    path = scratch / name
    if path.is_file() and manifest.digest(path) == digests[name]:
      return  # of a fetch that was interrupted.
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      place.get(f"{layout.step_folder(step)}/{name}", path)
    except FileNotFoundError:
      missing.append(name)

  place.each(get, digests)
  if missing:
    return f"{min(missing)} is missing"
  (scratch / manifest.NAME).write_bytes(listed)
  return manifest.damage(scratch)


def _set_aside(folder: pathlib.Path, good: list[int]) -> None:
  """Removes local checkpoints that the URL does not have; newer ones are kept under another name.

  They are of a time before another machine continued the run.
  """
  for step in layout.local_steps(folder):
    path = folder / layout.step_folder(step)
    if step in good:
      continue
    if step < max(good, default=-1):
      shutil.rmtree(path)
      continue
    aside = path.with_name(f"aside_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    atomic.move(path, aside)
    _log.warning("%s is not used: the run has continued elsewhere since then", aside)


def _fetch_others(
  place: remote.Place, folder: pathlib.Path, names: list[str]
) -> dict[str, tuple[int, int]]:
  """Fetches metrics, rollouts and whatever else a run continues; returns what was fetched."""
  sent: dict[str, tuple[int, int]] = {}
  scratch = folder / layout.SCRATCH / "fetching"
  scratch.mkdir(parents=True, exist_ok=True)

  def get(name: str) -> None:
    part = scratch / name.replace("/", "%")
    try:
      place.get(name, part)
    except FileNotFoundError:
      return
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.move(part, target)
    stat = target.stat()
    sent[name] = stat.st_size, stat.st_mtime_ns

  wanted = [
    name
    for name in layout.others(names)
    if layout.is_safe(name) and name[0] != "." and name.split("/")[0] not in _NOT_FETCHED
  ]
  place.each(get, wanted)
  shutil.rmtree(scratch)
  return sent


def _restore_history(place: remote.Place, folder: pathlib.Path, step: int) -> list[str]:
  """Replaces metrics.jsonl and config.json by those that were stored with a checkpoint.

  The ones beside it may be half written: a process can die while it replaces them.

  Returns:
    The names of the files that were replaced.
  """
  content = place.read(f"{layout.step_folder(step)}/{layout.HISTORY}")
  try:
    files = json_text.parsed(content)["files"] if content is not None else {}
    texts = {name: str(files[name]) for name in ("metrics.jsonl", "config.json") if name in files}
  except json_text.UNEXPECTED:
    return []
  for name, text in texts.items():
    atomic.replace_file(folder / name, text)
  return list(texts)
