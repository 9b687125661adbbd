"""The Pallas kernels for TPU, in the interpreter that simulates one, with tiles small enough."""

import functools
import types

import attention_conformance as conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import (
  choice,
  core,
  pallas_tpu,
  pallas_tpu_kernels,
  pallas_tpu_tiles,
  reference,
  visible,
)
from grpo_kernels.attention.core import NOTHING, Settings
from grpo_kernels.attention.pallas_tpu_tiles import FIRST, LAST, MIB, PARTIAL, WHOLE, Tiles

TILES = Tiles(size=128, vmem_limit_bytes=64 * MIB)
SMALL = pallas_tpu.PallasTpu(tiles=TILES)
LENGTH = 300  # three tiles, the last of which is filled up.


def tree(seed, length=LENGTH):
  """Returns a row of random groups, some of whose prompts have one token, or no completion."""
  rng = np.random.default_rng(seed)
  groups, left = [], length - 11
  while left > 20:
    prompt = int(rng.choice([1, 5, 40]))
    counts = [int(n) for n in rng.choice([0, 1, 17, 60], size=rng.integers(0, 5))]
    group = (prompt, *counts) if prompt + sum(counts) <= left else (left,)
    left -= sum(group)
    groups.append(group)
  return conformance.packed(*groups, length=length)


def stacked(*rows):
  """Returns rows side by side, as one batch."""
  return conformance.Row(*(np.concatenate(x) for x in zip(*rows, strict=True)))


# Random trees; groups that begin and end on the edges of tiles, then a tile of padding.
TREES = stacked(tree(0), conformance.packed((100, 28), (1, 127), length=LENGTH))
# A row of padding; one sequence, which has whole tiles.
PLAIN = stacked(conformance.packed(length=LENGTH), conformance.packed((LENGTH,), length=LENGTH))


@functools.cache
def program(implementation, interpret, dtype, window):
  """Returns a jitted function (row, q, k, v, g) → output, log-sum-exp and gradients."""
  settings = Settings(core.Plain(jnp.dtype(dtype)), interpret)

  def both(row, q, k, v, g):
    segments, branches, positions = row
    seen = visible.visible(segments, branches, positions=positions, window=window)
    attend = lambda q, k, v: core.attend(implementation, settings, q, k, v, seen)
    out, pull, log_sum = jax.vjp(attend, q, k, v, has_aux=True)
    return out, log_sum, *pull(g)

  return jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})


def run(row, qkvg, *, dtype="bfloat16", window=None, implementation=SMALL):
  """Returns output, log-sum-exp, and gradients, as NumPy arrays."""
  function = program(implementation, implementation is not reference, dtype, window)
  found = function(conformance.Row(*map(jnp.asarray, row)), *qkvg)
  return [np.asarray(x) for x in found]


def rounded(row, seed=0, **sizes):
  """Returns q, k, v and a cotangent in bfloat16's numbers, so that only the kernels round."""
  found = conformance.inputs(row, seed=seed, **sizes)
  return [x.astype(jnp.bfloat16).astype(jnp.float32) for x in found]


def check(row, *, dtype="bfloat16", window=None, implementation=SMALL, **sizes):
  """Compares output, log-sum-exp and gradients with float64; returns them."""
  qkvg = rounded(row, **sizes)
  out, log_sum, *gradients = run(
    row, qkvg, dtype=dtype, window=window, implementation=implementation
  )
  mask = conformance.allowed(row, window)
  exact = conformance.oracle(mask, *qkvg)
  names = ("out", "dq", "dk", "dv")
  for name, mine, right in zip(names, (out, *gradients), exact, strict=True):
    assert np.isfinite(mine).all(), name
    error, size = np.linalg.norm(mine - right), np.linalg.norm(right)
    assert error <= conformance.TOLERANCES[dtype] * size + 1e-5, f"{name}: {error} of {size}"
  nothing = ~mask.any(axis=-1)
  assert not out[nothing].any() and not gradients[0][nothing].any()
  for unseen in gradients[1:]:
    assert not unseen[~mask.any(axis=1)].any()
  assert (log_sum.swapaxes(1, 2)[nothing] == np.float32(NOTHING)).all()
  return out, log_sum, gradients


