"""A list of the files in a folder with their sizes and digests, to detect damage later.

Any flipped bit, missing byte or missing file is found; files that were added are not.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_jax.files import atomic
from grpo_jax.values import json_text

NAME = "manifest.json"


def write(folder: pathlib.Path, *, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
  """Writes the manifest of a folder; when this returns, the whole folder is on the disk.

  Args:
    folder: Folder to list.
    known: Entries of files that another process wrote, digested and flushed to the disk.
  """
  known = known or {}
  new = []
  for path in sorted(folder.rglob("*")):
    if path.is_dir():
      atomic.flush(path)
    elif path.name != NAME and path.relative_to(folder).as_posix() not in known:
      new.append(path)
  listed = dict(sorted({**known, **entries(folder, new)}.items()))
  atomic.replace_file(folder / NAME, json.dumps({"files": listed}, indent=1), is_durable=True)


def entries(folder: pathlib.Path, paths: Iterable[pathlib.Path]) -> dict[str, dict[str, Any]]:
  """Returns the entries of some files; when this returns, their content is on the disk.

  Args:
    folder: Folder of the manifest.
    paths: Files in it.
  """
  found = {}
  for path in paths:
    atomic.flush(path)
    name = path.relative_to(folder).as_posix()
    found[name] = {"bytes": path.stat().st_size, "blake2b": digest(path)}
  return found


def damage(
  folder: pathlib.Path, *, compares_digests: bool = True, share: tuple[int, int] = (0, 1)
) -> str | None:
  """Returns the first difference between a folder and its manifest; None if there is none.

  Args:
    folder: Folder with a manifest.
    compares_digests: Whether to read the files; sizes are always compared.
    share: Number of the share of the files to read, from 0, and the number of shares; all shares
      have about the same size.

  Raises:
    PermissionError: A file exists but may not be read. This is not damage.
  """
  if not folder.is_dir():
    return "it is not a folder"
  try:
    listed = json_text.parsed((folder / NAME).read_bytes())["files"]
    largest_first = sorted(listed, key=lambda name: (-int(listed[name]["bytes"]), name))
    own = set(largest_first[share[0] :: share[1]])
    for name, recorded in listed.items():
      path = folder / name
      if not path.is_file():
        return f"{name} is missing"
      if (size := path.stat().st_size) != recorded["bytes"]:
        return f"{name} has {size} bytes instead of {recorded['bytes']}"
      wanted = recorded.get("blake2b")  # a checkpoint that was written at a URL has none.
      if compares_digests and wanted and name in own and digest(path) != wanted:
        return f"{name} has changed: its digest differs"
  except FileNotFoundError:
    return f"{NAME} is missing" if any(folder.iterdir()) else "it is empty"
  except PermissionError:
    raise
  except json_text.UNEXPECTED:
    return f"{NAME} cannot be parsed"
  except OSError as error:
    return f"it cannot be read: {error}"
  return None if listed else f"{NAME} lists no files"


def digest(path: pathlib.Path, algorithm: str = "") -> str:
  """Returns the hexadecimal digest of a file.

  Args:
    path: File to read.
    algorithm: Name of the algorithm in `hashlib`; "": BLAKE2b of 16 bytes.
  """
  with path.open("rb") as file:
    made = algorithm or (lambda: hashlib.blake2b(digest_size=16))
    return hashlib.file_digest(file, made).hexdigest()
