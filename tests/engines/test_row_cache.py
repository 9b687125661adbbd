"""The form of the sampler's cache for accelerators; what both forms promise is in other files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as extended

from grpo_jax.engines import (
  cache_forms,
  decoding,
  kv_cache,
  sampler_inputs,
  sampler_weights,
  scheduling,
  sharing,
)
from grpo_jax.models import leaves
from grpo_jax.models.products import Products
from tests.engines import tiny

ROWS = 8
PAGES = {"table": 2, "page": 4, "pages": 6}


def primitives(jaxpr):
  """Yields the names of all primitives of a program, those of inner programs included."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for inner in extended.jaxprs_in_params(equation.params):
      yield from primitives(inner)


def of_step(form, has_filters):
  """Returns the primitives of a decode step and of drawing its tokens."""
  config = tiny.config(num_layers=2)
  options = sampler_inputs.ProgramOptions(config, Products(), 4, form=form, group=4)
  options = dataclasses.replace(options, has_filters=has_filters)
  weights = jax.eval_shape(
    lambda tree: sampler_weights.split_layers(tree, options),
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), leaves.tree(config)),
  )
  own = jax.eval_shape(lambda: cache_forms.of(options).empty(2, ROWS, 8, options))
  pages = jax.eval_shape(lambda: kv_cache.empty_pages(6, 4, options))
  rows = scheduling.make_rows([], ROWS, {}, group=4, form=form, **PAGES)
  numbers = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

  def step(weights, pages, own, tokens, lengths, rows):
    given = weights, pages, own, tokens, lengths, jnp.int32(0), rows, options
    logits, own = decoding.decode_step(*given)
    return decoding._drawn(logits, lengths, rows, options), own

  return set(primitives(jax.make_jaxpr(step)(weights, pages, own, numbers, numbers, rows).jaxpr))


def test_a_step_without_filters_asks_the_host_nothing():
  waits = {"while", "cond"}
  assert not waits & of_step("rows", False)
  # The bisections of filters are loops of a known length, which are `scan`.
  assert not waits & of_step("rows", True) and "scan" in of_step("rows", True)
  assert waits <= of_step("ring", None)


def test_each_page_lists_its_readers_and_each_row_its_places():
  active = [(b"a", 5), (b"b", 0), (b"a", 2)]
  prompts = {b"a": ((3, 1), 6), b"b": ((4,), 4)}
  made = sharing.readers(active, prompts, count=ROWS, group=2, **PAGES)
  assert made.rows[[3, 1, 4]].tolist() == [[5, 2], [5, 2], [0, 0]]
  assert made.lengths.tolist() == [0, 2, 0, 4, 4, 0] and made.starts[[3, 1]].tolist() == [0, 4]
  assert made.places[[5, 2, 0, 1]].tolist() == [[6, 2], [7, 3], [8, -1], [-1, -1]]
  with pytest.raises(ValueError, match="2 rows read the same pages, which have room for 1"):
    sharing.readers(active, prompts, count=ROWS, group=1, **PAGES)


@pytest.mark.long
def test_rows_of_one_prompt_read_copies_of_it_where_they_are_more_than_a_page_has_readers():
  engine = tiny.sampler(tiny.config(num_layers=1), form="rows", group_size=3)
  requests = tiny.groups([[1, 2, 3, 4], [5, 6]], 8, max_tokens=6)
  found = tiny.run(engine, requests)
  assert engine.stats.prefilled_prompts == 6  # three copies of each: 3 + 3 + 2 rows.
  wanted = tiny.run(tiny.sampler(tiny.config(num_layers=1)), requests)
  for name, generation in wanted.items():
    assert found[name].token_ids.tolist() == generation.token_ids.tolist()
    np.testing.assert_allclose(found[name].logprobs, generation.logprobs, atol=1e-5)
