"""How many evaluation prompts are also in the training data."""

import json
import time

import pytest

from grpo_jax import data
from grpo_jax.data import overlap
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.group_options import RecordedOptions
from grpo_jax.offline import recorded_groups

TOKENIZER = ByteTokenizer()


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def problems(numbers, **more):
  return [
    {"problem": f"What is {n} + {n}?", "expected_answer": str(2 * n), **more} for n in numbers
  ]


def counted(training, evaluation, *, limit=100, reads=10**6, opener=data.open_dataset, **options):
  """Compares a set with training data, given by the fields of both."""
  stream = data.make(TOKENIZER, opener=opener, seed=3, **training)
  before = stream.state()
  sets = {"set": opener(TOKENIZER, **evaluation)}
  found = overlap.count(stream.loaders, sets, limit=limit, reads=reads, **options)["set"]
  assert stream.state() == before  # the data are read in the same order afterwards.
  return found


def test_prompts_that_two_files_share_are_counted(tmp_path):
  training = {"path": write(tmp_path / "train.jsonl", problems(range(200)))}
  rows = problems(range(188, 288), source="elsewhere")
  rows[0]["problem"] = "  What is\n188 + 188?"  # white space does not matter.
  test = {"path": write(tmp_path / "test.jsonl", rows)}
  found = counted(training, test)
  assert (found.shared, found.prompts, found.compared) == (12, 100, 200)
  assert found.is_complete and not found.is_trained and not found.by_chance
  # What the config says of the data does not matter either.
  styled = {**test, "system_prompt": "Be brief.", "prompt_template": "Q: {}"}
  assert counted(training, styled).shared == 12
  assert counted(training, test, limit=10).prompts == 10
  whole = counted(training, {"path": write(tmp_path / "copy.jsonl", problems(range(50)))})
  assert whole.is_trained and (whole.shared, whole.prompts) == (50, 50)
  assert counted(training, {"path": write(tmp_path / "new.jsonl", problems([777]))}).shared == 0


def test_a_broken_row_is_not_compared(tmp_path):
  training = {"path": write(tmp_path / "train.jsonl", [{"problem": 7}, *problems([1])])}
  test = {"path": write(tmp_path / "test.jsonl", problems([1, 2]))}
  assert counted(training, test).shared == 1


def test_chats_are_compared_by_all_their_messages(tmp_path):
  def chat(first, last):
    said = [("user", first), ("assistant", "yes"), ("user", last), ("assistant", "no")]
    return {"messages": [{"role": role, "content": text} for role, text in said]}

  training = {"path": write(tmp_path / "train.jsonl", [chat("a", "go on"), chat("b", "go on")])}
  test = {"path": write(tmp_path / "test.jsonl", [chat("b", "go on"), chat("c", "go on")])}
  assert counted(training, test).shared == 1


def test_rows_without_an_answer_are_distinguished_by_their_other_fields(tmp_path):
  rows = [{"problem": "Play.", "board": board} for board in range(4)]
  training = {"path": write(tmp_path / "train.jsonl", rows[:3]), "output_key": ""}
  test = {"path": write(tmp_path / "test.jsonl", rows[2:]), "output_key": ""}
  assert counted(training, test).shared == 1


def test_the_two_sides_of_a_split_share_what_the_file_has_twice(tmp_path):
  path = write(tmp_path / "train.jsonl", problems([*range(20), *range(20)]))
  split = {"path": path, "split_validation_size": 8, "split_seed": 1}
  training, test = ({**split, "side": side} for side in ("train", "validation"))
  found = counted(training, test)
  assert 0 < found.shared == found.same <= 8


