"""A run folder at a URL: locked, fetched to this machine, and kept up to date until the run ends.

The run works in a local folder. Orbax writes checkpoints to the URL itself, from every process
(`url_steps`). The main process copies all other files there: once a minute, before a checkpoint
becomes complete, and at the end. So a machine that has nothing can begin where the URL ends.

A run owns a URL if the file `lock.json` there is its own. The file is made by a conditional create
and removed at the end of the run. A run that is started again in the same local folder takes its
own lock over; otherwise a person removes the file.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import pathlib
import platform
import shutil
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from grpo_jax import interrupts, processes
from grpo_jax.files import atomic, cache, remote
from grpo_jax.run_folder import folder_lock, url_steps
from grpo_jax.values import json_text

LOCK = "lock.json"  # at the URL: which run writes there.
COPY = "copy.json"  # at the URL: which local folder it is a copy of.
EVERY_S = 60.0  # seconds between two passes.
ATTEMPTS = 8  # of a call, within two minutes.

_STATE = ".copy.json"  # in the local folder: its identity, and which files were copied.
_READ_WHOLE = 1 << 26  # bytes of a file that is read at once, since it may change meanwhile.
# What a run writes at its end: a folder, and the file because of which readers treat it as whole.
_READ_FIRST = {"export": "export/config.json", "adapter": "adapter/adapter_config.json"}
_NOT_FETCHED = (url_steps.FOLDER, *_READ_FIRST, "servers", LOCK, COPY)
_NOT_COPIED = (url_steps.FOLDER, "weights")  # weights: what SGLang servers load.
_OF_A_RUN = ("config.json", "metrics.jsonl", url_steps.FOLDER, COPY)  # what only a run has.

_log = logging.getLogger(__name__)


class Taken(remote.RemoteError):
  """Another run owns the URL."""


class NotCopied(remote.RemoteError):
  """A URL does not hold the end of a run; the local folder does."""


def local_folder(url: str) -> pathlib.Path:
  """Returns the folder of the user's cache in which a run with this URL works."""
  url = url.rstrip("/")
  digest = hashlib.sha256(url.encode()).hexdigest()[:16]
  return cache.default_cache() / "runs" / f"{url.rpartition('/')[2]}-{digest}"


