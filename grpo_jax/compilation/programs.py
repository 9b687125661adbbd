"""Programs that can be compiled before they are called: jitted functions with executables.

The config determines which shapes a run's programs will see. Each part returns them as jobs:

    update = Program(jax.jit(function, donate_argnames="params"), name="update")
    jobs = [update.job(params, batch) for batch in ...]  # shapes, dtypes and shardings only
    with compiling.BackgroundCompiler(jobs, watch) as ahead:          # in parallel
      ahead.wait(screen.progress)                        # with a progress bar
    update(params, batch)                                # compiles nothing

A call whose arguments fit no executable compiles as with `jax.jit`.
"""

import dataclasses
import functools
import threading
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
  """A program needs more memory than is available."""


# Tracing and lowering are Python, of which one thread runs at a time. One program after the other,
# so that XLA, which needs no Python, compiles the first while the next is lowered.
_LOWERING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class CompileJob:
  """One compilation, to be run in a thread of a pool.

  Attributes:
    name: Name of the program and of its shapes, shown to the user.
    run: Function that compiles, stores the executable for later calls, and returns it.
    remedy: Advice if memory is short, such as "lower engine.max_rows"; "": no advice.
    lower: Function that traces the program without compiling it; None: it is not known.
  """

  name: str
  run: Callable[[], Any]
  remedy: str = ""
  lower: Callable[[], Any] | None = None

  def __call__(self) -> None:
    """Compiles.

    Raises:
      CompilationError: The compilation failed; the message names the program and its shapes.
      ExpectedFailure: A function of the user that is part of the program failed.
    """
    try:
      self.run()
    except ExpectedFailure:  # its own message says more than the name of the program.
      raise
    except (jax.errors.JaxRuntimeError, MemoryError, NotImplementedError, ValueError) as error:
      raise explained(error, f"compiling {self.name}", self.remedy) from error


class Program:
  """A jitted function with its executables that were compiled ahead of time."""

  def __init__(self, jitted: Any, *, name: str = "", static: Iterable[str] = (), remedy: str = ""):
    """Makes a program without executables.

    Args:
      jitted: Function made by `jax.jit`.
      name: Name shown to the user; "": the function's name.
      static: Names of the static arguments of `jitted`, which calls must pass by name.
      remedy: Advice if memory is short, such as "lower engine.max_rows"; "": no advice.
    """
    self.jitted = jitted
    self._static = frozenset(static)
    # Kinds of arguments → the executables for them, each with the shardings of its arguments.
    self._executables: dict[Any, list[tuple[Any, list[Any]]]] = {}
    self.name = name or jitted.__name__
    self.remedy = remedy

  def __call__(self, *arguments: Any, **named: Any) -> Any:
    """Runs the executable that fits, or compiles one.

    Raises:
      OutOfMemory: There is not enough memory to compile or to start the program.
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
    """Lowers like the function that `jax.jit` returns."""
    return self.jitted.lower(*arguments, **named)

  def eval_shape(self, *arguments: Any, **named: Any) -> Any:
    """Returns the shapes and dtypes of what a call returns."""
    return self.jitted.eval_shape(*arguments, **named)

  def job(self, *arguments: Any, detail: str = "", **named: Any) -> CompileJob:
    """Describes a compilation.

    Args:
      *arguments: Arguments of a call, with `jax.ShapeDtypeStruct`s instead of arrays. A struct
        without a sharding describes a NumPy array or an uncommitted JAX array. Python numbers are
        passed as they are.
      detail: Description of the shapes, such as "8 × 1024".
      **named: Named arguments of a call, in the same form.
    """

    def compile_and_keep() -> Any:
      key, leaves = self._key(arguments, named)
      placed = [getattr(leaf, "sharding", None) for leaf in leaves]
      with _LOWERING:
        lowered = self.jitted.lower(*arguments, **named)
      executable = lowered.compile()
      self._executables.setdefault(key, []).append((executable, placed))
      return executable

    lower = functools.partial(self.jitted.lower, *arguments, **named)
    return CompileJob(f"{self.name} {detail}".rstrip(), compile_and_keep, self.remedy, lower)

  def _executable(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Returns the executable for these arguments; None if there is none."""
    if not self._executables:
      return None
    key, leaves = self._key(arguments, named)
    for executable, placed in self._executables.get(key, ()):
      if all(map(_is_placed, leaves, placed)):
        return executable
    return None

  def _key(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Returns what an executable depends on besides shardings, and the arguments' leaves."""
    leaves, tree = jax.tree.flatten((arguments, self._dynamic(named)))
    static = tuple((name, named[name]) for name in sorted(self._static & named.keys()))
    return (static, tree, tuple(map(_kind, leaves))), leaves

  def _dynamic(self, named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in self._static}


def explained(error: BaseException, what: str, remedy: str) -> CompilationError:
  """Returns an error whose message says what failed and what to do.

  Args:
    error: Error of JAX.
    what: Action that failed, with its shapes, such as "compiling update 8 × 1024".
    remedy: Advice if memory is short; "": no advice.
  """
  reason = " ".join(str(error).split())[:600]
  if is_short_of_memory(error):
    advice = f" What to do: {remedy}." if remedy else ""
    return OutOfMemory(f"{what}: not enough memory.{advice} ({reason})")
  return CompilationError(f"{what} failed: {type(error).__name__}: {reason}")


def is_short_of_memory(error: BaseException) -> bool:
  """Returns whether an error of JAX reports a lack of memory."""
  return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY_IS_SHORT)


def abstract(tree: Any, sharding: Any = None) -> Any:
  """Returns shapes and dtypes of a tree, for use as arguments of `Program.job`.

  Args:
    tree: Tree of arrays or `jax.ShapeDtypeStruct`s.
    sharding: Sharding of all leaves; None: each leaf keeps its own.
  """
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding or getattr(x, "sharding", None)
    ),
    tree,
  )


def _kind(leaf: Any) -> Any:
  """Returns shape, dtype, and whether the dtype is weak."""
  if isinstance(leaf, bool | int | float | complex):
    return (), np.dtype(jax.dtypes.canonicalize_dtype(type(leaf))), True
  return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)


def _is_placed(leaf: Any, placed: Any) -> bool:
  """Returns whether an argument has the sharding of an executable, or can be moved to it."""
  if not isinstance(leaf, jax.Array):
    return True
  if isinstance(leaf, Tracer):
    return False
  if not leaf.committed or leaf.sharding == placed:
    return True
  return placed is not None and leaf.sharding.is_equivalent_to(placed, leaf.ndim)
