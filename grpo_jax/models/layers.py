"""The pure functions that a decoder layer is made of, and the linen module that holds its weights.

Pure. Trainer (scanned layers) and sampler (unrolled layers, key/value cache) compose the same
functions, so their numerics are the same. E is the width of one head. Norms, rotary embeddings,
softmax and the residual stream are float32 whatever the compute dtype; only products are not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from grpo_kernels.attention import AUTOMATIC, Attention
from jaxtyping import Array, Float, Int

from grpo_jax.models import leaves
from grpo_jax.models.config import ModelConfig, RopeScaling
from grpo_jax.models.products import FLOAT32, Products

# Given q [B T H E], k and v [B T K E] of the new tokens, returns what they attend to [B T H E]
# and anything else (a cache, or None).
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]

# The names of `leaves.layer` → arrays, of which the kernels may be `products.OutputMajor`.
LayerParams = Mapping[str, Any]

# The logical axes of the residual stream; see `placement.ACTIVATIONS`.
RESIDUAL = ("rows", "places", "embed")


def rms_norm(
  x: Float[Array, "... d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "... d"]:
  """Scales the last axis to unit root mean square, then by `weight`; float32.

      y = w x / √(mean(x²) + ε)

  Reference:
    Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
  """
  x = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  return x * scale * _as_last_axis(weight.astype(jnp.float32), x.ndim)


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[np.ndarray, " half"]:
  """Returns the rotary frequencies ωᵢ, in radians a position.

      ωᵢ = θ^(-2i / E),  i = 0 .. E/2 - 1, then scaled

  "linear" divides all by `factor`. "llama3" divides those of a wavelength 2π/ω above
  `original / low_freq_factor` positions by `factor`, keeps those below
  `original / high_freq_factor`, and interpolates between.

  Reference:
    Su et al. 2021, arXiv:2104.09864, section 3.2.2; Llama 3.1's reference code, `apply_scaling`.
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
  if scaling is None:
    return frequencies
  if scaling.kind == "linear":
    return (frequencies / scaling.factor).astype(np.float32)
  turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
  span = scaling.high_freq_factor - scaling.low_freq_factor
  share = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
  return (((1 - share) / scaling.factor + share) * frequencies).astype(np.float32)


def rope_angles(
  positions: Int[Array, "B T"], config: ModelConfig
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
  """Returns cosine and sine of position × frequency, for `rope`; the same in every layer."""
  frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
  angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, :]
  return jnp.cos(angles), jnp.sin(angles)


