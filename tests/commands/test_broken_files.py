"""Files of a run that are broken in many ways: reading them fails with a message, if at all."""

import json
import random

import fake_run
import numpy as np
import pytest

from grpo_jax import report
from grpo_jax.building import named_code, stored
from grpo_jax.commands import compare
from grpo_jax.errors import ExpectedFailure
from grpo_jax.report import run_data
from grpo_jax.run_folder import loggers
from tests import stored_runs

HUGE = 10**400
DEEP = json.loads("[" * 150 + "]" * 150)
WHOLE = {
  "nested too deeply": b"[" * 100_000,
  "nested deeply": b'{"a":' * 900 + b"1" + b"}" * 900,
  "empty": b"",
  "binary": bytes(range(256)),
  "UTF-16": '{"a": 1}'.encode("utf-16"),
  "a list": b"[]",
  "an empty object": b"{}",
  "null": b"null",
}
VALUES = (None, True, -1, HUGE, float("nan"), "x", "\ud800", "\x1b[2J", [], [1], {}, {"a": 1}, DEEP)
CHECKPOINT = "checkpoints/step_00000002"


def compared(folder):
  runs = [run_data.load(folder)] * 2
  return compare.compare(runs, every_metric=True), report.render_comparison(runs)


READERS = {  # what commands read of a file.
  "config.json": (
    report.write,
    compared,
    lambda run: stored.find(f"{run}:best"),
    named_code.config_to_run,
  ),
  "metrics.jsonl": (report.write, compared),
  "rollouts/step_000002.jsonl": (report.write,),
  f"{CHECKPOINT}/manifest.json": (lambda run: stored.find(str(run)),),
  f"{CHECKPOINT}/info.json": (lambda run: stored.find(f"{run}:best"),),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with two checkpoints and three steps of few metrics."""
  folder = stored_runs.write(tmp_path_factory.mktemp("runs") / "run", {1: 0.5, 2: 0.25})
  logger = loggers.make(folder, total_steps=3, decode=fake_run.decode, sinks=("jsonl", "console"))
  for step in range(3):
    group = fake_run.make_group(np.random.default_rng(step), step, 0, 0.5, size=2)
    noise = [[rollout.behavior_logprobs for rollout in group.rollouts]]
    logger.write_rollouts(step, [group], fake_run.advantages_of([group]), noise)
    lost = {"signal/lost_share": 1.0, "signal/lost/equal_rewards": 8.0}
    times = {"time/step_s": 3.0, "time/sample_s": 2.0, "rollout/errors/timeout": 1.0}
    logger.write(step, {"weight_version": step, "rollout/reward_mean": 0.5, **lost, **times})
  logger.close()
  return folder


def places(value, path=()):
  yield path
  inner = value.items() if isinstance(value, dict) else ()
  for key, each in enumerate(value[:2]) if isinstance(value, list) else inner:
    yield from places(each, (*path, key))


def changed(line, draw):
  """Returns a line of JSON with another value, or none, at one place."""
  value = json.loads(line)
  *path, last = draw.choice([each for each in places(value) if each])
  inside = value
  for key in path:
    inside = inside[key]
  if draw.random() < 0.3:
    del inside[last]
  else:
    inside[last] = draw.choice(VALUES)
  return json.dumps(value).encode()


def contents(content, name, draw, count):
  """Yields broken contents of a file: the whole of it, or one of its lines."""
  lines = content.splitlines() if name.endswith(".jsonl") else [content]
  number = draw.randrange(len(lines))
  put = lambda line: b"\n".join([*lines[:number], line, *lines[number + 1 :]])
  yield content[: len(content) // 2]
  yield from WHOLE.values()
  yield from map(put, WHOLE.values() if len(lines) > 1 else ())
  for _ in range(count):
    yield put(changed(lines[number], draw))


def fault(read, run):
  """Reads a file; returns what is wrong with the failure, or ""."""
  try:
    read(run)
  except ExpectedFailure as error:
    return "" if len(str(error).splitlines()) == 1 else f"several lines: {error}"
  except Exception as error:
    return f"{type(error).__name__}: {error!s:.200}"
  return ""


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_reading_fails_with_a_message(run, name):
  file, draw = run / name, random.Random(3)
  content, faults = file.read_bytes(), []
  try:
    for broken in contents(content, name, draw, 12):
      file.write_bytes(broken)
      faults += [(fault(read, run), broken[:300]) for read in READERS[name]]
    file.unlink()
    for make in (file.mkdir, lambda: file.symlink_to(file.name), lambda: file.symlink_to("gone")):
      make()
      faults += [(fault(read, run), "not a file") for read in READERS[name]]
      file.rmdir() if file.is_dir() else file.unlink()
    faults += [(fault(read, run), "missing") for read in READERS[name]]
  finally:
    file.write_bytes(content)
  assert [each for each in faults if each[0]] == []
