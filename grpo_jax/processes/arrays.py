"""Arrays that are spread over several processes: how they get there and back.

Every process holds the whole value of what it puts and of what it fetches. Nothing here compares
the values of the processes: all of them compute the same (see `grpo_jax.processes`).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

# (shape, dtype) → the shardings of such arrays, each with the program that makes them whole.
_programs: dict[Any, list[tuple[Sharding, Any]]] = {}


def put(value: Any, sharding: Sharding) -> Any:
  """Puts an array on the devices of a sharding; each process moves the parts of its own devices.

  `jax.device_put` would first compare the arrays of all processes, by an all-gather.

  Args:
    value: Whole array, the same on every process; or an array on the devices of all processes.
    sharding: Sharding of the result.
  """
  is_placed = isinstance(value, jax.Array) and not value.is_fully_addressable
  if sharding.is_fully_addressable or is_placed:
    return jax.device_put(value, sharding)
  host = np.asarray(value)
  host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def fetch(tree: Any) -> Any:
  """Returns arrays as NumPy arrays, whole on every process.

  All processes must make the same calls in the same order, on their main threads, if an array is
  spread over several processes. All gathers are started before the first of them is awaited.

  Args:
    tree: Tree of arrays.
  """
  whole = jax.tree.map(lambda x: _whole(x).addressable_data(0) if is_spread(x) else x, tree)
  return jax.tree.map(np.asarray, jax.device_get(whole))


def copies_of_fetch(array: Any) -> int:
  """Returns how often `fetch` copies an array: not at all if it is in the memory of the host.

  The parts of an array that is spread over devices of this process are put together on the host,
  which is a copy more.
  """
  sharding = getattr(array, "sharding", None)
  if sharding is None:  # a NumPy array.
    return 0
  is_on_host = all(device.platform == "cpu" for device in sharding.device_set)
  is_in_parts = sharding.is_fully_addressable and not sharding.is_fully_replicated
  return (not is_on_host) + is_in_parts


def is_spread(array: Any) -> bool:
  """Returns whether this process lacks a part of an array.

  Args:
    array: Array, or a `jax.ShapeDtypeStruct` with a sharding.
  """
  sharding = getattr(array, "sharding", None)
  return sharding is not None and not (
    sharding.is_fully_addressable or sharding.is_fully_replicated
  )


def gathers(tree: Any) -> dict[str, Callable[[], Any]]:
  """Returns the compilations after which fetching arrays compiles nothing.

  Args:
    tree: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.

  Returns:
    Functions that compile, by a description of the array; {} if no array is spread over several
    processes.
  """
  return {
    f"{like.dtype} {list(like.shape)} {getattr(like.sharding, 'spec', '')}": _compiling(like)
    for like in jax.tree.leaves(tree)
    if is_spread(like)
  }


def _compiling(like: Any) -> Callable[[], Any]:
  return lambda: _program(like)


def _whole(array: Any) -> Any:
  """Returns a copy of an array that is whole on every device of its mesh."""
  return _program(array)(array)


def _program(like: Any) -> Any:
  """Returns the program that makes such arrays whole; it is compiled once."""
  known = _programs.setdefault((tuple(like.shape), np.dtype(like.dtype)), [])
  for sharding, program in known:
    if sharding.is_equivalent_to(like.sharding, len(like.shape)):
      return program
  everywhere = NamedSharding(like.sharding.mesh, PartitionSpec())
  described = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
  program = jax.jit(_gathered, out_shardings=everywhere).lower(described).compile()
  known.append((like.sharding, program))
  return program


def _gathered(x: jax.Array) -> jax.Array:
  return x
