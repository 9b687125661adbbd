"""SGLang itself: its seeds, its logprobs, its key, and that it ends with the trainer."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import psutil
import pytest

from grpo_jax.engines.server_process import LaunchOptions, ServerProcess
from grpo_jax.models import tiny
from tests.engines.processes import eventually, is_gone
from tests.engines.sglang_fixtures import server_python

ROOT = pathlib.Path(__file__).parents[2]
KEY = "a-secret-of-36-letters-and-some-more"
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
PROMPT = [5, 80, 81, 200, 9, 80, 81]


def real_options(folder, **changes):
  return LaunchOptions(
    **{
      "python": server_python(),
      "log_folder": folder / "servers",
      "device": "cpu",
      "max_running": 16,
      "context_length": 512,
      **changes,
    }
  )


def ask(server, path, body=None, key=KEY):
  """Returns the answer of a server."""
  request = urllib.request.Request(
    server.address + path,
    data=None if body is None else json.dumps(body).encode(),
    headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
  )
  with urllib.request.urlopen(request, timeout=120) as answer:
    return answer.read()


def is_ready(server):
  assert server.is_running, f"{server.exit_text()}\n{server.last_lines()}"
  try:
    ask(server, "/ready")
    return True
  except OSError:
    return False


def sample(server, seeds, *, temperature=1.0, prompt=PROMPT, tokens=24):
  """Returns the ids and logprobs of a completion a seed, all in flight at the same time."""
  setting = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
  body = {
    "input_ids": [prompt] * len(seeds),
    "sampling_params": [{**setting, "sampling_seed": seed} for seed in seeds],
    "return_logprob": True,
  }
  answers = json.loads(ask(server, "/generate", body))
  reported = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
  return [([token for _, token, _ in each], [logprob for logprob, *_ in each]) for each in reported]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
  """Returns a real server of a tiny model, and the model's folder."""
  folder = tmp_path_factory.mktemp("served")
  model = tiny.write(folder / "model")
  server = ServerProcess.start(real_options(folder), 0, model, 7, KEY)
  try:
    eventually(lambda: is_ready(server), timeout_s=600, every_s=0.5)
    yield server, model
  finally:
    server.kill()
    assert server.wait(30.0)


def test_real_server_starts_with_the_given_weight_version(served):
  server, model = served
  reported = json.loads(ask(server, "/model_info"))
  assert (reported["weight_version"], reported["model_path"]) == ("7", str(model))


def test_real_server_samples_as_its_seeds_say(served):
  """Every bit of a seed counts, and what else is in flight does not."""
  server, _ = served
  seed = 0x0123456789ABCDEF
  flipped = [seed ^ 1 << bit for bit in range(63)] + [seed - 2**63]
  completions = [tuple(ids) for ids, _ in sample(server, [seed, *flipped])]
  assert len(set(completions)) == 65
  again = [tuple(ids) for ids, _ in sample(server, [flipped[62], seed, seed])]
  assert again == [completions[63], completions[0], completions[0]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_real_server_returns_the_logprobs_of_the_distribution_it_samples_from(served, temperature):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  server, folder = served
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  for ids, logprobs in sample(server, list(range(8)), temperature=temperature):
    with torch.no_grad():
      logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / temperature, -1)[range(len(ids)), ids]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=3e-5)


def test_real_server_samples_every_token_as_often_as_its_probability(served):
  """The first tokens of 2048 seeds against the softmax of the logits."""
  server, _ = served
  first = [
    (ids[0], logprobs[0])
    for begin in range(0, 2048, 256)
    for ids, logprobs in sample(server, list(range(begin, begin + 256)), tokens=1)
  ]
  probability = {token: np.exp(logprob) for token, logprob in first}
  counts = {token: sum(each == token for each, _ in first) for token in probability}
  # A sum of squares of about standard normal variables, were it not for the tokens never seen.
  squares = [
    (counts[token] - 2048 * p) ** 2 / (2048 * p)
    for token, p in probability.items()
    if 2048 * p >= 5
  ]
  assert len(squares) > 20
  assert 0.4 < np.mean(squares) < 1.8


def test_real_server_shows_its_key_to_nobody(served):
  server, _ = served
  with pytest.raises(urllib.error.HTTPError, match="401") as refused:
    ask(server, "/model_info", key="another")
  refused.value.close()  # as long as nobody does, its socket is open.
  processes = [psutil.Process(server.pid), *family(server)]
  assert len(processes) >= 4  # guard, main, scheduler, detokenizer.
  assert all(KEY not in " ".join(each.cmdline()) for each in processes)
  spawned = [each for each in processes[2:] if each.status() != psutil.STATUS_ZOMBIE]
  assert all(KEY not in each.environ().values() for each in spawned)
  log = server.log.read_text()
  assert "server_args=" in log  # where SGLang would tell it.
  assert KEY not in log


def family(server):
  """Returns the processes of a server, without its guard."""
  return psutil.Process(server.pid).children(recursive=True)


def test_real_server_ends_when_its_guard_is_killed(served):
  """The last test of this server."""
  server, _ = served
  processes = family(server)
  os.kill(server.pid, signal.SIGKILL)
  assert server.wait(30.0)
  for process in processes:
    eventually(lambda pid=process.pid: is_gone(pid))


REAL_TRAINER = """
import pathlib, sys, time
from grpo_jax.engines.server_process import LaunchOptions, ServerProcess
folder, python, model = map(pathlib.Path, sys.argv[1:])
options = LaunchOptions(python=python, log_folder=folder / "servers", device="cpu", grace_s=2.0)
server = ServerProcess.start(options, 0, model, 1)
print(server.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("killed", ["trainer", "guard"])
def test_real_server_that_still_starts_ends_with_the(tmp_path, killed):
  """As soon as its processes are there, before SGLang itself looks after them."""
  model = tiny.write(tmp_path / "model")
  trainer = subprocess.Popen(
    [sys.executable, "-c", REAL_TRAINER, str(tmp_path), str(server_python()), str(model)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    with trainer.stdout:
      guard = psutil.Process(int(trainer.stdout.readline()))

    # Three: the server itself, the scheduler, the detokenizer.
    eventually(lambda: len(guard.children(recursive=True)) >= 3, timeout_s=600, every_s=0.05)
    processes = [guard, *guard.children(recursive=True)]
    (trainer if killed == "trainer" else guard).kill()
    for process in processes:
      eventually(lambda pid=process.pid: is_gone(pid))
  finally:
    trainer.kill()
    trainer.wait(30)
