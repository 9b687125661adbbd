"""A loss of logprobs with its gradients, in one sweep over the tokens. Pure.

If a token's share of the loss depends on that token alone, its derivative is known as soon as
the token's logprob is, while its logits are still in memory: nothing is computed twice.

    two passes:  z = hW   |   z = hW, dW = Sᵀh, dh = SW          8·N·D·V operations
    one sweep:   z = hW,  g = ∂L/∂log p,  dW += Sᵀh, dh = SW     6·N·D·V operations
    frozen head: z = hW,  g = ∂L/∂log p,  dh = SW                4·N·D·V operations

The sweep processes chunks of tokens, each with the whole vocabulary: [Tc V] logits are alive,
Tc ≪ N. The price is the head's float32 gradient, to which every chunk adds: V·D·8 bytes to and from
memory per chunk, and V·D·4 bytes during the whole sweep. Neither is paid for a head that is not
differentiated, such as that of a frozen base.

In plain XLA, three passes read the float32 logits between the products. With an implementation that
has `numerators`, the first product leaves what the others take (`_chunk_by_kernel`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_kernels import precision, rounding, wanted
from grpo_kernels.linear_logprobs import choice, core, reference, sharded
from grpo_kernels.linear_logprobs.core import LOWEST, Settings, Statistics
from grpo_kernels.linear_logprobs.numerators import numerators_of, slopes

# (logprobs [n], entropy [n] or None, per-token data [n ...], constants) → these tokens' share.
Objective = Callable[[Array, Array | None, Any, Any], Float[Array, ""]]

# By platform: number of logits alive at once, and smallest number of tokens in a chunk, since every
# chunk reads and writes the whole gradient of the head.
MAX_LOGITS = {"cpu": 1 << 24, "gpu": 1 << 28, "tpu": 1 << 27}
# With a kernel: numerators in bfloat16, and tokens of a tile. On a GPU as many bytes as MAX_LOGITS
# and their gradient, on a TPU a fifth less.
MAX_NUMERATORS = {"gpu": 3 << 28, "tpu": 5 << 26}
FUSED_ROWS = {"gpu": 256, "tpu": 1024}
MIN_TOKENS = {"cpu": 128, "gpu": 512, "tpu": 512}
CHUNKS = (2, 4)  # at least; the first where chunks would be short. Never [N V].


def linear_objective(
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  objective: Objective,
  per_token: Any,
  constants: Any = None,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  differentiate_entropy: bool = True,
  token_chunk: int | None = None,
  partition: sharded.Partition | None = None,
  live: Int[Array, ""] | None = None,
  implementation: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, " N"], Float[Array, " N"] | None]:
  """Returns Σ over chunks of objective(...), to be minimised; computes its gradients on the way.

      L = Σ_c f(log p_c, H_c, data_c)      log p, H: as in `reference`

  Equal to calling `linear_logprobs` and f on all tokens together, if f is a sum over tokens of
  terms that depend only on that token and the constants. The backward pass multiplies the
  gradients by the cotangent of L. Differentiable in `hidden` and `head` only; the returned
  logprobs and entropies have no gradient, nor do data and constants.

  Args:
    hidden: Outputs of the final norm for the token before each target.
    head: Matrix [V D] or [D V].
    targets: Token ids in [0, V); any other has logprob NaN and no gradient.
    objective: Function f, traced once for each shape of a chunk. It must not hold tracers.
    per_token: Tree of arrays [N ...]; f receives its chunks.
    constants: Tree that f receives unchanged: denominators, coefficients.
    head_layout: Layout of the head, "vd" or "dv".
    temperature: Temperature τ > 0 that divides the logits.
    return_entropy: Whether to compute H, for f and for the caller; else both get None.
    differentiate_entropy: Whether f depends on H; False saves the gradient of H.
    token_chunk: Number of tokens in a chunk; None: chosen by N, V and platform.
    partition: Split over the devices of a mesh; None: the compiler decides.
    live: Number of leading tokens that count, at least one. Chunks after them are not computed,
      so f must be 0 there, and the results for these tokens are meaningless. Not allowed with a
      partition. None: all count.
    implementation: "mosaic_gpu", "pallas_tpu", or "xla_chunked", which is plain XLA here; None:
      chosen by `choice.pick_sweep` and logged once at INFO.

  Returns:
    The loss L; logprobs in nats; entropies in nats or None. All float32.

  Raises:
    ValueError: Shapes, layout or temperature are invalid, or `live` is given with a partition.
    NotImplementedError: The named implementation cannot run here, or not at these sizes.
  """
  core.check(hidden, head, head_layout=head_layout, temperature=temperature)
  if partition is not None and live is not None:
    raise ValueError("`live` counts the tokens of all devices and cannot be given with a partition")
  settings = Settings(head_layout, float(temperature), return_entropy)
  if partition is None:
    chip = choice.current_chip()
  else:
    chip = choice.chip_of(partition.mesh.devices.flat[0])
  parts = (1, 1) if partition is None else (partition.token_parts, partition.vocab_parts)
  if hidden.shape[0] % parts[0]:
    count = hidden.shape[0]
    raise ValueError(f"{count} tokens cannot be split evenly over {parts[0]} parts of the mesh")
  vocabulary = -(-head.shape[settings.vocab_axis] // parts[1])
  # As lists: JAX fills trees with objects that are not arrays, which a caller's types may reject.
  flat = [jax.tree.flatten(tree) for tree in (per_token, constants)]
  leaves = [[jnp.asarray(leaf) for leaf in found] for found, _ in flat]
  kernels = choice.pick_sweep(
    implementation,
    chip,
    dtype=hidden.dtype,
    width=hidden.shape[1],
    columns=vocabulary,
    head_layout=head_layout,
  )
  of_entropy = return_entropy and differentiate_entropy
  arrays = 0 if kernels is None else 1 + (of_entropy and kernels.slopes_are_in_memory)
  static = _Static(
    settings,
    _OfLeaves(objective, flat[0][1], flat[1][1]),
    of_entropy,
    token_chunk or chunk_size(hidden.shape[0] // parts[0], vocabulary, chip.platform, arrays),
    partition,
    kernels,
  )
  fixed = stop_gradient((targets.astype(jnp.int32), *leaves, live))
  found: Any = _objective(static, hidden, head, *fixed)
  loss, logprobs, entropy = found
  return loss, stop_gradient(logprobs), stop_gradient(entropy)


def chunk_size(tokens: int, vocabulary: int, platform: str, arrays: int = 0) -> int:
  """Returns the number of tokens in a chunk, which a kernel takes by `FUSED_ROWS`.

  Args:
    tokens: Number of tokens N.
    vocabulary: Size of a device's part of the vocabulary.
    platform: Platform of the devices.
    arrays: Number of arrays as large as a chunk's numerators; 0: no kernel, logits.
  """
  of_platform = platform if platform in MAX_LOGITS else "gpu"
  least = MIN_TOKENS[of_platform]
  logits, rows = MAX_LOGITS[of_platform], 1
  if arrays:
    of_kernel = platform if platform in FUSED_ROWS else "gpu"
    logits, rows = MAX_NUMERATORS[of_kernel] // arrays, FUSED_ROWS[of_kernel]
  most = max(logits // max(vocabulary, 1), least)
  most = most // rows * rows if most > rows else most
  chunks = max(-(-tokens // most), min(max(tokens // least, CHUNKS[0]), CHUNKS[1]))
  size = max(1, -(-tokens // chunks))
  return -(-size // rows) * rows if size > rows else size


@dataclasses.dataclass(frozen=True)
class _OfLeaves:
  """An objective of the leaves of its two trees."""

  objective: Objective
  per_token: Any  # the structure.
  constants: Any

  def __call__(self, logprobs, entropy, per_token: list[Array], constants: list[Array]):
    trees = self.per_token.unflatten(per_token), self.constants.unflatten(constants)
    return self.objective(logprobs, entropy, *trees)


@dataclasses.dataclass(frozen=True)
class _Static:
  """The static arguments of a sweep."""

  settings: Settings
  objective: _OfLeaves
  differentiate_entropy: bool
  chunk: int
  partition: sharded.Partition | None
  kernels: Any  # implementation with `numerators`, hashable; None: plain XLA.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(static, hidden, head, targets, per_token, constants, live) -> Any:
  """Returns (loss, logprobs, entropy or None); where differentiation enters."""
  return _on_devices(static, hidden, head, targets, per_token, constants, live, needed=_NOTHING)[0]


def _forward(static, hidden, head, targets, per_token, constants, live):
  """Returns the outputs, and the gradients that are wanted, for a cotangent of 1."""
  needed, arguments = wanted.split(hidden, head, targets, per_token, constants, live)
  return _on_devices(static, *arguments, needed=_Gradients(*needed.arguments[:2]))


def _backward(static, gradients, cotangents):
  """Scales the gradients; those of logprobs and entropy stop at `linear_objective`."""
  of_loss = cotangents[0]
  if wanted.is_zero(of_loss):
    return (None,) * 6
  scaled = jax.tree.map(lambda x: rounding.written(of_loss * x, x.dtype), gradients)
  return *scaled, None, None, None, None


_objective.defvjp(_forward, _backward, symbolic_zeros=True)


class _Gradients(NamedTuple):
  """Which gradients a sweep computes."""

  hidden: bool
  head: bool


_NOTHING = _Gradients(False, False)


def _on_devices(
  static: _Static, hidden, head, targets, per_token, constants, live, *, needed: _Gradients
):
  """Returns ((loss, logprobs, entropy), (of hidden, of head)); each device sweeps its own tokens.

  A gradient that is not needed is None.
  """
  vocabulary = head.shape[static.settings.vocab_axis]
  p = static.partition
  if p is None:
    columns, weights = _Columns(vocabulary, 0, None, None), head.astype(hidden.dtype)
    tokens = hidden, weights, targets, per_token, constants
    outputs, (d_hidden, d_head) = _sweep(static, columns, *tokens, live, needed)
    return outputs, (d_hidden, None if d_head is None else d_head.astype(head.dtype))

  how, dtype = sharded.HeadParts.of(p, static.settings, head), head.dtype

  def of_device(hidden, head, targets, per_token, constants):
    weights = how.whole(head, hidden.dtype)
    at, real = sharded.own_columns(p, weights.shape[static.settings.vocab_axis], vocabulary)
    columns = _Columns(vocabulary, at, real, p.vocab_axis)
    (loss, *rest), (d_hidden, d_head) = _sweep(
      static, columns, hidden, weights, targets, per_token, constants, None, needed
    )
    if p.token_parts > 1:
      loss = jax.lax.psum(loss, p.token_axes)
    if d_hidden is not None and p.vocab_axis is not None:
      d_hidden = jax.lax.psum(d_hidden, p.vocab_axis)
    if d_head is not None:
      d_head = how.own(d_head).astype(dtype)
    return (loss, *rest), (d_hidden, d_head)

  tokens, of_head = sharded.of_tokens(p), how.spec
  like = lambda spec, tree: jax.tree.map(lambda _: spec, tree)
  whole = PartitionSpec()
  head = sharded.pad(head, static.settings.vocab_axis, p.vocab_parts)
  outputs, (d_hidden, d_head) = jax.shard_map(
    of_device,
    mesh=p.mesh,
    in_specs=(tokens, of_head, tokens, like(tokens, per_token), like(whole, constants)),
    out_specs=(
      (whole, tokens, tokens if static.settings.with_entropy else None),
      (tokens if needed.hidden else None, of_head if needed.head else None),
    ),
    check_vma=False,
  )(hidden, head, targets, per_token, constants)
  if d_head is not None:
    d_head = jax.lax.slice_in_dim(d_head, 0, vocabulary, axis=static.settings.vocab_axis)
  return outputs, (d_hidden, d_head)


class _Columns(NamedTuple):
  """The part of the vocabulary that a device has."""

  vocabulary: int  # V, of all devices together.
  first: Array | int
  real: Array | None  # how many of the head's columns count; None: all.
  axis: str | None  # of the mesh, over which the vocabulary is split.


def _sweep(
  static: _Static,
  columns: _Columns,
  hidden,
  weights,
  targets,
  per_token,
  constants,
  live,
  needed: _Gradients,
):
  """Returns ((loss, logprobs, entropy), (d_hidden, d_head)) of one device's part.

  A gradient that is not needed is None; that of the head is float32.
  """

  kernels = static.kernels if any(needed) else None
  of_chunk = _chunk_of_tokens if kernels is None else _chunk_by_kernel
  loops_over_all = kernels is not None and kernels.loops_over_all

  def visit(carry, part):
    share, outputs, (d_hidden, d_head) = of_chunk(static, columns, weights, part, constants, needed)
    own = share, d_head
    carry = own if carry is None else jax.tree.map(jnp.add, carry, own)
    return carry, (*outputs, d_hidden)

  (loss, d_head), (logprobs, entropy, d_hidden) = _over_chunks(
    visit, (hidden, targets, per_token), static.chunk, live, loops_over_all
  )
  if d_hidden is not None:
    d_hidden = rounding.written(d_hidden, hidden.dtype)
  return (loss, logprobs, entropy), (d_hidden, d_head)


def _chunk_of_tokens(
  static: _Static, columns: _Columns, weights, part, constants, needed: _Gradients
) -> tuple[Array, tuple[Array, Array | None], tuple[Array | None, Array | None]]:
  """Returns the loss of some tokens, (logprobs, entropy), and the gradients that are needed."""
  settings = static.settings
  hidden, targets, per_token = part
  logits = reference.dot(hidden, weights, head_layout=settings.head_layout)
  column = jax.lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)
  own = (targets - columns.first)[:, None]
  found = _statistics(settings, columns, logits, column, own)
  log_total = jnp.log(found.total)[:, None]
  share = _share_of(static, columns, found, targets, per_token, constants)
  g = share.of_logprobs[:, None]
  every = core.tempered(settings, logits - found.largest[:, None]) - log_total
  probabilities = jnp.exp(every)
  if columns.real is not None:
    probabilities = jnp.where(column < columns.real, probabilities, 0.0)
  slope = g
  if share.of_entropy is not None and share.entropy is not None:
    slope = g + share.of_entropy[:, None] * (every + share.entropy[:, None])
  d_logits = jnp.where(column == own, g, 0.0) - probabilities * slope
  d_logits = (d_logits / settings.temperature).astype(hidden.dtype)
  gradients = _products(settings, needed, d_logits, hidden, weights)
  return share.loss, (share.logprobs, share.entropy), gradients


def _chunk_by_kernel(
  static: _Static, columns: _Columns, weights, part, constants, needed: _Gradients
) -> tuple[Array, tuple[Array, Array | None], tuple[Array | None, Array | None]]:
  """Returns the same from a kernel's numerators of the softmax, E, and their sums.

      S = g (onehot_t - p) / τ = s E'      s = -g / (τ Σ E)      E' = E - onehot_t Σ E
      dW = E'ᵀ (s h)      dh = s (E' W)

  Nothing passes over E between its product and these two: one element per token is replaced, in
  memory or where the products read it, and s, one number per token, is a factor of [n D]. With a
  gradient of the entropy, S is made of E (`numerators.slopes`): one pass, or where it is read.
  """
  settings = static.settings
  hidden, targets, per_token = part
  in_range = (targets >= 0) & (targets < columns.vocabulary)
  own = jnp.where(in_range, targets - columns.first, -1)  # not a column that pads the vocabulary.
  found = numerators_of(static.kernels, settings, hidden, weights, own, columns.real, columns.axis)
  share = _share_of(static, columns, found.statistics, targets, per_token, constants)
  padded = lambda x: jnp.pad(x, [(0, found.values.shape[0] - hidden.shape[0]), (0, 0)])
  if share.of_entropy is not None and share.entropy is not None:
    of_logprobs, of_entropy = share.of_logprobs, share.of_entropy
    values = slopes(settings, found, own, share.logprobs, share.entropy, of_logprobs, of_entropy)
    d_hidden, d_head = _products(settings, needed, values, padded(hidden), weights)
  else:
    total = found.statistics.total
    values = static.kernels.replaced(found.values, own, total * jnp.expm1(share.logprobs))
    factor = padded((-share.of_logprobs / (total * settings.temperature))[:, None])
    scaled = (factor * padded(hidden)).astype(hidden.dtype)
    d_hidden, d_head = _products(settings, needed, values, scaled, weights)
    d_hidden = None if d_hidden is None else factor * d_hidden
  if d_hidden is not None:
    d_hidden = d_hidden[: targets.shape[0]]
  return share.loss, (share.logprobs, share.entropy), (d_hidden, d_head)


class _Share(NamedTuple):
  """What some tokens contribute to the loss, and its derivatives."""

  loss: Array
  logprobs: Array
  entropy: Array | None
  of_logprobs: Array
  of_entropy: Array | None


def _share_of(
  static: _Static, columns: _Columns, found: Statistics, targets, per_token, constants
) -> _Share:
  """Returns the loss of some tokens from the statistics of their logits."""
  logprobs, entropy = core.outputs(static.settings, found)
  in_range = (targets >= 0) & (targets < columns.vocabulary)
  logprobs = jnp.where(in_range, logprobs, jnp.nan)
  if static.differentiate_entropy:
    loss, (g, of_entropy) = jax.value_and_grad(static.objective, argnums=(0, 1))(
      logprobs, entropy, per_token, constants
    )
  else:
    loss, g = jax.value_and_grad(static.objective)(logprobs, entropy, per_token, constants)
    of_entropy = None
  return _Share(loss, logprobs, entropy, jnp.where(in_range, g, 0.0), of_entropy)


def _statistics(settings: Settings, columns: _Columns, logits, column, own) -> Statistics:
  """Returns the statistics of rows from their logits, over all devices' columns."""
  is_real = None if columns.real is None else column < columns.real
  if is_real is not None:
    logits = jnp.where(is_real, logits, LOWEST)
  largest = jnp.max(logits, axis=-1)
  shifted = core.tempered(settings, logits - largest[:, None])
  weights = jnp.exp(shifted)
  if is_real is not None:
    weights = jnp.where(is_real, weights, 0.0)
  moment = jnp.sum(weights * shifted, axis=-1) if settings.with_entropy else None
  place = jnp.clip(own, 0, logits.shape[1] - 1)
  target = jnp.take_along_axis(logits, place, axis=-1)
  target = jnp.where(
    (own == place) & (True if is_real is None else own < columns.real), target, 0.0
  )
  found = Statistics(largest, jnp.sum(weights, axis=-1), moment, target[:, 0])
  return found if columns.axis is None else sharded.combined(settings, found, columns.axis)


