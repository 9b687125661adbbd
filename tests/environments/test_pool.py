"""The pool of graders: concurrency, crashes, errors, memory, orphans."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from grpo_jax.environments.grading.pool import (
  GraderCrash,
  GraderError,
  GraderStartError,
  GraderTimeout,
  WorkerPool,
)
from grpo_sandbox.slots import SandboxSlot

GRADER = """
import os, sys, time
print("noise on import")
def double(x):
  print("noise on stdout", flush=True); os.write(1, b"more"); os.write(2, b"noise")
  return 2 * x
def fail(): raise KeyError("no such answer")
def die(): os.abort()
def spin():
  while True: pass
def big_number(): return len(str((10 ** 4000) ** 200_000)) and 9 ** 9 ** 9
def memory(n): return len(bytearray(n))
def sleep(s):
  time.sleep(s)
  return os.getpid()
def environment(): return sorted(sys.modules)
"""


@pytest.fixture
def grader(tmp_path):
  path = tmp_path / "grader.py"
  path.write_text(GRADER)
  return path


@pytest.fixture
def pool(grader):
  made = WorkerPool(grader, workers=1, timeout_s=10.0, memory_gib=1.0)
  yield made
  made.close()


def test_results_are_not_mixed_with_what_a_library_prints(pool):
  assert [pool.submit("double", i).result() for i in range(3)] == [0, 2, 4]
  assert pool.submit("double", "ab" * 200_000).result() == "ab" * 400_000  # more than a pipe holds.


CTRL_C = """
import logging, sys, time
from grpo_jax import interrupts
from grpo_jax.environments.grading.pool import WorkerPool
logging.basicConfig(level=logging.INFO)
pool = WorkerPool(sys.argv[1], workers=1)
with interrupts.Flag() as stop:
  pool.submit("double", 1).result()
  print("ready", flush=True)
  while not stop:
    time.sleep(0.01)
  time.sleep(0.1)
  print(pool.submit("double", 2).result(), pool.counts()["crashes"], pool.counts()["starts"])
