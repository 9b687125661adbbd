"""The kernel of a decode step's attention, in the interpreter, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import decode_attention
from grpo_kernels.implementations import Chip
from jax.experimental.pallas import mosaic_gpu as plgpu

PAGE, COLUMNS, WIDTH = 128, 128, 64
# Tokens of a row's prompt and of its own before the new one: none, a tile and one more, whole
# tiles, all columns but the new token's.
PROMPTS, LENGTHS = (0, PAGE + 3, 64, 5), (0, 65, 64, COLUMNS - 1)


def problem(window):
  """Returns the arguments of `attend`; a window hides whole tiles and parts of tiles."""
  rng = np.random.default_rng(0)
  some = lambda *shape: jnp.asarray(1.5 * rng.normal(size=shape), jnp.bfloat16)
  both = lambda *shape: (some(*shape), some(*shape))
  rows, kv_heads, queries = len(PROMPTS), 2, 3
  prompts, lengths = jnp.asarray(PROMPTS), jnp.asarray(LENGTHS)
  first = jnp.zeros(rows, jnp.int32) if window is None else prompts + lengths - (window - 1)
  return (
    some(rows, kv_heads, queries, WIDTH),
    both(rows, kv_heads, WIDTH),
    both(rows + 1, kv_heads, COLUMNS, WIDTH),
    both(5, kv_heads, PAGE, WIDTH),
    jnp.asarray(rng.integers(0, 5, (rows, 2)), jnp.int32),
    prompts,
    lengths,
    first,
  )


def exact(asked, new, own, pages, tables, prompts, lengths, first):
  """Returns the results and the own tokens in float64."""
  double = lambda arrays: [np.array(x, np.float64) for x in arrays]
  (asked,), new, own, pages = double([asked]), double(new), double(own), double(pages)
  found = np.zeros_like(asked)
  for row, head in np.ndindex(*asked.shape[:2]):
    seen = []
    for token, columns, of_pages in zip(new, own, pages, strict=True):
      columns[row, head, lengths[row]] = token[row, head]
      prompt = of_pages[np.asarray(tables[row]), head].reshape(-1, WIDTH)[: prompts[row]]
      whole = np.concatenate([prompt, columns[row, head, : lengths[row] + 1]])
      seen.append(whole[max(int(first[row]), 0) :])
    scores = asked[row, head] @ seen[0].T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    found[row, head] = weights @ seen[1] / weights.sum(axis=1, keepdims=True)
  return found, own


@pytest.mark.skipif(
  not hasattr(plgpu, "InterpretGPUParams"),
  reason="the interpreter of Mosaic GPU kernels needs jax 0.11 or later",
)
@pytest.mark.long
@pytest.mark.parametrize("window", [None, 70, 1])
def test_the_kernel_equals_float64_and_writes_the_new_tokens(window):
  from grpo_kernels.decode_attention import mosaic_gpu

  given = problem(window)
  wanted, own = exact(*given)
  found, written = mosaic_gpu.attend(*given, interpret=True)
  # Of results below 8: half a unit of their last place, and the weights' roundings.
  np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=2**-5, rtol=0)
  assert np.abs(np.asarray(found, np.float64) - wanted).mean() < 2**-9
  for ours, theirs in zip(written, own, strict=True):
    np.testing.assert_array_equal(np.asarray(ours, np.float64), theirs)


H100 = Chip("gpu", "NVIDIA H100", "9.0")


@pytest.mark.parametrize(
  ("chip", "dtype", "changed"),
  [
    (Chip("cpu", "cpu"), "bfloat16", {}),
    (Chip("gpu", "NVIDIA A100", "8.0"), "bfloat16", {}),
    (H100, "float32", {}),
    (H100, "bfloat16", {"width": 96}),
    (H100, "bfloat16", {"tokens": (64, 48)}),
    (H100, "bfloat16", {"queries": 65}),
  ],
)
def test_the_kernel_is_chosen_only_where_it_runs(chip, dtype, changed):
  sizes = {"width": 128, "queries": 6, "tokens": (256, 512)}
  assert decode_attention.kernel(None, chip, dtype, **sizes | changed) is None
  for name in (None, "mosaic_gpu"):
    found = decode_attention.kernel(name, H100, "bfloat16", **sizes)
    assert found.__name__.endswith("mosaic_gpu")
  for name in ("xla_blocked", "reference"):  # who rules out kernels rules out this one.
    assert decode_attention.kernel(name, H100, "bfloat16", **sizes) is None
