"""Compiles the programs of a run for its target, and keeps what the compiler says.

An answer is kept in the user's cache, under the digest of the lowered program, of the target and of
the compilers' versions: to plan the same again costs only the tracing.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from grpo_jax.compilation.programs import CompileJob, explained
from grpo_jax.files import atomic
from grpo_jax.files.cache import default_cache
from grpo_jax.values import json_text
from grpo_plan import hlo_collectives, target

_FORM = 3  # of what is kept; a change makes older answers unreadable.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_NO_PRODUCT = "No supported config found for HLO"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Moved:
  """Bytes that one device receives in one run of a program.

  Attributes:
    kind: Kind of collective, one of `hlo_collectives.KINDS`.
    axes: Axes of the mesh along which the devices exchange data, joined by "+".
    bytes: Bytes that one device receives, in all runs of the program's loops.
    far: Least bytes of these that cross the network, if the devices of a slice or node receive
      what comes from others once and share it.
    times: Number of collectives, counted as often as their loops run.
  """

  kind: str
  axes: str
  bytes: float
  far: float
  times: int


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one program, in bytes of one device.

  Attributes:
    name: Name of the program and its shape.
    arguments: Its arguments.
    outputs: Its results, without those in the memory of donated arguments.
    temporaries: Its temporaries.
    code: The program itself.
    is_refused: Whether the compiler rejects the program alone as too large; only `temporaries` is
      known then.
    moved: Bytes that a device receives, by kind and axes.
    largest: The largest arrays that it makes: bytes, dtype and shape, operation.
    compile_s: Seconds of its compilation.
    without_triton: Whether it was compiled without Triton's products, because the compiler of a
      GPU had none for one of them while there is no device to try some.
  """

  name: str
  arguments: int = 0
  outputs: int = 0
  temporaries: int = 0
  code: int = 0
  is_refused: bool = False
  moved: tuple[Moved, ...] = ()
  largest: tuple[tuple[int, str, str], ...] = ()
  compile_s: float = 0.0
  without_triton: bool = False

  @property
  def own(self) -> int:
    """Bytes besides the arguments."""
    return self.outputs + self.temporaries + self.code


def versions() -> dict[str, str]:
  """Returns the versions of JAX and of the compilers that are installed."""
  found = {}
  for name in _COMPILERS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def compiled(
  job: CompileJob,
  mesh: jax.sharding.Mesh,
  *,
  host: Sequence[Any] | None = None,
  folder: pathlib.Path | None = None,
) -> Compiled:
  """Compiles a program for the devices of a mesh, or returns what an earlier compilation said.

  Args:
    job: Compilation; it can be lowered.
    mesh: Mesh of the program's devices.
    host: Devices of one host; None: all are of one.
    folder: Folder of the answers; None: nothing is kept.

  Raises:
    CompilationError: The compilation fails for another reason than memory.
  """
  devices = list(mesh.devices.flat)
  assert job.lower is not None, job.name
  with target.assumed(devices, devices if host is None else host):
    try:
      lowered = job.lower()
    except (NotImplementedError, ValueError) as error:
      raise explained(error, f"tracing {job.name}", "") from error
    kept = None if folder is None else folder / f"{_digest(lowered, mesh)}.json"
    if kept is not None and (found := _read(kept)) is not None:
      return dataclasses.replace(found, name=job.name)
    found = _compile(job, lowered, mesh)
  if kept is not None:
    _write(kept, found)
  return found


def default_folder() -> pathlib.Path:
  """Returns the folder of the answers in the user's cache."""
  return default_cache() / "plans"


