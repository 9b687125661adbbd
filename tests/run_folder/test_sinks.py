"""Sinks: what a run records goes to all of them, also to somebody's own."""

import csv
import json
import pathlib
import re
import sys

import fake_run
import pytest
from rich.console import Console

from grpo_jax import main
from grpo_jax.config import configuration, run_options
from grpo_jax.files.disk import WriteError
from grpo_jax.models import tiny
from grpo_jax.run_folder import console, loggers, sinks
from grpo_jax.run_folder.sinks import jsonl

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def my_sinks(tmp_path, monkeypatch):
  """The example of docs/metrics.md, as a module on the Python path."""
  text = (ROOT / "docs" / "metrics.md").read_text()
  (code,) = re.findall(r"<!-- my_sinks\.py.*?-->\n```python\n(.*?)```", text, re.DOTALL)
  folder = tmp_path / "modules"
  folder.mkdir()
  (folder / "my_sinks.py").write_text(code)
  monkeypatch.syspath_prepend(folder)
  yield
  sys.modules.pop("my_sinks", None)


def open_logs(folder, names, **options):
  screen = console.TrainingScreen(Console(quiet=True))
  return loggers.make(folder, sinks=names, screen=screen, **options)


@pytest.mark.long
def test_an_own_sink_records_a_whole_run_and_a_resumed_one(
  my_sinks, tmp_path, one_device, monkeypatch
):
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(8)]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  own = {"name": "my_sinks.Csv", "metric": "rollout/completion_tokens_mean"}
  settings = {
    "config": "configs/base.py",
    "workdir": tmp_path / "run",
    "config.model.path": tiny.write(tmp_path / "model"),
    "config.model.compute_dtype": "float32",
    "config.data.path": tmp_path / "rows.jsonl",
    "config.environments.math.workers": 1,
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.rollout.max_tokens": 64,
    "config.sampling.max_tokens": 4,
    "config.batching.row_tokens": 128,
    "config.evaluation.at_start": False,
    "config.evaluation.at_end": False,
    "config.evaluation.every_steps": 0,
    "config.learn.report_all_every_steps": 0,
    "config.learn.report_kl_every_steps": 0,
    "config.logging.sinks": ("jsonl", own),
  }
  for total in (1, 2):
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    assert main.main([*arguments, f"--config.total_steps={total}"]) == 0
  recorded = list(csv.reader((tmp_path / "run" / "metric.csv").read_text().splitlines()))
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  expected = [json.loads(line) for line in lines]
  assert [[float(x) for x in row] for row in recorded] == [
    [row["step"], row[own["metric"]]] for row in expected if own["metric"] in row
  ]
  assert [row[0] for row in recorded] == ["0", "1"]
  assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(
  "names, message",
  [
    (("console",), "must name 'jsonl'"),
    (("jsonl", "consol"), "has no module 'consol' (did you mean 'console'?)"),
    (("jsonl", "base"), "has no module 'base'"),
    (("jsonl", "console", "console"), "names 'console' twice"),
    (("jsonl", {"name": "console", "evry": 1}), "takes no 'evry'"),
    (("jsonl", "my_sinks.Csw"), "has no function 'Csw' (did you mean 'Csv'?)"),
    (("jsonl", "my_sinks"), "module 'my_sinks' has no function make"),
    (("jsonl", {"name": "my_sinks.Csv", "metrik": "x"}), "takes no 'metrik' (did you mean"),
    (("jsonl", "nowhere.Sink"), "no module 'nowhere'"),
    (("jsonl", "fractions.Fraction"), "must take opening"),
    (("jsonl", "tests.run_folder.test_sinks.Half"), "has no write_rollouts and no close"),
    (("jsonl", 3), "logging.sinks must be"),
    ((), "logging.sinks must be"),
    (("jsonl", {"options": 3}), "logging.sinks must be"),
  ],
)
def test_what_is_wrong_with_sinks_is_found_before_a_model_is_loaded(my_sinks, names, message):
  config = configuration.load("configs/base.py")
  config.logging.sinks = names
  found = [line for line in run_options.validate(config) if "sinks" in line]
  assert len(found) == 1 and message in found[0], found


class Half:
  """Not a sink: two methods are missing."""

  def __init__(self, opening):
    del opening

  def write(self, step, values):
    """Does nothing."""


def gives_half(opening):
  return Half(opening)


class Failing(sinks.Sink):
  """A server that stops answering at step 2."""

  calls: list = []

  def __init__(self, opening):
    self.calls.clear()

  def write(self, step, values):
    self.calls.append(step)
    if step == 2:
      raise ConnectionError("no route to host")

  def close(self):
    self.calls.append("close")


def test_a_function_that_gives_no_sink_is_refused_when_it_is_opened(tmp_path):
  with pytest.raises(sinks.SinkError, match=r"returns Half, which has no write_rollouts"):
    open_logs(tmp_path, ("jsonl", "tests.run_folder.test_sinks.gives_half"))


def test_an_own_sink_that_fails_is_reported_once_and_the_run_continues(tmp_path, noticed):
  logger = open_logs(tmp_path, ("jsonl", "tests.run_folder.test_sinks.Failing"))
  for step in range(5):
    logger.write(step, {"train/loss": 0.0})
  logger.close()
  from tests.run_folder import test_sinks  # the class as the sink's name imports it.

  assert test_sinks.Failing.calls == [0, 1, 2]
  (line,) = noticed
  assert "test_sinks.Failing' failed in write" in line and "no route to host" in line
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_full_disk_ends_the_run(tmp_path, monkeypatch):
  logger = open_logs(tmp_path, ("jsonl",))

  def full(self, step, values):
    raise WriteError("metrics.jsonl cannot be written: No space left on device")

  monkeypatch.setattr(jsonl.MetricLines, "write", full)
  with pytest.raises(WriteError):
    logger.write(0, {"train/loss": 0.0})


def test_options_of_a_sink_are_stronger_than_the_shared_ones(tmp_path):
  names = ({"name": "jsonl", "rollouts_every_steps": 2},)
  logger = open_logs(tmp_path, names, decode=fake_run.decode, rollouts_every_steps=1)
  fake_run.write_steps(logger, 0, 3)
  files = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
  assert files == ["step_000000.jsonl", "step_000002.jsonl"]
