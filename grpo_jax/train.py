"""The loop: sample, assemble, score, learn, publish, tell. The one file to read first.

Step s starts from the weights of version s and makes version s + 1. An
evaluation or a checkpoint "at s" is of the weights of version s. Everything
random is folded from (seed, step, prompt, attempt), so a run that was killed
and started again ends as if it had never stopped.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax import (
  batching,
  credit,
  evaluation,
  filters,
  learning_signal,
  metrics,
  monitoring,
  report,
  rollout,
  shaping,
  timing,
)
from grpo_jax.building import Config, Run, build
from grpo_jax.engines.base import EngineFailure
from grpo_jax.learn import sharding, train_step
from grpo_jax.models import export
from grpo_jax.run_options import validate
from grpo_jax.types import Mean, Metrics, RolloutGroup, TrainState

__all__ = ["train", "validate"]


def train(config: Config, workdir: pathlib.Path, *, stop: Any = False) -> dict[str, float]:
  """Runs the training that `config` describes, from its newest checkpoint if there is one.

  Args:
    config: resolved and valid; see configs/base.py.
    workdir: the run folder.
    stop: becomes true when the run is asked to end; see `interrupts.Flag`.

  Returns:
    The metrics of the last evaluation.
  """
  with contextlib.ExitStack() as stack:
    run, begin = build(config, pathlib.Path(workdir), stack)
    state, skipped, evaluated = begin.state, begin.skipped, begin.evaluated
    position = run.stream.state()
    stack.callback(report.write, workdir)
    timer = run.timer
    run.engine.load_weights(state.params, version=int(state.step))
    if evaluated:
      run.logger.write(int(state.step), evaluated)
    elif int(state.step) == 0 and config.evaluation.at_start:
      evaluated = evaluate(run, state.params, step=0)

    failure: EngineFailure | None = None
    for step in range(int(state.step), config.total_steps):
      with timer.span("step"):
        # --- 1. sample: P prompts x G completions, scored by their environments ---
        with timer.span("sample"), keeping(run, state, position, skipped, evaluated):
          groups = run.stream.take(step)
        if stop or not groups:
          break  # what was sampled is sampled again when the run goes on.

        # --- 2. assemble: ragged groups -> rectangular, packed, sharded microbatches ---
        with timer.span("assemble"):
          kept = filters.apply(groups, **run.filters)
          shaped = shaping.apply(kept.kept, run.shaping)
          advantages = credit.advantages_of(shaped, run.estimator)
          batch = assemble(run, shaped, advantages)

        # --- 3. score: logprobs under the policies that stay fixed ---
        with timer.span("score"):
          batch = score(run, state, batch)

        # --- 4. learn: one or more optimizer steps on the batch ---
        with timer.span("learn"), keeping(run, state, position, skipped, evaluated):
          run.engine.release()  # its copies of the weights make room for the gradients.
        with timer.span("monitor"), keeping(run, state, position, skipped, evaluated):
          watched = run.monitor(step, state.params, groups)
        with timer.span("learn"):
          state, learned, logprobs = learn(run, state, batch)

        # --- 5. publish: the engine samples from the new weights from here on ---
        with timer.span("sync"):
          failure = hand_over(run, state)

      # --- 6. tell: nothing below changes what is learned ---
      compared = batching.per_rollout(batch, jax.device_get(logprobs), kept.kept)
      signal = learning_signal.of_step(
        groups, shaped, advantages, batch.not_computed, run.estimator
      )
      of_all = {**watched, **signal.metrics(), **computed_share(groups, kept, compared)}
      told = describe(run, step, groups, kept, advantages, batch, learned, compared) | of_all
      run.stream.tell(step, metrics.reproducible(told))
      position = run.stream.state()
      run.logger.write(step, told)
      record(run, step, groups, kept, advantages, compared)
      for line in run.signal_watch.lines(step, signal):
        run.logger.print(line)
      skipped = train_step.skipped_in_a_row(skipped, told, limit=config.learn.max_skipped_steps)
      run.checkpoints.check()  # a disk that is full is told now, not at the next save.
      is_last = step + 1 == config.total_steps
      evaluated = {}
      is_wanted = due(step + 1, config.evaluation.every_steps)
      if not failure and (is_wanted or (is_last and config.evaluation.at_end)):
        with keeping(run, state, position, skipped, evaluated):
          evaluated = evaluate(run, state.params, step=step + 1)
      if due(step + 1, config.checkpoint.every_steps) or is_last:
        save(run, state, position, skipped, evaluated)
      if stop or failure:
        break
    save(run, state, position, skipped, evaluated)  # nothing, if the loop has just done so.
    if int(state.step) > 0 and not run.signal_watch.has_learned:
      run.logger.print("NOTHING WAS LEARNED FROM REWARDS in this run; the lines above say why")
    if failure:
      raise failure
    if int(state.step) == config.total_steps:
      publish(run, state)
    elif int(state.step) < config.total_steps and not stop:
      run.logger.print(f"the data ended after {int(state.step)} steps")
  return evaluated


def due(step: int, every: int) -> bool:
  """Returns whether what is done every `every` steps (0: never) is to be done now."""
  return every > 0 and step % every == 0


@contextlib.contextmanager
def keeping(
  run: Run,
  state: TrainState,
  position: Mapping[str, Any],
  skipped: int,
  evaluated: Mapping[str, float],
) -> Iterator[None]:
  """Saves what was learned if what follows fails: by a broken row, a lost server, …"""
  try:
    yield
  except Exception:
    if int(state.step) > 0:
      save(run, state, position, skipped, evaluated)
    raise


def hand_over(run: Run, state: TrainState) -> EngineFailure | None:
  """Gives the engine the new weights; returns what kept it from taking them.

  That is raised once the step was told and saved.
  """
  try:
    run.engine.load_weights(state.params, version=int(state.step))
  except EngineFailure as error:
    return error
  return None


def assemble(
  run: Run, groups: Sequence[RolloutGroup], advantages: Sequence[np.ndarray]
) -> batching.Assembled:
  """Packs groups into microbatches on the mesh."""
  options = run.config.batching
  loss = run.objective.options
  adds_nothing = not (loss.kl_coef or loss.entropy_coef or run.estimator.needs_whitening)
  assembled = batching.assemble(
    groups,
    advantages,
    row_tokens=options.row_tokens,
    minibatches=run.config.learn.minibatches,
    microbatch_tokens=options.microbatch_tokens,
    rows_multiple=sharding.replicas(run.mesh),
    row_buckets=options.row_buckets,
    share_prefixes=options.share_prefixes,
    pack=options.pack,
    drop_truncated=options.drop_truncated,
    skip_zero_advantage=options.skip_zero_advantage and adds_nothing,
  )
  return assembled.with_minibatches(sharding.put(assembled.minibatches, run.mesh))


def score(run: Run, state: TrainState, batch: batching.Assembled) -> batching.Assembled:
  """Adds old logprobs where several updates follow, reference logprobs where there is a KL."""
  updates = run.config.learn.epochs * len(batch.minibatches)
  loss = run.objective.options
  needs_old = run.objective.needs_old and (updates > 1 or loss.kl_in_reward)
  scored = train_step.with_logprobs(
    batch.minibatches,
    run.score,
    old_params=state.params if needs_old else None,
    ref_params=run.reference,
  )
  batch = batch.with_minibatches(jax.block_until_ready(scored))
  if run.estimator.needs_whitening:
    batch = credit.whitened(batch, run.estimator, loss)
    batch = batch.with_minibatches(sharding.put(batch.minibatches, run.mesh))
  return batch


def learn(
  run: Run, state: TrainState, batch: batching.Assembled
) -> tuple[TrainState, Metrics, train_step.MicrobatchLogprobs]:
  """Updates the weights; where there is nothing to learn from, only counts the step."""
  if not batch.minibatches:
    untouched: Metrics = {"train/skipped_share": Mean(0.0, 1.0)}
    return dataclasses.replace(state, step=state.step + 1), untouched, []
  return jax.block_until_ready(run.update(state, batch.minibatches))


def describe(
  run: Run,
  step: int,
  groups: Sequence[RolloutGroup],
  kept: filters.Filtered,
  advantages: Sequence[np.ndarray],
  batch: batching.Assembled,
  learned: Metrics,
  logprobs: Sequence[Sequence[np.ndarray]],
) -> dict[str, float]:
  """Returns all metrics of a step; see docs/metrics.md."""
  times = run.timer.collect()
  tokens = sum(
    len(group.prompt.token_ids) + len(r.completion_ids) for group in groups for r in group.rollouts
  )
  return {
    "weight_version": float(step),
    **metrics.of_rollouts(groups, step=step),
    **shaping.of_groups(groups, run.shaping),
    **run.stream.metrics(),
    **{f"perf/{name}": value for name, value in run.environments.metrics().items()},
    **(metrics.of_datasets(groups) if run.has_several_datasets else {}),
    **run.engine.metrics(),
    **{f"filter/{reason}": float(count) for reason, count in kept.dropped.items()},
    **credit.of_advantages(advantages),
    **metrics.to_floats(batch.metrics),
    **metrics.to_floats(learned),
    **(run.ranking.of_step(kept.kept, logprobs) if run.ranking else {}),
    **times,
    "perf/tokens_per_s": tokens / times["time/step_s"],
    "perf/peak_rss_gib": timing.peak_rss_gib(),
    **monitoring.device_memory(run.mesh.local_devices),
  }


def computed_share(
  groups: Sequence[RolloutGroup],
  kept: filters.Filtered,
  logprobs: Sequence[Sequence[np.ndarray]],
) -> dict[str, float]:
  """Returns batch/computed_token_share: of which tokens train/entropy and mismatch/* are."""
  total = sum(int(rollout.loss_mask.sum()) for group in groups for rollout in group.rollouts)
  return {"batch/computed_token_share": monitoring.token_shares(kept.kept, logprobs, total)}


def record(
  run: Run,
  step: int,
  groups: Sequence[RolloutGroup],
  kept: filters.Filtered,
  advantages: Sequence[np.ndarray],
  logprobs: Sequence[Sequence[np.ndarray]],
) -> None:
  """Writes all rollouts of a step; those that were left out have NaN for what they lack."""
  of_kept = zip(advantages, logprobs, strict=True)
  found = {group.prompt.prompt_id: known for group, known in zip(kept.kept, of_kept, strict=True)}
  unknown = lambda group: (
    np.full(len(group.rollouts), np.nan),
    [np.full(len(r.completion_ids), np.nan, np.float32) for r in group.rollouts],
  )
  columns = [found.get(group.prompt.prompt_id) or unknown(group) for group in groups]
  shaped = [group.rewards for group in shaping.apply(groups, run.shaping)]
  run.logger.write_rollouts(step, groups, *zip(*columns, strict=True), shaped_rewards=shaped)


def evaluate(run: Run, params: Any, *, step: int) -> dict[str, float]:
  """Evaluates the weights of a step on every held-out set, and tells."""
  options = run.config.evaluation
  found: dict[str, float] = {}
  with run.timer.span("evaluate"):
    for name, prompts in run.held_out.items():
      with run.logger.progress(f"evaluating {name}", len(prompts)) as advance:
        if run.ranking is not None:
          found |= run.ranking.evaluate(params, prompts, name=name, advance=advance)
          continue
        found |= evaluation.run(
          run.engine,
          run.environments,
          prompts,
          run.tokenizer,
          name=name,
          group_size=options.group_size,
          pass_k=options.pass_k,
          sampling=run.evaluation_sampling,
          seed=run.config.seed,
          limits=run.limits,
          on_progress=rollout.counting(advance),
        )
  run.logger.write(step, {**found, **run.timer.collect()})
  return found


def save(
  run: Run,
  state: TrainState,
  position: Mapping[str, Any],
  skipped: int,
  evaluated: Mapping[str, float],
) -> None:
  """Starts to write a checkpoint, with all that continuing needs."""
  extra = {"stream": position, "skipped": skipped, "evaluated": dict(evaluated)}
  with run.timer.span("checkpoint"):
    run.checkpoints.save(int(state.step), dict(vars(state)), extra, metrics=evaluated)


def publish(run: Run, state: TrainState) -> None:
  """Writes the final weights as a Hugging Face folder, export/."""
  dtype = run.config.export.dtype
  folder = export.to_huggingface(
    state.params,
    run.model.config,
    run.workdir / "export",
    source_directory=run.model.directory,
    dtype=np.dtype(dtype) if dtype else None,
  )
  run.logger.print(f"final weights: {folder}")
