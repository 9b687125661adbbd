"""What the Pallas kernels for NVIDIA's Hopper share (Mosaic GPU): the launch and the interpreter.

A block has three warpgroups: two consumers, which feed the tensor cores, and a producer, which asks
the copy engine (TMA) for their operands. Of the 64 Ki registers of a multiprocessor each of 384
threads has 168; the producer gives most of its own away.
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
IS_JAX_0_10 = jax.__version_info__ < (0, 11)
# How the results of wgmma lie in threads, and what has one number for each of their rows, columns.
MATRIX = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def kernel(
  body, out_type, *, grid: dict[str, int], name: str, interpret: bool, warpgroups: int = 3
):
  """Returns a function of arrays that runs `body` on references to them and to its output.

  Args:
    body: Function of references.
    out_type: Shapes of the output.
    grid: Number of blocks along each axis; blocks along the last are launched one after another.
    name: Name of the kernel in profiles.
    interpret: Whether it runs in the interpreter, on a CPU.
    warpgroups: Warpgroups of a block, along the axis "warpgroup".
  """
  how = {}
  if interpret:
    how["interpret"] = interpreter()
  return plgpu.kernel(
    body,
    out_type=out_type,
    grid=tuple(grid.values()),
    grid_names=tuple(grid),
    num_threads=warpgroups,
    thread_name="warpgroup",
    kernel_name=name,
    compiler_params=plgpu.CompilerParams(
      approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **how,
  )


def interpreter() -> Any:
  """Returns the parameters of the interpreter that simulates threads, barriers, TMA and wgmma.

  Raises:
    NotImplementedError: This version of jax has no such interpreter.
  """
  parameters = getattr(plgpu, "InterpretGPUParams", None)
  if parameters is None:
    raise NotImplementedError(
      f"the interpreter of Mosaic GPU kernels needs jax 0.11 or later, this is {jax.__version__}"
    )
  return parameters()


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
  """Returns shared memory in the layout that wgmma reads without conflicts between banks."""
  transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def load(ref, layout=BY_ROW):
  """Returns what a reference holds; by default one number for each row of a matrix."""
  index = ((),) if IS_JAX_0_10 else ()
  return plgpu.load(ref, *index, layout=layout, optimized=False)
