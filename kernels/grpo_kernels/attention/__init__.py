"""Attention within packed rows, in which the completions of a prompt share its keys and values.

`attention` is the entry; `reference` is the definition. The trainer, the scorer and the sampler's
prefill hold an `Attention`, which prepares what every layer of a microbatch shares: who sees whom
(`visible`), and the tiles of the implementation. An implementation is a module with the functions
of `core.Implementation`, listed in `IMPLEMENTATIONS`; on a mesh each device runs it on its own rows
and heads (`sharded`).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels.attention import choice, core, parts, sharded, visible
from grpo_kernels.attention.choice import IMPLEMENTATIONS
from grpo_kernels.attention.core import ATTENDED, FLOAT32, Products, Settings
from grpo_kernels.attention.parts import Partial
from grpo_kernels.attention.sharded import Partition
from grpo_kernels.attention.visible import Visible
from grpo_kernels.row_parts import RowParts

__all__ = [
  "ATTENDED",
  "AUTOMATIC",
  "IMPLEMENTATIONS",
  "Attention",
  "Partition",
  "Visible",
  "attention",
]


def attention(
  q: Float[Array, "B T H E"],
  k: Float[Array, "B T K E"],
  v: Float[Array, "B T K E"],
  segment_ids: Int[Array, "B T"],
  branch_ids: Int[Array, "B T"] | None = None,
  *,
  positions: Int[Array, "B T"] | None = None,
  window: int | Int[Array, ""] | None = None,
  products: Products = FLOAT32,
  implementation: str | None = None,
) -> Float[Array, "B T H E"]:
  """Attends with grouped queries, softmax(q kᵀ / √E) v, within the segments of packed rows.

  Token q attends to token k if both are of the same segment (not 0), k is not after q in the row,
  k is of the prompt (branch 0) or of the branch of q, and there is no window or
  position q - position k < window. A token that sees no key, such as padding, gets 0 and no
  gradient. Differentiable in q, k and v.

  Args:
    q: Query heads; head h uses key/value head h // (H / K).
    k: Key heads.
    v: Value heads.
    segment_ids: Segment of each token, which is one run of places; 0 is padding.
    branch_ids: Branch of each token, which is one run of places of its segment: 0 is the prompt,
      1.. its completions; None: one branch in every segment.
    positions: Position of each token in prompt + completion; needed with a window only.
    window: Number of tokens that a query sees, itself included: an int, or a scalar array if
      layers that differ share a program. None: all.
    products: Options of the two products; the softmax is float32.
    implementation: Key of `IMPLEMENTATIONS`; None: chosen by chip, dtype and width, and logged once
      at INFO.

  Returns:
    The weighted values, rounded once to the dtype of the products' factors; float32.

  Raises:
    ValueError: Shapes do not fit, a window has no positions or is below 1, or there is no
      implementation of that name.
    NotImplementedError: The named implementation cannot run on this chip, in this dtype or with
      heads of this width.
  """
  core.check_rows(q.shape[:2], segment_ids, branch_ids, positions, window)
  seen = visible.visible(segment_ids, branch_ids, positions=positions, window=window)
  return Attention(implementation)(q, k, v, seen, products=products)


@dataclasses.dataclass(frozen=True)
class Attention:
  """Attention with its implementation fixed; hashable, so that it can be static.

  Attributes:
    implementation: Key of `IMPLEMENTATIONS`; None: chosen by chip, dtype and width.
    partition: Split of rows and heads over a mesh; None: one device.
  """

  implementation: str | None = None
  partition: Partition | None = None

  def prepared(self, seen: Visible, *, width: int, products: Products = FLOAT32) -> Visible:
    """Returns the visibility with the tiles of the implementation, for all layers of a microbatch.

    Args:
      seen: Visibility of the rows, made by `visible.visible`.
      width: Width E of a head.
      products: Options of the two products.
    """
    chosen = self._chosen(products, width)
    return seen._replace(tiles=chosen.prepare(seen, width))

  def dealt(self, seen: Visible, order: Int[Array, "B T"]) -> Visible:
    """Returns the visibility of rows that are dealt out in the parts of the partition.

    Args:
      seen: Visibility of whole rows, without tiles.
      order: Place of each slot; see `row_parts`.

    Raises:
      ValueError: The partition does not divide rows.
    """
    parts = self.parts
    in_order = lambda x: None if x is None else jnp.take_along_axis(x, order, axis=1)
    numbers = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=order.dtype), order.shape)
    positions = None if seen.positions is None else parts.dealt(seen.positions, order)
    until = jnp.take_along_axis(seen.until, order, axis=1)
    places = visible.Places(parts.dealt(numbers, order), order)
    return Visible(until, positions, in_order(seen.limit), places=places)

  @property
  def parts(self) -> RowParts:
    """The division of rows over a mesh.

    Raises:
      ValueError: The partition does not divide rows.
    """
    found = None if self.partition is None else self.partition.parts
    if found is None:
      raise ValueError("rows that are dealt out need a partition with a place_axis, got none")
    return found

  def __call__(
    self,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    seen: Visible,
    *,
    products: Products = FLOAT32,
  ) -> Float[Array, "B T H E"]:
    """Returns the weighted values, as `attention` does.

    Args:
      q: Query heads, like all arguments not named here as in `attention`.
      k: Key heads.
      v: Value heads.
      seen: Visibility of the rows, made by `visible.visible`; tiles that were not prepared are
        made.
      products: Options of the two products.
    """
    return self._call(core.attend, q, k, v, seen, products)[0]

  def partial(
    self,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    seen: Visible,
    *,
    products: Products = FLOAT32,
  ) -> Partial:
    """Returns the softmax over these keys, for a caller that has further keys elsewhere.

    The arguments and the errors are those of the call. Not differentiable.

    Returns:
      `Partial(highest [B T H], total [B T H], mixed [B T H E])`, float32; `parts.joined` joins two.
    """
    mixed, log_sum = self._call(core.unrounded, q, k, v, seen, products)
    log_sum = log_sum.swapaxes(1, 2)
    highest = parts.softmax_shift(log_sum, products)
    total = jnp.exp(log_sum - highest)
    return Partial(highest, total, mixed * total[..., None])

  def _call(self, function, q: Array, k: Array, v: Array, seen: Visible, products: Products):
    """Calls a function of `core` with the implementation that runs here."""
    core.check_heads(q, k, v)
    return function(self._chosen(products, q.shape[-1]), Settings(products), q, k, v, seen)

  def _chosen(self, products: Products, width: int):
    """Returns the implementation that runs here."""
    mesh = None if self.partition is None else self.partition.mesh
    chip = choice.current_chip() if mesh is None else choice.chip_of(mesh.devices.flat[0])
    settings: Any = {"dtype": products.compute_dtype, "width": width}
    module = choice.pick(self.implementation, chip, **settings)
    return module if self.partition is None else sharded.Sharded(module, self.partition)


AUTOMATIC = Attention()
