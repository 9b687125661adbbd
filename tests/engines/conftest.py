"""A real SGLang server, started once for all tests of this folder that need one."""

import urllib.request

import pytest

from tests.engines import sglang_fixtures


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory):
  """Hugging Face folder of the tiny model."""
  return sglang_fixtures.write_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.fixture(scope="session")
def sglang_server(sglang_model, tmp_path_factory):
  """A server that no engine owns: given to engines by `addresses`, used by one after the other."""
  server = sglang_fixtures.start(sglang_model, tmp_path_factory.mktemp("servers"))
  try:
    sglang_fixtures.eventually(lambda: answers(server), timeout_s=280.0)
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
