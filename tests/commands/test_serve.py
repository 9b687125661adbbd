"""`grpo-jax serve`: it answers until Ctrl-C, and says what is wrong with its arguments."""

import json
import os
import pathlib
import re
import signal
import socket
import threading
import time
import urllib.request

import pytest

from grpo_jax.building import stored
from grpo_jax.commands import cli
from tests import stored_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "first"
  fields = {"model__compute_dtype": "float32", "rollout__max_tokens": 128, "engine__max_rows": 2}
  return stored_runs.write(folder, {10: 0.5, 20: 0.25}, **fields)


def asked(printed: str) -> dict:
  """Asks as the printed curl command does."""
  url, key, body = re.search(
    r"curl (\S+) -H 'Authorization: Bearer (.+)' -d '(.+)'", printed
  ).groups()
  headers = {"Authorization": f"Bearer {key}"}
  request = urllib.request.Request(url, body.encode(), headers)
  with urllib.request.urlopen(request, timeout=60) as response:
    return json.load(response)


def serve_until_ctrl_c(log, *words):
  """Serves, asks once as is printed to `log`, and stops; returns the code, the text, the answer."""
  found = {}
  begin = pathlib.Path(log).stat().st_size

  def use():
    printed = ""
    while "curl" not in printed:
      time.sleep(0.05)
      printed = pathlib.Path(log).read_bytes()[begin:].decode()
    try:
      found["printed"], found["answer"] = printed, asked(printed)
    finally:
      os.kill(os.getpid(), signal.SIGINT)

  client = threading.Thread(target=use)
  client.start()
  code = cli.run(["serve", *words])
  client.join()
  return code, found


@pytest.mark.slow
def test_a_checkpoint_answers_until_ctrl_c(run, own_process):
  words = ["--model", f"{run}:10", "--config.sampling.max_tokens=8"]
  code, found = own_process(serve_until_ctrl_c, own_process.log, *words)
  assert code == 0
  assert f"{run}:10, 128 tokens of context" in found["printed"]
  assert found["answer"]["usage"]["completion_tokens"] <= 8
  assert found["answer"]["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
  ("words", "code", "message"),
  [
    ([], 2, "required: --model"),
    (["--model={run}", "--prot=1"], 2, "unknown flag --prot; did you mean --port?"),
    (["--model={run}", "--port=many"], 2, "--port"),
    (["--model={run}", "--port=99999"], 2, "--port needs a number below 65536, got 99999"),
    *(
      (["--model={run}", f"--key={key}"], 2, "--key: a key needs visible ASCII characters only")
      for key in ("", " ", "a b", "a\tb", "a\n", "schlüssel")
    ),
    (["--model={run}:15"], 2, "no checkpoint of step 15"),
    (["--model={run}/nothing:3"], 2, "there is no run folder {run}/nothing"),
    (["--model={run}", "--config.sampling.max_token=8"], 2, "max_token"),
    (["--model={run}", "--config.rollout.max_tokens=99999"], 2, "max_position_embeddings"),
  ],
)
def test_a_mistake_is_one_message(run, capsys, words, code, message):
  assert cli.run(["serve", *(word.format(run=run) for word in words)]) == code
  printed = capsys.readouterr().err
  assert message.format(run=run) in printed and "Traceback" not in printed


def test_a_port_that_is_taken_is_one_message_before_a_model_is_loaded(run, capsys, monkeypatch):
  monkeypatch.setattr(stored, "find", None)  # a call would fail.
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    assert cli.run(["serve", f"--model={run}", f"--port={port}"]) == 1
  assert f"error: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
