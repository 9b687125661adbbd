"""Reads the collectives of a compiled program from XLA's text. Pure.

A collective inside loops counts as often as it runs.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_COLLECTIVE = re.compile(
  rf"=\s+(?P<results>.*?)\s(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)$"
)
_MADE = re.compile(
  r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<results>.*?) (?P<operation>[a-z][\w\-]*)\("
)
_STARTED = re.compile(r"-done\([^%)]*%?([\w.\-]+)")
_LAID_OUT = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\](\{[^}]*\})?")
_NAMES_ONLY = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r"known_trip_count\D*(\d+)")
_CONSTANT = re.compile(r"constant\((\d+)\)")


class Array(NamedTuple):
  """One array in a program's text."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    """Size in bytes."""
    bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype))
    return math.prod(self.shape) * bits // 8


class Collective(NamedTuple):
  """One collective of a program.

  Attributes:
    kind: One of `KINDS`.
    arrays: Results on one device; several if the compiler has combined collectives.
    groups: Groups of devices that exchange data, as indices of the program's devices.
    times: Number of times that it runs.
    source: Name of the operation in the program.
  """

  kind: str
  arrays: tuple[Array, ...]
  groups: tuple[tuple[int, ...], ...]
  times: int
  source: str

  @property
  def wholes(self) -> tuple[Array, ...]:
    """The arrays before they are scattered, the largest that a device holds."""
    if self.kind != "reduce-scatter":
      return self.arrays
    size = len(self.groups[0])
    return tuple(Array(a.dtype, (*a.shape, size)) for a in self.arrays)

  @property
  def nbytes(self) -> float:
    """Bytes that one device must receive in all runs, by the best algorithm.

    For n devices: (n - 1)/n of the whole arrays, twice that for an all-reduce, and all bytes of a
    permutation.
    """
    size = len(self.groups[0])
    share = {"collective-permute": 1.0, "all-reduce": 2 * (size - 1) / size}
    whole = sum(array.nbytes for array in self.wholes)
    return whole * share.get(self.kind, (size - 1) / size) * self.times


def collectives(hlo: str, *, devices: int) -> list[Collective]:
  """Returns every collective of a program with groups of more than one device.

  A TPU's compiler repeats a collective in each of the fusions that overlap with it, under one
  channel: it is counted once.

  Args:
    hlo: Text of the program, from `compiled.as_text()`.
    devices: Number of devices of the program; they are one group if the text lists none.
  """
  computations, entry = _computations(hlo)
  found, seen = [], set()
  for line, times, is_fused in _reached(computations, entry, 1):
    match = _COLLECTIVE.search(line)
    if match is None:
      continue
    channel = re.search(r"channel_id=(\d+)", line)
    if is_fused and channel is not None:
      if (channel[1], match["kind"]) in seen:
        continue
      seen.add((channel[1], match["kind"]))
    groups = _groups(match["rest"], devices)
    if len(groups[0]) < 2:
      continue
    arrays = _results(match)
    source = re.search(r'op_name="([^"]*)"', line)
    found.append(Collective(match["kind"], arrays, groups, times, source[1] if source else ""))
  return found


class Held(NamedTuple):
  """An array that a program makes.

  Attributes:
    array: The array, as one device holds it.
    source: Name of the operation in the program.
  """

  array: Array
  source: str


def largest(hlo: str, *, count: int = 8) -> list[Held]:
  """Returns the largest arrays that a program makes in memory, each shape once, largest first.

  Arrays in a TPU's vector memory are left out, and so are parameters and what only renames arrays.
  The start of an asynchronous operation names its operands too, so that what it makes is taken from
  its end.
  """
  computations, entry = _computations(hlo)
  found: dict[Array, str] = {}
  started: dict[str, str] = {}
  for line, _, is_fused in _reached(computations, entry, 1):
    match = None if is_fused else _MADE.search(line)
    if match is None or match["operation"] in _NAMES_ONLY:
      continue
    named = re.search(r'op_name="([^"]*)"', line)
    source = named[1] if named else re.sub("-(start|done)$", "", match["operation"])
    if match["operation"].endswith("-start"):
      started[match["name"]] = source
      continue
    if not named and (of := _STARTED.search(line)):
      source = started.get(of[1], source)
    for dtype, shape, layout in _LAID_OUT.findall(match["results"]):
      if not re.search(r"S\([1-9]", layout):
        array = Array(dtype, tuple(int(size) for size in shape.split(",") if size))
        found[array] = found.get(array) or source
  made = [Held(array, where) for array, where in found.items()]
  return sorted(made, key=lambda held: -held.array.nbytes)[:count]


