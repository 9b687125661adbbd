"""The parts of the day, in order of value: the modules of this folder that measure something."""

import importlib

from gpu_day_parts.running import Part

MINUTES = 9.0
NAMES = ("device", "tests", "attention", "update", "decode", "quickstart", "head", "peer")


def _part(name: str) -> Part:
  """Returns the part that a module describes."""
  module = importlib.import_module(f"gpu_day_parts.{name}")
  return Part(name, module.TITLE, module.__name__, module.LIMIT_S, is_first=name == "device")


PARTS = {name: _part(name) for name in NAMES}
