"""Tile sizes of the Pallas kernels for TPU: preferences by chip, and limits of memory. Pure."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from grpo_kernels.implementations import current_chip

LANES = 128
MIB = 1 << 20
MIN_CHUNKS = 4  # a small vocabulary is split too: no S [N V] whatever the sizes.
MIN_CHUNK = 1024  # columns; below it the sum for hidden's gradient would cost more than S.
MAX_SLOPES_BYTES = 256 * MIB  # of one chunk's S.


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of all kernels, in tokens and columns of the vocabulary."""

  rows: int  # tokens that stay in VMEM; a multiple of 128.
  columns: int  # columns fetched, and whose logits exist, at once; a multiple of 128.
  chunk: int  # columns whose S exists at once, in HBM; a multiple of `columns`.
  vmem_limit_bytes: int  # memory that the compiler may use.


def device_kind() -> str:
  """Returns the kind of TPU that this process computes on; a v5e if it has none."""
  chip = current_chip()
  return chip.kind if chip.platform == "tpu" else "TPU v5 lite"


def choose_tiles(
  device_kind: str,
  tokens: int,
  width: int,
  vocabulary: int,
  *,
  hidden_dtype: Any = jnp.bfloat16,
  head_dtype: Any = jnp.bfloat16,
  vocab_chunk: int | None = None,
) -> Tiles:
  """Returns the preferred tiles for a kind of TPU, reduced to what sizes and VMEM allow.

  Args:
    device_kind: Value of `jax.Device.device_kind`; kinds that are not in `PREFERRED` use `MODEST`.
    tokens: Number of tokens N.
    width: Width D of the hidden states; larger widths need smaller tiles.
    vocabulary: Size V of the vocabulary.
    hidden_dtype: Dtype of hidden.
    head_dtype: Dtype of the head as it is stored.
    vocab_chunk: Number of columns whose S exists at once, rounded up to a tile; None: chosen
      automatically.

  Raises:
    ValueError: D is so large that not even the smallest tiles fit in VMEM.
  """
  preferred = PREFERRED.get(device_kind, MODEST)
  hidden_bytes, head_bytes = jnp.dtype(hidden_dtype).itemsize, jnp.dtype(head_dtype).itemsize
  affordable = MAX_SLOPES_BYTES // (max(tokens, 1) * hidden_bytes)
  chunk = vocab_chunk or min(preferred.chunk, max(MIN_CHUNK, affordable))
  chunk = round_up(min(chunk, tiles_over(vocabulary, MIN_CHUNKS)), LANES)
  # As many tiles as the preferred ones, of equal size: the last of them is not mostly empty.
  rows = round_up(tiles_over(tokens, tiles_over(max(tokens, 1), preferred.rows)), LANES)
  columns = min(preferred.columns, chunk)
  limit = preferred.vmem_limit_bytes
  while vmem_bytes(rows, columns, width, hidden_bytes, head_bytes) > limit:
    # Rows reduce the head's traffic, so columns are reduced first.
    if columns > 2 * LANES:
      columns = round_up(columns // 2, LANES)
    elif rows > 2 * LANES:
      rows = round_up(rows // 2, LANES)
    elif max(rows, columns) > LANES:
      rows = columns = LANES
    else:
      raise ValueError(
        f"pallas_tpu keeps {LANES} tokens and {LANES} columns at full width in VMEM: D = {width}"
        f" does not fit in {limit // MIB} MiB"
      )
  return Tiles(rows, columns, round_up(chunk, columns), limit)


def vmem_bytes(rows: int, columns: int, width: int, hidden_bytes: int, head_bytes: int) -> int:
  """Returns an upper estimate of the VMEM that the largest kernel takes."""
  width = round_up(width, LANES)
  windows = 2 * width * (rows * hidden_bytes + columns * head_bytes)
  windows += 2 * rows * columns * hidden_bytes  # S, or numerators.
  converted = columns * width * (hidden_bytes + 4)  # the head in the dtype of hidden.
  if hidden_bytes == 4:
    converted += 3 * 2 * width * (rows + columns)  # float32 is multiplied as three bf16.
  logits = 5 * 4 * rows * columns  # and what is made of them.
  per_row = 8 * 4 * rows * LANES
  return windows + converted + logits + per_row


def tiles_over(size: int, tile: int) -> int:
  """Returns the number of tiles that cover `size`, including a partial one at the end."""
  return -(-size // tile)


def round_up(size: int, multiple: int) -> int:
  """Returns the smallest positive multiple of `multiple` that is not below `size`."""
  return max(1, tiles_over(size, multiple)) * multiple


def chunk_start(index: Any, chunk: int) -> Any:
  """Returns the first column of a chunk of the vocabulary."""
  return index * chunk


# By `jax.Device.device_kind`; VMEM has 128 MiB on v5e and v6e, 64 on v5p and v7x, and XLA keeps the
# rest for its own. Elsewhere: MODEST, for 16 MiB.
V5E = Tiles(512, 512, chunk=8192, vmem_limit_bytes=64 * MIB)
V6E = Tiles(1024, 512, chunk=8192, vmem_limit_bytes=96 * MIB)
HALF = Tiles(512, 512, chunk=8192, vmem_limit_bytes=48 * MIB)
MODEST = Tiles(256, 512, chunk=8192, vmem_limit_bytes=12 * MIB)
PREFERRED = {
  "TPU v5 lite": V5E,
  "TPU v5e": V5E,
  "TPU v6 lite": V6E,
  "TPU v6e": V6E,
  "TPU v5": HALF,
  "TPU v5p": HALF,
  "TPU7x": HALF,
}
