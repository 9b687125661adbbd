"""The examples of the library in README and docs/algorithms.md run as they stand."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/algorithms.md"])
def test_an_example_runs_unchanged_and_gives_a_gradient(page):
  blocks = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
  )
  blocks = [block for block in blocks if "grpo_jax.rl" in block]
  assert len(blocks) == 1
  scope: dict = {}
  with jax.numpy_rank_promotion("allow"):
    exec(compile(blocks[0], page, "exec"), scope)
  assert jnp.isfinite(scope["value"])
  assert scope["gradient"].shape == scope["mask"].shape
  learned = scope["mask"] & (scope["A"].reshape(-1, 1) != 0)
  assert (scope["gradient"][~learned] == 0).all() and (scope["gradient"][learned] != 0).all()


def test_the_table_of_clip_bounds_is_that_of_the_functions():
  from grpo_jax.rl import objectives

  rows = re.findall(
    r"^\| (`[a-z_`, ]+`) \| ([\de.-]+) \| ([\de.-]+) \| `(\w+)` \|$",
    (ROOT / "docs/algorithms.md").read_text(),
    re.MULTILINE,
  )
  assert len(rows) == 6
  for names, low, high, aggregation in rows:
    for name in re.findall(r"`(\w+)`", names):
      made = objectives.make(loss=name).options
      assert (made.clip_low, made.clip_high) == (float(low), float(high))
      assert made.aggregation == aggregation
