"""LoRA: which kernels have an adapter, its arrays, and the weights that it makes with a base. Pure.

An adapter is the tree {kernel: {"a": [L i r], "b": [L r o]}} of float32 arrays, by the names of
`leaves.layer`, stacked over the layers as the kernels are. With it a kernel is W + s A B. Kernels
of experts have one A and one B for each expert, [L X i r] and [L X r o], and are always merged.

Gate and up of experts are one tensor in transformers, and PEFT gives it one adapter. So they have
one A, which is that of gate; see `holder`.

Reference:
  Hu et al. 2021, "LoRA", arXiv:2106.09685; Kalajdzievski 2023, "rsLoRA", arXiv:2312.03732, for the
  rank-stabilised scale.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import rounding
from jaxtyping import Array

from grpo_jax.models import leaves, quantized
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.leaves import Leaf
from grpo_jax.models.options import ALL, LoraOptions
from grpo_jax.models.products import LowRank
from grpo_jax.values import names as valid_names

# Kernel → {"a": [L i r], "b": [L r o]}; with experts [L X i r] and [L X r o].
Adapter = dict[str, dict[str, Array]]

# Kernel → its name in Hugging Face's modules, by which targets may also be given.
MODULES = {
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
# Kernel of the expert that computes every token → its module.
SHARED_MODULES = dict(
  zip(
    leaves.SHARED,
    [f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")],
    strict=True,
  )
)
# Kernel of experts → the parameter of transformers' modules that it is in.
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EXPERT_PARAMETERS = dict(zip(leaves.EXPERTS, (GATE_UP, GATE_UP, DOWN), strict=True))
# Kernel of the MLP → those that a mixture has in its place.
_IN_MIXTURES = {
  name: (expert, shared)
  for name, expert, shared in zip(
    ("gate", "up", "down"), leaves.EXPERTS, leaves.SHARED, strict=True
  )
}


@dataclasses.dataclass(frozen=True)
class AdapterOptions:
  """What an adapter is; hashable.

  Attributes:
    rank: Rank r of every product A B.
    alpha: Numerator α of the scale.
    targets: Kernels with an adapter: "all", names, or patterns; see `targets`.
    rank_stabilized: Whether the scale is α / √r and not α / r.
    base_dtype: Dtype of the frozen base: "bfloat16", "float32", "int8" or "nf4".
  """

  rank: int
  alpha: float = LoraOptions.alpha
  targets: tuple[str, ...] = LoraOptions.targets
  rank_stabilized: bool = LoraOptions.rank_stabilized
  base_dtype: str = LoraOptions.base_dtype

  @property
  def scale(self) -> float:
    """The factor s of A B."""
    return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def targets(patterns: Sequence[str]) -> tuple[str, ...]:
  """Returns the kernels that patterns stand for, in the order of `MODULES`.

  "gate", "up" and "down" are those of every MLP in a layer: of a mixture, its experts and the
  shared one. `kernels` says which a model has.

  Args:
    patterns: "all"; names of kernels ("q", "gate"); names of modules ("q_proj",
      "self_attn.q_proj", "mlp.experts.gate_up_proj"); or shell patterns of either ("*_proj",
      "mlp.*", "mlp.experts.*").

  Raises:
    ValueError: A pattern stands for no kernel, or there is no pattern.
  """
  if not patterns:
    raise ValueError("model.lora.targets must name at least one kernel, got none")
  found = set()
  for pattern in patterns:
    matches = {kernel for kernel in MODULES if _is_match(pattern, kernel)}
    # One part of a mixture's MLPs only.
    matches = matches or {kernel for kernel in _OF_MIXTURES if _is_match(pattern, kernel)}
    if not matches:
      known = [ALL, *MODULES, *(module.split(".")[1] for module in MODULES.values())]
      hint = valid_names.hint(pattern, [*known, *_OF_MIXTURES])
      raise ValueError(
        f"model.lora.targets: {pattern!r} is not the name of a kernel{hint}; valid are"
        f" {', '.join(known)}, and patterns such as 'mlp.*' and 'mlp.experts.*'"
      )
    found |= matches
  return tuple(kernel for kernel in (*MODULES, *_OF_MIXTURES) if kernel in found)


_OF_MIXTURES = (*leaves.EXPERTS, *leaves.SHARED)


def _is_match(pattern: str, kernel: str) -> bool:
  return pattern == ALL or any(fnmatch.fnmatchcase(each, pattern) for each in _spellings(kernel))


def _spellings(kernel: str) -> list[str]:
  """Returns the names of a kernel: ours, and the ends of those of Hugging Face's modules."""
  modules = [{**MODULES, **SHARED_MODULES, **EXPERT_PARAMETERS}[kernel]]
  if kernel in leaves.EXPERTS:  # as older files, and all of ours, have them.
    modules.append(f"mlp.experts.{kernel.removeprefix('expert_')}_proj")
  parts = [module.split(".") for module in modules]
  ends = [".".join(own[start:]) for own in parts for start in range(len(own))]
  return [kernel, *ends]


