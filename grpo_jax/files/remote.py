"""Files in object stores and on other machines: gs://, s3:// and whatever fsspec can open.

A `RemoteFolder` is a folder that a URL names. Everything that can go wrong there ends in a
RemoteError of one line. Each call is tried several times. Reads are not atomic for every kind of
storage, so that callers must not trust a file before they have compared its size or digest.
"""

import concurrent.futures
import contextlib
import pathlib
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations, registry

from grpo_jax.errors import ExpectedFailure
from grpo_jax.http import redaction

T = TypeVar("T")

# What pip installs for a scheme whose file system does not come with fsspec.
PACKAGES = {
  **dict.fromkeys(("gs", "gcs"), "'grpo-jax[gcs]'"),
  **dict.fromkeys(("s3", "s3a"), "'grpo-jax[s3]'"),
  **dict.fromkeys(("abfs", "abfss", "adl", "az"), "adlfs"),
  **dict.fromkeys(("sftp", "ssh"), "paramiko"),
  **dict.fromkeys(("http", "https"), "aiohttp"),
  "smb": "smbprotocol",
  "oci": "ocifs",
  "oss": "ossfs",
  "webdav": "webdav4",
}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)


class RemoteError(ExpectedFailure, OSError):
  """A remote place cannot be used: scheme, credentials, network, storage."""


def shown(url: str) -> str:
  """Returns a URL for messages: without a user name and password, on one line."""
  return redaction.printable(re.sub(r"(?<=://)[^/@]*@", "", url))


def is_plain(name: str) -> bool:
  """Returns whether the name of a file stays below the folder that it is fetched to."""
  return all(part not in ("", ".", "..") and "\0" not in part for part in name.split("/"))


def problem(name: str, url: str) -> str | None:
  """Returns why a URL cannot be used, found out without a network; None if it may be usable.

  Args:
    name: Name of the option: "--workdir", "data.path".
    url: Value of the option.
  """
  found = _URL.match(url)
  if found is None:
    return f"{name}={shown(url)}: a URL is needed, such as gs://bucket/folder"
  scheme = found["scheme"].lower()
  if scheme not in known_implementations and scheme not in registry:
    return (
      f"{name}={shown(url)}: there is no file system for {scheme}://; gs:// (Google Cloud Storage),"
      " s3:// and file:// are examples of what can be used"
    )
  if not found["rest"].strip("/"):
    return f"{name}={shown(url)}: a bucket or folder is missing after {scheme}://"
  try:
    fsspec.get_filesystem_class(scheme)
  except ImportError as error:
    package = PACKAGES.get(scheme)
    how = f"pip install {package}" if package else redaction.shown(str(error))
    return f"{name}={shown(url)}: the package that reads {scheme}:// is not installed: {how}"
  return None


