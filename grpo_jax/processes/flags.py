"""The flag that asks a run to stop, which the processes share."""

import contextlib
from collections.abc import Iterator
from typing import Any

from grpo_jax.interrupts import Flag
from grpo_jax.processes import watch


@contextlib.contextmanager
def watching(stop: Any) -> Iterator[None]:
  """Shares a flag among all processes: once one is asked to stop, so are the others.

  Within the block a signal does not save or end anything by itself. The processes decide together,
  by `any_of(stop)`, where they stop.

  Args:
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
  """
  current = watch.current
  if current is None or not isinstance(stop, Flag):
    yield
    return
  current.flag = stop
  current.on_stop(stop.raise_for)
  stop.share(current.publish_stop, current.end_at_once)
  if stop:  # the signal came before there was anyone to report it to.
    current.publish_stop(stop.number)
  try:
    yield
  finally:
    current.on_stop(None)


def signal_of(flag: Any) -> int:
  """Returns the signal that raised a flag; -1 if there was none, and 0 if it is not raised."""
  return (flag.number or -1 if isinstance(flag, Flag) else -1) if flag else 0


def raise_own(asked: list[int]) -> None:
  """Raises this process's flag if a signal has raised that of another one."""
  numbers = [number for number in asked if number > 0]
  if numbers and watch.current is not None:
    watch.current.stop(numbers[0])
