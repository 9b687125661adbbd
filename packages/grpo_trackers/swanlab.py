"""SwanLab, https://swanlab.cn, online or in a local folder."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.sinks import tracking
from grpo_jax.run_folder.sinks.base import Opening, Sink


def make(
  opening: Opening,
  *,
  project: str = "grpo_jax",
  workspace: str | None = None,
  name: str | None = None,
  tags: Sequence[str] = (),
  mode: str | None = None,
  samples_every_steps: int = LoggingOptions.samples_every_steps,
  timeout_s: float = LoggingOptions.timeout_s,
) -> Sink:
  """Opens a run; the API key comes from `swanlab login` or SWANLAB_API_KEY.

  Args:
    opening: Run for which the sink is opened.
    project: Project of the run.
    workspace: User or organisation; None: the default one of the account.
    name: Name of the run; None: that of the run folder.
    tags: Tags of the run.
    mode: "online", "offline", "local" or "disabled"; None: SWANLAB_MODE, or online.
    samples_every_steps: Steps between two tables of sampled completions; 0: never.
    timeout_s: Seconds after which a call counts as hanging.
  """
  return tracking.Tracked(
    "swanlab",
    opening,
    _SwanLab(project=project, workspace=workspace, name=name, tags=list(tags), mode=mode),
    place={"project": project, "workspace": workspace},
    samples_every_steps=samples_every_steps,
    timeout_s=timeout_s,
  )


class _SwanLab(tracking.Tracker):
  """See `make`. SwanLab has one active run a process."""

  def __init__(self, **options: Any):
    self._options = options
    self._run: Any = None

  def open(self, start: tracking.Start) -> str:
    swanlab = tracking.package("swanlab")
    run = start.run or secrets.token_hex(8)
    self._run = swanlab.init(
      **{**self._options, "name": self._options["name"] or start.name},
      id=run,
      resume="allow",
      log_dir=str(start.workdir / "swanlog"),
      config=dict(start.config),
      # No questions, and no copies of the console or command line, which may hold keys.
      settings=swanlab.Settings(
        interactive=False,
        terminal={"proxy_type": "none"},
        probe={"runtime": False, "requirements": False, "git": False},
      ),
    )
    return run

  def log(self, step: int, values: Mapping[str, float], table: tracking.Table | None) -> None:
    record: dict[str, Any] = dict(values)
    if table:
      made = tracking.package("swanlab").echarts.Table()
      made.add(list(table.columns), [[str(cell) for cell in row] for row in table.rows])
      record["completions"] = made
    self._run.log(record, step=step)

  def save(self, report: Path) -> None:
    self._run.save(str(report), base_path=str(report.parent), policy="now")

  def close(self) -> None:
    self._run.finish()
