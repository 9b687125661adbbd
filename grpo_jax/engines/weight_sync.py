"""What the embedded sampler copies of the trainer's parameters at each sync, and what it keeps."""

import dataclasses
import math
import operator
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from grpo_jax.compilation.programs import CompileJob
from grpo_jax.engines import local_weights, merge_rounding, sampler_weights
from grpo_jax.engines.sampler_inputs import ProgramOptions
from grpo_jax.engines.sampler_weights import SamplerWeights
from grpo_jax.models import lora


@dataclasses.dataclass(frozen=True)
class SyncedWeights:
  """What `WeightSync.copied` makes of parameters.

  Attributes:
    options: Options for the weights.
    weights: The weights.
    sync_bytes: Bytes copied.
    copy_s: Seconds that copying took.
  """

  options: ProgramOptions
  weights: SamplerWeights
  sync_bytes: int
  copy_s: float

  def metrics(self) -> dict[str, float]:
    """Returns what the sync took."""
    return {"perf/sync_copy_s": self.copy_s, "perf/sync_bytes": float(self.sync_bytes)}


class WeightSync:
  """Makes the sampler's weights of the trainer's parameters, whenever they are loaded.

  The copy of a frozen base is kept, so that later only the adapter is copied.
  """

  def __init__(
    self,
    options: ProgramOptions,
    *,
    unmerged: bool | None,
    copy_weights: bool,
    devices: Sequence[Any] | None,
  ):
    """Makes it; nothing is copied.

    Args:
      options: Options of the sampler's programs. The mesh, and whether adapters stay apart, are set
        for the parameters.
      unmerged: Whether adapters stay apart from their base; None: where merging would lose some of
        them.
      copy_weights: Whether to copy the embedding and the head too.
      devices: Devices of this process to sample on; None: those of the parameters.
    """
    self._options = options
    self._unmerged = unmerged
    self._copy_weights = copy_weights
    self._devices = devices
    self._merged_share = merge_rounding.MergedShare(options.products.compute_dtype)
    self._gathering: local_weights.Copies | None = None  # None: not needed so far.
    self._kept: _Kept | None = None  # None: unless unmerged.

  def copied(self, params: Any) -> SyncedWeights:
    """Returns the sampler's weights, once they are computed.

    Args:
      params: The trainer's parameters, as in `JaxSampler.load_weights`.
    """
    began = time.perf_counter()
    gathering = self._gathering_of(params)
    options = self._options_for(gathering.local if gathering else params)
    weights, copies = self._copied(params, gathering, options)
    weights = jax.block_until_ready(weights)
    took = time.perf_counter() - began
    self._merged_share.measure(params, is_apart=options.unmerged)
    return SyncedWeights(options, weights, _bytes_beside(params, copies), took)

  def described(self, params: Any) -> tuple[SamplerWeights, ProgramOptions]:
    """Returns shapes, dtypes and shardings of the weights, and the options for them.

    Args:
      params: Parameters: arrays, or `jax.ShapeDtypeStruct`s with shardings.
    """
    gathering = self._gathering_of(params)
    if gathering is None:
      options = self._options_for(params)
      return sampler_weights.described(params, options), options
    options = self._options_for(gathering.local)
    return gathering.described(options), options

  def jobs(self, params: Any, options: ProgramOptions) -> list[CompileJob]:
    """Returns the compilations of what `copied` runs.

    Args:
      params: Parameters, as in `described`.
      options: The options for them, which `described` returns.
    """
    gathering = self._gathering_of(params)
    first = [] if gathering is None else gathering.jobs(options)
    return [*first, *self._merged_share.jobs(params, is_apart=options.unmerged)]

  def metrics(self) -> dict[str, float]:
    """Returns what merging with rounded weights has lost; empty if nothing was merged."""
    return self._merged_share.metrics()

  def forget_base(self) -> None:
    """Frees the copy of a base."""
    self._kept = None

  def _options_for(self, params: Any) -> ProgramOptions:
    """Returns the options for parameters on the devices of this process."""
    unmerged = self._unmerged
    if unmerged is None:
      is_rounded = self._options.products.compute_dtype != jnp.float32
      unmerged = is_rounded or lora.has_quantized_base(params)
    options = dataclasses.replace(self._options, unmerged=unmerged and lora.has_adapter(params))
    return _with_sharding(options, params)

  def _gathering_of(self, params: Any) -> local_weights.Copies | None:
    """Returns what copies parameters to other devices; None if they are where this samples."""
    if self._devices is None and not local_weights.is_spread(params):
      return None
    if self._gathering is None or not self._gathering.fits(params):
      if self._devices is None:
        self._gathering = local_weights.Gathering(params, self._options)
      else:
        self._gathering = local_weights.Moving(params, self._options, self._devices)
    return self._gathering

  def _copied(
    self, params: Any, gathering: local_weights.Copies | None, options: ProgramOptions
  ) -> tuple[SamplerWeights, Any]:
    """Returns the sampler's weights, and those of their arrays that are not an earlier copy."""
    if not options.unmerged:
      self._kept = None
      weights = self._copied_whole(params, gathering, options)
      return weights, weights
    base = lora.base_of(params)
    if self._kept is None or not self._kept.is_of(base):
      self._kept = None  # freed first.
      weights = self._copied_whole(params, gathering, options)
      self._kept = _Kept(base, dataclasses.replace(weights, adapters=[]))
      return weights, weights
    copy = sampler_weights.adapters if gathering is None else gathering.adapters
    adapters = copy(params, options)
    return dataclasses.replace(self._kept.weights, adapters=adapters), adapters

  def _copied_whole(
    self, params: Any, gathering: local_weights.Copies | None, options: ProgramOptions
  ) -> SamplerWeights:
    if gathering is not None:
      return gathering(params, options)
    weights = sampler_weights.split_layers(params, options)
    return _with_own_arrays(weights) if self._copy_weights else weights