def _products(
  settings: Settings, needed: _Gradients, slopes, hidden, weights
) -> tuple[Array | None, Array | None]:
  """Returns (S W, Sᵀh in the head's layout) as far as needed, accumulated in float32."""
  dot = functools.partial(
    jax.lax.dot_general,
    precision=precision.precision_of(hidden.dtype),
    preferred_element_type=jnp.float32,
  )
  pair = (slopes, hidden) if settings.width_axis == 1 else (hidden, slopes)
  d_hidden = d_head = None
  if needed.hidden:
    d_hidden = dot(slopes, weights, (((1,), (settings.vocab_axis,)), ((), ())))
  if needed.head:
    d_head = dot(*pair, (((0,), (0,)), ((), ())))
  return d_hidden, d_head


def _over_chunks(visit: Callable, per_token, chunk: int, live: Array | None, loops_over_all: bool):
  """Folds `visit(carry, chunk of every array)`; returns the carry, and the outputs of all tokens.

  The first chunk, which is shorter if they are not all equal, gets None and makes the carry:
  writing the head's gradient takes half the work of adding to it. A loop processes the remaining
  chunks, up to the one with the last of `live` tokens; None: all chunks.

  With `loops_over_all` and equal chunks, the loop processes the first one, too, and begins with 0.
  """
  tokens = jax.tree.leaves(per_token)[0].shape[0]
  more = max(-(-tokens // chunk) - 1, 0)
  first = tokens - more * chunk
  if loops_over_all and more and first == chunk:
    split = lambda x: x.reshape(more + 1, chunk, *x.shape[1:])
    return _looped(visit, None, jax.tree.map(split, per_token), live)
  carry, outputs = visit(None, jax.tree.map(lambda x: x[:first], per_token))
  if not more:
    return carry, outputs
  # Else XLA computes these outputs after the loop, and keeps the first chunk's logits until then.
  carry, outputs = jax.lax.optimization_barrier((carry, outputs))
  split = lambda x: x[first:].reshape(more, chunk, *x.shape[1:])
  parts = jax.tree.map(split, per_token)
  carry, rest = _looped(visit, carry, parts, None if live is None else live - first)
  return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, rest)


def _looped(visit: Callable, carry, parts, live: Array | None):
  """Folds `visit` over parts of equal size in a loop; a carry of None begins with 0."""
  number, chunk = jax.tree.leaves(parts)[0].shape[:2]
  if carry is None:
    shapes, _ = jax.eval_shape(lambda: visit(None, jax.tree.map(lambda x: x[0], parts)))
    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  if live is None:
    carry, outputs = jax.lax.scan(visit, carry, parts)
  else:
    carry, outputs = _while_live(visit, carry, parts, -(-live // chunk))
  return carry, jax.tree.map(lambda x: x.reshape(number * chunk, *x.shape[2:]), outputs)


def _while_live(visit: Callable, carry, parts, count: Array):
  """Scans the first `count` parts; the outputs of the rest are 0."""
  part = lambda i: jax.tree.map(lambda x: x[i], parts)
  _, shapes = jax.eval_shape(lambda carry: visit(carry, part(0)), carry)
  number = jax.tree.leaves(parts)[0].shape[0]
  empty = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), shapes)

  def body(i, state):
    carry, outputs = visit(state[0], part(i))
    return carry, jax.tree.map(lambda rows, x: rows.at[i].set(x), state[1], outputs)

  return jax.lax.fori_loop(0, jnp.clip(count, 0, number), body, (carry, empty))