(pid,) = pool.pids()
pool.close()
print(pid)
"""


@pytest.mark.long
def test_ctrl_c_in_the_terminal_does_not_reach_the_workers(grader):
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  command = [sys.executable, "-c", CTRL_C, str(grader)]
  with subprocess.Popen(command, **pipes, start_new_session=True) as trainer:
    assert trainer.stdout.readline() == "ready\n"
    os.killpg(trainer.pid, signal.SIGINT)
    output, errors = trainer.communicate(timeout=60)
  answer, pid = output.splitlines()
  assert (trainer.returncode, answer) == (0, "4 0.0 1.0")
  assert errors.count("SIGINT") == 1 and "Traceback" not in errors
  assert not psutil.pid_exists(int(pid))  # the trainer ends them.


def test_an_exception_comes_back_and_costs_no_process(pool):
  with pytest.raises(GraderError, match="KeyError: 'no such answer'"):
    pool.submit("fail").result()
  (pid,) = pool.pids()
  assert pool.submit("double", 2).result() == 4 and pool.pids() == [pid]
  assert pool.counts()["errors"] == 1.0


def test_a_process_that_dies_of_an_answer_costs_that_answer_alone(pool):
  with pytest.raises(GraderError, match="its process died with exit code"):
    pool.submit("die").result()
  assert (pool.counts()["crashes"], pool.counts()["starts"]) == (1.0, 1.0)
  assert pool.submit("double", 2).result() == 4


def test_a_sandbox_that_is_killed_is_replaced_once_for_a_call_and_never_for_ever(pool, monkeypatch):
  monkeypatch.setattr(SandboxSlot, "exit_code", lambda self, deadline: None)
  with pytest.raises(GraderCrash, match="the sandbox died twice in double"):
    pool.submit("double", 1).result()
  monkeypatch.undo()
  assert pool.counts()["crashes"] == 2.0
  assert pool.submit("double", 2).result() == 4


def test_memory_is_limited(pool):
  with pytest.raises(GraderError, match="MemoryError"):
    pool.submit("memory", 2 << 30).result()
  assert pool.submit("memory", 1 << 20).result() == 1 << 20


@pytest.mark.parametrize(
  "function", ["spin", "big_number"]
)  # in Python, and in C with the lock held.
def test_a_hang_ends_at_the_time_out(grader, function):
  pool = WorkerPool(grader, workers=1, timeout_s=0.5)
  pool.submit("double", 1).result()
  (pid,) = pool.pids()
  start = time.perf_counter()
  with pytest.raises(GraderTimeout, match=r"no answer within 0\.5 s"):
    pool.submit(function).result()
  assert time.perf_counter() - start < 1.5
  assert pool.pids() == [pid]  # the call ended; its sandbox is there for the next one.
  assert pool.submit("double", 2).result() == 4
  assert pool.counts()["timeouts"] == 1.0 and pool.counts()["starts"] == 1.0
  pool.close()


@pytest.mark.long
def test_waiting_for_a_worker_is_not_counted_as_grading(grader):
  pool = WorkerPool(grader, workers=1, timeout_s=0.7)
  futures = [pool.submit("sleep", 0.2) for _ in range(5)]  # the last one waits for 0.8 s.
  assert all(f.result() for f in futures)
  assert pool.counts()["timeouts"] == 0.0
  pool.close()


def test_workers_run_side_by_side(grader):
  with_two = WorkerPool(grader, workers=2, timeout_s=20.0)
  futures = [with_two.submit("sleep", 0.3) for _ in range(2)]
  assert all(f.result() for f in futures) and len(with_two.pids()) == 2
  with_two.close()


def test_a_cancelled_call_is_not_made(pool):
  first, second = pool.submit("sleep", 0.3), pool.submit("die")
  assert second.cancel()
  first.result()
  assert pool.submit("double", 1).result() == 2 and pool.counts()["crashes"] == 0.0


def test_a_grader_that_cannot_be_imported_says_why(tmp_path):
  path = tmp_path / "grader.py"
  path.write_text("import no_such_library\n")
  pool = WorkerPool(path, workers=1)
  with pytest.raises(GraderStartError, match="No module named 'no_such_library'"):
    pool.submit("anything").result()
  pool.close()


def test_a_closed_pool_takes_no_calls_and_breaks_off_running_ones(grader):
  pool = WorkerPool(grader, workers=1, timeout_s=60.0)
  pool.submit("double", 1).result()
  running = pool.submit("spin")
  while not running.running():
    time.sleep(0.01)
  pool.close()
  assert running.exception(timeout=10) is not None
  assert pool.pids() == []
  with pytest.raises(RuntimeError, match="closed"):
    pool.submit("double", 1)


@pytest.mark.slow
def test_a_worker_that_spins_does_not_outlive_a_killed_trainer(grader, tmp_path):
  code = (
    "import sys, time\n"
    "from grpo_jax.environments.grading.pool import WorkerPool\n"
    f"pool = WorkerPool({str(grader)!r}, workers=1, timeout_s=1.0)\n"
    "pool.submit('double', 1).result()\n"
    "pool.submit('spin')\n"
    "time.sleep(0.3)\n"
    "print(pool.pids()[0], flush=True)\n"
    "time.sleep(60)\n"
  )
  trainer = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
  )
  assert trainer.stdout is not None
  worker = psutil.Process(int(trainer.stdout.readline()))
  os.kill(trainer.pid, signal.SIGKILL)
  trainer.wait()
  trainer.stdout.close()
  _, alive = psutil.wait_procs([worker], timeout=15.0)  # its own alarm: 1 s and 5 s of grace.
  assert not alive


def test_pool_refuses_senseless_settings(grader):
  with pytest.raises(ValueError, match="need workers >= 1, timeout_s > 0, got 0"):
    WorkerPool(grader, workers=0)
