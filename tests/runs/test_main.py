"""The program: exit codes, messages, run folders, signals."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

import grpo_jax
from grpo_jax import interrupts, main
from grpo_jax.config.configuration import ConfigError
from grpo_jax.models.errors import MissingModel
from grpo_jax.run_folder import folder_lock
from tests.engines.processes import eventually
from tests.own_process import noticing

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from ml_collections import ConfigDict
def get_config():
  return ConfigDict({"seed": 1, "loss": {"clip_low": 0.2}})
"""


@pytest.fixture
def path(tmp_path):
  (tmp_path / "some.py").write_text(CONFIG)
  return str(tmp_path / "some.py")


@pytest.fixture
def runs(monkeypatch):
  return substitute(monkeypatch)


def substitute(patch):
  """Puts a tiny real module that keeps what it was called with in place of `grpo_jax.train`."""
  calls = []
  module = types.ModuleType("grpo_jax.train")
  module.calls = calls
  module.validate = lambda config: ["seed must be even"] if config.seed % 2 == 0 else []
  module.train = lambda config, workdir, *, stop: calls.append((config.seed, workdir, bool(stop)))
  patch.setitem(sys.modules, "grpo_jax.train", module)
  patch.setattr(grpo_jax, "train", module, raising=False)
  return module


def test_valid_command_trains_with_the_overrides_in_the_named_folder(path, runs, tmp_path, capsys):
  workdir = tmp_path / "a" / "run"
  assert main.main([f"--config={path}", f"--workdir={workdir}", "--config.seed=7"]) == 0
  assert runs.calls == [(7, workdir, False)]
  assert workdir.is_dir()
  assert f"run folder: {workdir}" in capsys.readouterr().out


