"""`grpo_jax.train` as Python code and notebooks call it, on a tiny model."""

import asyncio
import json
import os
import signal
import time

import numpy as np
import pandas
import pytest

import grpo_jax
from grpo_jax.api import rewards, row_files, training
from grpo_jax.config import configuration as files
from grpo_jax.config import data_options, run_options
from grpo_jax.config.configuration import typed
from grpo_jax.configuration import ConfigError
from grpo_jax.errors import ExpectedFailure
from grpo_jax.run_folder import folder_lock

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

ROWS = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(8)]
HELD_OUT = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in (8, 9)]
SIZES = {
  "total_steps": 2,
  "model.compute_dtype": "float32",
  "data.prompt_template": "{}",
  "data.prompt_file": None,
  "rollout.prompts_per_step": 2,
  "rollout.group_size": 2,
  "rollout.max_tokens": 64,
  "sampling.max_tokens": 4,
  "batching.row_tokens": 128,
  "loss.kl_coef": 0.0,
  "learn.report_all_every_steps": 0,
  "learn.report_kl_every_steps": 0,
  "evaluation.at_start": True,
  "evaluation.every_steps": 2,
  "evaluation.num_prompts": 2,
  "checkpoint.every_steps": 0,
  "logging.samples_every_steps": 0,
}


@pytest.fixture(scope="module")
def call(model):
  return caller(model)


def caller(model):
  """Returns a function that trains the tiny model in a folder, with further arguments."""

  def train(workdir, **arguments):
    given = {"rows": ROWS, "evaluation_rows": HELD_OUT, "reward": letters} | arguments
    options = SIZES | {"model.path": str(model)} | given.pop("overrides", {})
    return grpo_jax.train("math_1b", workdir, **given, **options)

  return train


def letters(prompt, completion, info):
  """A number that differs between the completions of a group."""
  assert info["expected_answer"] and prompt
  return float(sum(map(ord, completion)) % 7)


@pytest.fixture(scope="module")
def finished(call, tmp_path_factory):
  """A run of two steps, and what its callback was called with."""
  calls = []
  workdir = tmp_path_factory.mktemp("run") / "first"
  run = call(workdir, on_step=lambda step, metrics: calls.append((step, metrics)))
  return run, calls


def test_a_call_trains_and_returns_the_run(finished):
  run, calls = finished
  assert run.step == 2 and list(run.checkpoints) == [2]
  assert run.config.total_steps == 2 and run.config.environments.reward.module == "function"
  assert [step for step, _ in calls] == [0, 1]
  assert calls[0][1]["rollout/reward_mean"] >= 0
  assert "eval/heldout/reward_mean" in calls[0][1]  # of the evaluation before step 0.
  lines = (run.workdir / row_files.TRAINING).read_text().splitlines()
  assert [json.loads(line) for line in lines] == ROWS
  assert "def letters" in (run.workdir / rewards.SOURCE).read_text()


@pytest.mark.long
def test_metrics_and_rollouts_are_data_frames(finished):
  run, _ = finished
  table = run.metrics()
  assert list(table.index) == [0, 1, 2] and table["rollout/reward_mean"].notna().sum() == 2
  assert table["eval/heldout/reward_mean"].notna().sum() == 2
  sampled = run.rollouts(0)
  assert len(sampled) == 4 and set(sampled["step"]) == {0}
  assert {"prompt", "completion", "reward", "advantage"} <= set(sampled.columns)
  assert len(run.rollouts()) == 8
  pandas.testing.assert_frame_equal(run.rollouts(-1), run.rollouts(1))
  for step in (2, -3):
    with pytest.raises(LookupError, match=f"no rollouts of step {step}; it has those of steps 0"):
      run.rollouts(step)


def test_without_pandas_they_are_lists_of_dicts(finished, monkeypatch):
  run, _ = finished
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert [row["step"] for row in run.metrics()] == [0, 1, 2]
  assert [each["rollout"] for each in run.rollouts(0)] == [0, 1, 0, 1]


def test_the_report_is_a_path_that_a_notebook_shows_in_a_frame(finished):
  run, _ = finished
  path = run.report()
  assert path == run.workdir / "report.html" and path.read_text().startswith("<!doctype html>")
  shown = path._repr_html_()
  assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and "<script" not in shown


