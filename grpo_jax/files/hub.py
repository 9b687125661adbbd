"""Files of repositories on the Hugging Face hub, by huggingface_hub and from its cache (I/O)."""

import http.client
import logging
import pathlib
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

_log = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # seconds in which a hub must answer.
_LINE_S = 60.0  # seconds between two lines of progress where there is no terminal.
# What this process has downloaded: a run opens its data several times.
_downloaded: dict[tuple[str, ...], pathlib.Path] = {}


class Unavailable(OSError):
  """A repository cannot be downloaded, and the cache does not have it.

  Attributes:
    reason: Why; it does not name the repository.
    is_silent: Whether nothing at all can be downloaded: no answer, or HF_HUB_OFFLINE.
  """

  def __init__(self, name: str, reason: str, *, is_silent: bool):
    super().__init__(f"{name}: cannot be downloaded from the hub: {reason}")
    self.reason = reason
    self.is_silent = is_silent


def download(
  name: str,
  patterns: Sequence[str],
  *,
  kind: str = "model",
  is_whole: Callable[[pathlib.Path], bool] = lambda folder: True,
) -> pathlib.Path:
  """Downloads files of a repository; if the hub does not give them, uses huggingface_hub's cache.

  On a terminal and in a notebook the bars of huggingface_hub show the progress, elsewhere a line
  per minute. The hub is asked once per process.

  Args:
    name: Name of the repository, owner/name.
    patterns: Patterns of the names of the files.
    kind: "model" or "dataset".
    is_whole: Function that returns whether a folder of the cache has all that is needed.

  Returns:
    The folder of the repository in the cache.

  Raises:
    Unavailable: The hub does not answer within seconds, or does not provide the repository, and
      the cache does not have it.
  """
  import huggingface_hub
  from huggingface_hub import constants

  asked = (constants.ENDPOINT, constants.HF_HUB_CACHE, kind, name, *patterns)
  if asked in _downloaded:
    return _downloaded[asked]
  reason = silent = unreachable()
  if not silent:
    _log.info("%s: downloading from %s, unless it is in the cache", name, constants.ENDPOINT)
    wanted: dict[str, Any] = {"allow_patterns": list(patterns), "tqdm_class": _bar()}
    try:
      folder = huggingface_hub.snapshot_download(name, repo_type=kind, **wanted)
      return _downloaded.setdefault(asked, pathlib.Path(folder))
    except failures() as error:
      reason = str(error).strip() or type(error).__name__
  kept = cached(name, patterns, kind=kind)
  if kept is None or not is_whole(kept):
    raise Unavailable(name, reason, is_silent=bool(silent))
  _log.warning("%s: cannot be downloaded from the hub: %s; using the cached copy", name, reason)
  return kept


def cached(name: str, patterns: Sequence[str], *, kind: str = "model") -> pathlib.Path | None:
  """Returns the folder of a repository in huggingface_hub's cache; None if it is not there.

  Old versions of huggingface_hub return it also if some of the files are missing.

  Args:
    name: Name of the repository, owner/name.
    patterns: Patterns of the names of the files.
    kind: "model" or "dataset".
  """
  import huggingface_hub

  wanted: dict[str, Any] = {"allow_patterns": list(patterns), "local_files_only": True}
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, repo_type=kind, **wanted))
  except failures():
    return None


def unreachable() -> str:
  """Returns why nothing can be downloaded now; "" if the hub answers."""
  from huggingface_hub import constants

  return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else silence(constants.ENDPOINT)


def failures() -> tuple[type[BaseException], ...]:
  """Returns what huggingface_hub may raise: OSError, or an error of the HTTP library it uses."""
  from huggingface_hub import errors

  return (OSError, *errors.HfHubHTTPError.__bases__)


def silence(endpoint: str) -> str:
  """Returns, within seconds, why a server does not answer; "" if it does.

  An HTTP error such as 404 is an answer. The request runs in a thread, since Python's timeouts do
  not cover the resolution of names.
  """
  answers: queue.Queue[str] = queue.Queue()

  def ask() -> None:
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
      with urllib.request.urlopen(request, timeout=TIMEOUT_S):
        answers.put("")
    except urllib.error.HTTPError as error:
      error.close()
      answers.put("" if error.code < 500 else f"{endpoint} answers {error.code}")
    except (OSError, ValueError, http.client.HTTPException) as error:
      answers.put(f"{endpoint} is not reachable ({getattr(error, 'reason', error)})")

  threading.Thread(target=ask, daemon=True).start()
  try:
    return answers.get(timeout=TIMEOUT_S)
  except queue.Empty:
    return f"{endpoint} did not answer within {TIMEOUT_S:.0f} s"


def _bar() -> Any:
  """Returns the class of progress bars; None: that of huggingface_hub."""
  if sys.stderr.isatty() or "ipykernel" in sys.modules:
    return None
  from tqdm.std import tqdm

  class Lines(tqdm):
    """Logs a line per minute."""

    def __init__(self, *args: Any, **given: Any):
      given.pop("name", None)  # of huggingface_hub's own class.
      super().__init__(*args, **{**given, "disable": False})
      self.mininterval = self.maxinterval = _LINE_S
      self.last_print_t = self.start_t

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
      done = self.format_dict
      if done["elapsed"] >= _LINE_S and self.n != self.total:
        _log.info("%s", " ".join(self.format_meter(**{**done, "ncols": 0}).split()))
      return True

  return Lines
