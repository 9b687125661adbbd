"""Rows that are Python objects: lists, generators, data frames, datasets in memory.

Nothing is imported for them: a frame or a dataset is recognised by its methods.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_jax.data import tables
from grpo_jax.data.formats import RowError
from grpo_jax.errors import ExpectedFailure, place_and_reason
from grpo_jax.registry import check_arguments, in_one_line

MOST = 1_000_000  # rows of an iterable that has no length.


class RowsError(ExpectedFailure, ValueError):
  """Rows that are not dicts of JSON values, or not rows at all."""


def each(rows: Any, name: str) -> Iterator[Any]:
  """Yields rows, whatever holds them.

  Args:
    rows: Iterable of dicts; a frame of pandas or polars or a table of pyarrow, whose columns are
      the fields and whose missing values are None; a dataset of the datasets library, or another
      object with a length and items.
    name: Name of the rows, for messages.

  Raises:
    RowsError: The object holds no rows, an iterable without a length has more than `MOST` of them,
      or the iterable fails.
  """
  _check(rows, name)
  found = _iterator(rows, name)
  has_length = hasattr(rows, "__len__")
  for number in itertools.count():
    try:
      row = next(found)
    except StopIteration:
      return
    except Exception as error:  # a generator of the user may fail in any way.
      reason = place_and_reason(error)
      raise RowsError(f"{name} failed after {number} rows: {reason}") from error
    if number >= MOST and not has_length:
      raise RowsError(
        f"{name} has no length and more than {MOST} rows: if it never ends, give as many as are"
        " needed, itertools.islice(rows, n); if it does, write a file and name it as data.path"
      )
    yield row


def _check(rows: Any, name: str) -> None:
  """Raises RowsError for objects that hold rows in another way, with what to give instead."""
  if isinstance(rows, str | bytes):
    raise RowsError(
      f"{name} must be a list of dicts, got {rows!r:.80}; a file is named in data.path"
    )
  if isinstance(rows, Mapping):
    if rows and all(hasattr(value, "column_names") for value in rows.values()):
      splits = ", ".join(map(str, rows))
      raise RowsError(f"{name} holds the splits {splits}: give one of them")
    raise RowsError(f"{name} must be a list of dicts, one per row, got the dict {rows!r:.80}")
  if callable(rows) and not hasattr(rows, "__iter__"):
    raise RowsError(f"{name} is a function: give what it returns, {_called(rows)}()")


def _iterator(rows: Any, name: str) -> Iterator[Any]:
  if hasattr(rows, "to_pylist"):  # pyarrow.Table
    return iter(rows.to_pylist())
  if hasattr(rows, "to_dicts"):  # polars
    return iter(rows.to_dicts())
  if hasattr(rows, "columns") and hasattr(rows, "notna"):  # pandas
    if not rows.columns.is_unique:
      raise RowsError(f"{name} has two columns of one name: {', '.join(map(str, rows.columns))}")
    return iter(rows.astype(object).where(rows.notna(), None).to_dict("records"))
  if hasattr(rows, "__iter__"):
    return iter(rows)
  if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
    return (rows[number] for number in range(len(rows)))
  raise RowsError(f"{name} must be a list of dicts, got {rows!r:.80}")


def plain(row: Any, where: str) -> dict[str, Any]:
  """Returns a row with values that JSON has: values and arrays of NumPy become Python's.

  Args:
    row: Fields of the row.
    where: Place of the row, for messages.

  Raises:
    RowsError: The row is not a dict of such values; the message names the field.
  """
  if not isinstance(row, Mapping):
    raise RowsError(f"{where} must be a dict of fields, got {row!r:.80}")
  return _plain(row, where)


def _plain(value: Any, where: str) -> Any:
  if isinstance(value, Mapping):
    return {_key(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
  if hasattr(value, "tolist"):  # of NumPy.
    return _plain(value.tolist(), where)
  if isinstance(value, float) and not math.isfinite(value):
    raise RowsError(f"{where} is {value}, which a row cannot hold: use None or leave it out")
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise RowsError(
    f"{where} is a {type(value).__name__}, which a row cannot hold: rows have strings, numbers,"
    " booleans, None, lists and dicts"
  )


def _key(key: Any, where: str) -> str:
  if not isinstance(key, str):
    raise RowsError(f"{where}: the names of fields are strings, got {key!r:.80}")
  return key


class InMemorySource(tables.RowsSource):
  """Rows in memory that a function has returned."""

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    try:
      return plain(super().__getitem__(row), "")
    except RowsError as error:
      raise RowError(self.where(row), str(error).strip()) from error


def returned(make: Callable[..., Any], arguments: Mapping[str, Any], config: Any, path: str) -> Any:
  """Calls a function of a user's that returns a source, or rows.

  Args:
    make: The function. If it has a parameter `config`, or needs one more argument than is given, it
      gets the config; otherwise it gets the arguments.
    arguments: Keyword arguments, `data.task_args`.
    config: Description of the source.
    path: Dotted path of the function, for messages.

  Raises:
    ValueError: The function does not take the arguments.
  """
  parameters = inspect.signature(make).parameters
  variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
  needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in variable]
  takes_config = "config" in parameters or len({p.name for p in needed} - {*arguments}) == 1
  if not takes_config:
    check_arguments(f"data.kind {path}", make, arguments)
  with in_one_line(f"data.kind {path} failed", path):
    return make(config) if takes_config else make(**arguments)


def _called(function: Any) -> str:
  return getattr(function, "__name__", "rows")


def source_of(found: Any, *, name: str | None, path: str) -> Any:
  """Returns a source of what a function has returned: the source itself, or a source of its rows.

  Args:
    found: A source of rows, or rows in any of the forms of `each`.
    name: Name of the dataset; None: that of the function.
    path: Dotted path of the function.

  Raises:
    RowsError: There are no rows.
  """
  if all(hasattr(found, part) for part in ("name", "where", "__len__", "__getitem__")):
    return found
  kept = list(each(found, path))
  if not kept:
    raise RowsError(f"{path} returned no rows")
  return InMemorySource(kept, name=name or path.rpartition(".")[2], place=path)