def _with_sharding(options: ProgramOptions, params: Any) -> ProgramOptions:
  """Splits the caches' heads over the mesh axes of the key projection, rows over the others."""
  sharding = params["layers"]["k"].sharding
  if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
    return dataclasses.replace(options, mesh=None, head_axis=None, row_axes=())
  mesh, axis = sharding.mesh, (*sharding.spec, None, None, None)[2]
  assert isinstance(mesh, Mesh)  # arrays have concrete meshes.
  names = (axis,) if isinstance(axis, str) else axis or ()
  parts = math.prod(mesh.shape[name] for name in names)
  if options.config.num_kv_heads % parts:
    names, axis = (), None
  others = tuple(name for name in mesh.axis_names if name not in names)
  return dataclasses.replace(options, mesh=mesh, head_axis=axis, row_axes=others)


@dataclasses.dataclass(frozen=True)
class _Kept:
  """The copy of a base that stays when the adapter changes.

  Attributes:
    base: The trainer's arrays, which are never donated.
    weights: Copy of them, without adapters.
  """

  base: Any
  weights: SamplerWeights

  def is_of(self, base: Any) -> bool:
    """Returns whether this is a copy of these very arrays."""
    own, others = jax.tree.leaves(self.base), jax.tree.leaves(base)
    return len(own) == len(others) and all(map(operator.is_, own, others))


def _bytes_beside(known: Any, arrays: Any) -> int:
  """Returns the bytes on this process of arrays, without those that are among the known ones."""
  ids = set(map(id, jax.tree.leaves(known)))
  new = {id(x): x for x in jax.tree.leaves(arrays) if id(x) not in ids}
  return sum(part.data.nbytes for x in new.values() for part in x.addressable_shards)


def _with_own_arrays(weights: SamplerWeights) -> SamplerWeights:
  """Copies the arrays shared with the trainer; a tied head stays tied."""
  embed = jnp.copy(weights.embed)
  head = embed if weights.head is weights.embed else jnp.copy(weights.head)
  own = {"embed": embed, "head": head, "final_norm": jnp.copy(weights.final_norm)}
  return dataclasses.replace(weights, **own)
