"""Faults put into attention on purpose: the conformance check must see each of them."""

import types

import attention_conformance as conformance
import pytest
from grpo_kernels.attention import reference, xla_chunked

ROW = conformance.packed((5, 4, 0, 6), (3, 2), (1, 9), length=33)

# Module, piece of its source, what replaces it.
FAULTS = {
  "sees-the-next-token": (reference, "[None, :] <= np.arange", "[None, :] - 1 <= np.arange"),
  "not-itself": (reference, "[None, :] <= np.arange", "[None, :] < np.arange"),
  "other-segments": (reference, "(keys == queries) & (queries != 0)", "(queries != 0)"),
  "padding": (reference, "(keys == queries) & (queries != 0)", "(keys == queries)"),
  "other-completions": (reference, "(keys == 0) | (keys == queries)", "(keys == keys)"),
  "not-the-prompt": (reference, "(keys == 0) | (keys == queries)", "(keys == queries)"),
  "window-too-long": (reference, "[:, None, :stop] < window", "[:, None, :stop] <= window"),
  "window-forgotten": (reference, "if window is not None:", "if False:"),
  "not-scaled": (
    reference,
    "scaled(q, k.shape[2]), k)\n  scores",
    "scaled(q, k.shape[2]) * width**0.5, k)\n  scores",
  ),
  "branches-forgotten-in-blocks": (
    xla_chunked,
    "branch_ids, start=start",
    "None, start=start",
  ),
  "values-of-the-keys": (xla_chunked, "k[:, :stop], v[:, :stop]", "k[:, :stop], k[:, :stop]"),
  "wrong-queries": (xla_chunked, "q[:, start:stop]", "q[:, : stop - start]"),
}


def with_fault(fault):
  """Returns the chunked implementation, with the fault in it or in the rule that it uses."""
  module, right, wrong = FAULTS[fault]
  loaded = {}
  for each in (reference, xla_chunked):
    source = each.__loader__.get_source(each.__name__)
    if each is module:
      assert source.count(right) == 1, f"{each.__name__} no longer has exactly one {right!r}"
      source = source.replace(right, wrong)
    loaded[each] = types.ModuleType(f"{each.__name__}_with_a_fault")
    exec(compile(source, each.__file__, "exec"), loaded[each].__dict__)
  faulty = loaded[xla_chunked]
  faulty.reference = loaded[reference]
  return in_blocks(faulty)


def in_blocks(module):
  """Returns an implementation in blocks of 8 queries."""
  attend = lambda *arguments, **settings: module.attention(*arguments, block_length=8, **settings)
  return types.SimpleNamespace(attention=attend)


def test_without_a_fault_the_check_passes():
  conformance.check(in_blocks(xla_chunked), ROW, window=6)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault):
  with pytest.raises(AssertionError, match="of"):
    conformance.check(with_fault(fault), ROW, window=6)
