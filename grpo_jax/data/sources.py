"""Random-access sources of rows, for grain: files, folders, hub datasets, generated tasks.

A source has `len` and `source[row] → fields`. It raises RowError for a broken row when that row
is read, and gives the place of a row (`where(row)`).
"""

import bisect
import contextlib
import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from grpo_jax.data import in_memory_rows, tables
from grpo_jax.data.formats import RowError
from grpo_jax.data.function_rows import FunctionSource
from grpo_jax.data.generated import ReasoningGymSource
from grpo_jax.data.options import DataOptions
from grpo_jax.files import fetched, hub
from grpo_jax.registry import choose, function, nearest

_log = logging.getLogger(__name__)

_SAMPLED_ROWS = 64


@runtime_checkable
class RowSource(Protocol):
  """Rows by number, like grain's RandomAccessDataSource."""

  name: str

  def __len__(self) -> int: ...

  def __getitem__(self, row: int) -> Mapping[str, Any]: ...

  def where(self, row: int) -> str:
    """Returns the place of a row, for messages: "file:line"."""
    ...


class ConcatenatedSource:
  """Several sources, one after the other, as one."""

  def __init__(self, sources: Sequence[RowSource], *, name: str):
    """Joins sources.

    Args:
      sources: Sources to join, at least one.
      name: Name of the joined source.
    """
    self.name = name
    self._sources = sources
    self._ends = list(itertools.accumulate(len(source) for source in sources))

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    source, row = self._place(row)
    return source[row]

  def where(self, row: int) -> str:
    """Returns the place in the file that the row is in."""
    source, row = self._place(row)
    return source.where(row)

  def _place(self, row: int) -> tuple[RowSource, int]:
    part = bisect.bisect_right(self._ends, row)
    return self._sources[part], row - (self._ends[part - 1] if part else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class SourceConfig:
  """The fields that describe a source; each kind of source reads its own fields."""

  kind: str  # key of SOURCES, "auto", or the dotted path of a function like those in it.
  name: str | None = None  # name of the dataset; None: from the file or the task.
  path: str | Path | None = None  # a file, or a folder of files of one kind; a path or a URL.
  hub: str | None = None  # owner/name on the Hugging Face hub.
  # Pattern of the parquet files of one {split}, and {subset}, on the hub; None: not known.
  files: str | None = None
  subset: str | None = None  # hub
  split: str | None = None  # hub, and folders and JSON files that hold several.
  usual_split: str | None = None  # split to use if none is named, if it exists.
  task: str | None = None  # reasoning_gym: its name; function: a dotted path.
  task_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of the task.
  task_seed: int = DataOptions.task_seed  # seed of the task: row r is generated from task_seed + r.
  size: int = DataOptions.size  # number of rows of the task.
  # Function that makes another source of the rows; None: they are taken as they are.
  rearranged: Callable[[Any], Any] | None = None


def kind_of(config: SourceConfig) -> str:
  """Returns the kind of source that "auto" means.

  Raises:
    ValueError: There is nothing to read, or a file's extension is unknown.
  """
  if config.kind != "auto":
    return config.kind
  if config.path:
    return "file"
  if config.task:
    return "reasoning_gym"
  if config.hub:
    return "hub"
  raise ValueError("there is no data: give data.path, data.dataset or data.task")


def sample(source: RowSource) -> bytes:
  """Returns a few rows of a source, from the first to the last, as text."""
  rows = sorted(
    {len(source) * i // _SAMPLED_ROWS for i in range(_SAMPLED_ROWS)} | {len(source) - 1}
  )
  return "\n".join(_as_text(source, row) for row in rows).encode("utf-8", "surrogatepass")


def _as_text(source: RowSource, row: int) -> str:
  try:
    return json.dumps(source[row], default=str)
  except RowError as error:
    return error.reason


def open_source(config: SourceConfig) -> RowSource:
  """Opens a source of the kind that the config names, or that its other fields imply.

  A dotted path names a function that returns a source, or rows (see `in_memory_rows.each`).
  A `path` that is a URL is fetched first; see `files.fetched`.
  """
  if config.path:
    config = dataclasses.replace(config, path=fetched.local(config.path))
  kind = kind_of(config)
  if "." in kind:
    made = in_memory_rows.returned(function(kind), config.task_args, config, kind)
    source = in_memory_rows.source_of(made, name=config.name, path=kind)
  else:
    source = choose("kind", kind, SOURCES)(config)
  return config.rearranged(source) if config.rearranged else source


def open_file(config: SourceConfig) -> RowSource:
  """Opens the file at `path` by its extension, or the files of a folder."""
  return _open_path(config, None)


def open_jsonl(config: SourceConfig) -> RowSource:
  """Opens the JSONL file at `path`, whatever its extension."""
  return _open_path(config, "jsonl")


def open_json(config: SourceConfig) -> RowSource:
  """Opens the JSON file at `path`, whatever its extension."""
  return _open_path(config, "json")


def open_parquet(config: SourceConfig) -> RowSource:
  """Opens the parquet file at `path`, whatever its extension."""
  return _open_path(config, "parquet")


def open_hub(config: SourceConfig) -> RowSource:
  """Opens the dataset `hub`; a folder at `path` replaces it.

  Of a dataset whose files are known, those of the split are downloaded. Others are read by the
  datasets library, which downloads all splits.
  """
  repository = str(config.path or config.hub or "")
  if not repository:
    raise ValueError("data of kind 'hub' needs data.dataset, as owner/name")
  split = config.split or config.usual_split or "train"
  if config.files and not config.path and re.fullmatch(r"\w+", split):
    return _open_files(repository, config.files, config, split)
  return tables.open_hub(repository, subset=config.subset, split=split, name=config.name)


def _open_files(
  repository: str, pattern: str, config: SourceConfig, split: str
) -> ConcatenatedSource:
  """Opens the parquet files of a split, "train-00000-of-00002.parquet" and so on."""
  pattern = pattern.format(split=split, subset=config.subset)
  is_whole = lambda folder: _are_all(folder.glob(pattern))
  folder = hub.download(repository, [pattern], kind="dataset", is_whole=is_whole)
  files = sorted(folder.glob(pattern))
  if not files:
    raise ValueError(f"the dataset {repository} has no split {split!r}: no file {pattern}")
  parts = [tables.open_parquet(f, name=None, place=f"{repository}/{f.name}") for f in files]
  return ConcatenatedSource(parts, name=config.name or repository.rpartition("/")[2])


def _are_all(files: Iterable[Path]) -> bool:
  """Returns whether there are as many files as their names say: NAME-00001-of-00003."""
  found = list(files)
  totals = {int(file.stem.rpartition("-of-")[2]) for file in found if "-of-" in file.stem}
  return bool(found) and totals <= {len(found)}


def open_function(config: SourceConfig) -> FunctionSource:
  """Opens the rows that the function `task` makes."""
  task = config.task or ""
  if "." not in task:
    got = f", got {task!r}; tasks of reasoning-gym need data.kind='reasoning_gym'" if task else ""
    raise ValueError(f"data of kind 'function' needs data.task, the dotted path of a function{got}")
  return FunctionSource(
    task,
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


def _open_path(config: SourceConfig, kind: str | None) -> RowSource:
  """Opens a file, or all files of a folder that belong to the split."""
  if not config.path:
    raise ValueError(f"data of kind {config.kind!r} needs a path")
  path = Path(config.path)
  if path.is_dir():
    files = _files_of(path, config.split, config.usual_split)
    parts = [_open_one(file, kind, config, name=None) for file in files]
    return ConcatenatedSource(parts, name=config.name or path.name)
  if not path.is_file():
    raise FileNotFoundError(f"no data file {config.path}{_neighbours(path)}")
  return _open_one(path, kind, config, name=config.name)


def _open_one(path: Path, kind: str | None, config: SourceConfig, *, name: str | None) -> RowSource:
  ending = kind or _ending(path)
  if ending is None:
    with path.open("rb") as file:
      ending = "parquet" if file.read(4) == b"PAR1" else "jsonl"
  if ending == "json":
    return tables.open_json(path, name=name, split=config.split, usual_split=config.usual_split)
  if not _is_in_split(path, config.split):
    _log.warning("data: all rows of %s are read: split=%r does not apply to it", path, config.split)
  return (
    tables.JsonlSource(path, name=name)
    if ending == "jsonl"
    else tables.open_parquet(path, name=name)
  )


def may_hold_splits(path: str) -> bool:
  """Returns whether a path may hold several splits: a folder, or a JSON file with several lists."""
  return _ending(Path(path)) not in ("jsonl", "parquet")


def _ending(path: Path) -> str | None:
  """Returns the kind of a file by its extension; JSON lines may be compressed (.jsonl.gz)."""
  if path.suffix.lower() != ".gz":
    return ENDINGS.get(path.suffix.lower())
  return "jsonl" if ENDINGS.get(Path(path.stem).suffix.lower()) == "jsonl" else None


def _files_of(folder: Path, split: str | None, usual_split: str | None) -> list[Path]:
  """Lists the data files of a folder, of one split: train.jsonl, train/0.parquet,
  data/train-00000-of-00002.parquet. If no split is named, the usual one is used if it exists."""
  files = sorted(p for p in folder.rglob("*") if _ending(p) and p.is_file())
  files = [file for file in files if not file.name.startswith((".", "dataset_info"))]
  if not files:
    raise FileNotFoundError(f"the folder {folder} has no file ending in {', '.join(ENDINGS)}")
  in_split = [
    file for file in files if _is_in_split(file.relative_to(folder), split or usual_split)
  ]
  if in_split or split is None:
    return in_split or files
  names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
  raise FileNotFoundError(f"no file of the split {split!r} in {folder}; there are: {names}")


def _is_in_split(file: Path, split: str | None) -> bool:
  """Returns whether the name of a file, or of its folder, has the split as one of its words:
  gsm8k_train.jsonl has "train", train_1M-00000.parquet has "train_1M"."""
  if split is None:
    return True
  word = rf"(?:^|[^A-Za-z0-9]){re.escape(split)}(?:$|[^A-Za-z0-9_])"
  return bool(re.search(word, str(file.with_suffix(""))))


def _neighbours(path: Path) -> str:
  """Returns " (did you mean …?)" from the data files next to a missing one."""
  with contextlib.suppress(OSError):
    files = [p.name for p in path.parent.iterdir() if _ending(p) and p.is_file()]
    return nearest(path.name, files)
  return f": no folder {path.parent} either"


ENDINGS = {
  ".jsonl": "jsonl",
  ".ndjson": "jsonl",
  ".json": "json",
  ".parquet": "parquet",
}
SOURCES: dict[str, Callable[[SourceConfig], RowSource]] = {
  "file": open_file,
  "jsonl": open_jsonl,
  "json": open_json,
  "parquet": open_parquet,
  "hub": open_hub,
  "reasoning_gym": open_reasoning_gym,
  "function": open_function,
}
