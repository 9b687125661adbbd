"""Trackers, without any of their packages: one record a step, resumes, failures, credentials."""

import json
import math
import threading
import time

import fake_run
import numpy as np
import pytest
from rich.console import Console

from grpo_jax.config import configuration, run_options
from grpo_jax.run_folder import console, loggers, sinks
from grpo_jax.run_folder.options import WandbOptions
from grpo_jax.run_folder.sinks import background, masking, tracking
from grpo_jax.run_folder.sinks.base import Opening, StepRollouts
from tests import side_by_side


class Recorder(tracking.Tracker):
  """A tracker that keeps what it is given, and fails where a test says so."""

  def __init__(self):
    self.calls: list = []
    self.fault = {}  # function by method.

  def _do(self, method, *arguments):
    self.fault.get(method, lambda: None)()
    self.calls.append((method, *arguments))

  def open(self, start):
    self._do("open", start.run, start.config)
    return start.run or "r1"

  def log(self, step, values, table):
    self._do("log", step, dict(values), table)

  def save(self, report):
    self._do("save", report.read_text())

  def close(self):
    self._do("close")

  def logged(self):
    return [(call[1], sorted(call[2])) for call in self.calls if call[0] == "log"]


def opening(folder, start_step=0):
  folder.mkdir(exist_ok=True)
  return Opening(folder, start_step, None, console.TrainingScreen(Console(quiet=True)), None)


def tracked(folder, recorder, start_step=0, *, place="a", timeout_s=20.0, **options):
  return tracking.Tracked(
    *("mine", opening(folder, start_step), recorder),
    place={"project": place},
    timeout_s=timeout_s,
    **options,
  )


def steps(sink, first, end, *, evaluated=()):
  """Writes steps as the loop does: an evaluation, then the update, then the rollouts."""
  groups = [fake_run.make_group(np.random.default_rng(0), 0, 0, 0.5)]
  for step in range(first, end):
    if step in evaluated:
      sink.write(step, {"eval/heldout/accuracy": 0.5})
    sink.write(step, {"weight_version": float(step), "train/loss": math.nan, "train/entropy": 1.0})
    sink.write_rollouts(StepRollouts(step, groups, fake_run.advantages_of(groups)))


UPDATE = ["train/entropy", "weight_version"]


def test_a_step_is_one_record_whatever_the_number_of_its_writes(tmp_path):
  recorder = Recorder()
  (tmp_path / "config.json").write_text(json.dumps({"loss": {"clip_high": 0.28}}))
  sink = tracked(tmp_path, recorder, samples_every_steps=2)
  steps(sink, 0, 3, evaluated=[1])
  sink.write(3, {"eval/heldout/accuracy": 0.75})  # at the end: an evaluation alone.
  (tmp_path / "report.html").write_text("<html>")
  sink.close()
  assert recorder.calls[0] == ("open", None, {"loss": {"clip_high": 0.28}})
  assert recorder.logged() == [
    *((0, UPDATE), (1, ["eval/heldout/accuracy", *UPDATE]), (2, UPDATE)),
    (3, ["eval/heldout/accuracy"]),
  ]
  assert [call[3] is not None for call in recorder.calls if call[0] == "log"] == [1, 0, 1, 0]
  assert recorder.calls[-2:] == [("save", "<html>"), ("close",)]
  table = recorder.calls[1][3]
  assert len(table.rows) == 8 and {len(row) for row in table.rows} == {len(table.columns)}
  assert [name for name in ("completion", "reward", "advantage") if name not in table.columns] == []


