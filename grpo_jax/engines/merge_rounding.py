"""Measures how much of an adapter an engine loses that merges it with rounded weights."""

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
_LEAST = 0.5  # below it the engine samples from nearly the base.
_REMEDY = "set model.lora.sync='adapter'"


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

  def jobs(self, params: Mapping[str, Any]) -> list[CompileJob]:
    """Returns the compilations of `measure`."""
    kernels = self._kernels(params)
    return [self._program.job(kernels)] if kernels else []

  def measure(self, params: Mapping[str, Any]) -> None:
    """Measures weights that are merged. All processes of a run must call it at the same time.

    Args:
      params: Weights that an engine loads; without `LowRank` kernels nothing is measured.
    """
    kernels = self._kernels(params)
    if not kernels:
      self._share = None
      return
    self._share = float(self._program(kernels))
    if self._share < _LEAST and self._warns:
      self._warns = False
      _log.warning(
        "%.0f %% of the adapter survive merging with weights in %s (lora/merged_share): the engine"
        " samples from nearly the frozen weights, and not from what is trained; %s",
        100 * self._share,
        self._dtype.name,
        _REMEDY,
      )

  def metrics(self) -> dict[str, float]:
    """Returns the share of the last weights; empty if there is none."""
    return {} if self._share is None else {"lora/merged_share": self._share}

  def _kernels(self, params: Mapping[str, Any]) -> dict[str, LowRank]:
    """Returns the kernels whose merged weights are rounded."""
    if self._dtype == jnp.float32:
      return {}
    return {name: x for name, x in params["layers"].items() if isinstance(x, LowRank)}
