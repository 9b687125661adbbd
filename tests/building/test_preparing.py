"""What a run finds out before it looks for its model, and what it leaves behind then."""

import json

import pytest

from grpo_jax import main
from grpo_jax.building import checks, policy_model
from grpo_jax.config import base, configuration
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.run_folder import console, folder_lock, workdirs
from grpo_jax.types import Prompt

pytestmark = pytest.mark.usefixtures("one_device")

ROWS = {"data.path": "rows.jsonl", "data.split_validation_size": 0}
# Options of configs/math_1b.py, and the message of the mistake among them.
MISTAKES = [
  (
    {"data.path": "train.jsonl"},
    "no data file train.jsonl (did you mean 'rows.jsonl'?). Set config.data.path to a file of",
  ),
  (ROWS | {"evaluation.data.path": "val.jsonl"}, "no data file val.jsonl"),
  (ROWS | {"data.input_key": "text"}, "rows.jsonl:1: no key 'text'"),
  (ROWS | {"data.format": "early_rewards.none"}, "early_rewards has no function 'none'"),
  (ROWS | {"data.kind": "early_rewards.rows"}, "data.kind early_rewards.rows failed: "),
  (ROWS | {"environments.math.module": "absent_env"}, "no module 'absent_env'"),
  (
    ROWS | {"environments.own.module": "function", "environments.own.path": "early_rewards.scor"},
    "early_rewards has no function 'scor' (did you mean 'score'?)",
  ),
  (ROWS | {"loss.loss": "early_rewards.los"}, "early_rewards has no function 'los'"),
  (ROWS | {"engine.name": "sglan"}, "engine.name: grpo_jax.engines has no module 'sglan'"),
  (ROWS | {"engine.name": "early_rewards"}, "the module has no make(**settings)"),
  (ROWS | {"engine.name": "sglang"}, "no server environment at .venv-sglang/bin/python"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A working folder with rows and a module; a run that looks for its model fails the test."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(policy_model, "find", lambda config: pytest.fail("the model is looked for"))
  (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1", "expected_answer": "1"}))
  (tmp_path / "early_rewards.py").write_text(
    "def score(prompt, completion, info): return 1.0\ndef rows(): return [1 / 0]\n"
  )
  return tmp_path


def test_a_mistake_is_found_before_the_model_and_leaves_no_run_folder(folder, capsys):
  wrong = []
  for number, (options, message) in enumerate(MISTAKES):
    flags = [f"--config.{name}={value}" for name, value in options.items()]
    workdir = [f"--workdir=runs/{number}"] if number % 2 else []  # or a new folder in runs/.
    code = main.main(["--config=math_1b", *workdir, *flags])
    said = capsys.readouterr().err
    left = [str(path) for path in (folder / "runs").glob("*")]
    if code != main.WRONG_USE or message not in said or "Traceback" in said or left:
      wrong.append((options, code, said, left))
  assert wrong == []


def test_only_a_new_folder_without_a_run_is_removed(tmp_path):
  def fail_in(folder, *written):
    with pytest.raises(ZeroDivisionError):
      with workdirs.opened(folder):
        for name in written:
          (folder / name).write_text("")
        raise ZeroDivisionError
    return folder.is_dir()

  assert not fail_in(tmp_path / "new")
  assert not fail_in(tmp_path / "given", "rows.jsonl", "evaluation_rows.jsonl", "reward.py")
  assert fail_in(tmp_path / "begun", "config.json")
  mine = tmp_path / "mine"
  mine.mkdir()
  (mine / "rows.jsonl").write_text("of the user")
  assert fail_in(mine) and (mine / "rows.jsonl").read_text() == "of the user"
  with workdirs.opened(tmp_path / "ended"):
    pass
  assert (tmp_path / "ended").is_dir()


def test_a_lock_that_was_removed_meanwhile_is_not_held(tmp_path, monkeypatch):
  try_lock = folder_lock.atomic.try_lock

  def late(lock):
    folder_lock.remove_unused(tmp_path / "run")  # by a run that ends just now.
    return try_lock(lock)

  monkeypatch.setattr(folder_lock.atomic, "try_lock", late)
  with pytest.raises(folder_lock.UnusableFolder, match="in use by another run"):
    folder_lock.claimed(tmp_path / "run")


@pytest.mark.parametrize(
  "options, warned",
  [
    ({"sampling.max_tokens": 600, "rollout.max_tokens": 128}, "sampling.max_tokens=600"),
    ({"sampling.max_tokens": 64, "batching.row_tokens": 32}, "sampling.max_tokens=64"),
    ({"evaluation.sampling.max_tokens": 2000}, "evaluation.sampling.max_tokens=2000"),
    ({"sampling.max_tokens": 128, "rollout.max_tokens": 128}, None),
    ({"sampling.max_tokens": 9999, "mode": "offline"}, None),
  ],
)
def test_a_length_that_no_completion_reaches_is_said(options, warned, noticed):
  checks.log_lengths(configuration.replaced(base.get_config(), options))
  assert len(noticed) == (warned is not None)
  if warned:
    assert noticed[0].startswith(f"{warned} is never reached: a prompt with its completion has at")


def test_the_first_prompt_is_shown_within_bounds_and_harmlessly():
  def shown(text, **fields):
    return console.prompt_lines(
      Prompt("set:0:0", ByteTokenizer().encode(text), "x", text=text, **fields)
    )

  assert shown("What is\n1 + 1?") == [
    "the first prompt, set:0:0, 14 tokens:", "         │ What is", "         │ 1 + 1?"
  ]  # fmt: skip
  assert shown("a", is_cut=True)[0] == "the first prompt, set:0:0, 1 tokens, cut:"
  long = "\n".join(shown("begin" + "x" * 10**5 + "end"))
  assert len(long) < 700 and "begin" in long and long.endswith("end") and "[99408 more" in long
  assert len(shown("line\n" * 100)) == 26
  assert "\x1b" not in "".join(shown("\x1b[2J")) and "\\x1b[2J" in shown("\x1b[2J")[1]
