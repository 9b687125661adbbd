"""A probe that checks, by logprobs, whether the servers use the weights that were sent.

After every change of the weights each server scores one fixed prompt. In float32 a server that
kept the old weights, lost a tensor or swapped two is off by far more than rounding. In bfloat16
rounding alone is up to 0.3 nats per token, which hides a single small training step. There the
probe finds wrong tensors, and the version that the server reports shows that it loaded the folder.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import AUTOMATIC, Attention
from jaxtyping import Float

from grpo_jax import processes
from grpo_jax.compilation import precision
from grpo_jax.engines.base import WrongWeights
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_jax.processes import arrays
from grpo_jax.rl.logprobs import sequence_logprobs

LENGTH = 32  # length of the prompt, in tokens.
# Largest difference of a token, in nats. TF32 has 3 bits more than bfloat16, therefore an eighth.
TOLERANCES = {"float32": 3e-4, "tensorfloat32": 0.2, "default": 0.2, "bfloat16": 1.5}


def probe_ids(vocab_size: int) -> tuple[int, ...]:
  """Returns the fixed prompt: ids from all over the vocabulary."""
  return tuple(np.random.default_rng(0).integers(0, vocab_size, LENGTH).tolist())


class Probe:
  """The prompt, and the trainer's own logprobs for it."""

  def __init__(
    self,
    config: ModelConfig,
    *,
    compute_dtype: Any,
    num_valid_tokens: int,
    product_dtype: Any = None,
    matmul_precision: str | None = None,
    attention: Attention = AUTOMATIC,
  ):
    """Makes a probe.

    Args:
      config: Config of the model.
      compute_dtype: Compute type of the trainer.
      num_valid_tokens: Number of valid ids; ids are smaller.
      product_dtype: Product type of the trainer; see `products.Products`.
      matmul_precision: Precision of the trainer's float32 products; see `precision.resolve`.
      attention: Choice of attention in the trainer.
    """
    self.ids = probe_ids(num_valid_tokens)
    self._config = config
    self._products = Products(compute_dtype, product_dtype)
    self._matmul_precision = precision.resolve(matmul_precision, compute_dtype)
    self._attention = attention

  def logprobs(self, params: Any) -> Float[jax.Array | np.ndarray, " n"]:
    """Returns the trainer's log-probability of each id but the first, in nats.

    They may still be in computation when this returns, while the servers load the weights; not if
    they are spread over several processes, all of which have to call this.
    """
    tokens = np.asarray(self.ids, np.int32)[None]
    settings = self._config, self._products, self._matmul_precision, self._attention
    values = _logprobs(params, tokens, *settings)
    return values if processes.count() == 1 else arrays.fetch(values)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _logprobs(
  params: Any,
  tokens: jax.Array,
  config: ModelConfig,
  products: Products,
  matmul_precision: str | None,
  attention: Attention,
) -> jax.Array:
  with precision.scope(matmul_precision):
    return _traced_logprobs(params, tokens, config, products, attention)


def _traced_logprobs(
  params: Any, tokens: jax.Array, config: ModelConfig, products: Products, attention: Attention
) -> jax.Array:
  positions = jnp.arange(tokens.shape[1])[None]
  inputs = tokens, positions, jnp.ones_like(tokens)
  hidden = transformer.hidden_states(
    params, config, *inputs, products=products, attention=attention
  )
  head, layout = transformer.head(params, config)
  hidden = hidden.astype(products.compute_dtype)  # the head's products match the trainer's, too.
  values = sequence_logprobs(hidden, head, tokens, head_layout=layout, implementation="xla_chunked")
  assert not isinstance(values, tuple)  # no entropy was requested.
  return values[0, 1:]


def check(
  served: Float[np.ndarray, " n"],
  expected: Float[np.ndarray, " n"],
  *,
  tolerance: float,
  what: str,
) -> float:
  """Returns the largest difference of the logprobs, in nats.

  Raises:
    WrongWeights: The difference is above the tolerance, or not finite.
  """
  largest = float(np.abs(served - expected).max())
  if not largest <= tolerance:
    raise WrongWeights(
      f"{what} does not sample from the weights that it was sent: its logprobs of the probe differ"
      f" from the trainer's by up to {largest:.3g} nats (engine.sglang.probe_tolerance is"
      f" {tolerance:g}); server {np.round(served[:4], 3).tolist()} ..., trainer"
      f" {np.round(expected[:4], 3).tolist()} ..."
    )
  return largest
