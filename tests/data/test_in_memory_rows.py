"""Rows as Python objects: what holds them, and what they may hold."""

import collections
import itertools
import json
import pathlib

import numpy as np
import pandas
import pytest

from grpo_jax import data
from grpo_jax.api import row_files
from grpo_jax.configuration import ConfigError
from grpo_jax.data import in_memory_rows
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import RowError
from grpo_jax.data.sources import SourceConfig

TWO = [{"problem": "a", "expected_answer": "1"}, {"problem": "b", "expected_answer": None}]


class Items:
  """Rows with a length and items, as datasets of PyTorch have them."""

  def __len__(self):
    return len(TWO)

  def __getitem__(self, number):
    return TWO[number % 2]  # never an IndexError.


def frame_of_arrow():
  return pytest.importorskip("pyarrow").Table.from_pylist(TWO)


def dataset_of_the_library():
  return pytest.importorskip("datasets").Dataset.from_list(TWO)


@pytest.mark.parametrize(
  "make",
  [
    lambda: TWO,
    lambda: tuple(TWO),
    lambda: (row for row in TWO),
    lambda: iter(TWO),
    lambda: map(dict, TWO),
    lambda: collections.deque(TWO),
    lambda: itertools.islice(itertools.cycle(TWO), 2),
    Items,
    lambda: pandas.DataFrame(TWO),
    frame_of_arrow,
    dataset_of_the_library,
  ],
)
def test_rows_may_be_any_iterable(make):
  assert [json.loads(line) for line in row_files.lines(make(), "rows")] == TWO


def test_values_of_numpy_and_missing_values_of_frames_are_json():
  rows = [{"problem": "a", "n": np.int64(3), "x": np.float32(0.5), "of": np.arange(2)}]
  expected = {"problem": "a", "n": 3, "x": 0.5, "of": [0, 1]}
  assert [json.loads(line) for line in row_files.lines(rows, "rows")] == [expected]
  frame = pandas.DataFrame([{"problem": "a", "level": 3, "x": [1]}, {"problem": "b"}])
  second = json.loads(row_files.lines(frame, "rows")[1])
  assert second == {"problem": "b", "level": None, "x": None}


def failing():
  yield TWO[0]
  raise TypeError("no more")


@pytest.mark.parametrize(
  "rows, message",
  [
    (itertools.cycle(TWO), "rows has no length and more than 9 rows.*itertools.islice"),
    (failing(), r"rows failed after 1 rows: .*test_in_memory_rows.py:72: TypeError: no more"),
    (failing, r"rows is a function: give what it returns, failing\(\)"),
    (
      {"problem": ["a"], "expected_answer": ["1"]},
      "must be a list of dicts, one per row, got the d",
    ),
    (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "two columns of one name: a, a"),
    (pandas.DataFrame([[1, 2]]), r"rows\[0\]: the names of fields are strings, got 0"),
  ],
)
def test_what_is_not_rows_is_refused_with_what_to_give(rows, message, monkeypatch):
  monkeypatch.setattr(in_memory_rows, "MOST", 9)
  with pytest.raises(ConfigError, match=message):
    row_files.lines(rows, "rows")


def test_a_dataset_of_several_splits_is_not_rows():
  datasets = pytest.importorskip("datasets")
  both = datasets.DatasetDict({name: datasets.Dataset.from_list(TWO) for name in ("train", "test")})
  with pytest.raises(ConfigError, match="rows holds the splits train, test: give one of them"):
    row_files.lines(both, "rows")


# Functions that a config names as data.kind.
def of_a_generator():
  yield from TWO


def with_arguments(count, *, first=0):
  return [{"problem": str(first + i), "expected_answer": np.int64(i)} for i in range(count)]


def in_a_frame():
  return pandas.DataFrame(TWO[:1])


def of_the_config(config):
  assert isinstance(config, SourceConfig)
  return [{**TWO[0], "seed": config.task_seed, "n": config.task_args["n"]}]


def with_a_set():
  return [TWO[0], {"problem": {1}}, 3]


def without_rows():
  return []


def problems(kind, **settings):
  settings = {"output_key": "", **settings}
  return data.make_held_out(ByteTokenizer(), kind=f"{__name__}.{kind}", **settings)


@pytest.mark.parametrize(
  "kind, settings, expected",
  [
    ("of_a_generator", {}, ["a", "b"]),
    ("with_arguments", {"task_args": {"count": 2, "first": 5}}, ["5", "6"]),
    ("in_a_frame", {}, ["a"]),
    ("of_the_config", {"task_args": {"n": 1}, "task_seed": 7}, ["a"]),
  ],
)
def test_a_config_names_a_function_of_rows(kind, settings, expected):
  found = problems(kind, **settings)
  assert [prompt.info["problem"] for prompt in found] == expected
  assert found[0].prompt_id == f"{kind}:0:0"
  if kind == "with_arguments":
    (answer,) = problems(kind, task_args={"count": 1}, output_key="expected_answer")
    assert answer.info["expected_answer"] == "0"
  if kind == "of_the_config":
    assert (found[0].info["seed"], found[0].info["n"]) == (7, 1)


def test_the_function_of_the_page_works(tmp_path, monkeypatch):
  page = (pathlib.Path(__file__).parents[2] / "docs" / "data.md").read_text()
  (block,) = [
    b.split("```")[0] for b in page.split("```python\n") if b.startswith("# my_tables.py")
  ]
  (tmp_path / "my_tables.py").write_text(block)
  monkeypatch.syspath_prepend(tmp_path)
  prompts = data.make_held_out(
    ByteTokenizer(), kind="my_tables.squares", task_args={"first": 5, "last": 6}
  )
  assert [prompt.info["expected_answer"] for prompt in prompts] == ["25", "36"]


def test_a_function_of_rows_that_cannot_work_says_why():
  with pytest.raises(RowError, match=r"with_a_set, row 2: \['problem'\] is a set, which a row can"):
    problems("with_a_set")
  with pytest.raises(ValueError, match="without_rows returned no rows"):
    problems("without_rows")
  with pytest.raises(ValueError, match=r"data.kind .*with_arguments takes no 'frist' \(did you"):
    problems("with_arguments", task_args={"count": 1, "frist": 2})


def no_row(*, seed):
  raise KeyError(seed)


def no_rows(config):
  raise KeyError("none")


def test_a_function_of_rows_that_raises_is_one_line_with_its_place():
  place = r"failed.*: .*test_in_memory_rows.py:\d+: KeyError"
  for kind, task in (("function", f"{__name__}.no_row"), (f"{__name__}.no_rows", None)):
    with pytest.raises(ValueError, match=place) as raised:
      data.make_held_out(ByteTokenizer(), kind=kind, task=task, size=3)
    assert "\n" not in str(raised.value)
