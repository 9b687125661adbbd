"""One transformer for every family: tokens → hidden states. Pure given params.

Logits are not computed here: `head` returns the matrix for `grpo_kernels.linear_logprobs`, which
never holds the logits of a whole batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from grpo_kernels.attention import ATTENDED, AUTOMATIC, Attention
from jaxtyping import Array, Float, Int

from grpo_jax.models import gradient_sums, layers, leaves, scanned_layers
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import FLOAT32, WEIGHT_PRODUCT, Products

# float32 master weights: {"embed", "layers": {name: [L ...]}, "final_norm", "head" if untied}.
Params = dict[str, Any]


class Outputs(NamedTuple):
  """The outputs of a transformer.

  Attributes:
    hidden: Hidden states after the final norm, [B T D] float32.
    extras: Further results of the layers by name, [L ...]; see `layers.Extras`.
  """

  hidden: Float[Array, "B T D"]
  extras: layers.Extras


class Block(nn.Module):
  """One decoder layer that owns its parameters; a body for `nn.scan`.

  Attributes:
    config: Sizes and switches.
    products: Options of matrix products.
    attention: Attention among the tokens of packed rows.
  """

  config: ModelConfig
  products: Products = FLOAT32
  attention: Attention = AUTOMATIC

  @nn.compact
  def __call__(self, x, given, kind):
    """Applies `layers.block` to packed rows.

    Args:
      x: Residual stream.
      given: Tokens, made by `scanned_layers.tokens`.
      kind: Entry of `scanned_layers.kinds` for the layer.

    Returns:
      The residual stream; `layers.Extras`.
    """
    params = {
      name: self.param(name, layers.initializer(leaf.kind, self.config), leaf.shape)
      for name, leaf in leaves.layer(self.config).items()
    }
    return _packed_block(params, x, given, kind, self.config, self.products, self.attention)


class Transformer(nn.Module):
  """A decoder whose layers are stacked and scanned, so that it compiles as fast as one layer.

  Attributes:
    config: Sizes and switches.
    products: Options of matrix products. Weights stay float32.
    remat: Activations that the backward pass recomputes: "none" keeps all of them, "dots" keeps the
      results of products with weights and of attention, "full" keeps the input of every layer only.
    attention: Attention among the tokens of packed rows.
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
    *,
    experts: Int[Array, "B T L k"] | None = None,
    order: Int[Array, "B T"] | None = None,
    with_extras: bool = False,
  ) -> Float[Array, "B T D"] | Outputs:
    """Returns the hidden states after the final norm, float32.

    Args:
      tokens: Ids below vocab_size; any valid id where segment_ids is 0.
      positions: Positions within prompt + completion, for rotary embeddings and windows.
      segment_ids: 0 is padding, which attends to nothing; its hidden states mean nothing.
      branch_ids: 0 is the prompt, 1.. its completions, which do not see each other; None: every
        segment is one branch.
      experts: Experts of each token in each layer, which replace those of the routers. A token with
        an entry below 0 in a layer has those of the router. None: the routers choose.
      order: Place of each slot, if rows are dealt out in the parts of the attention's partition:
        what is returned is of the slots of each part, [B n T/n ...]. None: rows are whole.
      with_extras: Whether to return `Outputs`, with what the layers return beside hidden states.
    """
    own = {
      name: self.param(name, layers.initializer(leaf.kind, self.config), leaf.shape)
      for name, leaf in leaves.top(self.config).items()
    }
    stack = nn.scan(
      _rematerialized(Block, self.remat),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=(nn.broadcast, 0),  # pyright: ignore[reportArgumentType]: flax says int.
      length=self.config.num_layers,
    )
    settings = {"config": self.config, "products": self.products}
    tokens, experts = _dealt(self.attention, order, tokens, experts)
    x = layers.embed(own["embed"], tokens, **settings)
    shared = {"attention": self.attention, "products": self.products, "order": order}
    given = scanned_layers.tokens(self.config, positions, segment_ids, branch_ids, **shared)
    block = stack(self.config, self.products, self.attention, name="layers")
    x, extras = block(x, given, scanned_layers.kinds(self.config, experts))
    x = layers.norm(x, own["final_norm"], **settings)
    outputs = Outputs(self.products.place(x, layers.RESIDUAL), extras)
    return outputs if with_extras else outputs.hidden


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
  experts: Int[Array, "B T L k"] | None = None,
) -> Float[Array, "B T D"]:
  """Returns the hidden states of `outputs`; the arguments are the same."""
  settings: Any = {"products": products, "remat": remat, "attention": attention}
  settings["experts"] = experts
  return outputs(params, config, tokens, positions, segment_ids, branch_ids, **settings).hidden


