"""Measures all completions of a step, and the devices: monitoring, not training.

The update computes only what it learns from, so train/entropy and mismatch/* omit completions of
advantage 0 that add nothing to the loss. Every few steps `Monitor` scores all completions under the
weights that are about to be updated and under the initial ones; these metrics begin with "all/".
The initial weights are those of `model.path`, without an adapter. They are read from their folder
each time and then freed: a permanent copy would cost 4 bytes per parameter in every run.

In a step whose update computes nothing, it also scores all completions, so that mismatch/* and
staleness/* exist in every step.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from grpo_jax import metrics, processes
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.learn import group_scoring
from grpo_jax.learn.scoring import bare, unreplayed
from grpo_jax.learn.token_scores import TokenScores
from grpo_jax.rl import diagnostics, kl
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Mean, Metrics, RolloutGroup

_GIB = 2**30
# Metrics of the update that the watcher measures under another name.
_ALSO_WATCHED = {
  "train/entropy": "all/entropy",
  "mismatch/outside_truncation_share": "all/outside_truncation_share",
}


@dataclasses.dataclass(frozen=True)
class Monitor:
  """Measures steps: monitor(step, weights, groups) → metrics of all completions, if they are due.

  Attributes:
    watch: Program made by `scoring.make_watcher`.
    drift: Program made by `make_drift`.
    mismatch: Program made by `make_mismatch`.
    scorer: Scorer of groups, which packs them into rows.
    initial: Function that returns the full weights of the initial policy.
    frees_initial: Whether the arrays that `initial` returns are deleted after use, because
      nothing else holds them.
    begins_apart: Whether the policy of step 0 is not the initial one, because the run began with an
      adapter.
    has_ages: Whether the ages of tokens are measured.
    all_every_steps: Steps between two measurements of all completions; 0: never.
    kl_every_steps: Steps between two measurements of the drift; 0: never.
    total_steps: Number of steps of the run; the last is always measured, unless that is off.
    warn: Function that logs why the drift could not be measured, given one sentence.
  """

  watch: Program  # made by `scoring.make_watcher`.
  drift: Program
  mismatch: Program
  scorer: group_scoring.GroupScorer
  initial: Callable[[], Any]
  frees_initial: bool
  all_every_steps: int
  kl_every_steps: int
  total_steps: int
  warn: Callable[[str], None]
  begins_apart: bool = False
  has_ages: bool = False

  def __call__(
    self, step: int, weights: Any, groups: Sequence[RolloutGroup], *, is_learned: bool = True
  ) -> dict[str, float]:
    """Measures a step.

    Args:
      step: Number of the step, i.e. of the updates done before it.
      weights: Weights of the policy before the update, as programs take them.
      groups: Groups of the step, before any filter.
      is_learned: Whether the update computes any of the completions, and reports the metrics that
        need their logprobs.

    Returns:
      Metrics all/* by name, and "train/kl_to_reference" if the loss does not report it, in a step
      that is due; with nothing learned, those of `Objective.mismatch`, and "train/entropy".
    """
    wants_all = self._is_due(step, self.all_every_steps)
    wants_kl = self._is_due(step, self.kl_every_steps)
    if not groups or not (wants_all or wants_kl or not is_learned):
      return {}
    batches, covered = self.scorer.batches(groups, step=step if self.has_ages else None)
    if not batches:
      return {}
    scored = [bare(batch) for batch in batches]
    watched = [self.watch(weights, batch) for batch in scored]
    scores = [of_batch for _, of_batch in watched]
    seen = metrics.merge(jax.device_get([values for values, _ in watched]))
    found: Metrics = {}
    if wants_all:
      found = {**seen, "all/covered_token_share": Mean(float(covered), float(_sampled(groups)))}
    if wants_kl:
      found |= self._drift(step, list(map(unreplayed, scored)), _of_softmax(scores))
    if not is_learned:
      rest = map(unreplayed, batches)
      parts = [self.mismatch(s.logprobs, b) for s, b in zip(scores, rest, strict=True)]
      found |= metrics.merge(jax.device_get(parts))
      found |= {name: seen[same] for name, same in _ALSO_WATCHED.items() if same in seen}
    return metrics.to_floats(found)

  def _is_due(self, step: int, every: int) -> bool:
    """Returns whether a step is a multiple of `every`, or the last."""
    return every > 0 and (step % every == 0 or step + 1 == self.total_steps)

  def _drift(self, step: int, batches: Sequence[Batch], policy: Sequence[Array]) -> Metrics:
    """Measures the KL to the initial weights; {} if they cannot be read."""
    if step == 0 and not self.begins_apart:  # the policy is the initial one.
      return metrics.merge(jax.device_get(list(map(self.drift, policy, policy, batches))))
    try:
      params = processes.together(self.initial, what="reading the initial weights")
    except (OSError, ValueError, processes.OtherProcessError) as error:
      self.warn(f"all/kl_to_initial cannot be measured: cannot read the initial weights: {error}")
      return {}
    initial = _of_softmax([self.watch(params, batch)[1] for batch in batches])
    drifts = map(self.drift, policy, initial, batches)
    merged = metrics.merge(jax.device_get(list(drifts)))
    if self.frees_initial:
      jax.tree.map(lambda leaf: leaf.delete(), params)
    return merged


def make_drift(objective: Objective, *, is_frozen: bool = True) -> Program:
  """Makes drift(policy logprobs, initial logprobs, batch) → the KL to the initial weights.

  Args:
    objective: The loss. If it does not report "train/kl_to_reference", the drift is also measured
      under that name, by the estimator, bounds and aggregation of the loss.
    is_frozen: Whether the reference policy is the initial one; False: only a loss knows the
      present one.
  """

  def drift(policy: Float[Array, "B N"], initial: Float[Array, "B N"], batch: Batch) -> Metrics:
    found: Metrics = {"all/kl_to_initial": _drift_of(policy, initial, batch.loss_places)}
    if is_frozen and not objective.reports_kl:
      tokens = dataclasses.replace(gather_loss_tokens(batch), ref_logprobs=initial)
      found["train/kl_to_reference"] = objective.kl_to_reference(policy, tokens)
    return found

  return Program(jax.jit(drift), name="drift")


def make_mismatch(objective: Objective) -> Program:
  """Makes mismatch(policy logprobs, batch) → `Objective.mismatch`."""

  def mismatch(policy: Float[Array, "B N"], batch: Batch) -> Metrics:
    return objective.mismatch(policy, gather_loss_tokens(batch))

  return Program(jax.jit(mismatch), name="mismatch")


def jobs(
  watch: Program,
  drift: Program,
  mismatch: Program,
  weights: Any,
  batches: Mapping[str, Batch],
  aged: Mapping[str, Batch],
  *,
  initial: Any = None,
  all_every_steps: int,
  kl_every_steps: int,
) -> list[CompileJob]:
  """Returns the compilations that measuring needs.

  Args:
    watch: Program made by `scoring.make_watcher`.
    drift: Program made by `make_drift`.
    mismatch: Program made by `make_mismatch`.
    weights: Shapes, dtypes and shardings of the policy's weights, as programs take them.
    batches: The same of a batch of every shape, by its description.
    aged: The same with the ages of tokens, if they are measured; {}: no step is without an update.
    initial: The same of the initial weights; None: as the policy's.
    all_every_steps: Steps between two measurements of all completions; 0: never.
    kl_every_steps: Steps between two measurements of the drift; 0: never.
  """
  found = []
  for detail, batch in batches.items():
    places: Any = batch.loss_places
    logprobs = jax.ShapeDtypeStruct(places.shape, np.float32, sharding=places.sharding)
    if all_every_steps or kl_every_steps or aged:
      found.append(watch.job(weights, batch, detail=detail))
    alone = unreplayed(batch)
    if kl_every_steps:
      if initial is not None or batch.experts is not None:
        found.append(watch.job(weights if initial is None else initial, alone, detail=detail))
      found.append(drift.job(logprobs, logprobs, alone, detail=detail))
    if aged:
      found.append(mismatch.job(logprobs, unreplayed(aged[detail]), detail=detail))
  return found


def make_initial(load: Callable[[], Any], reference: Any) -> tuple[Callable[[], Any], bool]:
  """Returns a function that returns the initial weights, and whether they are freed after use.

  Args:
    load: Function that reads the initial weights again.
    reference: Weights of the reference policy, which are the initial ones; None if there is no
      reference.
  """
  return (load, True) if reference is None else (lambda: reference, False)


def _of_softmax(scores: Sequence[TokenScores]) -> list[Array]:
  """Returns the logprobs of the whole softmax of each batch."""
  return [one.logprobs if one.full is None else one.full for one in scores]


def token_shares(
  groups: Sequence[RolloutGroup], logprobs: Sequence[Sequence[np.ndarray]], total: int
) -> float:
  """Returns the share of the sampled tokens of a step that the update has computed.

  Args:
    groups: Groups that passed the filters.
    logprobs: Logprobs of their rollouts; NaN on tokens that were not computed.
    total: Number of sampled tokens in the step, before the filters.
  """
  computed = sum(
    int((np.isfinite(values) & rollout.loss_mask).sum())
    for group, of_group in zip(groups, logprobs, strict=True)
    for rollout, values in zip(group.rollouts, of_group, strict=True)
  )
  return computed / total if total else float("nan")


def device_memory(devices: Sequence[Any]) -> dict[str, float]:
  """Returns the memory in use of each device, now and at most since the process began, in GiB.

  Args:
    devices: Devices of the run on this host. The CPU and some other devices do not report memory.

  Returns:
    Metrics perf/device* by name; {} if no device reports its memory.
  """
  counted = {device.id: device.memory_stats() or {} for device in devices}
  found: dict[str, float] = {}
  for name, field in (("", "bytes_in_use"), ("peak_", "peak_bytes_in_use")):
    values = {number: stats[field] / _GIB for number, stats in counted.items() if field in stats}
    if values:
      found[f"perf/device_{name}gib"] = max(values.values())
      found |= {f"perf/device/{number}/{name}gib": value for number, value in values.items()}
  limits = [stats["bytes_limit"] / _GIB for stats in counted.values() if stats.get("bytes_limit")]
  if found and limits:
    found["perf/device_limit_gib"] = min(limits)
  return found


def _sampled(groups: Sequence[RolloutGroup]) -> int:
  """Returns the number of tokens that the policy sampled."""
  return sum(int(rollout.loss_mask.sum()) for group in groups for rollout in group.rollouts)


def _drift_of(policy: Float[Array, "B N"], initial: Float[Array, "B N"], places: Any) -> Mean:
  """Returns KL(policy ‖ initial), estimated by k3 and clamped as the loss does by default."""
  values = kl.kl_penalty(policy, initial, estimator="k3", input_clamp=20.0, output_clamp=10.0)
  return diagnostics.token_average(values, places >= 0)
