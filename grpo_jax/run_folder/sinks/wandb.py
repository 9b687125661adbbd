"""Weights & Biases, https://wandb.ai, online or in an offline folder that `wandb sync` sends."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.run_folder.options import LoggingOptions, WandbOptions
from grpo_jax.run_folder.sinks import tracking
from grpo_jax.run_folder.sinks.base import Opening, Sink


def make(
  opening: Opening,
  *,
  project: str = WandbOptions.project,
  entity: str | None = None,
  name: str | None = None,
  group: str | None = None,
  tags: Sequence[str] = WandbOptions.tags,
  mode: str | None = None,
  samples_every_steps: int = LoggingOptions.samples_every_steps,
  timeout_s: float = LoggingOptions.timeout_s,
) -> Sink:
  """Opens a run; the API key comes from `wandb login` or WANDB_API_KEY.

  Args:
    opening: Run for which the sink is opened.
    project: Project of the run.
    entity: User or team; None: the default one of the account.
    name: Name of the run; None: that of the run folder.
    group: Group of runs to which it belongs.
    tags: Tags of the run.
    mode: "online", "offline" or "disabled"; None: WANDB_MODE, or online.
    samples_every_steps: Steps between two tables of sampled completions; 0: never.
    timeout_s: Seconds after which a call counts as hanging.
  """
  return tracking.Tracked(
    "wandb",
    opening,
    _Wandb(
      timeout_s, project=project, entity=entity, name=name, group=group, tags=list(tags), mode=mode
    ),
    place={"project": project, "entity": entity},
    samples_every_steps=samples_every_steps,
    timeout_s=timeout_s,
  )


class _Wandb(tracking.Tracker):
  """See `make`. Steps are values of their own, so that wandb drops none of a resumed run."""

  def __init__(self, timeout_s: float, **options: Any):
    self._timeout_s = timeout_s
    self._options = options
    self._run: Any = None

  def open(self, start: tracking.Start) -> str:
    wandb = tracking.package("wandb")
    run = start.run or secrets.token_hex(4)
    self._run = wandb.init(
      **{**self._options, "name": self._options["name"] or start.name},
      id=run,
      resume="allow",
      reinit="create_new",  # other runs that this process tracks continue.
      dir=str(start.workdir),
      config=dict(start.config),
      allow_val_change=True,
      # No questions, and no copies of the console, code or command line, which may hold keys.
      settings=wandb.Settings(
        silent=True,
        console="off",
        save_code=False,
        disable_git=True,
        x_disable_meta=True,
        # What it waits for when this thread was given up would keep the process from ending.
        init_timeout=self._timeout_s,
        finish_timeout=self._timeout_s,
      ),
    )
    self._run.define_metric("step")
    self._run.define_metric("*", step_metric="step")
    return run

  def log(self, step: int, values: Mapping[str, float], table: tracking.Table | None) -> None:
    record: dict[str, Any] = {"step": step, **values}
    if table:
      made = tracking.package("wandb").Table(columns=list(table.columns), data=table.rows)
      record["completions"] = made
    self._run.log(record)

  def save(self, report: Path) -> None:
    artifact = tracking.package("wandb").Artifact(f"report-{self._run.id}", type="report")
    artifact.add_file(str(report))
    self._run.log_artifact(artifact)

  def close(self) -> None:
    self._run.finish()