def kernels(config: ModelConfig, options: AdapterOptions) -> tuple[str, ...]:
  """Returns the kernels of a model's layers that have an adapter, by the names of `leaves.layer`.

  Raises:
    ValueError: The model has no such kernel, or gate or up of experts is without the other.
  """
  of_layer, found = leaves.layer(config), []
  for name in targets(options.targets):
    own = [each for each in (name, *_IN_MIXTURES.get(name, ())) if each in of_layer]
    if not own:
      needed = "no mixture of experts" if config.mixture is None else "no such kernel"
      raise ValueError(f"model.lora.targets has {name}, but {config.family} has {needed}")
    found += own
  joined = set(leaves.EXPERTS[:2])
  if len(joined & set(found)) == 1:
    raise ValueError(
      f"model.lora.targets has {(joined & set(found)).pop()} of a mixture without"
      f" {(joined - set(found)).pop()}: gate and up of experts are one tensor, with one adapter, in"
      " transformers and PEFT; name both, or neither"
    )
  return tuple(kernel for kernel in (*MODULES, *_OF_MIXTURES) if kernel in found)


def holder(kernel: str, part: str) -> str:
  """Returns the kernel under which an adapter has a factor, part "a" or "b", of a kernel."""
  gate, up, _ = leaves.EXPERTS
  return gate if (kernel, part) == (up, "a") else kernel


def tree(config: ModelConfig, options: AdapterOptions) -> dict[str, dict[str, Leaf]]:
  """Returns shapes and logical axes of an adapter; the axis of the rank is never split.

  Raises:
    ValueError: The model does not have the kernels; see `kernels`.
  """
  of_layer, found = leaves.layer(config), {}
  layers, r = config.num_layers, options.rank
  for kernel in kernels(config, options):
    (*experts, i, o), (*split, inner, outer) = of_layer[kernel].shape, of_layer[kernel].axes
    before, axes = (layers, *experts), ("layers", *split)
    found[kernel] = {
      "a": Leaf((*before, i, r), (*axes, inner, None), "adapter_a"),
      "b": Leaf((*before, r, o), (*axes, None, outer), "adapter_b"),
    }
    if holder(kernel, "a") != kernel:
      del found[kernel]["a"]
  return found


def init(rng: Array, config: ModelConfig, options: AdapterOptions) -> Adapter:
  """Returns a new adapter: A uniform, of variance 1 / (3 i) as in PEFT, and B = 0."""

  def drawn(key: Array, shape: tuple[int, ...]) -> Array:
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

  made = {}
  for number, (kernel, parts) in enumerate(tree(config, options).items()):
    made[kernel] = {"b": jnp.zeros(parts["b"].shape)}
    if "a" in parts:
      made[kernel]["a"] = drawn(jax.random.fold_in(rng, number), parts["a"].shape)
  return made


