"""A decode step's attention: one query of every row to its prompt's pages and to its own columns.

There is one kernel, for GPUs of the Hopper generation. Elsewhere the sampler composes
`grpo_kernels.attention.parts`, which also is what the kernel is compared with.
"""

import importlib
from typing import Any

from grpo_kernels.decode_attention.choice import IMPLEMENTATIONS, KEYS, misfit
from grpo_kernels.implementations import Chip, log_once

__all__ = ["IMPLEMENTATIONS", "KEYS", "kernel"]


def kernel(
  name: str | None,
  chip: Chip,
  dtype: Any,
  *,
  width: int,
  queries: int,
  tokens: tuple[int, ...],
) -> Any:
  """Returns the module whose `attend` runs on a chip; None if there is none.

  Args:
    name: Implementation of `grpo_kernels.attention` that the run asks for; None: it asks for none.
      Plain implementations rule out the kernel here, too.
    chip: Chip that the computation will run on.
    dtype: Dtype of queries, keys and values.
    width: Width of a head.
    queries: Queries of a key/value head.
    tokens: Tokens of a page, and columns of a row.
  """
  if chip.platform != "gpu":
    return None
  if name is not None and name not in IMPLEMENTATIONS:
    reason = f"products of XLA, since attention is {name}"
  else:
    reason = misfit("mosaic_gpu", chip, dtype, width=width, queries=queries, tokens=tokens)
  log_once("decode_attention", f"decode_attention on {chip}: {reason or 'mosaic_gpu'}")
  return None if reason else importlib.import_module("grpo_kernels.decode_attention.mosaic_gpu")
