"""Layers that differ, in one scanned program. Pure.

What differs (the window, the rotary table) is computed once for each kind of layer, and the scan
passes the number of its kind to each layer. A model whose layers are all of one kind has the same
program as without this module.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from grpo_kernels.attention import Attention, Visible
from grpo_kernels.attention.visible import WHOLE, visible
from jaxtyping import Array, Float, Int

from grpo_jax.models import rotary
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products


class Tokens(NamedTuple):
  """The information about the tokens of packed rows that every layer receives.

  Attributes:
    cos: Cosines of the one rotary table [B T half], or of several [N B T half]; None: no table.
    sin: Sines, of the same shape.
    seen: Keys that each token sees in layers of the one window, or of several [N ...].
  """

  cos: Array | None
  sin: Array | None
  seen: Visible


class Kinds(NamedTuple):
  """What differs between layers: [L], or a scalar in one layer; None if it is the same in all.

  Attributes:
    window: Index of the layer's window in `Tokens`.
    table: Index of the layer's rotary table in `Tokens`.
    experts: Experts to use, [L B T k]; None: the routers choose, or there are none.
  """

  window: Array | None
  table: Array | None
  experts: Array | None = None


class View(NamedTuple):
  """One layer's view of the tokens; see `Tokens` and `grpo_kernels.attention`."""

  cos: Float[Array, "B T half"] | None
  sin: Float[Array, "B T half"] | None
  seen: Visible


def tokens(
  config: ModelConfig,
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  branch_ids: Int[Array, "B T"] | None,
  *,
  attention: Attention,
  products: Products,
  order: Int[Array, "B T"] | None = None,
) -> Tokens:
  """Returns the input of every layer, computed once.

  Args:
    config: Sizes and switches.
    positions: Position of each token in prompt + completion.
    segment_ids: Segment of each token; 0 is padding.
    branch_ids: Branch of each token; None: one branch in every segment.
    attention: Attention of the layers.
    products: Options of matrix products.
    order: Place of each slot, if rows are dealt out in parts; None: they are whole.
  """
  places = positions
  if order is not None:
    positions = attention.parts.dealt(positions, order)
  found = [rotary.angles(positions, config, table) for table in _tables(config)]
  cos, sin = zip(*found, strict=True)
  if len(found) == 1:
    angles = cos[0], sin[0]
  else:
    angles = _stacked(cos, 1.0), _stacked(sin, 0.0)
  windows = _windows(config)
  if len(windows) > 1:
    windows = [WHOLE if window is None else window for window in windows]
  settings = {"width": config.head_dim, "products": products}

  def seen_within(window: int | None) -> Visible:
    seen = visible(segment_ids, branch_ids, positions=places, window=window)
    if order is not None:
      seen = attention.dealt(seen, order)
    return attention.prepared(seen, **settings)

  seen = [seen_within(window) for window in windows]
  return Tokens(*angles, seen[0] if len(seen) == 1 else jax.tree.map(_stack, *seen))


def kinds(config: ModelConfig, experts: Int[Array, "B T L k"] | None = None) -> Kinds:
  """Returns what differs between the layers, for a scan over them.

  Args:
    config: Sizes and switches.
    experts: Experts of each token in each layer; None: the routers choose, or there are none.

  Raises:
    ValueError: Experts are given, but not for this model's layers.
  """
  windows, tables = _windows(config), _tables(config)
  numbers = lambda found: jnp.asarray(found, jnp.int32)
  window = table = None
  if len(windows) > 1:
    window = numbers([windows.index(kind.window) for kind in config.kinds])
  if len(tables) > 1:
    table = numbers([tables.index(kind.rope) for kind in config.kinds])
  if experts is not None:
    mixture, given = config.mixture, experts.shape[2:]
    wanted = None if mixture is None else (config.num_layers, mixture.experts_per_token)
    if given != wanted:
      raise ValueError(f"experts [layers, k] {list(given)} are given to a model with {wanted}")
    experts = jnp.moveaxis(experts, 2, 0)
  return Kinds(window, table, experts)


def view(tokens: Tokens, kind: Kinds) -> View:
  """Returns one layer's view of the tokens.

  Args:
    tokens: Input of every layer, made by `tokens`.
    kind: Entry of `kinds` for the layer.
  """
  cos, sin, seen = tokens
  if kind.table is not None:
    cos, sin = _entry((cos, sin), kind.table)
  if kind.window is not None:
    seen = _entry(seen, kind.window)
  return View(cos, sin, seen)


def _entry(stacked: Any, index: Array) -> Any:
  """Returns an entry of all arrays of a tree."""
  at = lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
  return jax.tree.map(at, stacked)


def _stack(*arrays: Array) -> Array:
  return jnp.stack(arrays)


def _windows(config: ModelConfig) -> list[int | None]:
  """Returns the windows of the layers, in the order of their first use."""
  return list(dict.fromkeys(kind.window for kind in config.kinds))


def _tables(config: ModelConfig) -> list[int | None]:
  """Returns the rotary tables that layers use, in the order of their first use."""
  return list(dict.fromkeys(kind.rope for kind in config.kinds))


def _stacked(tables: tuple[Array | None, ...], identity: float) -> Float[Array, "N B T half"]:
  """Stacks cosines or sines; layers without a table get an angle of 0."""
  like = next(table for table in tables if table is not None)
  return jnp.stack([jnp.full_like(like, identity) if x is None else x for x in tables])
