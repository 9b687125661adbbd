"""What processes compare before training, and what the main one records and shows of the others."""

import json
import os
import pathlib
import re
import socket

import pytest

from tests import quick_compilation, several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HOST = socket.gethostname()

# Each difference in turn, between two processes that have started no model.
DIFFERING = """
import json, pathlib, sys
import jax
address, index, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.distributed.initialize(address, num_processes=2, process_id=index)
import configs.base
from grpo_jax.building import agreements, policy_model
from grpo_jax.config import configuration
from grpo_jax.data import tokenizer
from grpo_jax import processes

def tried(name, check, *arguments):
  try:
    check(*arguments)
    found[name] = ""
  except configuration.ConfigError as error:
    found[name] = str(error)

def config(**values):
  return configuration.replaced(configs.base.get_config(), values)

found = {}
mine = folder / f"host{index}"
tried("same", agreements.check_start, config(**{"data.path": str(mine / "same.jsonl")}))
tried("option", agreements.check_start, config(**{"loss.clip_high": 0.2 + index}))
tried("stale", agreements.check_start, config(**{"data.path": str(mine / "stale.jsonl")}))
tried("missing", agreements.check_start, config(**{"data.path": str(mine / "missing.jsonl")}))
tried("model", agreements.check_model, mine / "model")
import os
os.environ.update({"JAX_ENABLE_X64": "1"} if index else {})
tried("variable", agreements.check_start, config())
found["fallback"] = policy_model._of_all("the hub is silent" if index else "")
(folder / f"found-{index}.json").write_text(json.dumps(found))
processes.barrier("end", timeout_s=60)
"""


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
  """What each of two processes reports of each difference, by its name."""
  folder = tmp_path_factory.mktemp("differing")
  for index in range(2):
    host = folder / f"host{index}"
    (host / "model").mkdir(parents=True)
    (host / "same.jsonl").write_text("{}\n")
    (host / "stale.jsonl").write_text(f"{index}\n")
    os.utime(host / "stale.jsonl", (1, 1))
    (host / "model" / "config.json").write_text("{}")
    (host / "model" / "tokenizer.json").write_text(f"[{index}]")
  (folder / "host0" / "missing.jsonl").write_text("{}\n")
  started = several.start_python(
    lambda address, index: ["-c", DIFFERING, address, index, folder], folder / "worker"
  )
  started.succeed(120)
  return [json.loads((folder / f"found-{index}.json").read_text()) for index in range(2)]


@pytest.mark.parametrize(
  ("name", "line"),
  [
    ("option", "loss.clip_high: 0.2 on process 0 (HOST); 1.2 on process 1 (HOST)"),
    ("stale", "data.path: 2 bytes, digest X on process 0 (HOST); 2 bytes, digest X on process 1"),
    ("missing", r'data.path: 3 bytes, digest X on process 0 (HOST); "\S+" on process 1'),
    ("model", "model.path: tokenizer.json: 3 bytes, digest X on process 0 (HOST); 3 bytes, digest"),
    ("variable", "environment variable JAX_ENABLE_X64: absent on process 0 (HOST); '1' on process"),
  ],
)
def test_all_processes_report_the_same_difference_with_its_values_and_processes(
  differences, name, line
):
  first, *lines, _ = differences[0][name].splitlines()
  assert first == "the processes of this run differ in what must be equal on all hosts:"
  pattern = (
    re.escape(line).replace(r"\\S\+", r"\S+").replace("X", "[0-9a-f]{16}", line.count("digest X"))
  )
  assert any(re.search(pattern.replace("HOST", re.escape(HOST)), each) for each in lines), lines
  assert differences[1][name] == differences[0][name]


def test_equal_files_at_other_places_do_not_differ(differences):
  assert [each["same"] for each in differences] == ["", ""]


def test_all_take_the_fallback_of_the_model_if_one_does(differences):
  assert [each["fallback"] for each in differences] == ["the hub is silent"] * 2


REWARDS = """
import logging
import time
from grpo_jax import processes

def late(prompt, completion, info):
  if processes.index() == 1:
    time.sleep(0.5)
    logging.getLogger("my_rewards").warning("the judge is slow")
  return sum(letter in "aeiou" for letter in completion[:8]) / 8
"""


@pytest.fixture(scope="module")
def input_of_runs(tmp_path_factory):
  """The config of the runs, and the folder with their files."""
  folder = tmp_path_factory.mktemp("records")
  config = several.write_input(folder / "input")
  (folder / "late_rewards.py").write_text(REWARDS)
  return config, folder


