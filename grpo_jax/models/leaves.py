"""The table of all parameters: name, shape, logical axes. Pure; no arrays are made here.

The one source of truth for the module, its initialiser, the sharding rules and the readers and
writers of files.
"""

import dataclasses

from grpo_jax.models.config import FAMILIES_BY_NAME, ModelConfig


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter: its shape, and for each axis the logical name that sharding rules speak of.

  The logical names are "vocab", "embed" (model width), "heads" (query heads × head_dim),
  "kv_heads" (key/value heads × head_dim), "mlp" and "layers"; None is never sharded.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  kind: str  # "kernel" ([in, out]; files hold it transposed), "embedding", "norm" or "bias".

  @property
  def is_kernel(self) -> bool:
    return self.kind == "kernel"


def layer(config: ModelConfig) -> dict[str, Leaf]:
  """Returns the parameters of one decoder layer."""
  sizes = {
    "embed": config.hidden_size,
    "heads": config.num_heads * config.head_dim,
    "kv_heads": config.num_kv_heads * config.head_dim,
    "mlp": config.intermediate_size,
  }

  def kernel(*axes: str) -> Leaf:
    return Leaf(tuple(sizes[a] for a in axes), axes, "kernel")

  def vector(axis: str, kind: str) -> Leaf:
    return Leaf((sizes[axis],), (axis,), kind)

  leaves = {
    "input_norm": vector("embed", "norm"),
    "q": kernel("embed", "heads"),
    "k": kernel("embed", "kv_heads"),
    "v": kernel("embed", "kv_heads"),
    "o": kernel("heads", "embed"),
    "mlp_norm": vector("embed", "norm"),
    "gate": kernel("embed", "mlp"),
    "up": kernel("embed", "mlp"),
    "down": kernel("mlp", "embed"),
  }
  if config.qkv_bias:
    leaves["q_bias"] = vector("heads", "bias")
    leaves["k_bias"] = vector("kv_heads", "bias")
    leaves["v_bias"] = vector("kv_heads", "bias")
  if config.o_bias:
    leaves["o_bias"] = vector("embed", "bias")
  if config.mlp_bias:
    leaves["gate_bias"] = vector("mlp", "bias")
    leaves["up_bias"] = vector("mlp", "bias")
    leaves["down_bias"] = vector("embed", "bias")
  if config.qk_norm:
    leaves["q_norm"] = Leaf((config.head_dim,), (None,), "norm")
    leaves["k_norm"] = Leaf((config.head_dim,), (None,), "norm")
  return leaves


def top(config: ModelConfig) -> dict[str, Leaf]:
  """Returns the parameters outside the layers; "head" only if it is not tied."""
  v, d = config.vocab_size, config.hidden_size
  leaves = {
    "embed": Leaf((v, d), ("vocab", "embed"), "embedding"),
    "final_norm": Leaf((d,), ("embed",), "norm"),
  }
  if not config.tie_embeddings:
    leaves["head"] = Leaf((d, v), ("embed", "vocab"), "kernel")
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
  """One tensor as a Hugging Face checkpoint holds it, and where it belongs in our tree."""

  name: str
  path: tuple[str, ...]  # in the tree: ("embed",) or ("layers", "q").
  layer: int | None  # index on the stacked axis; None outside the layers.
  leaf: Leaf  # of one layer, unstacked.

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the shape in the file, where kernels are [out, in]."""
    return self.leaf.shape[::-1] if self.leaf.is_kernel else self.leaf.shape


def stored(config: ModelConfig) -> list[Stored]:
  """Returns every tensor of a Hugging Face checkpoint of this model, in the order of our tree."""
  family = FAMILIES_BY_NAME[config.family]
  tensors = [
    Stored(family.TOP_NAMES[name], (name,), None, leaf) for name, leaf in top(config).items()
  ]
  for name, leaf in layer(config).items():
    for index in range(config.num_layers):
      hf_name = family.LAYER_PREFIX.format(index) + family.LAYER_NAMES[name]
      tensors.append(Stored(hf_name, ("layers", name), index, leaf))
  return tensors