class UrlRun:
  """A run folder at a URL, and the local folder that the main process copies to it."""

  def __init__(self, url: str):
    """Opens the storage; nothing is read or written yet.

    Raises:
      RemoteError: The storage cannot be opened.
    """
    self.folder = local_folder(url)
    self._url = url
    self._place = remote.RemoteFolder(url, attempts=ATTEMPTS)
    self._token = uuid.uuid4().hex
    self._identity = ""  # of the local folder.
    self._copied: dict[str, tuple[int, int]] = {}  # size and time (ns) of files when copied.
    self._ending = threading.Event()
    self._passes = threading.Lock()
    self._finishing = threading.Lock()
    self._is_released = False

  @property
  def url(self) -> str:
    """The URL, for messages."""
    return self._place.url

  def checkpoints(self) -> url_steps.AtUrl:
    """Returns the folders of the checkpoints."""
    return url_steps.AtUrl(self._place, check=self.check, prepare=self.copy)

  # --- the beginning ---

  def begin(self) -> str:
    """Locks the URL, and makes the local folder hold what is there; the caller has its lock.

    Returns:
      The identity of the local folder.

    Raises:
      RemoteError: The URL cannot be used, belongs to another run, or holds other things.
    """
    own = self._remembered() or self._emptied(uuid.uuid4().hex)
    self._lock(own)
    try:
      names = self._place.files()
      if own != self._json(COPY).get("copy"):  # another machine has been ahead, or none.
        self._fetch(names, own)
        self._place.write(COPY, json.dumps({"copy": own}).encode())
    except BaseException:
      self._release()
      raise
    threading.Thread(target=self._copy_often, name="copies", daemon=True).start()
    return own

  def follow(self, identity: str) -> None:
    """Empties the local folder of another process unless it is that of the main process."""
    if self._remembered() != identity:
      self._emptied(identity)

  def _remembered(self) -> str:
    """Returns the identity of the local folder, or "", and reads which files were copied."""
    try:
      state = json_text.parsed((self.folder / _STATE).read_bytes())
      self._copied = {name: (size, time) for name, (size, time) in state["copied"].items()}
      self._identity = str(state["copy"])
      return self._identity
    except (FileNotFoundError, *json_text.UNEXPECTED):
      return ""

  def _remember(self, identity: str) -> None:
    self._identity = identity
    state = {"copy": identity, "copied": self._copied}
    atomic.replace_file(self.folder / _STATE, json.dumps(state))

  def _emptied(self, identity: str) -> str:
    """Empties the local folder (it is a cache) and gives it an identity."""
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.iterdir():
      if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
      elif path.name not in (folder_lock.LOCK, _STATE):
        path.unlink()
    self._copied = {}
    self._remember(identity)
    return identity

  def _lock(self, own: str) -> None:
    lock = {
      "token": self._token,
      "copy": own,
      "host": platform.node(),
      "process": os.getpid(),
      "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    content = json.dumps(lock).encode()
    # soon: rights may be missing.
    if remote.RemoteFolder(self._url, attempts=2).create(LOCK, content):
      return
    held = self._json(LOCK)
    if held.get("copy") == own:  # its process has ended: this one has the lock of the folder.
      self._place.write(LOCK, content)
    elif held.get("token") != self._token:
      raise Taken(
        f"{self.url} is in use by {_holder(held)}. If that run has ended, remove its lock:"
        f" {self._removal()}"
      )

  def _removal(self) -> str:
    """Returns the command that removes the lock."""
    path = f"{self.url}/{LOCK}"
    is_disk = self._place.is_disk
    return f"rm {path.removeprefix('file://')}" if is_disk else f"gcloud storage rm {path}"

  def _fetch(self, names: dict[str, int], own: str) -> None:
    """Makes the local folder hold the files of the URL, checkpoints left out."""
    tops = {name.split("/")[0] for name in names} - {LOCK}
    if tops and not tops & set(_OF_A_RUN):
      raise remote.RemoteError(
        f"{self.url} holds files that are not of a run, such as {min(tops)}: name a new folder"
      )
    self._emptied(own)
    wanted = [
      name
      for name in names
      if remote.is_plain(name)
      and name.split("/")[0] not in _NOT_FETCHED
      and not name.startswith(".")
      and not name.endswith(".tmp")
    ]
    if wanted:
      _log.info("fetching %d files from %s", len(wanted), self.url)

    def get(name: str) -> None:
      (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
      self._place.get(name, self.folder / name)

    self._place.each(get, wanted)
    self._copied = {name: state for name, state in _files(self.folder).items() if name in wanted}
    self._remember(own)

  # --- meanwhile ---

  def check(self) -> None:
    """Raises Taken if the lock at the URL is no longer that of this run."""
    held = self._json(LOCK)
    if held.get("token") != self._token:
      by = f"was taken over by {_holder(held)}" if held else "is no longer locked by this run"
      raise Taken(f"{self.url} {by}: nothing more of this run is written there")

  def copy(self) -> None:
    """Makes the URL hold the files of the local folder, checkpoints left out.

    Raises:
      RemoteError: Something could not be copied; calling this again continues.
      Taken: Another run owns the URL.
    """
    with self._passes:
      self.check()
      now = _files(self.folder)
      changed = [name for name, state in now.items() if self._copied.get(name) != state]

      def send(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile.
          if now[name][0] <= _READ_WHOLE:
            self._place.write(name, (self.folder / name).read_bytes())
          else:
            self._place.put(self.folder / name, name)
          self._copied[name] = now[name]

      last = [name for name in changed if name in _READ_FIRST.values()]
      for folder, mark in _READ_FIRST.items():
        if any(name.startswith(f"{folder}/") for name in changed):
          self._place.delete([mark])  # nobody treats a mixture of two exports as a model.
          last += [mark] * (mark in now and mark not in last)
      self._place.each(send, [name for name in changed if name not in last])
      self._place.each(send, last)
      gone = [name for name in self._copied if name not in now]
      self._place.delete(gone)
      for name in gone:
        del self._copied[name]
      if changed or gone:
        self._remember(self._identity)

  def _copy_often(self) -> None:
    """Runs in a thread until the run ends."""
    while not self._ending.wait(EVERY_S):
      try:
        self.copy()
      except Taken as error:
        _log.error("%s", error)
        return
      except OSError as error:
        _log.warning("%s is not up to date, and is tried again: %s", self.url, error)

  # --- the end ---

  def finish(self) -> None:
    """Copies the rest and removes the lock; later calls do nothing. Several threads may call it.

    Raises:
      NotCopied: The URL does not hold the end of the run.
      Taken: Another run owns the URL.
    """
    self._ending.set()
    with self._finishing:
      if self._is_released:
        return
      try:
        self.copy()
      except Taken:
        raise
      except OSError as error:
        raise NotCopied(
          f"{self.url} does not hold the end of the run: {error}. It is in {self.folder}; the"
          " same command on this machine copies it"
        ) from error
      self._release()

  def _release(self) -> None:
    self._is_released = True
    with contextlib.suppress(remote.RemoteError):  # the same machine takes its lock over.
      self.check()
      self._place.delete([LOCK])

  def _json(self, name: str) -> dict[str, Any]:
    """Returns the content of a file at the URL; {} if it is missing."""
    content = self._place.read(name)
    if content is None:
      return {}
    try:
      return json_text.parsed_object(content)
    except json_text.UNEXPECTED:
      return {"content": content.hex()}


@contextlib.contextmanager
def opened(url: str, stop: Any = False) -> Iterator[UrlRun]:
  """Opens the run folder at a URL for the block; errors as of `workdirs.opened`."""
  run = processes.together(lambda: UrlRun(url), what="opening the storage of the run folder")
  with folder_lock.claimed_by_main(run.folder):
    identity, reason = "", None
    if processes.is_main():
      _log.info("run folder: %s; working in %s", remote.shown(url), run.folder)
      try:
        identity = run.begin()
      except OSError as error:
        reason = str(error)
    identity, reason = processes.exchange([identity, reason], what="the run folder")[0]
    if reason:
      raise processes.of_all(folder_lock.UnusableFolder(reason))
    if not processes.is_main():
      run.follow(identity)
      yield run
      return
    if isinstance(stop, interrupts.Flag):
      stop.on_end(run.finish)
    try:
      yield run
    except BaseException:
      with contextlib.suppress(KeyboardInterrupt):
        _finish_quietly(run)
      raise
    run.finish()


def _finish_quietly(run: UrlRun) -> None:
  """Ends a run at a URL where another error is raised."""
  try:
    run.finish()
  except OSError as error:
    _log.error("%s", error)


def _holder(held: dict[str, Any]) -> str:
  """Returns which run holds a lock, for messages."""
  if "host" not in held:
    return "an unknown run"
  return remote.shown(f"process {held.get('process')} on {held['host']} since {held.get('since')}")


def _files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns size and time (ns) of every file that is copied, by name.

  Hidden files, files half written (.tmp) and links are left out.
  """
  found: dict[str, tuple[int, int]] = {}
  waiting = [""]
  while waiting:
    below = waiting.pop()
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile.
      for entry in os.scandir(folder / below):
        name = f"{below}{entry.name}"
        if entry.name.startswith(".") or entry.name.endswith(".tmp") or name in _NOT_COPIED:
          continue
        if entry.is_dir(follow_symlinks=False):
          waiting.append(f"{name}/")
        elif entry.is_file(follow_symlinks=False):
          stat = entry.stat()
          found[name] = stat.st_size, stat.st_mtime_ns
  return dict(sorted(found.items()))
