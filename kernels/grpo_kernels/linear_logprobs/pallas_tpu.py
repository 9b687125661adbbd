"""Same as `reference`, by Pallas kernels for TPU; logits are in VMEM only. Pure.

`statistics` is one kernel: a tile of tokens stays in VMEM at full width while the head streams
past it once, tile by tile. Each lane keeps a running maximum, sum, first moment and target logit
of the columns that it has seen (online log-sum-exp), so that a tile costs no reduction across
lanes; the 128 lanes are combined once, after the last tile. Hidden is read once and the head
N / rows times: 2 · rows operations for every 2 bytes of a bf16 head. That is 512 operations a byte
on a v5e and 1024 on a v6e, which need 240 and 560 to keep their matrix units busy [arithmetic].

`gradients` goes by chunks of the vocabulary. A kernel computes the chunk's logits once more and
writes S = ∂/∂logits [N chunk] in the dtype of hidden; two plain dots turn S into the chunk's part
of the head's gradient, written once, and a float32 sum for hidden's. A chunk of C columns takes
6·N·D·C operations, and 6·N·C bytes for S and 8·N·D for the sum: 6·D·C / (6·C + 8·D) operations a
byte, 1228 for D = 1536 and C = 8192 [arithmetic]. A kernel that kept S to itself would compute the
logits twice over (10·N·D·V operations instead of 8·N·D·V), once for the sum of each gradient, or
add to one of the gradients in HBM with every tile.

`numerators` serves a sweep of `token_local`: the pipeline of `statistics`, which also writes
exp((a - r) / τ) in bfloat16. r is known before, so no sum is ever rescaled.

The head is never copied, padded or transposed: both layouts are contracted as they lie, a ragged
end of V is masked, and a ragged N is clipped by the pipeline. Any D: it is not split, and where it
is not a multiple of 128 Mosaic masks the rest. Exceptions: fewer than 128 tokens or 128
columns are padded to 128; and beyond D of about 36000 in bf16 or 14000 in float32 (v5e; half as
much again on a v6e) not even the smallest tiles fit in VMEM, and `choose_tiles` raises. What pads
a head behind `columns` must be finite.

Never run on a TPU. Compiled by libtpu 0.0.48.1 and jax 0.11.2 for chips described to it, with
`jax.jit(jax.value_and_grad(...)).lower(...).compile()` of `core.entry(PallasTpu(device_kind))`,
2026-11-21; N = 16384, bf16, logprobs and entropy, memory besides arguments and results:

    D, V            VMEM at most / limit (v5e; v6e)           value     value and gradient
    1536, 151936    18.5 / 64 MiB; 29.5 / 96 MiB              96 KiB    449 MiB
    4096, 128256    36.0 / 64 MiB; 52.0 / 96 MiB              96 KiB    769 MiB

libtpu's static schedule (not a timing) of one v6e tile of `statistics`, 1024 × 512 logits, has
4204 instruction bundles at D = 1536 and 9413 at D = 4096: 2.03 D for the products, 1079 that they
do not cover. Two narrower dots to a tile, or tiles of 1024 columns, came to the same within 5 %
and took two to five times as long to compile.

A tile of `numerators` at D = 1536 has 6946 on a v5e (512 × 512 logits), where the matrix units
need 6144, and 5910 on a v6e (1024 × 512), where they need 3072 (2026-11-28).

In the interpreter (CPU, N = 150, D = 576, V = 5003, τ = 0.7, 2026-11-21), against float64:
logprobs to 1.6e-5, entropies to 1.5e-5, gradients to 2.4e-3 in bf16 and 3.0e-6 in float32.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels.implementations import Chip
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
  # Whether the loop over chunks has the first one, too: XLA gives a loop other memory than what is
  # before it, so numerators would be in memory twice.
  loops_over_all: ClassVar[bool] = True
  # Layouts whose single columns are read as they are; of the other one XLA makes a transposed copy.
  gathered_layouts: ClassVar[tuple[str, ...]] = ("vd",)
  # Whether `numerators.slopes` is a pass of its own; here the products compute it as they read.
  slopes_are_in_memory: ClassVar[bool] = False

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
  ) -> tuple[Float[Array, "N D"], Float[Array, "_ _"] | None]:
    """Returns the cotangents of hidden (float32) and head (its dtype); see `core.Implementation`.

    S = [g (onehot_t - p) - gₑ p (log p + H)] / τ      dW = Sᵀh      dh = S W

    """
    if hidden.shape[0] == 0:
      return hidden.astype(jnp.float32), _empty_gradient(settings, head)
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
    if d_head is not None:
      d_head = jax.lax.slice_in_dim(d_head, 0, vocabulary, axis=settings.vocab_axis)
    return d_hidden[:tokens], d_head

  def numerators(
    self,
    settings: Settings,
    hidden: Float[Array, "N D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " N"],
    columns: Int[Array, ""] | None,
    references: Float[Array, " N"],
  ) -> tuple[Float[Array, "M V"], Float[Array, " N"], Statistics]:
    """Returns E = exp((a - r) / τ) in bfloat16, max a, and the statistics about r, of E unrounded.

    E has N rows, or 128 if there are fewer.

    Args:
      settings: Static settings.
      hidden: Hidden states, N at least 1.
      head: Head.
      targets: Token ids; one outside of the real columns gives a logit of 0.
      columns: Number of real columns; None: all.
      references: Reference r of each token; see the module `numerators`.
    """
    tokens, vocabulary = hidden.shape[0], head.shape[settings.vocab_axis]
    tiles = self._tiles(settings, hidden, head)
    limit = _limit(settings, head, columns)
    hidden, head, targets = _at_least_a_tile(settings, limit, hidden, head, targets)
    of_rows = _at_least(references, 0)
    values, found = kernels.numerators(settings, tiles, limit, hidden, head, targets, of_rows)
    largest, total, moment, target = found[:, :tokens]
    moment = moment if settings.with_entropy else None
    return values[:, :vocabulary], largest, Statistics(references, total, moment, target)

  def replaced(
    self, values: Float[Array, "M V"], targets: Int[Array, " N"], of_targets: Float[Array, " N"]
  ) -> Float[Array, "M V"]:
    """Returns numerators with those of the targets replaced; none outside of the columns.

    An element is chosen where it is read: XLA makes that part of a product's operand on a TPU,
    where writing to single elements copies all of them.
    """
    targets, of_targets = (_column(x, values.shape[0]) for x in (targets, of_targets))
    column = jax.lax.broadcasted_iota(jnp.int32, (1, values.shape[1]), 1)
    return jnp.where(column == targets, of_targets.astype(values.dtype), values)

  def _tiles(self, settings: Settings, hidden: Array, head: Array) -> Tiles:
    """Returns the tiles to use for these arrays."""
    tokens, width = hidden.shape
    return self.tiles or tiling.choose_tiles(
      self.device_kind or tiling.device_kind(),
      tokens,
      width,
      head.shape[settings.vocab_axis],
      hidden_dtype=hidden.dtype,
      head_dtype=head.dtype,
      vocab_chunk=settings.vocab_chunk,
    )


def misfit_of_numerators(
  chip: Chip, *, dtype: Any, width: int, columns: int, head_layout: str
) -> str | None:
  """Returns why `numerators` does not take heads like this one; None if it does."""
  del head_layout
  if jnp.dtype(dtype) != jnp.bfloat16:
    return f"has numerators in bfloat16, got {jnp.dtype(dtype).name}"
  try:
    tiling.choose_tiles(chip.kind, LANES, width, columns)
  except ValueError:
    return f"does not fit in the chip's VMEM at a width of {width}"
  return None


def _column(x: Array, rows: int) -> Array:
  """Returns one number per token as [rows 1], 0 after the last token."""
  return jnp.pad(x, (0, rows - x.shape[0]))[:, None]


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
    if d_head is None:
      return d_hidden, None
    pair = (of_logits, hidden) if vocab_axis == 0 else (hidden, of_logits)
    d_weights = kernels.dot(*pair, 0, 0).astype(d_head.dtype)
    return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_weights, first, vocab_axis)

  carry = jnp.zeros(hidden.shape, jnp.float32), _empty_gradient(settings, head)
  whole, rest = divmod(vocabulary, tiles.chunk)
  if whole:
    step = lambda index, carry: visit(carry, tiling.chunk_start(index, tiles.chunk), tiles.chunk)
    carry = jax.lax.fori_loop(0, whole, step, carry)
  return visit(carry, tiling.chunk_start(whole, tiles.chunk), rest) if rest else carry


def _empty_gradient(settings: Settings, head: Array) -> Array | None:
  """Returns the head's gradient before the first chunk; None if the head is frozen."""
  if settings.head_is_frozen:
    return None
  return jnp.zeros(head.shape, settings.dtype_of_gradient(head))


def _limit(settings: Settings, head: Array, columns: Any) -> Int[Array, " 1"]:
  """Returns how many columns are real, as the kernels read it."""
  vocabulary = head.shape[settings.vocab_axis]
  columns = vocabulary if columns is None else jnp.minimum(columns, vocabulary)
  return jnp.asarray(columns, jnp.int32).reshape(1)


def _at_least_a_tile(settings: Settings, limit: Array, hidden: Array, head: Array, targets: Array):
  """Pads tokens and columns to 128 if there are fewer; targets outside of them become -1."""
  targets = jnp.where((targets >= 0) & (targets < limit), targets, -1)
  return _at_least(hidden, 0), _at_least(head, settings.vocab_axis), _at_least(targets, 0)


def _at_least(x: Array, axis: int) -> Array:
  """Pads an axis with 0 up to 128, if it is shorter."""
  missing = max(0, LANES - x.shape[axis])
  return jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)]) if missing else x


_default = PallasTpu()
statistics = _default.statistics
gradients = _default.gradients
numerators = _default.numerators
replaced = _default.replaced
loops_over_all = _default.loops_over_all
gathered_layouts = _default.gathered_layouts
slopes_are_in_memory = _default.slopes_are_in_memory
linear_logprobs = core.entry(_default)
