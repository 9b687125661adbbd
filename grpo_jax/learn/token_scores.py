"""What the policy computes for tokens that are learned from: logprobs, entropy, a loss. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from grpo_kernels.attention import AUTOMATIC, Attention
from grpo_kernels.linear_logprobs.sharded import Partition
from grpo_kernels.row_parts import RowParts
from grpo_kernels.truncation import Truncation
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import FLOAT32, Products
from grpo_jax.rl import diagnostics
from grpo_jax.rl.logprobs import token_logprobs, token_objective, truncated_token_logprobs
from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Denominators, Mean, Metrics


class TokenScores(NamedTuple):
  """What a `LogprobsFn` computes for the tokens that are learned from; nats."""

  logprobs: Float[Array, "B N"]  # log πθ of the distribution that is trained.
  entropy: Float[Array, "B N"] | None = None  # its entropy; None: not computed.
  # With top-k, top-p or min-p only: log πθ of the whole softmax, and whether these filters alone
  # would not have kept the token.
  full: Float[Array, "B N"] | None = None
  is_outside: Bool[Array, "B N"] | None = None
  router: Metrics | None = None  # of a mixture of experts; None: the model has none.


# (logprobs of a microbatch) → None; for displays of progress.
OnMicrobatch = Callable[[Any], None]
# (full weights, batch, with entropy) → the fields of a `TokenScores`, the first two at least.
LogprobsFn = Callable[[Any, Batch, bool], Sequence[Any]]
# (full weights, batch, denominators, with entropy) → loss, log πθ [B N], the entropy or None, and
# the metrics of the router, as `TokenScores.router`.
LossFn = Callable[
  [Any, Batch, Denominators, bool], tuple[Array, Array, Array | None, Metrics | None]
]

# What to do if memory is short for programs that compute logprobs; for error messages.
SMALLER_BATCHES = (
  "lower batching.microbatch_tokens, or split the weights over more devices with mesh.fsdp"
)


def make_logprobs(
  config: ModelConfig,
  *,
  temperature: float = 1.0,
  products: Products = FLOAT32,
  remat: str = "full",
  attention: Attention = AUTOMATIC,
  implementation: str | None = None,
  partition: Partition | None = None,
  truncation: Truncation | None = None,
) -> LogprobsFn:
  """Makes the function from parameters and batch to the logprobs of the loss tokens.

  Args:
    config: Sizes of the model.
    temperature: Temperature at which the completions were sampled.
    products: Options of matrix products, including those of the head.
    remat: Activations that the backward pass recomputes; see `transformer.Transformer`.
    attention: Attention among the tokens of packed rows.
    implementation: Implementation of `grpo_kernels.linear_logprobs`; None: chosen by platform.
    partition: Split of the head and its tokens over a mesh; see `sharding.head_partition`.
    truncation: Filters of the distribution that is trained; None: the whole softmax.
  """
  hidden_states = _make_hidden_states(config, products, remat, attention)

  def logprobs(params: Any, batch: Batch, with_entropy: bool) -> TokenScores:
    head, layout = transformer.head(params, config)
    settings: dict[str, Any] = {
      "head_layout": layout,
      "temperature": temperature,
      "return_entropy": with_entropy,
      "partition": partition,
      "parts": _parts(attention, batch),
    }
    hidden, router = hidden_states(params, batch)
    if truncation is not None:
      found = truncated_token_logprobs(hidden, head, batch, truncation, **settings)
      return TokenScores(*found)._replace(router=router)
    outputs = token_logprobs(hidden, head, batch, implementation=implementation, **settings)
    scores = TokenScores(*outputs) if isinstance(outputs, tuple) else TokenScores(outputs)
    return scores._replace(router=router)

  return logprobs


def make_token_loss(
  config: ModelConfig,
  objective: Objective,
  *,
  temperature: float = 1.0,
  products: Products = FLOAT32,
  remat: str = "full",
  attention: Attention = AUTOMATIC,
  partition: Partition | None = None,
) -> LossFn:
  """Makes the function from parameters and batch to a token-local loss, to be minimised.

  The head's gradients are computed in the same sweep as the loss; see
  `grpo_jax.rl.logprobs.token_objective`. The arguments are those of `make_logprobs`.
  """
  hidden_states = _make_hidden_states(config, products, remat, attention)

  def loss(params: Any, batch: Batch, denominators: Denominators, with_entropy: bool):
    head, layout = transformer.head(params, config)
    hidden, router = hidden_states(params, batch)
    found = token_objective(
      hidden,
      head,
      batch,
      objective,
      denominators,
      head_layout=layout,
      temperature=temperature,
      return_entropy=with_entropy,
      partition=partition,
      parts=_parts(attention, batch),
    )
    return *found, router

  return loss


def _make_hidden_states(
  config: ModelConfig, products: Products, remat: str, attention: Attention
) -> Callable[[Any, Batch], tuple[Float[Array, "B T D"], Metrics | None]]:
  """Makes the function (params, batch) → hidden states [B T D], in the compute dtype.

  They are of parts of rows if the batch has an order. The function also returns the metrics of the
  routers; None: the model has none.
  """

  def hidden_states(params: Any, batch: Batch) -> tuple[Float[Array, "B T D"], Metrics | None]:
    inputs: Any = (batch.tokens, batch.positions, batch.segment_ids, batch.branch_ids)
    settings: Any = {"products": products, "remat": remat}
    settings["experts"] = experts = None if batch.experts is None else jnp.asarray(batch.experts)
    parts, order = _parts(attention, batch), batch.order
    if order is not None:
      order = jnp.asarray(order)
      settings["order"] = order
    found = transformer.outputs(params, config, *inputs, attention=attention, **settings)
    hidden, segment_ids = found.hidden.astype(products.compute_dtype), jnp.asarray(inputs[2])
    if config.mixture is None:
      return hidden, None
    if parts is not None and order is not None:
      segment_ids = parts.dealt(segment_ids, order)
      experts = None if experts is None else parts.dealt(experts, order)
    metrics = balance_metrics(found.extras["experts"], segment_ids, config.mixture.num_experts)
    if experts is not None:
      metrics |= replay_metrics(found.extras, experts, segment_ids)
    return hidden, metrics

  return hidden_states


def _parts(attention: Attention, batch: Batch) -> RowParts | None:
  """Returns the division of the batch's rows over a mesh; None: they are whole."""
  return None if batch.order is None else attention.parts