def outputs(
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
  experts: Int[Array, "B T L k"] | None = None,
  order: Int[Array, "B T"] | None = None,
) -> Outputs:
  """Computes what `Transformer` does, also for parameters made by `gradient_sums.attach`.

  Args:
    params: Tree of all parameters, with the layers stacked or in a `gradient_sums.Stack`.
    config: Sizes and switches.
    tokens: Token ids; see `Transformer`, also for the other arrays.
    positions: Position of each token.
    segment_ids: Segment of each token; 0 is padding.
    branch_ids: Branch of each token, or None.
    products: Options of matrix products.
    remat: Activations that the backward pass recomputes, as in `Transformer`. With "full" the
      layers of a `Stack` add their gradients in place.
    attention: Attention among the tokens of packed rows.
    experts: Experts of each token in each layer, as in `Transformer`.
    order: Place of each slot, as in `Transformer`.
  """
  stack, shared = params[gradient_sums.LAYERS], {"attention": attention, "products": products}
  given = lambda: scanned_layers.tokens(
    config, positions, segment_ids, branch_ids, order=order, **shared
  )
  own, of_own = _dealt(attention, order, tokens, experts)
  kinds = scanned_layers.kinds(config, of_own)
  if isinstance(stack, gradient_sums.Stack):
    if remat == "full":
      return _summing_in_place(params, config, own, given(), kinds, products, attention)
    params = {**params, gradient_sums.LAYERS: gradient_sums.joined(stack.weights, stack.sums)}
  if not all(isinstance(x, _ARRAYS) for x in params[gradient_sums.LAYERS].values()):
    return _scanned(params, config, own, given(), kinds, products, remat, attention)
  model = Transformer(config, products=products, remat=remat, attention=attention)
  inputs = tokens, positions, segment_ids, branch_ids
  settings: Any = {"experts": experts, "order": order, "with_extras": True}
  found: Any = model.apply({"params": params}, *inputs, **settings)
  return found


def _dealt(attention: Attention, order: Array | None, *arrays: Any) -> tuple[Any, ...]:
  """Returns arrays of tokens, or None, as parts of rows if there is an order."""
  if order is None:
    return arrays
  return tuple(None if x is None else attention.parts.dealt(x, order) for x in arrays)


def _summing_in_place(
  params: Params,
  config: ModelConfig,
  tokens: Array,
  given: scanned_layers.Tokens,
  kinds: scanned_layers.Kinds,
  products: Products,
  attention: Attention,
) -> Outputs:
  """Returns the outputs for a `Stack` of layers."""

  def block(layer_params, x, given, kind):
    return _packed_block(layer_params, x, given, kind, config, products, attention)

  x = layers.embed(params["embed"], tokens, config=config, products=products)
  x, extras = gradient_sums.run(block, params[gradient_sums.LAYERS], x, given, kinds)
  x = layers.norm(x, params["final_norm"], config=config, products=products)
  return Outputs(products.place(x, layers.RESIDUAL), extras)


def _scanned(
  params: Params,
  config: ModelConfig,
  tokens: Array,
  given: scanned_layers.Tokens,
  kinds: scanned_layers.Kinds,
  products: Products,
  remat: str,
  attention: Attention,
) -> Outputs:
  """Returns the outputs for layers whose kernels need not be arrays."""

  def step(x, of_layer):
    layer_params, kind = of_layer
    return _packed_block(layer_params, x, given, kind, config, products, attention)

  if remat != "none":
    step = jax.checkpoint(step, policy=_policy(remat), prevent_cse=False)
  x = layers.embed(params["embed"], tokens, config=config, products=products)
  with jax.named_scope("Transformer"):
    x, extras = jax.lax.scan(step, x, (params["layers"], kinds))
  x = layers.norm(x, params["final_norm"], config=config, products=products)
  return Outputs(products.place(x, layers.RESIDUAL), extras)


