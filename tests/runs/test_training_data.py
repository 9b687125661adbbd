"""Data in the whole loop, on a tiny model: GSM8K, several datasets and sets, a curriculum."""

import json
import pathlib

import pytest

import configs.base
import configs.curriculum
import configs.gsm8k
from grpo_jax import main, metrics, train
from grpo_jax.config import configuration, data_options, run_options
from grpo_jax.config.configuration import typed
from tests.runs.test_train import StopWhen

pytestmark = pytest.mark.usefixtures("one_device")

# Rows of GSM8K, MIT licence, Cobbe et al. 2021.
GSM8K = [
  {
    "question": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of "
    "babysitting. How much did she earn?",
    "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned "
    "0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
  },
  {
    "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many "
    "clips in May. How many clips did Natalia sell altogether in April and May?",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = "
    "<<48+24=72>>72 clips altogether in April and May.\n#### 72",
  },
  {"question": "How much is 12 times 6?", "answer": "12 x 6 = <<12*6=72>>72.\n#### 72"},
]


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def lines(workdir):
  text = (workdir / "metrics.jsonl").read_text()
  return [metrics.reproducible(json.loads(line)) for line in text.splitlines()]


@pytest.mark.long
def test_gsm8k_trains_from_its_file_with_one_command(tmp_path, model):
  arguments = {
    "config": pathlib.Path(configs.gsm8k.__file__),
    "workdir": tmp_path / "run",
    "config.data.path": write(tmp_path / "gsm8k_train.jsonl", GSM8K[:2]),
    "config.evaluation.data.path": write(tmp_path / "gsm8k_test.jsonl", GSM8K[2:]),
    "config.model.path": model,
    "config.total_steps": 1,
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.sampling.max_tokens": 8,
    "config.data.max_prompt_tokens": 400,
    "config.batching.row_buckets": (512,),
    "config.batching.row_tokens": 512,
    "config.batching.microbatch_tokens": 512,
    "config.evaluation.at_start": False,
    "config.logging.sinks": ("jsonl", "console"),
    "config.learn.report_all_every_steps": 0,
    "config.learn.report_kl_every_steps": 0,
  }
  assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
  first, last = lines(tmp_path / "run")
  assert {"env/math/reward/correct", "env/math/reward/format", "env/math/accuracy"} <= set(first)
  assert first["data/overlong_prompts"] == 0.0
  assert last["eval/heldout/prompts"] == 1.0
  rollout = json.loads((tmp_path / "run/rollouts/step_000000.jsonl").read_text().splitlines()[0])
  assert rollout["prompt"].count("Give the final answer as \\boxed{answer}.") == 1


@pytest.fixture
def make_config(tmp_path, model):
  """A run of seconds on two datasets, in turn chosen by the curriculum."""
  letters = write(
    tmp_path / "letters.jsonl", [{"problem": w, "expected_answer": w} for w in "abcdef"]
  )
  digits = write(
    tmp_path / "digits.jsonl", [{"problem": w, "expected_answer": w} for w in "123456789"]
  )

  held_out = {
    name: write(
      tmp_path / f"held_out_{name}.jsonl", [{"problem": w, "expected_answer": w} for w in of]
    )
    for name, of in {"letters": "uvwx", "digits": ["10", "11", "12", "13"]}.items()
  }

  def make(**overrides):
    config = configs.base.get_config()
    config.environments = {
      name: {"module": "function", "path": f"tests.rewards.{name}"}
      for name in ("vowels", "constant")
    }
    config.data.datasets = [
      {"path": letters, "environment": "vowels"},
      {"path": digits, "environment": "constant"},
    ]
    config.evaluation.datasets = [
      {**one, "path": other, "name": name}
      for one, (name, other) in zip(config.data.datasets, held_out.items(), strict=True)
    ]
    settings = {
      "total_steps": 4,
      "model__path": str(model),
      "model__compute_dtype": "float32",
      "mesh__data": 1,
      "data__dataloader": "by_success",
      "data__dataloader_args": {"threshold": 0.0, "window": 2, "review_share": 0.34},
      "rollout__prompts_per_step": 3,
      "rollout__group_size": 4,
      "rollout__max_tokens": 96,
      "sampling__max_tokens": 8,
      "engine__max_rows": 16,
      "batching__row_tokens": 128,
      "loss__kl_coef": 0.0,
      "evaluation__every_steps": 2,
      "evaluation__num_prompts": 4,
      "checkpoint__every_steps": 1,
      "logging__sinks": ("jsonl", "console"),
      "learn__report_all_every_steps": 0,
      "learn__report_kl_every_steps": 0,
      **overrides,
    }
    for name, value in settings.items():
      config.update_from_flattened_dict({name.replace("__", "."): value})
    return config

  return make


