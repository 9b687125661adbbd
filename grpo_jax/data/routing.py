"""Which environment scores a row: that of its dataset, or the one that the row names. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from grpo_jax.data.formats import RowError
from grpo_jax.registry import nearest


def environment_of(
  row: Mapping[str, Any],
  where: str,
  *,
  default: str,
  known: Collection[str] | None,
  has_tasks: bool = False,
) -> str:
  """Returns the name of the environment of a row.

  A field `environment` decides. `task_name`, which many files have for other reasons,
  decides if an environment has this name.

  Args:
    row: The fields of the row.
    where: "file:line", for errors.
    default: Environment of the dataset.
    known: Names of the environments of the run; None: not known, rows are not looked at.
    has_tasks: Whether `task_name` has been read already, by the dataset's own table of tasks.

  Raises:
    RowError: `environment` is no environment of the run.
  """
  if known is None:
    return default
  named = row.get("environment")
  if named is not None:
    if named not in known:
      raise RowError(
        where,
        f"environment {named!r} is none of config.environments{nearest(str(named), known)}: "
        f"{', '.join(known)}",
      )
    return named
  task = row.get("task_name")
  is_named = not has_tasks and isinstance(task, str) and task in known
  return str(task) if is_named else default


def stop_strings_of(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
  """Returns the row's `stop_strings`, a list of texts that end the first turn; () without.

  Raises:
    RowError: it is no list of texts that are not empty.
  """
  strings = row.get("stop_strings")
  if strings is None:
    return ()
  if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
    raise RowError(where, f"'stop_strings' must be a list of strings, got {strings!r:.100}")
  return tuple(strings)
