"""Each tracker for real, in its offline mode: what it stored is read back by its own means.

They need packages that are not among those of the tests: `make test-trackers` installs them beside.
"""

import importlib.util
import json
import pathlib
import struct
import warnings

import fake_run
import pytest
from rich.console import Console

from grpo_jax.run_folder import console, loggers
from grpo_jax.run_folder.sinks import tracking

pytestmark = [
  pytest.mark.slow,
  pytest.mark.trackers,
  pytest.mark.timeout(300),
  pytest.mark.filterwarnings("default"),  # of other people's packages.
]
SECRET = "hunter2-hunter2-hunter2"


def needs(name):
  reason = f"{name} is not installed: `make test-trackers` installs it"
  return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=reason)


@pytest.fixture
def run(tmp_path, monkeypatch, noticed):
  """Returns a function that records a run, killed and resumed, and gives what was warned of."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("MY_TOKEN", SECRET)
  monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported.
  monkeypatch.setattr("sys.argv", ["grpo-jax", f"--config.x={SECRET}"])

  def recorded(name, **settings):
    folder = tmp_path / "my_run"
    folder.mkdir()
    config = {"loss": {"clip_high": 0.28}, "seed": 7, "sinks": {"api_key": SECRET}}
    (folder / "config.json").write_text(json.dumps(config))
    for start, end, total in ((0, 4, 12), (2, 6, 12)):  # steps 2 and 3 are recorded twice.
      logger = loggers.make(
        folder,
        start_step=start,
        decode=fake_run.decode,
        sinks=("jsonl", {"name": name, **settings}),
        samples_every_steps=2,
        screen=console.TrainingScreen(Console(quiet=True)),
      )
      fake_run.write_steps(logger, start, end, total=total)
      logger.write(end, {"eval/heldout/pass@1": 0.5})
      (folder / "report.html").write_text(f"<p>{SECRET}</p>")
      logger.close()
    assert noticed == []
    leaked = [
      path.name
      for path in tmp_path.rglob("*")
      if path.is_file()
      and SECRET.encode() in path.read_bytes()
      and path not in (folder / "config.json", folder / "report.html")
    ]
    assert leaked == []
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return folder, [json.loads(line) for line in lines]

  return recorded


def memory(folder, name):
  return json.loads((folder / tracking.FOLDER / f"{name}.json").read_text())


def check_points(points, rows, *, names=("rollout/reward_mean", "train/loss")):
  """Compares {metric: [(step, value)]} with metrics.jsonl: each step once, in order."""
  for name in names:
    expected = [(row["step"], row[name]) for row in rows if name in row]
    assert [step for step, _ in points[name]] == [step for step, _ in expected] == [*range(6)]
    assert [value for _, value in points[name]] == pytest.approx([value for _, value in expected])


@needs("mlflow")
def test_mlflow(run, tmp_path):
  uri = f"sqlite:///{tmp_path}/mlflow.db"
  folder, rows = run("mlflow", tracking_uri=uri, experiment="mine")
  from mlflow import MlflowClient

  client = MlflowClient(tracking_uri=uri)
  experiment = client.get_experiment_by_name("mine")
  (stored,) = client.search_runs([experiment.experiment_id])
  assert stored.info.run_id == memory(folder, "mlflow")["run"]
  assert stored.info.run_name == "my_run" and stored.info.status == "FINISHED"
  params = stored.data.params
  assert (params["loss.clip_high"], params["seed"], params["sinks.api_key"]) == ("0.28", "7", "***")
  points = {
    name: [(m.step, m.value) for m in client.get_metric_history(stored.info.run_id, name)]
    for name in ("rollout/reward_mean", "train/loss", "eval/heldout/pass_at_1")
  }
  check_points(points, rows)
  assert [step for step, _ in points["eval/heldout/pass_at_1"]][-1] == 6
  here = [file.path for file in client.list_artifacts(stored.info.run_id)]
  assert sorted(here) == ["completions", "config.json", "report.html"]
  tables = client.list_artifacts(stored.info.run_id, "completions")
  assert [t.path for t in tables] == [f"completions/step_00000{i}.json" for i in (0, 2, 4)]
  local = client.download_artifacts(stored.info.run_id, tables[0].path, str(tmp_path))
  table = json.loads(pathlib.Path(local).read_text())
  assert table["columns"][:2] == ["step", "prompt_id"] and len(table["data"]) == 64


@needs("trackio")
def test_trackio(run, tmp_path):
  folder, rows = run("trackio", project="mine")
  import sqlite3

  from trackio import utils

  (database,) = utils.TRACKIO_DIR.glob("mine*.db")
  name = memory(folder, "trackio")["run"]
  with sqlite3.connect(database) as connection:
    found = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    ((config,),) = connection.execute("SELECT config FROM configs").fetchall()
  assert {run_name for run_name, _, _ in found} == {name} and name.startswith("my_run-")
  # The first process recorded an evaluation at 4; the second one added the rest of that step.
  assert [step for _, step, _ in found] == [0, 1, 2, 3, 4, 4, 5, 6]
  values = [(step, json.loads(metrics)) for _, step, metrics in found]
  points = {
    key: [(step, value[key]) for step, value in values if key in value]
    for key in ("rollout/reward_mean", "train/loss")
  }
  check_points(points, rows)
  assert json.loads(config)["loss"] == {"clip_high": 0.28}
  tables = [step for step, value in values if "completions" in value]
  assert tables == [0, 2, 4]
  artifacts = [path for path in utils.TRACKIO_DIR.rglob("blobs/*/*/*") if path.is_file()]
  assert [path.read_text() for path in artifacts] == ["<p>***</p>"]


def records(path):
  """Yields the records of a file in the log format of LevelDB, which wandb and swanlab write.

  A header of 7 bytes; then blocks of 32 KiB with chunks: checksum 4, length 2, kind 1, bytes.
  """
  data, at, whole = path.read_bytes(), 7, b""
  while at + 7 <= len(data):
    room = 32768 - at % 32768
    if room < 7:
      at += room
      continue
    length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
    whole += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # a whole record, or the last part of one.
      yield whole
      whole = b""


@needs("wandb")
def test_wandb(run, tmp_path):
  folder, rows = run("wandb", project="mine", mode="offline", tags=("a",))
  import wandb
  from wandb.proto import wandb_internal_pb2 as proto

  wandb.teardown()  # as at the end of a process: its service writes the last block of a file late.
  files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
  assert len(files) == 2
  history, configs, metrics, artifacts, runs = [], {}, [], [], set()
  for path in files:
    for raw in records(path):
      record = proto.Record.FromString(raw)
      kind = record.WhichOneof("record_type")
      if kind == "history":
        items = {(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}
        history.append({key: json.loads(value) for key, value in items.items()})
      elif kind == "run":
        runs.add((record.run.run_id, record.run.project, record.run.display_name, *record.run.tags))
        configs |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
      elif kind == "metric":
        metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
      elif kind == "artifact":
        artifacts.append(record.artifact.name)
      elif kind == "request" and record.request.HasField("log_artifact"):
        artifacts.append(record.request.log_artifact.artifact.name)
  number = memory(folder, "wandb")["run"]
  assert runs == {(number, "mine", "my_run", "a")}
  assert configs["loss"] == {"clip_high": 0.28} and configs["seed"] == 7
  assert ("*", "step") in metrics
  sizes = {path.parent.name: (path.stat().st_size, sum(1 for _ in records(path))) for path in files}
  steps = [row["step"] for row in history]
  assert steps == [0, 1, 2, 3, 4, 4, 5, 6], sizes
  points = {
    key: [(row["step"], row[key]) for row in history if key in row]
    for key in ("rollout/reward_mean", "train/loss")
  }
  check_points(points, rows)
  assert [row["step"] for row in history if "completions/_type" in row] == [0, 2, 4]
  assert f"report-{number}" in artifacts
  table = next((folder / "wandb").rglob("completions*.table.json"))
  assert len(json.loads(table.read_text())["data"]) == 64


@needs("swanlab")
def test_swanlab(run):
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    folder, rows = run("swanlab", project="mine", mode="offline")
  from swanlab.proto.swanlab.record.v1 import record_pb2

  files = sorted((folder / "swanlog").glob("run-*/*.swanlab"))
  assert len(files) == 2
  found = [record_pb2.Record.FromString(raw) for path in files for raw in records(path)]
  number = memory(folder, "swanlab")["run"]
  starts = [(r.start.id, r.start.project, r.start.name) for r in found if r.HasField("start")]
  assert starts == [(number, "mine", "my_run")] * 2
  points = {}
  for record in found:
    if record.HasField("scalar"):
      one = record.scalar
      points.setdefault(one.key, []).append((one.step, one.value.number))
  check_points(points, rows)
  tables = [r.media.step for r in found if r.HasField("media") and r.media.key == "completions"]
  assert tables == [0, 2, 4]
  saved = {record.save.name for record in found if record.HasField("save")}
  assert "report.html" in saved
  config = next((folder / "swanlog").glob("run-*/files/config.yaml")).read_text()
  assert "clip_high: 0.28" in config and "api_key: '***'" in config
