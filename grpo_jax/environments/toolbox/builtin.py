"""Tools that come with the package, and the tools that a setting names."""

import asyncio
import contextlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpo_jax import registry
from grpo_jax.environments import setting_kinds
from grpo_jax.environments.grading import arithmetic, confinement
from grpo_jax.environments.toolbox import functions
from grpo_jax.environments.toolbox.calling import ToolError
from grpo_jax.environments.toolbox.functions import Tool
from grpo_jax.values import checked
from grpo_sandbox.launch import Launcher, ProcessLimits, SandboxError
from grpo_sandbox.supervise import Ending, Supervisor

_PACKAGE = "grpo_jax.environments.toolbox"
_PROGRAM = """\
import sys, traceback
try:
  exec(compile({code!r}, "<code>", "exec"), {{"__name__": "__main__"}})
except Exception:
  traceback.print_exc(file=sys.stdout)
"""
_ENDINGS = {
  Ending.COMPILE_ERROR: "the code cannot be compiled",
  Ending.MEMORY: "the program used too much memory",
  Ending.OUTPUT: "the program printed too much",
  Ending.TIMEOUT: "the program took too long",
}


def open_tools(
  names: Sequence[str], stack: contextlib.ExitStack, *, python: Mapping[str, Any] | None = None
) -> list[Tool]:
  """Returns the tools that a setting names.

  Args:
    names: Names of tools of this package, "calculator" or "python"; modules on the Python path,
      whose public functions are tools; or dotted paths of single functions.
    stack: Stack that closes what the tools need.
    python: Settings of the tool "python"; see `python_tool`.

  Raises:
    ValueError: There is no such module or function, one has no schema, or the sandbox of "python"
      does not work.
  """
  found: list[Tool] = []
  for name in names:
    if name == "calculator":
      found.append(functions.tool_of(calculator))
    elif name == "python":
      found.append(python_tool(stack, **_checked(python or {})))
    else:
      found += _users(name)
  return found


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings of the tool "python"; raises ValueError for one that it does not have."""
  registry.check_arguments("the tool 'python'", python_tool, settings, usual=("stack",))
  if wrong := checked.problems(setting_kinds.SETTINGS, settings, prefix="python."):
    raise ValueError("; ".join(wrong))
  return dict(settings)


def _users(name: str) -> list[Tool]:
  """Returns the tools of a user's module, or the one that is a function."""
  is_module = name.isidentifier() and importlib.util.find_spec(name)
  if "." not in name and not name.endswith(".py") and not is_module:
    known = {"calculator": None, "python": None}
    raise ValueError(
      f"there is no tool {name!r}{registry.nearest(name, known)}; there are: {', '.join(known)};"
      " or name a module of your own, on the Python path, or a function in it, as module.function"
    )
  ours = registry.modules(_PACKAGE)
  owner = registry.module_or_member(_PACKAGE, name, hidden=ours)
  if inspect.isclass(owner):
    raise ValueError(f"{name} is a class; tools are functions, or a module of functions")
  return functions.tools_in(owner) if inspect.ismodule(owner) else [functions.tool_of(owner)]


async def calculator(expression: str) -> str:
  """Computes an arithmetic expression, for example (3 + 4) * 12.

  It knows + - * / // % **, parentheses, abs, min, max, round, sqrt, floor and ceil.

  Args:
    expression: The expression.
  """
  try:
    return arithmetic.shown(arithmetic.evaluate(expression))
  except arithmetic.ExpressionError as error:
    raise ToolError(str(error)) from error


def python_tool(
  stack: contextlib.ExitStack,
  *,
  sandbox: str = confinement.BEST,
  workers: int = 4,
  timeout_s: float | int = 5.0,
  memory_mib: int = 512,
  output_kib: int = 64,
  packages: Sequence[str] = (),
) -> Tool:
  """Returns the tool "python": it runs programs in the sandbox of the code environment.

  Args:
    stack: Stack that ends the processes.
    sandbox: "best", "bubblewrap", "landlock" or "limits"; see docs/code_environment.md.
    workers: Number of programs that run at the same time.
    timeout_s: Longest time of a program, in seconds.
    memory_mib: Limit of a program's address space.
    output_kib: Limit of what a program prints.
    packages: Folders with packages that programs may import.

  Raises:
    ValueError: The sandbox does not work on this machine, or an option is out of range.
  """
  found = confinement.find(sandbox)
  if not found.is_sandbox:
    raise ValueError(f"the tool 'python' needs a sandbox that closes files: {found.why_not}")
  limits = ProcessLimits(timeout_s=float(timeout_s), memory_mib=memory_mib, output_kib=output_kib)
  try:
    supervisor = Supervisor(Launcher(found.kind, limits, packages=packages), workers=workers)
    stack.callback(supervisor.close)
    supervisor.try_out()
  except SandboxError as error:
    raise ValueError(f"the tool 'python': {error}") from error
  return functions.tool_of(_python(supervisor))


def _python(supervisor: Supervisor) -> Callable[[str], Awaitable[str]]:
  async def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Every program starts from nothing, without files and without a network.

    Args:
      code: The program.
    """
    future = supervisor.submit(supervisor.run, _PROGRAM.format(code=code), "")
    output = await asyncio.wrap_future(future)
    if output.ending in (Ending.OK, Ending.RAISED):
      return output.text
    reason = _ENDINGS.get(output.ending, "the program ended its process")
    raise ToolError(f"{reason}; it printed: {output.text}" if output.text else reason)

  return python
