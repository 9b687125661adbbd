"""Which environment scores a row, and mixtures of reasoning-gym tasks."""

import asyncio
import collections
import json

import numpy as np
import pytest

from grpo_jax import data, environments
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import RowError
from grpo_jax.data.mixture import assign
from grpo_jax.types import FinishReason

ENVIRONMENTS = ("math", "code")


@pytest.fixture
def read(tmp_path):
  def read(*rows, **settings):
    path = tmp_path / "rows.jsonl"
    fields = {"problem": "1 + 1?", "expected_answer": "2"}
    path.write_text("".join(json.dumps(fields | row) + "\n" for row in rows))
    settings = {"known_environments": ENVIRONMENTS} | settings
    return data.make_held_out(ByteTokenizer(), path=path, **settings)

  return read


def test_a_row_goes_to_the_environment_of_its_dataset_unless_it_names_one(read):
  rows = [{}, {"environment": "code"}, {"task_name": "code"}, {"task_name": "DeepScaleR"}]
  rows += [{"environment": "math", "task_name": "code"}]
  prompts = read(*rows)
  assert [p.environment for p in prompts] == ["math", "code", "code", "math", "math"]
  assert prompts[3].info["task_name"] == "DeepScaleR"  # a label; it travels on.
  mine = read(*rows, environment="code", rows_choose_environment=False)
  assert [p.environment for p in mine] == ["code"] * 5


def test_an_environment_that_does_not_exist_is_told_with_its_line(read):
  message = r"rows.jsonl:2: environment 'maths' .*did you mean 'math'.*math, code"
  with pytest.raises(RowError, match=message):
    read({}, {"environment": "maths"})


def test_a_row_may_have_stop_strings_of_its_own(read):
  first, second = read({"stop_strings": ["</a>", "."]}, {})
  assert (first.stop_strings, second.stop_strings) == (("</a>", "."), ())
  with pytest.raises(RowError, match="rows.jsonl:1: 'stop_strings' must be a list of texts"):
    read({"stop_strings": "</a>"})


MIXTURE = {
  "sums": {"task": "chain_sum", "weight": 3, "task_args": {"max_terms": 2}},
  "letter_counting": {},
}


def mixed(size=40, seed=5, mixture=MIXTURE, **settings):
  return data.make_held_out(
    ByteTokenizer(),
    kind="reasoning_gym",
    mixture=mixture,
    size=size,
    task_seed=seed,
    environment="gym",
    **settings,
  )


def test_a_mixture_has_its_shares_exactly_and_each_row_its_own_task():
  prompts = mixed()
  assert collections.Counter(p.info["mixture"] for p in prompts) == {
    "sums": 30,
    "letter_counting": 10,
  }
  assert {p.info["task"] for p in prompts if p.info["mixture"] == "sums"} == {"chain_sum"}
  labels = [p.info["mixture"] for p in prompts]
  assert labels != sorted(labels) and labels != sorted(labels, reverse=True)  # mixed.
  assert labels == [p.info["mixture"] for p in mixed()]
  assert labels != [p.info["mixture"] for p in mixed(seed=6)]
  assert len({p.text for p in prompts}) == 40


def test_a_row_of_a_mixture_is_that_row_of_its_task():
  (alone,) = [
    p
    for p in data.make_held_out(
      ByteTokenizer(),
      kind="reasoning_gym",
      task="chain_sum",
      task_args={"max_terms": 2},
      size=40,
      task_seed=5,
    )
    if p.prompt_id.endswith(":17")
  ]
  mixture = {"sums": MIXTURE["sums"], "letter_counting": {"weight": 1e-9}}
  assert mixed(mixture=mixture)[17].text == alone.text


@pytest.mark.parametrize(
  ("weights", "size", "counts"),
  [([1.0] * 3, 10, [4, 3, 3]), ([2.0, 1.0], 3, [2, 1]), ([0.9, 0.1], 4, [4, 0]), ([5.0], 7, [7])],
)
def test_shares_are_rounded_by_the_largest_remainder(weights, size, counts):
  found = assign(weights, size, seed=1)
  assert np.bincount(found, minlength=len(weights)).tolist() == counts and len(found) == size


@pytest.mark.parametrize(
  ("mixture", "message"),
  [
    ({"chain_sums": {}}, "'chain_sums'.*did you mean 'chain_sum'"),
    ({"chain_sum": {"wieght": 2}}, "data.mixture.chain_sum.*'wieght'.*did you mean 'weight'"),
    ({"chain_sum": {"weight": 0}}, "weight of 'chain_sum' must be positive, got 0"),
    ({"chain_sum": {"task_args": {"max_term": 2}}}, "no argument 'max_term'.*'max_terms'"),
  ],
)
def test_a_mixture_that_cannot_be_made_is_refused(mixture, message):
  with pytest.raises(ValueError, match=message):
    mixed(mixture=mixture)


def test_a_task_and_a_mixture_exclude_each_other():
  with pytest.raises(ValueError, match="give data.task or data.mixture, not both: 'chain_sum'"):
    mixed(task="chain_sum")


def test_each_row_of_a_mixture_is_scored_by_its_task_and_told_apart():
  prompts = mixed(size=8)
  with environments.make(gym=dict(module="reasoning_gym", workers=1, timeout_s=30.0)) as made:

    def judge(prompt):
      async def body():
        environment = made["gym"](prompt)
        await environment.start()
        answer = str(prompt.info["entry"]["answer"])
        return await environment.step(answer, np.zeros(0, np.int32), FinishReason.STOP)

      return asyncio.run(body())

    for prompt in prompts:
      result, label = judge(prompt), prompt.info["mixture"]
      assert result.total == 1.0
      assert result.metrics[f"{label}/accuracy"] == result.metrics["accuracy"] == 1.0
      assert sum(name.endswith("/accuracy") for name in result.metrics) == 1
