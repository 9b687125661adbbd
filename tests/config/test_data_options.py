"""Fields of data that name nothing, or that have no effect, are refused by their names."""

import pytest

import configs.base
from grpo_jax.config import run_options


def complaints(**options):
  """Returns what is wrong because of some fields, with __ in place of dots."""
  config = configs.base.get_config()
  usual = {"data.task": "chain_sum", "data.environment": "math", "evaluation.data.size": 8}
  own = {name.replace("__", "."): value for name, value in options.items()}
  config.update_from_flattened_dict(usual | own)
  found = run_options.validate(config)
  return [each for each in found if each.startswith(("data", "evaluation", "offline", "unknown"))]


TWO = [{"task": "basic_arithmetic", "name": "a"}, {"task": "leg_counting", "name": "b"}]
FILES = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]


@pytest.mark.parametrize(
  ("options", "wrong"),
  [
    ({}, None),
    ({"data__datasets": TWO, "data__task": None}, None),
    (
      {"data__datasets": TWO},
      "data.task='chain_sum' has no effect: every entry of data.datasets has data of its own",
    ),
    ({"data__datasets": TWO, "data__task": None, "data__path": "2147483648"}, "data.path='21474"),
    ({"data__datasets": FILES, "data__task": None, "data__path": "x.jsonl"}, "data.path='x.jsonl'"),
    ({"data__datasets": [{"name": "a"}, {"path": "b.jsonl"}]}, None),  # the first has the task.
    (
      {"evaluation__datasets": FILES, "evaluation__data__path": "x.jsonl"},
      "evaluation.data.path='x.jsonl' has no effect: every entry of evaluation.datasets has",
    ),
    (  # the first set has the path, and is not evaluated, because it is training rows.
      {
        **{"data__task": None, "data__path": "x.jsonl", "evaluation__data__path": "x.jsonl"},
        "evaluation__datasets": [{"name": "a"}, {"path": "b.jsonl"}],
      },
      None,
    ),
    ({"data__task": None, "data__dataset": "nan"}, "data: unknown dataset 'nan'"),
    ({"offline__reasoning": "nan"}, "offline.reasoning must be one of 'think', 'drop', got 'nan'"),
    ({"offline__tools": "nan"}, "offline.tools must be one of 'refuse', 'ignore', got 'nan'"),
    ({"offline__rank_ties": "nan"}, "offline.rank_ties must be one of"),
    ({"offline__rank_best": "nan"}, "offline.rank_best must be one of 'lowest', 'highest'"),
    ({"offline__rank_reward": "nan"}, "unknown mapping of ranks 'nan'"),
  ],
  ids=str,
)
def test_what_has_no_effect_or_no_meaning_is_refused(options, wrong):
  found = complaints(**options)
  assert found == [] if wrong is None else any(each.startswith(wrong) for each in found), found
