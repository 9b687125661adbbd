"""Faults put into attention on purpose: the conformance check must see each of them."""

import types

import attention_conformance as conformance
import pytest
from grpo_kernels.attention import core, visible, xla_blocked

ROW = conformance.packed((5, 4, 0, 6), (3, 2), (1, 9), (2, 24), length=60)

# Module, piece of its source, what replaces it.
FAULTS = {
  "sees-the-next-token": (
    visible,
    "allowed = (keys <= queries)",
    "allowed = (keys - 1 <= queries)",
  ),
  "not-itself": (visible, "allowed = (keys <= queries)", "allowed = (keys < queries)"),
  "until-too-far": (visible, "(queries < until[:, None])", "(queries <= until[:, None])"),
  "padding": (visible, "jnp.where(segment_ids == 0, 0, until)", "until"),
  "other-completions": (visible, "jnp.where(branch_ids == 0, end, own)", "end"),
  "not-the-prompt": (visible, "jnp.where(branch_ids == 0, end, own)", "own"),
  "window-too-long": (visible, "[..., None] < limit", "[..., None] <= limit"),
  "window-forgotten": (visible, "  if limit is None:", "  if True:"),
  "a-live-tile-skipped": (visible, "until.max(-1) > jnp", "until.max(-1) > 8 + jnp"),
  "a-tile-of-the-window-skipped": (visible, "limit.max(-1)", "limit.min(-1)"),
  "not-scaled": (core, "q = q.astype(jnp.float32) * (q.shape[-1] ** -0.5)", ""),
  "gradient-not-scaled": (core, "dq = dq * (q.shape[-1] ** -0.5)", ""),
  "delta-forgotten": (core, "delta - of_log_sum, g", "0 * delta, g"),
  "values-of-the-keys": (xla_blocked, "weights, v[tile.keys])", "weights, k[tile.keys])"),
  "wrong-queries": (xla_blocked, "_Tile(queries[i], keys[i])", "_Tile(keys[i], keys[i])"),
  "earlier-tiles-forgotten": (xla_blocked, "parts.joined(earlier, softmax(tile))", "softmax(tile)"),
  "the-last-tile-forgotten": (
    xla_blocked,
    "jnp.sum(self.is_live), step",
    "jnp.sum(self.is_live) - 1, step",
  ),
  "gradient-of-one-tile": (xla_blocked, "dk.at[of].add(", "dk.at[of].set("),
}


def with_fault(fault):
  """Returns attention by the blocked implementation, with the fault in it or below it."""
  module, right, wrong = FAULTS[fault]
  loaded = {}
  for each in (visible, core, xla_blocked):
    source = each.__loader__.get_source(each.__name__)
    if each is module:
      assert source.count(right) == 1, f"{each.__name__} no longer has exactly one {right!r}"
      source = source.replace(right, wrong)
    loaded[each] = types.ModuleType(f"{each.__name__}_with_a_fault")
    exec(compile(source, each.__file__, "exec"), loaded[each].__dict__)
  for each in (core, xla_blocked):
    loaded[each].visible = loaded[visible]
  loaded[xla_blocked].core = loaded[core]
  return loaded[visible], loaded[core], conformance.with_tiles(loaded[xla_blocked])


def test_without_a_fault_the_check_passes():
  conformance.check(conformance.with_tiles(xla_blocked), ROW, window=6)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault):
  seeing, attending, implementation = with_fault(fault)
  with pytest.raises(AssertionError, match="of"):
    conformance.check(implementation, ROW, window=6, seeing=seeing, attending=attending)
