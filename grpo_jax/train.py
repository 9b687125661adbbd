"""The loop: sample, assemble, score, learn, sync, record. The one file to read first.

Step s starts from the weights of version s and makes version s + 1. An evaluation or a
checkpoint "at s" has the weights of version s. All random seeds are derived from (seed, step,
prompt, attempt), so a run that was killed and started again ends as if it had never stopped.

`building` binds each phase to its options: no phase here reads the config.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import grpo_jax
from grpo_jax import metrics, processes
from grpo_jax.building.run import TrainingRun, build
from grpo_jax.config.configuration import AnyConfig
from grpo_jax.config.run_options import validate
from grpo_jax.engines.base import EngineFailure
from grpo_jax.files import local_paths
from grpo_jax.interrupts import Stopped
from grpo_jax.learn import train_step
from grpo_jax.processes import digests
from grpo_jax.run_folder.keeper import Keeper, RunState
from grpo_jax.run_folder.sinks import Sink
from grpo_jax.run_folder.steps import StepRecord

__all__ = ["train", "validate"]


def train(
  config: AnyConfig, workdir: pathlib.Path, *, stop: Any = False, sinks: Sequence[Sink] = ()
) -> dict[str, float]:
  """Runs the training that `config` describes, from its newest checkpoint if there is one.

  Whatever ends it early, including a KeyboardInterrupt, it first saves what it has learned.

  Args:
    config: Valid config, as `get_config` returns it or typed; see grpo_jax/config/base.py.
    workdir: Run folder.
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
    sinks: Open sinks that receive what the run records, after those of `logging.sinks`.

  Returns:
    The metrics of the last evaluation.

  Raises:
    ConfigError: The configuration cannot work here, or the run folder cannot be used.
    ExpectedFailure: Data, servers, the disk or gradients fail in a way that a user can repair.
  """
  workdir = local_paths.checked("workdir", workdir)
  with contextlib.ExitStack() as stack, processes.failing():
    try:
      run, start = build(config, workdir, stack, stop, sinks)
    except Stopped as stopped:
      processes.give_up(stopped)
      return {}  # before anything was learned: the run begins again where it began.
    end = None
    with Keeper(run.checkpoints, start, stop) as keeper:  # leaving it saves; Stopped ends here.
      with processes.failing():  # the others learn of a failure before anything is saved.
        end = learn_all(run, start, keeper, stop)
    if end is not None:
      run.publish(end.state)
      run.recorder.report_late_compilations(end.step)
    return dict(keeper.run_state.evaluated) if keeper.run_state else {}


def learn_all(run: TrainingRun, now: RunState, keeper: Keeper, stop: Any) -> RunState:
  """Runs all remaining steps.

  Args:
    run: Phases of the run.
    now: State in which the run begins or continues.
    keeper: Keeper of the newest state, which saves it whatever ends the run.
    stop: Flag that becomes true when the run is asked to end.

  Returns:
    The state in which the run ends: after the last step, or when the data ends.

  Raises:
    Stopped: The run is asked to end.
    ExpectedFailure: A failure that a user can repair; see `train`.
  """
  run.sync(now.state)
  if now.evaluated:
    run.logger.write(now.step, now.evaluated)
  elif run.schedule.evaluates(now.step):
    now = evaluated(run, now, keeper)

  for step in range(now.step, run.schedule.total_steps):
    with run.timer.span("step"):
      # --- 1. sample: P prompts x G completions, scored by their environments ---
      with run.timer.span("sample"):
        groups = run.stream.take(step)
      processes.stop_together(stop)  # these completions are sampled again when the run continues.
      if not groups:
        break

      # --- 2. assemble: ragged groups -> rectangular, packed microbatches ---
      with run.timer.span("assemble"):
        kept = run.keep(groups)
        shaped = run.shape(groups)
        rewarded = kept.select(shaped)
        advantages = run.advantages(rewarded)
        batch = run.assemble(rewarded, advantages, step)
        digests.agree([advantages, batch.minibatches], what=f"the batch of step {step}")

      # --- 3. score: put on the devices, with logprobs under the policies that stay fixed ---
      with run.timer.span("score"):
        minibatches = run.score(now.state, batch)

      # --- 4. learn: one or more optimizer steps on the batch ---
      with run.timer.span("sync"):
        run.before_sync(now.state, groups, is_learned=bool(minibatches))
      with run.timer.span("learn"):
        run.make_room()  # the engine's copies of the weights, unless it samples meanwhile.
      with run.timer.span("monitor"):
        policy = run.policy.weights(now.state.params)
        watched = run.monitor(step, policy, groups, is_learned=bool(minibatches))
      with run.timer.span("learn"):
        state, learned, logprobs = run.learn(
          now.state, minibatches, functools.partial(run.consume, keeper)
        )

      # --- 5. sync: the engine samples from the new weights from here on ---
      failure = None
      with run.timer.span("sync"):
        try:
          run.sync(state)
        except EngineFailure as error:
          failure = error  # raised below: first the step is recorded.

    # --- 6. record: nothing below changes what is learned ---
    record = StepRecord(step, groups, shaped, kept, advantages, batch, watched, learned, logprobs)
    values = run.recorder.record(record)
    run.stream.record_metrics(step, metrics.reproducible(values))
    now = keeper.hold(RunState(state, run.stream.state(), now.skipped))
    limit = run.schedule.max_skipped
    skipped = train_step.skipped_in_a_row(now.skipped, values, limit=limit)
    now = keeper.hold(dataclasses.replace(now, skipped=skipped))
    run.checkpoints.check()  # reports a full disk now, and not at the next save.
    if failure:
      raise failure
    if run.schedule.evaluates(now.step):
      now = evaluated(run, now, keeper)
    if run.schedule.saves(now.step):
      with run.timer.span("checkpoint"):
        keeper.save()
    processes.stop_together(stop)

  if now.step < run.schedule.total_steps:
    now = out_of_data(run, now, keeper)
  run.recorder.report_no_signal(now.step)
  return now


def out_of_data(run: TrainingRun, now: RunState, keeper: Keeper) -> RunState:
  """Ends a run before its last step: its weights are evaluated as those of a last step are."""
  run.logger.print(f"the data ended after {now.step} steps")
  if run.schedule.evaluate_at_end and not now.evaluated:
    return evaluated(run, now, keeper)
  return now


def evaluated(run: TrainingRun, now: RunState, keeper: Keeper) -> RunState:
  """Evaluates the weights of a step, and keeps the result with them."""
  return keeper.hold(dataclasses.replace(now, evaluated=run.evaluate(now.state)))


sys.modules[__name__].__class__ = grpo_jax.CallableTrain

if __name__ == "__main__":
  sys.exit("error: grpo_jax.train is the loop; python -m grpo_jax.main, or grpo-jax train, runs it")
