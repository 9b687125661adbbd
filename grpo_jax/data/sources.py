"""Random-access sources of rows, for grain: a JSONL file, a reasoning-gym task.

A source has `len` and `source[row] → fields`; it raises RowError for a row that is
broken, when that row is read, and says where a row stands (`where(row)`).
"""

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from grpo_jax.data import formats
from grpo_jax.data.function_rows import FunctionSource
from grpo_jax.registry import choose, function, nearest

_CHUNK_BYTES = 1 << 22
_NEWLINE = 10


@runtime_checkable
class RowSource(Protocol):
  """Rows by number, as grain's RandomAccessDataSource has them."""

  name: str

  def __len__(self) -> int: ...

  def __getitem__(self, row: int) -> Mapping[str, Any]: ...

  def where(self, row: int) -> str:
    """Returns the place of a row, for messages: "file:line"."""
    ...


@dataclasses.dataclass(frozen=True, slots=True)
class LineIndex:
  """Where the lines of a file begin: 8 bytes a line, and 4 more if some are blank."""

  starts: Int[np.ndarray, " lines"]  # byte offsets of all lines, then the file's size.
  filled: Shaped[np.ndarray, " rows"] | None  # numbers of the lines not blank; None: all.

  def __len__(self) -> int:
    return len(self.starts) - 1 if self.filled is None else len(self.filled)

  def line(self, row: int) -> int:
    """Returns the number of a row's line, from 0."""
    return row if self.filled is None else int(self.filled[row])


def index_lines(path: Path) -> LineIndex:
  """Finds the lines of a file that are not blank, reading it once in pieces.

  Returns:
    The index. Only it is kept in memory, never the file.
  """
  starts, filled = [np.zeros(1, np.int64)], [np.zeros(0, bool)]
  offset, carried = 0, False  # carried: the unfinished line has something in it.
  with path.open("rb") as file:
    while chunk := file.read(_CHUNK_BYTES):
      data = np.frombuffer(chunk, np.uint8)
      ends = np.flatnonzero(data == _NEWLINE)
      solid = (data != 32) & ((data < 9) | (data > 13))
      bounds = np.concatenate([[0], ends + 1])
      counts = np.add.reduceat(np.append(solid, False), bounds, dtype=np.int64)
      has_text = counts > 0
      has_text[0] |= carried
      starts.append(offset + ends + 1)
      filled.append(has_text[:-1])
      carried = bool(has_text[-1])
      offset += len(chunk)
  every_start, every_filled = np.concatenate(starts), np.concatenate(filled)
  if every_start[-1] != offset:  # the last line has no line end.
    every_start, every_filled = np.append(every_start, offset), np.append(every_filled, carried)
  if every_filled.all():
    return LineIndex(every_start, None)
  return LineIndex(every_start, np.flatnonzero(every_filled).astype(np.uint32))


class JsonlSource:
  """Rows of a JSONL file, read one by one where they stand: a file of any size opens."""

  def __init__(self, path: str | Path, *, name: str | None = None):
    """Indexes the file.

    Args:
      path: a file of one JSON object a line; blank lines are skipped.
      name: of the dataset; the file's name without its ending if None.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file has no rows, or is compressed.
    """
    self.path = Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"no data file {path}{_neighbours(self.path)}")
    self.name = name or self.path.stem
    self._file = os.open(self.path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)
    if os.pread(self._file, 2, 0) == b"\x1f\x8b":
      raise ValueError(f"{path} is compressed by gzip; rows are read by place: unpack it first")
    self._index = index_lines(self.path)
    if not len(self):
      raise ValueError(f"{path} has no rows")

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    line = self._index.line(row)
    start, end = (int(i) for i in self._index.starts[line : line + 2])
    text = os.pread(self._file, end - start, start)
    return formats.parse_line(text, self.where(row))

  def where(self, row: int) -> str:
    return f"{self.path}:{self._index.line(row) + 1}"


