"""A real SGLang server, started once for all tests of this folder that need one; a small disk."""

import os
import subprocess
import urllib.request

import pytest

from tests.engines import sglang_fixtures
from tests.engines.processes import eventually


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory):
  """Hugging Face folder of the tiny model."""
  return sglang_fixtures.write_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def sglang_server(sglang_model, tmp_path_factory):
  """A server that no engine owns: given to engines by `addresses`, used by one after the other."""
  server = sglang_fixtures.start(sglang_model, tmp_path_factory.mktemp("servers"))
  try:
    eventually(lambda: answers(server), timeout_s=280.0)
    yield server
  finally:
    server.terminate()
    assert server.wait(60.0)


def answers(server):
  """Returns whether a server is ready; fails if it has ended."""
  assert server.is_running, server.last_lines()
  try:
    with urllib.request.urlopen(f"{server.address}/model_info", timeout=30) as response:
      return response.status == 200
  except OSError:
    return False


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 512 KiB in memory."""
  if os.geteuid() != 0:
    pytest.skip("mounting a file system needs root")
  folder = tmp_path / "small"
  folder.mkdir()
  mounted = subprocess.run(
    ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True, text=True
  )
  if mounted.returncode:
    pytest.skip(f"mounting a file system is not allowed here: {mounted.stderr.strip()}")
  yield folder
  subprocess.run(["umount", "-l", folder], check=True)
