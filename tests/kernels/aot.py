"""Compiles for a GPU or a TPU that is not there, and reads what the compilers say.

No device and no driver is needed: XLA compiles for a topology by description, Mosaic's kernels are
assembled by ptxas or by libtpu. What it shows: whether a program compiles for the real target, what
memory it takes, which arrays it holds, whether registers spill. What it does not show: speed.

The compilers are large and live in environments of their own; AOT_TARGET says which of them this
process has ("h100" or "tpu"). Without it all tests with `MARKS` are skipped.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

from grpo_plan import topologies

TARGET = os.environ.get("AOT_TARGET")
MARKS = [
  pytest.mark.aot,
  pytest.mark.skipif(
    not TARGET, reason="the compilers for H100 and TPU are not in this Python; `make aot`"
  ),
]
on_h100 = pytest.mark.skipif(TARGET != "h100", reason="needs the compiler for H100; `make aot`")
on_tpu = pytest.mark.skipif(TARGET != "tpu", reason="needs the compiler for TPU; `make aot`")


class Kernel(NamedTuple):
  """What ptxas says about one kernel."""

  name: str
  registers: int
  spilled_bytes: int  # stores and loads.


class Compiled(NamedTuple):
  """What the compiler says about one program."""

  temporary_bytes: int  # beyond arguments and results.
  hlo: str  # after all optimisation.
  kernels: list[Kernel]  # those that ptxas assembled for it; what it has seen before is not.


def compile_for(target: str, function, structs) -> Compiled:
  """Compiles a function of arrays that lie on one device of a target.

  Args:
    target: Name of the machine, as `grpo-jax plan` takes it.
    function: to be compiled.
    structs: a `jax.ShapeDtypeStruct` for each argument.
  """
  placed = jax.sharding.SingleDeviceSharding(topologies.devices(topologies.parse(target))[0])
  structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in structs]
  with listening() as heard:
    compiled = jax.jit(function).lower(*structs).compile()
  return Compiled(
    compiled.memory_analysis().temp_size_in_bytes, compiled.as_text(), kernels_in("".join(heard))
  )


def kernels_in(text: str) -> list[Kernel]:
  """Returns the kernels of which a verbose ptxas spoke."""
  pattern = (
    r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores,"
    r" (\d+) bytes spill loads\s+ptxas info\s+: Used (\d+) registers"
  )
  found = re.findall(pattern, text)
  assert len(found) == text.count("Function properties for"), text  # none was overlooked.
  return [
    Kernel(name, int(registers), int(stores) + int(loads))
    for name, stores, loads, registers in found
  ]


def largest_array(hlo: str) -> tuple[int, str]:
  """Returns the elements of the largest array that a program names, and its shape."""
  shapes = set(re.findall(r"\b(?:pred|bf16|f16|f32|f64|[su](?:8|16|32|64))\[([\d,]+)\]", hlo))

  def elements(shape: str) -> int:
    count = 1
    for size in shape.split(","):
      count *= int(size)
    return count

  largest = max(shapes, key=elements)
  return elements(largest), largest


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
  """Makes ptxas verbose, and collects what this process writes, compilers' code included."""
  heard: list[str] = []
  kept = os.dup(1), os.dup(2)
  os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
  with tempfile.TemporaryFile("w+") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    try:
      yield heard
    finally:
      del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
      for number, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, number)
        os.close(copy)
      file.seek(0)
      heard.append(file.read())
