"""From a config to the shapes of its run: few, long enough, and explained where they cannot be."""

import functools
import pathlib
from typing import Any

import pytest

import configs.base
from grpo_jax.batching import packing
from grpo_jax.config import batching_options, configuration, run_options
from grpo_jax.config.configuration import typed
from grpo_jax.learn import operations
from grpo_jax.models.config import ModelConfig

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = [path for path in sorted((ROOT / "configs").glob("*.py")) if path.stem != "__init__"]
QWEN25_1B = ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, tie_embeddings=True)
COST = operations.update_cost(QWEN25_1B)


def make_config(**fields):
  config = configs.base.get_config()
  config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
  return config


@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_plan_few_shapes_that_hold_everything(path, replicas):
  config: Any = configuration.load(str(path))
  load = batching_options.load(typed(config))
  shapes = batching_options.plan(typed(config), cost=COST, replicas=replicas)
  assert 2 <= len(shapes) <= 3
  assert max(shape.row_tokens for shape in shapes) >= load.longest
  # A microbatch takes no more than it may, but for a row that must be longer, and is rounded up.
  most = max(config.batching.microbatch_tokens, load.longest + 31)
  assert max(shape.places for shape in shapes) <= replicas * most
  assert all(shape.rows % replicas == 0 for shape in shapes)
  assert shapes == batching_options.plan(typed(config), cost=COST, replicas=replicas)


def test_rows_of_math_1b_share_prompts():
  [full, *_] = batching_options.plan(
    typed(configuration.load(str(ROOT / "configs" / "math_1b.py"))), cost=COST, replicas=1
  )
  assert full.row_tokens >= 4 * 512  # four completions at least, where one was alone.


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    ({}, packing.Load(512, 512, 1024, 16, 32)),
    ({"rollout.max_tokens": 600}, packing.Load(512, 512, 600, 16, 32)),
    ({"sampling.max_tokens": 64}, packing.Load(512, 64, 576, 16, 32)),
    ({"learn.minibatches": 5}, packing.Load(512, 512, 1024, 16, 7)),
    ({"rollout.max_turns": 4, "sampling.max_tokens": 64}, packing.Load(512, 1023, 1024, 16, 32)),
    ({"rollout.conversations": True}, packing.Load(512, 1023, 1024, 16, 32)),
    ({"batching.row_tokens": 300}, packing.Load(299, 299, 300, 16, 32)),
    ({"batching.row_buckets": (256, 700)}, packing.Load(512, 512, 700, 16, 32)),
    ({"mode": "offline"}, packing.Load(512, 1023, 1024, 16, 32)),
    ({"mode": "offline", "offline.group_size": 4}, packing.Load(512, 1023, 1024, 4, 32)),
    (
      {"data.datasets": ({"name": "a", "path": "a"}, {"path": "b", "max_prompt_tokens": 700})},
      packing.Load(700, 512, 1024, 16, 32),
    ),
  ],
)
def test_load_is_what_the_config_allows(fields, expected):
  assert batching_options.load(typed(make_config(**fields))) == expected


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"batching.row_buckets": (64, 128, 256, 512)},
      "names 4 row lengths: a run compiles at most 3 shapes of the update",
    ),
    (
      {"batching.row_buckets": (128, 512), "batching.row_tokens": 256},
      "has rows longer than batching.row_tokens=256",
    ),
  ],
)
def test_rows_that_cannot_be_are_refused_before_the_run(fields, message):
  assert not [line for line in run_options.validate(make_config()) if "row_" in line]
  assert message in "\n".join(run_options.validate(make_config(**fields)))


def test_row_lengths_that_are_given_bound_prompts_and_completions():
  assert run_options.limits(typed(make_config())).max_tokens == 1024
  assert run_options.limits(typed(make_config(**{"batching.row_tokens": 300}))).max_tokens == 300
  given = {"batching.row_tokens": 700, "batching.row_buckets": (128, 512)}
  assert run_options.limits(typed(make_config(**given))).max_tokens == 512


def test_rows_that_cannot_be_divided_over_devices_name_what_would_fit():
  config = typed(make_config(batching__row_tokens=700))
  plan = functools.partial(batching_options.plan, config, cost=COST, replicas=1)
  assert plan(parts=4)[0].row_tokens == 700
  with pytest.raises(configuration.ConfigError) as refused:
    plan(parts=8)
  for part in ("mesh.context=8 divides", "rows of 700 tokens", "such as 704", "or mesh.context=4"):
    assert part in str(refused.value)
