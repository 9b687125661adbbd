"""The run folder and the console: what is written, what a resume drops, what a line looks like."""

import ast
import io
import json
import math
import re
import shlex

import fake_run
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_jax import metrics
from grpo_jax.commands import cli
from grpo_jax.run_folder import console, loggers, rollout_log
from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.screen import fold
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, Turn
from tests import side_by_side


def a_screen(
  *, terminal: bool = False, width: int = 80
) -> tuple[console.TrainingScreen, io.StringIO]:
  file = io.StringIO()
  color = "standard" if terminal else None
  made = Console(
    file=file, force_terminal=terminal, width=width, color_system=color, highlight=False
  )
  return console.TrainingScreen(made), file


def open_logs(folder, start_step=0, **options):
  options.setdefault("screen", a_screen()[0])
  options.setdefault("sinks", ("jsonl", "console"))
  return loggers.make(
    folder, start_step=start_step, total_steps=20, decode=fake_run.decode, **options
  )


def reproducible_lines(folder):
  rows, broken = metrics.parse_lines((folder / "metrics.jsonl").read_text())
  assert broken == []
  return [metrics.reproducible(row) for row in rows]


def files_of(folder):
  return {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}


@pytest.mark.long
@pytest.mark.parametrize("tail", ["", '{"step": 7, "rollout/rew', "\x00\x00", '{"step": 7}'])
def test_a_killed_and_resumed_run_leaves_the_files_of_an_unbroken_one(tmp_path, tail):
  whole = open_logs(tmp_path / "whole")
  fake_run.write_steps(whole, 0, 10, total=12)
  whole.close()

  first = open_logs(tmp_path / "killed")
  fake_run.write_steps(first, 0, 7, total=12)  # never closed: the process is gone.
  with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
    file.write(tail)
  (tmp_path / "killed" / "rollouts" / "step_000007.jsonl.tmp").write_text('{"half')
  second = open_logs(tmp_path / "killed", start_step=5)  # the last checkpoint was of step 5.
  assert len(reproducible_lines(tmp_path / "killed")) == 5
  assert len(files_of(tmp_path / "killed")) == 5
  fake_run.write_steps(second, 5, 10, total=12)
  second.close()

  assert reproducible_lines(tmp_path / "killed") == reproducible_lines(tmp_path / "whole")
  assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_a_run_started_again_in_an_old_folder_keeps_nothing_of_it(tmp_path):
  fake_run.write_steps(open_logs(tmp_path), 0, 3, total=12)
  open_logs(tmp_path, start_step=0).close()
  assert (tmp_path / "metrics.jsonl").read_text() == ""
  assert files_of(tmp_path) == {}


def test_a_broken_line_in_the_middle_is_named_and_the_rest_is_kept(tmp_path, noticed):
  (tmp_path / "metrics.jsonl").write_text('{"step":0,"a":1}\n{"ste\n{"step":1,"a":2}\n')
  open_logs(tmp_path, start_step=2).close()
  assert [row["step"] for row in reproducible_lines(tmp_path)] == [0, 1]
  assert noticed == ["metrics.jsonl: lines [2] could not be read and were dropped"]


def test_writes_of_one_step_make_one_line_that_is_on_disk_at_once(tmp_path):
  logger = open_logs(tmp_path)
  logger.write(3, {"eval/heldout/accuracy": 0.25})
  logger.write(3, {"train/loss": 0.123456789, "train/entropy": 1.0})
  logger.write(3, {"train/loss": 0.5})  # shorter than before: nothing of the old line may remain.
  logger.write(4, {"train/loss": 1.0})
  assert reproducible_lines(tmp_path) == [
    {"step": 3, "eval/heldout/accuracy": 0.25, "train/loss": 0.5, "train/entropy": 1.0},
    {"step": 4, "train/loss": 1.0},
  ]
  with pytest.raises(ValueError, match="got 3 after 4"):
    logger.write(3, {"train/loss": 1.0})
  with pytest.raises(ValueError, match="got 4 after 4"):
    open_logs(tmp_path, start_step=5).write(4, {"train/loss": 1.0})


