"""Finds the roundings that XLA may leave out of a traced program."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# What does not come between two conversions, for XLA.
TRANSPARENT = {
  *("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "split", "copy", "name"),
  *("sharding_constraint", "concatenate", "dynamic_slice", "gather", "rev"),
}
# Float32: KEPT by `reduce_precision`. Bfloat16: DROPPABLE, and as float32 again LOST.
PLAIN, KEPT, DROPPABLE, LOST = range(4)


def lost(function: Any, *arguments: Any) -> list[str]:
  """Returns where float32 is rounded to bfloat16, and used in float32, with conversions alone.

  Args:
    function: A function of arrays.
    *arguments: Arrays, or what describes them.
  """
  closed = jax.make_jaxpr(function)(*arguments)
  found: list[str] = []
  states = _run(closed.jaxpr, [PLAIN] * len(closed.jaxpr.invars), found)
  found += ["result of the program"] * states.count(LOST)
  return found


def _run(jaxpr: Any, given: list[int], found: list[str]) -> list[int]:
  """Follows a program, returns the states of its results."""
  states = dict(zip(jaxpr.invars, given, strict=True))
  of = lambda x: PLAIN if isinstance(x, core.Literal) else states.get(x, PLAIN)
  for eqn in jaxpr.eqns:
    before = [of(x) for x in eqn.invars]
    after = _of_called(eqn, before, found)
    if after is None:
      after = [_after(eqn, before, found)] * len(eqn.outvars)
    states.update(zip(eqn.outvars, after, strict=True))
  return [of(x) for x in jaxpr.outvars]


def _inner(eqn: Any) -> list[Any]:
  return [
    getattr(jaxpr, "jaxpr", jaxpr)
    for value in eqn.params.values()
    for jaxpr in (value if isinstance(value, (tuple, list)) else [value])
    if hasattr(getattr(jaxpr, "jaxpr", jaxpr), "eqns")
  ]


def _of_called(eqn: Any, before: list[int], found: list[str]) -> list[int] | None:
  """Follows the programs within an equation; None if it has none."""
  inner = _inner(eqn)
  if not inner:
    return None
  is_call = len(inner) == 1 and eqn.primitive.name not in ("scan", "while", "cond")
  if is_call and len(inner[0].invars) == len(before):
    return _run(inner[0], before, found)
  for jaxpr in inner:
    _run(jaxpr, [PLAIN] * len(jaxpr.invars), found)
  return [PLAIN] * len(eqn.outvars)


def _after(eqn: Any, before: list[int], found: list[str]) -> int:
  """Returns the state of what an operation gives; notes one that computes with what is LOST."""
  name = eqn.primitive.name
  if name == "reduce_precision":
    return KEPT
  if name == "convert_element_type":
    return _converted(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype, before[0])
  if name in TRANSPARENT:
    return max(before)
  pairs = zip(eqn.invars, before, strict=True)
  found += [f"{name} of {x.aval}" for x, state in pairs if state == LOST]
  return PLAIN


def _converted(at: Any, to: Any, state: int) -> int:
  if (at, to) == (jnp.float32, jnp.bfloat16):
    return PLAIN if state == KEPT else DROPPABLE
  if (at, to) == (jnp.bfloat16, jnp.float32) and state == DROPPABLE:
    return LOST
  return state if at == to else PLAIN


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields every equation of a program that holds no others, those within others included."""
  for eqn in jaxpr.eqns:
    inner = _inner(eqn)
    if not inner:
      yield eqn
    for one in inner:
      yield from equations(one)
