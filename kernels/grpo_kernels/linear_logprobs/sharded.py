"""The op over a device mesh: the vocabulary split over one axis, tokens over others. Pure.

Each device processes its own columns of the head for its own tokens, with any implementation.
Devices exchange four numbers per token in the forward pass, and in the backward pass the sums of
the hidden's gradient (over the vocabulary's axis) and of the head's (over the tokens' axes). The
head is never gathered along the vocabulary. A head whose width is split over an axis of the
tokens (ZeRO-3) is gathered along it for each pass, in the dtype of the hidden states, and the sum
of its gradient is scattered along it, in float32.

The custom VJP of `core` is outside, and the two `shard_map`s inside it, one for each pass. In the
reverse order, transposing `shard_map` divides the cotangents of outputs that all devices of an axis
hold by their number: the head's gradient is silently wrong by that factor.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_kernels import collectives
from grpo_kernels.linear_logprobs import choice, core
from grpo_kernels.linear_logprobs.core import Settings, Statistics


@dataclasses.dataclass(frozen=True)
class Partition:
  """The split of the operation's arrays over the axes of a mesh.

  Attributes:
    mesh: Mesh over which the operation runs; devices along other axes do the same work.
    vocab_axis: Axis that splits the vocabulary; None: every device has the whole head.
    token_axes: Axes that split the tokens.
    width_axis: Axis that splits the width of the stored head, or axes that do so together; None,
      or if they do not divide the width: not split.
  """

  mesh: Mesh
  vocab_axis: str | None = None
  token_axes: tuple[str, ...] = ()
  width_axis: collectives.Axes | None = None

  @property
  def vocab_parts(self) -> int:
    return 1 if self.vocab_axis is None else self.mesh.shape[self.vocab_axis]

  @property
  def token_parts(self) -> int:
    return math.prod(self.mesh.shape[axis] for axis in self.token_axes)

  def splits_width(self, width: int) -> collectives.Axes | None:
    """Returns the axis, or axes, that split the width of a stored head, if any."""
    axes = self.width_axis
    names = (axes,) if isinstance(axes, str) else axes or ()
    parts = math.prod(self.mesh.shape[axis] for axis in names)
    return None if width % parts else axes


def linear_logprobs(
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  *,
  partition: Partition,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
) -> Float[Array, " N"] | tuple[Float[Array, " N"], Float[Array, " N"]]:
  """Returns what `linear_logprobs` of the package does, computed by all devices of a mesh.

  Values and both gradients are those of the unsharded op, to the rounding of another order of
  summation. Any N and V: they are padded to multiples of the axes with tokens and columns that have
  no effect. Arrays may have any sharding; nothing moves if tokens are split over `token_axes` and
  the head over `vocab_axis`, along V, and `width_axis`, along D.

  Args:
    hidden: Hidden states, as in the package's function, like all arguments not named here.
    head: Matrix [V D] or [D V].
    targets: Token ids in [0, V); any other gives NaN.
    partition: Split of the arrays over the axes of a mesh.
    head_layout: Layout of the head, "vd" or "dv".
    temperature: Temperature τ > 0.
    return_entropy: Whether to return the entropy as well.
    implementation: Implementation that each device runs. "reference" has no passes to split, so
      the compiler partitions it.

  Raises:
    ValueError: Shapes, layout or temperature are invalid, or there is no such implementation.
    NotImplementedError: The named implementation cannot run on the mesh's chips.
  """
  core.check(hidden, head, head_layout=head_layout, temperature=temperature)
  chip = choice.chip_of(partition.mesh.devices.flat[0])
  module = choice.pick(implementation, chip, dtype=hidden.dtype, width=hidden.shape[1])
  if implementation != "reference":
    op = core.entry(Sharded(module, partition))
  else:
    op = module.linear_logprobs
  settings = {"head_layout": head_layout, "temperature": float(temperature)}
  return op(hidden, head, targets, return_entropy=return_entropy, **settings)


@dataclasses.dataclass(frozen=True)
class Sharded:
  """An implementation that lets every device of a mesh run another one on its part.

  Attributes:
    implementation: Implementation that each device runs.
    partition: Split of the arrays over the axes of a mesh.
  """

  implementation: Any
  partition: Partition

  def statistics(
    self, settings: Settings, hidden: Array, head: Array, targets: Array, columns: None
  ) -> Statistics:
    """Returns the statistics over the whole vocabulary; see `core.Implementation`."""
    p, n, v = self.partition, hidden.shape[0], head.shape[settings.vocab_axis]
    how = HeadParts.of(p, settings, head)

    def of_device(hidden, head, targets):
      head = how.whole(head, hidden.dtype)
      at, real = own_columns(p, head.shape[settings.vocab_axis], v)
      own = self.implementation.statistics(settings, hidden, head, targets - at, real)
      return own if p.vocab_axis is None else combined(settings, own, p.vocab_axis)

    per_token = of_tokens(p)
    like: Any = per_token  # a specification for each array.
    found = jax.shard_map(
      of_device,
      mesh=p.mesh,
      in_specs=(per_token, how.spec, per_token),
      out_specs=Statistics(like, like, like if settings.with_entropy else None, like),
      check_vma=False,
    )(*_padded(p, settings, hidden, head, targets))
    return jax.tree.map(lambda x: x[:n], found)

  def gradients(
    self,
    settings: Settings,
    hidden: Array,
    head: Array,
    targets: Array,
    columns: None,
    log_normaliser: tuple[Array, Array],
    entropy: Array | None,
    of_logprobs: Array,
    of_entropy: Array | None,
  ) -> tuple[Array, Array | None]:
    """Returns the cotangents of hidden (float32) and head; see `core.Implementation`."""
    p, n, v = self.partition, hidden.shape[0], head.shape[settings.vocab_axis]
    how, dtype = HeadParts.of(p, settings, head), head.dtype
    settings = dataclasses.replace(settings, gradient_dtype="float32")

    def of_device(hidden, head, targets, *per_token):
      head = how.whole(head, hidden.dtype)
      at, real = own_columns(p, head.shape[settings.vocab_axis], v)
      d_hidden, d_head = self.implementation.gradients(
        settings, hidden, head, targets - at, real, *per_token
      )
      if p.vocab_axis is not None:
        d_hidden = jax.lax.psum(d_hidden, p.vocab_axis)
      return d_hidden, None if d_head is None else how.own(d_head).astype(dtype)

    tokens = of_tokens(p)
    per_token = (log_normaliser, entropy, of_logprobs, of_entropy)
    d_hidden, d_head = jax.shard_map(
      of_device,
      mesh=p.mesh,
      in_specs=(tokens, how.spec, tokens, *jax.tree.map(lambda _: tokens, per_token)),
      out_specs=(tokens, None if settings.head_is_frozen else how.spec),
      check_vma=False,
    )(
      *_padded(p, settings, hidden, head, targets),
      *jax.tree.map(lambda x: pad(x, 0, p.token_parts), per_token),
    )
    if d_head is not None:
      d_head = jax.lax.slice_in_dim(d_head, 0, v, axis=settings.vocab_axis)
    return d_hidden[:n], d_head


def combined(settings: Settings, own: Statistics, axis: str) -> Statistics:
  """Returns the statistics of all parts of the vocabulary together: two reductions."""
  largest = jax.lax.pmax(own.largest, axis)
  change = core.tempered(settings, own.largest - largest)
  scale = jnp.exp(change)
  sums = [scale * own.total, own.target]
  if own.moment is not None:
    # About the common maximum; a part without columns has largest = LOWEST, finite, and sums 0.
    sums.append(scale * (own.moment + own.total * change))
  total, target, *moment = jax.lax.psum(jnp.stack(sums), axis)
  return Statistics(largest, total, moment[0] if moment else None, target)


def own_columns(p: Partition, size: int, vocabulary: int) -> tuple[Array | int, Array | None]:
  """Returns the first column of this device's part, and how many columns of it are real.

  Args:
    p: Partition of the operation.
    size: Number of columns of each part.
    vocabulary: Size V of the vocabulary, without padding.
  """
  if p.vocab_axis is None:
    return 0, None
  first = jax.lax.axis_index(p.vocab_axis).astype(jnp.int32) * size
  if size * p.vocab_parts == vocabulary:
    return first, None
  return first, jnp.clip(vocabulary - first, 0, size)


def of_tokens(p: Partition) -> PartitionSpec:
  return PartitionSpec(p.token_axes or None)


@dataclasses.dataclass(frozen=True)
class HeadParts:
  """The sharding of a head, and how devices gather it along its width; for a `shard_map`."""

  partition: Partition
  settings: Settings
  width_axis: collectives.Axes | None

  @classmethod
  def of(cls, p: Partition, settings: Settings, head: Array) -> "HeadParts":
    return cls(p, settings, p.splits_width(head.shape[settings.width_axis]))

  @property
  def spec(self) -> PartitionSpec:
    of_axis = {"v": self.partition.vocab_axis, "d": self.width_axis}
    return PartitionSpec(*(of_axis[axis] for axis in self.settings.head_layout))

  def whole(self, part: Array, dtype: Any) -> Array:
    """Returns the head, whole along its width, in the dtype of the products."""
    dim = self.settings.width_axis
    return collectives.gathered(part, self.width_axis, dim=dim, dtype=dtype)

  def own(self, gradient: Array) -> Array:
    """Returns this device's part of the sum of the head's gradients, float32."""
    p, dim = self.partition, self.settings.width_axis
    axes = tuple(axis for axis in p.token_axes if p.mesh.shape[axis] > 1)
    return collectives.summed(gradient, axes, into=self.width_axis, dim=dim)


def _padded(p: Partition, settings: Settings, hidden, head, targets) -> tuple[Array, Array, Array]:
  """Returns the three arrays with N and V padded to multiples of the axes."""
  return (
    pad(hidden, 0, p.token_parts),
    pad(head, settings.vocab_axis, p.vocab_parts),
    pad(targets, 0, p.token_parts),
  )


def pad(x: Array, axis: int, parts: int) -> Array:
  """Appends zeros along an axis, up to a multiple of `parts`."""
  missing = -x.shape[axis] % parts
  if not missing:
    return x
  widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
  return jnp.pad(x, widths)
