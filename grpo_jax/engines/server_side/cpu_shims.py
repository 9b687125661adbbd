"""Lets SGLang's release for CUDA serve text models on a machine without CUDA, with seeds.

Nothing of SGLang is changed on disk. `install` must run before `sglang` is imported, in the server
and in each process that it spawns. Tested with SGLang 0.5.23. These are replaced:

    triton        imported everywhere, for kernels that never run on a CPU
    sgl_kernel    the compiled kernels; no build for CPUs is published
    torchvision   imported for image models; its published build needs CUDA
    seeds         deterministic inference is offered for GPU attention only
    pinned memory the code of adapters (LoRA) asks for it, which torch refuses without a GPU
    host buffers  those of the returned experts are registered with CUDA's runtime
    processes     SGLang spawns them, and each imports everything again: 65 s of CPU time, while
                  forked ones take 32 s; there is no CUDA context here that a fork would break

Seeded sampling is exact: a token is a function of the logits, the seed and the position. The logits
are torch's: bitwise equal for equal batches, but a row's last bits may depend on how many rows are
computed with it and on the content of the prefix cache. A seed therefore gives the same completion
again, unless two tokens tie within about 1e-6 nats. SGLang's batch-invariant kernels, which exclude
that too, are Triton kernels and for GPUs only.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (SGLang and torch are in the server's environment; names are added to stubs of modules.)

ENVIRONMENT = {
  "SGLANG_USE_CPU_ENGINE": "1",  # SGLang chooses the layers by this and not by the device.
  "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads do not spin: ten times as fast on busy cores.
  "HF_HUB_OFFLINE": "1",  # the model is a local folder; no look-ups.
  "TORCHDYNAMO_DISABLE": "1",  # the sampler uses torch.compile, which needs a C++ compiler.
}
MASK_32 = 0xFFFFFFFF
BLOCK_BYTES = 1 << 18  # part of a hash computed at a time: fits the second-level cache.


def install() -> None:
  """Installs the replacements in this process."""
  for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  if importlib.util.find_spec("triton") is None:
    sys.meta_path.append(_StubFinder("triton"))
  if importlib.util.find_spec("sgl_kernel") is None:
    sys.modules["sgl_kernel"] = _MissingKernels("sgl_kernel")
  import torch

  _declare_torchvision_operators(torch)
  _define_seeded_hash(torch)
  _ignore_pinning(torch)
  _allow_seeds()
  _allow_routed_experts()
  _fork_processes()


class _Stub(types.ModuleType):
  """Replaces a module of a GPU compiler: names are stubs, calls are decorators without effect."""

  def __init__(self, name: str):
    super().__init__(name)
    self.__path__: list[str] = []  # marks a package, whose modules can be imported.

  def __getattr__(self, name: str):
    if name.startswith("__"):
      raise AttributeError(name)
    if name[:1].isupper():  # a class that may be called and subclassed.
      stub = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *a, **k: None})
    else:
      stub = _Stub(f"{self.__name__}.{name}")
    setattr(self, name, stub)
    return stub

  def __call__(self, *arguments, **keywords):
    if len(arguments) == 1 and callable(arguments[0]) and not keywords:
      return arguments[0]
    return lambda function: function


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports `root` and all modules below it as stubs."""

  def __init__(self, root: str):
    self.root = root

  def find_spec(self, fullname, path=None, target=None):
    if fullname.split(".")[0] == self.root:
      return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
    return None

  def create_module(self, spec):
    return _Stub(spec.name)

  def exec_module(self, module):
    if module.__name__ == self.root:
      module.__version__ = "0.0.0"
      # Called at import time, for the sizes of kernels.
      module.cdiv = lambda a, b: -(a // -b)
      module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1


class _MissingKernels(types.ModuleType):
  """Replaces sgl_kernel: its functions for CPUs can be imported by name, and raise when called.

  SGLang imports some in CPU mode, for speculative decoding and for moves of the cache.
  """

  def __init__(self, name: str):
    super().__init__(name)
    self.__spec__ = importlib.machinery.ModuleSpec(name, None)

  def __getattr__(self, name: str):
    if not name.endswith("_cpu"):
      raise AttributeError(name)

    def missing(*arguments, **keywords):
      raise NotImplementedError(f"sgl_kernel.{name}: there is no build of sgl_kernel for CPUs")

    return missing


def _declare_torchvision_operators(torch) -> None:
  """Declares the two operators without which `import torchvision` fails with a CPU torch.

  SGLang imports it for the image models that it could serve; text models never call them.
  """
  if not hasattr(torch.ops.torchvision, "nms"):
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
      library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


def _define_seeded_hash(torch) -> None:
  """Defines the operator that SGLang's seeded sampling calls on a CPU."""
  if hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
    return

  def operator(seed, positions, columns):
    hashed = murmur_hash32(
      seed.view(torch.int64).numpy().view("uint64"),
      positions.to(torch.int64).numpy(),
      columns.to(torch.int64).numpy(),
    )
    return torch.from_numpy(hashed)

  library = torch.library.Library("sgl_kernel", "FRAGMENT")
  library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
  library.impl("murmur_hash32_cpu", operator, "CPU")
  _KEPT.append(library)


def murmur_hash32(seed, positions, columns):
  """Computes the 32-bit MurmurHash3 of (seed, position, column), as SGLang's GPU kernel does.

  The message is four blocks of 32 bits: low and high half of the seed, position, column. All but
  the last are the same along a row.

  Args:
    seed: Seeds, uint64 [n].
    positions: Positions of the tokens in their sequences, int64 [n].
    columns: Ids of the vocabulary, int64 [m].

  Returns:
    Hashes, uint32 [n, m].

  Reference:
    Appleby, MurmurHash3_x86_32; sglang/kernels/ops/sampling/murmur_hash.py.
  """
  import numpy as np

  start = np.zeros(seed.shape, np.uint32)
  for block in (seed & np.uint64(MASK_32), seed >> np.uint64(32), positions & MASK_32):
    start = _mix(start, _scramble(block.astype(np.uint32)))
  last = _scramble((columns & MASK_32).astype(np.uint32))

  hashed = np.empty((start.size, last.size), np.uint32)
  rows = max(1, BLOCK_BYTES // max(hashed.shape[1] * 4, 1))
  for first in range(0, start.size, rows):
    h = hashed[first : first + rows]
    spare = np.empty_like(h)
    np.bitwise_xor(start[first : first + rows, None], last, out=h)
    _rotate_and_add(h, spare)
    h ^= np.uint32(16)  # the length of the message, in bytes.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
      np.right_shift(h, np.uint32(shift), out=spare)
      h ^= spare
      h *= np.uint32(factor)
    np.right_shift(h, np.uint32(16), out=spare)
    h ^= spare
  return hashed


def _scramble(block):
  """Spreads the bits of a block of the message, uint32 [...]."""
  block = block * block.dtype.type(0xCC9E2D51)
  block = (block << block.dtype.type(15)) | (block >> block.dtype.type(17))
  return block * block.dtype.type(0x1B873593)


def _mix(h, scrambled):
  """Adds a block to the hashes `h`, uint32 [...]."""
  h = h ^ scrambled
  _rotate_and_add(h, h.copy())
  return h


def _rotate_and_add(h, spare) -> None:
  """Computes h = rotl(h, 13) · 5 + 0xE6546B64 in place; `spare` is overwritten."""
  number = h.dtype.type
  spare[...] = h
  spare >>= number(19)
  h <<= number(13)
  h |= spare
  h *= number(5)
  h += number(0xE6546B64)


def _ignore_pinning(torch) -> None:
  """Makes torch ignore requests for pinned memory, from which only a GPU would profit.

  sglang/srt/lora asks for it unconditionally; reported as sgl-project/sglang#31894.
  """

  def unpinned(make):
    @functools.wraps(make)
    def made(*arguments, **keywords):
      keywords.pop("pin_memory", None)
      return make(*arguments, **keywords)

    return made

  for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
    setattr(torch, name, unpinned(getattr(torch, name)))
  torch.Tensor.pin_memory = lambda tensor, *arguments, **keywords: tensor


def _allow_seeds() -> None:
  """Allows --enable-deterministic-inference with torch's own attention (see the module's text)."""
  from sglang.srt import batch_invariant_ops
  from sglang.srt.arg_groups import choices

  choices.add_deterministic_attention_backend_choices(["torch_native"])
  choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
  # This would replace torch's matrix products by Triton kernels.
  batch_invariant_ops.enable_batch_invariant_mode = lambda enable_bmm=True: None


def _allow_routed_experts() -> None:
  """Allows --enable-return-routed-experts without CUDA.

  The buffer of the experts is allocated by a function that is chosen by the name of the device;
  for "cpu" there is none, and the default one registers the memory with CUDA's runtime.
  """
  from sglang.srt.mem_cache.pool_host import common

  common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory  # see `_ignore_pinning`.


def _fork_processes() -> None:
  """Makes the server fork its processes, whatever start method SGLang chooses."""
  choose = multiprocessing.set_start_method
  multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)


_KEPT: list[object] = []  # torch drops the operators of a library that is garbage-collected.