def balance_metrics(
  experts: Int[Array, "L B T k"], segment_ids: Int[Array, "B T"], count: int
) -> Metrics:
  """Returns how evenly the tokens of a microbatch are spread over the experts, as means of layers.

      "router/largest_load": X max_e f_e      "router/load_entropy": -Σ_e f_e ln f_e / ln X

  f_e is the share of expert e in all choices of a layer; both are 1 if all experts have as many.

  Args:
    experts: Experts of each token in each layer.
    segment_ids: Segment of each token; 0 is padding, which does not count.
    count: Number X of experts.
  """
  is_token = (segment_ids > 0).astype(jnp.float32)
  # Layer by layer: [L B T k X] would take gibibytes wherever it is not fused with its sum.
  in_layer = lambda chosen: jnp.sum(
    jax.nn.one_hot(chosen, count) * is_token[..., None, None], axis=(0, 1, 2)
  )
  chosen, tokens = jax.lax.map(in_layer, experts), jnp.sum(is_token)
  share = chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), 1.0)
  entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0)), axis=-1)
  largest = count * jnp.max(share, axis=-1)
  evenness = entropy / math.log(count) if count > 1 else jnp.ones_like(entropy)
  return {
    "router/largest_load": Mean(jnp.mean(largest) * tokens, tokens),
    "router/load_entropy": Mean(jnp.mean(evenness) * tokens, tokens),
  }


def replay_metrics(
  extras: Mapping[str, Array], experts: Int[Array, "B T L k"], segment_ids: Int[Array, "B T"]
) -> Metrics:
  """Returns what the replay of experts has changed.

  Args:
    extras: Outputs of the layers; "changed" [L B T] is the number of experts of each token that its
      router would not have chosen.
    experts: Experts to use; an entry below 0 leaves the token to the router.
    segment_ids: Segment of each token; 0 is padding.
  """
  is_token = (segment_ids > 0)[..., None]
  is_replayed = jnp.all(experts >= 0, axis=-1) & is_token
  counted = jnp.sum(is_replayed.astype(jnp.float32)) * experts.shape[-1]
  changed = jnp.sum(jnp.moveaxis(extras["changed"], 0, -1) * is_token, dtype=jnp.float32)
  return {"router/changed_share": Mean(changed, counted)}


def truncation_metrics(found: TokenScores, mask: Bool[Array, "B N"]) -> Metrics:
  """Returns the share of the tokens that the trainer's own filters would not have kept."""
  if found.is_outside is None:
    return {}
  is_outside = found.is_outside.astype(jnp.float32)
  return {"mismatch/outside_truncation_share": diagnostics.token_average(is_outside, mask)}
