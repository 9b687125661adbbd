"""The Hopper kernels of attention, in the interpreter that simulates threads, TMA and wgmma."""

import functools
import importlib
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import core, mosaic_gpu, reference, visible
from grpo_kernels.attention import mosaic_gpu_blocks as blocks
from grpo_kernels.attention import mosaic_gpu_tiles as tiling
from grpo_kernels.attention.mosaic_gpu_tiles import Tiles
from jax.experimental.pallas import mosaic_gpu as plgpu

HAS_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")
BFLOAT16 = core.Plain(jnp.bfloat16)


def interpreted(test):
  """Marks a test that needs the interpreter, which is slow."""
  reason = "the interpreter of Mosaic GPU kernels needs jax 0.11 or later"
  return pytest.mark.long(pytest.mark.skipif(not HAS_INTERPRETER, reason=reason)(test))


class Rows(NamedTuple):
  """Packed rows, as arrays [B T]."""

  segment_ids: Any
  branch_ids: Any
  positions: Any


def packed(length, *rows):
  """Returns rows of groups, each (tokens of the prompt, tokens of its completions...)."""
  found = np.zeros((3, len(rows), length), np.int32)
  for b, groups in enumerate(rows):
    at = 0
    for segment, (prompt, *completions) in enumerate(groups, start=1):
      for branch, count in enumerate((prompt, *completions)):
        start = prompt if branch else 0
        here = slice(at, at + count)
        found[0, b, here], found[1, b, here] = segment, branch
        found[2, b, here] = np.arange(start, start + count)
        at += count
    assert at <= length
  return Rows(*found)


def random_row(rng, length, longest):
  """Returns random groups, some completions of which are empty, that fill a row but for its end."""
  groups, left = [], length
  while True:
    group = [int(rng.integers(1, longest)), *map(int, rng.integers(0, longest, rng.integers(0, 5)))]
    if sum(group) > left:
      return groups
    groups.append(group)
    left -= sum(group)


def allowed(rows, window):
  """Returns which queries see which keys [B T T], by the rule in words of its own."""
  segment, branch, position = (np.asarray(x, np.int64) for x in rows)
  same = (segment[:, :, None] == segment[:, None]) & (segment[:, :, None] > 0)
  common = (branch[:, None] == 0) | (branch[:, :, None] == branch[:, None])
  found = same & common & np.tri(segment.shape[1], dtype=bool)
  if window is not None:
    found &= position[:, :, None] - position[:, None] < window
  return found


def problem(rows, heads, kv_heads, width, *, size=1.0, seed=0):
  """Returns q, k, v and a cotangent in bfloat16, and a cotangent of the log-sum-exp in float32."""
  rng = np.random.default_rng(seed)
  shape = rows.segment_ids.shape
  draw = lambda n: jnp.asarray(size * rng.normal(size=(*shape, n, width)), jnp.bfloat16)
  of_log_sum = jnp.asarray(rng.normal(size=(shape[0], heads, shape[1])), jnp.float32)
  return [draw(n) for n in (heads, kv_heads, kv_heads, heads)], of_log_sum


def exact(mask, arrays, of_log_sum):
  """Returns output, log-sum-exp, dq, dk and dv in float64, by the closed forms.

  Queries are rounded to bfloat16 after they are scaled, as all implementations do.
  """
  q, k, v, g = (np.asarray(x, np.float64) for x in arrays)
  scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
  q = np.asarray(jnp.asarray(q * scale, jnp.bfloat16), np.float64)
  k, v = (np.repeat(x, group, axis=2) for x in (k, v))
  seen = mask[:, None]
  scores = np.where(seen, np.einsum("bthe,bshe->bhts", q, k), -np.inf)
  highest = np.maximum(scores.max(-1, keepdims=True), -1e9)
  p = np.exp(scores - highest)
  total = p.sum(-1, keepdims=True)
  some = total > 0
  p = p / np.where(some, total, 1)
  log_sum = np.where(some, highest + np.log(np.where(some, total, 1)), core.NOTHING)[..., 0]
  out = np.einsum("bhts,bshe->bthe", p, v)
  slopes = np.einsum("bthe,bshe->bhts", g, v)
  delta = np.einsum("bthe,bthe->bht", out, g) - np.asarray(of_log_sum, np.float64)
  slopes = p * (slopes - delta[..., None])
  fold = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)
  dk = fold(np.einsum("bhts,bthe->bshe", slopes, q))
  dv = fold(np.einsum("bhts,bthe->bshe", p, g))
  return out, log_sum, np.einsum("bhts,bshe->bthe", slopes, k) * scale, dk, dv


