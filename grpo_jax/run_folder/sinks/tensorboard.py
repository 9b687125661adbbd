"""Scalars, histograms and the configuration for TensorBoard, in the folder tensorboard/.

Written in the caller's thread: tensorboardX's own SummaryWriter writes from a thread that dies when
the disk is full; after eleven more scalars the caller blocks forever.
"""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import histogram, scalar, text

from grpo_jax.files.disk import writing
from grpo_jax.run_folder.sinks.base import Opening, Sink, StepRollouts
from grpo_jax.run_folder.sinks.masking import read_config

_PROTO: Any = event_pb2  # its classes are made when it is imported.
_BINS = 30


def make(opening: Opening, *, histograms_every_steps: int = 1) -> Sink:
  """Opens an event file, and writes the configuration of the run to it as text.

  Args:
    opening: Run for which the sink is opened.
    histograms_every_steps: Steps between two sets of histograms; 0: never.

  Raises:
    WriteError: The folder cannot be written to.
  """
  file = EventFile(opening.workdir / "tensorboard", opening.start_step, histograms_every_steps)
  if config := read_config(opening.workdir).config:
    file.write_text("config", opening.start_step, json.dumps(config, indent=2))
  return file


class EventFile(Sink):
  """One event file of a run; a resumed run adds another."""

  def __init__(self, folder: Path, start_step: int, histograms_every_steps: int = 1):
    """Opens a file in the folder.

    Args:
      folder: Folder of all event files of a run; created if missing.
      start_step: First step of the file; readers ignore what older files say from it on.
      histograms_every_steps: Steps between two sets of histograms; 0: never.

    Raises:
      WriteError: The file cannot be written.
    """
    self._folder = folder
    self._every = histograms_every_steps
    with writing(folder):
      folder.mkdir(parents=True, exist_ok=True)
      # With the step: two files made in the same second would have one name.
      self._writer = EventsWriter(str(folder / "events"), f".from_{start_step}")
    self._add(_PROTO.Event(step=start_step, file_version="brain.Event:2"))
    self._add(
      _PROTO.Event(step=start_step, session_log=_PROTO.SessionLog(status=_PROTO.SessionLog.START))
    )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds the finite values of a step; flushed when this returns.

    Raises:
      WriteError: The file cannot be written.
    """
    for name, value in values.items():
      if not math.isfinite(value):
        continue
      self._add(_PROTO.Event(step=step, wall_time=time.time(), summary=scalar(name, value)))
    self._flush()

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    """Adds histograms of a step, where they are due.

    Raises:
      WriteError: The file cannot be written.
    """
    if not self._every or rollouts.step % self._every:
      return
    for name, values in distributions(rollouts).items():
      summary = histogram(name, values, bins=_edges(values))
      self._add(_PROTO.Event(step=rollouts.step, wall_time=time.time(), summary=summary))
    self._flush()

  def write_text(self, name: str, step: int, words: str) -> None:
    """Adds text; TensorBoard shows it with its spaces and line breaks.

    Raises:
      WriteError: The file cannot be written.
    """
    summary = text(name, "    " + words.replace("\n", "\n    "))  # Markdown of a block of code.
    self._add(_PROTO.Event(step=step, wall_time=time.time(), summary=summary))
    self._flush()

  def close(self) -> None:
    """Closes the file."""
    with contextlib.suppress(OSError):
      self._writer.close()

  def _add(self, event: Any) -> None:
    with writing(self._folder):
      self._writer.write_event(event)

  def _flush(self) -> None:
    with writing(self._folder):
      self._writer.flush()


def distributions(rollouts: StepRollouts) -> dict[str, np.ndarray]:
  """Returns the finite values that the histograms of a step show, by name; none is empty.

  Returns:
    "histogram/reward", "histogram/advantage" and "histogram/completion_tokens": a value a
    completion; "histogram/log_ratio": log π - log μ, in nats, the trainer's logprob minus the
    engine's, of every sampled token that the update computed.
  """
  attempts = [rollout for group in rollouts.groups for rollout in group.rollouts]
  found = {
    "reward": [np.asarray([rollout.reward for rollout in attempts])],
    "advantage": list(rollouts.advantages),
    "completion_tokens": [np.asarray([len(rollout.completion_ids) for rollout in attempts])],
    "log_ratio": [
      (policy - rollout.behavior_logprobs)[rollout.loss_mask]
      for group, of_group in zip(rollouts.groups, rollouts.policy_logprobs or (), strict=False)
      for rollout, policy in zip(group.rollouts, of_group, strict=True)
    ],
  }
  joined = {
    f"histogram/{name}": np.concatenate([np.zeros(0), *parts]) for name, parts in found.items()
  }
  finite = {name: values[np.isfinite(values)] for name, values in joined.items()}
  return {name: values for name, values in finite.items() if values.size}


def _edges(values: np.ndarray) -> np.ndarray:
  """Returns the bounds of equal bins from the smallest to the largest value.

  NumPy refuses bins of values that are equal but for their last bits.
  """
  low, high = float(values.min()), float(values.max())
  least = 1e-6 * max(1.0, abs(low), abs(high))
  if high - low < least:
    low, high = low - least, high + least
  return np.linspace(low, high, _BINS + 1)
