"""Same as `reference`, by Pallas kernels for NVIDIA's Hopper; logits stay in registers. Pure.

`statistics` is one kernel (`mosaic_gpu_kernels`): blocks of 256 tokens walk over the vocabulary and
keep a running maximum, sum, first moment and target logit of each token (online log-sum-exp). The
vocabulary is split over blocks, whose float32 parts XLA combines afterwards, in a fixed order: no
atomics, so a repetition gives the same bits. It is launched once for every few tiles of tokens: as
many as fill the chip, and few enough for their hidden states to stay in the L2 cache while the
head streams past them.

`gradients` goes by chunks of the vocabulary. A kernel computes the chunk's logits once more and
writes S = ∂/∂logits [N chunk] in bfloat16; two plain matmuls turn S into the chunk's part of the
head's gradient (written once) and a float32 sum for hidden's:

      S = [g (onehot_t - p) - gₑ p (log p + H)] / τ      dW = Sᵀh      dh = S W

`numerators` serves a sweep of `token_local`: one kernel writes exp((a - r) / τ), from which S
follows without another pass, and the same sums as `statistics`, about an r that is known before.

Limits: bfloat16 hidden states, D a multiple of 64 (what one swizzled row of shared memory holds);
any N, any V, both layouts as they lie: "vd" is a transposed operand of wgmma. Soft limits, where a
copy is made: a head of another dtype is cast as a whole. If N is not a multiple of 8, a copy of
hidden is padded with zeros; if V is not one of 8 in layout "vd" or of 64 in layout "dv", a copy of
the head is (the copy engine takes tiles of 8 × 64 elements, and strides of 16 bytes). The
vocabularies of Llama 3, Qwen 2.5 and SmolLM 2 need none; that of GPT-2 (50257) does, and in layout
"dv" so may the part of a head that is split over devices.

Compiled for an H100 without having one (2026-11-21, jax 0.11.2, ptxas 13.5; `make aot` repeats it):
no register is spilled at these sizes and products are not serialised; 168 registers a thread at
entry, which become 40 for the producer and 232 for the consumers; 194 KiB of shared memory for
`statistics`, 224 KiB for the others, of 227. Temporary memory at N = 16384, with entropy:

      D, V            layout    forward     value and gradients
      1536, 151936    vd        0.78 MiB    452 MiB (dv: 477 MiB)
      3584, 152064    vd        0.78 MiB    546 MiB
      4096, 128256    dv        0.78 MiB    586 MiB (vd: 586 MiB)

which is S of one chunk (264 MiB), hidden's float32 gradient and a chunk of the head. Autotuning was
off: XLA used its own matmuls, which add to the float32 sum in place; the choice of a GPU may hold a
second sum. On an H200 (2026-11-26), forward took 12.1 ms at the first of these sizes and the
gradients 36.3 ms; `numerators` has never run on a GPU.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from grpo_kernels.implementations import Chip
from grpo_kernels.linear_logprobs import core
from grpo_kernels.linear_logprobs import mosaic_gpu_epilogues as epilogues
from grpo_kernels.linear_logprobs import mosaic_gpu_kernels as kernels
from grpo_kernels.linear_logprobs import mosaic_gpu_tiles as tiling
from grpo_kernels.linear_logprobs.core import LOWEST, Settings, Statistics
from grpo_kernels.linear_logprobs.mosaic_gpu_tiles import Tiles, tiles_over

LN_2 = 1 / epilogues.LOG2_E
# The copy engine needs axes of hidden and head that are multiples of these.
TOKEN_MULTIPLE = 8
VOCABULARY_MULTIPLE = {"vd": 8, "dv": 64}


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The implementation, with tiles by size or with given ones; hashable."""

  tiles: Tiles | None = None  # None: by `mosaic_gpu_tiles.choose_tiles`.
  loops_over_all: ClassVar[bool] = False  # over chunks; the first one makes the sums.
  gathered_layouts: ClassVar[tuple[str, ...]] = ("vd", "dv")  # whose single columns are read.
  slopes_are_in_memory: ClassVar[bool] = True  # beside the numerators, for a loss with entropy.

  def statistics(
    self,
    settings: Settings,
    hidden: Float[Array, "N D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " N"],
    columns: Int[Array, ""] | None,
  ) -> Statistics:
    """Returns maximum, sum, moment and target logit of each token; see `core.Implementation`.

    Raises:
      ValueError: D is not a multiple of 64.
      NotImplementedError: Hidden is not bfloat16.
    """
    _check(hidden)
    tokens = hidden.shape[0]
    if tokens == 0:
      nothing = jnp.zeros(0, jnp.float32)
      return Statistics(nothing, nothing, nothing if settings.with_entropy else None, nothing)
    tiles = self._tiles(settings, hidden, head)
    columns = _real_columns(settings, head, columns)
    launch = tiles.group * tiles.rows
    launches = tiles_over(tokens, launch)
    targets = _by_blocks(_none_outside(targets, columns) + 1, launches * launch, tiles) - 1
    hidden, head = _aligned(settings, hidden, head)

    def visit(index, found):
      scalars = jnp.stack([jnp.asarray(index * tiles.group, jnp.int32), columns])
      parts = kernels.statistics(settings, tiles, scalars, hidden, head, targets)
      return lax.dynamic_update_slice(found, combine(settings, parts), (0, index * launch))

    found = jnp.zeros((4, launches * launch), jnp.float32)
    found = lax.fori_loop(0, launches, visit, found) if launches > 1 else visit(0, found)
    largest, total, moment, target = found[:, :tokens]
    return Statistics(largest, total, moment if settings.with_entropy else None, target)

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

    Raises:
      ValueError: D is not a multiple of 64.
      NotImplementedError: Hidden is not bfloat16.
    """
    _check(hidden)
    tokens, vocabulary = hidden.shape[0], head.shape[settings.vocab_axis]
    dtype = settings.dtype_of_gradient(head)
    if tokens == 0:
      nothing = None if settings.head_is_frozen else jnp.zeros(head.shape, dtype)
      return hidden.astype(jnp.float32), nothing
    tiles = self._tiles(settings, hidden, head)
    columns = _real_columns(settings, head, columns)
    padded = tiles_over(tokens, tiles.rows) * tiles.rows
    rows = _of_rows(settings, log_normaliser, entropy, of_logprobs, of_entropy)
    rows = jnp.stack([_by_blocks(x, padded, tiles) for x in rows])
    targets = _by_blocks(_none_outside(targets, columns), padded, tiles)
    hidden, head = _aligned(settings, hidden, head)

    def slopes(first, size: int):
      scalars = jnp.stack([lax.div(jnp.asarray(first, jnp.int32), tiles.columns), columns])
      return kernels.slopes(settings, tiles, scalars, hidden, head, targets, rows, size)

    d_hidden, d_head = _over_chunks(settings, tiles, slopes, hidden, head, vocabulary, dtype)
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

    E has rows for N up to the next multiple of 8. Unlike the other functions, this one does not
    copy a head that does not fit: it is in bfloat16, V a multiple of `VOCABULARY_MULTIPLE`.

    Args:
      settings: Static settings.
      hidden: Hidden states in bfloat16, N at least 1.
      head: Head in bfloat16.
      targets: Token ids; one outside of the real columns gives a logit of 0.
      columns: Number of real columns; None: all.
      references: Reference r of each token; see the module `numerators`.

    Raises:
      ValueError: D or V is not a multiple of what the copy engine takes.
      NotImplementedError: Hidden is not bfloat16.
    """
    _check(hidden)
    tokens = hidden.shape[0]
    tiles = self._tiles(settings, hidden, head)
    columns = _real_columns(settings, head, columns)
    padded = tiles_over(tokens, tiles.rows) * tiles.rows
    aligned = _aligned(settings, hidden, head)
    if aligned[1] is not head:
      multiple = VOCABULARY_MULTIPLE[settings.head_layout]
      raise ValueError(f"numerators need a head in bfloat16 with V a multiple of {multiple}")
    found, parts = kernels.numerators(
      settings,
      tiles,
      columns[None],
      *aligned,
      _by_blocks(_none_outside(targets, columns), padded, tiles),
      _by_blocks(references, padded, tiles),
    )
    parts = [part.reshape(tiles.splits, -1)[:, :tokens] for part in parts]
    largest = jnp.max(parts[0], axis=0)
    total, moment, target = (jnp.sum(part, axis=0) for part in parts[1:])
    moment = moment * LN_2 if settings.with_entropy else None
    return found, largest, Statistics(references, total, moment, target)

  def replaced(
    self, values: Float[Array, "M V"], targets: Int[Array, " N"], of_targets: Float[Array, " N"]
  ) -> Float[Array, "M V"]:
    """Returns numerators with those of the targets replaced, in place; none outside of them."""
    size = values.shape[1]
    places = jnp.where((targets >= 0) & (targets < size), targets, size)
    return values.at[jnp.arange(targets.shape[0]), places].set(
      of_targets.astype(values.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )

  def _tiles(self, settings: Settings, hidden: Array, head: Array) -> Tiles:
    """Returns the tiles to use for these arrays."""
    tokens, width = hidden.shape
    vocabulary = head.shape[settings.vocab_axis]
    return self.tiles or tiling.choose_tiles(
      tokens, width, vocabulary, vocab_chunk=settings.vocab_chunk
    )


def misfit_of_numerators(
  chip: Chip, *, dtype: Any, width: int, columns: int, head_layout: str
) -> str | None:
  """Returns why `numerators` does not take heads like this one; None if it does."""
  del chip, dtype, width  # `choice.IMPLEMENTATIONS` has what all functions need of them.
  multiple = VOCABULARY_MULTIPLE[head_layout]
  if columns % multiple:
    return f"needs a head whose columns are a multiple of {multiple}, got {columns}"
  return None


def combine(
  settings: Settings, parts: list[Float[Array, "splits group_blocks half"]]
) -> Float[Array, "kinds tokens"]:
  """Returns largest, total, moment and target of each token from those of parts of the vocabulary.

      M = max(m, m')      f = 2^((m - M) c)      c = log₂(e) / τ
      (l, u) ⊕ (l', u') = (f l + f' l', f (u + l (m - M) c) + f' (u' + l' (m' - M) c))

  (m, l, u, a: see `mosaic_gpu_kernels.statistics`.) One reduction of four operands, whose order is
  fixed when it is compiled.
  """
  scale = epilogues.LOG2_E / settings.temperature

  def merge(some, others):
    newest = jnp.maximum(some[0], others[0])
    total, moment, target = 0.0, 0.0, 0.0
    for m, l, u, a in (some, others):
      change = (m - newest) * scale
      fade = jnp.exp2(change)
      total, moment, target = total + fade * l, moment + fade * (u + l * change), target + a
    return newest, total, moment, target

  flat = tuple(part.reshape(part.shape[0], -1) for part in parts)
  nothing = tuple(jnp.float32(x) for x in (epilogues.ABSENT, 0.0, 0.0, 0.0))
  m, total, moment, target = lax.reduce(flat, nothing, merge, (0,))
  return jnp.stack([jnp.where(total > 0, m, LOWEST), total, moment * LN_2, target])


def chunk_start(index, chunk: int):
  """Returns the first column of a chunk."""
  return index * chunk


def _over_chunks(
  settings: Settings, tiles: Tiles, slopes, hidden: Array, head: Array, vocabulary: int, dtype: Any
) -> tuple[Array, Array | None]:
  """Returns the cotangents of hidden, in float32, and head, in a dtype, from `slopes(first, size)`.

  Whole chunks are looped over; the rest of V, if any, is one shorter chunk after them, whose S has
  columns up to the next tile, 0 where none is real.
  """
  axis = settings.vocab_axis
  dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)

  def visit(carry, first, size: int):
    d_hidden, d_head = carry
    width = tiles_over(size, tiles.columns) * tiles.columns
    of_logits = slopes(first, width)
    weights = lax.dynamic_slice_in_dim(head, first, size, axis)
    if width > size:
      weights = _padded(weights, axis, width)
    d_hidden = d_hidden + dot(of_logits, weights, (((1,), (axis,)), ((), ())))
    if d_head is None:
      return d_hidden, None
    pair = (of_logits, hidden) if axis == 0 else (hidden, of_logits)
    d_weights = dot(*pair, (((0,), (0,)), ((), ()))).astype(dtype)
    d_weights = lax.slice_in_dim(d_weights, 0, size, axis=axis)
    return d_hidden, lax.dynamic_update_slice_in_dim(d_head, d_weights, first, axis)

  shape = [vocabulary, hidden.shape[1]] if axis == 0 else [hidden.shape[1], vocabulary]
  of_head = None if settings.head_is_frozen else jnp.zeros(shape, dtype)
  carry = jnp.zeros(hidden.shape, jnp.float32), of_head
  whole, rest = divmod(vocabulary, tiles.chunk)
  if whole:
    step = lambda index, carry: visit(carry, chunk_start(index, tiles.chunk), tiles.chunk)
    carry = lax.fori_loop(0, whole, step, carry)
  if not rest:
    return carry
  # Only after the loop: two S at once would be twice the memory.
  carry, first = lax.optimization_barrier((carry, jnp.int32(chunk_start(whole, tiles.chunk))))
  return visit(carry, first, rest)


def _of_rows(settings: Settings, log_normaliser, entropy, of_logprobs, of_entropy) -> list[Array]:
  """Returns what `mosaic_gpu_kernels.slopes` needs of each token.

      p (g + gₑ (log p + H)) / τ = p (s₀ + s₁ log₂ p)

  One number r normalises, so that log₂ p is one operation. For logits of 1000 it is rounded by
  5e-5 of p, a hundredth of what S is rounded by.
  """
  largest, log_total = log_normaliser
  r = largest * (epilogues.LOG2_E / settings.temperature) + log_total * epilogues.LOG2_E
  of_logprobs = of_logprobs / settings.temperature
  if not settings.with_entropy:
    return [r, of_logprobs]
  assert entropy is not None and of_entropy is not None, "with_entropy needs H and gₑ"
  of_entropy = of_entropy / settings.temperature
  return [r, of_logprobs, of_logprobs + of_entropy * entropy, of_entropy * LN_2]


def _check(hidden: Array) -> None:
  """Raises an error for inputs that the kernels do not support."""
  if hidden.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"mosaic_gpu takes hidden states in bfloat16, got {hidden.dtype}: the tensor cores have no"
      " float32, and TF32 would round it to 10 bits; xla_chunked takes float32"
    )
  if hidden.shape[1] % tiling.DEPTH:
    raise ValueError(
      f"mosaic_gpu needs a width that is a multiple of {tiling.DEPTH}, got {hidden.shape[1]}: the"
      f" copy engine lays rows of {tiling.DEPTH} bfloat16 into shared memory; xla_chunked takes any"
    )