def test_what_is_not_finite_is_null_in_strict_json(tmp_path):
  logger = open_logs(tmp_path)
  logger.write(0, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/entropy": 2})

  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  text = (tmp_path / "metrics.jsonl").read_text()
  row = json.loads(text, parse_constant=refuse)
  assert row == {"step": 0, "train/loss": None, "train/grad_norm": None, "train/entropy": 2.0}


def test_a_name_that_is_in_no_table_warns_once_and_is_recorded(tmp_path):
  logger = open_logs(tmp_path)
  with pytest.warns(UserWarning, match="'train/lozz' has no row"):
    logger.write(0, {"train/lozz": 1.0})
  logger.write(1, {"train/lozz": 2.0})  # a second warning would be an error here.
  assert [row["train/lozz"] for row in reproducible_lines(tmp_path)] == [1.0, 2.0]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
  first = open_logs(tmp_path, sinks=LoggingOptions.sinks)  # closed at the end only: it was killed.
  for step in range(6):
    first.write(step, {"train/loss": 100.0 + step, "train/entropy": math.nan})
  second = open_logs(tmp_path, start_step=4, sinks=LoggingOptions.sinks)
  for step in range(4, 8):
    second.write(step, {"train/loss": 200.0 + step})
  second.close()
  first.close()
  events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
  found = {event.step: event.value for event in events.Scalars("train/loss")}
  assert len(events.Scalars("train/loss")) == 8
  assert found == {s: (100.0 if s < 4 else 200.0) + s for s in range(8)}
  assert events.Tags()["scalars"] == ["train/loss"]


def test_tensorboard_has_histograms_and_the_configuration(tmp_path):
  secret = "hunter2-hunter2"
  config = {"loss": {"clip_high": 0.28}, "mine": {"api_key": secret}}
  (tmp_path / "config.json").write_text(json.dumps(config))
  sinks = ("jsonl", {"name": "tensorboard", "histograms_every_steps": 2})
  groups = [fake_run.make_group(np.random.default_rng(i), 0, i, 0.5) for i in range(3)]
  groups.append(RolloutGroup(groups[0].prompt, ()))
  advantages = [np.asarray(a) for a in fake_run.advantages_of(groups[:3])]
  advantages = [*advantages[:2], np.full(8, np.nan), np.zeros(0)]
  shift = 0.25
  logprobs = [[r.behavior_logprobs + np.float32(shift) for r in g.rollouts] for g in groups]
  logprobs[0][0] = np.full_like(logprobs[0][0], np.nan)  # was not computed.
  logger = open_logs(tmp_path, sinks=sinks)
  for step in range(3):
    logger.write_rollouts(step, groups, advantages, logprobs)
  logger.write_rollouts(4, groups, advantages, None)
  logger.write_rollouts(6, [], [], [])
  logger.close()
  events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0}).Reload()
  assert sorted(events.Tags()["histograms"]) == [
    f"histogram/{name}" for name in ("advantage", "completion_tokens", "log_ratio", "reward")
  ]

  def read(name):
    return {event.step: event.histogram_value for event in events.Histograms(f"histogram/{name}")}

  lengths = [len(r.completion_ids) for g in groups for r in g.rollouts]
  found = read("completion_tokens")
  assert sorted(found) == [0, 2, 4]
  assert (found[2].num, found[2].sum) == (24, sum(lengths))
  assert (found[2].min, found[2].max) == (min(lengths), max(lengths))
  assert sum(found[2].bucket) == 24
  edges = [-math.inf, *found[2].bucket_limit]
  expected = [sum(a <= x < b for x in lengths) for a, b in zip(edges, edges[1:], strict=False)]
  expected[-1] += lengths.count(max(lengths))
  assert found[2].bucket == expected
  assert read("advantage")[0].num == 16
  assert read("advantage")[0].sum_squares == pytest.approx(np.sum(np.square(advantages[:2])))
  assert read("log_ratio")[0].num == sum(lengths) - lengths[0] and 4 not in read("log_ratio")
  assert read("log_ratio")[0].sum == pytest.approx(shift * (sum(lengths) - lengths[0]), rel=1e-4)
  (words,) = [tensor.tensor_proto.string_val[0] for tensor in events.Tensors("config/text_summary")]
  shown = json.loads(words.decode())
  assert shown == {"loss": {"clip_high": 0.28}, "mine": {"api_key": "***"}}