@pytest.mark.slow
def test_a_curriculum_is_measured_and_evaluated_by_dataset_and_resumes_exactly(
  tmp_path, make_config
):
  train.train(make_config(), tmp_path / "unbroken")
  unbroken = lines(tmp_path / "unbroken")
  steps = [line for line in unbroken if "rollout/prompts" in line]
  taken = [
    {name: line.get(f"data/{name}/prompts", 0.0) for name in ("letters", "digits")}
    for line in steps
  ]
  assert taken == [{"letters": 3.0, "digits": 0.0}] * 2 + [{"letters": 1.0, "digits": 2.0}] * 2
  assert all(line["data/digits/reward_mean"] == 1.0 for line in steps[2:])
  assert all(line["data/digits/no_signal_share"] == 1.0 for line in steps[2:])
  evaluated = [line for line in unbroken if "eval/letters/reward_mean" in line]
  assert [line["step"] for line in evaluated] == [0, 2, 4]
  assert all(line["eval/digits/reward_mean"] == 1.0 for line in evaluated)
  assert metrics.unknown(name for line in unbroken for name in line if name != "step") == []

  folder = tmp_path / "resumed"
  for stop in (StopWhen(folder, 1), StopWhen(folder, 2), False):
    train.train(make_config(), folder, stop=stop)
  assert lines(folder) == unbroken


def complaints(config):
  return list(run_options.validate(config))


def test_what_cannot_work_is_reported_before_a_model_is_loaded(make_config):
  assert complaints(make_config()) == []
  config = make_config()
  config.data.datasets[1]["environment"] = "vowel"
  assert "data: dataset 'digits'.environment is 'vowel'" in complaints(config)[0]
  config = make_config(data__dataloader=None, data__dataloader_args={})
  config.data.num_prompts_per_dataloader = 2
  assert complaints(config) == [
    "rollout.prompts_per_step=3 must be a multiple of data.num_prompts_per_dataloader=2"
  ]
  config = make_config(checkpoint__best_metric="eval/heldout/accuracy")
  assert complaints(config) == [
    "checkpoint.best_metric is 'eval/heldout/accuracy', but the evaluation sets are: letters,"
    " digits"
  ]
  assert complaints(make_config(data__on_error="Stop", data__epochs=0)) == [
    "data.epochs must be an integer >= 1, or None, got 0",
    "data.on_error must be one of 'stop', 'skip', got 'Stop' (str)",
  ]
  assert "'by_sucess'" in complaints(make_config(data__dataloader="by_sucess"))[0]


def test_data_that_cannot_be_opened_end_the_command_with_a_message(tmp_path, make_config):
  write(tmp_path / "digits.jsonl", [{"problem": "7"}])
  with pytest.raises(configuration.ConfigError, match=r"the data cannot .*digits.jsonl:1: no key"):
    train.train(make_config(), tmp_path / "run")
  (tmp_path / "letters.jsonl").unlink()
  with pytest.raises(configuration.ConfigError, match="the data cannot be used: no data file"):
    train.train(make_config(), tmp_path / "run")


@pytest.mark.parametrize("order", ["curriculum", "mixed", "hard"])
def test_the_curriculum_config_can_be_built_in_each_order(order):
  config = configs.curriculum.get_config(order)
  assert complaints(config) == []
  assert list(data_options.evaluation(typed(config))) == ["hard"]
  with pytest.raises(ValueError, match="an order is one of"):
    configs.curriculum.get_config("soft")
