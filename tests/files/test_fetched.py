"""Models and data at URLs: fetched once, again when they change, and never half."""

import contextlib
import functools
import http.server
import json
import threading

import pytest

from grpo_jax.data.sources import SourceConfig, open_source
from grpo_jax.files import cache, fetched, local_paths, remote
from grpo_jax.models import sources, tiny
from grpo_jax.models.errors import MissingModel
from tests.run_folder.faulty_storage import FaultyStorage, Plan

ROWS = "faulty://bucket/rows.jsonl"


@pytest.fixture(autouse=True)
def storage(monkeypatch, tmp_path):
  """An empty store and an empty cache; nothing waits."""
  FaultyStorage.clear()
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(
    remote, "RemoteFolder", functools.partial(remote.RemoteFolder, attempts=1, workers=1)
  )
  yield
  FaultyStorage.clear()


def put(url, content):
  FaultyStorage().pipe_file(url, content)


def calls(act):
  """Returns the calls of the storage that a function makes."""
  FaultyStorage.reset()
  act()
  names, FaultyStorage.plan.names = FaultyStorage.plan.names, []
  return [name.split()[0] for name in names]


def test_a_file_is_fetched_once_and_again_when_it_changes():
  put(ROWS, b"first")
  path = fetched.local(ROWS)
  assert path.name == "rows.jsonl" and path.read_bytes() == b"first"
  assert "get_file" not in calls(lambda: fetched.local(ROWS))
  put(ROWS, b"other")
  assert fetched.local(ROWS).read_bytes() == b"other"


def test_a_local_path_is_returned_as_it_is(tmp_path):
  assert fetched.local(tmp_path) == tmp_path and str(fetched.local("rows.jsonl")) == "rows.jsonl"


def test_of_a_folder_the_files_that_match_are_fetched_and_old_ones_removed():
  for name in ("a.json", "sub/b.json", "c.bin"):
    put(f"faulty://bucket/model/{name}", name.encode())
  folder = fetched.local("faulty://bucket/model/", patterns=["*.json"])
  files = lambda: sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
  assert files() == ["a.json", "sub/b.json"]
  FaultyStorage().rm_file("faulty://bucket/model/a.json")
  put("faulty://bucket/model/d.json", b"d")
  fetched.local("faulty://bucket/model/", patterns=["*.json"])
  assert files() == ["d.json", "sub/b.json"]


@pytest.mark.parametrize("kind", ["fails_before", "fails_torn"])
def test_an_interrupted_fetch_is_completed_whichever_call_failed(kind):
  for name in ("a", "b", "c"):
    put(f"faulty://bucket/data/{name}", f"content of {name}".encode())
  number = len(calls(lambda: fetched.local("faulty://bucket/data")))
  for call in range(number):
    fetched.shutil.rmtree(cache.default_cache())
    FaultyStorage.reset(Plan(call, kind))
    with contextlib.suppress(remote.RemoteError):
      fetched.local("faulty://bucket/data")
    FaultyStorage.reset()
    folder = fetched.local("faulty://bucket/data")
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {name: f"content of {name}" for name in "abc"}, (call, kind)


def test_a_file_that_was_damaged_in_an_interrupted_fetch_is_fetched_again(monkeypatch):
  for name in ("a", "b"):
    put(f"faulty://bucket/data/{name}", b"right")
  get = remote.RemoteError("no network")
  fetch_one = fetched._fetch_one

  def fail_at_b(place, shelf, name, info):
    if name.endswith("b"):
      raise get
    return fetch_one(place, shelf, name, info)

  with monkeypatch.context() as patch:
    patch.setattr(fetched, "_fetch_one", fail_at_b)
    with pytest.raises(remote.RemoteError, match="no network"):
      fetched.local("faulty://bucket/data")
  (first,) = cache.default_cache().rglob("a")
  first.write_bytes(b"wrong")
  folder = fetched.local("faulty://bucket/data")
  assert (folder / "a").read_bytes() == (folder / "b").read_bytes() == b"right"


def test_a_whole_copy_serves_while_the_storage_does_not_answer(monkeypatch, caplog):
  put(ROWS, b"rows")
  fetched.local(ROWS)

  def silent(*_):
    raise remote.RemoteError("no network")

  monkeypatch.setattr(fetched, "_files", silent)
  assert fetched.local(ROWS).read_bytes() == b"rows"
  assert "no network; using the copy that was fetched earlier" in caplog.text
  with pytest.raises(remote.RemoteError, match="no network"):
    fetched.local("faulty://bucket/never_fetched")


def test_what_is_not_there_is_said(tmp_path):
  with pytest.raises(FileNotFoundError, match="no file or folder faulty://bucket/nothing"):
    fetched.local("faulty://bucket/nothing")
  with pytest.raises(MissingModel, match="model.path=faulty://bucket/nothing: there is no"):
    sources.resolve("faulty://bucket/nothing")
  put("faulty://bucket/model.bin", b"x")
  with pytest.raises(MissingModel, match="a model is a folder or a .gguf file"):
    sources.resolve("faulty://bucket/model.bin")


def test_rows_and_models_are_read_from_urls(tmp_path):
  put(ROWS, json.dumps({"problem": "1 + 1"}).encode() + b"\n")
  source = open_source(SourceConfig("auto", path=ROWS))
  assert (source.name, source[0]) == ("rows", {"problem": "1 + 1"})
  model = tiny.write(tmp_path / "tiny")
  for path in model.iterdir():
    put(f"faulty://bucket/tiny/{path.name}", path.read_bytes())
  found = sources.resolve("faulty://bucket/tiny")
  assert (found / "config.json").read_bytes() == (model / "config.json").read_bytes()
  assert found.name == "tiny" and found.is_relative_to(cache.default_cache())


def test_a_file_of_a_web_server_is_fetched(tmp_path):
  (tmp_path / "rows.jsonl").write_text("{}\n")
  quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
  handler = functools.partial(quiet, directory=str(tmp_path))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert fetched.local(f"{url}/rows.jsonl").read_text() == "{}\n"
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
      fetched.local(f"{url}/missing.jsonl")
    server.shutdown()


@pytest.mark.parametrize("name", ["GRPO_JAX_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_is_a_local_folder(name, monkeypatch):
  monkeypatch.delenv("GRPO_JAX_CACHE")
  monkeypatch.setenv(name, "gs://bucket/cache")
  with pytest.raises(local_paths.NotLocal, match=f"{name}=gs://bucket/cache: only paths of this"):
    cache.default_cache()


def test_a_password_in_a_url_is_not_shown():
  reason = remote.problem("data.path", "nosuch://user:secret@host/rows")
  assert "secret" not in reason and "data.path=nosuch://host/rows" in reason
