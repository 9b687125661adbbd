"""Names of the files of a run folder at a URL, and which files of the local copy are uploaded."""

import os
import pathlib
import re
from collections.abc import Iterable

from grpo_jax.files import manifest

RUN = "run.json"  # which run this is, and which local copy is ahead of it.
LEASE = "lease.json"  # who writes here.
PROBE = ".probe-"  # first characters of files that test the access.
HISTORY = "history.json"  # in the folder of a checkpoint: the metrics up to it, and the config.
SCRATCH = ".mirror"  # folder of the local copy that is never uploaded.
CHECKPOINTS = "checkpoints"

# What only a run has.
_OF_A_RUN = ("config.json", "metrics.jsonl", CHECKPOINTS)
# What a run writes at its end: a folder, and the file because of which readers treat it as whole.
READ_FIRST = {"export": "export/config.json", "adapter": "adapter/adapter_config.json"}
_NOT_UPLOADED = (CHECKPOINTS, "weights")  # weights: what SGLang servers load.
_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d{{8,}})/(.+)")


def step_folder(step: int) -> str:
  """Returns the name of a checkpoint's folder."""
  return f"{CHECKPOINTS}/step_{step:08d}"


def commit_mark(step: int) -> str:
  """Returns the name of the file that is uploaded last: with it a checkpoint is complete."""
  return f"{step_folder(step)}/{manifest.NAME}"


def steps(names: Iterable[str]) -> dict[int, list[str]]:
  """Returns the names of all files of each checkpoint, complete or not, by step."""
  found: dict[int, list[str]] = {}
  for name in names:
    if match := _STEP.fullmatch(name):
      found.setdefault(int(match[1]), []).append(name)
  return found


def complete(names: Iterable[str]) -> list[int]:
  """Returns the steps whose commit mark is there, newest first."""
  return sorted((s for s, of in steps(names).items() if commit_mark(s) in of), reverse=True)


def others(names: Iterable[str]) -> list[str]:
  """Returns the names of the run's files that are not of checkpoints."""
  return [
    name
    for name in names
    if not name.startswith((f"{CHECKPOINTS}/", PROBE)) and name not in (RUN, LEASE)
  ]


def is_safe(name: str) -> bool:
  """Returns whether a name stays below the folder that it is fetched to."""
  parts = name.split("/")
  return all(part not in ("", ".", "..") and "\0" not in part for part in parts)


def looks_like_a_run(names: Iterable[str]) -> bool:
  """Returns whether some of these files are what only a run has."""
  return any(name.split("/")[0] in _OF_A_RUN for name in names)


def has_run(folder: pathlib.Path) -> bool:
  """Returns whether a local folder has what only a run has."""
  return any((folder / name).exists() for name in _OF_A_RUN)


def local_steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps whose checkpoints have their final name and a manifest, newest first."""
  try:
    entries = os.listdir(folder / CHECKPOINTS)
  except FileNotFoundError:
    return []
  found = (re.fullmatch(r"step_(\d{8,})", entry) for entry in entries)
  steps = sorted((int(match[1]) for match in found if match), reverse=True)
  return [step for step in steps if (folder / commit_mark(step)).is_file()]


def local_files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns size and time (ns) of every file that is uploaded, checkpoints left out, by name.

  Hidden files, files half written (.tmp) and links are left out.
  """
  found: dict[str, tuple[int, int]] = {}
  waiting = [""]
  while waiting:
    below = waiting.pop()
    try:
      entries = list(os.scandir(folder / below))
    except FileNotFoundError:
      continue  # removed meanwhile.
    for entry in entries:
      name = f"{below}{entry.name}"
      if entry.name.startswith(".") or entry.name.endswith(".tmp") or name in _NOT_UPLOADED:
        continue
      if entry.is_dir(follow_symlinks=False):
        waiting.append(f"{name}/")
      elif entry.is_file(follow_symlinks=False) and name not in (RUN, LEASE):
        try:
          stat = entry.stat()
        except FileNotFoundError:
          continue
        found[name] = stat.st_size, stat.st_mtime_ns
  return dict(sorted(found.items(), key=lambda item: (_is_read_first(item[0]), item[0])))


def _is_read_first(name: str) -> bool:
  """Returns whether readers treat a folder as whole because of this file: it is uploaded last."""
  return name in READ_FIRST.values()
