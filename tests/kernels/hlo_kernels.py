"""Counts what a turn of a compiled program's main loop does on a GPU: kernels, waits and bytes."""

import collections
import functools
import math
import re
from collections.abc import Iterator, Set
from typing import NamedTuple

from grpo_plan import hlo_collectives

# Operations that start no kernel.
_NAMES_ONLY = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"}
_LINE = re.compile(
  r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[\w\-]+)"
  r"\((?P<operands>.*?)\)(?:, |$)"
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}


class Turn(NamedTuple):
  """What one turn does.

  Attributes:
    kernels: Kernels that are started; a copy is one.
    waits: Conditionals, and loops of unknown length: before each of their turns the host reads.
    nbytes: Bytes that the kernels read and write: operands and results of each, of an operand that
      is only sliced or gathered the parts, of one that is changed in place the changes.
  """

  kernels: int
  waits: int
  nbytes: int


class _Instruction(NamedTuple):
  type: str
  kind: str
  operands: list[str]
  line: str
  is_root: bool

  @property
  def number(self) -> int:
    """Number of a parameter."""
    return int(re.search(r"parameter\((\d+)\)", self.line)[1])  # pyright: ignore[reportOptionalSubscript]


def main_loop(hlo: str, *, apart: Set[tuple[int, ...]] = frozenset()) -> Turn:
  """Returns what one turn of the loop with the longest body does.

  Args:
    hlo: Text of the program, after all optimisation.
    apart: Shapes of caches that kernels of custom calls read in part: their bytes are left out.
  """
  computations, _ = hlo_collectives._computations(hlo)
  parsed = {name: dict(_instructions(lines)) for name, lines in computations.items()}
  bodies = [
    _called(one, "body") for of in parsed.values() for one in of.values() if one.kind == "while"
  ]
  return _turn(parsed, max(bodies, key=lambda body: len(parsed[body])), apart)


def _instructions(lines: list[str]) -> Iterator[tuple[str, _Instruction]]:
  for line in lines:
    line = re.sub(r"/\*.*?\*/", "", line)
    if found := _LINE.match(line):
      operands = re.findall(r"%([\w.\-]+)", found["operands"])
      kind, is_root = found["kind"], found["root"] is not None
      yield found["name"], _Instruction(found["type"], kind, operands, line, is_root)


def _called(one: _Instruction, role: str) -> str:
  return re.search(rf"{role}=%?([\w.\-]+)", one.line)[1]  # pyright: ignore[reportOptionalSubscript]


def _turn(parsed: dict, name: str, apart: Set[tuple[int, ...]]) -> Turn:
  total = Turn(0, 0, 0)
  for one in parsed[name].values():
    if one.kind in _NAMES_ONLY or one.kind.endswith("-done"):
      continue
    if one.kind in ("while", "call"):
      inner = _turn(parsed, _called(one, "body" if one.kind == "while" else "to_apply"), apart)
      known = re.search(r'known_trip_count":\{"n":"(\d+)"', one.line)
      turns = int(known[1]) if known else 1
      waits = inner.waits * turns + (one.kind == "while" and known is None)
      found = Turn(inner.kernels * turns, waits, inner.nbytes * turns)
    elif one.kind == "conditional":
      found = Turn(0, 1, 0)
    elif one.kind.startswith("fusion"):
      found = Turn(1, 0, _of_fusion(parsed[_called(one, "calls")]))
    else:
      types = [one.type, *(parsed[name][x].type for x in one.operands if x in parsed[name])]
      skipped = apart if one.kind == "custom-call" else frozenset()
      found = Turn(1, 0, sum(_nbytes(x, skipped) for x in types))
    total = Turn(*(a + b for a, b in zip(total, found, strict=True)))
  return total


def _of_fusion(inside: dict[str, _Instruction]) -> int:
  """Returns the bytes that a fusion reads and writes."""
  users = collections.defaultdict(list)
  for name, one in inside.items():
    for place, operand in enumerate(one.operands):
      users[operand].append((name, place))

  @functools.cache
  def read(name: str) -> int:
    whole, parts = _nbytes(inside[name].type), 0
    for user, place in users[name]:
      one = inside[user]
      if place == 0 and one.kind in ("dynamic-slice", "slice", "gather"):
        parts += _nbytes(one.type)
      elif place == 0 and one.kind in ("dynamic-update-slice", "scatter"):
        continue  # changed in place.
      elif not one.is_root and _elements(one.type) >= _elements(inside[name].type):
        parts += read(user)  # element by element: computed only where its own users need it.
      else:
        return whole
    return min(parts, whole)

  def written(name: str) -> int:
    one = inside[name]
    if one.kind == "tuple":
      return sum(written(part) for part in one.operands)
    if one.kind == "bitcast":
      return written(one.operands[0])
    if one.kind in ("dynamic-update-slice", "scatter"):
      return _nbytes(inside[one.operands[1 if one.kind != "scatter" else -1]].type)
    return _nbytes(one.type)

  parameters = [name for name, one in inside.items() if one.kind == "parameter"]
  (root,) = (name for name, one in inside.items() if one.is_root)
  return sum(map(read, parameters)) + written(root)


def _elements(text: str) -> int:
  return sum(math.prod(shape) for _, shape in _arrays(text))


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
  """Returns dtype and shape of each array of a type."""
  found = re.findall(r"\b(\w+)\[([\d,]*)\]", text)
  return [(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in found]


def _nbytes(text: str, apart: Set[tuple[int, ...]] = frozenset()) -> int:
  """Returns the bytes of the arrays of a type, without arrays of some shapes."""
  kept = [(dtype, shape) for dtype, shape in _arrays(text) if shape not in apart]
  return sum(_BYTES[dtype] * math.prod(shape) for dtype, shape in kept)
