"""The form of the sampler's cache for accelerators; what both forms promise is in other files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.implementations import Chip
from jax.extend import core as extended

from grpo_jax.engines import (
  cache_forms,
  decoding,
  kv_cache,
  row_cache,
  sampler_inputs,
  sampler_weights,
  scheduling,
  sharing,
  stored_keys,
)
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.learn import sharding
from grpo_jax.models import leaves
from grpo_jax.models.products import Products
from tests.engines import tiny

ROWS = 8
PAGES = {"table": 2, "page": 4, "pages": 6}
POOLS = [Pool(None, table=2, page=4, count=6)]


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
  pages = jax.eval_shape(lambda: kv_cache.empty_pages((6,), 4, options))
  rows = scheduling.make_rows([], ROWS, {}, group=4, form=form, pools=POOLS)
  numbers = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

  def step(weights, pages, own, tokens, lengths, rows):
    given = weights, pages, own, tokens, lengths, jnp.int32(0), rows, options
    logits, own, _ = decoding.decode_step(*given)
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
  prompts = {b"a": ((3, 1), 6, 0), b"b": ((4,), 4, 8)}
  made = sharing.readers(active, prompts, count=ROWS, group=2, **PAGES)
  assert made.rows[[3, 1, 4]].tolist() == [[5, 2], [5, 2], [0, 0]]
  assert made.lengths.tolist() == [0, 2, 0, 4, 4, 0] and made.starts[[3, 1, 4]].tolist() == [
    0,
    4,
    8,
  ]
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


# --- on a mesh ---

R, K, C, E, PAGE = 8, 2, 6, 4, 3
MESHES = [
  ({"data": 2, "fsdp": 4}, ("data", "fsdp"), None),
  ({"data": 1, "fsdp": 4, "tensor": 2}, ("data", "fsdp"), "tensor"),
]


def on_mesh(shape, row_axes, head_axis):
  """Returns options of programs of tiny caches on a mesh of the eight devices."""
  config = tiny.config(num_layers=1)
  split = {"mesh": sharding.make_mesh(**shape), "row_axes": row_axes, "head_axis": head_axis}
  return sampler_inputs.ProgramOptions(config, Products(), 4, form="rows", group=4, **split)


def some(*shape):
  return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


class InProducts:
  """What the kernel of `grpo_kernels.decode_attention` computes."""

  @staticmethod
  def attend(asked, new, own, pages, tables, prompt_lengths, lengths, first):
    rows = jnp.arange(asked.shape[0])
    own = tuple(x.at[rows, :, lengths].set(one) for x, one in zip(own, new, strict=True))
    whole = []
    for columns, of_pages in zip(own, pages, strict=True):
      prompt = jnp.moveaxis(of_pages[tables], 2, 1)
      prompt = prompt.reshape(*prompt.shape[:2], -1, prompt.shape[-1])
      whole.append(jnp.concatenate([prompt, columns], axis=2))
    prompts = tables.shape[1] * pages[0].shape[2]
    place = jnp.arange(whole[0].shape[2])[None]
    number = jnp.where(place < prompts, place, place - prompts + prompt_lengths[:, None])
    is_seen = jnp.where(
      place < prompts, place < prompt_lengths[:, None], place - prompts <= lengths[:, None]
    )
    is_seen &= number >= first[:, None]
    scores = jnp.einsum("rkme,rkte->rkmt", asked, whole[0])
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rkmt,rkte->rkme", weights, whole[1]), own


def of_a_step(window=None):
  """Returns the arrays of `row_cache.attend` and what they are without a mesh."""
  rng = np.random.default_rng(0)
  asked, key, value = some(R, K, 3, E), some(R, K, E), 2 * some(R, K, E)
  own, pages = (some(R, K, C, E), 3 * some(R, K, C, E)), (some(5, K, PAGE, E), -some(5, K, PAGE, E))
  pools = [Pool(None, table=2, page=PAGE, count=5)]
  rows = scheduling.make_rows([], R, {}, group=4, form="rows", pools=pools)
  tables = rng.integers(0, 5, (R, 2)).astype(np.int32)
  prompts = rng.integers(1, 2 * PAGE + 1, R).astype(np.int32)
  of_rows = dataclasses.replace(rows.prompts[0], tables=sampler_inputs.Tables(tables, None))
  lengths = rng.integers(0, C, R).astype(np.int32)
  first = np.zeros(R, np.int32) if window is None else prompts + lengths - window + 1
  given = asked, (key, value), own, pages, tables, prompts, lengths, first
  wanted = InProducts.attend(*jax.tree.map(jnp.asarray, given))
  return (asked, key, value, own, pages, of_rows, (np.int32(0), lengths, prompts)), wanted


@pytest.mark.parametrize("window", [None, C + 1])
@pytest.mark.parametrize("mesh", MESHES, ids=["rows", "rows and heads"])
def test_each_device_of_a_mesh_runs_the_kernel_on_its_rows_and_heads(mesh, window, monkeypatch):
  monkeypatch.setattr(row_cache, "_kernel", lambda *_: InProducts)
  options = on_mesh(*mesh)
  given, (wanted, written) = of_a_step(window)
  step = jax.jit(lambda *arrays: row_cache.attend(*arrays, window, options))
  found, own = step(*given)
  np.testing.assert_allclose(found, wanted, atol=1e-6)
  for ours, theirs in zip(own, written, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert "all-gather" not in step.lower(*given).compile().as_text()


def test_on_a_mesh_the_kernel_needs_all_rows_of_the_cache(monkeypatch):
  monkeypatch.setattr(row_cache, "chip_of", lambda _: Chip("gpu", "NVIDIA H100", "9.0"))
  options = dataclasses.replace(on_mesh(*MESHES[0]), products=Products("bfloat16"))
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
  own, pages = (shape(16, K, 64, 64),) * 2, (shape(4, K, 64, 64),) * 2
  assert row_cache._kernel(shape(16, K, 3, 64), own, pages, options) is not None
  assert row_cache._kernel(shape(8, K, 3, 64), own, pages, options) is None
  same = dataclasses.replace(options, cache_dtype="bfloat16")
  assert row_cache._kernel(shape(16, K, 3, 64), own, pages, same) is not None
  other = dataclasses.replace(options, cache_dtype="int8")
  assert row_cache._kernel(shape(16, K, 3, 64), own, pages, other) is None


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.parametrize("mesh", MESHES, ids=["rows", "rows and heads"])
def test_rows_that_move_are_the_same_on_a_mesh(mesh, form):
  options = dataclasses.replace(on_mesh(*mesh), form=form)
  one_device = dataclasses.replace(options, mesh=None, row_axes=(), head_axis=None)
  rows = scheduling.make_rows([], R, {}, group=4, form=form, pools=[Pool(None, table=2)])
  moves = np.zeros_like(rows.moves)
  moves[:3] = [(7, 0), (5, 6), (0, 3)]  # the last takes what the first has brought.
  rows = dataclasses.replace(rows, moves=moves, num_moves=np.int32(3))
  shape = (R, K, C, E) if form == "rows" else (2, R, K, C, E)
  stored = lambda x: stored_keys.stored(x, dataclasses.replace(options, cache_dtype="int8"))
  own = [(some(*shape), -some(*shape)), (stored(some(*shape)), stored(-some(*shape)))]
  move = lambda options: jax.jit(lambda own: cache_forms.of(options).moved(own, rows, options))(own)
  jax.tree.map(np.testing.assert_array_equal, move(options), move(one_device))