@pytest.mark.long
@pytest.mark.parametrize(
  ("heads", "kv_heads", "width", "window", "dtype"),
  [
    pytest.param(2, 2, 64, None, "bfloat16", id="one-query-head"),
    pytest.param(6, 1, 64, 20, "bfloat16", id="six-query-heads-and-a-window"),
    pytest.param(2, 1, 128, None, "float32", id="float32"),
  ],
)
def test_values_and_gradients_are_those_of_float64(heads, kv_heads, width, window, dtype):
  sizes = {"heads": heads, "kv_heads": kv_heads, "width": width}
  for row in (TREES, PLAIN):
    check(row, dtype=dtype, window=window, **sizes)


@pytest.mark.long
def test_more_heads_than_are_written_out_and_wide_ones(monkeypatch):
  monkeypatch.setattr(pallas_tpu_kernels, "MOST_AT_ONCE", 2)
  wide = pallas_tpu.PallasTpu(tiles=Tiles(128, 63 * MIB))  # another key of the cache.
  check(stacked(tree(1)), implementation=wide, heads=4, kv_heads=1, width=256)


@pytest.mark.long
def test_weights_are_rounded_as_in_the_reference_and_bits_are_the_same_twice():
  qkvg = rounded(TREES, heads=2, kv_heads=2, width=64)
  first, second = run(TREES, qkvg), run(TREES, qkvg)
  for one, other in zip(first, second, strict=True):
    np.testing.assert_array_equal(one, other)
  wanted = run(TREES, qkvg, implementation=reference)
  out = wanted[0].astype(jnp.bfloat16).astype(np.float32)
  # Other weights would change most of the numbers; the last bit of float32 changes some.
  assert np.mean(first[0] != out) < 0.02
  np.testing.assert_allclose(first[1], wanted[1], rtol=1e-5, atol=1e-5)
  for mine, right in zip(first[2:], wanted[2:], strict=True):
    assert np.linalg.norm(mine - right) < 4e-3 * np.linalg.norm(right)


# --- planted faults ---

# Module, piece of its source, what replaces it.
FAULTS = {
  "sees-one-token-after-the-end": (pallas_tpu_kernels, "(queries < until)", "(queries <= until)"),
  "sees-the-next-token": (pallas_tpu_kernels, "(keys <= queries)", "(keys <= queries + 1)"),
  "window-too-long": (
    pallas_tpu_kernels,
    "facts(positions_ref)[0] < limit[0]",
    "facts(positions_ref)[0] <= limit[0]",
  ),
  "mask-lost": (pallas_tpu_tiles, "jnp.where(live, PARTIAL, 0)", "jnp.where(live, WHOLE, 0)"),
  "tile-skipped": (
    pallas_tpu_tiles,
    "live, whole = visible.live_tiles(seen, size, size)",
    "live, whole = visible.live_tiles(seen, size, size); live = live.at[:, 1, 0].set(False)",
  ),
  "first-lost": (pallas_tpu_tiles, "FIRST * (place == first)", "FIRST * (place < 0)"),
  "last-lost": (pallas_tpu_tiles, "LAST * (place == last)", "LAST * (place < 0)"),
  "one-tile-too-few": (
    pallas_tpu_tiles,
    "jnp.sum(visited, dtype=jnp.int32)",
    "jnp.sum(visited, dtype=jnp.int32) - 1",
  ),
  "sum-not-faded": (pallas_tpu_kernels, "total_ref[head] * fade", "total_ref[head]"),
}


