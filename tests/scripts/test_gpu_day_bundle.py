"""scripts/gpu_day.py --bundle: the folder that a machine without a network needs."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmark")]

from gpu_day_parts import bundle, running  # noqa: E402


def wheel(folder, name, version, *, needs=(), filler=0):
  """Writes a wheel with one module, `filler` bytes that do not compress, and requirements."""
  info = f"{name}-{version}.dist-info"
  metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
  metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
  contents = {
    f"{name}.py": f"VERSION = {version!r}\n",
    f"{name}.bin": os.urandom(filler),
    f"{info}/METADATA": metadata,
    f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
  }
  contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
  path = folder / f"{name}-{version}-py3-none-any.whl"
  with zipfile.ZipFile(path, "w") as archive:
    for member, content in contents.items():
      archive.writestr(member, content)
  return path


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder of wheels in place of an index: planted_b needs planted_a and planted_there."""
  folder = tmp_path / "index"
  folder.mkdir()
  for version in ("1.0", "2.0"):
    wheel(folder, "planted_there", version)
    needs = ["planted-there==1.*"] if version == "1.0" else ["planted-there==2.*"]
    wheel(folder, "planted_a", version, needs=needs)
  wheel(folder, "planted_b", "1.0", needs=["planted-a"], filler=30_000)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
  return folder


def test_versions_of_a_listing_are_read():
  listing = "# list\nJAX==0.11.2\nml_dtypes @ file:///x\nruamel.yaml==1\n\n-e ."
  assert bundle.versions_in(listing) == {"jax": "0.11.2", "ml-dtypes": "", "ruamel-yaml": "1"}


def test_a_file_is_cut_into_pieces_that_join_to_it(tmp_path):
  content = os.urandom(2500)
  path = tmp_path / "whole"
  path.write_bytes(content)
  bundle.cut(path, 2500)
  assert path.read_bytes() == content
  bundle.cut(path, 1000)
  pieces = sorted(tmp_path.iterdir())
  assert [piece.stat().st_size for piece in pieces] == [1000, 1000, 500]
  assert b"".join(piece.read_bytes() for piece in pieces) == content


@pytest.mark.long
def test_wheels_that_are_missing_fit_those_that_are_there(index, tmp_path):
  there = {"planted-there": "1.0"}
  bundle.wheels(tmp_path, there, ["planted_b"])
  # Not 2.0, which needs another planted_there than the machine has.
  assert sorted(path.name for path in tmp_path.glob("*.whl")) == [
    "planted_a-1.0-py3-none-any.whl",
    "planted_b-1.0-py3-none-any.whl",
  ]
  with pytest.raises(RuntimeError, match="planted"):
    bundle.wheels(tmp_path, {"planted-there": "1.0"}, ["planted_b", "planted_a==2.0"])


@pytest.mark.slow
def test_a_bundle_runs_without_a_network(index, tmp_path):
  folder = tmp_path / "bundle"
  have = tmp_path / "freeze.txt"
  have.write_text("planted_there==1.0\n")
  table = bundle.make(folder, have, 0.02, ["planted_b"])
  assert "planted_b-1.0" in table and "sources.tar" in table
  files = list((folder / "files").iterdir())
  assert max(file.stat().st_size for file in files) <= 20_000
  with pytest.raises(ValueError, match="not empty"):
    bundle.make(folder, have, 0.02, [])

  for path in index.iterdir():  # from here on, there is nothing to download.
    path.unlink()
  work = tmp_path / "work"
  environment = {**os.environ, "PYTHON": sys.executable, "WORK": str(work), "PYTHONPATH": ""}
  command = ["sh", str(folder / "run.sh"), "--tiny", "--strict"]
  call = lambda *more: subprocess.run(
    [*command, *more], env=environment, capture_output=True, text=True, timeout=250, check=False
  )
  done = call("--parts", "device")
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  assert (work / "packages" / "planted_b.py").exists()
  result = running.read(folder / "out" / running.RESULT)
  assert result["parts"]["device"]["status"] == "done"
  assert result["commit"] == running.commit()
  assert call("--parts", "device", "--resume").stdout.count("is done already") == 1

  piece = folder / "files" / "sources.tar.piece-0003"
  piece.write_bytes(piece.read_bytes()[:-1] + bytes([piece.read_bytes()[-1] ^ 1]))
  (work / "ready").unlink()
  broken = call("--list")
  assert broken.returncode != 0 and "sources.tar: FAILED" in broken.stdout
