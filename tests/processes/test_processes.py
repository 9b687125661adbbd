"""One process or several: who is the main one, and how the others learn what it decided."""

import pathlib
import signal
import sys
import types

import jax
import pytest
from ml_collections import ConfigDict

import grpo_jax
from grpo_jax import interrupts, main, processes, report
from grpo_jax.config import configuration
from grpo_jax.models import export, transformer
from grpo_jax.processes import watchdog
from grpo_jax.run_folder import (
  checkpoint_errors,
  checkpointing,
  earlier_run,
  loggers,
  notices,
  shared_folder,
)
from tests import several, side_by_side
from tests.models import tiny

OF_SEVERAL = """
import sys
import jax
from grpo_jax import processes
from grpo_jax.processes import failures

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
assert processes.exchange(index, what="numbers") == [0, 1]
failures.REACH_S = 0.2
try:
  processes.exchange(index, what=f"place {index}")
except processes.PartedError as error:
  assert f"is at 'place {1 - index}', this process at 'place {index}'" in str(error), error
else:
  raise AssertionError("the processes have not noticed")
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


def test_a_signal_that_came_before_the_processes_met_is_reported_to_the_others(monkeypatch):
  reported = []
  current = types.SimpleNamespace(
    on_stop=lambda function: None,
    publish_stop=reported.append,
    end_at_once=reported.append,
    flag=None,
  )
  monkeypatch.setattr(watchdog, "current", current)
  with interrupts.Flag() as stop:
    stop.raise_for(signal.SIGTERM)
    with processes.watching(stop):
      assert reported == [signal.SIGTERM]


@pytest.mark.processes
def test_two_processes_agree_without_a_backend(tmp_path):
  started = several.start_python(
    lambda address, index: ["-c", OF_SEVERAL, address, index], tmp_path / "worker"
  )
  started.succeed(120)
  assert "waited" not in started.text(0)
  missing = "waited 0.2 s for process 0 of 2, which decides (grpo_jax/broadcast/2)"
  assert missing in started.text(1).splitlines()


# --- process 1 of 2 ---


@pytest.fixture
def second(monkeypatch):
  """This process is process 1 of 2; process 0 has sent "runs/shared"."""
  side_by_side.pretend(monkeypatch, 1)
  monkeypatch.setattr(
    processes, "broadcast", lambda value, **_: "runs/shared" if value == "" else value
  )
  monkeypatch.setattr(processes.Channel, "exchange", lambda _, value, **__: [value, value])


def write_config(folder):
  configuration.write(ConfigDict({"seed": 1}), folder / "config.json")


def write_export(folder):
  config = tiny.config(vocab_size=16, num_layers=1)
  params = transformer.init(rng=jax.random.key(0), config=config)
  assert export.to_huggingface(params, config, folder / "export") == folder / "export"


def write_logs(folder):
  logger = loggers.make(folder / "logs")
  logger.write(0, {"train/loss": 0.5})
  logger.close()


def write_report(folder):
  report.write(folder)


def set_aside(folder):
  (folder / "export").mkdir()
  assert earlier_run.set_aside(folder) is None
  (folder / "export").rmdir()


def commit_checkpoint(folder):
  with checkpointing.open(folder) as checkpoints:
    checkpoints._complete(1, {})


WRITERS = [write_config, write_export, write_logs, write_report, set_aside, commit_checkpoint]


@pytest.mark.long
@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_another_process_than_the_main_one_writes_and_prints_nothing(
  second, tmp_path, capfd, write
):
  with notices.for_program():
    write(tmp_path)
  assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_the_program_takes_the_run_folder_of_the_main_process_and_claims_nothing(
  second, tmp_path, monkeypatch, capfd
):
  calls = []
  train = types.ModuleType("grpo_jax.train")
  train.validate = lambda config: []
  train.train = lambda config, workdir, *, stop: calls.append(workdir)
  monkeypatch.setattr(processes, "exchange", lambda value, **_: [value] * 2)
  monkeypatch.setitem(sys.modules, "grpo_jax.train", train)
  monkeypatch.setattr(grpo_jax, "train", train, raising=False)
  monkeypatch.setattr(shared_folder, "check", lambda *_, **__: None)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "some.py").write_text(
    "from ml_collections import ConfigDict\ndef get_config():\n  return ConfigDict({'seed': 1})\n"
  )
  assert main.main(["--config=some.py"]) == 0
  assert calls == [pathlib.Path("runs/shared")]
  assert [path.name for path in tmp_path.iterdir()] == ["some.py"]
  assert capfd.readouterr() == ("", "")


def test_what_ends_another_process_names_it(second, capfd):
  main.report_failure(checkpoint_errors.CheckpointError("the disk is full"), "the same command")
  assert capfd.readouterr() == ("", "process 1 of 2: error: the disk is full\n")
  main.report_failure(processes.OtherProcessError("process 0 of 2 (h0): the disk is full"))
  assert capfd.readouterr() == ("", "")


def test_what_the_main_process_prints_for_all_is_not_printed_again(second, monkeypatch, capfd):
  of_both = checkpoint_errors.CheckpointError("saving step 2 failed: the disk is full")
  of_both.__cause__ = processes.of_all(checkpoint_errors.CheckpointError("the disk is full"))
  main.report_failure(of_both)
  monkeypatch.setattr(processes.Channel, "exchange", lambda _, value, **__: ["Monday", value])
  with pytest.raises(processes.DisagreementError) as differing:
    processes.agree("Tuesday", what="the day")
  main.report_failure(differing.value)
  assert capfd.readouterr() == ("", "")