def with_fault(fault=None):
  """Returns the implementation, with the fault in one of its modules."""
  broken, right, wrong = FAULTS[fault] if fault else (None, "", "")
  loaded = {}
  for module in (pallas_tpu_tiles, pallas_tpu_kernels, pallas_tpu):
    source = module.__loader__.get_source(module.__name__)
    if module is broken:
      assert source.count(right) == 1, f"{module.__name__} no longer has exactly one {right!r}"
      source = source.replace(right, wrong)
    copy = loaded[module] = types.ModuleType(module.__name__)  # dataclasses look it up by name.
    exec(compile(source, module.__file__, "exec"), copy.__dict__)
    copy.__dict__.update(
      {
        name: loaded[of]
        for name, of in (("tiling", pallas_tpu_tiles), ("kernels", pallas_tpu_kernels))
        if name in copy.__dict__ and of in loaded
      }
    )
  return loaded[pallas_tpu].PallasTpu(tiles=TILES)


# A branch ends within the first tile and one on its edge; the last sees its prompt across the edge.
FAULTY_ROW = conformance.packed((40, 60, 28, 50), (30,), length=256)


def check_forward(implementation, window=30):
  """Compares the output with float64."""
  q, k, v, g = rounded(FAULTY_ROW, heads=1, kv_heads=1, width=64)
  segments, branches, positions = map(jnp.asarray, FAULTY_ROW)
  seen = visible.visible(segments, branches, positions=positions, window=window)
  settings = Settings(core.Plain(jnp.bfloat16), interpret=True)
  attend = lambda *qkv: core.attend(implementation, settings, *qkv, seen)[0]
  out = np.asarray(jax.jit(attend)(q, k, v))
  wanted = conformance.oracle(conformance.allowed(FAULTY_ROW, window), q, k, v, g)[0]
  error, size = np.linalg.norm(out - wanted), np.linalg.norm(wanted)
  assert error <= conformance.TOLERANCES["bfloat16"] * size, f"{error} of {size}"


@pytest.mark.long
def test_without_a_fault_the_check_passes():
  check_forward(with_fault())


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault):
  with pytest.raises(AssertionError, match="of"):
    check_forward(with_fault(fault))


@pytest.mark.long
def test_parts_of_rows_see_what_their_places_see():
  """Queries of two chunks of a row, which are as long as tiles, and all its keys."""
  rows = stacked(tree(0, 512), conformance.packed((40, 100), (300, 9), length=512))
  *qkv, g = conformance.inputs(rows, heads=4, kv_heads=2, width=64)
  chunks = np.arange(512, dtype=np.int32).reshape(4, -1)
  order = np.stack(
    [chunks[np.asarray(of_row)].reshape(-1) for of_row in ((3, 0, 1, 2), (1, 2, 0, 3))]
  )
  segments, branches, positions = map(jnp.asarray, rows)
  seen = visible.visible(segments, branches, positions=positions, window=70)
  in_order = lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), 1)
  half = 256
  places = visible.Places(jnp.asarray(order[:, :half]), jnp.asarray(order))
  seen = visible.Visible(*map(in_order, seen[:3]), places=places)
  seen = seen._replace(positions=seen.positions[:, :half])
  q, k, v, g = map(in_order, (*qkv, g))

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def both(implementation, interpret, q, k, v, g):
    settings = Settings(core.Plain(jnp.float32), interpret)
    attend = lambda *qkv: core.attend(implementation, settings, *qkv, seen)
    out, pull, log_sum = jax.vjp(attend, q, k, v, has_aux=True)
    return out, log_sum, *pull(g)

  given = q[:, :half], k, v, g[:, :half]
  for mine, right in zip(both(SMALL, True, *given), both(reference, False, *given), strict=True):
    np.testing.assert_allclose(mine, right, atol=1e-5)
  live, _ = visible.live_tiles(seen, 128, 128)
  assert live.shape == (2, 2, 4) and 0 < live.sum() < 9
  np.testing.assert_array_equal(live, visible.mask(seen).reshape(2, 2, 128, 4, 128).any((2, 4)))


# --- lists of tiles, limits and the choice ---