def outcomes(implementation, rows, arrays, of_log_sum, *, window=None, interpret=True):
  """Yields what an implementation finds, again and again: output, log-sum-exp, dq, dk and dv."""
  settings = core.Settings(BFLOAT16, interpret=interpret)
  *qkv, g = arrays

  @jax.jit
  def run(q, k, v, g, of_log_sum, rows):
    positions = None if window is None else rows.positions
    seen = visible.visible(*rows[:2], positions=positions, window=window)
    attend = lambda q, k, v: core.attend(implementation, settings, q, k, v, seen)
    found, pull = jax.vjp(attend, q, k, v)
    return *found, *pull((g.astype(jnp.float32), of_log_sum))

  while True:
    yield run(*qkv, g, of_log_sum, Rows(*map(jnp.asarray, rows)))


NAMES = ("out", "log_sum", "dq", "dk", "dv")


def errors(found, right):
  """Returns the relative error of each by the Euclidean norm."""
  both = zip(NAMES, found, right, strict=True)
  norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))
  return {n: norm(np.asarray(x, np.float64) - y) / norm(y) for n, x, y in both}


# Relative errors. Weights, and the cotangents of scores, are rounded to bfloat16, and so is what a
# kernel returns: 2⁻⁹ each at most; the log-sum-exp is float32.
TOLERANCES = {"out": 4e-3, "log_sum": 1e-6, "dq": 5e-3, "dk": 5e-3, "dv": 4e-3}
# The reference rounds the same weights; it keeps float32 where kernels return bfloat16.
OF_REFERENCE = {"out": 5e-4, "log_sum": 1e-6, "dq": 5e-3, "dk": 4e-3, "dv": 5e-4}


def check(rows, heads, kv_heads, width, *, window=None, times=1):
  """Compares the kernels with float64, with the reference and, in several runs, with themselves."""
  arrays, of_log_sum = problem(rows, heads, kv_heads, width)
  runs = outcomes(mosaic_gpu, rows, arrays, of_log_sum, window=window)
  first, *others = itertools.islice(runs, times)
  for again in others:
    for one, other in zip(first, again, strict=True):
      np.testing.assert_array_equal(one, other)
  compare(first, rows, arrays, of_log_sum, window)


def compare(first, rows, arrays, of_log_sum, window):
  """Fails unless what kernels found is what float64 and the reference find."""
  mask = allowed(rows, window)
  right = exact(mask, arrays, of_log_sum)
  assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in first)
  nothing, alone = ~mask.any(axis=2), ~mask.any(axis=1)
  for name, mine in zip(NAMES, first, strict=True):
    mine = np.asarray(mine)
    if name == "log_sum":
      np.testing.assert_array_equal(mine.swapaxes(1, 2)[nothing], np.float32(core.NOTHING))
    else:
      assert not mine[nothing if name in ("out", "dq") else alone].any(), name
  some = lambda found: [x.swapaxes(1, 2)[~nothing] if x.ndim == 3 else x for x in found]
  arrays_of = lambda found: some([np.asarray(x, np.float64) for x in found])
  found = errors(arrays_of(first), arrays_of(right))
  assert all(found[name] <= TOLERANCES[name] for name in NAMES), found
  with jax.default_matmul_precision("highest"):
    theirs = next(outcomes(reference, rows, arrays, of_log_sum, window=window, interpret=False))
  rounded = [x if x.ndim == 3 else x.astype(jnp.bfloat16) for x in theirs]
  found = errors(arrays_of(first), arrays_of(rounded))
  assert all(found[name] <= OF_REFERENCE[name] for name in NAMES), found


# Rows, heads, key/value heads, width, window.
CASES = {
  "random trees, a row of padding": (
    packed(256, random_row(np.random.default_rng(1), 256, 60), []),
    (2, 1, 64),
    None,
  ),
  "one-token prompts, a window, six queries a key": (
    packed(120, [(1, 30, 0, 20), (40, 1, 1), (1,), (1, 20)]),
    (6, 1, 64),
    25,
  ),
  # The first tile of keys is seen by all others, so that its list is cut into two pieces.
  "tile edges, pieces": (packed(512, [(128, 128, 64, 64, 127, 1)]), (1, 1, 128), None),
  "two key heads, one branch, a window": (packed(96, [(90,)]), (2, 2, 128), 64),
}