def test_samples_of_before_and_after_training(finished):
  run, _ = finished
  before = run.sample("2 + 2 =", before=True)
  assert isinstance(before, str)
  several = run.sample(["2 + 2 =", [{"role": "user", "content": "2 + 2 ="}]])
  assert several == [run.sample("2 + 2 =", step=2)] * 2  # the template of the run is "{}".
  warm = [run.sample("2 + 2 =", temperature=1.0, max_tokens=8, seed=seed) for seed in (0, 0, 1)]
  assert warm[0] == warm[1] != warm[2]
  for wrong, message in {
    "there is no checkpoint of step 1": {"step": 1},
    "give step, or before=True": {"step": 2, "before": True},
    "max_tokens": {"max_tokens": -1},
    "max_tokens must": {"max_tokens": 0},
    "exceeds the limit": {"max_tokens": 10**6},
  }.items():
    with pytest.raises(ExpectedFailure, match=wrong):
      run.sample("2 + 2 =", **message)
  for asked in (7, [], [{"role": "user"}], {"role": "user", "content": ""}):
    with pytest.raises(ConfigError, match="a prompt is a string"):
      run.sample(asked)


@pytest.mark.long
def test_a_checkpoint_is_evaluated_on_the_held_out_rows(finished):
  run, _ = finished
  result = run.evaluate(step=2, samples=1)
  mean = run.metrics()["eval/heldout/reward_mean"].iloc[-1]  # of the same weights and prompts.
  values = [value for name, value in result.metrics.items() if name.endswith("reward_mean")]
  assert values == [pytest.approx(mean)]
  with pytest.raises(ExpectedFailure, match="no checkpoint of step 1"):
    run.evaluate(step=1)


def test_params_are_the_weights_of_the_newest_checkpoint(finished):
  run, _ = finished
  weights = run.params
  assert weights["embed"].shape[0] >= 256


def test_a_run_is_opened_by_its_folder(finished, tmp_path):
  run, _ = finished
  again = grpo_jax.open(run.workdir)
  assert repr(again) == repr(run) and "2 of 2 steps, " in repr(run)
  assert "reward in training" in again._repr_html_() and "<svg" in again._repr_html_()
  with pytest.raises(FileNotFoundError, match="no run folder .*other; there are runs in .*first"):
    grpo_jax.open(run.workdir.parent / "other")
  with pytest.raises(FileNotFoundError, match="is not a run folder: it has neither metrics.jsonl"):
    grpo_jax.open(tmp_path)


def test_the_same_call_continues_and_reports_other_rows_and_another_reward(call, tmp_path, noticed):
  first = call(tmp_path / "run", overrides={"total_steps": 1, "evaluation.at_end": False})
  assert first.step == 1
  reward = lambda prompt, completion, info: float(len(completion))
  run = call(tmp_path / "run", rows=[*ROWS[:3], *ROWS[4:], ROWS[3]], reward=reward)
  assert run.step == 2
  text = "\n".join(noticed)
  assert "the rows are not those that this run began with" in text
  assert "there were 8, there are 8 now; the first one that differs is row 3" in text
  assert "reward: its source has changed" in text
  assert "def letters" in (tmp_path / "run" / "reward_1.py").read_text()
  assert "lambda" in (tmp_path / "run" / rewards.SOURCE).read_text()


ONE = {"evaluation.at_start": False}


@pytest.mark.parametrize("kind", ["stop", "failure"])
def test_a_callback_can_end_the_run_after_a_checkpoint(kind, call, tmp_path):
  seen = []

  def on_step(step, metrics):
    seen.append(step)
    raise grpo_jax.StopTraining if kind == "stop" else ZeroDivisionError("in my callback")

  if kind == "stop":
    assert list(call(tmp_path / "run", on_step=on_step, overrides=ONE).checkpoints) == [1]
  else:
    with pytest.raises(ZeroDivisionError) as raised:
      call(tmp_path / "run", on_step=on_step, overrides=ONE)
    assert raised.traceback[-1].name == "on_step"
  assert seen == [0]
  assert list(grpo_jax.open(tmp_path / "run").checkpoints) == [1]
  if kind == "failure":  # the same kernel can continue: the folder was given back.
    assert call(tmp_path / "run").step == 2


def interrupt_in_a_callback(model, workdir):
  """Trains until Ctrl-C comes in the callback; returns its calls, and the message."""
  seen = []

  def on_step(step, metrics):
    seen.append(step)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)

  with pytest.raises(KeyboardInterrupt) as raised:
    caller(model)(workdir, on_step=on_step, overrides=ONE)
  return seen, str(raised.value)


def test_ctrl_c_in_a_callback_ends_the_run_after_a_checkpoint(model, tmp_path, own_process):
  seen, message = own_process(interrupt_in_a_callback, model, tmp_path / "run")
  assert "the checkpoint of step 1 is saved; the same call continues" in message
  assert seen == [0]
  assert list(grpo_jax.open(tmp_path / "run").checkpoints) == [1]


