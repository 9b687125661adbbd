"""MLflow, https://mlflow.org: a tracking server, or a database file."""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.sinks import tracking
from grpo_jax.run_folder.sinks.base import Opening, Sink

_PARAMS_AT_ONCE = 100  # MLflow's limit of one request.
_LONGEST_PARAM = 500  # characters, the limit of older servers.
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


def make(
  opening: Opening,
  *,
  tracking_uri: str | None = None,
  experiment: str = "grpo_jax",
  name: str | None = None,
  samples_every_steps: int = LoggingOptions.samples_every_steps,
  timeout_s: float = LoggingOptions.timeout_s,
) -> Sink:
  """Opens a run; credentials come from MLflow's own variables, such as MLFLOW_TRACKING_TOKEN.

  Args:
    opening: Run for which the sink is opened.
    tracking_uri: Server, "http://…", or database, "sqlite:////path/mlflow.db"; None:
      MLFLOW_TRACKING_URI, or MLflow's default.
    experiment: Name of the experiment; made if there is none.
    name: Name of the run; None: that of the run folder.
    samples_every_steps: Steps between two tables of sampled completions; 0: never.
    timeout_s: Seconds after which a call counts as hanging.
  """
  return tracking.Tracked(
    "mlflow",
    opening,
    _MLflow(tracking_uri, experiment, name),
    place={"tracking_uri": tracking_uri, "experiment": experiment},
    samples_every_steps=samples_every_steps,
    timeout_s=timeout_s,
  )


class _MLflow(tracking.Tracker):
  """See `make`. This client of MLflow ignores a run that is active elsewhere."""

  def __init__(self, tracking_uri: str | None, experiment: str, name: str | None):
    self._uri = tracking_uri
    self._experiment = experiment
    self._name = name
    self._client: Any = None
    self._run = ""

  def open(self, start: tracking.Start) -> str:
    self._client = tracking.package("mlflow").MlflowClient(tracking_uri=self._uri)
    for name in ("mlflow", "alembic"):  # they report each table of a new database.
      logging.getLogger(name).setLevel(logging.WARNING)
    if start.run:
      self._run = start.run
      self._client.update_run(self._run, status="RUNNING")
      return self._run
    found = self._client.get_experiment_by_name(self._experiment)
    number = found.experiment_id if found else self._client.create_experiment(self._experiment)
    self._run = self._client.create_run(number, run_name=self._name or start.name).info.run_id
    self._log_config(start.config)
    return self._run

  def log(self, step: int, values: Mapping[str, float], table: tracking.Table | None) -> None:
    metric, now = tracking.package("mlflow").entities.Metric, int(1000 * time.time())
    points = [metric(metric_name(name), value, now, step) for name, value in values.items()]
    self._client.log_batch(self._run, metrics=points)
    if table:
      columns = zip(*table.rows, strict=True)
      columns = {name: list(x) for name, x in zip(table.columns, columns, strict=True)}
      self._client.log_table(self._run, columns, f"completions/step_{step:06d}.json")

  def save(self, report: Path) -> None:
    self._client.log_artifact(self._run, str(report))

  def close(self) -> None:
    self._client.set_terminated(self._run)

  def _log_config(self, config: Mapping[str, Any]) -> None:
    param = tracking.package("mlflow").entities.Param
    values = {metric_name(name): str(value) for name, value in tracking.flat(config).items()}
    params = [param(name, value[:_LONGEST_PARAM]) for name, value in values.items()]
    for first in range(0, len(params), _PARAMS_AT_ONCE):
      self._client.log_batch(self._run, params=params[first : first + _PARAMS_AT_ONCE])
    self._client.log_dict(self._run, dict(config), "config.json")


def metric_name(name: str) -> str:
  """Returns a name as MLflow takes it: eval/heldout/pass_at_1 for eval/heldout/pass@1."""
  return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))
