"""The loop: sample, assemble, score, learn, publish, tell. The one file to read first.

Step s starts from the weights of version s and makes version s + 1. An
evaluation or a checkpoint "at s" is of the weights of version s. Everything
random is folded from (seed, step, prompt, attempt), so a run that was killed
and started again ends as if it had never stopped.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax import batching, metrics, report
from grpo_jax.building import computation
from grpo_jax.building.run import Config, Run, build
from grpo_jax.compilation import compiling
from grpo_jax.config.run_options import validate
from grpo_jax.engines.base import EngineFailure
from grpo_jax.files import local_paths
from grpo_jax.files.disk import WriteError
from grpo_jax.groups import credit, filters, learning_signal, shaping
from grpo_jax.interrupts import Stopped
from grpo_jax.learn import monitoring, sharding, train_step
from grpo_jax.metrics import timing
from grpo_jax.models import export
from grpo_jax.rollouts import collecting as rollout
from grpo_jax.rollouts import evaluation
from grpo_jax.run_folder import console
from grpo_jax.run_folder.keeper import Keeper, Standing
from grpo_jax.types import Mean, Metrics, RolloutGroup, TrainState

__all__ = ["train", "validate"]


def train(config: Config, workdir: pathlib.Path, *, stop: Any = False) -> dict[str, float]:
  """Runs the training that `config` describes, from its newest checkpoint if there is one.

  Whatever ends it early, a KeyboardInterrupt included, what was learned is saved first.

  Args:
    config: resolved and valid; see configs/base.py.
    workdir: the run folder.
    stop: becomes true when the run is asked to end; see `interrupts.Flag`.

  Returns:
    The metrics of the last evaluation.

  Raises:
    ConfigError: the configuration cannot work here, or the run folder cannot be used.
    ExpectedFailure: what else a user can repair: data, servers, the disk, gradients.
  """
  workdir = local_paths.checked("workdir", workdir)
  with contextlib.ExitStack() as stack:
    try:
      run, begin = build(config, workdir, stack, stop)
    except Stopped:
      return {}  # before anything was learned: the run begins again where it began.
    stack.push(functools.partial(write_report, run))
    state, skipped, evaluated = begin.state, begin.skipped, begin.evaluated
    timer = run.timer
    failure: EngineFailure | None = None
    is_over = False
    first = Standing(state, run.stream.state(), skipped, evaluated)
    with Keeper(run.checkpoints, first, stop) as keeper:
      run.engine.load_weights(state.params, version=first.step)
      if evaluated:
        run.logger.write(first.step, evaluated)
      elif is_evaluated(config, first.step):
        evaluated = evaluate(run, state.params, step=first.step)
        keeper.hold(dataclasses.replace(first, evaluated=evaluated))

      for step in range(first.step, config.total_steps):
        with timer.span("step"):
          # --- 1. sample: P prompts x G completions, scored by their environments ---
          with timer.span("sample"):
            groups = run.stream.take(step)
          if stop:
            raise Stopped  # what was sampled is sampled again when the run continues.
          if not groups:
            break

          # --- 2. assemble: ragged groups -> rectangular, packed, sharded microbatches ---
          with timer.span("assemble"):
            kept = filters.apply(groups, **run.filters)
            shaped = shaping.apply(kept.kept, run.shaping)
            room = computation.room_of(config)
            advantages = credit.advantages_of(shaped, run.computation.estimator, room=room)
            batch = assemble(run, shaped, advantages)

          # --- 3. score: logprobs under the policies that stay fixed ---
          with timer.span("score"), run.logger.progress("scoring"):
            batch = score(run, state, batch)

          # --- 4. learn: one or more optimizer steps on the batch ---
          with timer.span("learn"):
            run.engine.release()  # its copies of the weights make room for the gradients.
          with timer.span("monitor"):
            watched = run.monitor(step, state.params, groups)
          with timer.span("learn"), run.logger.progress("learning"):
            state, learned, logprobs = learn(run, state, batch, keeper.consume)

          # --- 5. publish: the engine samples from the new weights from here on ---
          with timer.span("sync"):
            failure = hand_over(run, state)

        # --- 6. tell: nothing below changes what is learned ---
        compared = batching.per_rollout(batch, jax.device_get(logprobs), kept.kept)
        signal = learning_signal.of_step(
          groups, shaped, advantages, batch.not_computed, run.computation.estimator
        )
        of_all = {**watched, **signal.metrics(), **computed_share(groups, kept, compared)}
        compiled = run.compilations.take()
        told = describe(run, step, groups, kept, advantages, batch, learned, compared) | of_all
        told |= compiling.metrics(compiled)
        run.stream.tell(step, metrics.reproducible(told))
        run.logger.write(step, told)
        record(run, step, groups, kept, advantages, compared)
        for line in run.signal_watch.lines(step, signal):
          run.logger.print(line)
        if step > first.step and (line := compiling.late_line(f"step {step}", compiled)):
          run.logger.print(line)
        evaluated = {}
        standing = Standing(state, run.stream.state(), skipped, evaluated)
        keeper.hold(standing)
        skipped = train_step.skipped_in_a_row(skipped, told, limit=config.learn.max_skipped_steps)
        standing = dataclasses.replace(standing, skipped=skipped)
        keeper.hold(standing)
        run.checkpoints.check()  # a disk that is full is told now, not at the next save.
        if failure:
          break
        if is_evaluated(config, step + 1):
          evaluated = evaluate(run, state.params, step=step + 1)
          keeper.hold(dataclasses.replace(standing, evaluated=evaluated))
        if due(step + 1, config.checkpoint.every_steps):
          with timer.span("checkpoint"):
            keeper.save()
        if stop:
          raise Stopped

      if not failure and int(state.step) < config.total_steps:
        run.logger.print(f"the data ended after {int(state.step)} steps")
        if config.evaluation.at_end and not evaluated:
          evaluated = evaluate(run, state.params, step=int(state.step))
          keeper.hold(Standing(state, run.stream.state(), skipped, evaluated))
      is_over = not failure
      if int(state.step) > 0 and not run.signal_watch.has_learned:
        run.logger.print("NOTHING WAS LEARNED FROM REWARDS in this run; the lines above say why")
    if failure:
      raise failure
    if is_over:
      publish(run, state)
      late = compiling.late_line("the end of the run", run.compilations.take())
      if late and int(state.step) > first.step:
        run.logger.print(late)
  return evaluated


def is_evaluated(config: Config, step: int) -> bool:
  """Returns whether the weights of a step are to be evaluated."""
  options = config.evaluation
  if step == 0:
    return options.at_start
  return due(step, options.every_steps) or (step == config.total_steps and options.at_end)


def due(step: int, every: int) -> bool:
  """Returns whether what is done every `every` steps (0: never) is to be done now."""
  return every > 0 and step % every == 0


def write_report(run: Run, kind: type[BaseException] | None, *_: object) -> None:
  """Writes report.html when a run ends, and says where it is; a failure of the run goes first."""
  try:
    path = report.write(run.workdir)
    run.logger.print(f"report: {path} (open it in a browser)")
  except WriteError as error:
    if kind is None:
      raise
    run.logger.print(f"and no report: {error}")


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
  loss = run.computation.objective.options
  adds_nothing = not (
    loss.kl_coef or loss.entropy_coef or run.computation.estimator.needs_whitening
  )
  assembled = batching.assemble(
    groups,
    advantages,
    shapes=run.computation.shapes,
    cost=run.computation.cost,
    minibatches=run.config.learn.minibatches,
    share_prefixes=options.share_prefixes,
    pack=options.pack,
    drop_truncated=options.drop_truncated,
    skip_zero_advantage=options.skip_zero_advantage and adds_nothing,
  )
  return assembled.with_minibatches(sharding.put(assembled.minibatches, run.mesh))


def score(run: Run, state: TrainState, batch: batching.Assembled) -> batching.Assembled:
  """Adds old logprobs where several updates follow, reference logprobs where there is a KL."""
  made = run.computation
  scored = train_step.with_logprobs(
    batch.minibatches,
    made.score,
    old_params=state.params if made.needs_old else None,
    ref_params=run.reference,
  )
  batch = batch.with_minibatches(jax.block_until_ready(scored))
  if run.computation.estimator.needs_whitening:
    batch = credit.whitened(batch, run.computation.estimator, run.computation.objective.options)
    batch = batch.with_minibatches(sharding.put(batch.minibatches, run.mesh))
  return batch


def learn(
  run: Run, state: TrainState, batch: batching.Assembled, before: Callable[[], None]
) -> tuple[TrainState, Metrics, train_step.MicrobatchLogprobs]:
  """Updates the weights; where there is nothing to learn from, only counts the step.

  `before` is called before the arrays of the state are donated.
  """
  if not batch.minibatches:
    untouched: Metrics = {"train/skipped_share": Mean(0.0, 1.0)}
    return dataclasses.replace(state, step=train_step.counted_on(state.step)), untouched, []
  return jax.block_until_ready(run.computation.update(state, batch.minibatches, before))


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
  """Evaluates the weights of a step on every held-out set, and logs the metrics.

  Raises:
    Stopped: the run is asked to end.
  """
  options = run.config.evaluation
  found: dict[str, float] = {}
  with run.timer.span("evaluate"):
    for name, prompts in run.held_out.items():
      with run.logger.progress(f"evaluating {name}", len(prompts)) as shown:
        advance = functools.partial(advance_unless, run.stop, shown)
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
          loop=run.loop,
          limits=run.limits,
          on_progress=rollout.counting(shown),
          stop=run.stop,
        )
  # The next step counts them, too: it is the one that waited.
  compiled = compiling.metrics(run.compilations.so_far())
  run.logger.write(step, {**found, **compiled, **run.timer.collect()})
  return found


def advance_unless(stop: Any, shown: Callable[[int], None], count: int) -> None:
  """Shows that `count` more are done; raises Stopped if the run is asked to end."""
  if stop:
    raise Stopped
  shown(count)


def publish(run: Run, state: TrainState) -> None:
  """Writes the final weights as a Hugging Face folder, export/."""
  dtype, max_shard_gb = run.config.export.dtype, run.config.export.max_shard_gb
  folder = export.to_huggingface(
    state.params,
    run.model.config,
    run.workdir / "export",
    source_directory=run.model.directory,
    dtype=np.dtype(dtype) if dtype else None,
    max_shard_bytes=int(max_shard_gb * 1e9) if max_shard_gb else None,
  )
  for line in console.closing_lines(str(folder)):
    run.logger.print(line)
