"""From a config's fields to those of every dataset: what is shared, what replaces what."""

import pytest

from grpo_jax import data

GSM8K = {"dataset": "GSM8K", "path": "train.jsonl", "environment": None}


def sets(shared, own=None, listed=(), items=(), name="heldout"):
  return data.evaluation_sets(shared, items, own or {}, listed, name=name)


def given(settings, *keys):
  return {key: settings.get(key) for key in keys}


def trained_on(shared, own=None, listed=(), items=(), name="heldout"):
  return data.trained_on(shared, items, own or {}, listed, name=name)


TASK = {"kind": "reasoning_gym", "task": "chain_sum", "task_seed": 1, "size": 10}
# Evaluation sets that have rows of their own: fields of the training data, and what differs.
HELD_OUT = [
  ({"path": "train.jsonl"}, {"path": "test.jsonl"}),
  ({"path": "folder", "split": "train"}, {"split": "test"}),
  ({"path": "both.json", "split": "train"}, {"split": "test"}),
  ({"dataset": "GSM8K"}, {}),  # from the hub: its test split.
  ({"dataset": "GSM8K", "path": "folder"}, {}),
  ({"dataset": "owner/name"}, {"split": "test"}),
  ({"dataset": "MMLU", "subset": "anatomy"}, {"subset": "astronomy"}),
  (TASK, {"task_seed": 2}),
  (TASK, {"task": "countdown"}),
  ({"path": "train.jsonl", "split_validation_size": 5, "split_seed": 0}, {}),
  ({"kind": "mine.rows", "split": "a"}, {"split": "b"}),
]
# Evaluation sets that have the rows of the training data.
TRAINED_ON = [
  ({"path": "train.jsonl"}, {}),
  ({"path": "train.jsonl"}, {"path": "./train.jsonl"}),
  ({"path": "train.jsonl"}, {"prompt_template": "Q: {}", "environment": "other", "repeat": 4}),
  ({"path": "train.jsonl", "kind": "jsonl"}, {"kind": "auto", "name": "other"}),
  ({"path": "train.jsonl"}, {"split": "test"}),  # a file of lines has no splits.
  ({"path": "s3://bucket/train.parquet"}, {"split": "test"}),
  ({"path": "folder"}, {}),
  ({"path": "both.json", "split": "train"}, {}),
  ({"dataset": "GSM8K", "path": "mine.jsonl"}, {}),
  ({"dataset": "GSM8K", "split": "train"}, {}),
  ({"dataset": "AIME2024"}, {}),  # it has one split.
  ({"dataset": "AIME2024"}, {"dataset": "HuggingFaceH4/aime_2024"}),
  ({"dataset": "owner/name"}, {}),
  ({"dataset": "owner/name"}, {"split": "train"}),
  (TASK, {}),
  (TASK, {"task_seed": 1}),
  (TASK, {"size": 5}),
  ({"kind": "function", "task": "mine.row", "task_seed": 3}, {"task_seed": 3}),
  ({"kind": "mine.rows", "task_args": {"first": 2}}, {}),
  ({"path": "train.jsonl", "split_validation_size": 5}, {"path": "train.jsonl"}),
]


def test_rows_that_are_trained_on_are_not_an_evaluation_set():
  wrong = [case for case in HELD_OUT if "heldout" not in sets(*case) or trained_on(*case)]
  wrong += [case for case in TRAINED_ON if "heldout" in sets(*case)]
  assert wrong == [] and all(trained_on(*case) == ["heldout"] for case in TRAINED_ON)


def test_every_training_dataset_is_compared_with_every_set():
  items = [{"path": "a.jsonl"}, {"path": "b.jsonl", "split_validation_size": 3}]
  listed = [{"path": "a.jsonl", "name": "old"}, {"path": "c.jsonl"}]
  assert list(sets({}, listed=listed, items=items)) == ["c", "b"]
  assert trained_on({}, listed=listed, items=items) == ["old"]
  # One side of a split is no longer held out if another dataset has the whole file.
  again = [*items, {"path": "b.jsonl", "name": "all"}]
  assert list(sets({}, listed=listed, items=again)) == ["c"]


def test_another_path_is_another_copy_of_the_same_dataset():
  one = sets(GSM8K, {"path": "test.jsonl"})["heldout"]
  assert given(one, "dataset", "path") == {"dataset": "GSM8K", "path": "test.jsonl"}


