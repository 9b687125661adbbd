"""Sums and products made from seeds; the oracle is reasoning-gym, whose rows they are."""

import pytest

from grpo_jax import data
from grpo_jax.data import arithmetic_problems
from grpo_jax.data.byte_tokenizer import ByteTokenizer

SETTINGS = [
  {},
  dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
  dict(min_terms=1, max_terms=9, min_digits=2, max_digits=6),
]


@pytest.mark.parametrize("name", ["chain_sum", "products"])
def test_the_rows_are_those_of_reasoning_gym(name):
  import reasoning_gym

  for settings in SETTINGS:
    for seed in (1, 1_000_003):
      wanted = reasoning_gym.create_dataset(name, seed=seed, size=500, **settings)
      for row in range(500):
        found = getattr(arithmetic_problems, name)(seed=seed + row, **settings)
        entry = wanted[row]
        assert found == {"problem": entry["question"], "expected_answer": entry["answer"]}


def opened(**task_args):
  return data.make_held_out(
    ByteTokenizer(),
    kind="function",
    task="grpo_jax.data.arithmetic_problems.chain_sum",
    task_args=task_args,
    task_seed=1,
    size=3,
  )


def test_a_prompt_has_the_name_that_seeds_its_samples():
  assert [prompt.prompt_id for prompt in opened()][0] == "chain_sum-1:0:0"


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"min_terms": 9}, "min_terms=9 is larger than data.task_args.max_terms=6"),
    ({"max_digits": 0}, "max_digits must be an integer >= 1, got 0"),
    ({"max_digits": "2"}, "max_digits must be an integer >= 1, got '2'"),
    ({"maxterms": 2}, "takes no 'maxterms'.*did you mean 'max_terms'"),
  ],
)
def test_settings_out_of_range_are_named(settings, message):
  with pytest.raises(ValueError, match=message):
    opened(**settings)