def visited(walk, count):
  """Returns the entries of a walk, unpacked."""
  bits = pallas_tpu_tiles.field_bits(count)
  return [pallas_tpu_tiles.unpacked(int(x), bits) for x in walk.entries[: int(walk.count)]]


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 9])
def test_lists_visit_every_tile_that_holds_a_pair_in_order(window):
  row, size = stacked(tree(2, 96), conformance.packed((3, 40), length=96)), 8
  segments, branches, positions = map(jnp.asarray, row)

  @jax.jit
  def lists(*row):
    seen = visible.visible(*row[:2], positions=row[2], window=window)
    return pallas_tpu_tiles.lists(seen, size)

  found = jax.device_get(lists(segments, branches, positions))
  count = 96 // size
  pairs = conformance.allowed(row, window).reshape(2, count, size, count, size)
  some, every = pairs.any(axis=(2, 4)), pairs.all(axis=(2, 4))
  # The axis of the tile that owns the result, and the walk.
  for owner, walk in ((1, found.by_queries), (2, found.by_keys)):
    entries = visited(walk, count)
    places = [entry[:3] for entry in entries]
    owners = [(place[0], place[owner]) for place in places]
    assert len(set(places)) == len(places)
    assert places == sorted(places, key=lambda x: (x[0], x[owner], x[3 - owner]))
    assert set(owners) == set(np.ndindex(2, count))  # every result is written.
    for at, (place, flags) in enumerate(zip(places, (x[3] for x in entries), strict=True)):
      assert bool(flags & WHOLE) <= every[place]
      assert some[place] <= bool(flags & (WHOLE | PARTIAL))
      assert bool(flags & FIRST) == (at == 0 or owners[at - 1] != owners[at])
      assert bool(flags & LAST) == (at + 1 == len(owners) or owners[at + 1] != owners[at])
    assert set(zip(*map(tuple, np.nonzero(some)), strict=True)) <= set(places)


def test_tiles_are_of_256_and_a_list_that_is_too_long_is_refused():
  choose = functools.partial(pallas_tpu_tiles.choose_tiles, "TPU v5 lite")
  assert [choose(1, length).size for length in (1, 128, 200, 32768)] == [128, 128, 256, 256]
  assert choose(512, 1024).size == choose(1, 131072).size == 256
  with pytest.raises(ValueError, match="1 rows of 262144 tokens has more than 163840"):
    choose(1, 262144)


def test_numbers_of_tiles_fit_in_an_entry():
  for rows, length in ((1, 131072), (65, 16384), (4096, 1024), (160000, 256)):
    size = pallas_tpu_tiles.choose_tiles("TPU v5 lite", rows, length).size
    count = length // size
    bits = pallas_tpu_tiles.field_bits(count)
    last = (rows - 1, count - 1, count - 1, WHOLE | PARTIAL | FIRST | LAST)
    entry = pallas_tpu_tiles._packed(*last, bits)
    assert entry < 2**31
    assert pallas_tpu_tiles.unpacked(entry, bits) == last


def test_heads_that_do_not_fit_in_vmem_are_refused():
  tiles = pallas_tpu_tiles.choose_tiles("TPU v5 lite", 1, 32768)
  pallas_tpu_tiles.check_vmem(tiles, 32, 128, 2)
  with pytest.raises(ValueError, match="128 of width 128 do not fit in 64 MiB"):
    pallas_tpu_tiles.check_vmem(tiles, 128, 128, 2)


def test_it_is_chosen_on_a_tpu_for_heads_that_it_has():
  v5e = choice.Chip("tpu", "TPU v5 lite")
  for width in (64, 128, 256):
    assert choice.default(v5e, jnp.bfloat16, width) == ("pallas_tpu", "")
  assert choice.default(v5e, jnp.bfloat16, 80) == (
    "xla_blocked",
    ", for pallas_tpu needs a width of 64 or 128 or 256, got 80",
  )
  with pytest.raises(NotImplementedError, match="runs on tpu"):
    choice.pick("pallas_tpu", choice.Chip("cpu", "cpu"), dtype=jnp.bfloat16)