def test_another_dataset_leaves_the_shared_source():
  one = sets({**GSM8K, "kind": "jsonl", "name": "mine"}, {"dataset": "AIME2024"})["heldout"]
  assert given(one, "dataset", "path", "kind", "name") == {
    "dataset": "AIME2024", "path": None, "kind": None, "name": None
  }  # fmt: skip


def test_a_path_takes_the_place_of_a_task_but_not_of_a_source_of_the_users_own():
  shared = {"kind": "reasoning_gym", "task": "chain_sum"}
  assert given(sets(shared, {"path": "x.jsonl"})["heldout"], "kind", "path") == {
    "kind": None, "path": "x.jsonl"
  }  # fmt: skip
  one = sets({"kind": "my.source", "path": "a"}, {"path": "b"})["heldout"]
  assert given(one, "kind", "path") == {"kind": "my.source", "path": "b"}
  seeds = sets({**shared, "task_seed": 1}, {"task_seed": 9})["heldout"]
  assert given(seeds, "kind", "task", "task_seed") == {**shared, "task_seed": 9}


def test_text_replaces_the_shared_file_with_text():
  own = {"path": "y", "prompt_template": "{}"}
  one = sets({"path": "x", "prompt_file": "cot.txt"}, own)["heldout"]
  assert given(one, "prompt_file", "prompt_template") == {
    "prompt_file": None, "prompt_template": "{}"
  }  # fmt: skip


def test_several_sets_share_what_evaluation_changes():
  found = sets(
    {"path": "train.jsonl", "prompt_template": "{}", "repeat": 2},
    {"environment": "strict"},
    [{"dataset": "AIME2024", "repeat": 16}, {"path": "mine.jsonl", "name": "mine"}],
  )
  assert list(found) == ["AIME2024", "mine"]
  assert given(found["AIME2024"], "path", "environment", "prompt_template", "repeat") == {
    "path": None, "environment": "strict", "prompt_template": "{}", "repeat": 16
  }  # fmt: skip
  assert given(found["mine"], "path", "repeat") == {"path": "mine.jsonl", "repeat": 1}


def test_what_is_split_off_is_evaluated():
  split = {"path": "train.jsonl", "split_validation_size": 0.05}
  assert given(sets(split)["heldout"], "path", "side") == {
    "path": "train.jsonl", "side": "validation"
  }  # fmt: skip
  (trained,) = data.training_sets(split, ()).values()
  assert trained["side"] == "train"
  # Beside a set that is named, and beside other datasets, which split nothing off.
  found = sets(split, {"path": "test.jsonl", "prompt_template": "{}"})
  assert {name: (one.get("side"), one["path"]) for name, one in found.items()} == {
    "heldout": (None, "test.jsonl"), "train": ("validation", "train.jsonl")
  }  # fmt: skip
  assert found["train"]["prompt_template"] == "{}"
  items = [{"path": "a.jsonl", "split_validation_size": 10}, {"path": "b.jsonl"}]
  assert list(sets({}, items=items)) == ["heldout"]
  assert list(sets({"split_validation_size": 10}, items=items)) == ["a", "b"]


def test_of_several_datasets_those_with_another_split_are_evaluated_one_by_one():
  items = [{"path": "a.jsonl"}, {"dataset": "GSM8K", "weight": 2}, {"dataset": "MATH"}]
  assert list(sets({}, items=items)) == ["GSM8K", "MATH"]
  assert trained_on({}, items=items) == ["a"]


def test_two_sets_of_one_name_are_refused():
  split = {"path": "x.jsonl", "split_validation_size": 5}
  with pytest.raises(ValueError, match="two evaluation sets are called 'x'"):
    sets(split, listed=[{"path": "x.jsonl"}])
  with pytest.raises(ValueError, match=r"evaluation.datasets\[0\] has no field 'repet'.*'repeat'"):
    sets(split, listed=[{"repet": 5}])


def test_environments_are_those_of_the_dataset_and_of_its_tasks():
  assert data.environments({}) == {"math"}
  assert data.environments({"dataset": "HumanEval"}) == {"code"}
  assert data.environments({"dataset": "HumanEval", "environment": "own"}) == {"own"}
  tasks = {"sum": {"environment": "calculator"}, "proof": {"format": "problem"}}
  assert data.environments({"tasks": tasks}) == {"calculator", "math"}
  with pytest.raises(ValueError, match=r"tasks\['a'\] has no field 'env'"):
    data.training_sets({"path": "x", "tasks": {"a": {"env": "x"}}}, ())
