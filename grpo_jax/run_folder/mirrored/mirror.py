"""Uploads a run folder to a URL, in a thread, again and again until the run ends.

A pass uploads metrics, rollouts and everything else first, then checkpoints. Of a checkpoint its
manifest comes last: one without a manifest is not complete. Older checkpoints are deleted, manifest
first, once all local ones are complete at the URL. A pass that fails is repeated; nothing at the
URL depends on where it failed.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from grpo_jax.files import atomic, manifest, remote
from grpo_jax.run_folder.mirrored import copies, fetching, layout
from grpo_jax.run_folder.mirrored.lease import Lease, Taken

_log = logging.getLogger(__name__)

EVERY_S = 10.0  # between two passes.
LARGE_EVERY_S = 120.0  # between two uploads of a large file that grows, such as event files.
LONGEST_PAUSE_S = 60.0  # between two attempts while the URL cannot be reached.
WARN_S = 60.0  # without success, until the first warning; the next ones are twice as far apart.
GIVE_UP_S = 600.0  # without any progress, after the run has ended.
_LARGE = 1 << 20  # bytes.
_AT_ONCE = 1 << 26  # bytes of a file that is read whole, since it may change meanwhile.


class NotUploaded(remote.RemoteError):
  """A URL does not hold the end of a run; the local copy does."""


class Mirror:
  """Keeps a URL equal to a local run folder; see `running`."""

  def __init__(
    self,
    place: remote.Place,
    folder: pathlib.Path,
    lease: Lease,
    copy: copies.Copy,
    *,
    broken: frozenset[int] = frozenset(),
  ):
    """Prepares a mirror; nothing is uploaded yet.

    Args:
      place: The URL.
      folder: Local copy, which the run works in.
      lease: Lease of this process, which is asked before every commit.
      copy: Record of the local copy.
      broken: Steps whose checkpoint at the URL is damaged, and is replaced.
    """
    self._place = place
    self._folder = folder
    self._lease = lease
    self._copy = copy
    self._sent = dict(copy.sent)
    self._sent_at: dict[str, float] = {}  # monotonic seconds.
    self._broken = set(broken)
    self._committed: set[int] = set()
    self._uploaded: set[str] = set()  # files of the checkpoint that is being uploaded.
    self._ending = threading.Event()
    self._done = threading.Event()
    self._given_up = threading.Event()
    self._failure: BaseException | None = None
    self._moved = time.monotonic()  # when bytes were last transferred.
    self._progress = self._moved  # when more was complete at the URL than ever before.
    self._most_complete = 0

  # --- one pass ---

  def upload(self) -> None:
    """Makes the URL hold what the local folder holds now.

    Raises:
      RemoteError: Something could not be uploaded; calling this again continues.
      Taken: Another process writes there.
    """
    steps = layout.local_steps(self._folder)  # before the metrics: these belong to their steps.
    self.clear_scratch(steps)
    is_urgent = self._ending.is_set() or not self._committed.issuperset(steps)
    self._upload_others(is_urgent=is_urgent)
    for step in steps:
      if step not in self._committed:
        self._upload_step(step)
    self._delete_surplus()
    self._remember()

  def clear_scratch(self, steps: Collection[int] = ()) -> None:
    """Removes what earlier uploads have left behind, apart from these steps."""
    kept = {f"step_{step:08d}" for step in steps}
    for path in (self._folder / layout.SCRATCH).glob("*step_*"):
      if path.name not in kept:
        shutil.rmtree(path, ignore_errors=True)

  def _upload_others(self, *, is_urgent: bool) -> None:
    """Uploads files that are new or have changed, and deletes what is no longer in the folder.

    Args:
      is_urgent: Whether large files that grow are uploaded, too, however recently they were.
    """
    now = layout.local_files(self._folder)
    changed = [
      name
      for name, state in now.items()
      if self._sent.get(name) != state and (is_urgent or self._is_due(name, state[0]))
    ]

    def send(name: str) -> None:
      self._check()
      with contextlib.suppress(FileNotFoundError):  # removed meanwhile: the next pass deletes it.
        if now[name][0] <= _AT_ONCE:
          self._place.write(name, (self._folder / name).read_bytes())
        else:
          self._place.put(self._folder / name, name)
        self._sent[name] = now[name]
        self._sent_at[name] = time.monotonic()

    last = []  # nobody treats a mixture of two exports as a model.
    for folder, mark in layout.READ_FIRST.items():
      if any(name.startswith(f"{folder}/") for name in changed):
        self._place.delete([mark])
        last += [mark] * (mark in now)
    self._place.each(send, [name for name in changed if name not in layout.READ_FIRST.values()])
    self._place.each(send, last)
    gone = [name for name in self._sent if name not in now]
    self._place.delete(gone)
    for name in gone:
      del self._sent[name]

  def _is_due(self, name: str, size: int) -> bool:
    """Returns whether a file that has changed is uploaded in an ordinary pass."""
    waited = time.monotonic() - self._sent_at.get(name, -LARGE_EVERY_S)
    return size < _LARGE or waited >= LARGE_EVERY_S

  def _upload_step(self, step: int) -> None:
    """Uploads a checkpoint, its commit mark last."""
    staged = self._stage(step)
    if staged is None:
      return
    mark = layout.commit_mark(step)
    listed = (staged / manifest.NAME).read_bytes()
    there = self._place.read(mark)
    if there == listed and step not in self._broken:
      self._commit(step, staged)
      return
    if there is not None:
      self._lease.check()
      self._place.delete([mark])  # from here on it is not complete.
    sizes = {}
    for path in sorted(staged.rglob("*")):
      if path.is_file() and path != staged / manifest.NAME:
        sizes[f"{layout.step_folder(step)}/{path.relative_to(staged).as_posix()}"] = path

    def send(name: str) -> None:
      self._check()
      if name not in self._uploaded:
        self._place.put(sizes[name], name)
        self._uploaded.add(name)

    self._place.each(send, sizes)
    found = self._place.files(layout.step_folder(step))
    for name, path in sizes.items():
      if found.get(name) != path.stat().st_size:
        self._uploaded.discard(name)
        raise remote.RemoteError(
          f"{self._place.url}/{name} has {found.get(name, 'no')} bytes instead of"
          f" {path.stat().st_size}"
        )
    self._lease.check()
    self._place.write(mark, listed)
    self._commit(step, staged)
    _log.info("the checkpoint of step %d is in %s", step, self._place.url)

  def _commit(self, step: int, staged: pathlib.Path) -> None:
    self._committed.add(step)
    self._broken.discard(step)
    self._uploaded.clear()
    shutil.rmtree(staged)

  def _stage(self, step: int) -> pathlib.Path | None:
    """Holds the files of a checkpoint while they are uploaded: the run may delete it meanwhile.

    Returns:
      A folder of hard links; None if the checkpoint is no longer there.
    """
    staged = self._folder / layout.SCRATCH / f"step_{step:08d}"
    if staged.is_dir():
      return staged
    partial = staged.with_name(f"partial_{staged.name}")
    shutil.rmtree(partial, ignore_errors=True)
    self._uploaded.clear()
    source = self._folder / layout.step_folder(step)
    try:
      shutil.copytree(source, partial, copy_function=_linked)
    except (FileNotFoundError, shutil.Error):
      if source.is_dir():
        raise
      shutil.rmtree(partial, ignore_errors=True)
      return None
    (partial / layout.HISTORY).write_bytes(fetching.history(self._folder))
    atomic.move(partial, staged)
    return staged

  def _delete_surplus(self) -> None:
    """Deletes checkpoints that are no longer in the folder, if a newer one is complete."""
    local = set(layout.local_steps(self._folder))
    if not local or not local <= self._committed:
      return
    there = layout.steps(self._place.files(layout.CHECKPOINTS))
    surplus = {step: names for step, names in there.items() if step not in local}
    for step, names in surplus.items():
      if step < max(local):
        self._lease.check()
        mark = layout.commit_mark(step)
        self._place.delete([mark, *(name for name in names if name != mark)])
        self._committed.discard(step)

  def _check(self) -> None:
    if self._given_up.is_set():
      raise NotUploaded("the upload was abandoned")

  def _remember(self) -> None:
    if self._sent != self._copy.sent:
      self._copy = dataclasses.replace(self._copy, sent=dict(self._sent))
      copies.write_copy(self._folder, self._copy)

  # --- the thread ---

  def start(self) -> None:
    """Starts the thread."""
    self._place.on_progress = self._count_bytes
    threading.Thread(target=self._run, name="mirror", daemon=True).start()

  def finish(self) -> None:
    """Waits until the URL holds everything that is in the folder now.

    Several threads may call it.

    Raises:
      NotUploaded: The upload failed, and `GIVE_UP_S` passed without any progress.
    """
    self._moved = self._progress = time.monotonic()
    self._ending.set()
    try:
      if not self._done.wait(2.0):
        _log.info("waiting until everything is in %s", self._place.url)
      while not self._done.wait(1.0):
        if time.monotonic() - self._moved > GIVE_UP_S:
          break
    finally:
      self._given_up.set()
    if self._failure is None and self._done.is_set():
      return
    reason = str(self._failure) if self._failure else "the upload does not proceed"
    raise NotUploaded(
      f"{self._place.url} does not hold the end of the run: {reason}. It is in {self._folder}; the"
      " same command on this machine uploads it"
    ) from self._failure

  def _run(self) -> None:
    """Uploads until the run has ended and everything is there."""
    try:
      while not self._ending.wait(EVERY_S):
        self._until_done(self.upload)
      self._until_done(self.upload)  # what was written since the last pass began.
    except Exception as error:
      self._failure = error
      _log.error("%s is no longer uploaded to: %s", self._place.url, error)
    finally:
      self._done.set()

  def _until_done(self, act: Callable[[], Any]) -> None:
    """Calls a function until it succeeds; warns while it does not.

    Raises:
      RemoteError: The run has ended, and `GIVE_UP_S` passed without any progress.
    """
    began, warned_after, pause = time.monotonic(), WARN_S, 1.0
    while True:
      try:
        return act()
      except (Taken, NotUploaded):
        raise
      except (remote.RemoteError, OSError) as error:
        failure = error
      self._count_complete()
      failing = time.monotonic() - began
      if self._ending.is_set() and time.monotonic() - self._progress > GIVE_UP_S:
        raise failure
      if failing >= warned_after:
        warned_after = 2 * failing
        _log.warning(
          "%s has not been up to date for %d s, and is tried again: %s",
          *(self._place.url, failing, failure),
        )
      self._given_up.wait(pause)
      pause = min(2 * pause, LONGEST_PAUSE_S)

  def _count_bytes(self) -> None:
    self._moved = time.monotonic()

  def _count_complete(self) -> None:
    complete = len(self._sent) + len(self._uploaded) + 1000 * len(self._committed)
    if complete > self._most_complete:
      self._most_complete, self._progress = complete, time.monotonic()


def _linked(source: str, target: str) -> None:
  """Makes a hard link, or a copy where the file system has none."""
  try:
    os.link(source, target)
  except FileNotFoundError:
    raise
  except OSError:
    shutil.copyfile(source, target)
