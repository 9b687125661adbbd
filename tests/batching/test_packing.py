"""Everything stands in a row once, in a planned shape; rows are full; plans are small."""

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import visible

from grpo_jax.batching import attended, packing
from grpo_jax.batching.packing import Cost, Load, Shape, Sizes

COST = Cost(place=100.0, pair=0.05, loss_place=20.0, microbatch=6400.0)


def draw(rng, most_groups=9):
  """Returns random groups, some of them without completions, and what holds them all."""
  groups = [
    Sizes(
      int(rng.integers(1, 60)),
      tuple(int(n) for n in rng.integers(1, 90, size=int(rng.integers(0, 9)))),
    )
    for _ in range(int(rng.integers(1, most_groups)))
  ]
  return groups, Load(prompt=60, completion=90, longest=150, group=8, groups=most_groups)


@pytest.mark.parametrize("one_piece", [False, True])
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("microbatch_tokens", [128, 700, None])
def test_every_completion_is_in_one_row_of_a_planned_shape(one_piece, replicas, microbatch_tokens):
  rng = np.random.default_rng(0)
  for _ in range(10):
    groups, load = draw(rng)
    options = {"microbatch_tokens": microbatch_tokens, "rows_multiple": replicas}
    shapes = packing.plan(load, cost=COST, pack=not one_piece, **options)
    assert 1 <= len(shapes) <= packing.MOST_SHAPES
    assert all(shape.rows % replicas == 0 for shape in shapes)
    assert max(shape.row_tokens for shape in shapes) >= load.longest
    if microbatch_tokens is not None:
      assert max(s.places for s in shapes) // replicas <= max(microbatch_tokens, load.longest + 31)
    made = packing.pack(groups, shapes, cost=COST, one_piece=one_piece)
    found = []
    for one in made:
      assert one.shape in shapes
      assert 0 < len(one.rows) <= one.shape.rows
      for row in one.rows:
        assert len(row) == 1 or not one_piece
        tokens = [
          groups[p.group].prompt + sum(groups[p.group].completions[i] for i in p.completions)
          for p in row
        ]
        assert sum(tokens) <= one.shape.row_tokens
        assert all(p.completions for p in row)
        found += [(p.group, i) for p in row for i in p.completions]
    wanted = [(g, i) for g, group in enumerate(groups) for i in range(len(group.completions))]
    assert sorted(found) == wanted
    assert made == packing.pack(groups, shapes, cost=COST, one_piece=one_piece)


def test_a_group_is_split_where_a_row_has_room():
  # Three groups of 2 + 2 · 4 = 10 tokens in rows of 18: whole groups would take three rows. The
  # first row takes 10 and 2 + 4 of another, the second 10 and the rest of it.
  [one] = packing.pack([Sizes(2, (4, 4))] * 3, (Shape(2, 18, 18),), cost=Cost())
  pieces = [sorted((piece.group, len(piece.completions)) for piece in row) for row in one.rows]
  assert [sorted(count for _, count in row) for row in pieces] == [[1, 2], [1, 2]]
  # A group that is larger than a row is split in any case: 2 + 4 · 4 = 18 in rows of 10.
  [one] = packing.pack([Sizes(2, (4, 4, 4, 4))], (Shape(2, 10, 10),), cost=Cost())
  assert [len(piece.completions) for row in one.rows for piece in row] == [2, 2]


def test_what_does_not_fill_a_microbatch_goes_into_a_smaller_one():
  shapes = (Shape(4, 32, 32), Shape(1, 32, 32), Shape(1, 8, 8))
  groups = [Sizes(4, (28,))] * 5 + [Sizes(4, (2,))]
  made = packing.pack(groups, shapes, cost=Cost())
  assert [one.shape for one in made] == [shapes[0], shapes[1], shapes[2]]


def test_a_microbatch_more_must_be_worth_its_own_cost():
  shapes = (Shape(1, 64, 64), Shape(1, 16, 16))
  groups = [Sizes(2, (10,))] * 3
  small = packing.pack(groups, shapes, cost=Cost(microbatch=1.0))
  assert [one.shape.row_tokens for one in small] == [16, 16, 16]
  large = packing.pack(groups, shapes, cost=Cost(microbatch=20.0))
  assert [one.shape.row_tokens for one in large] == [64]


