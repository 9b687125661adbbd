"""Makes a run from a config: binds its phases to their options. No later code reads the config."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax import batching, processes
from grpo_jax.batching import Assembled
from grpo_jax.building import (
  adapter,
  checks,
  distillation_teacher,
  group_sizes,
  phases,
  policy_model,
  preparing,
  restoring,
  router_replay,
  sync_check,
)
from grpo_jax.building.computation import Computation
from grpo_jax.building.groups import make_stream
from grpo_jax.building.schedule import Schedule
from grpo_jax.building.training_mode import ModeDependencies, ModeFunctions
from grpo_jax.config import (
  ahead_options,
  configuration,
  data_options,
  lora_options,
  modes,
  run_options,
)
from grpo_jax.config.configuration import AnyConfig
from grpo_jax.config.options import Config
from grpo_jax.engines import multihost
from grpo_jax.engines.base import Engine
from grpo_jax.files import atomic
from grpo_jax.groups import credit, filters, learning_signal, shaping
from grpo_jax.learn import monitoring, sharding, train_step
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.learn.policy import Policy
from grpo_jax.metrics import timing
from grpo_jax.models import parameter_reading
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.stream import GroupStream
from grpo_jax.run_folder import checkpointing, earlier_run, evaluation_log, loggers, workdirs
from grpo_jax.run_folder.keeper import Keeper, RunState
from grpo_jax.run_folder.sinks import Sink
from grpo_jax.run_folder.steps import StepRecorder
from grpo_jax.run_folder.time_left import TimeLeft
from grpo_jax.types import Metrics, Minibatch, RolloutGroup, TrainState
from grpo_jax.values import options

_KEPT_MB = 20.0  # of the completions of one evaluation.
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
  """A run: the phases of its steps, bound to their options, and the objects that they use."""

  schedule: Schedule
  policy: Policy
  stream: GroupStream
  engine: Engine
  # The phases, in the order of the loop.
  keep: Callable[[Sequence[RolloutGroup]], filters.Filtered]
  shape: Callable[[Sequence[RolloutGroup]], tuple[RolloutGroup, ...]]
  advantages: Callable[[Sequence[RolloutGroup]], list[np.ndarray]]
  assemble: Callable[[Sequence[RolloutGroup], Sequence[np.ndarray], int], Assembled]
  score: Callable[[TrainState, Assembled], tuple[Minibatch, ...]]
  monitor: monitoring.Monitor
  learn: Callable[
    [TrainState, Sequence[Minibatch], Callable[[], None]],
    tuple[TrainState, Metrics, train_step.MicrobatchLogprobs],
  ]
  sync_check: sync_check.SyncCheck | None  # proves new weights at the engine; None: nothing does.
  make_room: Callable[[], None]  # for the gradients, where the engine is.
  settles_first: bool  # groups under way are finished before the optimizer step, not after it.
  evaluate: Callable[[TrainState], dict[str, float]]
  publish: Callable[[TrainState], None]
  # What records them.
  recorder: StepRecorder
  checkpoints: checkpointing.Checkpoints
  logger: loggers.Logger
  timer: timing.Timer

  def consume(self, keeper: Keeper) -> None:
    """Must be called before the arrays of the held state are donated; see `Keeper.consume`.

    With one optimizer step a training step, groups under way are waited for here, where nothing is
    lost yet. With several that would leave the engine idle during most of them.

    Raises:
      Stopped: The run is asked to end; the update need not be made.
    """
    if self.settles_first:
      self.stream.settle(has_learned=False)
    keeper.consume()

  def before_sync(
    self, state: TrainState, groups: Sequence[RolloutGroup], *, is_learned: bool
  ) -> None:
    """Prepares the proof of the weights that are about to be learned, while the engine is there.

    Raises:
      EngineFailure: The engine does not answer, on this or another process.
    """
    if self.sync_check is not None:
      self.sync_check.begin(self.policy.weights(state.params), groups, is_learned=is_learned)

  def sync(self, state: TrainState) -> None:
    """Gives the engine the weights of a state, from which it samples from now on.

    Raises:
      EngineFailure: The engine could not load the weights, or samples from others, on this or
        another process.
    """
    self.stream.settle(has_learned=True)
    full, version = self.policy.full(state.params), int(state.step)
    load = lambda _: self.engine.load_weights(full, version=version)
    multihost.together(load, what=f"the engines' weights of version {version}")
    if self.sync_check is not None:
      self.sync_check.finish(self.policy.weights(state.params), version)


def build(
  config: AnyConfig,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
  stop: Any = False,
  sinks: Sequence[Sink] = (),
) -> tuple[TrainingRun, RunState]:
  """Makes a run and restores its newest checkpoint.

  Args:
    config: Valid config of the run; see `run_options.validate`.
    workdir: Run folder.
    stack: Stack that closes what is opened here, and writes the report.
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
    sinks: Open sinks that receive what the run records, after those of `logging.sinks`.

  Returns:
    The run, and the state in which it begins or continues.

  Raises:
    ConfigError: The config cannot work here.
    Stopped: The run is asked to end.
  """
  inputs = preparing.prepare(run_options.resolved(config), workdir, stack, stop)
  config, mode = inputs.config, inputs.mode
  facts = adapter.facts(config, inputs.model)
  checkpoints = stack.enter_context(
    checkpointing.open(
      workdirs.checkpoints(workdir),
      facts=facts,
      keep_last=config.checkpoint.keep_last,
      keep_best=config.checkpoint.keep_best,
      best_metric=data_options.best_metrics(config),
      mode=config.checkpoint.best_mode,
    )
  )
  adapter.check_same(checkpoints, facts)
  checks.log_differences(config, workdir)
  engine = mode.make_engine(inputs.tokenizer, inputs.model, workdir, stack)
  vocab_size = inputs.tokenizer.vocab_size
  servers = distillation_teacher.at_servers(
    config, mesh=inputs.mesh, vocab_size=vocab_size, stack=stack, stop=stop
  )
  made, model = preparing.load_model(inputs, engine)
  teacher = servers or distillation_teacher.in_trainer(inputs.teacher, made.teacher)
  scorer = GroupScorer(
    made.score,
    made.mesh,
    groups_at_once=config.rollout.prompts_per_step,
    shapes=made.shapes,
    cost=made.cost,
    experts=made.experts,
  )
  trainable, policy = made.begin(model.params, adapter.read(config, made))
  mode.meet_initial_policy(inputs.prompts, scorer, policy.weights(trainable), workdir)
  refuse = functools.partial(restoring.refusal, config, inputs.tokenizer, inputs.opener)
  read_again = lambda: policy_model.load(inputs.model, made.read).params
  start = restoring.restore(checkpoints, trainable, made, refuse, read_again)
  if start.state.reference is not None:
    policy = dataclasses.replace(policy, reference=None)  # the state has the present one.
  if start.step == 0:
    earlier_run.set_aside(workdir)
    adapter.log_beginning(config)
  else:
    checks.log_schedule(config, workdir)
  configuration.write(config, workdir / "config.json")
  if processes.is_main():
    for name in ("export", "adapter"):
      atomic.clear_leftovers(workdir / name)
  loaded = _Loaded(engine, made, model.rounding, scorer, policy, teacher)
  del model, trainable  # training consumes their arrays.
  run = _bind(inputs, loaded, checkpoints, start, stack, sinks)
  if processes.is_main():
    stack.push(functools.partial(phases.write_report, workdir, run.logger))
  run.recorder.hosts.show_notices()
  return run, start


@dataclasses.dataclass(frozen=True)
class _Loaded:
  """What is made once the weights are loaded."""

  engine: Engine
  made: Computation
  rounding: parameter_reading.Rounding
  scorer: GroupScorer
  policy: Policy
  teacher: distillation_teacher.Score | None


def _bind(
  inputs: preparing.Inputs,
  loaded: _Loaded,
  checkpoints: checkpointing.Checkpoints,
  start: RunState,
  stack: contextlib.ExitStack,
  sinks: Sequence[Sink],
) -> TrainingRun:
  """Binds the phases of a run to their options."""
  config, made, policy = inputs.config, loaded.made, loaded.policy
  schedule = _schedule(config, evaluates=bool(inputs.held_out))
  inputs.screen.expect(TimeLeft(schedule.ahead, end_s=checkpoints.save_s))
  logger = _logger(inputs, first_step=start.step, more_sinks=sinks)
  stack.callback(logger.close)
  parts = inputs.mode.make_functions(_dependencies(inputs, loaded, logger, stack))
  groups = make_stream(
    config,
    inputs.prompts,
    parts,
    start.position,
    progress=logger.progress,
    stop=inputs.stop,
  )
  stack.callback(groups.close)
  timer = timing.Timer(waited=processes.waited_s)
  scorer = dataclasses.replace(loaded.scorer, shapes=(made.proof_shape,))
  proof = sync_check.make(
    config, loaded.engine, scorer, made.score_served, begins_new=start.step == 0
  )
  return TrainingRun(
    schedule=schedule,
    policy=policy,
    stream=groups,
    engine=loaded.engine,
    keep=functools.partial(filters.apply, **run_options.filters_of(config)),
    shape=functools.partial(shaping.apply, shaping=run_options.shaping_of(config)),
    advantages=functools.partial(
      credit.advantages_of, estimator=made.estimator, room=group_sizes.room_of(config)
    ),
    assemble=_assembling(config, made),
    score=_scoring(loaded, logger),
    monitor=_monitor(inputs, loaded),
    learn=functools.partial(
      phases.learn,
      update=made.update,
      policy=policy,
      logger=logger,
      reference=_reference_update(config, made),
      measure=made.measure,
    ),
    sync_check=proof,
    make_room=_nothing if ahead_options.is_ahead(config) else loaded.engine.release,
    settles_first=config.learn.epochs * config.learn.minibatches == 1,
    evaluate=_evaluating(inputs, policy, parts, logger, timer, start),
    publish=_publishing(inputs, loaded, logger),
    recorder=_recorder(inputs, loaded, parts, groups, logger, timer, proof, first_step=start.step),
    checkpoints=checkpoints,
    logger=logger,
    timer=timer,
  )


def _logger(
  inputs: preparing.Inputs, *, first_step: int, more_sinks: Sequence[Sink]
) -> loggers.Logger:
  """Makes what writes metrics and rollouts, and shows progress."""
  tokenizer = inputs.tokenizer
  return loggers.make(
    inputs.workdir,
    start_step=first_step,
    total_steps=inputs.config.total_steps,
    decode=lambda ids: tokenizer.decode(ids, skip_special=False),
    screen=inputs.screen,
    more_sinks=more_sinks,
    **options.plain(inputs.config.logging),
  )


def _dependencies(
  inputs: preparing.Inputs, loaded: _Loaded, logger: loggers.Logger, stack: contextlib.ExitStack
) -> ModeDependencies:
  """Returns what either mode makes its parts of."""
  return ModeDependencies(
    engine=loaded.engine,
    environments=inputs.environments,
    tokenizer=inputs.tokenizer,
    model=inputs.model,
    scorer=loaded.scorer,
    logger=logger,
    loop=stack.enter_context(LoopThread()),
    stop=inputs.stop,
  )


def _scoring(loaded: _Loaded, logger: loggers.Logger) -> Callable[..., tuple[Minibatch, ...]]:
  """Returns what puts a batch on the devices and adds logprobs."""
  made = loaded.made
  return functools.partial(
    phases.score,
    scorer=made.score,
    old_scorer=made.score_old,
    needs_old=made.needs_old,
    needs_ref=made.objective.needs_ref,
    policy=loaded.policy,
    estimator=made.estimator,
    options=made.objective.options,
    mesh=made.mesh,
    logger=logger,
    teacher=loaded.teacher,
  )


def _reference_update(config: Config, made: Computation) -> phases.ReferenceUpdate | None:
  """Returns what moves the reference policy; None if it is frozen."""
  if made.follow is None:
    return None
  return phases.ReferenceUpdate(config.reference.update_every_steps, made.follow)


def _evaluating(
  inputs: preparing.Inputs,
  policy: Policy,
  parts: ModeFunctions,
  logger: loggers.Logger,
  timer: timing.Timer,
  start: RunState,
) -> Callable[[TrainState], dict[str, float]]:
  """Returns what evaluates a state on all held-out sets."""
  return functools.partial(
    phases.evaluate,
    policy=policy,
    evaluate_set=parts.evaluate_set,
    held_out=inputs.held_out,
    completions=_completions(inputs, start),
    timer=timer,
    compilations=inputs.compilations,
    logger=logger,
  )


def _publishing(
  inputs: preparing.Inputs, loaded: _Loaded, logger: loggers.Logger
) -> Callable[[TrainState], None]:
  """Returns what writes the final weights."""
  return functools.partial(
    phases.publish,
    policy=loaded.policy,
    model=inputs.model,
    rounding=loaded.rounding,
    folder=inputs.workdir / "export",
    dtype=inputs.config.export.dtype,
    max_shard_gb=inputs.config.export.max_shard_gb,
    is_offline=modes.is_offline(inputs.config),
    has_sets=bool(inputs.held_out) or not data_options.evaluates(inputs.config),
    logger=logger,
    adapter=lora_options.load(inputs.config),
    measure=loaded.made.measure,
    base=policy_model.name_of(inputs.config, inputs.model.directory),
    templates=functools.partial(policy_model.templates_of, inputs.tokenizer),
  )


def _recorder(
  inputs: preparing.Inputs,
  loaded: _Loaded,
  parts: ModeFunctions,
  groups: GroupStream,
  logger: loggers.Logger,
  timer: timing.Timer,
  proof: sync_check.SyncCheck | None,
  *,
  first_step: int,
) -> StepRecorder:
  """Makes what records each step."""
  return StepRecorder(
    logger=logger,
    timer=timer,
    compilations=inputs.compilations,
    signal_watch=learning_signal.Watch(has_learned=first_step > 0),
    first_step=first_step,
    shaping=run_options.shaping_of(inputs.config),
    estimator=loaded.made.estimator,
    sources=(
      groups.metrics,
      functools.partial(_as_perf, inputs.environments.metrics),
      loaded.engine.metrics,
      *([] if proof is None else [proof.metrics]),
    ),
    rank=parts.rank,
    by_dataset=data_options.has_several(inputs.config),
    by_staleness=loaded.made.has_ages,
    has_teacher=loaded.made.objective.needs_teacher,
    devices=inputs.mesh.local_devices,
  )


def _completions(inputs: preparing.Inputs, start: RunState) -> evaluation_log.EvaluationLog | None:
  """Returns what keeps the completions of evaluations; None if nothing does."""
  if not processes.is_main():
    return None
  evaluation_log.drop(inputs.workdir, start.step)
  decode = functools.partial(inputs.tokenizer.decode, skip_special=False)
  return evaluation_log.EvaluationLog(inputs.workdir, decode, max_mb=_KEPT_MB)


def _schedule(config: Config, *, evaluates: bool) -> Schedule:
  return Schedule(
    total_steps=config.total_steps,
    evaluate_at_start=evaluates and config.evaluation.at_start,
    evaluate_every=config.evaluation.every_steps if evaluates else 0,
    evaluate_at_end=evaluates and config.evaluation.at_end,
    save_every=config.checkpoint.every_steps,
    max_skipped=config.learn.max_skipped_steps,
  )


def _assembling(config: Config, made: Computation) -> Callable[..., Assembled]:
  """Returns the function that packs the groups of a step and their advantages."""
  options = config.batching
  packed = functools.partial(
    batching.assemble,
    shapes=made.shapes,
    cost=made.cost,
    minibatches=config.learn.minibatches,
    passes=config.learn.epochs,
    share_prefixes=options.share_prefixes,
    pack=options.pack,
    drop_truncated=options.drop_truncated,
    skip_zero_advantage=made.skips_zero_advantage,
    weighted=made.has_weights,
    experts=made.experts,
    parts=sharding.row_parts(made.mesh),
  )

  def assembled(groups: Any, advantages: Any, step: int) -> Assembled:
    router_replay.check(config, groups)
    return packed(groups, advantages, step=step if made.has_ages else None)

  return assembled


def _monitor(inputs: preparing.Inputs, loaded: _Loaded) -> monitoring.Monitor:
  """Makes the monitor of all completions of a step."""
  learn, read = inputs.config.learn, loaded.made.read
  initial, frees_initial = monitoring.make_initial(
    lambda: policy_model.load(inputs.model, read).params, loaded.policy.reference
  )
  return monitoring.Monitor(
    loaded.made.watch,
    loaded.made.drift,
    loaded.made.mismatch,
    loaded.scorer,
    initial,
    frees_initial,
    all_every_steps=learn.report_all_every_steps,
    kl_every_steps=learn.report_kl_every_steps,
    total_steps=inputs.config.total_steps,
    warn=_log.warning,
    begins_apart=inputs.config.model.lora.path is not None,
    has_ages=loaded.made.has_ages,
  )


def _nothing() -> None:
  """Leaves the engine as it is: it samples while the trainer learns."""


def _as_perf(metrics: Callable[[], Mapping[str, float]]) -> dict[str, float]:
  """Returns metrics under names that begin with perf/."""
  return {f"perf/{name}": value for name, value in metrics().items()}