def test_a_resumed_run_continues_the_run_and_repeats_nothing(tmp_path):
  first, second, third = Recorder(), Recorder(), Recorder()
  killed = tracked(tmp_path, first)
  steps(killed, 0, 7)
  deadline = time.monotonic() + 20
  while len(first.logged()) < 7 and time.monotonic() < deadline:  # it is never closed.
    time.sleep(0.01)
  sink = tracked(tmp_path, second, start_step=5)
  steps(sink, 5, 9)
  sink.write(9, {"eval/heldout/accuracy": 0.5})
  sink.close()
  assert second.calls[0][:2] == ("open", "r1")
  assert [step for step, _ in second.logged()] == [7, 8, 9]
  # With more steps, the run writes its last evaluation again, and the update of that step.
  sink = tracked(tmp_path, third, start_step=9)
  steps(sink, 9, 11, evaluated=[9])
  sink.close()
  assert third.logged() == [(9, UPDATE), (10, UPDATE)]


@pytest.mark.parametrize("start_step, place", [(0, "a"), (5, "b")])
def test_a_run_from_step_0_or_in_another_project_is_a_new_one(tmp_path, start_step, place):
  first, second = Recorder(), Recorder()
  sink = tracked(tmp_path, first)
  steps(sink, 0, 7)
  sink.close()
  sink = tracked(tmp_path, second, start_step=start_step, place=place)
  steps(sink, start_step, 7)
  sink.close()
  assert second.calls[0][1] is None
  assert len(second.logged()) == 7 - start_step


def wait_for_ever():
  threading.Event().wait()


def fail():
  raise ConnectionError("no route to https://me:hunter2hunter2@host?api_key=abcdef")


def leave():
  raise SystemExit(1)


@pytest.mark.long
@pytest.mark.parametrize("method", ["open", "log", "save", "close"])
@pytest.mark.parametrize("fault", [fail, wait_for_ever, leave])
def test_a_tracker_that_fails_or_hangs_warns_once_and_takes_no_time(
  tmp_path, noticed, method, fault
):
  recorder = Recorder()
  recorder.fault[method] = fault
  (tmp_path / "report.html").write_text("<html>")
  limit = 0.6
  sink = tracked(tmp_path, recorder, timeout_s=limit)
  slowest = 0.0
  for step in range(20):
    began = time.monotonic()
    steps(sink, step, step + 1)
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.02)
  began = time.monotonic()
  sink.close()
  closing = time.monotonic() - began
  sink.write(99, {"train/loss": 0.0})  # after the end: nobody hears it.
  assert slowest < limit, "a step waited for the tracker"
  assert closing < 10 * limit
  (line,) = noticed
  expected = {
    fail: "ConnectionError: no route to https://***@host?api_key=***",
    leave: "SystemExit: 1",
    wait_for_ever: "within 0.6 s",
  }[fault]
  assert line.startswith("sink 'mine' ") and expected in line, line
  assert "hunter2" not in line


def test_a_tracker_that_is_slower_than_the_run_leaves_records_out(noticed):
  gate, done = threading.Event(), []
  worker = background.Worker("slow", room=3, timeout_s=20.0)
  worker.submit("the first", gate.wait)
  time.sleep(0.05)
  for number in range(10):
    worker.submit("a record", lambda n=number: done.append(n))
  gate.set()
  worker.close("the end", lambda: done.append("end"))
  assert done == [0, 1, 2, "end"]
  (line,) = noticed
  assert "slower than the run: 3 records wait" in line


class Hanging(sinks.Sink):
  """A user's own sink that does not come back."""

  def __init__(self, opening):
    del opening

  def write(self, step, values):
    wait_for_ever()


def test_an_own_sink_that_hangs_does_not_stop_a_run(tmp_path, noticed):
  logger = loggers.make(
    tmp_path,
    sinks=("jsonl", "tests.run_folder.test_trackers.Hanging"),
    timeout_s=0.2,
    screen=console.TrainingScreen(Console(quiet=True)),
  )
  began = time.monotonic()
  for step in range(5):
    logger.write(step, {"train/loss": 0.0})
  logger.close()
  assert time.monotonic() - began < 5
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
  (line,) = noticed
  assert "did not finish write within 0.2 s" in line


