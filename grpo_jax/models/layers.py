"""The pure functions of a decoder layer.

Pure. Trainer (scanned layers) and sampler (unrolled layers, key/value cache) compose the same
functions, so they compute the same numbers. E is the width of one head. Norms, rotary embeddings,
softmax and the residual stream are always float32; only products use the compute dtype.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from grpo_jax.models import experts as experts_of_layer
from grpo_jax.models import leaves, rotary
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import FLOAT32, Products

# Given q [B T H E], k and v [B T K E] of the new tokens, returns what they attend to [B T H E]
# and anything else (a cache, or None).
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]

# What a layer returns beside its output, by name: of a mixture, the "experts" that computed each
# token, [B T k] int32, and how many of them replaced others, "changed" [B T], if any were given.
Extras = dict[str, Array]

# The names of `leaves.layer` → arrays, of which the kernels may be `products.OutputMajor`.
LayerParams = Mapping[str, Any]

# The logical axes of the residual stream; see `placement.ACTIVATIONS`.
RESIDUAL = ("rows", "places", "embed")


def rms_norm(
  x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float, offset: float = 0.0
) -> Float[Array, "... d"]:
  """Scales the last axis to unit root mean square, then by `weight` + `offset`; float32.

      y = (w + offset) x / √(mean(x²) + ε)

  The backward pass keeps x and one number for each vector.

  Reference:
    Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
  """
  weight = weight.astype(jnp.float32)
  if offset:
    weight = weight + offset
  return _normed(x.astype(jnp.float32), weight, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normed(x: Array, weight: Array, eps: float) -> Array:
  return x * _inverse_rms(x, eps) * _as_last_axis(weight, x.ndim)


def _inverse_rms(x: Array, eps: float) -> Array:
  return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _normed_forward(x: Array, weight: Array, eps: float) -> tuple[Array, Any]:
  scale = _inverse_rms(x, eps)
  return x * scale * _as_last_axis(weight, x.ndim), (x, scale, weight)


def _normed_backward(eps: float, kept: Any, g: Array) -> tuple[Array, Array]:
  """Returns the cotangents of x and w in y = w x s, s = (mean(x²) + ε)^-½.

  dx = s (g w - x s² mean(g w x))      dw = Σ g x s
  """
  del eps
  x, scale, weight = kept
  of_normed = g * _as_last_axis(weight, x.ndim)
  mean = jnp.mean(of_normed * x, axis=-1, keepdims=True)
  dx = scale * (of_normed - x * (jnp.square(scale) * mean))
  return dx, jnp.sum(g * x * scale, axis=tuple(range(x.ndim - 1)))


_normed.defvjp(_normed_forward, _normed_backward)


def norm(
  x: Float[Array, "... d"],
  weight: Float[Array, " d"],
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> Float[Array, "... d"]:
  """Applies `rms_norm` over the model's width, as the config sets it."""
  weight = products.place(weight, ("embed",))
  return rms_norm(x, weight, config.rms_norm_eps, config.norm_offset)


