"""The phases of a training step that need more than one call: score, learn, evaluate, publish.

`building.run` binds them to their options, so that the loop passes only data.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax import report
from grpo_jax.batching import Assembled
from grpo_jax.building.training_mode import EvaluateSet
from grpo_jax.compilation import compiling
from grpo_jax.files.disk import WriteError
from grpo_jax.groups import credit
from grpo_jax.learn import scoring, screening, sharding, token_scores, train_step
from grpo_jax.learn.policy import Policy
from grpo_jax.metrics import timing
from grpo_jax.models import (
  adapter_files,
  export,
  files,
  loading,
  lora,
  multimodal,
  parameter_reading,
)
from grpo_jax.processes import arrays
from grpo_jax.rl.estimators import Estimator
from grpo_jax.rl.objective_options import ResolvedOptions
from grpo_jax.run_folder import console, workdirs
from grpo_jax.run_folder.evaluation_log import EvaluationLog
from grpo_jax.run_folder.loggers import Logger
from grpo_jax.types import Mean, Metrics, Minibatch, Prompt, RolloutGroup, TrainState

Minibatches = Sequence[Minibatch]

# What scoring adds to a batch, and the advantages of whitening depend on.
_SCORED = ("old_logprobs", "ref_logprobs", "kept")


@dataclasses.dataclass(frozen=True)
class ReferenceUpdate:
  """Moves the reference policy to the policy every few steps: update(state) → the new state.

  Attributes:
    every: Training steps between two updates.
    follow: Program (reference, full weights) → the next reference; donates the first.
  """

  every: int
  follow: Callable[[Any, Any], Any]

  def is_due(self, step: int) -> bool:
    """Returns whether the reference is updated from the weights of a step."""
    return step % self.every == 0

  def age(self, step: int) -> int:
    """Returns how many steps ago the reference that a step uses was the policy, or a part of it."""
    return step % self.every

  def __call__(self, state: TrainState) -> TrainState:
    """Returns the state with the next reference; the old one is donated."""
    return dataclasses.replace(state, reference=self.follow(state.reference, state.params))


def score(
  state: TrainState,
  batch: Assembled,
  *,
  scorer: scoring.Scorer,
  old_scorer: scoring.Scorer | None = None,
  needs_old: bool,
  needs_ref: bool,
  policy: Policy,
  estimator: Estimator,
  options: ResolvedOptions,
  mesh: Mesh,
  logger: Logger,
  teacher: Callable[[Minibatches], Sequence[Sequence[Any]]] | None = None,
) -> tuple[Minibatch, ...]:
  """Puts a batch on the devices, with logprobs under the policies that stay fixed.

  Args:
    state: State before the update.
    batch: Batch of the step, on the host.
    scorer: Program that computes logprobs, for the reference policy.
    old_scorer: The same for the policy itself, of the distribution that is trained; None:
      `scorer`.
    needs_old: Whether old logprobs are needed, because several updates follow.
    needs_ref: Whether logprobs under the reference policy are needed.
    policy: Policy of the run.
    estimator: Estimator of the advantages, which may have to be whitened.
    options: Options of the objective.
    mesh: Mesh of the devices.
    logger: Logger that shows the phase.
    teacher: Function that returns the teacher's logprobs of the minibatches on the devices; None:
      there is no teacher.

  Raises:
    ScoringError: The servers of the teacher do not score.
    Stopped: The run is asked to end while they do.
  """
  whitens, threshold = estimator.needs_whitening, options.seq_logprob_error_threshold
  takes_kl_off = bool(options.kl_in_reward and options.kl_coef)
  whitens_last = whitens and (takes_kl_off or threshold is not None)
  count = sum(len(one.microbatches) for one in batch.minibatches) * (needs_old or needs_ref)
  with logger.progress("scoring", count or None) as advance:
    if whitens and not whitens_last:
      batch = credit.whitened(batch, estimator, options)
    placed = sharding.put(batch.minibatches, mesh)
    scored = scoring.with_logprobs(
      placed,
      scorer,
      old_score=old_scorer,
      old_params=policy.weights(state.params) if needs_old else None,
      ref_params=policy.reference_of(state) if needs_ref else None,
      on_microbatch=_when_computed(advance),
    )
    if threshold is not None:
      scored = screening.screened(scored, threshold=threshold)
    if whitens_last:  # over what is left, and without the KL: the logprobs come first.
      known = _with(batch.minibatches, arrays.fetch(_fields(scored, *_SCORED)))
      white = credit.whitened(batch.with_minibatches(known), estimator, options)
      scored = _with(scored, sharding.put(_fields(white.minibatches, "advantages"), mesh))
    if teacher is not None:
      logprobs = teacher(placed)
      scored = _with(scored, [[{"teacher_logprobs": each} for each in own] for own in logprobs])
    return jax.block_until_ready(scored)


def _when_computed(advance: Callable[[], None]) -> token_scores.OnMicrobatch:
  """Returns a function that calls `advance` for each microbatch that is computed.

  It waits for the microbatch before the one that was just requested: the devices stay busy.
  """
  requested: list[Any] = []

  def follow(logprobs: Any) -> None:
    if requested:
      jax.block_until_ready(requested.pop())
      advance()
    requested.append(logprobs)

  return follow


def _fields(minibatches: Minibatches, *names: str) -> list[list[dict[str, Any]]]:
  """Returns some fields of each microbatch, by minibatch."""
  return [
    [{name: getattr(batch, name) for name in names} for batch in one.microbatches]
    for one in minibatches
  ]


def _with(
  minibatches: Minibatches, fields: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[Minibatch, ...]:
  """Replaces fields of each microbatch; the new values are grouped by minibatch."""
  return tuple(
    Minibatch(
      tuple(
        dataclasses.replace(batch, **new) for batch, new in zip(one.microbatches, own, strict=True)
      ),
      one.denominators,
    )
    for one, own in zip(minibatches, fields, strict=True)
  )


def learn(
  state: TrainState,
  minibatches: Minibatches,
  before: Callable[[], None],
  *,
  update: train_step.Update,
  policy: Policy,
  logger: Logger,
  reference: ReferenceUpdate | None = None,
  measure: Callable[[Any], Metrics] | None = None,
) -> tuple[TrainState, Metrics, train_step.MicrobatchLogprobs]:
  """Updates the weights; if there is nothing to learn from, only counts the step.

  Args:
    state: Training state; an update donates its arrays.
    minibatches: Batch of the step, on the devices.
    before: Function called before the arrays of the state are donated.
    update: Training step.
    policy: Policy of the run.
    logger: Logger that shows the phase.
    reference: Update of the reference policy, after that of the weights; None: it is frozen.
    measure: Function that measures the new weights, as programs take them; None: nothing does.

  Returns:
    The new state, metrics, and the logprobs of the batch before the first update.
  """
  is_due = reference is not None and reference.is_due(int(state.step) + 1)
  if minibatches:
    count = update.epochs * sum(len(one.microbatches) for one in minibatches)
    with logger.progress("learning", count) as advance:
      follow = _when_computed(advance)
      learned = jax.block_until_ready(update(state, minibatches, before, policy.weights, follow))
  else:
    if is_due:
      before()
    new = dataclasses.replace(state, step=train_step.counted_on(state.step))
    untouched: Metrics = {"train/skipped_share": Mean(0.0, 1.0)}
    learned = new, untouched, []
  new, metrics, logprobs = learned
  if measure is not None:
    metrics |= measure(policy.weights(new.params))
  if reference is None:
    return learned
  metrics["train/reference_age"] = Mean(float(reference.age(int(new.step) - 1)), 1.0)
  return (reference(new) if is_due else new), metrics, logprobs


def evaluate(
  state: TrainState,
  *,
  policy: Policy,
  evaluate_set: EvaluateSet,
  held_out: Mapping[str, Sequence[Prompt]],
  completions: EvaluationLog | None,
  timer: timing.Timer,
  compilations: compiling.CompilationMonitor,
  logger: Logger,
) -> dict[str, float]:
  """Evaluates a state on every held-out set, logs the metrics and keeps the completions.

  Returns:
    Metrics eval/* of all sets.

  Raises:
    Stopped: The run is asked to end.
  """
  found: dict[str, float] = {}

  def keep(name: str, groups: Sequence[RolloutGroup]) -> None:
    if completions is not None:
      completions.write(int(state.step), name, groups)

  with timer.span("evaluate"):
    for name, prompts in held_out.items():
      kept = functools.partial(keep, name)
      found |= evaluate_set(policy.weights(state.params), prompts, name, kept)
  # The next step reports them too, because it was delayed.
  compiled = compiling.metrics(compilations.so_far())
  logger.write(int(state.step), {**found, **compiled, **timer.collect()})
  return found


def publish(
  state: TrainState,
  *,
  policy: Policy,
  model: loading.ModelFacts,
  rounding: parameter_reading.Rounding,
  folder: pathlib.Path,
  dtype: str | None,
  max_shard_gb: float | None,
  is_offline: bool,
  has_sets: bool,
  logger: Logger,
  adapter: lora.AdapterOptions | None = None,
  measure: Callable[[Any], Metrics] | None = None,
  base: str = "",
  templates: Callable[[], Mapping[str, str]] = dict,
) -> None:
  """Writes the final weights as a Hugging Face folder, and a trained adapter as a PEFT folder.

  An adapter is written twice: merged with its base in `folder`, and alone in adapter/ beside it.

  Args:
    state: Final state.
    policy: Policy of the run.
    model: Model that training began with.
    rounding: Rounding of its weights when they were read.
    folder: Folder to write.
    dtype: Dtype of the weights in the files; None: as in `export.to_huggingface`.
    max_shard_gb: Largest size of a file, in gigabytes; None: one file.
    is_offline: Whether the run learned from recorded groups.
    has_sets: Whether the run has evaluation sets.
    logger: Logger that reports where the weights are.
    adapter: Options of the adapter that was trained; None: every weight was trained.
    measure: Function that measures the weights, as in `learn`.
    base: Name or folder of the adapter's base, for the files.
    templates: Returns the chat templates of the files; empty: those of the model's folder.
  """
  named = templates()
  written = export.to_huggingface(
    policy.full(state.params),
    model.config,
    folder,
    source_directory=model.directory,
    templates=named,
    dtype=np.dtype(dtype) if dtype else None,
    max_shard_bytes=int(max_shard_gb * 1e9) if max_shard_gb else None,
  )
  alone, names = None, {}
  if adapter is not None:
    names = multimodal.peft_names(files.read_json(model.directory / "config.json"))
    place = folder.with_name("adapter")
    alone = adapter_files.write(
      state.params,
      model.config,
      adapter,
      place,
      base=base,
      tokenizer=model.directory,
      templates=named,
    )
  note = ""
  if alone is not None and rounding.relative and measure is not None:
    change = measure(policy.weights(state.params))["lora/relative_change"].value()
    note = (
      f"its base was rounded by a relative {rounding.relative:.1e}, and the adapter changes it by"
      f" {change:.1e}: on the published weights it is a different policy"
    )
  ending = console.closing_lines(
    str(written),
    workdirs.shown(folder.parent),
    is_offline=is_offline,
    has_sets=has_sets,
    adapter=None if alone is None else str(alone),
    names=names,
    note=note,
  )
  for line in ending:
    logger.print(line)


def write_report(
  workdir: pathlib.Path, logger: Logger, kind: type[BaseException] | None, *_: object
) -> None:
  """Writes report.html when a run ends, and prints where it is.

  Args:
    workdir: Run folder.
    logger: Logger that reports the path.
    kind: Class of the exception that ends the run. A failed report must not hide it.

  Raises:
    WriteError: The report cannot be written, and nothing else has failed.
  """
  try:
    path = report.write(workdir)
    logger.print(f"report: {path} (open it in a browser)")
  except WriteError as error:
    if kind is None:
      raise
    logger.print(f"no report could be written: {error}")
