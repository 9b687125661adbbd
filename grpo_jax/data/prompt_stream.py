"""The stream of training prompts: loaders, and the function that takes from them. Resumable."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.data.loaders import MAX_RECORDS, Dataloader, Loader
from grpo_jax.data.prompts import Dataset
from grpo_jax.data.skipped_rows import SkippedRows
from grpo_jax.errors import ExpectedFailure, last_frames, place_and_reason
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)


class DataloaderError(ExpectedFailure, ValueError, TypeError):
  """The function `data.dataloader` failed, or does not keep to its contract."""


class PromptStream:
  """Prompts in training order. `state()` is all that is needed to continue, as JSON."""

  def __init__(
    self,
    loaders: Mapping[str, Loader],
    dataloader: Dataloader,
    *,
    keeps_records: bool,
    state: Mapping[str, Any] | None = None,
  ):
    """Positions the stream.

    Args:
      loaders: Loaders by name.
      dataloader: Function that takes the next prompts from them; see `loaders`.
      keeps_records: Whether the dataloader sees metrics of past steps, which the state includes.
      state: `state()` of an earlier stream with the same settings; the loaders are at their
        positions already.
    """
    self._loaders = dict(loaders)
    self._dataloader = dataloader
    self._keeps_records = keeps_records
    self._seen = SkippedRows()  # counts of all steps.
    self._memory: dict[str, Any] = dict((state or {}).get("memory", {}))
    self._warn_of_changes((state or {}).get("loaders", {}))
    self._records: list[dict[str, float | int]] = list((state or {}).get("records", []))

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the loaders."""
    return tuple(self._loaders)

  @property
  def datasets(self) -> tuple[Dataset, ...]:
    """All datasets that the loaders read."""
    return tuple(one for loader in self.loaders for one in loader.datasets)

  @property
  def loaders(self) -> tuple[Loader, ...]:
    """The loaders, in the order of the config."""
    return tuple(self._loaders.values())

  def take(self, n: int) -> list[Prompt]:
    """Takes the next n prompts; fewer, and finally none, when the epochs are finished.

    Raises:
      RowError: A row is broken and broken rows are not skipped.
      NoUsableRow: No prompt of a whole epoch can be used.
      DataloaderError: The dataloader function raised, did not return n prompts, or stores values in
        its memory that are not JSON.
    """
    for loader in self._loaders.values():
      loader.skipped = type(loader.skipped)()
    prompts = self._prompts(n)
    self._memory = _as_json(self._memory)  # what a resumed run would see.
    for loader in self._loaders.values():
      loader.skipped.warn()
    self._count_parted()
    some_are_over = any(loader.is_over for loader in self._loaders.values())
    if len(prompts) > n or (len(prompts) < n and not some_are_over):
      raise DataloaderError(f"data.dataloader returned {len(prompts)} prompts, expected {n}")
    return prompts

  def _count_parted(self) -> None:
    """Counts rows with text of control tokens; logs their number whenever it has doubled."""
    before = self._seen.parted
    for loader in self._loaders.values():
      self._seen.rows += loader.skipped.rows
      self._seen.parted += loader.skipped.parted
    if self._seen.parted.bit_length() > before.bit_length():
      self._seen.warn_of_parted()

  def _prompts(self, n: int) -> list[Prompt]:
    """Calls the dataloader, which may be a function of the user's."""
    try:
      return self._dataloader(
        self._loaders, num_prompts=n, records=tuple(self._records), memory=self._memory
      )
    except ExpectedFailure:
      raise
    except Exception as error:
      if not last_frames(error):
        raise  # a mistake of this package.
      raise DataloaderError(f"data.dataloader failed: {place_and_reason(error)}") from error

  def record_metrics(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Passes a step's metrics to the dataloader function, without those that are not numbers.

    Args:
      step: Step that the metrics belong to.
      metrics: Metrics by name, without times and machine metrics, which no resumed run repeats.
    """
    if self._keeps_records:
      numbers = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
      self._records = [*self._records, {**numbers, "step": step}][-MAX_RECORDS:]

  def state(self) -> dict[str, Any]:
    """Returns the position of the stream, as JSON."""
    return {
      "loaders": {
        name: {"cursor": loader.cursor, "rows": len(loader), "sample": loader.sample}
        for name, loader in self._loaders.items()
      },
      "memory": _as_json(self._memory),
      "records": list(self._records),
    }

  def _warn_of_changes(self, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Warns of loaders that have as many rows as in a state, but different ones."""
    for name, loader in self._loaders.items():
      before = known.get(name, {})
      if before.get("rows") == len(loader) and before.get("sample") != loader.sample:
        _log.warning("data: the rows of %r are not those that the run began with", name)

  def metrics(self) -> dict[str, float]:
    """Returns counts of the last `take`, and the epochs done (the same in a resumed run)."""
    loaders = self._loaders
    rows = sum(len(loader) for loader in loaders.values())
    result = {
      "data/epoch": sum(loader.cursor for loader in loaders.values()) / rows,
      "data/broken_rows": float(sum(loader.skipped.broken for loader in loaders.values())),
      "data/overlong_prompts": float(sum(loader.skipped.overlong for loader in loaders.values())),
    }
    if len(loaders) > 1:
      result |= {f"data/{name}/epoch": loader.epoch for name, loader in loaders.items()}
    return result


def _as_json(memory: dict[str, Any]) -> dict[str, Any]:
  try:
    return json.loads(json.dumps(memory, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise DataloaderError(f"the memory of data.dataloader must be JSON: {error}") from error


def cursor_of(state: Mapping[str, Any] | None, name: str, rows: int) -> int:
  """Returns where a loader continues; logs a warning if its data differ from those of the state.

  Args:
    state: State of an earlier stream; None: from the beginning.
    name: Name of the loader.
    rows: Number of rows that it has now.
  """
  if state is None:
    return 0
  previous = state["loaders"].get(name)
  if previous is None:
    known = ", ".join(state["loaders"])
    _log.warning(
      "data: %r was not read before (only %s); it starts from its beginning", name, known
    )
    return 0
  if previous["rows"] != rows:
    _log.warning(
      "data: %r had %d rows, now %d: the order of the prompts differs from here on",
      *(name, previous["rows"], rows),
    )
  cursor = previous["cursor"]
  if type(cursor) is not int:
    raise ValueError(f"the cursor of {name!r} is {cursor!r:.40} and not a whole number")
  return cursor