def test_a_rollout_file_holds_all_that_was_sampled(tmp_path):
  logprobs = np.asarray([-0.1, 0.0, -1 / 3], np.float32)
  rollout = Rollout(
    completion_ids=np.asarray([1, 2, 14], np.int32),
    loss_mask=np.asarray([True, False, True]),
    behavior_logprobs=logprobs,
    weight_versions=np.asarray([4, -1, 5], np.int32),
    finish_reason=FinishReason.ENV_DONE,
    reward=math.nan,
    text=' "sum" é\n',
    reward_components={"format": 0.5},
    metrics={"accuracy": math.nan},
    turns=2,
    turn_log=(Turn(1, 1, 0.5), Turn(1, 0, math.nan)),
    error="timeout: no answer within 1 s",
  )
  info = {"expected_answer": 2, "tests": "hidden"}
  prompt = Prompt("p-0", np.asarray([7, 8], np.int32), "math", info, text="1 + 1?")
  group = RolloutGroup(prompt, (rollout,))
  logger = open_logs(tmp_path)
  trainer = np.asarray([-0.25, np.nan, -1.5], np.float32)
  logger.write_rollouts(6, [group], [np.asarray([np.nan], np.float32)], [[trainer]])
  record = json.loads((tmp_path / "rollouts" / "step_000006.jsonl").read_text())
  assert np.array_equal(np.asarray(record.pop("behavior_logprobs"), np.float32), logprobs)
  assert record == {
    "step": 6,
    "group": 0,
    "rollout": 0,
    "prompt_is_cut": False,
    "prompt_id": "p-0",
    "environment": "math",
    "prompt": "1 + 1?",
    "expected_answer": "2",
    "completion": ' "sum" é\n',
    "reward": None,
    "shaped_reward": None,
    "reward_components": {"format": 0.5},
    "metrics": {"accuracy": None},
    "advantage": None,
    "finish_reason": "env_done",
    "turns": 2,
    "turn_log": [
      {"sampled_tokens": 1, "environment_tokens": 1, "reward": 0.5},
      {"sampled_tokens": 1, "environment_tokens": 0, "reward": None},
    ],
    "error": "timeout: no answer within 1 s",
    "prompt_ids": [7, 8],
    "completion_ids": [1, 2, 14],
    "token_texts": [" sum", " is", "<|im_end|>"],
    "loss_mask": [1, 0, 1],
    "policy_logprobs": [-0.25, None, -1.5],
    "weight_versions": [4, -1, 5],
  }


@pytest.mark.parametrize(
  "info, shown",
  [({}, None), ({"expected_answer": None}, None), ({"expected_answer": [1, 2]}, "[1, 2]")],
)
def test_an_expected_answer_is_shown_as_text(info, shown):
  assert Prompt("p", np.zeros(1, np.int32), "e", info).expected_answer == shown


def test_a_long_expected_answer_is_cut_once():
  long = Prompt("p", np.zeros(1, np.int32), "e", {"expected_answer": "x" * 5000})
  cut = long.expected_answer
  assert cut is not None and len(cut) == 1001
  again = Prompt("p", np.zeros(1, np.int32), "e", {"expected_answer": cut})
  assert again.expected_answer == cut


def test_rollouts_of_equal_prompts_are_kept_apart_and_lengths_are_checked(tmp_path):
  rng = np.random.default_rng(0)
  group = fake_run.make_group(rng, 0, 0, 0.5)
  records = rollout_log.rollout_records(
    0, [group, group], fake_run.advantages_of([group] * 2), None, None
  )
  assert [(r["group"], r["rollout"]) for r in records] == [(g, i) for g in (0, 1) for i in range(8)]
  assert records[0]["policy_logprobs"] is None and records[0]["token_texts"] is None
  with pytest.raises(ValueError, match="2 groups"):
    rollout_log.rollout_records(0, [group, group], [np.zeros(8, np.float32)], None, None)
  with pytest.raises(ValueError, match="8 rollouts, 7 advantages"):
    rollout_log.rollout_records(0, [group], [np.zeros(7, np.float32)], None, None)
  short = [[np.zeros(1, np.float32)] * 8]
  with pytest.raises(ValueError, match="has 1 logprobs"):
    rollout_log.rollout_records(0, [group], [np.zeros(8, np.float32)], short, None)


