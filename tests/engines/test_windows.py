"""Layers with a window keep their window only, and sample what the trainer computes."""

import asyncio
import dataclasses

import numpy as np
import pytest

from grpo_jax.engines import given_tokens, prompt_pages, scheduling
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.models.config import LayerKind, Rope
from tests.engines import tiny, updates

# Windows shorter and longer than a prompt, a page, a block of columns and a completion.
CONFIG = tiny.config(
  "qwen2",
  num_layers=3,
  layer_kinds=(LayerKind(5), LayerKind(None, None), LayerKind(70, 1)),
  further_ropes=(Rope(77.0),),
)
LENGTHS = (1, 66, 150)


def requests_of():
  """Returns two completions of prompts of these lengths, each with 250 tokens in all."""
  rng = np.random.default_rng(0)
  return [
    tiny.request(f"{length}.{g}", rng.integers(0, 61, length), seed=g, max_tokens=250 - length)
    for length in LENGTHS
    for g in range(2)
  ]


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_completions_longer_than_windows_have_the_trainers_logprobs(form):
  """The caches grow under way, and new weights read them again."""
  engine = tiny.sampler(CONFIG, form=form, version=0, max_rows=8)
  # Several calls for a prompt and for a row, and a prompt of more pages than a window keeps.
  engine._sizes = dataclasses.replace(engine._sizes, prefill=128, page=16)
  requests, trees = requests_of(), [tiny.params(CONFIG, seed) for seed in range(2)]
  found = updates.run(engine, requests, trees[1:], (55,))
  assert {v for g in found.values() for v in g.weight_versions.tolist()} == {0, 1}
  wanted = updates.trainer_logprobs(CONFIG, trees, requests, found)
  assert updates.mismatch(found, wanted) < 2e-5


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_given_tokens_beyond_the_windows_have_the_trainers_logprobs(form, monkeypatch):
  sizes = given_tokens._Sizes(64, 16, 3)  # two windows of three pages, or one.
  monkeypatch.setitem(given_tokens._SIZES, form, sizes)
  engine, tree = tiny.sampler(CONFIG, form=form), tiny.params(CONFIG)
  scorer = given_tokens.GivenTokenScorer(engine, max_length=250)
  ids = np.random.default_rng(1).integers(0, 61, 240).astype(np.int32)
  found = asyncio.run(scorer.score(ids, np.ones(239, np.float32)))
  wanted = tiny.of_tokens(tiny.model_logprobs(CONFIG, tree, ids[:1], ids[1:]), ids[1:])
  np.testing.assert_allclose(found.logprobs, wanted, atol=2e-5)


@pytest.mark.long
def test_prompts_wait_for_the_pages_of_a_window_and_are_all_served():
  sizes = {"prompt_tokens": 200, "completion_tokens": 12, "group_size": 2, "long_prompts": 1}
  engine = tiny.sampler(CONFIG, max_rows=2, **sizes)
  assert [pool.count for pool in engine._sizes.pools(CONFIG)] == [2, 4, 3]
  requests = tiny.groups([[i] * (190 + i) for i in range(3)], 1)
  assert len(tiny.run(engine, requests)) == 3


@pytest.mark.parametrize(("window", "kept"), [(1, 1), (2, 1), (3, 2), (18, 2), (19, 3), (999, 5)])
def test_a_window_keeps_the_pages_that_it_may_reach_over(window, kept):
  assert prompt_pages.table_of(window, 5, 16) == kept
  reached = lambda end: {(end - back) // 16 for back in range(1, min(window, end + 1))}
  assert max(1, *(len(reached(end)) for end in range(64, 80))) == kept


def test_a_prompt_goes_round_its_pages_and_only_its_last_tokens_are_written():
  pool, pages = Pool(7, table=3, page=4, count=9), (8, 2, 5)
  assert pool.places(pages, np.arange(0, 24, 4)).tolist() == [8, 2, 5, 8, 2, 5]
  assert pool.listed(pages, 0) == ([], 0) and pool.listed(pages, 12) == ([8, 2, 5], 0)
  assert pool.listed(pages, 13) == ([2, 5, 8], 4)
  prompt = (np.arange(18), scheduling.Slot((pages,), 18))
  chunks = [*scheduling.make_chunks([prompt], tokens=16, pools=[pool])]
  # The first page is left out: the last token of the chunk is in the page that takes its place.
  assert chunks[0].pages[0].tolist() == [9] * 4 + [2] * 4 + [5] * 4 + [8] * 4
  assert chunks[1].pages[0].tolist() == [2, 2, *[9] * 14]
  held = chunks[1].past_pages[0]
  assert held.pages.tolist() == [2, 5, 8] and held.starts == 4