def _real_columns(settings: Settings, head: Array, columns: Any) -> Int[Array, ""]:
  """Returns how many columns are real."""
  return jnp.asarray(head.shape[settings.vocab_axis] if columns is None else columns, jnp.int32)


def _none_outside(targets: Array, columns: Array) -> Array:
  """Returns -1, which is not a column, for targets outside of the real ones."""
  return jnp.where((targets >= 0) & (targets < columns), targets, -1)


def _by_blocks(x: Array, tokens: int, tiles: Tiles) -> Array:
  """Returns [blocks half]: one number per token, padded with 0, by half row tiles."""
  return _padded(x, 0, tokens).reshape(-1, tiles.half)


def _aligned(settings: Settings, hidden: Array, head: Array) -> tuple[Array, Array]:
  """Returns hidden and head as the copy engine takes them; copies only if they are not."""
  axis = settings.vocab_axis
  multiple = VOCABULARY_MULTIPLE[settings.head_layout]
  return (
    _padded(hidden, 0, tiles_over(hidden.shape[0], TOKEN_MULTIPLE) * TOKEN_MULTIPLE),
    _padded(head.astype(hidden.dtype), axis, tiles_over(head.shape[axis], multiple) * multiple),
  )


def _padded(x: Array, axis: int, size: int) -> Array:
  """Returns x with zeros after it along an axis, up to a size."""
  missing = size - x.shape[axis]
  return jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)]) if missing else x


_default = Kernels()
statistics = _default.statistics
gradients = _default.gradients
numerators = _default.numerators
replaced = _default.replaced
loops_over_all = _default.loops_over_all
gathered_layouts = _default.gathered_layouts
slopes_are_in_memory = _default.slopes_are_in_memory
linear_logprobs = core.entry(_default)