def test_without_workdir_every_run_gets_a_folder_of_its_own(path, runs, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for _ in range(3):
    assert main.main([f"--config={path}"]) == 0
  folders = {workdir for _, workdir, _ in runs.calls}
  assert len(folders) == 3
  assert all(folder.is_dir() and folder.name.startswith("some-") for folder in folders)


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--config.loss.clp_low=0.3"], "did you mean 'loss.clip_low'"),
    (["--config.seed=4"], "the configuration cannot work:\n  - seed must be even"),
    (["--wrkdir=x"], "did you mean --workdir"),
    (["--workdir=/dev/null/x"], "cannot use --workdir=/dev/null/x: Not a directory"),
  ],
)
def test_mistake_ends_with_code_2_and_one_message(path, runs, arguments, message, capsys):
  assert main.main([f"--config={path}", *arguments]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ") and message in error
  assert "Traceback" not in error
  assert runs.calls == []


def test_mistake_found_by_training_is_a_message_too(path, runs, tmp_path, capsys):
  def refuse(config, workdir, *, stop):
    raise ConfigError("this folder belongs to another configuration")

  runs.train = refuse
  assert main.main([f"--config={path}", f"--workdir={tmp_path / 'w'}"]) == 2
  assert capsys.readouterr().err == "error: this folder belongs to another configuration\n"


def test_a_model_that_cannot_be_read_is_wrong_use_and_nothing_to_continue(
  path, runs, tmp_path, capsys
):
  def refuse(config, workdir, *, stop):
    raise MissingModel("there is no tokenizer in tiny")

  runs.train = refuse
  assert main.main([f"--config={path}", f"--workdir={tmp_path / 'w'}"]) == 2
  assert capsys.readouterr().err == "error: there is no tokenizer in tiny\n"
  assert not (tmp_path / "w").exists()


def test_folder_in_use_is_refused_and_free_again_afterwards(path, runs, tmp_path, capsys):
  with folder_lock.claimed(tmp_path / "w"):
    assert main.main([f"--config={path}", f"--workdir={tmp_path / 'w'}"]) == 2
    assert f"in use by another run (process {os.getpid()})" in capsys.readouterr().err
  assert main.main([f"--config={path}", f"--workdir={tmp_path / 'w'}"]) == 0


def test_help_is_not_a_mistake(capsys):
  assert main.main(["--help"]) == 0
  assert "Exit codes" in capsys.readouterr().out


def run_program(*arguments, cwd=ROOT):
  environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"}
  return subprocess.run(
    [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
  )


@pytest.mark.long
def test_program_says_what_is_mistyped_without_a_trace(path):
  done = run_program("-m", "grpo_jax.main", f"--config={path}", "--config.loss.clp_low=0.3")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("error: --config.loss.clp_low") and "clip_low'?" in done.stderr


@pytest.mark.long
def test_mistakes_are_found_before_jax_is_imported(path):
  code = (
    "import sys; from grpo_jax import main\n"
    f"code = main.main(['--config={path}', '--config.sed=3'])\n"
    "print(code, sorted({'jax', 'orbax', 'transformers', 'flax'} & set(sys.modules)))"
  )
  assert run_program("-c", code).stdout == "2 []\n"


# --- signals ---


def raise_one(number):
  """Raises a signal while there is a flag.

  Returns its exit code, whether the handlers are back, and the first line that is logged.
  """
  before = [signal.getsignal(each) for each in interrupts.ASKING]
  with noticing() as lines, interrupts.Flag() as stop:
    assert not stop and stop.exit_code == 0
    stop.on_signal(lambda: None)
    signal.raise_signal(number)
    assert stop
    eventually(lambda: lines)
  return stop.exit_code, [signal.getsignal(each) for each in interrupts.ASKING] == before, lines[0]


@pytest.mark.long
@pytest.mark.parametrize(
  "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_first_signal_sets_the_flag_and_leaving_restores_the_handlers(number, code, own_process):
  found, are_back, line = own_process(raise_one, number)
  assert (found, are_back) == (code, True)
  assert "saving a checkpoint and ending" in line


def signalled_while(where, number, *flags):
  """Runs the program, whose training or validation gets a signal; returns code and calls."""
  with pytest.MonkeyPatch.context() as patch:
    runs = substitute(patch)
    setattr(runs, where, lambda *_, **__: signal.raise_signal(number) or [])
    return main.main(list(flags)), runs.calls


@pytest.mark.long
def test_stopped_run_reports_the_signal_and_how_to_continue(path, tmp_path, own_process):
  flags = [f"--config={path}", f"--workdir={tmp_path / 'w'}"]
  assert own_process(signalled_while, "train", signal.SIGTERM, *flags) == [143, []]
  assert f"--workdir={tmp_path / 'w'} continues" in own_process.log.read_text()


@pytest.mark.long
def test_stopped_before_the_run_begins_leaves_nothing(path, tmp_path, own_process):
  flags = [f"--config={path}", f"--workdir={tmp_path / 'w'}"]
  assert own_process(signalled_while, "validate", signal.SIGINT, *flags) == [130, []]
  assert not (tmp_path / "w").exists()
  assert own_process.log.read_text().endswith("stopped before the run began\n")


LOOP = """
import logging, sys, time
from grpo_jax import interrupts
logging.basicConfig(level=logging.INFO, format="%(message)s")
with interrupts.Flag() as stop:
  stop.on_signal(lambda: None)
  print("ready", flush=True)
  while not (stop and sys.argv[1] == "clean"):
    time.sleep(0.01)
print("checkpoint written", flush=True)
sys.exit(stop.exit_code)
"""


def start_loop(mode):
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  process = subprocess.Popen(
    [sys.executable, "-c", LOOP, mode],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "ready\n"
  return process


def test_one_ctrl_c_lets_the_loop_finish():
  with start_loop("clean") as process:
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stdout.read() == "checkpoint written\n"


def test_second_ctrl_c_ends_at_once():
  with start_loop("stubborn") as process:
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("SIGINT: saving a checkpoint")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - start < 5
    assert process.stdout.read() == ""


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows():
  code = (
    "import resource; from grpo_jax.processes import starting; files = resource.RLIMIT_NOFILE\n"
    "resource.setrlimit(files, (256, 700))\n"
    "starting.allow_open_files(); print(resource.getrlimit(files))\n"
    "starting.allow_open_files(most=300); print(resource.getrlimit(files))"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout == "(700, 700)\n(700, 700)\n"
