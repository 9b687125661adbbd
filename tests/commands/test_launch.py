"""`grpo-jax launch`: processes of one run on this machine."""

import sys

import pytest

from grpo_jax.commands import launch
from grpo_jax.commands.arguments import HelpWanted, WrongUse

TRAINING = """
import os, signal, sys, time
index = int(next(a for a in sys.argv if "distributed.index" in a).partition("=")[2])
print("here", flush=True)
if "--secret" in sys.argv:
  print(os.environ["GRPO_JAX_RUN_SECRET"], *sys.argv[1:], flush=True)
if "--dies" in sys.argv and index == 1:
  sys.exit(3)
if "--killed" in sys.argv and index == 1:
  os.kill(os.getpid(), 9)
if "--signal" in sys.argv:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  if index == 0:
    os.kill(os.getppid(), signal.SIGTERM)
if {"--dies", "--killed", "--signal"} & set(sys.argv):
  time.sleep(60)
"""


@pytest.fixture
def training(tmp_path, monkeypatch):
  """A program takes the place of the training."""
  program = tmp_path / "training.py"
  program.write_text(TRAINING)
  python = tmp_path / "python"
  python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
  python.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(python))
  monkeypatch.setattr(launch, "LEAVE_S", 1.0)


@pytest.mark.long
def test_the_exit_code_is_that_of_the_first_failure_and_nothing_is_left(training):
  assert launch.main(["--processes=2", "--"]) == 0
  for argument, code in (("--dies", 3), ("--killed", 137), ("--signal", 143)):
    options = launch.parse(["--processes=2", "--devices=1", "--", argument])
    with launch.Processes(options) as running:
      assert running.wait() == code
    assert all(process.poll() is not None for process in running._processes)


def test_lines_of_other_processes_have_their_number(training, capfd):
  launch.main(["--processes=3"])
  output, errors = capfd.readouterr()
  assert output == "here\n" and sorted(errors.splitlines()) == ["[1] here", "[2] here"]


def test_the_processes_of_each_start_share_a_new_secret_that_no_argument_has(training, capfd):
  secrets = set()
  for _ in range(2):
    launch.main(["--processes=2", "--", "--secret"])
    output, errors = capfd.readouterr()
    own, first = output.splitlines()[1].split(maxsplit=1)
    other, second = errors.splitlines()[1].removeprefix("[1] ").split(maxsplit=1)
    assert own == other and len(own) == 64 and own not in first + second
    secrets.add(own)
  assert len(secrets) == 2


def test_devices_are_simulated_or_divided():
  assert launch.variables(1, 2, 4, {}) == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
  assert launch.variables(0, 2, None, {}) == {}
  four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
  assert launch.variables(1, 2, None, four) == {"CUDA_VISIBLE_DEVICES": "2,3"}
  with pytest.raises(WrongUse, match="4 GPUs .* cannot be divided among 3 processes"):
    launch.variables(0, 3, None, four)


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ([], "--processes=N is missing"),
    (["--processes=0"], "--processes needs a number from 1 on, got '0'"),
    (["--processes=2", "--devices=x"], "--devices needs a number"),
    (["--processes=2", "--", "--config.distributed.index=1"], "is set by launch itself"),
  ],
)
def test_wrong_use_is_named(words, message):
  with pytest.raises(WrongUse, match=message):
    launch.parse(words)


def test_help_and_the_arguments_of_the_training():
  with pytest.raises(HelpWanted):
    launch.parse(["--help"])
  options = launch.LaunchArguments(2, None, ("--config=x", "--config.distributed.heartbeat_s=5"))
  assert launch.parse(["--processes", "2", *options.arguments]) == options
