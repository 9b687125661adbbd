"""Places of rows dealt out to devices: each place once, and attention is balanced."""

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import visible

from grpo_jax.batching import dealing


def row(length, *groups):
  """Returns segments and branches of a row of groups (prompt, lengths of completions)."""
  segments, branches = np.zeros((2, length), np.int32)
  at = 0
  for number, (prompt, completions) in enumerate(groups, start=1):
    segments[at : at + prompt + sum(completions)] = number
    at += prompt
    for branch, tokens in enumerate(completions, start=1):
      branches[at : at + tokens] = branch
      at += tokens
  return segments, branches


ROWS = {
  "sequence": (row(32768, (512, [32256])), 1.001),
  "tree": (row(32768, (512, [2000] * 16)), 1.02),
  "ragged": (row(32768, (450, [300, 900, 8000, 4000, 2500, 600]), (900, [7000, 200, 7000])), 1.06),
  "padding": (row(32768, (512, [12000])), 1.08),
  "short": (row(96, (5, [8, 3]), (6, [12, 4, 20])), 1.7),
}


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("name", ROWS)
def test_every_device_has_as_many_places_and_as_much_attention(name, parts):
  (segments, branches), most = ROWS[name]
  order, work = dealing.order(segments, branches, parts)
  np.testing.assert_array_equal(np.sort(order), np.arange(len(segments)))
  of_device = order.reshape(parts, -1)
  assert (np.diff(of_device, axis=1) > 0).all()  # ascending: keys come before their queries.
  assert work.max() <= most * work.mean()
  # The work is that of the tiles that attention has.
  seen = visible.visible(jnp.asarray(segments[None]), jnp.asarray(branches[None]))
  chunk = len(order) // dealing.chunks_of(len(order), parts)
  live, _ = visible.live_tiles(seen, chunk, min(dealing.TILE, chunk))
  by_chunk = np.asarray(live)[0].sum(1)
  np.testing.assert_array_equal(by_chunk[of_device[:, ::chunk] // chunk].sum(1), work)


def test_work_is_shared_by_windows_too():
  segments, branches = row(32768, (512, [32256]))
  _, work = dealing.order(segments, branches, 8, windows=((None, 0.25), (1024, 0.75)))
  _, whole = dealing.order(segments, branches, 8)
  assert work.max() <= 1.02 * work.mean() and work.sum() < 0.4 * whole.sum()


def test_rows_are_cut_in_long_chunks_where_they_can_be():
  assert dealing.chunks_of(32768, 8) == 64 and dealing.chunks_of(131072, 2) == 16
  assert dealing.chunks_of(4096, 8) == 16 and dealing.chunks_of(64, 8) == 16
  assert dealing.chunks_of(8, 8) == 8 and dealing.chunks_of(100, 8) is None
