"""Logprobs of given tokens under a linear head and top-k, top-p and min-p. Pure.

The filters need a whole row of logits, so tokens are taken some at a time, all columns at once,
where the other implementations take all tokens and some columns. The head's gradient is therefore
read and written once for each part of the tokens: slower than the full softmax, and chosen only if
the filters are on. Which tokens are kept is a constant for the gradient.

Over a mesh each device computes its columns for its tokens; devices of the vocabulary's axis then
exchange columns for tokens (all-to-all), so that each has whole rows of a part of the tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpo_kernels import rounding, wanted
from grpo_kernels.linear_logprobs import core, reference, sharded
from grpo_kernels.linear_logprobs.core import Settings
from grpo_kernels.linear_logprobs.sharded import Partition
from grpo_kernels.precision import precision_of
from grpo_kernels.truncation import Truncation

# Logits of a part of the tokens on one device: 64 MiB in float32.
MAX_LOGITS = 1 << 24


class Scores(NamedTuple):
  """The scores of each token, float32; nats."""

  logprobs: Float[Array, " N"]  # under the truncated distribution, renormalised.
  entropy: Float[Array, " N"] | None  # of the truncated distribution.
  full: Float[Array, " N"]  # logprobs under the whole softmax.
  is_outside: Bool[Array, " N"]  # the filters alone would not have kept the token.


def linear_logprobs(
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  truncation: Truncation,
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  partition: Partition | None = None,
  tokens_at_once: int | None = None,
) -> Scores:
  """Returns the log-probability of each target among the tokens that the filters keep.

      zᵥ = (h · Wᵥ) / τ      K = the tokens that the filters keep, and t itself
      log p(t) = z_t - log Σ_{v ∈ K} exp zᵥ      H = -Σ_{v ∈ K} pᵥ log pᵥ

  The target always belongs to K: it was sampled, and where the filters leave it out, another
  rounding or newer weights are the reason; its logprob stays finite. Differentiable in `hidden` and
  `head`, through logprobs, entropy and full logprobs, K being constant. Dots run in the dtype of
  `hidden` and accumulate in float32.

  Args:
    hidden: Outputs of the final norm for the token *before* each target; N may be 0.
    head: Matrix [V D] or [D V], depending on `head_layout`.
    targets: Token ids in [0, V); any other gives NaN.
    truncation: Filters.
    head_layout: Layout of the head: "vd" for [V D] (a tied embedding), "dv" for [D V].
    temperature: Temperature τ > 0 that divides the logits, before the filters.
    return_entropy: Whether to return H as well.
    partition: Split of the arrays over the axes of a mesh; None: on one device.
    tokens_at_once: Number of tokens whose logits a device holds; None: as many as `MAX_LOGITS`
      allows.

  Raises:
    ValueError: Shapes, layout or temperature are invalid.
  """
  core.check(hidden, head, head_layout=head_layout, temperature=temperature)
  settings = Settings(head_layout, float(temperature), return_entropy)
  vocabulary = head.shape[settings.vocab_axis]
  if hidden.shape[0] == 0:
    nothing = jnp.zeros(0, jnp.float32)
    return Scores(nothing, nothing if return_entropy else None, nothing, jnp.zeros(0, bool))
  targets = targets.astype(jnp.int32)
  how = _How(settings, truncation, vocabulary, partition, tokens_at_once)
  found: Any = _scores(how, hidden, head, targets)
  (logprobs, entropy, full), is_outside = found
  in_range = (targets >= 0) & (targets < vocabulary)
  checked = lambda x: jnp.where(in_range, x, jnp.nan)
  return Scores(checked(logprobs), entropy, checked(full), is_outside)


@dataclasses.dataclass(frozen=True)
class _How:
  """Static settings of the operation."""

  settings: Settings
  truncation: Truncation
  vocabulary: int
  partition: Partition | None
  tokens_at_once: int | None

  @property
  def axis(self) -> str | None:
    return None if self.partition is None else self.partition.vocab_axis

  @property
  def parts(self) -> int:
    return 1 if self.partition is None else self.partition.vocab_parts

  def tokens(self, count: int, columns: int) -> int:
    """Returns how many of a device's `count` tokens are computed at once: a multiple of parts."""
    most = self.tokens_at_once or max(1, MAX_LOGITS // columns)
    return -(-min(most, count) // self.parts) * self.parts


class _Found(NamedTuple):
  """What is kept of a row of logits."""

  threshold: Array  # smallest weight that the filters keep.
  largest: Array  # largest logit of a valid token, before the temperature.
  target: Array  # (logit of the target - largest) / τ.
  kept: Array  # Σ exp x over the tokens kept, x = (logit - largest) / τ.
  total: Array  # Σ exp x over all tokens.
  moment: Array | None  # Σ x exp x over the tokens kept; None without entropy.
  is_outside: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(how: _How, hidden, head, targets):
  """Returns ((logprobs, entropy or None, full logprobs), is_outside)."""
  found = _statistics(how, hidden, head, targets)
  return _outputs(found), found.is_outside


def _forward(how: _How, hidden, head, targets):
  needed, (hidden, head, targets) = wanted.split(hidden, head, targets)
  found = _statistics(how, hidden, head, targets)
  outputs = _outputs(found)
  return (outputs, found.is_outside), (hidden, head, targets, found, outputs[1], needed)


def _outputs(found: _Found) -> tuple[Array, Array | None, Array]:
  log_kept = jnp.log(found.kept)
  entropy = None if found.moment is None else log_kept - found.moment / found.kept
  logprobs = jnp.minimum(found.target - log_kept, 0.0)
  return logprobs, entropy, jnp.minimum(found.target - jnp.log(found.total), 0.0)


def _statistics(how: _How, hidden, head, targets) -> _Found:
  """Passes over all tokens, without gradient."""

  def of_part(head, hidden, targets) -> _Found:
    def visit(nothing, part):
      states, ids = part
      logits = _dot(how, states, head)
      found = _of_rows(how, _rows(how, logits), _own(how, ids))
      return nothing, jax.tree.map(lambda x: _joined(how, x), found)

    return _over_tokens(how, visit, None, head, hidden, targets)[1]

  return _on_devices(how, of_part, hidden, head, targets)


def _backward(how: _How, residuals, cotangents):
  """Returns the cotangents of hidden and head, each in the dtype of its input.

      S = [g (onehot_t - p) - gₑ p (log p + H) + g_f (onehot_t - q)] / τ      dW = Sᵀh      dh = S W

  p is the truncated distribution, q the whole softmax; S is rounded to the dtype of `hidden`.
  """
  hidden, head, targets, found, entropy, needed = residuals
  slopes = [None if x is None else wanted.dense(x) for x in cotangents[0]]
  dot = functools.partial(
    jax.lax.dot_general, precision=precision_of(hidden.dtype), preferred_element_type=jnp.float32
  )
  settings = how.settings

  def of_part(head, hidden, targets, found, entropy, slopes):
    def visit(d_head, part):
      states, ids, found, entropy, slopes = part
      logits = _rows(how, _dot(how, states, head))
      own = jax.tree.map(lambda x: _own(how, x), (ids, found, entropy, slopes))
      d_logits = _columns(how, _slope(how, logits, *own)).astype(hidden.dtype)
      d_states = dot(d_logits, head, (((1,), (settings.vocab_axis,)), ((), ())))
      if d_head is None:
        return None, d_states
      pair = (d_logits, states) if settings.width_axis == 1 else (states, d_logits)
      return d_head + dot(*pair, (((0,), (0,)), ((), ()))), d_states

    start = jnp.zeros(head.shape, jnp.float32) if needed[1] else None
    d_head, d_hidden = _over_tokens(
      how, visit, start, head, hidden, targets, found, entropy, slopes
    )
    if how.axis is not None:
      d_hidden = jax.lax.psum(d_hidden, how.axis)
    return (d_hidden, d_head) if needed[1] else d_hidden

  per_token = (targets, found, entropy, slopes)
  made = _on_devices(how, of_part, hidden, head, *per_token, gives_head=needed[1])
  d_hidden, d_head = made if needed[1] else (made, None)
  d_hidden = rounding.written(d_hidden, hidden.dtype)
  return d_hidden, None if d_head is None else d_head.astype(head.dtype), None


_scores.defvjp(_forward, _backward, symbolic_zeros=True)


def _of_rows(how: _How, logits: Float[Array, "n V"], targets: Int[Array, " n"]) -> _Found:
  """Returns what is kept of whole rows of logits, whose last columns may be padding."""
  columns = np.arange(logits.shape[1])[None]
  most = how.truncation.num_valid
  is_real = columns < how.vocabulary
  is_valid = is_real if most is None else columns < min(most, how.vocabulary)
  largest = jnp.max(jnp.where(is_valid, logits, -jnp.inf), axis=1)
  x = core.tempered(how.settings, logits - largest[:, None])
  exps = jnp.where(is_real, jnp.exp(x), 0.0)
  weights = jnp.where(is_valid, exps, 0.0)
  threshold = how.truncation.threshold(weights)
  is_target = columns == targets[:, None]
  by_filters = is_valid & (weights >= threshold[:, None])
  kept = jnp.where(by_filters | is_target, exps, 0.0)
  return _Found(
    threshold=threshold,
    largest=largest,
    target=jnp.sum(jnp.where(is_target, x, 0.0), axis=1),
    kept=jnp.sum(kept, axis=1),
    total=jnp.sum(exps, axis=1),
    moment=jnp.sum(kept * x, axis=1) if how.settings.with_entropy else None,
    is_outside=~jnp.any(by_filters & is_target, axis=1),
  )


def _slope(how: _How, logits, targets, found: _Found, entropy, slopes) -> Float[Array, "n V"]:
  """Returns S, the cotangent of whole rows of logits; see `_backward`."""
  columns = np.arange(logits.shape[1])[None]
  most = how.truncation.num_valid
  is_real = columns < how.vocabulary
  is_valid = is_real if most is None else columns < min(most, how.vocabulary)
  of_logprobs, of_entropy, of_full = slopes
  of_logprobs, of_full = of_logprobs[:, None], of_full[:, None]
  x = core.tempered(how.settings, logits - found.largest[:, None])
  exps = jnp.where(is_real, jnp.exp(x), 0.0)
  is_target = columns == targets[:, None]
  is_kept = (is_valid & (exps >= found.threshold[:, None])) | is_target
  # Padding of the tokens has sums and cotangents of 0.
  kept, total = (jnp.where(x > 0, x, 1.0)[:, None] for x in (found.kept, found.total))
  p = jnp.where(is_kept, exps / kept, 0.0)
  slope = of_logprobs
  if entropy is not None and of_entropy is not None:
    slope = slope + of_entropy[:, None] * (x - jnp.log(kept) + entropy[:, None])
  at_target = jnp.where(is_target, of_logprobs + of_full, 0.0)
  d_logits = at_target - p * slope - of_full * exps / total
  return d_logits / how.settings.temperature


def _dot(how: _How, hidden, head) -> Array:
  return reference.dot(hidden, head, head_layout=how.settings.head_layout)


def _rows(how: _How, logits: Array) -> Array:
  """Exchanges own columns of all tokens for all columns of own tokens."""
  return logits if how.axis is None else jax.lax.all_to_all(logits, how.axis, 0, 1, tiled=True)


def _columns(how: _How, rows: Array) -> Array:
  """Exchanges all columns of own tokens for own columns of all tokens."""
  return rows if how.axis is None else jax.lax.all_to_all(rows, how.axis, 1, 0, tiled=True)


def _own(how: _How, x: Array) -> Array:
  """Returns the values of the tokens whose rows this device has."""
  if how.axis is None:
    return x
  size = x.shape[0] // how.parts
  return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(how.axis) * size, size)


def _joined(how: _How, x: Array) -> Array:
  """Returns the values of all tokens of a part."""
  return x if how.axis is None else jax.lax.all_gather(x, how.axis, tiled=True)


def _over_tokens(how: _How, visit: Callable, carry: Any, head: Array, *per_token: Any) -> Any:
  """Scans `visit(carry, part of the arrays)` over the tokens; returns the carry and the outputs."""
  count = jax.tree.leaves(per_token)[0].shape[0]
  size = how.tokens(count, head.shape[how.settings.vocab_axis])
  split = lambda x: sharded.pad(x, 0, size).reshape(-1, size, *x.shape[1:])
  carry, outputs = jax.lax.scan(visit, carry, jax.tree.map(split, per_token))
  whole = lambda x: x.reshape(-1, *x.shape[2:])[:count]
  return carry, jax.tree.map(whole, outputs)


def _on_devices(
  how: _How, of_part: Callable, hidden, head, *per_token: Any, gives_head=False
) -> Any:
  """Calls `of_part(head, hidden, *per_token)`, on each device of the mesh for its tokens.

  Args:
    how: Static settings.
    of_part: Function that returns values of its tokens, and with `gives_head` also the head's
      gradient.
    hidden: Hidden states.
    head: Head as it is stored.
    *per_token: Arrays with an entry for each token.
    gives_head: Whether the head's gradient is returned; its sum over the tokens is taken here.
  """
  p, settings, count = how.partition, how.settings, hidden.shape[0]
  if p is None:
    return of_part(head.astype(hidden.dtype), hidden, *per_token)
  parts = sharded.HeadParts.of(p, settings, head)

  def of_device(head, hidden, *per_token):
    found = of_part(parts.whole(head, hidden.dtype), hidden, *per_token)
    return (found[0], parts.own(found[1])) if gives_head else found

  tokens = sharded.of_tokens(p)
  arrays = jax.tree.map(lambda x: sharded.pad(x, 0, p.token_parts), (hidden, *per_token))
  found = jax.shard_map(
    of_device,
    mesh=p.mesh,
    in_specs=(parts.spec, *jax.tree.map(lambda _: tokens, arrays)),
    out_specs=(tokens, parts.spec) if gives_head else tokens,
    check_vma=False,
  )(sharded.pad(head, settings.vocab_axis, p.vocab_parts), *arrays)
  cut = lambda x: x[:count]
  if not gives_head:
    return jax.tree.map(cut, found)
  whole = jax.lax.slice_in_dim(found[1], 0, how.vocabulary, axis=settings.vocab_axis)
  return cut(found[0]), whole
