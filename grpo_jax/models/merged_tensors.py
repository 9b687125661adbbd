"""The weights of a base with an adapter, merged one tensor at a time on the host (I/O)."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo_jax.models import leaves, lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.safetensors import Tensors


@runtime_checkable
class StoredAdapter(Protocol):
  """An adapter in a file, read one layer at a time."""

  @property
  def options(self) -> lora.AdapterOptions:
    """Returns the options of the adapter."""
    ...

  def read(self, kernel: str, part: str, layer: int) -> np.ndarray:
    """Returns A [i r] (part "a") or B [r o] (part "b") of a kernel in a layer, in float32.

    Those of experts are [X i r] and [X r o]; see `lora.holder` for the kernels that have an A.
    """
    ...


class MergedTensors:
  """Merged weights W + s A B as `safetensors.Tensors`: Hugging Face's names and layout, in float32.

  Only the parts of one kernel are kept until another one is read, as readers take several parts of
  each tensor.
  """

  def __init__(
    self,
    base: Tensors,
    adapter: StoredAdapter,
    config: ModelConfig,
    *,
    rounded: Callable[[np.ndarray, leaves.Leaf], np.ndarray],
  ):
    """Makes the tensors; nothing is read.

    Args:
      base: Tensors of the base.
      adapter: Adapter of the base.
      config: Sizes of the base.
      rounded: Function (rows of a tensor of the base as in the file, its leaf) → their values in
        float32, rounded as the frozen base of training is.
    """
    self._base, self._adapter, self._rounded = base, adapter, rounded
    self._stored = {stored.name: stored for stored in leaves.stored(config)}
    self._kernels = frozenset(lora.kernels(config, adapter.options))
    self._last: tuple[Any, Any] = None, None

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every tensor, by its Hugging Face name."""
    return {name: stored.shape for name, stored in self._stored.items()}

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Returns a tensor, or some of its rows, in float32."""
    stored = self._stored[name]
    values = self._rounded(self._base.read(name, rows), stored.leaf)
    kernel = stored.path[-1]
    if stored.layer is None or kernel not in self._kernels:
      return values
    a, b = self._parts(kernel, stored.layer)
    if stored.expert is not None:
      a, b = a[stored.expert], b[stored.expert]
    product = b.T[rows] @ a.T  # files hold kernels as [out, in].
    product *= np.float32(self._adapter.options.scale)
    product += values
    return product

  def _parts(self, kernel: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    if self._last[0] != (kernel, layer):
      self._last = None, None  # never those of two kernels.
      a, b = (self._adapter.read(lora.holder(kernel, part), part, layer) for part in ("a", "b"))
      self._last = (kernel, layer), (a, b)
    return self._last[1]