def _packed_block(
  params: layers.LayerParams,
  x: Float[Array, "B T D"],
  given: scanned_layers.Tokens,
  kind: scanned_layers.Kinds,
  config: ModelConfig,
  products: Products,
  attention: Attention,
) -> tuple[Float[Array, "B T D"], layers.Extras]:
  """Applies one layer to packed rows."""
  view = scanned_layers.view(given, kind)

  def attend(q, k, v):
    return attention(q, k, v, view.seen, products=products), None

  settings: Any = {"config": config, "products": products, "experts": kind.experts}
  x, _, extras = layers.block(params, x, view.cos, view.sin, attend, **settings)
  return x, extras


def _rematerialized(module: type[nn.Module], remat: str) -> Any:
  policy = _policy(remat)
  return module if remat == "none" else nn.remat(module, policy=policy, prevent_cse=False)


def _policy(remat: str) -> Any:
  """Returns which results the backward pass keeps."""
  if remat not in _REMAT_POLICIES:
    raise ValueError(f"remat must be one of {sorted(_REMAT_POLICIES)}, got {remat!r}")
  return _REMAT_POLICIES[remat]


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
    params: Tree of all parameters, with the layers stacked.
    config: Sizes and switches.
    tokens: Token ids of prompts; any valid id where segment_ids is 0.
    positions: Position of each token in its prompt.
    segment_ids: 0 is padding, on either side.
    products: Options of matrix products.
    attention: Attention among the tokens of packed rows.

  Returns:
    Hidden states after the final norm; (keys, values), float32.
  """
  settings = {"config": config, "products": products}
  shared = {"attention": attention, "products": products}
  given = scanned_layers.tokens(config, positions, segment_ids, None, **shared)

  def step(x, of_layer):
    layer_params, kind = of_layer
    view = scanned_layers.view(given, kind)

    def attend(q, k, v):
      return attention(q, k, v, view.seen, products=products), (k, v)

    x, kept, _ = layers.block(layer_params, x, view.cos, view.sin, attend, **settings)
    return x, kept

  x = layers.embed(params["embed"], tokens, **settings)
  x, cache = jax.lax.scan(step, x, (params["layers"], scanned_layers.kinds(config)))
  return layers.norm(x, params["final_norm"], **settings), cache


def init(rng: Array, config: ModelConfig) -> Params:
  """Returns random float32 parameters: N(0, 0.02²), norms 1, biases 0."""

  def make(path, leaf):
    key = jax.random.fold_in(rng, paths.index(jax.tree_util.keystr(path)))
    return layers.initializer(leaf.kind, config)(key, leaf.shape, jnp.float32)

  tree = leaves.tree(config)
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  return jax.tree_util.tree_map_with_path(make, tree)


def logical_axes(config: ModelConfig) -> dict[str, Any]:
  """Returns a tree like the parameters' of tuples of logical axis names; see `leaves.Leaf`."""
  return jax.tree.map(lambda leaf: leaf.axes, leaves.tree(config))


def head(params: Params, config: ModelConfig) -> tuple[Array, str]:
  """Returns the LM head and its layout: the tied embedding, "vd", or a matrix of its own, "dv"."""
  return (params["embed"], "vd") if config.tie_embeddings else (params["head"], "dv")


_ARRAYS = (jax.Array, np.ndarray)

_REMAT_POLICIES = {
  "none": None,
  # By name: JAX's own policies for dots cannot see inside the custom gradient of bfloat16 products.
  "dots": jax.checkpoint_policies.save_only_these_names(WEIGHT_PRODUCT, ATTENDED),
  "full": jax.checkpoint_policies.nothing_saveable,
}
