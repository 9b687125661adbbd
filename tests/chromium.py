"""A headless Chromium, driven through the pipe of its debugging protocol."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LONGEST_S = 60.0  # a request that takes longer ends the browser.


def found() -> str | None:
  """Returns the path of a Chromium on this machine; None if there is none."""
  return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
  """The only tab of a browser."""

  def __init__(self, send: Any):
    self._send = send

  def open(self, url: str) -> None:
    """Opens a page and waits until its scripts have run."""
    self._send("Page.enable")
    self._send("Page.navigate", url=url)
    self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

  def value(self, expression: str) -> Any:
    """Returns the value of an expression of JavaScript.

    Raises:
      AssertionError: It raised.
    """
    found = self._send(
      "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
    )
    assert "exceptionDetails" not in found, found["exceptionDetails"]
    return found["result"].get("value")

  def wait(self, condition: str, *, longest_s: float = 20.0) -> None:
    """Waits until an expression is true."""
    until = time.monotonic() + longest_s
    while not self.value(f"Boolean({condition})"):
      assert time.monotonic() < until, f"never true: {condition}"
      time.sleep(0.05)

  def resize(self, width: int, height: int, *, dark: bool = False) -> None:
    """Sets the size of the window, in pixels, and the colours that the user prefers."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self._send("Emulation.setEmulatedMedia", features=[scheme])
    size = {"width": width, "height": height}
    self._send("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

  def screenshot(self, path: pathlib.Path) -> None:
    """Writes what the window shows as a PNG."""
    import base64

    path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
  """Starts a Chromium for the block, without a network beyond this machine's."""
  program = found()
  assert program is not None
  to_browser, from_browser = os.pipe(), os.pipe()  # it reads descriptor 3 and writes to 4.
  flags = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-dev-shm-usage", "--disable-extensions"),
  )
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    line = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
    options = (*flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank")
    process = subprocess.Popen(
      ["bash", "-c", line, "chromium", program, *options],
      pass_fds=(to_browser[0], from_browser[1]),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
      with open(to_browser[1], "wb", 0) as writer, open(from_browser[0], "rb") as reader:
        yield _attached(process, writer, reader)
    finally:
      process.kill()
      process.wait()


def _attached(process: subprocess.Popen[bytes], writer: Any, reader: Any) -> Tab:
  """Returns the tab that the browser has opened."""
  number = 0

  def send(method: str, session: str | None = None, **parameters: Any) -> Any:
    nonlocal number
    number += 1
    message = {"id": number, "method": method, "params": parameters}
    text = json.dumps(message | ({"sessionId": session} if session else {}))
    with contextlib.closing(_Alarm(process)):
      writer.write(text.encode() + b"\0")
      while (answer := _message(reader)).get("id") != number:
        pass  # an event.
    assert "error" not in answer, answer
    return answer["result"]

  (target,) = [t for t in send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
  session = send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
  return Tab(lambda method, **parameters: send(method, session, **parameters))


class _Alarm:
  """Ends a browser that does not answer, so that reading from it ends, too."""

  def __init__(self, process: subprocess.Popen[bytes]):
    self._timer = threading.Timer(LONGEST_S, process.kill)
    self._timer.start()

  def close(self) -> None:
    self._timer.cancel()


def _message(reader: Any) -> dict[str, Any]:
  """Reads one message: JSON that ends with a zero byte."""
  found = bytearray()
  while (byte := reader.read(1)) not in (b"\0", b""):
    found += byte
  assert byte, "the browser has ended"
  return json.loads(found)
