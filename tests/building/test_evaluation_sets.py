"""What a run evaluates, and what it says of rows that it also trains on."""

import json

import pytest

from grpo_jax import data
from grpo_jax.building import evaluation_sets
from grpo_jax.building import run as runs
from grpo_jax.config import base, configuration, data_options, run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.data.byte_tokenizer import ByteTokenizer


def write(path, numbers):
  rows = [{"problem": f"{n} + {n}", "expected_answer": str(2 * n)} for n in numbers]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def config_of(**values):
  values = {name.replace("__", "."): value for name, value in values.items()}
  return configuration.replaced(base.get_config(), values)


def held_out(config):
  """Returns the numbers of prompts by evaluation set."""
  found = evaluation_sets.held_out(typed(config), ByteTokenizer(), data.open_dataset)
  return {name: len(prompts) for name, prompts in found.items()}


def test_without_held_out_rows_there_is_no_evaluation_and_one_line_says_so(tmp_path, noticed):
  train = write(tmp_path / "train.jsonl", range(20))
  copy = write(tmp_path / "copy.jsonl", range(10))
  for config in (
    config_of(data__path=train),
    config_of(data__path=train, data__dataset="GSM8K", data__input_key="problem"),
    config_of(data__path=train, evaluation__data__path=train),
    config_of(data__path=train, evaluation__data__path=copy),
    config_of(data__path=str(tmp_path), evaluation__data__path=copy),
  ):
    noticed.clear()
    config.data.output_key = "expected_answer"
    assert held_out(config) == {}
    (line,) = noticed
    same = "no evaluation: the rows of 'heldout' are those of the training data. To hold rows out"
    copied = "no evaluation: all 10 prompts of 'heldout' are training rows. To hold rows out"
    assert line.startswith((same, copied))
    assert "evaluation.data (path, split or task_seed; in Python: evaluation_rows)" in line
    assert "data.split_validation_size. No checkpoint is the best one" in line
    # Nothing else of the run changes: it neither evaluates nor refuses what is set for that.
    schedule = runs._schedule(config, evaluates=False)
    assert not any(schedule.evaluates(step) for step in (0, 10, config.total_steps))
    of_run = configuration.replaced(config, {"checkpoint.best_metric": "eval/heldout/accuracy"})
    assert not [each for each in run_options.validate(of_run) if "best_metric" in each]
  noticed.clear()
  off = {"evaluation__at_start": False, "evaluation__at_end": False, "evaluation__every_steps": 0}
  assert held_out(config_of(data__path=train, **off)) == {} and noticed == []


@pytest.mark.parametrize(
  ("best", "is_ranked"),
  [(None, True), ("eval/copy/accuracy", False), ("rollout/reward_mean", True)],
)
def test_the_line_says_whether_a_checkpoint_is_the_best_one(best, is_ranked, tmp_path, noticed):
  train = write(tmp_path / "train.jsonl", range(20))
  copy = {"path": write(tmp_path / "copy.jsonl", range(5))}
  new = {"path": write(tmp_path / "new.jsonl", [777])}
  several = config_of(
    data__path=train, evaluation__datasets=(copy, new), checkpoint__best_metric=best
  )
  assert held_out(several) == {"new": 1}
  assert ("No checkpoint is the best one" in noticed[-1]) != is_ranked
  single = config_of(data__path=train, evaluation__datasets=(copy,), checkpoint__best_metric=best)
  assert held_out(single) == {}
  ranked_by_training = best == "rollout/reward_mean"
  assert ("No checkpoint is the best one" in noticed[-1]) != ranked_by_training


def test_shared_prompts_are_counted_in_a_warning(tmp_path, noticed, caplog):
  train = write(tmp_path / "train.jsonl", range(200))
  test = write(tmp_path / "test.jsonl", range(188, 288))
  assert held_out(config_of(data__path=train, evaluation__data__path=test)) == {"heldout": 100}
  (line,) = noticed
  assert line == (
    "12 of 100 evaluation prompts are also in the training data (evaluation set 'heldout'; 200"
    " training rows were compared)"
  )
  assert caplog.records[-1].levelname == "WARNING"
  noticed.clear()
  sets = ({"path": train, "name": "old"}, {"path": write(tmp_path / "new.jsonl", [777])})
  assert held_out(config_of(data__path=train, evaluation__datasets=sets)) == {"new": 1}
  (line,) = noticed
  assert line.startswith("no evaluation of some sets: the rows of 'old' are those of the tr")


@pytest.mark.long
def test_what_a_task_draws_again_is_a_notice_unless_it_is_much(noticed, caplog):
  """The quickstart: 18 of its 100 evaluation prompts are among the 112 that it trains on."""
  config = configuration.load("quickstart")
  assert held_out(config) == {"heldout": 100}
  line = "18 of 100 evaluation prompts are also in the training data: the task draws some prompts"
  assert noticed[-1].startswith(line) and "112 training rows were compared" in noticed[-1]
  assert caplog.records[-1].levelname == "INFO"
  longer = configuration.replaced(config, {"total_steps": 250})
  assert held_out(longer) == {"heldout": 100} and caplog.records[-1].levelname == "WARNING"
  noticed.clear()
  near = configuration.replaced(config, {"evaluation.data.task_seed": 2})
  assert held_out(near) == {} and "all 100 prompts of 'heldout' are" in noticed[-1]


def test_the_best_checkpoint_is_by_the_first_set_that_is_evaluated(tmp_path):
  train = write(tmp_path / "train.jsonl", range(20))
  sets = (
    {"path": write(tmp_path / "a.jsonl", range(5))},
    {"path": write(tmp_path / "b.jsonl", [9])},
  )
  names = data_options.best_metrics(typed(config_of(data__path=train, evaluation__datasets=sets)))
  assert names[::2] == ("eval/a/accuracy", "eval/b/accuracy")


@pytest.mark.parametrize(
  "values, message",
  [
    ({"data__path": "train.jsonl"}, r"no data file train.jsonl.*config\.data\.path.*GSM8K"),
    (
      {"data__path": "{rows}", "evaluation__data__path": "val.jsonl"},
      r"no data file val.jsonl.*config\.evaluation\.data\.path .* to None, for no evaluation, or",
    ),
    (
      {"data__datasets": ({"path": "{rows}"}, {"path": "mine.jsonl"})},
      r"no data file mine.jsonl.*Correct it in config\.data\.datasets",
    ),
    (
      {"data__path": "{rows}", "data__input_key": "question"},
      r"rows.jsonl:1: no key 'question'; .*data\.input_key names the field.*set it to 'problem'$",
    ),
    (
      {"data__path": "{rows}", "data__output_key": "answer"},
      r"no key 'answer' .did you mean 'expected_answer'.*data\.output_key names .* set it to 'expe",
    ),
    ({"data__path": "{rows}", "data__prompt_file": "none.txt"}, "no prompt_file none.txt"),
    ({"data__kind": "no_such_module.rows"}, "no module 'no_such_module'"),
  ],
)
def test_mistakes_in_the_data_are_found_without_a_model(values, message, tmp_path):
  rows = write(tmp_path / "rows.jsonl", range(20))
  text = json.dumps(values).replace("{rows}", rows)
  with pytest.raises(ConfigError, match=f"^the data cannot be used: .*{message}"):
    evaluation_sets.check_sources(typed(config_of(**json.loads(text))))
