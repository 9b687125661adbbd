"""One transformer for every family: tokens → hidden states. Pure given params.

Logits are not made here: `head` gives the matrix to `grpo_kernels.linear_logprobs`, which never
holds the logits of a whole batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from grpo_kernels.attention import AUTOMATIC, Attention
from jaxtyping import Array, Float, Int

from grpo_jax.models import gradient_sums, layers, leaves
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import FLOAT32, WEIGHT_PRODUCT, Products

# float32 master weights: {"embed", "layers": {name: [L ...]}, "final_norm", "head" if untied}.
Params = dict[str, Any]


class Transformer(nn.Module):
  """A decoder whose layers are stacked and scanned, so that it compiles as fast as one layer.

  Attributes:
    config: sizes and switches.
    products: how matrix products are computed. Weights stay float32.
    remat: what is computed again in the backward pass: "none" keeps all activations, "dots"
      keeps the results of products with weights, "full" keeps the input of every layer only.
    attention: How the tokens of packed rows attend.
  """

  config: ModelConfig
  products: Products = FLOAT32
  remat: str = "none"
  attention: Attention = AUTOMATIC

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    branch_ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns the hidden states after the final norm, float32.

    Args:
      tokens: ids below vocab_size; any valid id where segment_ids is 0.
      positions: for the rotary embeddings; within prompt + completion.
      segment_ids: 0 is padding, which attends to nothing; its hidden states mean nothing.
      branch_ids: 0 is the prompt, 1.. its completions, which do not see each other; None: every
        segment is one branch.
    """
    own = {
      name: self.param(name, layers.initializer(leaf.kind), leaf.shape)
      for name, leaf in leaves.top(self.config).items()
    }
    stack = nn.scan(
      _rematerialized(layers.Block, self.remat),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]: flax says int, and takes this.
      length=self.config.num_layers,
    )
    x = self.products.look_up(own["embed"], tokens)
    cos, sin = layers.rope_angles(positions, self.config)
    block = stack(self.config, self.products, self.attention, name="layers")
    x, _ = block(x, cos, sin, segment_ids, branch_ids)
    norm = self.products.place(own["final_norm"], ("embed",))
    return self.products.place(layers.rms_norm(x, norm, self.config.rms_norm_eps), layers.RESIDUAL)


def hidden_states(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  branch_ids: Int[Array, "B T"] | None = None,
  *,
  products: Products = FLOAT32,
  remat: str = "none",
  attention: Attention = AUTOMATIC,
) -> Float[Array, "B T D"]:
  """Computes what `Transformer` does, also for parameters made by `gradient_sums.attach`.

  Args:
    params: Tree of all parameters, with the layers stacked or in a `gradient_sums.Stack`.
    config: Sizes and switches.
    tokens: Token ids; see `Transformer`, also for the other arrays.
    positions: Position of each token.
    segment_ids: Segment of each token; 0 is padding.
    branch_ids: Branch of each token, or None.
    products: How products are computed.
    remat: See `Transformer`. With "full" the layers of a `Stack` add their gradients in place.
    attention: How the tokens of packed rows attend.

  Returns:
    Hidden states after the final norm, float32.
  """
  stack = params[gradient_sums.LAYERS]
  if isinstance(stack, gradient_sums.Stack):
    if remat == "full":
      given = (*layers.rope_angles(positions, config), segment_ids, branch_ids)
      return _summing_in_place(params, config, tokens, given, products, attention)
    params = {**params, gradient_sums.LAYERS: gradient_sums.joined(stack.weights, stack.sums)}
  model = Transformer(config, products=products, remat=remat, attention=attention)
  found = model.apply({"params": params}, tokens, positions, segment_ids, branch_ids)
  return jnp.asarray(found)


def _summing_in_place(
  params: Params,
  config: ModelConfig,
  tokens: Array,
  given: Any,
  products: Products,
  attention: Attention,
) -> Array:
  """Returns the hidden states for a `Stack` of layers."""

  def block(layer_params, x, given):
    cos, sin, segment_ids, branch_ids = given
    attend = layers.within_rows(attention, segment_ids, branch_ids, products)
    return layers.block(layer_params, x, cos, sin, attend, config=config, products=products)[0]

  x = products.look_up(params["embed"], tokens)
  x = gradient_sums.run(block, params[gradient_sums.LAYERS], x, given)
  norm = products.place(params["final_norm"], ("embed",))
  return products.place(layers.rms_norm(x, norm, config.rms_norm_eps), layers.RESIDUAL)


def _rematerialized(module: type[nn.Module], remat: str) -> Any:
  if remat not in _REMAT_POLICIES:
    raise ValueError(f"remat must be one of {sorted(_REMAT_POLICIES)}, got {remat!r}")
  if remat == "none":
    return module
  return nn.remat(module, policy=_REMAT_POLICIES[remat], prevent_cse=False)


def prefill(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  *,
  products: Products = FLOAT32,
  attention: Attention = AUTOMATIC,
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "L B T K E"], Float[Array, "L B T K E"]]]:
  """Computes what `Transformer` does, and keeps the rotated keys and the values of every layer.

  Args:
    params: the whole tree, layers stacked.
    config: sizes and switches.
    tokens: ids of prompts; any valid id where segment_ids is 0.
    positions: of each token in its prompt.
    segment_ids: 0 is padding, on either side.
    products: how products are computed.
    attention: How the tokens of packed rows attend.

  Returns:
    Hidden states after the final norm; (keys, values), float32.
  """
  cos, sin = layers.rope_angles(positions, config)

  def attend(q, k, v):
    return attention(q, k, v, segment_ids, products=products), (k, v)

  def step(x, layer_params):
    settings = {"config": config, "products": products}
    return layers.block(layer_params, x, cos, sin, attend, **settings)

  x = products.look_up(params["embed"], tokens)
  x, cache = jax.lax.scan(step, x, params["layers"])
  norm = products.place(params["final_norm"], ("embed",))
  return layers.rms_norm(x, norm, config.rms_norm_eps), cache


def init(rng: Array, config: ModelConfig) -> Params:
  """Returns random float32 parameters: N(0, 0.02²), norms 1, biases 0."""

  def make(path, leaf):
    key = jax.random.fold_in(rng, paths.index(jax.tree_util.keystr(path)))
    return layers.initializer(leaf.kind)(key, leaf.shape, jnp.float32)

  tree = leaves.tree(config)
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  return jax.tree_util.tree_map_with_path(make, tree)


def logical_axes(config: ModelConfig) -> dict[str, Any]:
  """Returns a tree like the parameters' of tuples of logical axis names; see `leaves.Leaf`."""
  return jax.tree.map(lambda leaf: leaf.axes, leaves.tree(config))


def head(params: Params, config: ModelConfig) -> tuple[Array, str]:
  """Returns the LM head and its layout: the tied embedding, "vd", or a matrix of its own, "dv"."""
  return (params["embed"], "vd") if config.tie_embeddings else (params["head"], "dv")


_REMAT_POLICIES = {
  "none": None,
  # By name: JAX's own policies for dots do not see into the custom gradient of bfloat16 products.
  "dots": jax.checkpoint_policies.save_only_these_names(WEIGHT_PRODUCT),
  "full": jax.checkpoint_policies.nothing_saveable,
}
