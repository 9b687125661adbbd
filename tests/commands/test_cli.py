"""The console script: commands are found by name, mistakes are one line, --help explains each."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from grpo_jax.commands import arguments, cli, report, train


def run(*words):
  return cli.run(words)


def test_without_a_command_all_are_listed(capsys):
  assert run() == cli.WRONG_USE
  assert run("--help") == run("-h") == run("help") == 0
  printed = capsys.readouterr()
  assert printed.err in printed.out
  for name in cli.COMMANDS:
    assert f"\n  {name} " in printed.out
  assert run("--version") == 0
  assert capsys.readouterr().out.startswith("grpo-jax 0.")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_names_it(name, capsys):
  assert run(name, "--help") == 0
  module = importlib.import_module(cli.COMMANDS[name][0].partition(":")[0])
  assert f"grpo-jax {name} " in module.USAGE and module.USAGE in capsys.readouterr().out


@pytest.mark.parametrize(
  "words, message",
  [
    (["trian", "quickstart"], "no command 'trian' (did you mean 'train'?); there are: train, "),
    (["quickstart"], "no command 'quickstart'; there are: train, "),
    (["overlap", "runs/first"], "the command 'overlap' was removed: time/sample_s, "),
    (["overlap", "--help"], "(docs/async.md), and grpo-jax plan "),
    (["report"], "required: RUN"),
    (["report", "--workdr=x", "run"], "unknown flag --workdr"),
    (["report", "a", "b"], "unrecognized arguments: b"),
    (["report", "/nowhere/at/all"], "a run folder is needed, but /nowhere/at/all does not exist"),
    (["compare", "--htm=x", "a", "b"], "unknown flag --htm; did you mean --html?"),
    (["compare", "--help-me", "a", "b"], "unknown flag --help-me; did you mean --help?"),
    (["compare", "a"], "at least two run folders"),
    (
      ["compare", "/nowhere/a", "/nowhere/b"],
      "a run folder is needed, but /nowhere/a does not exist",
    ),
    (["compare", "gs://bucket/a", "b"], "gs://bucket/a"),
    (["compare", "--all=3", "a", "b"], "--all"),
    (["train", "quickstrat"], "no config 'quickstrat' (did you mean 'quickstart'?)"),
    (["train", "quickstart", "gsm8k"], "unexpected argument 'gsm8k'"),
    (["train", "--config=quickstart", "gsm8k"], "--config was given 2 times"),
    (["train", "config.seed=3"], "--config is missing"),
    (["--config=quickstart", "--config.seeed=3"], "did you mean 'seed'?"),
    (["train"], "--config is missing"),
  ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, message, capsys):
  assert run(*words) == cli.WRONG_USE
  printed = capsys.readouterr()
  assert message in printed.err and printed.err.startswith("error: ") and not printed.out


@pytest.mark.parametrize(
  "words, flags",
  [
    (["quickstart", "--config.seed=3"], ["--config=quickstart", "--config.seed=3"]),
    (["--workdir=w", "quickstart"], ["--workdir=w", "--config=quickstart"]),
    (["--workdir", "w", "my/a=b.py"], ["--workdir", "w", "--config=my/a=b.py"]),
    (["--config", "quickstart"], ["--config", "quickstart"]),
    (["--help", "quickstart:word"], ["--help", "--config=quickstart:word"]),
    (["quickstart", "gsm8k"], ["--config=quickstart", "gsm8k"]),
  ],
)
def test_train_takes_the_config_as_a_word(words, flags, monkeypatch):
  taken = []
  monkeypatch.setattr(train.program, "main", lambda given: taken.append(list(given)) or 130)
  assert run("train", *words) == 130
  assert taken == [flags]


def test_flags_without_a_command_train(monkeypatch):
  taken = []
  monkeypatch.setattr(train.program, "main", lambda given: taken.append(list(given)) or 0)
  assert run("--config=quickstart", "--workdir=w") == 0
  assert taken == [["--config=quickstart", "--workdir=w"]]


def a_run(folder, reward):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps({"total_steps": int(reward * 100)}))
  (folder / "metrics.jsonl").write_text(
    json.dumps({"step": 0, "rollout/reward_mean": reward}) + "\n"
  )
  return str(folder)


def test_report_and_compare_read_runs(tmp_path, capsys):
  first, second = a_run(tmp_path / "first", 0.25), a_run(tmp_path / "second", 0.5)
  assert run("report", first) == 0
  assert capsys.readouterr().out.strip() == f"{first}/report.html"
  page = tmp_path / "curves.html"
  assert run("compare", first, second, f"--html={page}") == 0
  assert "total_steps" in capsys.readouterr().out
  assert "<title>first | second</title>" in page.read_text()


def test_failures_while_running_are_distinguished_from_wrong_use(monkeypatch, capsys):
  def fails(error):
    def main(words):
      raise error

    monkeypatch.setattr(report, "main", main)
    return run("report", "x")

  class Broken(cli.ExpectedFailure):
    pass

  assert fails(Broken("the disk is full")) == cli.FAILED
  assert capsys.readouterr().err == "error: the disk is full\n"
  assert fails(arguments.WrongUse("what?")) == cli.WRONG_USE
  assert fails(KeyboardInterrupt()) == cli.INTERRUPTED


@pytest.mark.long
def test_names_and_mistakes_are_answered_without_jax():
  code = (
    "import sys\nfrom grpo_jax.commands import cli\n"
    "codes = [cli.run(words) for words in (['--help'], ['trian'], ['train', '--help'])]\n"
    "print(codes, 'jax' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == "[0, 2, 0] False"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["doctor", "--help"]])
def test_a_reader_that_ends_early_ends_the_program_without_a_message(words, unbuffered):
  reading, writing = os.pipe()
  os.close(reading)
  command = [sys.executable, "-m", "grpo_jax", *words]
  environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
  done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment)
  os.close(writing)
  assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_broken_pipe_of_a_command_is_not_taken_for_its_output():
  code = (
    "import sys\nfrom grpo_jax.commands import cli\n"
    "def broken(words): raise BrokenPipeError('a pipe of a tool')\n"
    "cli.run = broken\ncli.console()"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.returncode == 1 and "BrokenPipeError: a pipe of a tool" in done.stderr
