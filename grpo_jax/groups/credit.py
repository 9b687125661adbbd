"""From the rewards of groups to the advantages of their rollouts, and of tokens (REINFORCE++)."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from grpo_jax.batching import Assembled, Minibatch
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.rl import advantages
from grpo_jax.rl.estimators import Estimator
from grpo_jax.rl.objective_options import ResolvedOptions
from grpo_jax.types import Batch, RolloutGroup


def advantages_of(
  groups: Sequence[RolloutGroup], estimator: Estimator, *, room: tuple[int, int] = (0, 0)
) -> list[Float[np.ndarray, " G"]]:
  """Computes the advantage of every rollout.

  Groups may differ in size: they are padded, and baselines exclude the padding. A rollout
  whose reward is NaN is excluded too, and gets advantage 0. Weights of rollouts do not count here:
  they belong to the loss. But where advantages depend on other groups, those of a prompt of weight
  0 are 0, and its rewards change no others.

  Args:
    groups: Groups of one training step.
    estimator: Estimator made by `rl.estimators.make`.
    room: Number of groups, and of attempts of a group, for which arrays have room, so that one
      program serves all steps. For larger groups the room is a power of two.

  Returns:
    Advantages [G] of every group, in order.

  Raises:
    ValueError: The estimator needs reward components, and the rollouts have none, or not as many
      as it has weights.
  """
  if not groups:
    return []
  sizes = [len(group.rollouts) for group in groups]
  prompts, width = max(room[0], len(groups)), room[1]
  if max(sizes) > width:
    width = 1 << (max(sizes) - 1).bit_length()
  rewards = _padded([group.rewards for group in groups], prompts, width)
  counted = [_counted(group, estimator) for group in groups]
  mask = _padded(counted, prompts, width) > 0
  components = None
  if estimator.by_component:
    components = _components(groups, prompts, width, estimator.weights)
  others = _of_baseline(groups, estimator, prompts, width)
  result = np.asarray(_estimate(rewards, mask, components, *others, estimator=estimator))
  return [row[:size] for row, size in zip(result, sizes, strict=False)]  # padding is at the end.


def _counted(group: RolloutGroup, estimator: Estimator) -> Bool[np.ndarray, " G"]:
  """Returns True for the rollouts of a group whose rewards count."""
  weights = [group.weight_of(r) for r in range(len(group.rollouts))]
  is_out = estimator.joins_groups and not any(weights)
  return np.full(len(weights), not is_out)


def _of_baseline(
  groups: Sequence[RolloutGroup], estimator: Estimator, prompts: int, width: int
) -> tuple[Float[np.ndarray, "P G"] | None, Float[np.ndarray, " P"] | None]:
  """Returns lengths of completions and rewards of greedy attempts, if the baseline needs them.

  Raises:
    ValueError: A group has no greedy attempt, and the baseline is its reward.
  """
  lengths, greedy = None, None
  if estimator.needs_lengths:
    of_group = lambda g: np.asarray([r.loss_mask.sum() for r in g.rollouts], np.float32)
    lengths = _padded([of_group(group) for group in groups], prompts, width)
  if estimator.needs_greedy:
    greedy = np.full(prompts, np.nan, np.float32)
    for place, group in enumerate(groups):
      if group.greedy is None:
        raise ValueError(
          f"baseline='greedy' needs a greedy attempt at each prompt, and {group.prompt.prompt_id} "
          "has none"
        )
      greedy[place] = group.greedy.reward
  return lengths, greedy


def advantage_metrics(values: Sequence[Float[np.ndarray, " G"]]) -> dict[str, float]:
  """Describes the advantages of a step's rollouts, as `advantages_of` returns them.

  Returns:
    {name: value} of batch/advantage_*; NaN if there are none.
  """
  joined = np.concatenate([np.zeros(0), *values])
  empty = joined.size == 0
  return {
    "batch/advantage_mean": float("nan") if empty else float(joined.mean()),
    "batch/advantage_std": float("nan") if empty else float(joined.std()),
    "batch/advantage_min": float("nan") if empty else float(joined.min()),
    "batch/advantage_max": float("nan") if empty else float(joined.max()),
  }


def jobs(estimator: Estimator, *, room: tuple[int, int]) -> list[CompileJob]:
  """Returns what `advantages_of` compiles.

  Without `weights`, GDPO's number of components is known from the first step on, and not before.

  Args:
    estimator: Estimator made by `rl.estimators.make`.
    room: Number of groups of a step and of attempts of a group.
  """
  count = len(estimator.weights or ())
  if estimator.by_component and not count:
    return []
  components = _reals(count, *room) if estimator.by_component else None
  detail = "{} × {}".format(*room)
  lengths = _reals(*room) if estimator.needs_lengths else None
  greedy = _reals(room[0]) if estimator.needs_greedy else None
  given = _reals(*room), _bools(*room), components, lengths, greedy
  return [_estimate.job(*given, estimator=estimator, detail=detail)]


def whitening_jobs(
  estimator: Estimator,
  options: ResolvedOptions,
  *,
  tokens: int,
  places: Sequence[tuple[int, int]],
  has_weights: bool = False,
) -> list[CompileJob]:
  """Returns what `whitened` compiles.

  Args:
    estimator: Estimator made by `rl.estimators.make`.
    options: Options of the objective.
    tokens: Largest number of loss tokens of a step.
    places: Rows and loss places (B, N) of every shape that a batch may have.
    has_weights: Whether completions have weights.
  """
  found = []
  for size in _whitening_sizes(tokens):
    weights = (_reals(size),) if has_weights else ()
    given = _reals(size), _bools(size), *weights
    found.append(_white.job(*given, estimator=estimator, detail=str(size)))
  if options.kl_in_reward and options.kl_coef:
    for shape in places:
      given = _reals(*shape), _reals(*shape), _reals(*shape), _bools(*shape)
      found.append(_penalty.job(*given, options=options, detail="{} × {}".format(*shape)))
  return found


def _reals(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, np.float32)


def _bools(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, np.bool_)


def _whitening_sizes(tokens: int) -> list[int]:
  """Returns the lengths that the tokens of a step are padded to: few, up to `tokens` or more."""
  sizes = [4096]
  while sizes[-1] < tokens:
    sizes.append(4 * sizes[-1])
  return sizes


def _estimated(
  rewards: Array,
  mask: Array,
  components: Array | None,
  lengths: Array | None,
  greedy: Array | None,
  *,
  estimator: Estimator,
):
  return estimator(rewards, mask, components, lengths=lengths, greedy=greedy)


def _whitened(
  flat: Float[Array, " n"], mask: Array, weights: Array | None = None, *, estimator: Estimator
):
  counts = None if weights is None else weights[None]
  white = advantages.whiten(flat[None], mask[None], counts=counts)[0]
  return advantages.clip(white, low=estimator.clip_low, high=estimator.clip_high)


def _penalized_tokens(
  values: Array, old: Array, ref: Array, mask: Array, *, options: ResolvedOptions
):
  return advantages.subtract_kl(
    values,
    old,
    ref,
    mask,
    kl_coef=options.kl_coef,
    estimator=options.kl_estimator,
    input_clamp=options.kl_input_clamp,
    output_clamp=options.kl_output_clamp,
  )


_estimate, _white = (
  Program(jax.jit(function, static_argnames="estimator"), name=name, static=("estimator",))
  for function, name in ((_estimated, "advantages"), (_whitened, "whitening of advantages"))
)
_penalty = Program(
  jax.jit(_penalized_tokens, static_argnames="options"),
  name="KL in the reward",
  static=("options",),
)


def whitened(assembled: Assembled, estimator: Estimator, options: ResolvedOptions) -> Assembled:
  """Replaces the advantages by token-level ones of mean 0 and variance 1 over the whole step.

      Âₜ = whiten(A - β KLₜ),   the KL only if `kl_in_reward`

  A completion of weight w counts w times in mean and variance. So the whitened advantages add up to
  0 in the loss, where it has the same weight, and equal weights of all change nothing.

  Args:
    assembled: Batch on the host, with advantages per rollout, and with old and reference
      logprobs if the KL is in the reward.
    estimator: Estimator of the advantages; its clip is applied last.
    options: Options of the objective.

  Returns:
    The same batches with other advantages on the tokens that are learned from.

  Reference:
    Hu et al. 2025, REINFORCE++, arXiv:2501.03262, section 3.
  """
  if not assembled.minibatches:
    return assembled
  batches = [batch for part in assembled.minibatches for batch in part.microbatches]
  values = [_penalized(batch, options) for batch in batches]
  masks = [_in_loss(batch) for batch in batches]
  flat = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
  room = next(size for size in _whitening_sizes(flat.size) if size >= flat.size)
  given = [_filled(flat, room), np.arange(room) < flat.size]
  if batches[0].weights is not None:
    found = [np.asarray(batch.weights)[mask] for batch, mask in zip(batches, masks, strict=True)]
    given.append(_filled(np.concatenate(found), room))
  white = np.asarray(_white(*given, estimator=estimator))[: flat.size]
  pieces = iter(np.split(white, np.cumsum([m.sum() for m in masks])[:-1]))
  parts = tuple(
    Minibatch(
      tuple(_with_advantages(batch, next(pieces)) for batch in part.microbatches),
      part.denominators,
    )
    for part in assembled.minibatches
  )
  return assembled.with_minibatches(parts)


def _filled(values: Float[np.ndarray, " n"], room: int) -> Float[np.ndarray, " room"]:
  """Returns the values followed by zeros."""
  return np.pad(values.astype(np.float32), (0, room - values.size))


def _penalized(batch: Batch, options: ResolvedOptions) -> Float[np.ndarray, "B N"]:
  """Returns the rollout's advantage at every loss place, minus the KL penalty of the token."""
  places = np.asarray(batch.loss_places)
  values = np.take_along_axis(np.asarray(batch.advantages), np.maximum(places, 0), axis=-1)
  if not (options.kl_in_reward and options.kl_coef):
    return values
  if batch.old_logprobs is None or batch.ref_logprobs is None:
    raise ValueError("a KL in the reward needs old and reference logprobs of the batch")
  old, ref = np.asarray(batch.old_logprobs), np.asarray(batch.ref_logprobs)
  return np.asarray(_penalty(values, old, ref, places >= 0, options=options))