def join(base: Mapping[str, Any], adapter: Mapping[str, Any], scale: float) -> dict[str, Any]:
  """Returns the weights of a model with an adapter. Nothing is copied or computed.

  Args:
    base: Tree of all parameters with stacked layers: arrays, or their descriptions.
    adapter: Adapter.
    scale: Factor s of A B.

  Returns:
    The base with `LowRank` kernels.
  """
  stack = dict(base["layers"])
  for kernel, parts in adapter.items():
    a = adapter[holder(kernel, "a")]["a"]
    stack[kernel] = LowRank(stack[kernel], a, parts["b"], scale)
  return {**base, "layers": stack}


def base_of(weights: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the base of weights made by `join`; other weights as they are."""
  is_kernel = lambda x: isinstance(x, LowRank)
  stack = {name: x.base if is_kernel(x) else x for name, x in weights["layers"].items()}
  return {**weights, "layers": stack}


def has_adapter(weights: Mapping[str, Any]) -> bool:
  """Returns whether some kernels of a model are `LowRank`."""
  return any(isinstance(x, LowRank) for x in weights["layers"].values())


def merged_always(stack: Mapping[str, Any]) -> dict[str, LowRank]:
  """Returns the kernels with adapters that nothing keeps apart: those of experts.

  Args:
    stack: Kernels of a layer, or stacked ones of all layers.
  """
  return {name: x for name in leaves.EXPERTS if isinstance(x := stack.get(name), LowRank)}


def has_quantized_base(weights: Mapping[str, Any]) -> bool:
  """Returns whether some kernels of a model, or of its base, are quantised."""
  stack = base_of(weights)["layers"]
  return any(isinstance(x, quantized.Quantized) for x in stack.values())


def merged(kernel: LowRank) -> Array:
  """Returns W + s A B in float32; the products are exact float32."""
  product = jnp.matmul(kernel.a, kernel.b, precision=jax.lax.Precision.HIGHEST)
  return quantized.dequantized(kernel.base) + kernel.scale * product


def merged_of_layer(kernel: LowRank) -> Array:
  """Returns what `merged` does, of one layer in a scan; see `quantized.of_layer`."""
  base = quantized.of_layer(kernel.base, jnp.float32)
  return merged(dataclasses.replace(kernel, base=base))


def merged_share(kernels: Mapping[str, LowRank], dtype: Any) -> Array:
  """Returns the share of an adapter that is left when merged kernels are rounded.

      Σ ⟨round(W + Δ) - round(W), Δ⟩ / Σ ⟨Δ, Δ⟩,  Δ = s A B

  This is the projection of what an engine sees of the adapter onto the adapter: 1 if rounding loses
  nothing of it, and 0 if no weight changes. An adapter of zeros has the share 1.

  Args:
    kernels: Kernels with adapters, stacked over the layers.
    dtype: Dtype to which merged kernels are rounded.
  """

  def add(sums: tuple[Array, Array], kernel: LowRank) -> tuple[tuple[Array, Array], None]:
    change = kernel.scale * jnp.matmul(kernel.a, kernel.b, precision=jax.lax.Precision.HIGHEST)
    before = rounding.rounded(quantized.dequantized(kernel.base), dtype)
    seen = rounding.rounded(merged(kernel), dtype) - before
    return (sums[0] + jnp.sum(seen * change), sums[1] + jnp.sum(jnp.square(change))), None

  kept = whole = jnp.zeros(())
  for kernel in kernels.values():
    (kept, whole), _ = jax.lax.scan(add, (kept, whole), kernel)  # one layer at a time.
  is_zero = whole == 0  # not `whole > 0`: the share of NaN is NaN.
  return jnp.where(is_zero, 1.0, kept / jnp.where(is_zero, 1.0, whole))
