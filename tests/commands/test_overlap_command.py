"""`grpo-jax overlap`: what it reads from a run, what it prints, and what it refuses."""

import json

import pytest

from grpo_jax.commands import cli, overlap
from grpo_jax.planning.overlap import Times
from grpo_jax.report import data as report_data

CONFIG = {
  "mode": "online",
  "rollout": {"max_staleness": 0, "prompts_per_step": 2, "group_size": 2},
  "engine": {"name": "jax_sampler", "max_rows": 4, "sglang": {"servers": 3, "addresses": []}},
}


def write(folder, *, config=CONFIG, steps=6, rollouts=True):
  """Writes a run whose steps take 60 + 40 + 2 s, all but the first two."""
  (folder / "rollouts").mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(config))
  rows = [
    {"step": n, "time/step_s": 102.0 + 500 * (n < 2), "time/sample_s": 60.0, "time/sync_s": 2.0}
    for n in range(steps)
  ]
  rows.insert(3, {"step": 3, "eval/heldout/accuracy": 0.5})  # a line of an evaluation.
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  if rollouts:
    lines = [
      {"group": group, "rollout": i, "loss_mask": [1] * 10 + [0] * 5}
      for group in range(2)
      for i in range(2)
    ]
    for n in range(steps):
      text = "".join(json.dumps(line) + "\n" for line in lines)
      (folder / "rollouts" / f"step_{n:06d}.jsonl").write_text(text)
  return folder


def rows_printed(text):
  """Returns the cells of the lines of the table."""
  lines = [line.split() for line in text.splitlines()]
  return [line for line in lines if len(line) == 7 and line[0].isdigit()]


def test_times_and_lengths_are_those_of_the_run(tmp_path):
  run = report_data.load(write(tmp_path / "run"))
  assert overlap.times_of(run) == Times(sample=60.0, learn=40.0, sync=2.0)
  assert overlap.lengths_of(run) == [[[10, 10], [10, 10]]] * 6
  assert overlap.rows_of(run.config) == 4
  servers = {**CONFIG["engine"], "name": "sglang"}
  assert overlap.rows_of({"engine": servers}) == 12
  addresses = {"servers": 1, "addresses": ["http://a", "http://b"]}
  assert overlap.rows_of({"engine": {**servers, "sglang": addresses}}) == 8
  assert overlap.rows_of({}) is None


def test_equal_lengths_take_the_longer_of_the_two(tmp_path, capsys):
  assert cli.run(["overlap", str(write(tmp_path / "run"))]) == 0
  printed = capsys.readouterr().out
  assert "sample 60 s + learn 40 s + new weights 2 s = 102 s a step" in printed
  table = rows_printed(printed)
  assert len(table) == 7
  assert table[0] == ["1", "prompt", "False", "62", "1.65", "3%", "35%"]
  assert {tuple(row[3:]) for row in table} == {("62", "1.65", "3%", "35%")}


def test_shared_devices_are_divided(tmp_path, capsys):
  run = str(write(tmp_path / "run"))
  assert cli.run(["overlap", run, "--sampler-share=0.6"]) == 0
  printed = capsys.readouterr().out
  assert "sample 100 s, learn 100 s" in printed
  assert rows_printed(printed)[0][3:5] == ["102", "1.00"]  # work is conserved.


def test_numbers_take_the_place_of_a_run(capsys):
  words = ["--sample-s=60", "--learn-s=40", "--tokens=100", "--sigma=0", "--rows=8"]
  assert cli.run(["overlap", *words, "--prompts=4", "--group=2"]) == 0
  assert {row[3] for row in rows_printed(capsys.readouterr().out)} == {"60"}


def test_given_numbers_replace_those_of_the_run(tmp_path, capsys):
  run = str(write(tmp_path / "run", rollouts=False))
  assert cli.run(["overlap", run, "--tokens=100", "--sigma=0", "--learn-s=80"]) == 0
  printed = capsys.readouterr().out
  assert "sample 60 s + learn 80 s + new weights 2 s = 142 s" in printed
  assert "4 at a time" in printed and rows_printed(printed)[0][3] == "82"


@pytest.mark.parametrize(
  "change, message",
  [
    ({"config": {**CONFIG, "mode": "offline"}}, "mode='offline' samples nothing"),
    (
      {"config": {**CONFIG, "rollout": {"max_staleness": 2}}},
      "the times of a synchronous run are needed, and this one has rollout.max_staleness=2",
    ),
    ({"steps": 2}, "more than 2 steps with time/step_s and time/sample_s are needed"),
    ({"rollouts": False}, "has no rollouts/step_*.jsonl with the lengths of completions"),
  ],
)
def test_a_run_without_what_is_needed_is_refused(change, message, tmp_path, capsys):
  assert cli.run(["overlap", str(write(tmp_path / "run", **change))]) == cli.FAILED
  assert message in capsys.readouterr().err


@pytest.mark.parametrize(
  "words, message",
  [
    ([], "name the folder of a run, or add --sample-s, --learn-s, --tokens"),
    (["--sample-s=1", "--learn-s=1"], "or add --tokens"),
    (["--sample-s=0", "--learn-s=1", "--tokens=9"], "--sample-s=0.0 must be above 0"),
    (["--sample-s=1", "--learn-s=-1", "--tokens=9"], "--learn-s=-1.0 must be at least 0"),
    (["--sample-s=nan", "--learn-s=1", "--tokens=9"], "--sample-s=nan must be above 0"),
    (["--sample-s=inf", "--learn-s=1", "--tokens=9"], "--sample-s=inf must be finite"),
    (["--sample-s=1", "--learn-s=1", "--tokens=1e308"], "--tokens=1e+308 must be at most 1e+15"),
    (["run", "--sampler-share=1"], "--sampler-share=1.0 must be above 0 and below 1"),
    (["run", "--prompts=4"], "--prompts needs --tokens"),
    (["run", "--rows=0"], "--rows=0 must be above 0"),
    (["/nowhere/run"], "a run folder is needed, but /nowhere/run does not exist"),
    (["--sample=1"], "unknown flag --sample"),
  ],
)
def test_wrong_words_are_one_message(words, message, capsys):
  assert cli.run(["overlap", *words]) == cli.WRONG_USE
  assert message in capsys.readouterr().err