def test_the_comparison_ends_in_time_and_says_so(tmp_path, monkeypatch):
  training = {"path": write(tmp_path / "train.jsonl", problems(range(100)))}
  test = {"path": write(tmp_path / "test.jsonl", problems(range(100)))}
  times = iter(range(10**6))
  monkeypatch.setattr(time, "monotonic", lambda: next(times))
  found = counted(training, test, longest_s=10.0)
  assert found.compared == 10 and found.shared == 10 and not found.is_complete
  # The same file is recognised without a comparison of all its rows.
  same = counted(training, {**training, "prompt_template": "{}"}, longest_s=3.0)
  assert same.same == 100 and same.is_trained


SUMS = {"kind": "function", "task": f"{__name__}.sums", "size": 1000, "task_seed": 0}


def sums(*, seed):
  """A row of one of 50 problems."""
  return {"problem": f"What is {seed % 50} + 1?", "expected_answer": str(seed % 50 + 1)}


def test_of_a_task_the_rows_that_the_run_reads_and_those_of_equal_seeds_are_compared():
  few = counted(SUMS, {**SUMS, "task_seed": 10**6}, limit=50, reads=10)
  assert few.compared == 10 and few.shared == 10 - repeated(10) and few.by_chance
  many = counted(SUMS, {**SUMS, "task_seed": 10**6}, limit=50)
  assert (many.shared, many.same, many.prompts) == (50, 0, 50)
  assert not many.is_trained  # other seeds: they are drawn from the same task.
  near = counted(SUMS, {**SUMS, "task_seed": 990}, limit=20, reads=0)
  assert (near.shared, near.same) == (10, 10) and not near.is_trained
  inside = counted(SUMS, {**SUMS, "task_seed": 400}, limit=20, reads=0)
  assert inside.is_trained and inside.same == 20


def repeated(reads):
  """Returns how many of the first prompts that the run reads it has read before."""
  asked = [p.info["problem"] for p in data.make(TOKENIZER, seed=3, **SUMS).take(reads)]
  return len(asked) - len(set(asked))


@pytest.mark.parametrize("seed, shared", [(2, 99), (1001, 0)])
def test_seeds_of_reasoning_gym_that_are_too_near_share_rows(seed, shared):
  pytest.importorskip("reasoning_gym")
  args = {"min_terms": 6, "max_terms": 6, "min_digits": 4, "max_digits": 4}
  task = {"kind": "reasoning_gym", "task": "chain_sum", "task_args": args, "size": 100}
  found = counted({**task, "task_seed": 1}, {**task, "task_seed": seed}, reads=0)
  assert found.same == shared


def test_recorded_groups_are_compared_by_their_prompts(tmp_path):
  def group(prompt, best):
    responses = [{"response": best, "rank": 1}, {"response": "?", "rank": 2}]
    return {"prompt": prompt, "group": responses}

  def opener(tokenizer, **fields):
    return recorded_groups.open_groups(
      tokenizer, options=RecordedOptions(), on_error="stop", **fields
    )

  training = {"path": write(tmp_path / "train.jsonl", [group(p, "a") for p in "abcd"])}
  test = {"path": write(tmp_path / "test.jsonl", [group(p, "b") for p in "cdef"])}
  found = counted(training, test, opener=opener)
  assert (found.shared, found.same) == (2, 0)
  # The same prompts with other responses are other groups.
  others = {"path": write(tmp_path / "others.jsonl", [group(p, "b") for p in "ab"])}
  found = counted(training, others, opener=opener)
  assert (found.shared, found.same, found.is_trained) == (2, 0, False)
  # Problems of the same text ask the same.
  asked = [{"problem": p, "expected_answer": "?"} for p in "dx"]
  problem = data.open_dataset(TOKENIZER, path=write(tmp_path / "problems.jsonl", asked))
  loaders = data.make(TOKENIZER, opener=opener, seed=3, **training).loaders
  found = overlap.count(loaders, {"set": problem}, limit=9, reads=9)["set"]
  assert (found.shared, found.prompts) == (1, 2)
  copy = {"path": write(tmp_path / "copy.jsonl", [group(p, "a") for p in "ab"])}
  assert counted(training, copy, opener=opener).is_trained
