"""A sequence classifier (reward model): a decoder, and a matrix that scores one state. Pure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import AUTOMATIC, Attention
from jaxtyping import Array, Float, Int

from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import FLOAT32, Products

# {"body": of `transformer`, without a head, "score": [labels, hidden_size]}.
Params = dict[str, Any]


def scores(
  params: Params,
  config: ModelConfig,
  tokens: Int[Array, "B T"],
  lengths: Int[Array, " B"],
  pool_at: Int[Array, " B"],
  *,
  products: Products = FLOAT32,
  attention: Attention = AUTOMATIC,
) -> Float[Array, "B C"]:
  """Scores sequences, one per row, padded on the right.

      s = W h(xₚ),  p the place of the last token that counts

  Args:
    params: Parameters of the body and the score matrix.
    config: Config of the body.
    tokens: Ids of the sequences; any valid id after a sequence's end.
    lengths: Number of tokens of each row's sequence.
    pool_at: Place p of each row; see `pooled_place`.
    products: Computation of the body's matrix products; the score's own is in float32.
    attention: Choice of attention.

  Returns:
    The C logits of each sequence.

  Reference:
    The class `GenericForSequenceClassification` of transformers.
  """
  places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  is_token = (places < lengths[:, None]).astype(jnp.int32)
  inputs = tokens, places, is_token
  hidden = transformer.hidden_states(
    params["body"], config, *inputs, products=products, attention=attention
  )
  pooled = jnp.take_along_axis(hidden, pool_at[:, None, None], axis=1)[:, 0]
  head = params["score"].T.astype(jnp.float32)
  return jnp.matmul(pooled, head, precision=jax.lax.Precision.HIGHEST)


def pooled_place(tokens: Int[np.ndarray, " T"], pad_id: int | None) -> int:
  """Returns the place of the last token that is not `pad_id`, as in transformers.

  A conversation that ends in the padding token (some models' end of turn) is pooled before
  it, as in training. None: the last token. 0 if there is only padding.
  """
  if pad_id is None:
    return len(tokens) - 1
  return int(max(np.flatnonzero(tokens != pad_id), default=0))
