"""Chooses the sandbox that graders run in on this machine."""

import dataclasses
import functools
import logging

from grpo_jax.registry import choose
from grpo_sandbox.launch import KINDS, NONE, Launcher, ProcessLimits, SandboxError

_log = logging.getLogger(__name__)

BEST = "best"
_CLOSING_FILES = ("bubblewrap", "landlock")


@dataclasses.dataclass(frozen=True, slots=True)
class Confinement:
  """A kind of sandbox, and whether it is safe to run untrusted text in it."""

  kind: str  # one of launch.KINDS, or launch.NONE.
  is_sandbox: bool  # closes files and network, or was named by the user.
  why_not: str = ""  # why a stronger one does not work here.


def find(wanted: str) -> Confinement:
  """Returns the sandbox to use.

  Args:
    wanted: "bubblewrap", "landlock" or "limits"; or "best": the first of the first two that works
      here, otherwise what is available (limits alone, or a plain process) with `is_sandbox` False.

  Raises:
    ValueError: The wanted sandbox does not work on this machine, or is unknown.
  """
  choose("sandbox", wanted, dict.fromkeys((BEST, *KINDS)))
  if wanted == BEST:
    return _best()
  if reason := _why_not(wanted):
    raise ValueError(reason)
  return Confinement(wanted, is_sandbox=True)


@functools.cache
def _best() -> Confinement:
  reasons = []
  for kind in _CLOSING_FILES:
    reason = _why_not(kind)
    if not reason:
      return Confinement(kind, is_sandbox=True)
    reasons.append(reason)
  kind = NONE if _why_not("limits") else "limits"
  _log.warning(
    "graders run without a sandbox that closes files (%s): %s",
    "limits of resources and system calls only" if kind == "limits" else "in plain processes",
    reasons[0],
  )
  return Confinement(kind, is_sandbox=False, why_not=reasons[0])


@functools.cache
def _why_not(kind: str) -> str:
  """Returns why a kind of sandbox does not work on this machine; "" if it works."""
  try:
    Launcher(kind, ProcessLimits())
  except SandboxError as error:
    return str(error)
  return ""
