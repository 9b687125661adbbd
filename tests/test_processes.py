"""One process or several: who is the main one, and how the others learn what it decided."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from grpo_jax import processes

ROOT = pathlib.Path(__file__).parents[1]

OF_SEVERAL = """
import sys
import jax
from grpo_jax import processes

assert (processes.count(), processes.index()) == (1, 0)
address, index = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=index)
assert (processes.count(), processes.index()) == (2, index)
assert processes.is_main() == (index == 0)
for sent in ({"workdir": "runs/é"}, [1.5, None]):
  received = processes.broadcast(sent if index == 0 else "ignored", timeout_s=60)
  assert received == sent, received
processes.barrier("met", timeout_s=60)
if index == 1:
  try:
    processes.broadcast(None, timeout_s=0.2)
  except processes.ProcessesError as error:
    print(error)
processes.barrier("end", timeout_s=60)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_a_single_process_is_the_main_one_and_waits_for_nobody():
  assert (processes.count(), processes.index(), processes.named()) == (1, 0, "")
  assert processes.is_main()
  assert processes.broadcast({"step": 3}) == {"step": 3}
  processes.barrier("alone")


def test_what_cannot_be_sent_is_refused_by_a_single_process_too():
  with pytest.raises(TypeError):
    processes.broadcast(object())


def test_two_processes_agree_without_a_backend():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
  started = [
    subprocess.Popen(
      [sys.executable, "-c", OF_SEVERAL, address, str(index)],
      **{"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    )
    for index in range(2)
  ]
  ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
  assert [code for *_, code in ended] == [0, 0], ended
  assert ended[0][0] == ""
  assert ended[1][0].startswith(
    "process 1 of 2 received nothing from process 0 within 0.2 s (grpo_jax/broadcast/2): "
  )