def _in_loss(batch: Batch) -> Bool[np.ndarray, "B N"]:
  """Returns True on the tokens that are learned from."""
  in_loss = np.asarray(batch.loss_places) >= 0
  return in_loss if batch.kept is None else in_loss & np.asarray(batch.kept)


def _with_advantages(batch: Batch, values: Float[np.ndarray, " tokens"]) -> Batch:
  """Puts one value on each of the tokens that are learned from."""
  places = np.asarray(batch.loss_places)
  rows, columns = np.nonzero(_in_loss(batch))
  result = np.zeros(batch.advantages.shape, np.float32)
  result[rows, places[rows, columns]] = values
  return dataclasses.replace(batch, advantages=result)


def _components(
  groups: Sequence[RolloutGroup], prompts: int, width: int, weights: Sequence[float] | None
) -> Float[np.ndarray, "K P G"]:
  """Returns each reward component, in the order of their names; NaN where one is missing."""
  names = sorted({name for g in groups for r in g.rollouts for name in r.reward_components})
  if not names:
    raise ValueError("this advantage estimator needs reward components, but the rollouts have none")
  if weights is not None and len(weights) != len(names):
    raise ValueError(
      f"advantages.weights has {len(weights)} numbers, the rollouts have {len(names)} reward "
      f"components, in this order: {', '.join(names)}"
    )
  return np.stack(
    [
      _padded(
        [
          np.asarray([r.reward_components.get(name, np.nan) for r in g.rollouts], np.float32)
          for g in groups
        ],
        prompts,
        width,
      )
      for name in names
    ]
  )


def _padded(rows: Sequence[np.ndarray], prompts: int, width: int) -> Float[np.ndarray, "P G"]:
  padded = np.zeros((prompts, width), np.float32)
  for place, row in zip(padded, rows, strict=False):
    place[: len(row)] = row
  return padded
