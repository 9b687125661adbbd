"""A Hugging Face hub on this machine: models and datasets from folders, by the hub's HTTP API."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

import pyarrow.parquet
from huggingface_hub import constants

COMMIT = "0" * 40


class Hub:
  """What a server has, and what it was asked for.

  Attributes:
    endpoint: Address, for HF_ENDPOINT.
    fetched: Paths of the files that were downloaded, such as "Qwen/Q/config.json", in order.
    requests: Number of requests.
  """

  def __init__(self, endpoint: str):
    self.endpoint = endpoint
    self.fetched: list[str] = []
    self.requests = 0


@contextlib.contextmanager
def serving(
  *, models: Mapping[str, pathlib.Path] = {}, datasets: Mapping[str, pathlib.Path] = {}
) -> Iterator[Hub]:
  """Serves folders as repositories of a hub.

  Args:
    models: Folder of each model, by its name "owner/name".
    datasets: Folder of each dataset, by its name.
  """
  repositories = {
    **{f"models/{name}": folder for name, folder in models.items()},
    **{f"datasets/{name}": folder for name, folder in datasets.items()},
  }

  class Handler(_Handler):
    pass

  Handler.repositories = repositories
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  Handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield hub
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def rows_file(path: pathlib.Path, rows: Sequence[Mapping[str, object]]) -> pathlib.Path:
  """Writes rows as a parquet file; returns its path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
  return path


@contextlib.contextmanager
def used(monkeypatch, cache: pathlib.Path, **repositories) -> Iterator[Hub]:
  """Serves repositories (see `serving`) as the hub of this process, with a cache of its own."""
  with serving(**repositories) as found:
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, found.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield found


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  repositories: Mapping[str, pathlib.Path]
  hub: Hub

  def do_HEAD(self) -> None:
    self._answer()

  def do_GET(self) -> None:
    self._answer()

  def do_POST(self) -> None:
    self._answer()

  def _answer(self) -> None:
    self.hub.requests += 1
    body = self.rfile.read(int(self.headers.get("content-length") or 0))
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
    if path.startswith("api/"):
      self._api(path.removeprefix("api/"), body)
    else:
      self._file(path)

  def _api(self, path: str, body: bytes) -> None:
    found = next((each for each in self.repositories if f"{path}/".startswith(f"{each}/")), None)
    if found is None:
      self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
      return
    folder, rest = self.repositories[found], path.removeprefix(found).strip("/")
    if rest.startswith("paths-info/"):
      asked = json.loads(body)["paths"] if body.startswith(b"{") else []
      asked = asked or urllib.parse.parse_qs(body.decode()).get("paths", [])
      entries = [_entry(folder, name) for name in asked if (folder / name).exists()]
      self._json(entries)
    elif rest.startswith("tree/"):
      below = folder / rest.removeprefix("tree/").partition("/")[2]
      self._json([_entry(folder, str(p.relative_to(folder))) for p in sorted(below.rglob("*"))])
    else:
      files = [{"rfilename": name} for name in _files(folder)]
      self._json({"id": found.partition("/")[2], "sha": COMMIT, "siblings": files})

  def _file(self, path: str) -> None:
    """Answers NAME/resolve/REVISION/FILE; the names of datasets begin with "datasets/"."""
    name, _, rest = path.partition("/resolve/")
    kind = "" if name.startswith("datasets/") else "models/"
    folder, file = self.repositories.get(kind + name), rest.partition("/")[2]
    if folder is None or not (folder / file).is_file():
      code = "RepoNotFound" if folder is None else "EntryNotFound"
      self._send(404, b"", {"X-Error-Code": code})
      return
    content = (folder / file).read_bytes()
    if self.command == "GET":
      self.hub.fetched.append(f"{name}/{file}")
    etag = hashlib.sha1(content).hexdigest()
    self._send(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

  def _json(self, value: object) -> None:
    self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

  def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
    self.send_response(status)
    for key, value in headers.items():
      self.send_header(key, value)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  def log_message(self, format: str, *args: object) -> None:
    """Prints nothing."""


def _files(folder: pathlib.Path) -> list[str]:
  return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]


def _entry(folder: pathlib.Path, name: str) -> dict[str, object]:
  path = folder / name
  if path.is_dir():
    return {"type": "directory", "path": name, "oid": "0" * 40}
  content = path.read_bytes()
  return {
    "type": "file",
    "path": name,
    "oid": hashlib.sha1(content).hexdigest(),
    "size": len(content),
  }