def test_token_texts_join_the_bytes_of_one_character():
  text = "né 🙂\ufffdx".encode()  # a token a byte; the last special character is a real U+FFFD.
  decode = lambda ids: bytes(ids).decode("utf-8", errors="replace")
  texts = rollout_log.TokenTexts(decode)(list(text[: len("né 🙂".encode())]))
  assert texts == ["n", "é", "", " ", "🙂", "", "", ""]
  assert "".join(rollout_log.TokenTexts(decode)([0xC3, 0x28])) == "\ufffd("  # no character at all.
  assert len(rollout_log.TokenTexts(decode)([0x80] * 9 + [0xC3])) == 10


def test_rollouts_are_written_and_samples_printed_at_their_own_pace(tmp_path):
  screen, file = a_screen()
  logger = open_logs(tmp_path, screen=screen, rollouts_every_steps=2, samples_every_steps=3)
  fake_run.write_steps(logger, 0, 7, total=12)
  assert [*files_of(tmp_path)] == [f"step_{s:06d}.jsonl" for s in (0, 2, 4, 6)]
  assert re.findall(r"sample of step (\d+)", file.getvalue()) == ["0", "3", "6"]
  silent = open_logs(tmp_path / "silent", rollouts_every_steps=0, samples_every_steps=0)
  fake_run.write_steps(silent, 0, 2, total=12)
  assert [path.name for path in (tmp_path / "silent").iterdir()] == ["metrics.jsonl"]
  with pytest.raises(ValueError, match="rollouts_every_steps must be at least 0, got -1"):
    open_logs(tmp_path, rollouts_every_steps=-1)


def test_only_the_main_process_writes(tmp_path, monkeypatch):
  side_by_side.pretend(monkeypatch, 1)
  logger = open_logs(tmp_path / "run", sinks=LoggingOptions.sinks)
  fake_run.write_steps(logger, 0, 1)
  with logger.progress("sampling", 3) as advance:
    advance()
  logger.print("hello")
  logger.close()
  assert not (tmp_path / "run").exists()


def test_the_lines_of_steps_are_aligned_below_the_header_and_fit_a_terminal():
  awkward = {
    "rollout/reward_mean": -12345.678,
    "rollout/reward_std": 0.0,
    "rollout/completion_tokens_mean": 123456.7,
    "train/entropy": 1e-9,
    "mismatch/abs_logprob_max": math.inf,
    "train/clip_low_share": 0.004,
    "train/clip_high_share": 0.002,
    "time/sample_s": 12345.6,
    "perf/tokens_per_s": 1.234e6,
    console.LEFT: 1e5,
  }
  header = console.header()
  lines = [console.step_line(s, 1000, v).plain for s, v in ((7, {}), (999, awkward))]
  assert {len(line) for line in (header, *lines)} == {len(header)} and len(header) <= 112
  assert lines[0].split() == ["7/1000", "-", "±-", *["-"] * len(console.COLUMNS)]
  assert lines[1].split() == (
    "999/1000 -12.3k ±0.000 - - 123.5k 1.0e-09 inf 0.6% 12346 - - 1.2M 28h".split()
  )
  for column_end in (len(header), len(header) - 6, len(header) - 15):
    assert header[column_end - 1] != " " and lines[1][column_end - 1] != " "


@pytest.mark.parametrize("width", [60, 79, 80, 90, 100, 105, 120, 200])
@pytest.mark.parametrize("total", [None, 14, 10_000, 1_000_000])
def test_the_line_of_a_step_fits_the_terminal_without_a_broken_number(width, total):
  values = {"rollout/reward_mean": -999.9999, "rollout/reward_std": 999.9999}
  for column in console.COLUMNS:
    value = 0.9994 if column.format is console.share else 9999.994
    values |= {name: value for name in column.metrics[:1]}
  screen, file = a_screen(terminal=True, width=width)
  screen.step((total or 8) - 1, total, values)
  lines = re.sub("\x1b.*?m", "", file.getvalue()).splitlines()
  assert len(lines) == 2 and len(lines[0]) == len(lines[1]) <= width
  titles = [column.title for column in console.columns_within(width, total)]
  assert {"no-signal", "trunc", "sample s"} <= {*titles}
  assert lines[0].split() == ["step", "reward", "±", "std", *" ".join(titles).split()]
  shown = {console.share: "100%", console.number: "10.0k", console.seconds: "10000"}
  shown[console.duration] = "-"
  cells = [shown[c.format] for c in console.columns_within(width, total)]
  assert lines[1].split()[1:] == ["-1000.0", "±1000.0", *cells]


