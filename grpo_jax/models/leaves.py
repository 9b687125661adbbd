"""The table of all parameters: name, shape, logical axes. Pure; makes no arrays.

The module, its initialiser, the sharding rules, and the readers and writers of files all use it.
"""

import dataclasses
import math

from grpo_jax.models.config import FAMILIES_BY_NAME, ModelConfig
from grpo_jax.models.mixture import Mixture


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter: its shape, and the logical name of each axis for sharding rules.

  The logical names are "vocab", "embed" (model width), "heads" (query heads × head_dim),
  "kv_heads" (key/value heads × head_dim), "mlp", "expert" and "layers"; None is never sharded.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  # "kernel", "head" or "router" ([in, out]; files hold it transposed), "experts" ([X, in, out];
  # files hold one transposed tensor for each expert), "embedding", "norm" or "bias".
  kind: str

  @property
  def is_kernel(self) -> bool:
    return self.kind in ("kernel", "head", "router", "experts")


_MLP = ("gate", "up", "down")
EXPERTS = ("expert_gate", "expert_up", "expert_down")
SHARED = ("shared_gate", "shared_up", "shared_down")
SWITCH = "shared_switch"  # of the shared expert's share in each token.
ROUTER = "router"
FROZEN = (ROUTER,)  # what no run trains; see `experts`.

# Leaf of a decoder layer → the logical names of its axes.
AXES: dict[str, tuple[str | None, ...]] = {
  "input_norm": ("embed",),
  "q": ("embed", "heads"),
  "k": ("embed", "kv_heads"),
  "v": ("embed", "kv_heads"),
  "o": ("heads", "embed"),
  "mlp_norm": ("embed",),
  "gate": ("embed", "mlp"),
  "up": ("embed", "mlp"),
  "down": ("mlp", "embed"),
  "post_attention_norm": ("embed",),
  "post_mlp_norm": ("embed",),
  "q_norm": (None,),
  "k_norm": (None,),
  ROUTER: ("embed", "choices"),
  **dict.fromkeys(EXPERTS[:2], ("expert", "embed", "mlp")),
  EXPERTS[2]: ("expert", "mlp", "embed"),
  **dict.fromkeys(SHARED[:2], ("embed", "mlp")),
  SHARED[2]: ("mlp", "embed"),
  SWITCH: ("embed", "switch"),
}


def bias_axes(kernel: str) -> tuple[str | None, ...]:
  """Returns the logical name of the axis of a kernel's bias."""
  return AXES[kernel][1:]


def layer(config: ModelConfig) -> dict[str, Leaf]:
  """Returns the parameters of one decoder layer."""
  sizes = {
    "embed": config.hidden_size,
    "heads": config.num_heads * config.head_dim,
    "kv_heads": config.num_kv_heads * config.head_dim,
    "mlp": config.intermediate_size,
  }

  def leaf(axes: tuple[str | None, ...], kind: str) -> Leaf:
    return Leaf(tuple(config.head_dim if a is None else sizes[a] for a in axes), axes, kind)

  feed_forward = _MLP if config.mixture is None else ()
  order = ("input_norm", "q", "k", "v", "o", "mlp_norm", *feed_forward)
  left_out = () if config.pre_norms else ("input_norm", "mlp_norm")
  leaves = {
    name: leaf(AXES[name], "kernel" if len(AXES[name]) == 2 else "norm")
    for name in order
    if name not in left_out
  }
  if config.mixture is not None:
    leaves |= _of_mixture(config.mixture, config.hidden_size)
  biased = (config.qkv_bias, "qkv"), (config.o_bias, "o"), (config.mlp_bias, _MLP)
  for kernel in (kernel for is_there, kernels in biased if is_there for kernel in kernels):
    leaves[f"{kernel}_bias"] = leaf(bias_axes(kernel), "bias")
  further = (
    (config.qk_norm, ("q_norm", "k_norm")),
    (config.post_norms, ("post_attention_norm", "post_mlp_norm")),
  )
  for name in (name for is_there, names in further if is_there for name in names):
    leaves[name] = leaf(AXES[name], "norm")
  if config.wide_qk_norm:
    leaves |= {f"{kernel}_norm": leaf(bias_axes(kernel), "norm") for kernel in "qk"}
  return leaves