@interpreted
@pytest.mark.parametrize("case", list(CASES))
def test_kernels_equal_float64_and_round_as_the_reference(case):
  rows, heads, window = CASES[case]
  check(rows, *heads, window=window, times=2 if "pieces" in case else 1)


def found_in_parts(rows, arrays, of_log_sum, count, *, chunk, window=None):
  """Returns what the kernels find where rows are dealt out in parts, at the places of rows.

  Args:
    rows: Packed rows.
    arrays: q, k, v and the cotangent of the output.
    of_log_sum: Cotangent of the log-sum-exp.
    count: Number of parts, each of which is computed by itself with the keys of all.
    chunk: Places that stay together; the order of the chunks is any.
    window: Window of the layer.
  """
  rng = np.random.default_rng(count)
  batch, length = rows.segment_ids.shape
  chunks = np.arange(length, dtype=np.int32).reshape(-1, chunk)
  order = np.stack([rng.permutation(chunks).reshape(-1) for _ in range(batch)])
  in_order = lambda x, order: np.take_along_axis(
    np.asarray(x), order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1
  )
  q, k, v, g = arrays
  k, v = k.astype(jnp.float32), v.astype(jnp.float32)  # so that parts of sums are not rounded.
  settings = core.Settings(BFLOAT16, interpret=True)

  @jax.jit
  def run(own, q, k, v, g, of_log_sum, rows):
    positions = None if window is None else rows.positions
    seen = visible.visible(*rows[:2], positions=positions, window=window)
    take = lambda x, order: None if x is None else jnp.take_along_axis(x, order, axis=1)
    seen = visible.Visible(
      take(seen.until, order),
      take(positions, own),
      take(seen.limit, order),
      places=visible.Places(own, jnp.asarray(order)),
    )
    attend = lambda *qkv: core.attend(mosaic_gpu, settings, *qkv, seen)
    found, pull = jax.vjp(attend, q, k, v)
    return *found, *pull((g.astype(jnp.float32), of_log_sum))

  shape = q.shape
  out, dq = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
  dk, dv = np.zeros(k.shape, np.float32), np.zeros(k.shape, np.float32)
  log_sum = np.zeros(of_log_sum.shape, np.float32).swapaxes(1, 2)
  for own in np.split(order, count, axis=1):
    dealt = [in_order(x, own) for x in (q, g, of_log_sum.swapaxes(1, 2))]
    found = run(
      own,
      dealt[0],
      in_order(k, order),
      in_order(v, order),
      dealt[1],
      dealt[2].swapaxes(1, 2),
      Rows(*map(jnp.asarray, rows)),
    )
    one = [np.asarray(x, np.float32) for x in found]
    for b in range(batch):
      out[b, own[b]], log_sum[b, own[b]], dq[b, own[b]] = one[0][b], one[1][b].T, one[2][b]
      dk[b, order[b]] += one[3][b]
      dv[b, order[b]] += one[4][b]
  # Sums of parts are float32; those of whole rows are rounded, as the comparison expects.
  return out, log_sum.swapaxes(1, 2), dq, *(jnp.asarray(x, jnp.bfloat16) for x in (dk, dv))


@interpreted
@pytest.mark.parametrize(
  ("count", "chunk", "heads", "window"),
  [(2, 64, (2, 1, 64), 40), (4, 32, (1, 1, 128), None), (8, 16, (1, 1, 64), None)],
)
def test_parts_of_rows_see_what_their_places_see(count, chunk, heads, window):
  """Chunks shorter than tiles, so that a tile has places of several."""
  rows = packed(256, [(100, 30, 0, 40), (20, 1, 50)], [(130, 100)])
  arrays, of_log_sum = problem(rows, *heads)
  found = found_in_parts(rows, arrays, of_log_sum, count, chunk=chunk, window=window)
  compare(found, rows, arrays, of_log_sum, window)


