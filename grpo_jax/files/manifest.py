"""A list of the files of a folder with their sizes and digests, to tell damage later.

Any flipped bit, missing byte or missing file shows; files that were added do not.
"""

import hashlib
import json
import os
import pathlib

NAME = "manifest.json"


def write(folder: pathlib.Path) -> None:
  """Writes the manifest of a folder; when it returns, all of the folder is on the disk."""
  files = {}
  for path in sorted(folder.rglob("*")):
    if path.is_dir():
      flush(path)
    elif path.name != NAME:
      flush(path)
      name = path.relative_to(folder).as_posix()
      files[name] = {"bytes": path.stat().st_size, "blake2b": digest(path)}
  target = folder / NAME
  target.write_text(json.dumps({"files": files}, indent=1))
  flush(target)
  flush(folder)


def damage(folder: pathlib.Path) -> str | None:
  """Returns the first difference between a folder and its manifest; None if there is none.

  Raises:
    PermissionError: a file is there and may not be read, which is no damage.
  """
  if not folder.is_dir():
    return "it is no folder"
  try:
    listed = json.loads((folder / NAME).read_text())["files"]
    for name, recorded in listed.items():
      path = folder / name
      if not path.is_file():
        return f"{name} is missing"
      if (size := path.stat().st_size) != recorded["bytes"]:
        return f"{name} has {size} bytes instead of {recorded['bytes']}"
      if digest(path) != recorded["blake2b"]:
        return f"{name} has changed: its digest differs"
  except FileNotFoundError:
    return f"{NAME} is missing" if any(folder.iterdir()) else "it is empty"
  except PermissionError:
    raise
  except (ValueError, KeyError, TypeError, AttributeError):
    return f"{NAME} cannot be understood"
  except OSError as error:
    return f"it cannot be read: {error}"
  return None if listed else f"{NAME} lists no files"


def digest(path: pathlib.Path) -> str:
  """Returns the BLAKE2b digest (16 bytes, hexadecimal) of a file."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def flush(path: pathlib.Path) -> None:
  """Waits until a file, or the list of names of a folder, is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