def test_a_folder_belongs_to_one_call_at_a_time(call, tmp_path):
  with folder_lock.claimed(tmp_path / "run"):
    with pytest.raises(folder_lock.UnusableFolder, match="^workdir=.* is in use by another run"):
      call(tmp_path / "run")


@pytest.mark.long
def test_a_run_trains_inside_of_a_running_event_loop(finished, call, tmp_path):
  async def cell():
    return call(tmp_path / "run", overrides={"total_steps": 1, "evaluation.at_start": False})

  assert asyncio.run(cell()).step == 1


@pytest.mark.parametrize(
  "arguments, message",
  [
    ({"overrides": {"total_step": 3}}, "did you mean 'total_steps'"),
    ({"overrides": {"loss.clip_hi": 0.3}}, "did you mean 'loss.clip_high'"),
    ({"overrides": {"loss.loss": "clippd"}}, "clipped"),
    ({"overrides": {"total_steps": "three"}}, "total_steps must be"),
    ({"reward": "my_rewards.letters"}, "reward must be a function"),
    ({"reward": lambda prompt: 1.0}, "cannot be called as"),
    ({"reward": int}, "the class int has no start and no step and no close"),
    ({"rows": []}, "rows is empty"),
    ({"rows": ["2 + 2"]}, r"rows\[0\] must be a dict"),
    ({"rows": "rows.jsonl"}, "rows must be a list of dicts"),
    ({"rows": 3}, "rows must be a list of dicts"),
    ({"rows": [{"problem": {1, 2}}]}, r"rows\[0\]\['problem'\] is a set"),
    ({"rows": [{"problem": "", "x": float("nan")}]}, r"rows\[0\]\['x'\] is nan"),
    ({"on_step": 3}, "on_step must be a function"),
  ],
)
def test_a_mistake_is_one_message_before_anything_is_made(arguments, message, call, tmp_path):
  with pytest.raises(ConfigError, match=message) as raised:
    call(tmp_path / "run", **arguments)
  assert len(str(raised.value)) < 1000 and not (tmp_path / "run").exists()


def test_a_config_that_was_loaded_is_not_changed(model):
  config = grpo_jax.configuration.load("quickstart")
  with pytest.raises(ConfigError, match="sampling.temperature"):
    grpo_jax.train(config, "never", total_steps=3, **{"sampling.temperature": 0.0})
  assert config.total_steps == 14
  with pytest.raises(ConfigError, match="config must be the name of a config"):
    grpo_jax.train(14, "never")


def test_rows_may_be_a_generator_that_ends_or_a_frame():
  assert len(row_files.lines((row for row in ROWS), "rows")) == 8
  frame = pandas.DataFrame({"problem": ["a", "b"], "expected_answer": ["1", "2"]})
  assert json.loads(row_files.lines(frame, "rows")[1]) == {"problem": "b", "expected_answer": "2"}


def chosen(name, tmp_path, *, reward=letters, files=(row_files.TRAINING,), config=None, **options):
  """Returns the config of a call with rows, as `grpo_jax.train` makes it."""
  before, named = training._chosen(config or name, options)
  made = row_files.with_rows(before, tmp_path, files, named)
  if reward is None and not named & {"data.environment", "data.tasks"}:
    row_files.check_scored(before, made)
  return made if reward is None or made.mode == "offline" else rewards.with_reward(made, reward)


def test_rows_bring_nothing_of_the_data_of_any_config_along(tmp_path):
  """Rows and a reward give every config of the package the same data section, but for sizes."""
  of_base = files.plain_fields(chosen("base", tmp_path).data)
  wrong = []
  for name in [*files.by_name(), "curriculum:mixed", "nemo_gym:online", "tool_use:functions"]:
    made = chosen(name, tmp_path)
    # Of a config whose rows need several devices, there is one here.
    complaints = [each for each in run_options.validate(made) if not each.startswith("mesh.")]
    wrong += [f"{name}: {complaint}" for complaint in complaints]
    for field, value in files.plain_fields(made.data).items():
      of_run = field in ("max_prompt_tokens", "overlong", "on_error", "shuffle", "epochs")
      of_reward = field in ("environment", "rows_choose_environment")
      if not (of_run or of_reward) and value != of_base.get(field):
        wrong.append(f"{name}: data.{field}={value}")
    given = [field for field, value in made.evaluation.data.items() if value is not None]
    wrong += [f"{name}: evaluation.data.{field}" for field in given]
    if data_options.evaluation(typed(made)) or made.evaluation.datasets:
      wrong.append(f"{name}: is evaluated")
  assert wrong == []
  both = chosen("curriculum", tmp_path, files=(row_files.TRAINING, row_files.EVALUATION))
  (held_out,) = data_options.evaluation(typed(both)).values()
  assert held_out["path"] == str(tmp_path / row_files.EVALUATION)
  assert held_out["system_prompt"] is None