def test_all_columns_are_shown_where_there_is_room():
  assert console.columns_within(120, 1000) == console.COLUMNS == console.columns_within(1000, None)
  kept = [column.title for column in console.columns_within(80, 14)]
  assert kept == ["no-signal", "trunc", "tokens", "entropy", "sample s", "learn s", "left"]


def test_the_line_of_a_step_shows_the_time_that_is_left():
  now = [1000.0]
  file = io.StringIO()
  screen = console.TrainingScreen(Console(file=file, width=120), clock=lambda: now[0])
  left = lambda: file.getvalue().splitlines()[-1].split()[-1]
  screen.step(3, 14, {"time/step_s": 10.0})  # a run that continues.
  assert left() == "2min", "10 steps of 10 s"
  now[0] += 30.0
  screen.step(4, 14, {"time/step_s": 10.0})
  assert left() == "4min", "9 steps of 30 s"
  screen.step(13, 14, {})
  assert left() == "0s"
  assert [console.duration(s) for s in (0.4, 99.4, 5939.0, 5940.0, 1.7e5, 3e5, 1e8)] == (
    "0s 99s 99min 1.6h 47h 3.5d 1157d".split()
  )
  for total, values in ((14, {}), (None, {"time/step_s": 10.0})):
    screen = console.TrainingScreen(Console(file=file, width=120))
    screen.step(0, total, values)
    assert left() == "-", "neither the time of a step nor the number of steps may be missing"
    assert screen.run_left() == ""


def test_a_terminal_that_changes_its_width_gets_a_new_header():
  made = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
  screen = console.TrainingScreen(made)
  screen.step(0, 14, {})
  made.width = 120
  screen.step(1, 14, {})
  made.file.seek(0)
  assert [len(line) for line in made.file] == [80, 80, 112, 112]


def test_long_lines_are_folded_between_words_on_a_terminal_and_left_whole_in_a_log_file():
  values = {f"eval/heldout/{name}": 0.123456 for name in ("accuracy", "pass@4", "reward_mean")}
  values |= {"eval/heldout/completion_tokens_mean": 228.4, "time/evaluate_s": 12.3}
  line = console.eval_line("heldout", 7, values, dict.fromkeys(values, 0.5))
  screen, file = a_screen(terminal=True, width=60)
  screen.print(line)
  printed = file.getvalue().splitlines()
  assert len(printed) == 3 and all(len(each) <= 60 for each in printed)
  assert " ".join(printed).split() == line.split()
  assert all(each.startswith(" " * 9) for each in printed[1:])
  screen, file = a_screen(width=60)
  screen.print(line)
  assert file.getvalue() == line + "\n"


@pytest.mark.parametrize("width", [12, 40, 80])
def test_a_folded_line_keeps_its_blanks_and_its_margin(width):
  line = "         │ x =  1 +\t2 " + "é" * 30 + " z" * 60
  folded = fold(line, width)
  assert all(each[8:11] == " │ " for each in folded) and len(folded) > 1
  assert "x =  1" in folded[0] or width == 12
  joined = "".join("".join(each[11:].split()) for each in folded)
  assert joined == "".join(line[11:].split())


def test_the_header_returns_every_twenty_lines_and_after_samples():
  screen, file = a_screen()
  for step in range(45):
    screen.step(step, 45, {"rollout/reward_mean": 0.5})
  lines = file.getvalue().splitlines()
  assert [i for i, line in enumerate(lines) if "reward ± std" in line] == [0, 21, 42]
  group = fake_run.make_group(np.random.default_rng(0), 0, 0, 0.5)
  screen.sample(45, group, np.zeros(8, np.float32))
  screen.step(46, None, {})
  assert file.getvalue().count("reward ± std") == 4


