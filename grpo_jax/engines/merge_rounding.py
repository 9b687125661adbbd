"""Measures how much of an adapter is lost where it is merged with rounded weights."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.models import lora
from grpo_jax.models.products import LowRank

_log = logging.getLogger(__name__)
_LEAST = 0.5  # below it merged weights are nearly the base.
_REMEDY = "set model.lora.sync='adapter'"
_OF_ENGINE = (
  f"the engine samples from nearly the frozen weights, and not from what is trained; {_REMEDY}"
)
# The trainer merges and rounds them as the engine does.
_OF_EXPERTS = (
  "experts compute with nearly their frozen weights, in the update, too, until the adapter has"
  " grown; set model.compute_dtype='float32', or model.lora.targets=('q', 'k', 'v', 'o')"
)


class MergedShare:
  """Measures `lora.merged_share` whenever an engine loads weights; warns once if it is low."""

  def __init__(self, dtype: Any):
    """Describes the measurement.

    Args:
      dtype: Dtype of the engine's weights. In float32 nothing is measured, as nothing is lost.
    """
    self._dtype = jnp.dtype(dtype)
    self._share: float | None = None
    self._warns = True
    measure = functools.partial(lora.merged_share, dtype=self._dtype)
    self._program = Program(jax.jit(measure), name="share of the adapter", remedy=_REMEDY)

  def jobs(self, params: Mapping[str, Any], *, is_apart: bool = False) -> list[CompileJob]:
    """Returns the compilations of `measure`."""
    kernels = self._kernels(params, is_apart)
    return [self._program.job(kernels)] if kernels else []

  def measure(self, params: Mapping[str, Any], *, is_apart: bool = False) -> None:
    """Measures weights that are merged. All processes of a run must call it at the same time.

    Args:
      params: Weights that an engine loads; without `LowRank` kernels nothing is measured.
      is_apart: Whether adapters stay apart, but for those of experts.
    """
    kernels = self._kernels(params, is_apart)
    if not kernels:
      self._share = None
      return
    self._share = float(self._program(kernels))
    if self._share < _LEAST and self._warns:
      self._warns = False
      _log.warning(
        "%.0f %% of the adapter survive merging with weights in %s (lora/merged_share): %s",
        100 * self._share,
        self._dtype.name,
        _OF_EXPERTS if lora.merged_always(kernels) else _OF_ENGINE,
      )

  def metrics(self) -> dict[str, float]:
    """Returns the share of the last weights; empty if there is none."""
    return {} if self._share is None else {"lora/merged_share": self._share}

  def _kernels(self, params: Mapping[str, Any], is_apart: bool) -> dict[str, LowRank]:
    """Returns the kernels whose merged weights are rounded."""
    if self._dtype == jnp.float32:
      return {}
    stack = params["layers"]
    if is_apart:
      return lora.merged_always(stack)
    return {name: x for name, x in stack.items() if isinstance(x, LowRank)}