@pytest.fixture(scope="module")
def straggling(input_of_runs):
  """A run whose process 1 has its own copy of the data, and a grader that sleeps."""
  config, folder = input_of_runs
  copy = folder / "copy" / "rows.jsonl"
  copy.parent.mkdir()
  copy.write_bytes((folder / "input" / "rows.jsonl").read_bytes())
  arguments = [
    "--config.total_steps=5",
    "--config.evaluation.at_end=False",
    "--config.evaluation.every_steps=0",
    "--config.checkpoint.every_steps=0",
    "--config.environments.own.path=late_rewards.late",
    "--config.logging.samples_every_steps=0",
  ]
  run = several.start(
    config,
    folder / "run",
    arguments,
    devices=1,
    own={1: [f"--config.data.path={copy}"]},
    environment={
      "PYTHONPATH": f"{several.PYTHONPATH}:{folder}",
      "XLA_FLAGS": quick_compilation.FLAGS,
    },
  )
  codes = run.wait()
  assert codes == [0, 0], run.text(0) + run.text(1)
  return folder / "run", run


def test_a_straggler_that_sleeps_is_named_once(straggling):
  _, run = straggling
  found = [line for line in run.text(0).splitlines() if "is slower than the others" in line]
  assert len(found) == 1, run.text(0)
  assert re.fullmatch(
    rf"warning: process 1 of 2 \({re.escape(HOST)}\) is slower than the others for 3 steps: in step"
    r" [234] it worked [\d.]+ s, the median of the others [\d.]+ s \(\+\d+%\); most of it in"
    r" sampling and scoring completions: [\d.]+ s, the others [\d.]+ s",
    found[0],
  )


def test_the_metrics_have_times_and_memory_of_each_process(straggling):
  workdir, _ = straggling
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  for row in rows[1:]:
    assert row["hosts/processes"] == 2.0 and row["hosts/slowest"] == 1.0
    slow, fast = (row[f"hosts/process/00{number}/sample_s"] for number in (1, 0))
    assert slow == row["hosts/sample_s_max"] > 0.5
    assert fast == row["hosts/sample_s_min"] < slow - 0.2
    assert row["hosts/process/000/wait_s"] > 0.2
    assert row["hosts/process/001/peak_rss_gib"] > 0.1


def test_one_screen_shows_a_warning_of_another_process_once(straggling):
  workdir, run = straggling
  lines = run.text(0).splitlines()
  said = [line for line in lines if "the judge is slow" in line]
  assert said == [f"warning: process 1 of 2 ({HOST}): my_rewards: the judge is slow"]
  assert not [line for line in run.text(1).splitlines() if "[Gloo]" not in line]
  log = (workdir / "processes" / "001.log").read_text()
  assert log.startswith(f"--- process 1 of 2 on {HOST}, ")
  assert log.count("the judge is slow") > 1


def test_the_folder_is_that_of_one_run(straggling):
  workdir, run = straggling
  assert sum("report: " in line for line in run.text(0).splitlines()) == 1
  assert "devices: 2 x cpu on 2 processes" in run.text(0)
  rollouts = (workdir / "rollouts" / "step_000000.jsonl").read_text().splitlines()
  assert len(rollouts) == 16
  assert len(list((workdir / "tensorboard").iterdir())) == 1
  assert json.loads((workdir / "config.json").read_text())["distributed"]["processes"] == 2


def test_a_stale_file_ends_all_before_training_with_one_message(input_of_runs):
  config, folder = input_of_runs
  stale = folder / "stale" / "rows.jsonl"
  stale.parent.mkdir()
  stale.write_bytes((folder / "input" / "rows.jsonl").read_bytes().replace(b"3 + 3", b"3 + 4"))
  run = several.start(
    config, folder / "stopped", devices=1, own={1: [f"--config.data.path={stale}"]}
  )
  assert run.wait() == [2, 2], run.text(0) + run.text(1)
  message = run.text(0)
  assert message.count("error: ") == 1
  assert "differ in what must be equal on all hosts" in message
  assert "data.path: " in message and "digest" in message
  assert not (folder / "stopped" / "metrics.jsonl").exists()
  assert "Traceback" not in message + run.text(1)


def test_nothing_of_this_is_read_with_one_process():
  text = pathlib.Path(several.ROOT / "grpo_jax" / "building" / "agreements.py").read_text()
  assert text.count("if processes.count() == 1:\n    return\n") == text.count("\ndef check_")
