"""JSON, parquet and Hugging Face datasets as random-access sources of rows.

datasets is optional: it is imported when such a source is opened.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from grpo_jax.data import file_cache, formats
from grpo_jax.data.jsonl import JsonlSource
from grpo_jax.files import hub

# Largest parquet file that is read into memory; a larger one is unpacked into the cache.
_IN_MEMORY_BYTES = 1 << 25
_UNPACKED_ROWS = 4096  # rows of a piece of an unpacked file, read at once.


@runtime_checkable
class IndexedRows(Protocol):
  """Rows by number, wherever they are."""

  def __len__(self) -> int: ...

  def __getitem__(self, row: int, /) -> Any: ...


class RowsSource:
  """Rows in memory, or in an object that is indexed like a list."""

  def __init__(self, rows: IndexedRows, *, name: str, place: str):
    """Keeps the rows.

    Args:
      rows: Rows by number.
      name: Name of the dataset.
      place: Origin of the rows, for messages.
    """
    if not len(rows):
      raise ValueError(f"{place} has no rows")
    self.name = name
    self._rows = rows
    self._place = place

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    found = self._rows[row]
    if not isinstance(found, Mapping):
      raise formats.RowError(self.where(row), f"a row must be a JSON object, got {found!r:.60}")
    return found

  def where(self, row: int) -> str:
    return f"{self._place}, row {row + 1}"


def open_json(
  path: Path, *, name: str | None, split: str | None, usual_split: str | None = None
) -> RowsSource | JsonlSource:
  """Opens a .json file: a list of objects, or JSON lines despite its name.

  An object may hold the list under one key ({"data": […]}), or one list a split
  ({"train": […], "test": […]}). The whole file is held in memory; lines are not.

  Raises:
    ValueError: The file is not JSON, or contains no list of rows.
  """
  if _is_lines(path):
    return JsonlSource(path, name=name)
  try:
    content = json.loads(
      path.read_text(encoding="utf-8-sig"), parse_constant=formats.refuse_constant
    )
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path}: invalid JSON: {error}") from error
  key = ""
  if isinstance(content, Mapping):
    key, content = _list_in(content, path, split, usual_split)
  if not isinstance(content, list):
    raise ValueError(f"{path} must hold a list of rows, got {content!r:.60}")
  return RowsSource(content, name=name or path.stem, place=f"{path}{key and f', {key!r}'}")


def _is_lines(path: Path) -> bool:
  """Returns whether lines are objects, not one JSON text: the first is whole, and more follow."""
  with path.open("rb") as file:
    first = next((line for line in file if line.strip()), b"")
    has_more = any(line.strip() for line in file)
  if not has_more or not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
    return False
  try:
    json.loads(first.decode("utf-8-sig"))
  except ValueError:
    return False
  return True


def _list_in(
  content: Mapping[str, Any], path: Path, split: str | None, usual_split: str | None
) -> tuple[str, list[Any]]:
  """Finds the list of rows in an object, and its key."""
  lists = {key: value for key, value in content.items() if _is_rows(value)}
  if not lists:
    raise ValueError(f"{path} holds one object, and no list of rows in it")
  wanted = split or (usual_split if usual_split in lists else None)
  if wanted is None and len(lists) == 1:
    wanted = next(iter(lists))
  if wanted not in lists:
    raise ValueError(
      f"{path} holds an object with the lists of rows {', '.join(map(repr, lists))}; data.split "
      f"must name one, it is {split!r}"
    )
  return wanted, lists[wanted]


def _is_rows(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


class ParquetRows:
  """Rows of a parquet file. A large one is unpacked once, into the cache, and mapped from there:
  parquet itself can only be read by groups of rows, which may be millions."""

  def __init__(self, path: Path):
    """Opens the file.

    Raises:
      ValueError: The file is not a parquet file.
    """
    pyarrow = _pyarrow()
    try:
      if path.stat().st_size < _IN_MEMORY_BYTES:
        self._table = pyarrow.parquet.read_table(path)
      else:
        folder = file_cache.derived(path, "rows-1", lambda folder: _unpack(path, folder))
        self._map = pyarrow.memory_map(str(folder / "rows.arrow"))
        self._table = pyarrow.ipc.open_file(self._map).read_all()
    except pyarrow.ArrowInvalid as error:
      raise ValueError(f"{path} is not a readable parquet file: {error}") from error

  def __len__(self) -> int:
    return self._table.num_rows

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    return self._table.slice(row, 1).to_pylist()[0]


def _unpack(path: Path, folder: Path) -> None:
  """Writes the rows of a parquet file as an Arrow file, a few thousand at a time."""
  pyarrow = _pyarrow()
  file = pyarrow.parquet.ParquetFile(path)
  with pyarrow.ipc.new_file(str(folder / "rows.arrow"), file.schema_arrow) as out:
    for batch in file.iter_batches(batch_size=_UNPACKED_ROWS):
      out.write_batch(batch)


def open_parquet(path: Path, *, name: str | None, place: str | None = None) -> RowsSource:
  """Opens a parquet file.

  Args:
    path: File.
    name: Name of the dataset; None: that of the file.
    place: Name of the file in messages; None: its path.

  Raises:
    ValueError: The file is not a parquet file, or has no rows.
  """
  return RowsSource(ParquetRows(path), name=name or path.stem, place=place or str(path))


def open_hub(repository: str, *, subset: str | None, split: str, name: str | None) -> RowsSource:
  """Opens a dataset of the Hugging Face hub, or of its cache, or a folder of the same layout.

  Args:
    repository: Name "owner/name" on the hub, or a local folder.
    subset: One of its configurations; several, separated by commas, follow each other.
    split: One of its splits, "train" or "train[:1000]".
    name: Name of the dataset; None: the last part of `repository`.

  Raises:
    ImportError: The datasets library is not installed.
    Unavailable: The hub does not answer, and its cache does not have the dataset.
    ValueError: There is no such dataset, subset or split.
  """
  try:
    import datasets.config
  except ModuleNotFoundError as error:
    raise ImportError(
      f"the dataset {repository!r} comes from the Hugging Face hub: pip install "
      "'grpo-jax[datasets]', or name a local copy of it as data.path"
    ) from error
  subsets = subset.split(",") if subset else [None]
  was_offline = datasets.config.HF_HUB_OFFLINE
  silent = "" if Path(repository).exists() else hub.unreachable()
  try:
    # Otherwise the library waits half a minute for a silent hub before it uses its cache.
    datasets.config.HF_HUB_OFFLINE = was_offline or bool(silent)
    parts = [_load(datasets, repository, each, split) for each in subsets]
  # The library raises errors of its own, of the hub, of HTTP and of the file system.
  except Exception as error:
    if silent:
      raise hub.Unavailable(repository, silent, is_silent=True) from error
    raise ValueError(
      f"cannot open the dataset {repository!r} (subset {subset!r}, split {split!r}): "
      f"{type(error).__name__}: {error}. A local copy is read with data.path"
    ) from error
  finally:
    datasets.config.HF_HUB_OFFLINE = was_offline
  rows: Any = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
  place = f"{repository}{f'/{subset}' if subset else ''} [{split}]"
  return RowsSource(rows, name=name or repository.rstrip("/").rpartition("/")[2], place=place)


def _load(datasets: Any, repository: str, subset: str | None, split: str) -> Any:
  """Loads one subset; a folder written by `save_to_disk` is loaded by `load_from_disk`."""
  saved = ("dataset_dict.json", "dataset_info.json", "state.json")
  if not any((Path(repository) / name).is_file() for name in saved):
    return datasets.load_dataset(repository, subset, split=split)
  loaded = datasets.load_from_disk(repository)
  if isinstance(loaded, datasets.DatasetDict):
    if split not in loaded:
      raise ValueError(f"there is no split {split!r}, but {', '.join(loaded)}")
    return loaded[split]
  return loaded


def _pyarrow() -> Any:
  import pyarrow  # only now: it takes a second.
  import pyarrow.ipc
  import pyarrow.parquet

  return pyarrow
