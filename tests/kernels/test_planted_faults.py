"""Faults put in on purpose: the conformance suite must see each of them.

A fault is a module whose source has one piece replaced, or a function of it replaced. Each check
passes on the module as it is.
"""

import importlib
import importlib.util
import sys

import conformance
import jax
import jax.numpy as jnp
import pytest
from grpo_kernels.linear_logprobs import core


def with_fault(monkeypatch, name, right, wrong):
  """Returns the module of an implementation with one piece of its source replaced."""
  found = importlib.util.find_spec(f"grpo_kernels.linear_logprobs.{name}")
  source = found.loader.get_source(found.name)
  assert source.count(right) == 1, f"{name} no longer has exactly one {right!r}"
  faulty = importlib.util.module_from_spec(found)
  monkeypatch.setitem(sys.modules, f"{name}_with_a_fault", faulty)
  faulty.__name__ = f"{name}_with_a_fault"
  exec(compile(source.replace(right, wrong), found.origin, "exec"), faulty.__dict__)
  return faulty


CHUNKED_FAULTS = {
  "dropped-tail": (
    "return one(carry, jnp.int32(whole * chunk), rest) if rest else carry",
    "return carry",
  ),
  "wrong-chunk-offset": ("dtype=jnp.int32) * chunk", "dtype=jnp.int32) * (chunk - 1)"),
  "gradient-written-elsewhere": (
    "update_slice_in_dim(d_head, d_weights, first,",
    "update_slice_in_dim(d_head, d_weights, first + 1,",
  ),
  "sum-not-rescaled": ("total = scale * carry.total", "total = carry.total"),
  "moment-about-the-old-maximum": (
    "before = scale * (carry.moment + carry.total * change)",
    "before = scale * carry.moment",
  ),
  "gradient-without-temperature": (
    "d_logits = (d_logits / settings.temperature)",
    "d_logits = (d_logits)",
  ),
}


@pytest.mark.parametrize("fault", list(CHUNKED_FAULTS))
def test_fault_in_the_chunked_form_is_seen(monkeypatch, fault):
  # 301 columns are 3 chunks of 76 and one of 73.
  sizes = {"n": 5, "d": 8, "v": 301, "dtype": "float32", "temperature": 0.3}
  conformance.check(conformance.operation("xla_chunked"), **sizes)
  faulty = with_fault(monkeypatch, "xla_chunked", *CHUNKED_FAULTS[fault])
  operate = core.entry(faulty)
  with pytest.raises(AssertionError):
    conformance.check(operate, **sizes)


# Module, function, what stands in its place.
TPU_FAULTS = {
  "dropped-tail-tile": ("pallas_tpu_tiles", "tiles_over", lambda size, tile: max(1, size // tile)),
  "wrong-chunk-offset": (
    "pallas_tpu_tiles",
    "chunk_start",
    lambda index, chunk: index * (chunk // 2),
  ),
  "unmasked-tail": ("pallas_tpu_kernels", "is_column", lambda column, limit: column >= 0),
  "no-temperature": ("pallas_tpu_kernels", "_tempered", lambda settings, logits: logits),
  "facts-of-the-next-token": (
    "pallas_tpu_kernels",
    "_as_column",
    lambda row: jnp.roll(jnp.broadcast_to(row, (128, row.shape[1])).T, 1, axis=0),
  ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", [None, *TPU_FAULTS])
def test_fault_in_the_tpu_kernels_is_seen(monkeypatch, fault):
  # 1200 columns are two chunks of two tiles, and a ragged tile.
  tiles = importlib.import_module("grpo_kernels.linear_logprobs.pallas_tpu_tiles").Tiles(
    rows=128, columns=256, chunk=512, vmem_limit_bytes=1 << 20
  )
  small = conformance.module("pallas_tpu").PallasTpu(tiles=tiles)
  operate = conformance.operation("pallas_tpu", small)
  sizes = {"n": 5, "d": 16, "v": 1200, "dtype": "float32", "temperature": 0.7}
  if fault is None:
    conformance.check(operate, **sizes)
    return
  module, name, wrong = TPU_FAULTS[fault]
  monkeypatch.setattr(f"grpo_kernels.linear_logprobs.{module}.{name}", wrong)
  with pytest.raises(AssertionError):
    conformance.check(operate, **sizes)


# Module, function, what stands in its place.
GPU_FAULTS = {
  "missing-wait-for-a-free-slot": ("mosaic_gpu_kernels", "await_free", lambda *_: None),
  "missing-wait-for-a-copy": ("mosaic_gpu_kernels", "await_full", lambda *_: None),
  "dropped-tail-tile": (
    "mosaic_gpu_kernels",
    "live_tiles",
    lambda columns, tile: jax.lax.div(columns, tile),
  ),
  "wrong-chunk-offset": ("mosaic_gpu", "chunk_start", lambda index, chunk: index * (chunk - 64)),
}


@pytest.mark.parametrize("name", conformance.parametrised("mosaic_gpu"))
@pytest.mark.parametrize("fault", [None, *GPU_FAULTS])
def test_fault_in_the_hopper_kernels_is_seen(monkeypatch, name, fault):
  # 333 columns are two chunks of two tiles, and two tiles, of which the last is ragged.
  tiles = importlib.import_module("grpo_kernels.linear_logprobs.mosaic_gpu_tiles").Tiles(
    rows=128, columns=64, stages=2, lead=1, group=2, splits=3, chunk=128, band=2, processors=3
  )
  operate = conformance.operation(name, conformance.module(name).Kernels(tiles))
  sizes = {"n": 5, "d": 192, "v": 333, "dtype": "bfloat16", "temperature": 0.7}
  if fault is None:
    conformance.check(operate, **sizes)
    return
  module, function, wrong = GPU_FAULTS[fault]
  monkeypatch.setattr(f"grpo_kernels.linear_logprobs.{module}.{function}", wrong)
  try:
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
      conformance.check(operate, **sizes)
  finally:
    # As the interpreter asks for after an error.
    interpreter = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
    importlib.import_module(interpreter).reset_gpu_interpret_mode_state()
