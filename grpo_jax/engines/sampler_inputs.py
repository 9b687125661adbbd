"""What the sampler's programs take: their options, and the arrays of a call. Pure.

The host builds the arrays before each call. `kv_cache` says what the letters of their shapes mean.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import AUTOMATIC, Attention
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt

from grpo_jax.engines.options import CACHE_DTYPES
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_jax.types import ExpertShape

_Class = TypeVar("_Class")


def as_tree(cls: type[_Class]) -> type[_Class]:
  """Registers a dataclass as a tree; it is unflattened without type checks of its fields."""
  names = list(cls.__annotations__)

  def flatten(x):
    return [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in names], None

  def unflatten(_, leaves):
    return unchecked(cls, **dict(zip(names, leaves, strict=True)))

  jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
  return cls


def unchecked(cls: type[_Class], **fields: Any) -> _Class:
  """Makes a dataclass whose fields are not type-checked, because they may describe arrays.

  Args:
    cls: Frozen dataclass.
    **fields: Values of all fields.
  """
  made = object.__new__(cls)
  for name, field in fields.items():
    object.__setattr__(made, name, field)
  return made


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
  """Options that the programs are compiled for, in addition to shapes; hashable.

  Attributes:
    config: Sizes of the model.
    products: Options of the matrix products.
    chunk: Largest number of decode steps of one call.
    num_valid: Number of token ids that may be sampled; see `sampling.sample`.
    report_truncated: Whether all logprobs are of the truncated distribution; see `sampling.sample`.
    group: Number of rows that share a prompt, G.
    form: Form of the cache; see `cache_forms`.
    has_filters: Whether a row may have top-k, top-p or min-p. None: the program looks, which makes
      an accelerator wait for the host.
    pages_at_once: Number of pages that one round of the loop over pages reads.
    mesh: Mesh of the devices; None: one device.
    head_axis: Mesh axes over which key/value heads are split.
    row_axes: Mesh axes over which rows are split, if their number is divisible.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    attention: Choice of attention within a prefilled chunk.
    unmerged: Whether the adapter of a `LowRank` kernel stays apart from it; False: they are merged.
    experts: Shape of the records of experts that the programs return; None: they return none.
    cache_dtype: Dtype of stored keys and values, "bfloat16" or "int8"; None: the compute dtype.
  """

  config: ModelConfig
  products: Products
  chunk: int
  num_valid: int | None = None
  report_truncated: bool = False
  group: int = 8
  form: str = "ring"
  has_filters: bool | None = None
  pages_at_once: int = 1
  mesh: Mesh | None = None
  head_axis: Any = None
  row_axes: tuple[str, ...] = ()
  matmul_precision: str | None = None
  attention: Attention = AUTOMATIC
  unmerged: bool = False
  experts: ExpertShape | None = None
  cache_dtype: str | None = None

  def __post_init__(self):
    """Checks the dtype of the cache.

    Raises:
      ValueError: A cache cannot have this dtype.
    """
    if self.cache_dtype not in (None, *CACHE_DTYPES):
      raise ValueError(
        f"engine.cache_dtype must be one of {CACHE_DTYPES} or None, got {self.cache_dtype!r}"
      )


@as_tree
@dataclasses.dataclass(frozen=True)
class Tiles:
  """The rows of prompts that several rows share, at most G in a tile; for the form "ring"."""

  places: Int[Array | np.ndarray, " R"]  # place in the tiles: tile · G + number; -1: in no tile.
  rows: Int[Array | np.ndarray, "A G"]  # row at each place.
  pages: Int[Array | np.ndarray, "A W"]  # pages of the tile's prompt, as in the rows' `Tables`.
  lengths: Int[Array | np.ndarray, " A"]  # tokens in these pages.


@as_tree
@dataclasses.dataclass(frozen=True)
class Readers:
  """The rows that attend to each page, at most G; for the form "rows"."""

  rows: Int[Array | np.ndarray, "N G"]  # row at each place.
  starts: Int[Array | np.ndarray, " N"]  # position of the first token of the page in its prompt.
  lengths: Int[Array | np.ndarray, " N"]  # tokens of the page.
  places: Int[
    Array | np.ndarray, "R W"
  ]  # place at each of the row's pages: page · G + number; or -1.


@as_tree
@dataclasses.dataclass(frozen=True)
class Tables:
  """The pages of prompts in the layers of one window; see `prompt_pages`."""

  pages: Int[Array | np.ndarray, "*B W"]  # in the order of positions.
  starts: Int[Array | np.ndarray, "*B"] | None  # first position in them; None: 0, without a window.

  def local(self, positions: Any) -> Any:
    """Returns positions counted from the first token of the pages.

    Args:
      positions: Positions [*B ...]; None: there is no window.
    """
    if self.starts is None or positions is None:
      return positions
    starts = jnp.asarray(self.starts)
    return positions - starts.reshape(starts.shape + (1,) * (positions.ndim - starts.ndim))


@as_tree
@dataclasses.dataclass(frozen=True)
class RowPrompts:
  """The prompts of all rows in the layers of one window."""

  tables: Tables  # [R W].
  shared: Any  # which rows attend to which pages together: `Tiles` or `Readers`, by form.


@as_tree
@dataclasses.dataclass(frozen=True)
class RowStates:
  """The state of every row between chunks; built on the host before each chunk."""

  tokens: Int[Array | np.ndarray, " R"]  # next token to feed to the model.
  prompt_lengths: Int[Array | np.ndarray, " R"]  # tokens in the prompt's pages.
  prompts: tuple[RowPrompts, ...]  # of each window of the layers, in the order of first use.
  moves: Int[Array | np.ndarray, "R 2"]  # (from, to) of rows to move in the ring first.
  num_moves: Int[Array | np.ndarray, ""]  # number of valid entries of `moves`.
  step: Int[Array | np.ndarray, ""]  # number of the next step, from which its column follows.
  lengths: Int[Array | np.ndarray, " R"]  # tokens in the ring = tokens sampled so far.
  remaining: Int[Array | np.ndarray, " R"]  # tokens that may still be sampled; 0: the row is idle.
  seeds: UInt[Array | np.ndarray, "R 2"]
  temperature: Float[Array | np.ndarray, " R"]
  top_k: Int[Array | np.ndarray, " R"]
  top_p: Float[Array | np.ndarray, " R"]
  min_p: Float[Array | np.ndarray, " R"]
  reports_truncated: Bool[Array | np.ndarray, " R"]  # see `SamplingParams.reports_truncated`.
  stop_ids: Int[Array | np.ndarray, "R n"]  # padded with -1.


@as_tree
@dataclasses.dataclass(frozen=True)
class PrefillChunk:
  """The n tokens that are prefilled at once, one prompt after another.

  Only the first prompt may have begun in an earlier chunk.
  """

  tokens: Int[Array | np.ndarray, " n"]
  segment_ids: Int[Array | np.ndarray, " n"]  # 1 for the first prompt, then 2, ...; 0 is padding.
  positions: Int[Array | np.ndarray, " n"]
  # Of each window: page for each token's keys and values; N for padding, and for tokens that no
  # later chunk sees.
  pages: tuple[Int[Array | np.ndarray, " n"], ...]
  past_pages: tuple[Tables, ...]  # of each window: pages of the first prompt, before this chunk.
  past: Int[Array | np.ndarray, ""]  # tokens of the first prompt in earlier chunks.


@as_tree
@dataclasses.dataclass(frozen=True)
class Pieces:
  """The n tokens of completions that are read again at once, in S pieces of one row each.

  The pieces of a row follow each other, and only the last of them is padded.
  """

  tokens: Int[Array | np.ndarray, " n"]
  segment_ids: Int[Array | np.ndarray, " n"]  # 1 + row; 0 is padding.
  positions: Int[Array | np.ndarray, " n"]
  steps: Int[Array | np.ndarray, " n"]  # step whose column holds the token; -1: padding.
  rows: Int[Array | np.ndarray, " S"]
  pages: tuple[Tables, ...]  # of each window: pages of the row's prompt, [S W].
  prompt_lengths: Int[Array | np.ndarray, " S"]  # tokens in these pages.
  lengths: Int[Array | np.ndarray, " S"]  # tokens of the row in the ring.
  past: Int[Array | np.ndarray, " S"]  # the first of them, which earlier calls have read again.
  step: Int[Array | np.ndarray, ""]  # number of the next decode step.
