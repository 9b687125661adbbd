"""Reading many tokens at once costs what the caches hold, not what they have room for."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import parts

from grpo_jax.engines import (
  cached_attention,
  row_cache,
  sampler_inputs,
  sampler_sizes,
  scheduling,
  stored_keys,
)
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.models.products import Products
from tests.engines import tiny

OPTIONS = sampler_inputs.ProgramOptions(tiny.config(), Products(), chunk=1, form="rows")


def some(*shape):
  rng = np.random.default_rng(sum(shape))
  return jnp.asarray(rng.normal(size=shape).astype(np.float32))


@contextlib.contextmanager
def rounds_of_loops():
  """Counts the products of scores; without `jit`, a loop computes them in each of its rounds."""
  found, scores = [], stored_keys.scores

  def counted(*arguments):
    found.append(arguments[1])
    return scores(*arguments)

  with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
    patch.setattr(stored_keys, "scores", counted)
    yield found


@pytest.mark.parametrize(
  ("length", "rounds"), [(0, 0), (1, 1), (4 * 16, 1), (4 * 16 + 1, 2), (7 * 16, 2)]
)
def test_a_prompt_reads_the_pages_that_it_has_and_not_the_table(length, rounds):
  """The table has room for seven pages, which four at a time do not divide."""
  sizes = dataclasses.replace(sampler_sizes.unplanned(8, form="rows"), table=7)
  pages, asked = (some(9, 2, 16, 8), some(9, 2, 16, 8) + 1), some(1, 2, 3, 8)
  tables, lengths = jnp.asarray([[3, 1, 8, 0, 5, 2, 7]]), jnp.asarray([length])
  attend = lambda options: cached_attention.over_pages(
    asked, parts.nothing(asked), pages, tables, lengths, None, options
  )
  with rounds_of_loops() as found:
    few = attend(sizes.applied(OPTIONS))
  assert len(found) == rounds
  whole = attend(dataclasses.replace(OPTIONS, pages_at_once=7))
  for x, y in zip(jax.tree.leaves(few), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(("sampled", "rounds"), [(0, 0), (5, 1), (1030, 2), (4096, 4)])
def test_completions_that_are_read_again_read_the_columns_that_are_in_use(sampled, rounds):
  """Of 4096 columns, in parts of 1024. The last piece of a row reads all that lie before it."""
  completion = scheduling.RunningCompletion(tiny.request("x", [1, 2]), None, b"", row=1)
  completion.token_ids = [0] * (sampled + 1)
  slot, pool = scheduling.Slot(((0,),), 1), Pool(None, table=1, page=16, count=1)
  layout = {"tokens": 4, "piece": 4, "pools": [pool], "step": 5000}
  *_, last = scheduling.make_pieces([completion], {b"": slot}, **layout)
  last = dataclasses.replace(last, past=np.asarray([sampled], np.int32))
  own, asked = (some(2, 2, 4096, 8), some(2, 2, 4096, 8)), some(1, 2, 4, 8)
  with rounds_of_loops() as found:
    row_cache.over_past(asked, parts.nothing(asked), own, last, None, OPTIONS)
  assert len(found) == rounds
