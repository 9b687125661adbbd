"""Layers that differ, in one scanned program. Pure.

What differs (the window, the rotary table) is an array with one entry per layer, which the scan
passes to each layer. What is the same in all layers is a constant without an array: a model whose
layers are all of one kind has the same program as without this module.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_jax.models import layers
from grpo_jax.models.config import ModelConfig

_NO_WINDOW = 2**30  # longer than any context; differences of positions stay in int32.


class Tokens(NamedTuple):
  """The information about the tokens of packed rows that every layer receives.

  Attributes:
    cos: Cosines of the one rotary table [B T half], or of several [N B T half]; None: no table.
    sin: Sines, of the same shape.
    segment_ids: Segments [B T]; 0 is padding.
    branch_ids: Branches [B T]; None: one branch in every segment.
    positions: Positions [B T] if any layer has a window, else None.
  """

  cos: Array | None
  sin: Array | None
  segment_ids: Int[Array, "B T"]
  branch_ids: Int[Array, "B T"] | None
  positions: Int[Array, "B T"] | None


class Kinds(NamedTuple):
  """What differs between layers: [L], or a scalar in one layer; None if it is the same in all.

  Attributes:
    window: Number of tokens that a token sees.
    table: Index of the layer's rotary table in `Tokens`.
  """

  window: Array | None
  table: Array | None


class View(NamedTuple):
  """One layer's view of the tokens; see `Tokens` and `grpo_kernels.attention`."""

  cos: Float[Array, "B T half"] | None
  sin: Float[Array, "B T half"] | None
  window: Any


def tokens(
  config: ModelConfig,
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  branch_ids: Int[Array, "B T"] | None,
) -> Tokens:
  """Returns the input of every layer, computed once."""
  found = [layers.rope_angles(positions, config, table) for table in _tables(config)]
  cos, sin = zip(*found, strict=True)
  if len(found) == 1:
    angles = cos[0], sin[0]
  else:
    angles = _stacked(cos, 1.0), _stacked(sin, 0.0)
  has_window = any(kind.window is not None for kind in config.kinds)
  return Tokens(*angles, segment_ids, branch_ids, positions if has_window else None)


def kinds(config: ModelConfig) -> Kinds:
  """Returns what differs between the layers, for a scan over them."""
  windows, tables = [kind.window for kind in config.kinds], _tables(config)
  window = table = None
  if len(set(windows)) > 1:
    window = jnp.asarray([_NO_WINDOW if each is None else each for each in windows], jnp.int32)
  if len(tables) > 1:
    table = jnp.asarray([tables.index(kind.rope) for kind in config.kinds], jnp.int32)
  return Kinds(window, table)


def view(config: ModelConfig, tokens: Tokens, kind: Kinds) -> View:
  """Returns one layer's view of the tokens.

  Args:
    config: Sizes and switches.
    tokens: Input of every layer, made by `tokens`.
    kind: Entry of `kinds` for the layer.
  """
  cos, sin = tokens.cos, tokens.sin
  if kind.table is not None:
    cos, sin = (jax.lax.dynamic_index_in_dim(x, kind.table, keepdims=False) for x in (cos, sin))
  return View(cos, sin, config.kinds[0].window if kind.window is None else kind.window)


def _tables(config: ModelConfig) -> list[int | None]:
  """Returns the rotary tables that layers use, in the order of their first use."""
  return list(dict.fromkeys(kind.rope for kind in config.kinds))


def _stacked(tables: tuple[Array | None, ...], identity: float) -> Float[Array, "N B T half"]:
  """Stacks cosines or sines; layers without a table get an angle of 0."""
  like = next(table for table in tables if table is not None)
  return jnp.stack([jnp.full_like(like, identity) if x is None else x for x in tables])