def test_shapes_that_are_too_small_are_refused():
  with pytest.raises(ValueError, match=r"has 11 tokens, but rows have \(8,\)"):
    packing.pack([Sizes(2, (9,))], (Shape(1, 8, 8),), cost=Cost())
  with pytest.raises(ValueError, match="loss_tokens must be at least row_tokens"):
    packing.pack([Sizes(2, (2,))], (Shape(1, 8, 4),), cost=Cost())
  assert packing.pack([Sizes(2, ())], (Shape(1, 8, 8),), cost=Cost()) == []


def test_row_buckets_are_the_only_row_lengths():
  load = Load(prompt=100, completion=100, longest=200, group=8, groups=8)
  for buckets in ((256,), (64, 256), (64, 128, 256)):
    shapes = packing.plan(load, cost=COST, row_buckets=buckets, microbatch_tokens=1024)
    assert {shape.row_tokens for shape in shapes} == set(buckets)
    assert len(shapes) <= 3
  with pytest.raises(ValueError, match="at most 3 row lengths"):
    packing.plan(load, cost=COST, row_buckets=(32, 64, 128, 256))


def test_rows_are_no_longer_than_asked():
  load = Load(prompt=512, completion=512, longest=1024, group=16, groups=32)
  for row_tokens in (300, 1000, 1024, 2048):
    shapes = packing.plan(load, cost=COST, row_tokens=row_tokens, microbatch_tokens=8192)
    assert max(shape.row_tokens for shape in shapes) <= row_tokens


@pytest.mark.parametrize("limit", [1, 40, 64, 100])
def test_no_microbatch_is_larger_than_asked(limit):
  load = Load(prompt=8, completion=24, longest=32, group=8, groups=8)
  shapes = packing.plan(load, cost=Cost(), microbatch_tokens=limit)
  assert all(shape.places <= max(limit, 32) for shape in shapes)


def test_pairs_by_hand():
  tile = 128 * 128
  assert attended.pairs([(100, ())]) == tile
  assert attended.pairs([(600, ())]) == 15 * tile  # five tiles, each with those before it.
  # Two pieces of two tiles each do not see each other.
  assert attended.pairs([(200, (56,))] * 2) == 2 * 3 * tile
  # A prompt of one tile, which five tiles of queries see, and four completions that see themselves.
  assert attended.pairs([(128, (128,) * 4)]) == (5 + 4) * tile


@pytest.mark.parametrize("window", [None, 1, 130, 400])
@pytest.mark.parametrize("seed", range(4))
def test_pairs_are_those_of_the_tiles_of_the_mask(seed, window):
  rng = np.random.default_rng(seed)
  pieces = [
    (int(rng.integers(1, 300)), tuple(rng.integers(0, 200, size=4).tolist())) for _ in range(3)
  ]
  segments, branches, positions = [], [], []
  for number, piece in enumerate(pieces, start=1):
    for branch, count in enumerate((piece[0], *piece[1])):
      segments += [number] * count
      branches += [branch] * count
      start = piece[0] if branch else 0
      positions += range(start, start + count)
  length = 26 * 128  # for all cases, so that they share programs.
  pad = lambda x: jnp.pad(jnp.asarray(x, jnp.int32), (0, length - len(x)))[None]
  shown = {"positions": pad(positions), "window": window}
  mask = np.asarray(visible.mask(visible.visible(pad(segments), pad(branches), **shown)))
  tiles = mask.reshape(length // 128, 128, length // 128, 128).any((1, 3))
  assert attended.pairs(pieces, window) == 128 * 128 * tiles.sum()


def test_a_row_costs_the_pairs_that_its_pieces_see():
  groups = [Sizes(512, (512,) * 7)]
  [long] = packing.pack(groups, (Shape(1, 4096, 4096),), cost=Cost())
  found = packing.attention(groups, [long], Cost(pair=2.0))
  pieces = [(512, (512,) * 7)]
  assert found == 2.0 * attended.pairs(pieces)
  sliding = Cost(pair=2.0, windows=((None, 0.25), (300, 0.75)))
  wanted = attended.pairs(pieces) / 2 + 1.5 * attended.pairs(pieces, 300)
  assert packing.attention(groups, [long], sliding) == wanted < found


@pytest.mark.parametrize(
  ("sizes", "room", "expected"),
  [
    ([7, 5, 4, 3], 9, [1, 2]),
    ([7, 5, 4, 3], 12, [0, 1]),
    ([7, 5, 4, 3], 2, []),
    ([7, 5, 4, 3], 100, [0, 1, 2, 3]),
    ([4, 4, 4], 8, [0, 1]),
    ([4], 0, []),
    ([4], -3, []),
  ],
)
def test_fullest_by_hand(sizes, room, expected):
  assert packing._fullest(sizes, room) == expected