def rope(
  x: Float[Array, "B T heads E"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T heads E"]:
  """Rotates every head; component i is paired with i + E/2 (Hugging Face's layout, not GGUF's)."""
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = cos[:, :, None, :], sin[:, :, None, :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def project_qkv(
  params: LayerParams,
  x: Float[Array, "B T D"],
  cos: Float[Array, "B T half"],
  sin: Float[Array, "B T half"],
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T K E"], Float[Array, "B T K E"]]:
  """Projects normed inputs to rotated queries and keys, and values.

  Args:
    params: of one layer.
    x: input of the layer, normed.
    cos: of `rope_angles`.
    sin: of `rope_angles`.
    config: sizes and switches.
    products: how products are computed.
  """
  found = products.dots(params, ("q", "k", "v"), x, products.out_dtype)
  heads = []
  for name, y in zip(("q", "k", "v"), found, strict=True):
    y = _biased(params, name, y.astype(jnp.float32), products)
    heads.append(_split_heads(y, leaves.AXES[name][1], config, products))
  q, k, v = heads
  if config.qk_norm:
    q = rms_norm(q, params["q_norm"], config.rms_norm_eps)
    k = rms_norm(k, params["k_norm"], config.rms_norm_eps)
  return rope(q, cos, sin), rope(k, cos, sin), v


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
) -> Float[Array, "B T D"]:
  """Applies the gated MLP, W_down (silu(W_gate x) ⊙ W_up x), to normed inputs.

  Reference:
    Shazeer 2020, arXiv:2002.05202, SwiGLU, equation 6.
  """

  def gated(gate, up):
    gate = _biased(params, "gate", gate.astype(jnp.float32), products)
    up = _biased(params, "up", up.astype(jnp.float32), products)
    return (jax.nn.silu(gate) * up).astype(products.out_dtype)

  if products.out_dtype != jnp.float32:
    # So that the backward pass keeps gate and up alone, rounded, and no float32 between them.
    gated = jax.checkpoint(gated, prevent_cse=False)
  gate, up = products.dots(params, ("gate", "up"), x, products.out_dtype)
  (y,) = products.dots(params, ("down",), gated(gate, up))
  return _biased(params, "down", y, products)


def _biased(params: LayerParams, name: str, y: Array, products: Products) -> Array:
  """Adds the bias of a kernel, if it has one."""
  bias = params.get(f"{name}_bias")
  if bias is None:
    return y
  return y + _as_last_axis(products.place(bias, leaves.bias_axes(name)), y.ndim)


def _split_heads(
  y: Float[Array, "B T _"], axis: str | None, config: ModelConfig, products: Products
) -> Float[Array, "B T _ E"]:
  """Splits the last axis into heads; a head lies on one device, or all heads on all devices."""
  shape = (*y.shape[:2], y.shape[2] // config.head_dim, config.head_dim)
  lies = ("rows", "places", axis, "width")
  if products.placement is not None and products.placement.activation(lies, shape)[2] is None:
    y = products.place(y, ("rows", "places", "width"))
  return products.place(y.reshape(shape), lies)


def block(
  params: LayerParams,
  x: Float[Array, "B T D"],
  cos: Float[Array, "B T half"],
  sin: Float[Array, "B T half"],
  attend: Attend,
  *,
  config: ModelConfig,
  products: Products = FLOAT32,
) -> tuple[Float[Array, "B T D"], Any]:
  """Applies one pre-norm decoder layer: attention, then MLP, each added to the residual stream.

  Args:
    params: of this layer, as `leaves.layer` names them.
    x: residual stream, float32.
    cos: of `rope_angles`.
    sin: of `rope_angles`.
    attend: (q, k, v) of these tokens → (what they attend to, anything else). A sampler writes k
      and v into its cache here, and returns the cache as the second result.
    config: sizes and switches.
    products: how products are computed.

  Returns:
    The residual stream after the layer; the second result of `attend`.
  """
  settings = {"config": config, "products": products}

  def norm(name, x):
    return rms_norm(x, products.place(params[name], ("embed",)), config.rms_norm_eps)

  x = products.place(x, RESIDUAL)
  attended, extra = attend(*project_qkv(params, norm("input_norm", x), cos, sin, **settings))
  x = x + project_output(params, attended, **settings)
  x = x + mlp(params, norm("mlp_norm", x), **settings)
  return products.place(x, RESIDUAL), extra


class Block(nn.Module):
  """One decoder layer that owns its parameters; a body for `nn.scan`.

  Attributes:
    config: Sizes and switches.
    products: How matrix products are computed.
    attention: How the tokens of packed rows attend.
  """

  config: ModelConfig
  products: Products = FLOAT32
  attention: Attention = AUTOMATIC

  @nn.compact
  def __call__(self, x, cos, sin, segment_ids, branch_ids):
    """Applies `block` to packed rows; returns (residual stream, None) as scan wants."""
    params = {
      name: self.param(name, initializer(leaf.kind), leaf.shape)
      for name, leaf in leaves.layer(self.config).items()
    }
    attend = within_rows(self.attention, segment_ids, branch_ids, self.products)
    settings = {"config": self.config, "products": self.products}
    return block(params, x, cos, sin, attend, **settings)


def within_rows(
  attention: Attention,
  segment_ids: Int[Array, "B T"],
  branch_ids: Int[Array, "B T"] | None,
  products: Products,
) -> Attend:
  """Returns the function by which the tokens of packed rows attend; its second result is None."""

  def attend(q, k, v):
    return attention(q, k, v, segment_ids, branch_ids, products=products), None

  return attend


def initializer(kind: str) -> nn.initializers.Initializer:
  """Returns the initialiser of a kind of leaf: norms 1, biases 0, the others N(0, 0.02²)."""
  return _INITIALIZERS[kind]


def _as_last_axis(vector: Array, ndim: int) -> Array:
  """Returns [1 ... 1 D], to be broadcast against an array of `ndim` axes."""
  return jnp.expand_dims(vector, tuple(range(ndim - 1)))


_INITIALIZERS = {
  "kernel": nn.initializers.normal(0.02),
  "embedding": nn.initializers.normal(0.02),
  "norm": nn.initializers.ones,
  "bias": nn.initializers.zeros,
}
