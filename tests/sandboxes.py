"""Which sandboxes work on this machine, and suites in short, for the tests."""

import functools

import pytest

from grpo_sandbox.launch import KINDS, Launcher, ProcessLimits, SandboxError

LIMITS = ProcessLimits(timeout_s=10.0, memory_mib=256, output_kib=256, scratch_mib=4)


@functools.cache
def why_not(kind):
  """Why a kind of sandbox cannot be had on this machine; "" if it can."""
  try:
    Launcher(kind, LIMITS)
  except SandboxError as error:
    return str(error)
  return ""


def need(kind):
  """Skips a test on a machine without this kind of sandbox; says why."""
  if why_not(kind):
    pytest.skip(why_not(kind))
  return kind


def any_kind():
  """The best sandbox that there is here."""
  return next((kind for kind in KINDS if not why_not(kind)), None) or need("bubblewrap")


def suite(program, *tests, entry="f", setup="", cases=(), prompt=()):
  """A suite of assertions about a function `f`."""
  return {
    "sources": [*prompt, program],
    "setup": setup,
    "tests": tests,
    "entry": entry,
    "cases": cases,
  }
