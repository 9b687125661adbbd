"""The number of operations of a model's gradients. Pure."""

import collections
import math

from grpo_jax.batching.packing import Cost
from grpo_jax.models import leaves
from grpo_jax.models.config import ModelConfig

# Reading every weight and writing every gradient takes as long as the products of this many places;
# measured on two CPU cores with 135M parameters in float32.
MICROBATCH_PLACES = 36

# Operations relative to one forward pass, including the backward pass and recomputation.
_OF_LAYERS = {"full": 4, "dots": 3, "none": 3}
# Of attention the backward pass computes the scores again, and four more products of their size.
_OF_ATTENTION = {"full": 4.5, "dots": 3.5, "none": 3.5}
_OF_HEAD = 3


def update_cost(config: ModelConfig, *, remat: str = "full") -> Cost:
  """Returns the operations of a gradient; a multiplication with an addition counts as two.

  Args:
    config: Sizes of the model.
    remat: Activations that the backward pass recomputes; see `transformer.Transformer`.
  """
  width, head = config.hidden_size, config.head_dim
  weights = config.num_layers * leaves.used_by_token(config)
  layer = leaves.layer(config).values()
  every = config.num_layers * sum(math.prod(x.shape) for x in layer if len(x.shape) > 1)
  of_pair = 4.0 * config.num_layers * config.num_heads * head
  place = _OF_LAYERS[remat] * 2.0 * weights
  return Cost(
    place=place,
    pair=_OF_ATTENTION[remat] * of_pair,
    loss_place=_OF_HEAD * 2.0 * config.vocab_size * width,
    microbatch=MICROBATCH_PLACES * _OF_LAYERS[remat] * 2.0 * every,
    windows=shares_of_windows(config),
  )


def shares_of_windows(config: ModelConfig) -> tuple[tuple[int | None, float], ...]:
  """Returns the windows of the layers, each with its share of the layers."""
  counts = collections.Counter(kind.window for kind in config.kinds)
  return tuple((window, count / config.num_layers) for window, count in counts.items())
