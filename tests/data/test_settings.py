"""From a config's fields to those of every dataset: what is shared, what replaces what."""

import pytest

from grpo_jax import data

GSM8K = {"dataset": "GSM8K", "path": "train.jsonl", "environment": None}


def sets(shared, own=None, listed=(), items=(), name="heldout"):
  return data.evaluation_sets(shared, items, own or {}, listed, name=name)


def given(settings, *keys):
  return {key: settings.get(key) for key in keys}


def test_a_single_dataset_is_evaluated_as_before():
  shared = {"path": "train.jsonl", "input_key": "q", "split_validation_size": 0.0}
  assert given(sets(shared)["heldout"], "path", "side") == {"path": "train.jsonl", "side": None}
  other = sets(shared, {"path": "test.jsonl", "task": None})
  assert given(other["heldout"], "path", "input_key") == {"path": "test.jsonl", "input_key": "q"}


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


def test_a_text_takes_the_place_of_the_shared_file_of_it():
  one = sets({"path": "x", "prompt_file": "cot.txt"}, {"prompt_template": "{}"})["heldout"]
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
  found = sets(split, {"path": "test.jsonl"})
  assert {name: one.get("side") for name, one in found.items()} == {
    "heldout": None, "train": "validation"
  }  # fmt: skip
  items = [{"path": "a.jsonl", "split_validation_size": 10}, {"path": "b.jsonl"}]
  assert list(sets({}, items=items)) == ["heldout"]
  assert list(sets({"split_validation_size": 10}, items=items)) == ["a", "b"]


def test_several_datasets_without_held_out_data_are_evaluated_one_by_one():
  items = [{"path": "a.jsonl"}, {"dataset": "GSM8K", "weight": 2}]
  assert list(sets({}, items=items)) == ["a", "GSM8K"]


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
