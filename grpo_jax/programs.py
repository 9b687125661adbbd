"""Programs that can be compiled before they are called: a jitted function and its executables.

A run knows from its config which shapes its programs will see. Each part says so by jobs:

    update = Program(jax.jit(function, donate_argnames="params"), name="update")
    jobs = [update.job(params, batch) for batch in ...]  # shapes, dtypes and shardings only
    compiling.ahead(jobs)                                # in parallel, with a bar of progress
    update(params, batch)                                # compiles nothing

A call whose arguments fit no executable compiles as `jax.jit` does.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from grpo_jax.errors import ExpectedFailure

_MEMORY_IS_SHORT = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


class CompilationError(ExpectedFailure, RuntimeError):
  """A program could not be compiled for the devices of the run."""


class OutOfMemory(CompilationError, MemoryError):
  """A program needs more memory than there is."""


@dataclasses.dataclass(frozen=True)
class Job:
  """One compilation, to be run in a thread of a pool.

  Attributes:
    name: of the program and its shapes, for whoever watches.
    run: compiles, keeps the executable where calls find it, and returns it.
    remedy: what to do if memory is short: "lower engine.max_rows"; "" if nothing can be done.
  """

  name: str
  run: Callable[[], Any]
  remedy: str = ""

  def __call__(self) -> None:
    """Compiles.

    Raises:
      CompilationError: XLA refuses; names the program and its shapes.
    """
    try:
      self.run()
    except (jax.errors.JaxRuntimeError, MemoryError, NotImplementedError, ValueError) as error:
      raise explained(error, f"compiling {self.name}", self.remedy) from error


class Program:
  """A jitted function that holds executables which were compiled ahead."""

  def __init__(self, jitted: Any, *, name: str = "", static: Iterable[str] = (), remedy: str = ""):
    """Makes a program without any executable.

    Args:
      jitted: made by `jax.jit`.
      name: for whoever watches; "": the function's.
      static: `static_argnames` of `jitted`. They must be given by name, in calls too.
      remedy: what a user should do if it runs out of memory: "lower engine.max_rows".
    """
    self.jitted = jitted
    self._static = frozenset(static)
    # What arguments are like → the executables for them, each with where its arguments lie.
    self._executables: dict[Any, list[tuple[Any, list[Any]]]] = {}
    self.name = name or jitted.__name__
    self.remedy = remedy

  def __call__(self, *arguments: Any, **named: Any) -> Any:
    """Computes with the executable that fits, or compiles.

    Raises:
      OutOfMemory: there is not enough memory to compile, or to begin.
    """
    try:
      found = self._executable(arguments, named)
      if found is None:
        return self.jitted(*arguments, **named)
      return found(*arguments, **self._dynamic(named))
    except jax.errors.JaxRuntimeError as error:
      if not is_short_of_memory(error):
        raise
      raise explained(error, self.name, self.remedy) from error

  def lower(self, *arguments: Any, **named: Any) -> Any:
    """Lowers as `jax.jit` does."""
    return self.jitted.lower(*arguments, **named)

  def eval_shape(self, *arguments: Any, **named: Any) -> Any:
    """Returns the shapes and dtypes of what a call returns."""
    return self.jitted.eval_shape(*arguments, **named)

  def job(self, *arguments: Any, detail: str = "", **named: Any) -> Job:
    """Describes a compilation.

    Args:
      *arguments: as of a call, with `jax.ShapeDtypeStruct`s in place of arrays. One without a
        sharding stands for a NumPy array, or for one that is bound to no device. Python numbers
        stand for themselves.
      detail: of the shapes, for whoever watches: "8 × 1024".
      **named: likewise.
    """

    def compile_and_keep() -> Any:
      key, leaves = self._key(arguments, named)
      placed = [getattr(leaf, "sharding", None) for leaf in leaves]
      executable = self.jitted.lower(*arguments, **named).compile()
      self._executables.setdefault(key, []).append((executable, placed))
      return executable

    return Job(f"{self.name} {detail}".rstrip(), compile_and_keep, self.remedy)

  def _executable(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Returns what was compiled for such arguments; None if nothing was."""
    if not self._executables:
      return None
    key, leaves = self._key(arguments, named)
    for executable, placed in self._executables.get(key, ()):
      if all(map(_lies, leaves, placed)):
        return executable
    return None

  def _key(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Returns what an executable depends on but shardings, and the leaves of the arguments."""
    leaves, tree = jax.tree.flatten((arguments, self._dynamic(named)))
    static = tuple((name, named[name]) for name in sorted(self._static & named.keys()))
    return (static, tree, tuple(map(_kind, leaves))), leaves

  def _dynamic(self, named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in self._static}


def explained(error: BaseException, what: str, remedy: str) -> CompilationError:
  """Returns the error that says in one message what failed, and what to do.

  Args:
    error: of JAX.
    what: failed, with its shapes: "compiling update 8 × 1024".
    remedy: against a lack of memory; "" if there is none.
  """
  reason = " ".join(str(error).split())[:600]
  if is_short_of_memory(error):
    advice = f" What to do: {remedy}." if remedy else ""
    return OutOfMemory(f"{what}: there is not enough memory.{advice} ({reason})")
  return CompilationError(f"{what} failed: {type(error).__name__}: {reason}")


def is_short_of_memory(error: BaseException) -> bool:
  """Returns whether an error of JAX says that memory is not enough."""
  return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY_IS_SHORT)


def abstract(tree: Any, sharding: Any = None) -> Any:
  """Returns shapes and dtypes of a tree, to be given to `Program.job`.

  Args:
    tree: of arrays or `jax.ShapeDtypeStruct`s.
    sharding: of all; None: each keeps its own.
  """
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding or getattr(x, "sharding", None)
    ),
    tree,
  )


def _kind(leaf: Any) -> Any:
  """Returns shape, dtype, and whether the dtype gives way to others."""
  if isinstance(leaf, bool | int | float | complex):
    return (), np.dtype(jax.dtypes.canonicalize_dtype(type(leaf))), True
  return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)


def _lies(leaf: Any, placed: Any) -> bool:
  """Returns whether an argument lies where an executable wants it, or can be moved there."""
  if not isinstance(leaf, jax.Array):
    return True
  if isinstance(leaf, Tracer):
    return False
  if not leaf.committed or leaf.sharding == placed:
    return True
  return placed is not None and leaf.sharding.is_equivalent_to(placed, leaf.ndim)