@pytest.mark.long
def test_what_the_caller_names_holds_for_the_rows(tmp_path, noticed):
  text = "Say one word."
  named = chosen("quickstart", tmp_path, **{"data.system_prompt": text})
  assert named.data.system_prompt == text and named.data.task is None
  nested = chosen("quickstart", tmp_path, data={"system_prompt": text, "input_key": "question"})
  assert (nested.data.system_prompt, nested.data.input_key) == (text, "question")
  same = "Answer with the final number only."  # also if the config says the same.
  assert chosen("quickstart", tmp_path, **{"data.system_prompt": same}).data.system_prompt == same
  # A config that was loaded and changed since then: only the changes are of the caller.
  config = grpo_jax.configuration.load("quickstart")
  config.data.system_prompt = text
  config.evaluation.data.path = "held_out.jsonl"
  changed = chosen("", tmp_path, config=config)
  assert (changed.data.system_prompt, changed.data.task) == (text, None)
  assert (
    changed.evaluation.data.path == "held_out.jsonl" and changed.evaluation.data.task_seed is None
  )
  assert config.data.task == "grpo_jax.data.arithmetic_problems.chain_sum"
  untouched = chosen("", tmp_path, config=grpo_jax.configuration.load("quickstart"))
  assert untouched.data.system_prompt is None
  split = chosen("quickstart", tmp_path, **{"data.split_validation_size": 0.1})
  assert list(data_options.evaluation(typed(split))) == ["heldout"]
  line = (
    "rows: not used, since they are of the config's own data: data.environment='arithmetic',"
    " data.system_prompt='Answer with the final number only.', evaluation.data. The call can name"
  )
  assert any(each.startswith(line) for each in noticed)


@pytest.mark.parametrize("name", ["data.path", "data.datasets", "data.task"])
def test_rows_and_other_data_are_not_both_given(name, tmp_path):
  value = [{"path": "x.jsonl"}] if name == "data.datasets" else "x"
  with pytest.raises(ConfigError, match=f"rows= and {name} both name data"):
    chosen("quickstart", tmp_path, **{name: value})


def test_rows_without_a_reward_are_scored_as_the_data_of_the_config_or_not_at_all(tmp_path):
  assert chosen("math_1b", tmp_path, reward=None).data.environment is None  # math.
  for name in ("quickstart", "code_humaneval", "reward_model", "verifiers"):
    with pytest.raises(ConfigError, match=r"Give reward=, or name an environment.*; it has '"):
      chosen(name, tmp_path, reward=None)
  named = chosen("code_humaneval", tmp_path, reward=None, **{"data.environment": "code"})
  assert named.data.environment == "code"


def test_recorded_groups_may_be_rows_in_memory(tmp_path):
  config = grpo_jax.configuration.load("offline_ranked")
  both = [row_files.TRAINING, row_files.EVALUATION]
  made = row_files.with_rows(config, tmp_path, both)
  assert made.data.path == str(tmp_path / row_files.TRAINING) and made.mode == "offline"
  assert made.evaluation.data.path == str(tmp_path / row_files.EVALUATION)


def brackets(left, right):
  """A reward that needs what it is made with."""
  return lambda prompt, completion, info: float(completion.startswith(left + right))


class Guess:
  """An environment that says yes."""

  def __init__(self, prompt):
    self.prompt = prompt

  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    raise NotImplementedError

  async def close(self):
    pass


def test_rewards_of_every_kind_are_found_again_by_the_config():
  from grpo_jax import registry

  config = grpo_jax.configuration.load("quickstart")
  closure = brackets("[", "]")
  for reward in (letters, closure, lambda p, c, info: 1.0, np.vectorize(letters)):
    made = rewards.with_reward(config, reward)
    settings = made.environments.reward
    assert registry.function(settings.path) is reward and made.data.environment == "reward"
  assert rewards.with_reward(config, letters).environments.reward.path.endswith(".letters")
  environment = rewards.with_reward(config, Guess).environments.reward
  assert registry.function(environment.module) is Guess
  with pytest.raises(ConfigError, match="is a generator"):
    rewards.with_reward(config, lambda p, c, info: (yield 1.0))
  with pytest.raises(ConfigError, match="has several datasets"):
    rewards.with_reward(grpo_jax.configuration.load("curriculum"), letters)
  with pytest.raises(ConfigError, match="mode='offline'"):
    rewards.with_reward(grpo_jax.configuration.load("offline_ranked"), letters)