def _of_mixture(mixture: Mixture, width: int) -> dict[str, Leaf]:
  """Returns the parameters of the experts of one layer."""
  sizes = {
    "embed": width,
    "mlp": mixture.width,
    "expert": mixture.num_experts,
    "choices": mixture.num_experts,
    "switch": 1,
  }

  def leaf(name: str, kind: str, **others: int) -> Leaf:
    of_axis = {**sizes, **others}
    return Leaf(tuple(of_axis[axis or ""] for axis in AXES[name]), AXES[name], kind)

  leaves = {ROUTER: leaf(ROUTER, "router"), **{name: leaf(name, "experts") for name in EXPERTS}}
  if mixture.shared_width is not None:
    leaves |= {name: leaf(name, "kernel", mlp=mixture.shared_width) for name in SHARED}
    leaves[SWITCH] = leaf(SWITCH, "kernel")
  return leaves


def used_by_token(config: ModelConfig) -> int:
  """Returns how many weights of one layer's matrices a token is multiplied with."""
  found, chosen = 0, config.mixture.experts_per_token if config.mixture else 0
  for leaf in layer(config).values():
    shape = (chosen, *leaf.shape[1:]) if leaf.kind == "experts" else leaf.shape
    found += math.prod(shape) if len(shape) > 1 else 0
  return found


def top(config: ModelConfig) -> dict[str, Leaf]:
  """Returns the parameters outside the layers; "head" only if it is not tied."""
  v, d = config.vocab_size, config.hidden_size
  leaves = {
    "embed": Leaf((v, d), ("vocab", "embed"), "embedding"),
    "final_norm": Leaf((d,), ("embed",), "norm"),
  }
  if not config.tie_embeddings:
    leaves["head"] = Leaf((d, v), ("embed", "vocab"), "head")
  return leaves


def tree(config: ModelConfig) -> dict:
  """Returns the whole tree, layers stacked on a first axis called "layers"."""
  stacked = {
    name: Leaf((config.num_layers, *leaf.shape), ("layers", *leaf.axes), leaf.kind)
    for name, leaf in layer(config).items()
  }
  return {**top(config), "layers": stacked}


@dataclasses.dataclass(frozen=True)
class Stored:
  """One tensor of a Hugging Face checkpoint, and its place in our tree."""

  name: str
  path: tuple[str, ...]  # in the tree: ("embed",) or ("layers", "q").
  layer: int | None  # index on the stacked axis; None outside the layers.
  leaf: Leaf  # of one layer, unstacked.
  expert: int | None = None  # index on the leaf's first axis; None: the tensor is the whole leaf.

  @property
  def own(self) -> Leaf:
    """Returns the leaf, or the part of it that is one expert's."""
    if self.expert is None:
      return self.leaf
    return Leaf(self.leaf.shape[1:], self.leaf.axes[1:], "kernel")

  @property
  def index(self) -> tuple[int, ...]:
    """Returns the place of the tensor in the array at `path`."""
    return tuple(each for each in (self.layer, self.expert) if each is not None)

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the shape in the file, where kernels are [out, in]."""
    return self.own.shape[::-1] if self.leaf.is_kernel else self.leaf.shape


def stored(config: ModelConfig) -> list[Stored]:
  """Returns every tensor of a Hugging Face checkpoint of this model, in the order of our tree."""
  family = FAMILIES_BY_NAME[config.family]
  tensors = [
    Stored(family.TOP_NAMES[name], (name,), None, leaf) for name, leaf in top(config).items()
  ]
  for name, leaf in layer(config).items():
    for index in range(config.num_layers):
      prefix, path = family.LAYER_PREFIX.format(index), ("layers", name)
      hf_name = prefix + family.LAYER_NAMES[name]
      if leaf.kind != "experts":
        tensors.append(Stored(hf_name, path, index, leaf))
        continue
      for expert in range(leaf.shape[0]):
        tensors.append(Stored(hf_name.format(expert), path, index, leaf, expert))
  return tensors
