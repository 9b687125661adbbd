"""Which sandbox graders run in on this machine."""

import dataclasses
import functools
import logging

from grpo_jax.registry import choose
from grpo_jax.sandbox.launch import KINDS, NONE, Launcher, Limits, SandboxError

_log = logging.getLogger(__name__)

BEST = "best"
_CLOSING_FILES = ("bubblewrap", "landlock")


@dataclasses.dataclass(frozen=True, slots=True)
class Confinement:
  """A kind of sandbox, and whether texts that may be run belong in it."""

  kind: str  # of launch.KINDS, or launch.NONE.
  is_sandbox: bool  # closes files and network, or was named by the user.
  why_not: str = ""  # why a better one does not work here.


def find(wanted: str) -> Confinement:
  """Returns the sandbox to use.

  Args:
    wanted: "bubblewrap", "landlock" or "limits"; or "best": the first of the first two that works
      here, else what there is (limits alone, or a mere process), which `is_sandbox` then denies.

  Raises:
    ValueError: the wanted one does not work on this machine, or there is no such one.
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
    "limits of resources and system calls only" if kind == "limits" else "in mere processes",
    reasons[0],
  )
  return Confinement(kind, is_sandbox=False, why_not=reasons[0])


@functools.cache
def _why_not(kind: str) -> str:
  """Why a kind of sandbox does not work on this machine; "" if it does."""
  try:
    Launcher(kind, Limits())
  except SandboxError as error:
    return str(error)
  return ""
