"""A mixture of experts: which experts compute a token, and the sum of what they compute. Pure.

The router is frozen: its weight has no gradient, as public recipes of GRPO have it, and there is no
loss for its balance. Gradients flow through its probabilities to the tokens.

Experts with an adapter are merged, W + s A B in float32, layer by layer: groups of rows then have
the products that they have without one, and what is trained is what an engine with merged weights
computes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import rounding
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from grpo_jax.models import expert_dispatch, leaves, lora
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import WEIGHT_PRODUCT, LowRank, Products

# (W_gate x, W_up x) → the input of W_down.
Gated = Callable[[Array, Array], Array]


def chosen(
  params: Mapping[str, Any],
  x: Float[Array, "B T D"],
  given: Int[Array, "B T k"] | None,
  *,
  mixture: Mixture,
  products: Products,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"], Int[Array, "B T k"]]:
  """Chooses experts for each token, by the k largest probabilities of the router; float32.

      p = softmax(x W_r),   w_j = p_j  (or p_j / Σ_i p_i over the chosen ones, if normalised)

  Args:
    params: Parameters of one layer.
    x: Input of the layer's feed-forward part, normed.
    given: Experts to use in place of the router's; an entry below 0 leaves all experts of its token
      to the router.
    mixture: Sizes of the experts.
    products: Options of matrix products.

  Returns:
    The experts of each token; their weights; the experts that the router alone would choose.

  Reference:
    Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, section 2.1; Qwen3 technical report,
    arXiv:2505.09388, section 2; for given experts Ma et al. 2025, "Stabilizing MoE Reinforcement
    Learning by Aligning Training and Inference Routers", arXiv:2510.11370.
  """
  exact = dataclasses.replace(products, compute_dtype=jnp.float32, out_dtype=jnp.float32)
  router = {leaves.ROUTER: jax.lax.stop_gradient(params[leaves.ROUTER])}
  with jax.default_matmul_precision("highest"):
    (logits,) = exact.dots(router, (leaves.ROUTER,), x)
  probabilities = jax.nn.softmax(logits, axis=-1)
  _, own = jax.lax.top_k(jax.lax.stop_gradient(probabilities), mixture.experts_per_token)
  experts = own
  if given is not None:
    is_given = jnp.all(given >= 0, axis=-1, keepdims=True)
    experts = jnp.where(is_given, given, own)
  weights = jnp.take_along_axis(probabilities, experts, axis=-1)
  if mixture.normalised:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return experts.astype(jnp.int32), weights, own


def changed(experts: Int[Array, "B T k"], own: Int[Array, "B T k"]) -> Int[Array, "B T"]:
  """Returns how many of the experts of each token its router would not have chosen."""
  is_own = jnp.any(experts[..., None] == own[..., None, :], axis=-1)
  return jnp.sum(~is_own, axis=-1, dtype=jnp.int32)


def computed(
  params: Mapping[str, Any],
  x: Float[Array, "B T D"],
  experts: Int[Array, "B T k"],
  weights: Float[Array, "B T k"],
  gated: Gated,
  *,
  mixture: Mixture,
  products: Products,
) -> Float[Array, "B T D"]:
  """Returns Σ_j w_j W_down,j f(W_gate,j x, W_up,j x) over the experts j of each token, float32.

  Args:
    params: Parameters of one layer; kernels of experts may be `LowRank`.
    x: Input of the layer's feed-forward part, normed.
    experts: Experts of each token, made by `chosen`.
    weights: Their weights.
    gated: Function f.
    mixture: Sizes of the experts.
    products: Options of matrix products.
  """
  if products.every_expert:
    return _by_every_expert(params, x, experts, weights, gated, products)
  batch, _, width = x.shape
  sizes = {"width": width, "batch": batch}
  dispatch = expert_dispatch.make(mixture, products.placement, products.compute_dtype, **sizes)
  routed = expert_dispatch.routed(dispatch, experts)
  rows: Any = expert_dispatch.to_experts(dispatch, x, routed)

  def dots(names: tuple[str, ...], x: Array, dtype: Any) -> tuple[Array, ...]:
    def of(x: Array, kernels: list[Any], sizes: Array) -> tuple[Array, ...]:
      return expert_dispatch.dots(dispatch, x, _merged(kernels), names, sizes, dtype)

    kernels = [params[name] for name in names]
    if any(isinstance(w, LowRank) for w in kernels):  # the backward pass merges again.
      of = jax.checkpoint(of, prevent_cse=False)
    found = of(x, kernels, routed.sizes)
    return tuple(checkpoint_name(y, WEIGHT_PRODUCT) for y in found)

  gate, up, down = leaves.EXPERTS
  (y,) = dots((down,), gated(*dots((gate, up), rows, products.out_dtype)), jnp.float32)
  return expert_dispatch.from_experts(dispatch, y, weights, routed)


def _by_every_expert(
  params: Mapping[str, Any],
  x: Float[Array, "B T D"],
  experts: Int[Array, "B T k"],
  weights: Float[Array, "B T k"],
  gated: Gated,
  products: Products,
) -> Float[Array, "B T D"]:
  """Returns `computed` by the products of all tokens with all experts: the definition.

  For few tokens on a mesh, which read nearly all experts anyway: weights stay where they are.
  """
  gate, up, down = _merged([params[name] for name in leaves.EXPERTS])
  share = jax.nn.one_hot(experts, gate.shape[0], dtype=jnp.float32)
  share = jnp.einsum("btkx,btk->btx", share, weights, precision=jax.lax.Precision.HIGHEST)
  product = functools.partial(products.contract, "btd,xdf->btxf", out_dtype=products.out_dtype)
  hidden = gated(product(x, gate), product(x, up))
  hidden = rounding.rounded(hidden.astype(jnp.float32) * share[..., None], products.out_dtype)
  return products.contract("btxf,xfd->btd", hidden, down)


def _merged(kernels: list[Any]) -> list[Array]:
  return [lora.merged_of_layer(w) if isinstance(w, LowRank) else w for w in kernels]
