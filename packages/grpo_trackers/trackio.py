"""Trackio, https://huggingface.co/docs/trackio: a local database, or a Space on the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.sinks import tracking
from grpo_jax.run_folder.sinks.base import Opening, Sink


def make(
  opening: Opening,
  *,
  project: str = "grpo_jax",
  name: str | None = None,
  space_id: str | None = None,
  samples_every_steps: int = LoggingOptions.samples_every_steps,
  timeout_s: float = LoggingOptions.timeout_s,
) -> Sink:
  """Opens a run; the folder of local databases is TRACKIO_DIR, the hub's token is HF_TOKEN.

  Args:
    opening: Run for which the sink is opened.
    project: Project of the run.
    name: Beginning of the run's name; None: the name of the run folder.
    space_id: Space on the hub, "owner/name"; None: TRACKIO_SPACE_ID, or a local database.
    samples_every_steps: Steps between two tables of sampled completions; 0: never.
    timeout_s: Seconds after which a call counts as hanging.
  """
  return tracking.Tracked(
    "trackio",
    opening,
    _Trackio(project, name, space_id),
    place={"project": project, "space_id": space_id},
    samples_every_steps=samples_every_steps,
    timeout_s=timeout_s,
  )


class _Trackio(tracking.Tracker):
  """See `make`. Trackio continues a run by its name, so each run has one of its own."""

  def __init__(self, project: str, name: str | None, space_id: str | None):
    self._project = project
    self._name = name
    self._space_id = space_id
    self._run: Any = None

  def open(self, start: tracking.Start) -> str:
    name = start.run or tracking.new_name(self._name or start.name)
    self._run = tracking.package("trackio").init(
      self._project,
      name=name,
      space_id=self._space_id,
      resume="allow" if start.run else "never",
      config=dict(start.config),
      embed=False,
    )
    return name

  def log(self, step: int, values: Mapping[str, float], table: tracking.Table | None) -> None:
    record: dict[str, Any] = dict(values)
    if table:
      made = tracking.package("trackio").Table(columns=list(table.columns), data=table.rows)
      record["completions"] = made
    self._run.log(record, step=step)

  def save(self, report: Path) -> None:
    self._run.log_artifact(str(report), name=f"report-{self._run.name}", type="report")

  def close(self) -> None:
    self._run.finish()
