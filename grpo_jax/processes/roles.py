"""How many processes a run has, and which one this is.

A program without `jax.distributed` is a single process. Nothing here starts a JAX backend.
"""

import sys
from typing import Any

from grpo_jax.processes import watch


def count() -> int:
  """Returns the number of processes of this run."""
  state = distributed()
  return 1 if state is None else int(state.num_processes)


def index() -> int:
  """Returns the number of this process, from 0."""
  state = distributed()
  return 0 if state is None else int(state.process_id)


def is_main() -> bool:
  """Returns whether this process writes, prints and decides for the whole run."""
  return index() == 0


def named() -> str:
  """Returns "process 1 of 2" for messages; "" if there is only one process."""
  return f"process {index()} of {count()}" if count() > 1 else ""


def where() -> str:
  """Returns "process 1 of 2 (host)" for messages; "" if there is only one process."""
  return name_of(index()) if count() > 1 else ""


def name_of(number: int) -> str:
  """Returns "process 1 of 2 (host)" for the process with a number."""
  return watch.current.named(number) if watch.current else f"process {number} of {count()}"


def distributed() -> Any:
  """Returns the state of `jax.distributed`; None if it is not running.

  JAX's public functions `process_index` and `process_count` would start a backend.
  """
  jax = sys.modules.get("jax")
  if jax is None or not hasattr(jax, "distributed") or not jax.distributed.is_initialized():
    return None
  from jax._src import distributed

  return distributed.global_state


def client() -> Any:
  """Returns the client of JAX's coordination service, which several processes have."""
  return distributed().client
