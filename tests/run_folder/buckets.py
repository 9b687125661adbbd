"""Places for run folders at URLs: a folder, and a server in place of Google Cloud Storage.

The server answers gcsfs and TensorStore. It keeps the objects of one bucket in memory, with
generations and the conditions on them.
"""

import contextlib
import dataclasses
import http.server
import importlib.util
import itertools
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable

import pytest

_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class Store:
  """The objects of a bucket: (generation, content) by name."""

  def __init__(self):
    self.objects = {}
    self.uploads = []  # (name, wanted generation, content so far) of each that came in parts.
    self.lock = threading.Lock()
    self._generations = itertools.count(1)

  def write(self, name, content, wanted):
    """Writes an object whose generation is the wanted one (0: none; None: any)."""
    with self.lock:
      if wanted is not None and int(wanted) != self.objects.get(name, (0,))[0]:
        return None
      self.objects[name] = next(self._generations), content
      return self.info(name)

  def info(self, name):
    generation, content = self.objects[name]
    return {
      **{"kind": "storage#object", "name": name, "bucket": "bucket", "size": str(len(content))},
      **{"generation": str(generation), "metageneration": "1", "storageClass": "STANDARD"},
      **{"updated": "2026-11-27T00:00:00Z", "timeCreated": "2026-11-27T00:00:00Z"},
    }


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  store: Store

  def log_message(self, *_):
    pass

  def _answer(self, status, content=b"", **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  def _json(self, value):
    self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

  def _parsed(self):
    found = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(found.query, keep_blank_values=True))
    return found.path, query

  def do_POST(self):
    path, query = self._parsed()
    body = self.rfile.read(int(self.headers["Content-Length"]))
    if not _UPLOAD.fullmatch(path):
      return self._answer(404)
    name, wanted = query.get("name"), query.get("ifGenerationMatch")
    if "upload_id" in query:
      name, wanted, content = self.store.uploads[int(query["upload_id"])]
      content += body
      if self.headers["Content-Range"].endswith("/*"):
        return self._answer(308, Range=f"bytes=0-{len(content) - 1}")
      body = bytes(content)
    elif query["uploadType"] == "resumable":
      self.store.uploads.append((name, wanted, bytearray()))
      location = f"http://{self.headers['Host']}{path}?upload_id={len(self.store.uploads) - 1}"
      return self._answer(200, Location=location)
    elif query["uploadType"] == "multipart":
      name, body = _parts(body)
    info = self.store.write(name, body, wanted)
    return self._answer(412) if info is None else self._json(info)

  def do_GET(self):
    path, query = self._parsed()
    if _LIST.fullmatch(path):
      first = query.get("startOffset", "")
      last = query.get("endOffset", "\U0010ffff")
      prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
      names = [n for n in sorted(self.store.objects) if n.startswith(prefix) and first <= n < last]
      below = lambda name: name[len(prefix) :].partition("/")[1] if delimiter else ""
      folders = {prefix + n[len(prefix) :].partition("/")[0] + "/" for n in names if below(n)}
      items = [self.store.info(n) for n in names if not below(n)]
      return self._json({"items": items, "prefixes": sorted(folders)})
    found = _OBJECT.fullmatch(path)
    name = urllib.parse.unquote(found[2]) if found else ""
    if name not in self.store.objects:
      return self._answer(404)
    if query.get("alt") != "media":
      return self._json(self.store.info(name))
    generation, content = self.store.objects[name]
    if query.get("ifGenerationNotMatch") == str(generation):
      return self._answer(304)
    if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
      begin, end = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
      within = f"bytes {begin}-{end - 1}/{len(content)}"
      part = content[begin:end]
      return self._answer(206, part, x_goog_generation=str(generation), Content_Range=within)
    return self._answer(200, content, x_goog_generation=str(generation))

  do_HEAD = do_GET

  def do_DELETE(self):
    found = _OBJECT.fullmatch(self._parsed()[0])
    name = urllib.parse.unquote(found[2]) if found else ""
    with self.store.lock:
      is_there = self.store.objects.pop(name, None) is not None
    return self._answer(204 if is_there else 404)


def _parts(body):
  """Returns the name and the content that the two parts of an upload of gcsfs hold."""
  _, first, rest = body.split(b"--==0==", 2)
  name = json.loads(first.partition(b"\n\n")[2])["name"]
  return name, rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")


@contextlib.contextmanager
def serving():
  """Runs a server for the block; yields its store and its address."""
  store = Store()
  handler = type("Handler", (_Handler,), {"store": store})
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  server.handle_error = lambda *_: None  # of clients that were killed.
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield store, f"http://127.0.0.1:{server.server_address[1]}"
  finally:
    server.shutdown()
    server.server_close()


@dataclasses.dataclass
class Bucket:
  """A run folder at a URL, as a test sees it."""

  url: str
  environment: dict[str, str]  # with which a program reaches it.
  names: Callable[[], set[str]]  # of all files.
  remove: Callable[[str], None]
  folder: Callable[[], pathlib.Path]  # all files as a folder.


@contextlib.contextmanager
def on_disk(scratch):
  """Yields a folder, which is named by file://."""
  there = scratch / "there"
  names = lambda: {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()}
  remove = lambda name: (there / name).unlink()
  yield Bucket(f"file://{there}", {}, names, remove, lambda: there)


@contextlib.contextmanager
def on_server(scratch):
  """Yields a folder of a bucket, which is named by gs://."""
  if importlib.util.find_spec("gcsfs") is None:  # programs import it with their environment.
    pytest.skip("gcsfs is not installed")
  with serving() as (store, address):

    def folder():
      for name, (_, content) in store.objects.items():
        path = scratch / "downloaded" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
      return scratch / "downloaded" / "runs" / "first"

    environment = {
      **{"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address},
      **{"FSSPEC_GCS_TOKEN": "anon", "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anybody"},
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks another service about the bucket.
    }
    yield Bucket(
      "gs://bucket/runs/first",
      environment,
      lambda: {name.removeprefix("runs/first/") for name in list(store.objects)},
      lambda name: store.objects.pop(f"runs/first/{name}"),
      folder,
    )


BUCKETS = {"file": on_disk, "gs": on_server}
