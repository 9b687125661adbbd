"""Evaluations as the command and Python run them: their numbers, files and messages."""

import json
import os
import pathlib
import signal

import pytest

from grpo_jax import evaluation, report
from grpo_jax.building import stored
from grpo_jax.commands import cli
from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.evaluation import choosing, runner
from grpo_jax.interrupts import Stopped
from grpo_jax.run_folder import evaluation_log
from tests import stored_runs
from tests.own_process import noticing


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  rows = [{"problem": f"{i} + 1", "expected_answer": str(i + 1)} for i in range(8)]
  (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (folder / "trained.jsonl").write_text(json.dumps({"problem": "3", "expected_answer": "3"}))
  return stored_runs.write(
    folder / "first",
    {1: 0.25, 2: 0.5},
    engine__name="tests.evaluation.answering",
    data__path=str(folder / "trained.jsonl"),
    evaluation__data__path=str(folder / "sums.jsonl"),
    evaluation__name="sums",
    evaluation__group_size=4,
    evaluation__num_prompts=6,
    rollout__max_tokens=256,
    sampling__max_tokens=32,
    model__compute_dtype="float32",
    mesh__data=1,
    mesh__fsdp=-1,
  )


def test_numbers_of_a_checkpoint_by_hand(run, tmp_path):
  """Of 6 prompts 2 are always solved, 4 at attempts 0 and 2; attempts 1 and 3 are N and nothing."""
  done = evaluation.run(f"{run}:1", workdir=tmp_path / "out")
  found = done.metrics
  assert found["sums/accuracy"] == pytest.approx((2 * 1 + 4 * 0.5) / 6)
  assert found["sums/accuracy_se"] == pytest.approx(((8 / 6 * 0.25) / 5 / 6) ** 0.5)
  assert found["sums/pass@2"] == pytest.approx((2 + 4 * (1 - 1 / 6)) / 6)
  assert found["sums/pass@4"] == 1.0
  # Pairs of {right, wrong, right, nothing}: rr 1, rw 2 ties, rn 2 right, wn 1 wrong.
  assert found["sums/maj@2"] == pytest.approx((2 + 4 * (1 + 2 * 0.5 + 2) / 6) / 6)
  assert found["sums/maj@4"] == 1.0
  assert (found["sums/attempts"], found["sums/unanswered"]) == (24, 4)
  assert "accuracy   66.7 % ± 10.5" in done.summary()
  written = json.loads((tmp_path / "out" / "metrics.json").read_text())
  assert written["models"][0]["metrics"]["sums/maj@2"] == found["sums/maj@2"]
  assert written["samples"] == 4


def test_a_fallback_of_the_run_is_not_one_of_the_evaluated_weights(run):
  taken = {"asked": "org/model", "taken": "pypi:other", "reason": "gone"}
  config = configuration.replaced(stored.whole_config_of(run), {"model.fallback_taken": taken})
  assert configuration.to_json(config)["model"]["fallback_taken"] == taken
  made = runner._prepared(config, (), None, None, stored.find(str(run)))
  assert made.model.fallback_taken is None
  assert "fallback_taken" not in configuration.to_json(made)["model"]


def test_every_completion_is_kept_as_a_rollout_and_shown(run, tmp_path):
  evaluation.run(f"{run}:1", workdir=tmp_path / "out")
  (name, step, path), *others = evaluation_log.files(tmp_path / "out")
  assert (name, step, others) == ("sums", 1, [])
  records = [json.loads(line) for line in path.read_text().splitlines()]
  places = [(record["group"], record["rollout"]) for record in records]
  assert places == [(g, i) for g in range(6) for i in range(4)]
  assert records[-1]["completion"] == "I do not know" and records[-1]["expected_answer"] == "6"
  assert "".join(records[0]["token_texts"]) == "\\boxed{1}<|im_end|>"
  page = report.write(tmp_path / "out").read_text()
  assert '"set":"sums"' in page and "1 of 1 evaluations" in page
  assert "Accuracy, sums" in page and "67%" in page


@pytest.mark.long
def test_two_models_are_compared_on_the_same_prompts(run, tmp_path):
  done = evaluation.run([f"{run}:1", f"{run}:2"], workdir=tmp_path / "out")
  paired = done.comparisons["sums"]["accuracy"]
  assert paired.difference.value == pytest.approx(4 * 0.5 / 6)
  assert (paired.better, paired.worse) == (4, 0) and paired.p_value == pytest.approx(2 / 16)
  assert "sums accuracy: +33.3 ± 10.5 points" in done.summary()
  written = json.loads((tmp_path / "out" / "metrics.json").read_text())
  assert written["comparisons"]["sums"]["accuracy"]["better"] == 4
  assert [model.folder.name for model in done.models] == ["model_1", "model_2"]


def test_several_sets_by_name_and_file(run, tmp_path):
  gsm8k, mmlu = tmp_path / "questions.jsonl", tmp_path / "choices.jsonl"
  gsm8k.write_text(json.dumps({"question": "5 + 1", "answer": "so\n#### 6"}) + "\n")
  row = {"question": "9 + 1", "options": ["3", "10"], "answer": "B"}
  mmlu.write_text(json.dumps(row) + "\n")
  done = evaluation.run(
    f"{run}:2",
    sets=[f"gsm8k={gsm8k}", f"mmlu_pro={mmlu}", str(run.parent / "sums.jsonl")],
    workdir=tmp_path / "out",
    samples=1,
  )
  assert done.metrics["gsm8k/accuracy"] == 1.0
  assert done.metrics["mmlu_pro/accuracy"] == 1.0  # the option "10" is chosen by its text.
  assert done.metrics["sums/accuracy"] == 1.0 and done.metrics["sums/prompts"] == 8
  assert [each[0] for each in evaluation_log.files(tmp_path / "out")] == [
    *("gsm8k", "mmlu_pro", "sums")
  ]


def test_an_evaluation_that_is_stopped_keeps_what_it_has(run, tmp_path):
  class Stop:
    def __bool__(self):
      return any(path.stat().st_size for _, _, path in evaluation_log.files(tmp_path / "out"))

  with pytest.raises(Stopped):
    evaluation.run(f"{run}:1", workdir=tmp_path / "out", stop=Stop())
  ((_, _, path),) = evaluation_log.files(tmp_path / "out")
  assert path.read_text().count("\n") in range(4, 25, 4)


def evaluate_until_ctrl_c(*words):
  records = evaluation_log.EvaluationLog.records

  def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return records(*arguments)

  with pytest.MonkeyPatch.context() as patch, noticing() as lines:
    patch.setattr(evaluation_log.EvaluationLog, "records", interrupted)
    return cli.run(["evaluate", *words]), lines


@pytest.mark.long
def test_ctrl_c_ends_the_command_without_a_traceback(run, tmp_path, own_process):
  words = f"--model={run}:1", f"--workdir={tmp_path / 'out'}"
  code, lines = own_process(evaluate_until_ctrl_c, *words)
  assert code == 130
  assert "SIGINT: ending; a second signal ends at once" in lines
  assert lines[-1] == "stopped; the completions that were scored are kept"


@pytest.mark.parametrize("option", ["samples", "num_prompts"])
def test_no_samples_and_no_prompts_are_refused(option, run, tmp_path):
  with pytest.raises(ConfigError, match="must be"):
    evaluation.run(f"{run}:1", workdir=tmp_path / "out", **{option: 0})


def test_without_a_folder_results_are_beside_the_checkpoint(run):
  folders = [evaluation.run(f"{run}:2", num_prompts=1).folder for _ in range(2)]
  assert folders == [run / "evaluated" / name for name in ("step_000002", "step_000002-2")]


def test_the_example_of_evaluation_md_runs(run, capsys):
  page = (pathlib.Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
  block = page.split("```python\n")[1].split("```")[0]
  scope: dict = {}
  exec(block.replace("runs/first:best", f"{run}:2").replace("heldout", "sums"), scope)
  assert scope["done"].metrics["sums/accuracy"] == 1.0
  assert "accuracy   100.0 % ± 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("sets", "reason"),
  [
    (["gsm9k"], "unknown dataset 'gsm9k'.* GSM8K,.*or name a file"),
    (["none.jsonl"], "--sets=none.jsonl: there is no such file"),
    (["a/b"], "a/b is not a known dataset"),
    (["tulu3_sft_mixture"], "the environment 'reward_model', which the config does not have: no r"),
    (["gsm8k", "gsm8k"], "two evaluation sets are called 'gsm8k'"),
    (["gsm8k=gs://b/rows.jsonl"], "only paths of this machine"),
  ],
)
def test_unknown_sets_are_refused(run, sets, reason):
  with pytest.raises(ConfigError, match=reason):
    choosing.with_sets(stored.whole_config_of(run), sets)


def test_the_hub_that_cannot_be_reached_is_named(run, tmp_path, monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ConfigError, match=r"Sets of the hub need .* --sets=NAME=FILE"):
    evaluation.run(f"{run}:1", sets=["gsm8k"], workdir=tmp_path / "out")


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ([], "--model is missing"),
    (["--modle=x"], "unknown flag --modle; did you mean --model?"),
    (["--model={run}", "--samples=0"], "--samples needs a whole number >= 1, got '0'"),
    (
      ["--model={run}", "--config.evaluation.smapling.temperature=1"],
      "did you mean 'evaluation.sam",
    ),
    (["--model={run}", "extra"], "unexpected argument extra"),
    (["--model={run}:9"], "no checkpoint of step 9; {run} has checkpoints of the steps 1, 2"),
    (["--model={run}/../model"], "say how to evaluate it, with --config"),
    (["--model={run}", "--config.evaluation.sampling.temperature=0"], "are all the same"),
    (["--model={run}", "--model={run}", "--model={run}"], "one model is evaluated, or two"),
    (["--model={run}", "--workdir={run}"], "is the folder of a run"),
    (["--model={run}", "--config=quickstrat"], "did you mean 'quickstart'?"),
  ],
)
def test_a_mistake_is_one_message_and_exit_code_2(run, capsys, words, message):
  assert cli.run(["evaluate", *(word.format(run=run) for word in words)]) == cli.WRONG_USE
  printed = capsys.readouterr()
  assert message.format(run=run) in printed.err and "Traceback" not in printed.err


def test_the_command_prints_numbers_and_where_the_completions_are(run, tmp_path, capsys):
  words = [f"--model={run}:2", "--samples=2", "--prompts=3", f"--workdir={tmp_path / 'out'}"]
  assert cli.run(["evaluate", *words, "--config.seed=5"]) == 0
  printed = capsys.readouterr().out
  assert "  sums: 3 prompts, 6 attempts\n    accuracy   100.0 % ± 0.0 " in printed
  assert f"completions: {tmp_path / 'out' / 'report.html'}" in printed
  assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == 5