def axes_of(groups: Sequence[Sequence[int]], sizes: dict[str, int]) -> frozenset[str]:
  """Returns the axes of a mesh along which a group's devices differ.

  Args:
    groups: Groups of indices of the mesh's devices.
    sizes: Size of each axis, in the mesh's order.
  """

  def place(device: int) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes.values()):
      device, at = divmod(device, size)
      found.append(at)
    return tuple(reversed(found))

  columns = zip(*(place(device) for device in groups[0]), strict=True)
  return frozenset(axis for axis, at in zip(sizes, columns, strict=True) if len(set(at)) > 1)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of every computation, and the name of the first that runs."""
  found: dict[str, list[str]] = {}
  name = entry = ""
  for line in hlo.splitlines():
    header = None if line.startswith((" ", "}")) else _HEADER.match(line)
    if header:
      name = header[1]
      found[name] = []
      entry = name if line.startswith("ENTRY") else entry
    elif name:
      found[name].append(line)
  return found, entry


def _reached(
  computations: dict[str, list[str]], name: str, times: int, is_fused: bool = False
) -> Iterator[tuple[str, int, bool]]:
  """Yields each line that a computation runs, with those it calls.

  Each comes with the number of times that it runs, and with whether it is part of a fusion.
  """
  for line in computations.get(name, ()):
    yield line, times, is_fused
    runs = times * (_trips(computations, line) if " while(" in line else 1)
    called = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
      called += [one.strip().lstrip("%") for one in branches.split(",")]
    if not _COLLECTIVE.search(line):  # the computation that a collective applies is an addition.
      for one in called:
        yield from _reached(computations, one, runs, is_fused or " fusion(" in line)


def _trips(computations: dict[str, list[str]], line: str) -> int:
  """Returns how often a loop's body runs: from the compiler, or from its condition's bound.

  A loop whose bound is data counts as not run: rows of the sampler that move when there are fewer.
  """
  known = _TRIPS.search(line)
  if known:
    return int(known[1])
  condition = re.search(r"condition=%?([\w.\-]+)", line)
  bounds = []
  for computed, *_ in _reached(computations, condition[1] if condition else "", 1):
    bounds += [int(number) for number in _CONSTANT.findall(computed)]
  return max(bounds, default=0)


def _results(match: re.Match[str]) -> tuple[Array, ...]:
  """Returns the results of a collective; an asynchronous one lists its operands first.

  The start of an all-reduce does so where its results are a tuple in a tuple.
  """
  arrays = tuple(
    Array(dtype, tuple(int(size) for size in shape.split(",") if size))
    for dtype, shape in _ARRAY.findall(match["results"])
  )
  opening = "((" if match["kind"] == "all-reduce" else "("
  if match["start"] and match["results"].startswith(opening):
    arrays = tuple(array for array in arrays if array.shape)  # drops contexts.
    return arrays[len(arrays) // 2 :]
  return arrays


def _groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
  """Returns the groups of devices, in any of XLA's three notations."""
  everyone = (tuple(range(devices)),)
  if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
    return tuple(_numbers(pair) for pair in re.findall(r"\{([\d,]+)", pairs[1] + "}"))
  if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", text):
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1]))
  if folded := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    return _unfolded(_numbers(folded[1]), _numbers(folded[2]), _numbers(folded[3] or ""))
  if named := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", text):
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    return _along(sizes, re.findall(r"'(\w+)'", named[2]))
  return everyone


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(number) for number in text.split(",") if number.strip())


def _unfolded(
  shape: tuple[int, ...], of: tuple[int, ...], order: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
  """Returns 0, 1, 2 ... in the shape `of`, transposed, then in rows of the shape's last length."""
  order = order or tuple(range(len(of)))
  strides = [math.prod(of[axis + 1 :]) for axis in range(len(of))]
  numbers = [0]
  for axis in order:
    numbers = [n + at * strides[axis] for n in numbers for at in range(of[axis])]
  size = shape[-1]
  return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def _along(sizes: dict[str, int], axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
  """Returns the groups whose devices differ along some axes of a mesh."""
  names = list(sizes)
  others = [names.index(axis) for axis in names if axis not in axes]
  order = (*others, *(names.index(axis) for axis in axes))
  size = math.prod(sizes[axis] for axis in axes)
  count = math.prod(sizes.values())
  return _unfolded((count // size, size), tuple(sizes.values()), order)
