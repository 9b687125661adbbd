"""Which environment scores a row, and stop strings of a row."""

import asyncio
import json

import numpy as np
import pytest

from grpo_jax import data, environments
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import RowError
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


def test_an_environment_that_does_not_exist_is_reported_with_its_line(read):
  message = r"rows.jsonl:2: environment 'maths' .*did you mean 'math'.*math, code"
  with pytest.raises(RowError, match=message):
    read({}, {"environment": "maths"})


def test_a_row_may_have_stop_strings_of_its_own(read):
  first, second = read({"stop_strings": ["</a>", "."]}, {})
  assert (first.stop_strings, second.stop_strings) == (("</a>", "."), ())
  with pytest.raises(RowError, match="rows.jsonl:1: 'stop_strings' must be a list of strings"):
    read({"stop_strings": "</a>"})


@pytest.mark.long
def test_one_environment_scores_rows_of_several_tasks_each_by_its_own():
  settings = dict(kind="reasoning_gym", size=2, task_seed=5, environment="gym")
  names = ("letter_counting", "chain_sum")
  sets = [data.make_held_out(ByteTokenizer(), task=name, **settings) for name in names]
  with environments.make(gym=dict(module="reasoning_gym", workers=1, timeout_s=30.0)) as made:

    def judge(prompt):
      async def body():
        environment = made["gym"](prompt)
        await environment.start()
        answer = str(prompt.info["entry"]["answer"])
        return await environment.step(answer, np.zeros(0, np.int32), FinishReason.STOP)

      return asyncio.run(body())

    for one, other in zip(*sets, strict=True):
      for prompt in (one, other):
        result, task = judge(prompt), prompt.info["task"]
        assert result.total == result.metrics[f"{task}/accuracy"] == 1.0
        assert sum(name.endswith("/accuracy") for name in result.metrics) == 1
