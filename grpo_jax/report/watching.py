"""The report of a run as a page that renews itself: `grpo-jax report RUN --watch`.

A server on 127.0.0.1 answers with the page, at one random path, and with nothing else: no path
names a file. The page asks every two seconds whether it has changed (page/watch.html). It is
rendered only if a browser asks and the run folder has changed, and takes at most a tenth of the
time of one core, which a run on this machine may need. Nothing is written.
"""

import contextlib
import hashlib
import http.server
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax import report
from grpo_jax.errors import ExpectedFailure
from grpo_jax.report import run_data
from grpo_jax.run_folder import evaluation_log, folder_lock

HOST = "127.0.0.1"
PAUSE = 9.0  # times the seconds of a look at the run folder, until the next one may begin.
POLL_S = 1.0  # between two looks at whether the run has ended.
TIMEOUT_S = 30.0  # longest time of a request.
# By these names only this machine reaches the server. A page of another site that has its own name
# point here, to read the report, sends that name.
OWN_NAMES = (HOST, "localhost")
HEADERS = {
  "Cache-Control": "no-cache",
  "Content-Security-Policy": "frame-ancestors 'none'",
  "Cross-Origin-Resource-Policy": "same-origin",
  "Referrer-Policy": "no-referrer",
  "X-Content-Type-Options": "nosniff",
}


class CannotListen(ExpectedFailure, OSError):
  """The port of the page cannot be used."""


class Rendered(NamedTuple):
  """A page, and the name of this version of it."""

  tag: str
  content: bytes


class WatchedRun:
  """The page of a run folder, rendered again when the folder has changed."""

  def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic):
    """Renders nothing yet.

    Args:
      folder: Run folder.
      clock: Function that returns monotonic seconds.
    """
    self._folder = folder
    self._clock = clock
    self._lock = threading.Lock()
    self._shown: Rendered | None = None
    self._of: Any = None  # state of the folder that is shown.
    self._next = 0.0  # when the folder may be looked at again.

  def is_running(self) -> bool:
    """Returns whether a process works in the folder."""
    return folder_lock.is_in_use(self._folder)

  def page(self) -> Rendered:
    """Returns the page, rendered again if the folder has changed and the last time is long ago.

    Raises:
      NoRunError: The folder does not exist, or no run has written to it.
      OSError: The folder cannot be read.
    """
    with self._lock:
      if self._shown is not None and self._clock() < self._next:
        return self._shown
      began = self._clock()
      is_running = self.is_running()
      state = is_running, *_files(self._folder)
      if self._shown is None or state != self._of:
        run = run_data.load(self._folder, is_running=is_running)
        content = report.render(run, live=_live(is_running)).encode()
        self._shown = Rendered(f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"', content)
        self._of = state
      ended = self._clock()
      self._next = ended + PAUSE * (ended - began)
      return self._shown


@contextlib.contextmanager
def serving(run: WatchedRun, port: int = 0) -> Iterator[str]:
  """Answers with the page of a run within the block; yields its URL.

  Args:
    run: Run to show.
    port: Port on 127.0.0.1; 0: any that is free.

  Raises:
    CannotListen: The port cannot be used.
  """
  path = f"/{secrets.token_urlsafe(16)}/"  # other users of this machine reach the port, too.
  try:
    server = _Server((HOST, port), type("Handler", (_Handler,), {"run": run, "place": path}))
  except OSError as error:
    raise CannotListen(f"cannot listen on {HOST}:{port}: {error.strerror}") from error
  thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="report", daemon=True)
  thread.start()
  try:
    yield f"http://{HOST}:{server.server_port}{path}"
  finally:
    server.shutdown()
    server.server_close()


def watch(
  folder: Path,
  *,
  port: int = 0,
  say: Callable[[str], None],
  wait: Callable[[float], bool],
) -> None:
  """Serves the page of a run, also after its end, until it is asked to stop.

  Args:
    folder: Run folder.
    port: Port on 127.0.0.1; 0: any that is free.
    say: Function that prints a line.
    wait: Function that waits for a number of seconds; returns whether to stop.

  Raises:
    NoRunError: The folder does not exist, or no run has written to it.
    CannotListen: The port cannot be used.
  """
  run = WatchedRun(folder)
  run.page()  # whether it is a run folder is known before anything is printed.
  with serving(run, port) as url:
    say(f"report: {url} (open it in a browser; it renews itself after every step; Ctrl-C ends it)")
    was_running = True
    while True:
      is_running = run.is_running()
      if is_running != was_running:
        say(
          "the run continues"
          if is_running
          else "no process works in the run folder: the run has ended"
        )
      was_running = is_running
      if wait(POLL_S):
        return


class _Server(http.server.ThreadingHTTPServer):
  """Ends without waiting for browsers that keep a connection open."""

  daemon_threads = True
  block_on_close = False
  allow_reuse_address = os.name == "posix"  # elsewhere it would share a port that is in use.

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Prints a failure, unless it is a browser that has gone."""
    if not isinstance(sys.exception(), ConnectionError | TimeoutError):
      super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers one request: the page, or that it has not changed."""

  run: WatchedRun
  place: str  # the only path that is answered.
  timeout = TIMEOUT_S
  server_version = "grpo_jax"
  sys_version = ""

  def do_GET(self) -> None:
    """Answers with the page."""
    if _name(self.headers.get("Host", "")) not in OWN_NAMES:
      self._answer(HTTPStatus.FORBIDDEN, b"only 127.0.0.1 and localhost are answered")
    elif not secrets.compare_digest(self.path.encode(), self.place.encode()):
      self._answer(HTTPStatus.NOT_FOUND, b"the page is at the URL that grpo-jax report has printed")
    else:
      self._answer_page()

  do_HEAD = do_GET

  def log_message(self, format: str, *args: Any) -> None:
    """Prints nothing: a page asks every two seconds."""

  def _answer_page(self) -> None:
    try:
      page = self.run.page()
    except (run_data.NoRunError, OSError) as error:
      self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode())
      return
    if self.headers.get("If-None-Match") == page.tag:
      self.send_response(HTTPStatus.NOT_MODIFIED)
      self.send_header("ETag", page.tag)
      self.end_headers()
    else:
      self._answer(HTTPStatus.OK, page.content, kind="text/html", tag=page.tag)

  def _answer(
    self, status: HTTPStatus, content: bytes, *, kind: str = "text/plain", tag: str | None = None
  ) -> None:
    self.send_response(status)
    headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
    for name, value in {**headers, **HEADERS, **({"ETag": tag} if tag else {})}.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)


def _name(host: str) -> str:
  """Returns the name in a Host header, without the port."""
  return host.rpartition(":")[0] if ":" in host else host


def _live(is_running: bool) -> report.Live:
  if is_running:
    return report.Live("Live: this page renews itself after every step.", True)
  return report.Live("The run has ended; if it is continued, this page renews itself.", False)


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
  """Yields the files of a run folder that its page shows, with their sizes and times."""
  found = [folder / "config.json", folder / "metrics.jsonl", *folder.glob("rollouts/*.jsonl")]
  for path in (*found, *(path for _, _, path in evaluation_log.files(folder))):
    with contextlib.suppress(FileNotFoundError):
      about = path.stat()
      yield str(path), about.st_size, about.st_mtime_ns