def _digest(lowered: Any, mesh: jax.sharding.Mesh) -> str:
  first = mesh.devices.flat[0]
  facts = {
    "form": _FORM,
    "program": lowered.as_text(),
    "devices": [str(device) for device in mesh.devices.flat],
    "mesh": dict(mesh.shape),
    "kind": first.device_kind,
    "versions": versions(),
    "flags": os.environ.get("XLA_FLAGS", ""),
  }
  return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _compile(job: CompileJob, lowered: Any, mesh: jax.sharding.Mesh) -> Compiled:
  began, without_triton = time.monotonic(), False
  try:
    try:
      made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      if _NO_PRODUCT not in str(error):
        raise
      without_triton = True
      made = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
  except jax.errors.JaxRuntimeError as error:
    temporaries = refused_bytes(str(error))
    if temporaries is None:
      raise explained(error, f"compiling {job.name}", "") from error
    took = time.monotonic() - began
    return Compiled(job.name, temporaries=temporaries, is_refused=True, compile_s=took)
  took, memory, text = time.monotonic() - began, made.memory_analysis(), made.as_text()
  return Compiled(
    name=job.name,
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes,
    moved=moved(text, mesh),
    largest=tuple(
      (held.array.nbytes, f"{held.array.dtype}{list(held.array.shape)}", held.source)
      for held in hlo_collectives.largest(text)
    ),
    compile_s=took,
    without_triton=without_triton,
  )


def moved(
  hlo: str, mesh: jax.sharding.Mesh, *, place: Callable[[Any], int] | None = None
) -> tuple[Moved, ...]:
  """Returns the bytes that a device receives in one run of a program, the most first.

  Args:
    hlo: Text of the compiled program.
    mesh: Mesh of the program's devices, in their order.
    place: Function from a device to its slice or node; None: `target.place_of`.
  """
  sizes = {str(axis): size for axis, size in mesh.shape.items()}
  places = [(place or target.place_of)(device) for device in mesh.devices.flat]
  total: dict[tuple[str, str], list[float]] = {}
  for one in hlo_collectives.collectives(hlo, devices=mesh.size):
    axes = "+".join(axis for axis in sizes if axis in hlo_collectives.axes_of(one.groups, sizes))
    share = max(far_share(one.kind, [places[device] for device in group]) for group in one.groups)
    entry = total.setdefault((one.kind, axes), [0.0, 0.0, 0])
    entry[0] += one.nbytes
    entry[1] += one.nbytes * share
    entry[2] += one.times
  made = [Moved(*key, nbytes, far, int(times)) for key, (nbytes, far, times) in total.items()]
  return tuple(sorted(made, key=lambda one: -one.bytes))


def far_share(kind: str, places: Sequence[int]) -> float:
  """Returns the least share of what a device of a group receives that crosses the network.

  A gathered array has n parts. A device of k nodes receives n - 1 of them. The node receives the
  parts of the k - 1 others once, and each of its n / k devices a share of them: k - 1 parts.

  Args:
    kind: Kind of collective.
    places: Slice or node of each device of the group.
  """
  count = Counter(places)
  if len(count) < 2:
    return 0.0
  others = len(places) - 1
  if kind == "collective-permute":
    return 1.0
  if kind == "all-to-all":  # nothing of it is for several devices.
    return (len(places) - min(count.values())) / others
  return (len(count) - 1) / others


def refused_bytes(message: str) -> int | None:
  """Returns the bytes of temporaries in a TPU's out-of-memory error; None: it is another error."""
  if "RESOURCE_EXHAUSTED" not in message:
    return None
  found = re.search(r"HLO temporaries \(?([\d.]+)([KMGT]?)", message)
  return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def _read(file: pathlib.Path) -> Compiled | None:
  """Returns a kept answer; None if there is none that can be read."""
  try:
    fields: Mapping[str, Any] = json_text.parsed(file.read_bytes())
    moved_ = tuple(Moved(**one) for one in fields["moved"])
    arrays = tuple((int(n), str(what), str(where)) for n, what, where in fields["largest"])
    return Compiled(**{**fields, "moved": moved_, "largest": arrays})
  except (OSError, *json_text.UNEXPECTED):
    return None


def _write(file: pathlib.Path, found: Compiled) -> None:
  """Keeps an answer, unless the folder cannot be written."""
  with contextlib.suppress(OSError):
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace_file(file, json.dumps(dataclasses.asdict(found)))