def first_pass(implementation, size=1.0):
  """Returns relative errors of output and log-sum-exp against the reference on a small tree."""
  rows = packed(384, [(120, 60, 100), (3, 90)])
  arrays, _ = problem(rows, 1, 1, 64, size=size)
  seen = visible.visible(*map(jnp.asarray, rows[:2]))
  seen = seen._replace(tiles=implementation.prepare(seen, 64))
  settings = core.Settings(BFLOAT16, interpret=True)
  q, k, v = (arrays[0] * jnp.bfloat16(1 / 8), *arrays[1:3])
  found = jax.jit(functools.partial(implementation.forward, settings))(q, k, v, seen)
  with jax.default_matmul_precision("highest"):
    right = jax.jit(functools.partial(reference.forward, settings))(q, k, v, seen)
  right = right[0].astype(jnp.bfloat16), right[1]
  some = np.asarray(rows.segment_ids)[0] > 0
  both = zip(found, right, strict=True)
  pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in both]
  (out, rounded), (log_sum, sums) = pairs
  error = lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y)
  return error(out, rounded), error(log_sum[..., some], sums[..., some])


@interpreted
def test_scores_of_hundreds_keep_their_digits():
  assert max(first_pass(mosaic_gpu, size=6.0)) <= 5e-4


class LaterUntil(mosaic_gpu.Kernels):
  """A query sees a key for one token too many."""

  def forward(self, settings, q, k, v, seen):
    return super().forward(settings, q, k, v, seen._replace(until=seen.until + 1))


def without_the_last(live, whole):
  entries, count = LISTS(live, whole)
  return entries, count - (count > 1)


LISTS = tiling._lists
# Module, function, and its replacement.
FAULTS = {
  "mask-bit-lost": ("mosaic_gpu_tiles", "is_partial", lambda entry: entry < 0),
  "live-tile-skipped": ("mosaic_gpu_tiles", "_lists", without_the_last),
  "next-tile": ("mosaic_gpu_tiles", "tile_of", lambda entry: jax.lax.div(entry, 2) + entry % 2),
  "missing-wait-for-a-free-slot": ("mosaic_gpu_blocks", "await_free", lambda *_: None),
  "missing-wait-for-a-copy": ("mosaic_gpu_blocks", "await_full", lambda *_: None),
  "highest-not-rounded": ("mosaic_gpu_blocks", "rounded_up", lambda x: x),
  "sums-do-not-fade": ("mosaic_gpu_blocks", "power_of_two", jnp.ones_like),
}


@interpreted
@pytest.mark.parametrize("fault", [None, "later-until", *FAULTS])
def test_a_fault_is_seen(monkeypatch, fault):
  kernels = LaterUntil() if fault == "later-until" else mosaic_gpu.Kernels()
  if fault in FAULTS:
    module, function, wrong = FAULTS[fault]
    monkeypatch.setattr(f"grpo_kernels.attention.{module}.{function}", wrong)
  jax.clear_caches()  # what was traced without the fault.
  try:
    if fault is None:
      assert max(first_pass(kernels)) <= 5e-4
      return
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
      assert max(first_pass(kernels)) <= 5e-4
  finally:
    # As the interpreter asks for after an error.
    interpreter = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
    importlib.import_module(interpreter).reset_gpu_interpret_mode_state()
    jax.clear_caches()


LISTS_OF, PIECES_OF = (jax.jit(f, static_argnums=(1, 2)) for f in (tiling.lists, tiling.pieces))


def random_visibility(window=None):
  """Returns the visibility of three rows of 1024, one of them empty, and the mask."""
  rng = np.random.default_rng(3)
  long = [(300, 100, 200, 50, 120, 0, 180)]
  rows = packed(1024, random_row(rng, 1024, 90), long, [])
  positions = None if window is None else jnp.asarray(rows.positions)
  make = jax.jit(functools.partial(visible.visible, window=window))
  seen = make(*map(jnp.asarray, rows[:2]), positions=positions)
  return seen, allowed(rows, window)


