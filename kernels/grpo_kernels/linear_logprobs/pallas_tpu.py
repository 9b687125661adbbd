"""As `reference`, by two Pallas kernels for TPU; logits live in VMEM only. Pure.

`statistics` is one kernel: a tile of tokens stays in VMEM at full width while the head streams
past it once, tile by tile. Each lane keeps a running maximum, sum, first moment and target logit
of the columns it has seen (online log-sum-exp), so that a tile costs no reduction across lanes;
the 128 lanes are combined once, after the last tile. The head is read N / rows times and hidden
once: 2 · rows operations for each byte of a bf16 head, over 2 bytes, is `rows` operations a byte,
which has to be above 240 on a v5e and 560 on a v6e.

`gradients` goes by chunks of the vocabulary. A kernel computes the chunk's logits once more and
writes S = ∂/∂logits [N chunk] in the dtype of hidden; two plain dots, which XLA runs at the rate
of any matmul, turn S into the chunk's rows of the head's gradient (written once) and a float32 sum
for hidden's. Bytes to HBM per chunk of C columns are 6 N C for S and 8 N D for that sum, at
6 N D C operations: 6 D C / (6 C + 8 D) operations a byte, 1228 for D = 1536 and C = 8192. A kernel
that kept S in VMEM would have to compute the logits twice over (10 N D V instead of 8 N D V
operations), or to add into one of the gradients in HBM with every tile.

The head is never copied, padded or transposed: both layouts are contracted as they lie, a ragged
end of V is masked in the last tile, and a ragged N is clipped by the pipeline. Any D runs: it is
never split; where it is no multiple of 128, Mosaic masks the last lanes. (The exceptions: fewer
than 128 tokens, or fewer than 128 columns, are padded to 128.)

Needs a TPU of generation 5 or later to run; `Settings.interpret` simulates one on a CPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels.linear_logprobs import core
from grpo_kernels.linear_logprobs import pallas_tpu_kernels as kernels
from grpo_kernels.linear_logprobs import pallas_tpu_tiles as tiling
from grpo_kernels.linear_logprobs.core import Settings, Statistics
from grpo_kernels.linear_logprobs.pallas_tpu_tiles import LANES, Tiles


@dataclasses.dataclass(frozen=True)
class PallasTpu:
  """The implementation, for a kind of TPU or with given tiles; hashable."""

  device_kind: str | None = None  # a key of `PREFERRED`; None: the one of this process.
  tiles: Tiles | None = None  # None: by `choose_tiles`.

  def statistics(
    self,
    settings: Settings,
    hidden: Float[Array, "N D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " N"],
    columns: Int[Array, ""] | None,
  ) -> Statistics:
    """Returns maximum, sum, moment and target logit of each token; see `core.Implementation`."""
    tokens = hidden.shape[0]
    if tokens == 0:
      nothing = jnp.zeros(0, jnp.float32)
      return Statistics(nothing, nothing, nothing if settings.with_entropy else None, nothing)
    tiles = self._tiles(settings, hidden, head)
    limit = _limit(settings, head, columns)
    hidden, head, targets = _at_least_a_tile(settings, limit, hidden, head, targets)
    found = kernels.statistics(settings, tiles, limit, hidden, head, targets)[:, :tokens]
    moment = found[2] if settings.with_entropy else None
    return Statistics(largest=found[0], total=found[1], moment=moment, target=found[3])

  def gradients(
    self,
    settings: Settings,
    hidden: Float[Array, "N D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " N"],
    columns: Int[Array, ""] | None,
    log_normaliser: tuple[Float[Array, " N"], Float[Array, " N"]],
    entropy: Float[Array, " N"] | None,
    of_logprobs: Float[Array, " N"],
    of_entropy: Float[Array, " N"] | None,
  ) -> tuple[Float[Array, "N D"], Float[Array, "_ _"]]:
    """Returns the cotangents of hidden (float32) and head (its dtype); see `core.Implementation`.

    S = [g (onehot_t - p) - gₑ p (log p + H)] / τ      dW = Sᵀh      dh = S W

    """
    if hidden.shape[0] == 0:
      return hidden.astype(jnp.float32), jnp.zeros_like(head)
    tiles = self._tiles(settings, hidden, head)
    limit = _limit(settings, head, columns)
    of_rows = [*log_normaliser, of_logprobs / settings.temperature]
    if settings.with_entropy:
      assert entropy is not None and of_entropy is not None, "with_entropy needs H and gₑ"
      of_rows += [of_entropy / settings.temperature, entropy]
    tokens, vocabulary = hidden.shape[0], head.shape[settings.vocab_axis]
    hidden, head, targets = _at_least_a_tile(settings, limit, hidden, head, targets)
    rows = _at_least(jnp.stack(of_rows), 1)
    slopes = functools.partial(kernels.slopes, settings, tiles, limit, hidden, head, targets, rows)
    d_hidden, d_head = _over_chunks(settings, tiles, slopes, hidden, head)
    return d_hidden[:tokens], jax.lax.slice_in_dim(d_head, 0, vocabulary, axis=settings.vocab_axis)

  def _tiles(self, settings: Settings, hidden: Array, head: Array) -> Tiles:
    """Returns the tiles to take for these arrays."""
    return self.tiles or tiling.choose_tiles(
      self.device_kind or tiling.device_kind(),
      *hidden.shape,
      head.shape[settings.vocab_axis],
      hidden_dtype=hidden.dtype,
      head_dtype=head.dtype,
      vocab_chunk=settings.vocab_chunk,
    )


def _over_chunks(settings: Settings, tiles: Tiles, slopes, hidden: Array, head: Array):
  """Returns the cotangents of hidden, in float32, and head from `slopes(first column, size)`.

  Whole chunks are looped over; the rest of V, if any, is one shorter chunk after them.
  """
  vocab_axis, vocabulary = settings.vocab_axis, head.shape[settings.vocab_axis]

  def visit(carry, first, size: int):
    d_hidden, d_head = carry
    of_logits = slopes(first, size)
    weights = jax.lax.dynamic_slice_in_dim(head, first, size, vocab_axis).astype(hidden.dtype)
    d_hidden = d_hidden + kernels.dot(of_logits, weights, 1, vocab_axis)
    pair = (of_logits, hidden) if vocab_axis == 0 else (hidden, of_logits)
    d_weights = kernels.dot(*pair, 0, 0).astype(head.dtype)
    return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_weights, first, vocab_axis)

  carry = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head)
  whole, rest = divmod(vocabulary, tiles.chunk)
  if whole:
    step = lambda index, carry: visit(carry, tiling.chunk_start(index, tiles.chunk), tiles.chunk)
    carry = jax.lax.fori_loop(0, whole, step, carry)
  return visit(carry, tiling.chunk_start(whole, tiles.chunk), rest) if rest else carry


def _limit(settings: Settings, head: Array, columns: Any) -> Int[Array, " 1"]:
  """Returns how many columns are real, as the kernels read it."""
  vocabulary = head.shape[settings.vocab_axis]
  columns = vocabulary if columns is None else jnp.minimum(columns, vocabulary)
  return jnp.asarray(columns, jnp.int32).reshape(1)


def _at_least_a_tile(settings: Settings, limit: Array, hidden: Array, head: Array, targets: Array):
  """Pads tokens and columns to 128 if there are fewer; targets that are none of them become -1."""
  targets = jnp.where((targets >= 0) & (targets < limit), targets, -1)
  return _at_least(hidden, 0), _at_least(head, settings.vocab_axis), _at_least(targets, 0)


def _at_least(x: Array, axis: int) -> Array:
  """Pads an axis with 0 up to 128, if it is shorter."""
  missing = max(0, LANES - x.shape[axis])
  return jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)]) if missing else x


_default = PallasTpu()
statistics = _default.statistics
gradients = _default.gradients
linear_logprobs = core.entry(_default)