def test_without_a_terminal_there_is_no_escape_sequence_and_no_wrapping():
  screen, file = a_screen(terminal=False, width=40)
  with screen.progress("sampling", 10) as advance:
    advance(10)
  screen.step(0, 10, {"rollout/reward_mean": 0.5, "signal/lost_share": 0.9})
  assert "\x1b" not in file.getvalue()
  assert len(file.getvalue().splitlines()) == 2


def test_on_a_terminal_alarms_are_coloured_and_the_bar_vanishes():
  screen, file = a_screen(terminal=True, width=120)
  screen.step(0, 10, {"rollout/reward_mean": 0.5, "signal/lost_share": 0.9})
  assert "\x1b[35m       90%\x1b[0m" in file.getvalue()
  with screen.progress("sampling", 10) as advance, screen.progress("grading") as inner:
    advance(4)
    inner()
  assert "sampling" in file.getvalue() and "\x1b[2K" in file.getvalue()
  before = len(file.getvalue())
  with screen.progress("again", 1):  # a second bar after the first one ended.
    pass
  assert len(file.getvalue()) > before


def test_the_bar_says_what_the_program_is_doing_and_fits_80_columns():
  for total in (100, None):
    made = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    screen = console.TrainingScreen(made, note=lambda: "compiling, 123 s")
    with screen.progress("evaluating heldout", total):
      pass
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", made.file.getvalue())
    assert "compiling, 123 s" in shown and "left" not in shown and "?" not in shown
    assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= 80


def test_the_bar_shows_what_is_left_of_the_phase_and_of_the_run_in_80_columns():
  made = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
  screen = console.TrainingScreen(made, clock=lambda: 0.0)
  screen.step(0, 14, {"time/step_s": 600.0})
  for name, total in (("step 13: sampling", 1000), ("[red]a set[/]", None)):
    with screen.progress(name, total) as advance:
      advance(999)
      screen._progress.refresh()
  shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", made.file.getvalue())
  lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown)]
  assert max(map(len, lines)) <= 80
  assert any(
    re.search(r"sampling [━╸╺]+ *999/1000 0:00:00 left 0s, run 2.2h$", line) for line in lines
  )
  assert any(re.search(r"\[red\]a set\[/\] [━╸╺]+ +0:00:00 run 2.2h$", line) for line in lines)


def test_a_terminal_without_cursor_movement_gets_lines_and_no_bar(monkeypatch):
  monkeypatch.setenv("TERM", "dumb")
  screen, file = a_screen(terminal=True)
  with screen.progress("sampling", 10) as advance:
    advance(10)
  assert file.getvalue() == ""


def test_progress_in_a_log_file_is_one_line_per_minute():
  now = 0.0
  file = io.StringIO()
  screen = console.TrainingScreen(Console(file=file), clock=lambda: now)
  with screen.progress("sampling", 100) as advance:
    for _ in range(100):
      now += 2.5
      advance()
  assert file.getvalue().splitlines() == [
    "sampling: 24/100 after 60.0 s",
    "sampling: 48/100 after 120 s",
    "sampling: 72/100 after 180 s",
    "sampling: 96/100 after 240 s",
  ]


def test_a_completion_can_neither_steer_the_terminal_nor_be_markup():
  evil = "[bold]x[/bold] \x1b[2J\x07\u202e[link=a]b\r"
  rollout = Rollout(
    completion_ids=np.zeros(1, np.int32),
    loss_mask=np.ones(1, bool),
    behavior_logprobs=np.zeros(1, np.float32),
    weight_versions=np.zeros(1, np.int32),
    finish_reason=FinishReason.STOP,
    reward=0.0,
    text=evil,
  )
  group = RolloutGroup(Prompt("[red]\x1b", np.zeros(1, np.int32), "e", text=evil), (rollout,))
  screen, file = a_screen()
  screen.sample(0, group, np.zeros(1, np.float32))
  assert not set("\x1b\x07\u202e\r") & set(file.getvalue())
  assert "[bold]x[/bold] \\x1b[2J\\x07\\u202e[link=a]b\\r" in file.getvalue()


