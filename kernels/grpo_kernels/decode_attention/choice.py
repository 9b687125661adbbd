"""The requirements of each implementation."""

from typing import Any

from grpo_kernels.implementations import Chip, Implementation

IMPLEMENTATIONS: dict[str, Implementation] = {
  "mosaic_gpu": Implementation(
    "mosaic_gpu",
    platform="gpu",
    compute_capability="9",
    generation="NVIDIA GPUs of the Hopper generation",
    dtypes=("bfloat16",),
    width_multiple=64,
  ),
}
KEYS, MOST_QUERIES, MOST_WIDTH = 64, 64, 256  # of a tile.


def misfit(
  name: str, chip: Chip, dtype: Any, *, width: int, queries: int, tokens: tuple[int, ...]
) -> str | None:
  """Returns why an implementation does not fit; None if it does. See `decode_attention.kernel`."""
  if reason := IMPLEMENTATIONS[name].misfit(chip, dtype, width):
    return f"for {name} {reason}"
  if any(count % KEYS for count in tokens):
    return f"{name} needs pages and columns that are multiples of {KEYS}, got {tokens}"
  if queries > MOST_QUERIES or width > MOST_WIDTH:
    return f"{name} has at most {MOST_QUERIES} queries of {MOST_WIDTH}, got {queries} of {width}"
  return None
