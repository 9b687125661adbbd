"""Local copies of files and folders that a URL names: data and models.

A copy is in the user's cache, under fetched/DIGEST-OF-THE-URL/NAME. A file is fetched again when
the storage says that it has changed. Each file has its final name only once it is whole; a folder
whose fetch was interrupted is completed, after what is there has been compared with its digests.
"""

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from grpo_jax.files import atomic, cache, local_paths, manifest, remote, shared_places
from grpo_jax.values import json_text

_log = logging.getLogger(__name__)

_RECORD = "fetched.json"


def local(path: str | os.PathLike[str], *, patterns: Collection[str] = ("*",)) -> pathlib.Path:
  """Returns a local path as it is, and for a URL the path of an up-to-date local copy.

  Args:
    path: A path, or the URL of a file or folder.
    patterns: Patterns of the files of a folder that are fetched, such as "*.json".

  Raises:
    FileNotFoundError: There is nothing at the URL.
    RemoteError: The URL cannot be read, and there is no earlier copy.
  """
  if not local_paths.is_url(path):
    return pathlib.Path(path)
  place, name = _place(path)
  shelf = cache.default_cache() / "fetched" / hashlib.sha256(path.encode()).hexdigest()[:16]
  with _locked(shelf):
    record = _read(shelf)
    try:
      files = _files(place, name, patterns)
    except remote.RemoteError as error:
      if not record.get("is_whole"):
        raise
      _log.warning("%s; using the copy that was fetched earlier: %s", error, shelf / name)
      return shelf / name
    if not files:
      raise FileNotFoundError(f"there is no file or folder {remote.shown(path)}")
    _fetch(place, shelf, files, record)
  return shelf / name


def _place(url: str) -> tuple[remote.RemoteFolder, str]:
  """Returns the parent of what a URL names, and its last name."""
  if reason := remote.problem("URL", url):
    raise remote.RemoteError(reason.removeprefix("URL="))
  parent, _, name = url.rstrip("/").rpartition("/")
  if parent.endswith(":/"):
    raise remote.RemoteError(f"{remote.shown(url)}: a file or folder in it is needed")
  return remote.RemoteFolder(parent), name


def _files(
  place: remote.RemoteFolder, name: str, patterns: Collection[str]
) -> dict[str, dict[str, Any]]:
  """Returns what the storage says about the files to fetch, by name; none if nothing is there."""
  info = place.info(name)
  if info is None:
    return {}
  if info.get("type") != "directory":
    return {name: info}
  return {
    each: found
    for each, found in place.infos(name).items()
    if remote.is_plain(each) and any(fnmatchcase(each.rpartition("/")[2], p) for p in patterns)
  }


def _fetch(
  place: remote.RemoteFolder,
  shelf: pathlib.Path,
  files: Mapping[str, dict[str, Any]],
  record: dict[str, Any],
) -> None:
  """Makes a shelf hold these files, and no others."""
  known: dict[str, dict[str, str]] = record.get("files", {})
  compares = not record.get("is_whole")
  kept = {
    name: known[name]
    for name, info in files.items()
    if name in known
    and known[name]["version"] == _version(info)
    and _is_intact(shelf / name, known[name], compares=compares)
  }
  for name in known.keys() - kept.keys():
    (shelf / name).unlink(missing_ok=True)
  missing = [name for name in files if name not in kept]
  if not missing and record.get("is_whole"):
    return
  size = sum(int(files[name].get("size") or 0) for name in missing)
  _log.info("fetching %d files (%.2f GB) from %s", len(missing), size / 1e9, place.url)
  _write(shelf, kept, is_whole=False)
  for name in missing:
    kept[name] = _fetch_one(place, shelf, name, files[name])
    _write(shelf, kept, is_whole=False)
  _write(shelf, kept, is_whole=True)


def _fetch_one(
  place: remote.RemoteFolder, shelf: pathlib.Path, name: str, info: dict[str, Any]
) -> dict[str, str]:
  """Fetches a file; returns its record."""
  target = shelf / name
  part = shelf / ".part"
  place.get(name, part)
  size = info.get("size")
  if size is not None and part.stat().st_size != size:
    found = part.stat().st_size
    part.unlink()
    raise remote.RemoteError(f"{place.url}/{name}: {found} bytes were read instead of {size}")
  target.parent.mkdir(parents=True, exist_ok=True)
  digest = manifest.digest(part)
  atomic.move(part, target)
  return {"version": _version(info), "blake2b": digest, "bytes": str(target.stat().st_size)}


def _version(info: Mapping[str, Any]) -> str:
  """Returns a word that changes with a file: made of all that the storage says about it."""
  return hashlib.sha256(repr(sorted((k, str(v)) for k, v in info.items())).encode()).hexdigest()


def _is_intact(path: pathlib.Path, known: Mapping[str, str], *, compares: bool) -> bool:
  if not path.is_file() or str(path.stat().st_size) != known["bytes"]:
    return False
  return not compares or manifest.digest(path) == known["blake2b"]


def _read(shelf: pathlib.Path) -> dict[str, Any]:
  """Returns the record of a shelf; an empty one if there is none that can be used."""
  with contextlib.suppress(OSError, *json_text.UNEXPECTED):
    found = json_text.parsed((shelf / _RECORD).read_bytes())
    files = {
      name: {field: str(known[field]) for field in ("version", "blake2b", "bytes")}
      for name, known in found["files"].items()
    }
    return {"files": files, "is_whole": found["is_whole"] is True}
  shutil.rmtree(shelf, ignore_errors=True)
  shelf.mkdir(parents=True)
  return {}


def _write(shelf: pathlib.Path, files: Mapping[str, Mapping[str, str]], *, is_whole: bool) -> None:
  atomic.replace_file(shelf / _RECORD, json.dumps({"files": files, "is_whole": is_whole}))


@contextlib.contextmanager
def _locked(shelf: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a shelf, so that two processes do not fetch the same files."""
  shelf.parent.mkdir(parents=True, exist_ok=True)
  with shared_places.open_lock(
    shelf.with_name(f".{shelf.name}.lock"), allow_other_owner=True
  ) as stream:
    atomic.lock(stream)
    yield