def embed(
  table: Float[Array, "V D"],
  tokens: Int[Array, "B T"],
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> Float[Array, "B T D"]:
  """Returns the embeddings of tokens, times the config's scale: the residual stream's start.

  The scale is rounded to the compute dtype, as the embeddings are: √2560 is 50.5 in bfloat16.

  Reference:
    The class `Gemma3TextScaledWordEmbedding` of transformers.
  """
  found = products.look_up(table, tokens)
  scale = float(products.compute_dtype.type(config.embedding_scale))
  return found if scale == 1.0 else found * scale


def project_qkv(
  params: LayerParams,
  x: Float[Array, "B T D"],
  cos: Float[Array, "B T half"] | None,
  sin: Float[Array, "B T half"] | None,
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T K E"], Float[Array, "B T K E"]]:
  """Projects normed inputs to rotated queries and keys, and values.

  Args:
    params: Parameters of one layer.
    x: Input of the layer, normed.
    cos: Cosines, made by `rotary.angles`; None: queries and keys are not rotated.
    sin: Sines, made by `rotary.angles`, or None.
    config: Sizes and switches.
    products: Options of matrix products.
  """
  found = products.dots(params, ("q", "k", "v"), x, products.out_dtype)
  heads = []
  for name, y in zip(("q", "k", "v"), found, strict=True):
    y = _biased(params, name, y.astype(jnp.float32), products)
    if config.wide_qk_norm and name != "v":
      weight = products.place(params[f"{name}_norm"], leaves.bias_axes(name))
      y = rms_norm(y, weight, config.rms_norm_eps, config.norm_offset)
    heads.append(_split_heads(y, leaves.AXES[name][1], config, products))
  q, k, v = heads
  if config.qk_norm:
    q = rms_norm(q, params["q_norm"], config.rms_norm_eps, config.norm_offset)
    k = rms_norm(k, params["k_norm"], config.rms_norm_eps, config.norm_offset)
  if config.query_scalar is not None:  # all attention divides by √head_dim.
    q = q * math.sqrt(config.head_dim / config.query_scalar)
  if cos is None or sin is None:
    return q, k, v
  return rotary.rotated(q, cos, sin), rotary.rotated(k, cos, sin), v


def project_output(
  params: LayerParams,
  attended: Float[Array, "B T H E"],
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> Float[Array, "B T D"]:
  """Projects the heads' results back to the model's width."""
  (y,) = products.dots(params, ("o",), attended.reshape(*attended.shape[:2], -1))
  return _biased(params, "o", y, products)


def mlp(
  params: LayerParams,
  x: Float[Array, "B T D"],
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
  names: tuple[str, str, str] = ("gate", "up", "down"),
) -> Float[Array, "B T D"]:
  """Applies the gated MLP, W_down (f(W_gate x) ⊙ W_up x), to normed inputs.

  f is the config's activation, and `names` those of the three kernels.

  Reference:
    Shazeer 2020, arXiv:2002.05202, SwiGLU and GEGLU, equation 6.
  """
  gate, up, down = names
  biased = lambda name, y: _biased(params, name, y.astype(jnp.float32), products)
  both = products.dots(params, (gate, up), x, products.out_dtype)
  hidden = _gated(lambda a, b: (biased(gate, a), biased(up, b)), config, products)(*both)
  (y,) = products.dots(params, (down,), hidden)
  return _biased(params, down, y, products)


def _gated(
  prepared: Callable[[Array, Array], tuple[Array, Array]], config: ModelConfig, products: Products
) -> Callable[[Array, Array], Array]:
  """Returns the function f(gate) ⊙ up, of float32 numbers that `prepared` makes of both."""
  activation = ACTIVATIONS[config.activation]

  def gated(gate, up):
    gate, up = prepared(gate, up)
    return (activation(gate) * up).astype(products.out_dtype)

  if products.out_dtype == jnp.float32:
    return gated
  # So that the backward pass keeps only gate and up, rounded, and no float32 intermediates.
  return jax.checkpoint(gated, prevent_cse=False)


def feed_forward(
  params: LayerParams,
  x: Float[Array, "B T D"],
  experts: Int[Array, "B T k"] | None = None,
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> tuple[Float[Array, "B T D"], Extras]:
  """Applies the MLP or the mixture of experts of a layer to normed inputs.

  A shared expert, which computes every token, is an MLP that is multiplied by sigmoid(x w_s).

  Args:
    params: Parameters of this layer.
    x: Input, normed.
    experts: Experts to use; see `experts.chosen`. None: the router chooses.
    config: Sizes and switches.
    products: Options of matrix products.

  Returns:
    The output; what the layer returns beside it.

  Reference:
    Rajbhandari et al. 2022, "DeepSpeed-MoE", arXiv:2201.05596, section 4.1.1, for a shared expert.
  """
  if config.mixture is None:
    return mlp(params, x, config=config, products=products), {}
  settings: dict[str, Any] = {"mixture": config.mixture, "products": products}
  given = experts
  experts, weights, own = experts_of_layer.chosen(params, x, given, **settings)
  gated = _gated(lambda a, b: (a.astype(jnp.float32), b.astype(jnp.float32)), config, products)
  y = experts_of_layer.computed(params, x, experts, weights, gated, **settings)
  if config.mixture.shared_width is not None:
    (switch,) = products.dots(params, (leaves.SWITCH,), x)
    shared = mlp(params, x, config=config, products=products, names=leaves.SHARED)
    y = y + jax.nn.sigmoid(switch) * shared
  extras = {"experts": experts}
  if given is not None:
    extras["changed"] = experts_of_layer.changed(experts, own)
  return y, extras


def _biased(params: LayerParams, name: str, y: Array, products: Products) -> Array:
  """Adds the bias of a kernel, if it has one."""
  bias = params.get(f"{name}_bias")
  if bias is None:
    return y
  return y + _as_last_axis(products.place(bias, leaves.bias_axes(name)), y.ndim)


def _split_heads(
  y: Float[Array, "B T _"], axis: str | None, config: ModelConfig, products: Products
) -> Float[Array, "B T _ E"]:
  """Splits the last axis into heads; each head is on one device, or all heads on all devices."""
  shape = (*y.shape[:2], y.shape[2] // config.head_dim, config.head_dim)
  lies = ("rows", "places", axis, "width")
  if products.placement is not None and products.placement.activation(lies, shape)[2] is None:
    y = products.place(y, ("rows", "places", "width"))
  return products.place(y.reshape(shape), lies)


def block(
  params: LayerParams,
  x: Float[Array, "B T D"],
  cos: Float[Array, "B T half"] | None,
  sin: Float[Array, "B T half"] | None,
  attend: Attend,
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
  experts: Int[Array, "B T k"] | None = None,
) -> tuple[Float[Array, "B T D"], Any, Extras]:
  """Applies one decoder layer: attention, then MLP, each added to the residual stream.

  With `config.pre_norms` each has a norm before it, with `config.post_norms` one after it.

  Args:
    params: Parameters of this layer, as `leaves.layer` names them.
    x: Residual stream, float32.
    cos: Cosines, made by `rotary.angles`; None: a layer without rotary embedding.
    sin: Sines, made by `rotary.angles`, or None.
    attend: (q, k, v) of these tokens → (what they attend to, anything else). A sampler writes k
      and v into its cache here, and returns the cache as the second result.
    config: Sizes and switches.
    products: Options of matrix products.
    experts: Experts of each token, for a layer with a mixture; None: its router chooses.

  Returns:
    The residual stream after the layer; the second result of `attend`; see `Extras`.
  """
  settings = {"config": config, "products": products}

  def normed(name, x, is_normed):
    return norm(x, params[name], **settings) if is_normed else x

  def before(name, x):
    return normed(name, x, config.pre_norms)

  def added(x, y, name):
    return x + normed(name, y, config.post_norms)

  x = products.place(x, RESIDUAL)
  attended, kept = attend(*project_qkv(params, before("input_norm", x), cos, sin, **settings))
  x = added(x, project_output(params, attended, **settings), "post_attention_norm")
  y, extras = feed_forward(params, before("mlp_norm", x), experts, **settings)
  return products.place(added(x, y, "post_mlp_norm"), RESIDUAL), kept, extras


def initializer(kind: str, config: ModelConfig) -> nn.initializers.Initializer:
  """Returns the initialiser of a kind of leaf.

  Norms multiply by 1, biases are 0, and all other leaves are N(0, 0.02²).
  """
  if kind == "norm" and config.norm_offset:
    return nn.initializers.constant(1.0 - config.norm_offset)
  return _INITIALIZERS[kind]


def _as_last_axis(vector: Array, ndim: int) -> Array:
  """Returns [1 ... 1 D], to be broadcast against an array of `ndim` axes."""
  return jnp.expand_dims(vector, tuple(range(ndim - 1)))


_INITIALIZERS = {
  "kernel": nn.initializers.normal(0.02),
  "head": nn.initializers.normal(0.02),
  "router": nn.initializers.normal(0.02),
  "experts": nn.initializers.normal(0.02),
  "embedding": nn.initializers.normal(0.02),
  "norm": nn.initializers.ones,
  "bias": nn.initializers.zeros,
}

# `ModelConfig.activation` → the function.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