def test_only_the_main_process_opens_trackers(tmp_path, monkeypatch):
  side_by_side.pretend(monkeypatch, 1)
  logger = loggers.make(tmp_path / "run", sinks=("jsonl", "wandb"), wandb={"project": "x"})
  logger.write(0, {"train/loss": 0.0})
  logger.close()
  assert not (tmp_path / "run").exists()


def test_credentials_are_in_nothing_that_leaves_the_machine(tmp_path, monkeypatch):
  monkeypatch.setenv("MY_SERVICE_TOKEN", "tok-of-the-environment")
  monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-word-that-stays")
  secrets = [f"s3cr3t-number-{i}" for i in range(7)]
  config = {
    "engine": {
      "addresses": [f"http://me:{secrets[0]}@host:1"],
      "sglang": {
        "environment": {"HF_TOKEN": secrets[1], "MODE": "a-word-that-stays"},
        "arguments": [f"--api-key={secrets[2]}", "--admin-api-key", secrets[3], "--dtype=float32"],
      },
    },
    "environments": {"mine": {"password": secrets[4], "path": f"http://x/?token={secrets[5]}&a=1"}},
    "sinks": ["jsonl", {"name": "my.Sink", "api_key": secrets[6]}],
    "note": "it is tok-of-the-environment here",
    "data": {"input_key": "question", "max_tokens": 64, "stop": ["a-word-that-stays"]},
    "model": {"path": "TOKENIZERS"},
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  (tmp_path / "report.html").write_text(f"<p>{json.dumps(config)}</p> a-word-that-stays")
  recorder = Recorder()
  tracked(tmp_path, recorder).close()
  sent = repr(recorder.calls)
  assert [secret for secret in [*secrets, "tok-of-the-environment"] if secret in sent] == []
  shown = recorder.calls[0][2]
  assert shown["data"] == config["data"] and shown["model"] == config["model"]
  assert shown["engine"]["sglang"]["environment"]["MODE"] == "a-word-that-stays"
  assert shown["engine"]["sglang"]["arguments"][3] == "--dtype=float32"
  assert recorder.calls[1][1].count("a-word-that-stays") == 3
  assert masking.read_config(tmp_path / "nowhere").config == {}


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"logging.sinks": ("jsonl", "wandb")}, "not installed: pip install wandb"),
    ({"logging.sinks": ("jsonl", "mlflow")}, "not installed: pip install mlflow"),
    ({"logging.sinks": ("jsonl", "trackio")}, "not installed: pip install trackio"),
    ({"logging.sinks": ("jsonl", {"name": "swanlab"})}, "not installed: pip install swanlab"),
    ({"logging.sinks": ("jsonl", "wandbb")}, "did you mean 'wandb'?"),
    ({"logging.sinks": ("jsonl", "tracking")}, "has no module 'tracking'"),
    ({"logging.wandb.project": "x"}, "logging.wandb.project='x' has no effect: add 'wandb'"),
    ({"logging.wandb.tags": ("x",)}, "logging.wandb.tags=('x',) has no effect"),
    ({"logging.wandb.mode": "of"}, "logging.wandb.mode must be"),
    ({"logging.timeout_s": 0.0}, "logging.timeout_s must be"),
  ],
)
def test_mistakes_are_found_before_a_model_is_loaded(settings, message, monkeypatch):
  monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
  config = configuration.replaced(configuration.load("configs/base.py"), settings)
  found = [line for line in run_options.validate(config) if "logging" in line]
  assert len(found) == 1 and message in found[0], found


def test_a_tracker_that_is_installed_is_not_refused(monkeypatch):
  monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: object())
  assert list(sinks.problems(("jsonl", "wandb"), WandbOptions(project="x"))) == []
  wrong = ("jsonl", {"name": "wandb", "projekt": "x"})
  assert "takes no 'projekt' (did you mean 'project'?)" in next(iter(sinks.problems(wrong)))