class RemoteFolder:
  """A folder that a URL names; files in it have names such as "checkpoints/step_1/info.json"."""

  def __init__(
    self,
    url: str,
    *,
    attempts: int = 3,
    pause: Callable[[float], Any] = time.sleep,
    workers: int = 8,
  ):
    """Opens the file system; whether it can be reached is found by the first call.

    Args:
      url: URL of the folder, with or without a slash at its end.
      attempts: Number of times that a call is tried.
      pause: Function that waits for a number of seconds, before the next attempt: 1, 2, 4, ...
      workers: Number of files that `each` works on at the same time.

    Raises:
      RemoteError: The file system cannot be opened.
    """
    self.url = shown(url).rstrip("/")
    self._attempts = attempts
    self._pause = pause
    self._workers = workers
    if reason := problem("URL", url):
      raise RemoteError(reason.removeprefix("URL="))
    scheme, _, rest = url.partition("://")
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    self.is_disk = scheme.lower() in ("file", "local")
    if self.is_disk:
      options["auto_mkdir"] = True
    try:
      self._fs, root = url_to_fs(f"{scheme.lower()}://{rest}", **options)
    except Exception as error:  # every file system has exceptions of its own.
      raise RemoteError(f"{self.url} cannot be opened: {_reason(error)}") from error
    self._root = str(root).rstrip("/")

  def read(self, name: str) -> bytes | None:
    """Returns the content of a file; None if there is no such file."""
    try:
      return self._call("read", name, lambda path: self._fs.cat_file(path))
    except FileNotFoundError:
      return None

  def create(self, name: str, content: bytes) -> bool:
    """Writes a file unless there is one; returns whether it was written.

    If several processes call this at the same moment, one of them writes: gcsfs sends
    ifGenerationMatch=0, s3fs If-None-Match: *, and a disk opens the file exclusively. A call that
    is tried again can find the file that it has written itself.
    """

    def act(path: str) -> bool:
      if self.is_disk:
        with self._fs.open(path, "xb") as file:
          file.write(content)
      else:
        self._fs.pipe_file(path, content, mode="create")
      return True

    try:
      return self._writing(name, act)
    except FileExistsError:
      return False

  def write(self, name: str, content: bytes) -> None:
    """Writes a file; readers see the old one, if there is one, until the new one is complete."""
    self._replacing(name, lambda path: self._fs.pipe_file(path, content))

  def put(self, source: pathlib.Path, name: str) -> None:
    """Uploads a file; readers see the old one, if there is one, until the new one is complete.

    Raises:
      FileNotFoundError: The source is no longer there.
      RemoteError: The file cannot be uploaded.
    """
    source.stat()
    try:
      self._replacing(name, lambda path: self._fs.put_file(str(source), path))
    except RemoteError:
      source.stat()
      raise

  def get(self, name: str, target: pathlib.Path) -> None:
    """Downloads a file in place of a local one that may be there.

    Raises:
      FileNotFoundError: There is no such file.
      RemoteError: The file cannot be downloaded.
    """
    self._call("read", name, lambda path: self._fs.get_file(path, str(target)))

  def files(self, folder: str = "") -> dict[str, int]:
    """Returns the sizes in bytes of all files below a folder, by their names in this place."""
    return {name: int(info.get("size") or 0) for name, info in self.infos(folder).items()}

  def infos(self, folder: str = "") -> dict[str, dict[str, Any]]:
    """Returns what the file system says about all files below a folder, by name."""

    def list_all(path: str) -> dict[str, dict[str, Any]]:
      self._fs.invalidate_cache()
      return dict(self._fs.find(path, detail=True))

    try:
      found = self._call("listed", folder, list_all)
    except FileNotFoundError:
      return {}
    prefix = f"{self._root}/"
    return {
      path.removeprefix(prefix): info
      for path, info in sorted(found.items())
      if path.startswith(prefix) and info.get("type") != "directory" and not path.endswith("/")
    }

  def info(self, name: str = "") -> dict[str, Any] | None:
    """Returns what the file system says about a file or folder; None if it is not there."""

    def ask(path: str) -> dict[str, Any]:
      self._fs.invalidate_cache()
      return self._fs.info(path)

    try:
      return self._call("read", name, ask)
    except FileNotFoundError:
      return None

  def delete(self, names: Iterable[str]) -> None:
    """Deletes files in their order; one that is not there is no error."""
    for name in names:
      with contextlib.suppress(FileNotFoundError):
        self._call("deleted", name, lambda path: self._fs.rm_file(path))

  def each(self, act: Callable[[str], Any], names: Iterable[str]) -> None:
    """Calls a function with every name, several at a time; the first failure is raised."""
    if self._workers == 1:
      for name in names:
        act(name)
      return
    with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
      futures = [pool.submit(act, name) for name in names]
      try:
        for future in futures:
          future.result()
      except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise

  def _replacing(self, name: str, act: Callable[[str], Any]) -> None:
    """Writes a whole file: object stores do so by themselves, a disk by a rename."""

    def by_rename(path: str) -> None:
      act(f"{path}.tmp")
      self._fs.mv(f"{path}.tmp", path)

    self._writing(name, by_rename if self.is_disk else act)

  def _writing(self, name: str, act: Callable[[str], T]) -> T:
    try:
      return self._call("written", name, act)
    except FileNotFoundError as error:  # of the bucket.
      raise RemoteError(f"{self.url}/{name} cannot be written: {_reason(error)}") from error

  def _call(self, what: str, name: str, act: Callable[[str], T]) -> T:
    """Calls the file system, several times if need be.

    Raises:
      FileNotFoundError: There is no such file.
      FileExistsError: There is such a file already.
      RemoteError: Every attempt failed.
    """
    path = f"{self._root}/{name}" if name else self._root
    failure: Exception | None = None
    for attempt in range(self._attempts):
      if attempt:
        self._pause(2.0 ** (attempt - 1))
      try:
        return act(path)
      except (FileNotFoundError, FileExistsError):
        raise
      except Exception as error:  # every file system has exceptions of its own.
        failure = error
    where = f"{self.url}/{name}" if name else self.url
    raise RemoteError(f"{where} cannot be {what}: {_reason(failure)}") from failure


def _reason(error: Exception | None) -> str:
  return redaction.shown(f"{type(error).__name__}: {error}".rstrip(": "), limit=300)