def test_a_sample_says_that_its_prompt_is_cut():
  rollouts = fake_run.make_group(np.random.default_rng(0), 0, 0, 0.5).rollouts
  for is_cut in (True, False):
    prompt = Prompt("p", np.zeros(7, np.int32), "e", text="What is", is_cut=is_cut)
    title = console.sample_lines(3, RolloutGroup(prompt, rollouts), np.zeros(8), 80)[0]
    assert (", prompt cut to 7 tokens " in title) == is_cut


def test_a_terminal_that_knows_ascii_only_gets_question_marks():
  raw = io.BytesIO()
  file = io.TextIOWrapper(raw, encoding="ascii")
  screen = console.TrainingScreen(Console(file=file))
  screen.print("0.5 ±0.1 🙂")
  file.flush()
  assert raw.getvalue() == b"0.5 ?0.1 ?\n"


def test_an_evaluation_is_printed_with_its_change_since_the_first_also_after_a_resume(tmp_path):
  values = {
    "eval/heldout/accuracy": 0.1,
    "eval/heldout/pass@4": 0.2,
    "eval/heldout/reward_mean": 0.1,
  }
  logger = open_logs(tmp_path)
  logger.write(0, values)
  screen, file = a_screen()
  resumed = open_logs(tmp_path, start_step=1, screen=screen)
  resumed.write(1, values | {"eval/heldout/accuracy": 0.35, "time/evaluate_s": 4.0})
  expected = "accuracy 35% (+25.0 points)  pass@4 20% (+0.0 points)  reward 0.100  (4.00 s)"
  assert file.getvalue().strip() == f"eval  heldout at step 1: {expected}"


def test_an_evaluation_is_printed_with_its_standard_error():
  values = {"eval/heldout/accuracy": 0.57, "eval/heldout/accuracy_se": 0.04976}
  line = console.eval_line("heldout", 7, values, {"eval/heldout/accuracy": 0.18})
  assert "accuracy 57.0 % ± 5.0 (+39.0 points)" in line


def test_long_texts_are_cut_with_a_note():
  assert console.shorten("abcdef", 4) == "abcd … [2 more characters]"
  assert console.shorten("abcd", 4) == "abcd"


def test_the_last_lines_of_a_run_can_be_copied_whatever_its_folder_is_called():
  lines = console.closing_lines("runs/my run/export", "runs/my run")
  commands = [shlex.split(line.partition("grpo-jax ")[2]) for line in lines if "grpo-jax " in line]
  assert commands == [["evaluate", "--model=runs/my run"], ["export", "runs/my run:STEP", "OUT"]]
  assert {words[0] for words in commands} <= set(cli.COMMANDS)
  (python,) = [line.partition(": ")[2] for line in lines if "notebook" in line]
  assert ast.literal_eval(python.partition("open")[2]) == "runs/my run"
  assert lines[0] == "final weights: runs/my run/export"
  both = console.closing_lines("w/export", "w", adapter="w/adapter")
  assert both[0] == "adapter alone: w/adapter" and "PeftModel.from_pretrained" in both[1]
  assert both[2:] == [
    "final weights (merged with the adapter): w/export",
    *console.closing_lines("w/export", "w")[1:],
  ]
  noted = console.closing_lines("w/export", "w", adapter="w/adapter", note="its base was rounded")
  assert noted[:2] == both[:2] and noted[2] == "  its base was rounded" and noted[3:] == both[2:]
  inside = console.closing_lines("w/export", "w", adapter="w/adapter", names={"a": "b.a"})
  assert inside[1] == f"{both[1][:-1]}, key_mapping={{'a': 'b.a'}})"
  without_sets = console.closing_lines("e", "w", has_sets=False)
  assert "  to measure them: grpo-jax evaluate --model=w --sets=FILE" in without_sets
  offline = console.closing_lines("e", "w", is_offline=True)
  assert not [line for line in offline if "evaluate" in line] and len(offline) == len(lines) - 1


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_long_note_is_cut_and_takes_no_second_line(width):
  made = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
  screen = console.TrainingScreen(made, note=lambda: "reading prompts 160 tokens, 123 s")
  with screen.progress("evaluating heldout", 22):
    pass
  shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", made.file.getvalue())
  lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
  assert all("0/22" in line and len(line) <= width for line in lines), lines
  assert ("123 s" in shown) == (width == 100)
