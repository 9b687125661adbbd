"""The stream of training prompts: loaders, and the function that takes from them. Resumable."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.data.loaders import MAX_RECORDS, Dataloader, Loader
from grpo_jax.data.prompts import Dataset
from grpo_jax.types import Prompt


class PromptStream:
  """Prompts in training order. `state()` is all that going on takes, as JSON."""

  def __init__(
    self,
    loaders: Mapping[str, Loader],
    dataloader: Dataloader,
    *,
    keeps_records: bool,
    state: Mapping[str, Any] | None = None,
  ):
    """Places the stream.

    Args:
      loaders: By name.
      dataloader: Takes the next prompts from them; see `loaders`.
      keeps_records: Whether it sees the metrics of past steps, which its state then holds.
      state: `state()` of an earlier stream of the same settings; the loaders are placed already.
    """
    self._loaders = dict(loaders)
    self._dataloader = dataloader
    self._keeps_records = keeps_records
    self._memory: dict[str, Any] = dict((state or {}).get("memory", {}))
    self._tell_changes((state or {}).get("loaders", {}))
    self._records: list[dict[str, float | int]] = list((state or {}).get("records", []))

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the loaders."""
    return tuple(self._loaders)

  @property
  def datasets(self) -> tuple[Dataset, ...]:
    """All datasets that the loaders read."""
    return tuple(one for loader in self._loaders.values() for one in loader.datasets)

  def take(self, n: int) -> list[Prompt]:
    """Takes the next n prompts; fewer, at last none, when the epochs are over.

    Raises:
      RowError: a row is broken and broken rows are not skipped.
      TypeError: the dataloader function keeps in its memory what is not JSON.
      ValueError: a whole epoch in a row had no prompt that can be used, or the dataloader
        function did not return n prompts.
    """
    for loader in self._loaders.values():
      loader.skipped = type(loader.skipped)()
    prompts = self._dataloader(
      self._loaders, num_prompts=n, records=tuple(self._records), memory=self._memory
    )
    self._memory = _as_json(self._memory)  # what a resumed run would find, from now on.
    for loader in self._loaders.values():
      loader.skipped.warn()
    some_are_over = any(loader.is_over for loader in self._loaders.values())
    if len(prompts) > n or (len(prompts) < n and not some_are_over):
      raise ValueError(f"data.dataloader returned {len(prompts)} prompts, {n} were asked for")
    return prompts

  def tell(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Hands a step's metrics to the dataloader function; those that are no number are left out.

    Args:
      step: That they are of.
      metrics: By name; without those of clock and machine, which no resumed run repeats.
    """
    if self._keeps_records:
      numbers = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
      self._records = [*self._records, {**numbers, "step": step}][-MAX_RECORDS:]

  def state(self) -> dict[str, Any]:
    """Returns where the stream stands, as JSON."""
    return {
      "loaders": {
        name: {"cursor": loader.cursor, "rows": len(loader), "sample": loader.sample}
        for name, loader in self._loaders.items()
      },
      "memory": _as_json(self._memory),
      "records": list(self._records),
    }

  def _tell_changes(self, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Warns of loaders whose rows are as many as in a state, but others."""
    for name, loader in self._loaders.items():
      before = known.get(name, {})
      if before.get("rows") == len(loader) and before.get("sample") != loader.sample:
        logging.warning("data: the rows of %r are not those that the run began with", name)

  def metrics(self) -> dict[str, float]:
    """Counts of the last `take`, and the epochs done (a resumed run tells the same)."""
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
    raise TypeError(f"the memory of data.dataloader must be JSON: {error}") from error


def cursor_of(state: Mapping[str, Any] | None, name: str, rows: int) -> int:
  """Returns where a loader goes on; tells when its data are not those of the state.

  Args:
    state: Of an earlier stream; None: from the beginning.
    name: Of the loader.
    rows: That it has now.
  """
  if state is None:
    return 0
  of_loader = state["loaders"].get(name)
  if of_loader is None:
    known = ", ".join(state["loaders"])
    logging.warning("data: %r was not read before (but %s); it begins anew", name, known)
    return 0
  if of_loader["rows"] != rows:
    logging.warning(
      "data: %r had %d rows, now %d: the order of the prompts is another one from here on",
      *(name, of_loader["rows"], rows),
    )
  cursor = of_loader["cursor"]
  if type(cursor) is not int:
    raise ValueError(f"the cursor of {name!r} is {cursor!r:.40} and not a whole number")
  return cursor
