"""Restores a run from its newest usable checkpoint, or begins with the model as it was read."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from grpo_jax import data
from grpo_jax.building.computation import Computation
from grpo_jax.building.groups import make_prompts
from grpo_jax.config.options import Config
from grpo_jax.groups import group_json
from grpo_jax.learn import policy, train_step
from grpo_jax.rollouts import ahead
from grpo_jax.run_folder import checkpoint_reading, checkpointing, stored_leaves
from grpo_jax.run_folder.keeper import RunState
from grpo_jax.types import TrainState

_log = logging.getLogger(__name__)


def restore(
  checkpoints: checkpointing.Checkpoints,
  trainable: Any,
  made: Computation,
  refuse: checkpoint_reading.Refusal,
  read_again: Callable[[], Any],
) -> RunState:
  """Returns the newest usable checkpoint's state, or the state of the model as it was read.

  A checkpoint holds the reference policy from the first step of a run on in which it follows the
  policy. A run whose older checkpoints have none continues with the initial one.

  Args:
    checkpoints: Checkpoints of the run.
    trainable: Trained part of the weights as they were read.
    made: Programs of the run.
    refuse: Function (state, extra) → why the run cannot continue from them.
    read_again: Function that reads the full initial weights again.
  """
  if checkpoints.steps():
    jax.tree.map(lambda x: x.delete(), trainable)  # never two sets of weights in memory.
    restored = checkpoints.restore_latest(functools.partial(_like, made), refuse=refuse)
    if restored is not None:
      state, extra = TrainState(**restored[0]), restored[1]
      if state.reference is None and made.follow is not None:
        state = dataclasses.replace(state, reference=read_again())
      if not made.objective.needs_ref:
        state = dataclasses.replace(state, reference=None)
      _log.info("continuing at step %d", int(state.step))
      return RunState(state, extra["stream"], extra["skipped"], extra["evaluated"])
  shardings = policy.shardings_of(made.state.params)
  reference = None if made.follow is None else made.copy(trainable)
  state = train_step.init(trainable, made.tx, shardings=shardings, initializer=made.initialize)
  return RunState(dataclasses.replace(state, reference=reference), {})


def _like(made: Computation, present: stored_leaves.Leaves) -> dict[str, Any]:
  """Describes the state in a checkpoint, given its leaves: with a reference policy if it has one.

  With a composition the reference is the frozen base, which no checkpoint holds.
  """
  has_reference = any(name.startswith("reference.") for name in present)
  reference = made.full if has_reference and made.composition is None else None
  return {**vars(made.state), "reference": reference}


def refusal(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener, state: Any, extra: Any
) -> str | None:
  """Returns why a run cannot continue from a checkpoint; None if it can."""
  for part in ("params", "reference"):
    if name := stored_leaves.first_not_finite(state.get(part)):
      return f"its weights are not finite: {name}"
  for name, kind in {"stream": dict, "skipped": int, "evaluated": dict}.items():
    if not isinstance(extra.get(name), kind) or isinstance(extra[name], bool):
      return f"{name!r} is {extra.get(name)!r:.60}"
  if extra["skipped"] < 0:
    return f"'skipped' is {extra['skipped']}"
  values = extra["evaluated"].values()
  if not all(isinstance(value, float | int) for value in values):
    return "'evaluated' has a value that is not a number"
  try:
    for position in (extra["stream"], *ahead.positions(extra["stream"])):
      make_prompts(config, tokenizer, opener, position)
    for record in extra["stream"].get("surplus", ()):
      group_json.decode(record)
    for _, record in extra["stream"].get("ahead", {}).get("ready", ()):
      group_json.decode(record)
  except checkpoint_reading.READING_FAILS as error:
    return f"its position in the data cannot be used: {type(error).__name__}: {error}"
  return None