class ReasoningGymSource:
  """Rows of a task of the reasoning-gym package: generated from (seed, row), never stored.

  A row has `entry` (question, answer, metadata); `task` and `task_args` make its scorer.
  """

  def __init__(
    self,
    task: str,
    *,
    size: int,
    seed: int,
    task_args: Mapping[str, Any] | None = None,
    name: str | None = None,
  ):
    """Sets the task up.

    Args:
      task: name of a reasoning-gym dataset, e.g. "chain_sum".
      size: number of rows.
      seed: of the generator. Most tasks generate row r from seed + r: two datasets share
        rows unless their seeds are at least `size` apart.
      task_args: further arguments of the task, e.g. {"max_terms": 2}.
      name: of the dataset; "TASK-SEED" if None.

    Raises:
      ValueError: there is no such task, or it refuses an argument.
    """
    self.name = name or f"{task}-{seed}"
    self._task = task
    self._args = {**(task_args or {}), "size": size, "seed": seed}
    self._dataset = make_task(task, self._args)

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    try:
      entry = self._dataset[row]
    except Exception as error:  # a generator of the package may fail on some seed.
      raise formats.RowError(self.where(row), f"{type(error).__name__}: {error}") from error
    return {"entry": entry, "task": self._task, "task_args": self._args}

  def where(self, row: int) -> str:
    return f"{self.name}:{row + 1}"


def make_task(task: str, args: Mapping[str, Any]) -> Any:
  """Creates a reasoning-gym dataset; its errors name what there is."""
  import reasoning_gym
  from reasoning_gym.factory import DATASETS

  _, config = choose("reasoning-gym task", task, DATASETS)
  known = [field.name for field in dataclasses.fields(config)]
  for key in args:
    if key not in known:
      raise ValueError(
        f"reasoning-gym task {task!r} has no argument {key!r}{nearest(key, known)}; "
        f"there are: {', '.join(known)}"
      )
  try:
    return reasoning_gym.create_dataset(task, **args)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(f"reasoning-gym task {task!r} refuses {dict(args)}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class SourceConfig:
  """What a source is made from; each kind of source reads its own fields."""

  kind: str  # key of SOURCES, or the dotted path of a function like those in it.
  name: str | None = None  # of the dataset; None: from the file or the task.
  path: str | Path | None = None  # jsonl
  task: str | None = None  # reasoning_gym
  task_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # reasoning_gym
  task_seed: int = 0  # reasoning_gym: row r is generated from task_seed + r.
  size: int = 1000  # reasoning_gym: rows.


def open_jsonl(config: SourceConfig) -> JsonlSource:
  """Opens the JSONL file at `path`."""
  if not config.path:
    raise ValueError("data of kind 'jsonl' needs a path")
  return JsonlSource(config.path, name=config.name)


def open_function(config: SourceConfig) -> FunctionSource:
  """Opens the rows that the function `task` makes."""
  if not config.task:
    raise ValueError("data of kind 'function' needs data.task, the dotted path of a function")
  return FunctionSource(
    config.task,
    size=config.size,
    seed=config.task_seed,
    task_args=config.task_args,
    name=config.name,
  )


def open_reasoning_gym(config: SourceConfig) -> ReasoningGymSource:
  """Opens the reasoning-gym task `task`."""
  if not config.task:
    raise ValueError("data of kind 'reasoning_gym' needs a task")
  return ReasoningGymSource(
    config.task,
    size=config.size,
    seed=config.task_seed,
    task_args=config.task_args,
    name=config.name,
  )


def open_source(config: SourceConfig) -> RowSource:
  """Opens a source of the kind that the config names."""
  opener = function(config.kind) if "." in config.kind else choose("kind", config.kind, SOURCES)
  return opener(config)


def _neighbours(path: Path) -> str:
  """ " (did you mean …?)" from the files beside a missing one."""
  with contextlib.suppress(OSError):
    return nearest(path.name, [p.name for p in path.parent.iterdir()])
  return f": no folder {path.parent} either"


SOURCES: dict[str, Callable[[SourceConfig], RowSource]] = {
  "jsonl": open_jsonl,
  "reasoning_gym": open_reasoning_gym,
  "function": open_function,
}