def visited(entries, count):
  """Returns a list of the tiles of entries that count, and whether each is partial."""
  return [(int(x) // 2, bool(x % 2)) for x in np.asarray(entries)[: int(count)]]


def tiles_of(mask, queries, keys):
  """Returns which tiles hold any pair of a mask [T T], and which hold all of theirs."""
  cut = mask.reshape(mask.shape[0] // queries, queries, -1, keys)
  return cut.any(axis=(1, 3)), cut.all(axis=(1, 3))


def test_lists_hold_the_live_tiles_and_long_ones_come_first():
  seen, mask = random_visibility()
  lists = LISTS_OF(seen, 128, 64)
  for b in range(3):
    live, whole = tiles_of(mask[b], 128, 64)
    assert sorted(np.asarray(lists.tile[b])) == list(range(8))
    assert (np.diff(lists.count[b]) <= 0).all()
    for tile, count, entries in zip(*(np.asarray(x[b]) for x in lists), strict=True):
      right = [(int(at), not whole[tile, at]) for at in np.flatnonzero(live[tile])]
      assert visited(entries, count) == right


def test_pieces_are_the_lists_in_parts_of_similar_length():
  seen, mask = random_visibility()
  pieces = PIECES_OF(seen, 64, 128)
  for b in range(3):
    live, whole = (x.T for x in tiles_of(mask[b], 64, 128))
    tile, begin, count, slot, first, entries = (np.asarray(x[b]) for x in pieces)
    assert (np.diff(count) <= 0).all() and sorted(slot) == list(range(16))
    assert count.max() < 2 * max(np.ceil(live.sum() / 8), 1)
    there = np.argsort(slot)
    for at in range(8):
      mine = there[first[at] : first[at + 1]]
      assert set(tile[mine]) <= {at} and (count[mine] > 0).all()
      found = [one for i in mine for one in visited(entries[at, begin[i] :], count[i])]
      assert found == [(int(q), not whole[at, q]) for q in np.flatnonzero(live[at])]
    assert (count > 0).sum() == first[-1]
  assert int(pieces.first[1, 1]) > 1  # a long list was cut.


@pytest.mark.long
def test_pieces_of_a_row_depend_on_nothing_but_the_row():
  seen, _ = random_visibility(window=70)
  prepare = jax.jit(mosaic_gpu.prepare, static_argnums=1)
  whole = prepare(seen, 128)
  alone = prepare(jax.tree.map(lambda x: x[1:2], seen), 128)
  for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
    np.testing.assert_array_equal(one[1:2], other)


@pytest.mark.long
def test_a_window_leaves_out_tiles_and_none_that_holds_a_pair():
  seen, mask = random_visibility(window=70)
  with_all = LISTS_OF(random_visibility()[0], 128, 128)
  lists = LISTS_OF(seen, 128, 128)
  assert int(lists.count.sum()) < int(with_all.count.sum())
  for b in range(3):
    live, whole = tiles_of(mask[b], 128, 128)
    for tile, count, entries in zip(*(np.asarray(x[b]) for x in lists), strict=True):
      found = dict(visited(entries, count))
      assert set(np.flatnonzero(live[tile])) <= set(found)
      assert all(partial or whole[tile, at] for at, partial in found.items())


def test_integers_above_and_powers_of_two_are_exact():
  rng = np.random.default_rng(0)
  numbers = np.concatenate([rng.normal(size=500) * 40, np.arange(-9.0, 9), [1e-7, -1e-7, -1e29]])
  numbers = numbers.astype(np.float32)
  np.testing.assert_array_equal(blocks.rounded_up(jnp.asarray(numbers)), np.ceil(numbers))
  exponents = np.array([-1e30, -200, -127, *range(-126, 1)], np.float32)
  right = np.where(exponents < -126, 0, np.exp2(exponents.astype(np.float64)))
  np.testing.assert_array_equal(blocks.power_of_two(jnp.asarray(exponents)), right)


def test_operands_and_tiles_that_cannot_be_are_refused():
  rows = packed(128, [(100,)])
  seen = visible.visible(*map(jnp.asarray, rows[:2]))
  for shape, dtype, message in (
    ((1, 128, 1, 64), jnp.float32, "in bfloat16, got float32"),
    ((1, 128, 1, 96), jnp.bfloat16, "heads of 64 or 128, got 96"),
  ):
    x = jnp.zeros(shape, dtype)
    with pytest.raises(NotImplementedError, match=message):
      mosaic_gpu.forward(core.Settings(BFLOAT16, interpret=True), x, x, x, seen)
  for wrong in ({"queries": 64}, {"keys": 96}, {"keys_dq": 256}, {"stages": 0}):
    with pytest.raises(ValueError, match="got Tiles"):
      Tiles(**wrong)
