"""The sizes that the embedded sampler is made for follow from the config alone."""

import pytest

import configs.base
from configs import gsm8k, math_1b, quickstart
from grpo_jax.config import run_options
from grpo_jax.config.configuration import typed
from grpo_jax.engines import sampler_sizes, scheduling
from grpo_jax.engines.options import USUAL_ROWS


def planned(config):
  sizes = run_options.sampler_sizes(typed(config))
  rows = sizes.pop("max_rows")
  assert sizes.pop("has_filters") in (True, False) and sizes.pop("cache_dtype") is None
  assert sizes["sampled_bytes"] is None
  group, long_prompts = sizes.pop("group_size"), sizes.pop("long_prompts")
  of_groups = -(-rows // group)
  return sampler_sizes.planned(
    rows, **sizes, long_prompts=long_prompts or of_groups, token_bytes={None: 46080}, form="ring"
  )


@pytest.mark.parametrize("module", [quickstart, gsm8k, math_1b])
def test_shipped_configs_need_four_programs_and_room_for_their_limits(module):
  config = module.get_config()
  sizes, limit = planned(config), run_options.limits(typed(config)).max_tokens
  assert len(scheduling.row_counts(sizes.rows)) + 1 <= 4
  longest = min(config.data.max_prompt_tokens, limit - 1)
  assert sizes.table * sizes.page >= longest - 1
  assert sizes.blocks * sizes.columns >= min(config.sampling.max_tokens, limit - 1)
  assert sizes.pages >= sizes.rows / config.rollout.group_size * sizes.table


def test_rows_are_no_more_than_a_step_or_an_evaluation_asks_for():
  config = configs.base.get_config()
  config.rollout.prompts_per_step, config.rollout.group_size = 4, 5
  config.evaluation.num_prompts = 30
  assert run_options.sampler_sizes(typed(config))["max_rows"] == 30
  config.evaluation.num_prompts = 3
  assert run_options.sampler_sizes(typed(config))["max_rows"] == 20
  config.dynamic_sampling.prompts_per_round = 400
  assert run_options.sampler_sizes(typed(config))["max_rows"] == USUAL_ROWS


def test_evaluations_and_conversations_are_planned_for():
  config = configs.base.get_config()
  config.rollout.max_tokens = 1000
  config.sampling.max_tokens = 100
  config.evaluation.sampling.max_tokens = 300
  sizes = run_options.sampler_sizes(typed(config))
  assert sizes["completion_tokens"] == 300
  assert sizes["prompt_tokens"] == config.data.max_prompt_tokens
  config.rollout.max_turns = 3
  sizes = run_options.sampler_sizes(typed(config))
  assert sizes["prompt_tokens"] == 999 and sizes["long_prompts"] == sizes["max_rows"]


@pytest.mark.parametrize("form", ["ring", "rows"])
def test_caches_are_planned_within_four_gib_and_hold_the_longest_prompt(form):
  limits = {"prompt_tokens": 3000, "completion_tokens": 5000, "long_prompts": 64}
  small = sampler_sizes.planned(64, **limits, token_bytes={None: 256}, form=form)
  assert small.blocks * small.columns >= 5000 and small.pages == 64 * small.table
  large = sampler_sizes.planned(64, **limits, token_bytes={None: 46080}, form=form)
  assert large.rows * large.blocks * large.columns * 46080 <= 4.2 * 2**30
  assert large.pages * large.page * 46080 <= 4 * 2**30
  huge = sampler_sizes.planned(64, **limits, token_bytes={None: 1 << 26}, form=form)
  assert huge.pages == huge.table and huge.table * huge.page >= 2999
