"""Rotary position embeddings: frequencies, angles and the rotation. Pure.

Angles are float32, whatever the dtype of products.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.layer_kinds import RopeScaling


def frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[np.ndarray, " half"]:
  """Returns the rotary frequencies ωᵢ, in radians per position.

      ωᵢ = θ^(-2i / E),  i = 0 .. E/2 - 1, then scaled

  A frequency makes `original ω / 2π` turns in the original context. The kinds of scaling:

  * "linear" divides all frequencies by `factor`.
  * "llama3" divides those that make up to `low_freq_factor` turns by `factor`, keeps those that
    make `high_freq_factor` or more, and interpolates between, linearly in turns.
  * "yarn" does the same between `beta_slow` and `beta_fast` turns, linearly in i.
  * "longrope" divides each by an entry of `short_factor`.
  * "dynamic" keeps all.

  The last two are those of contexts up to `scaling.longest`; see there.

  Args:
    head_dim: Width E of a head.
    theta: Base θ.
    scaling: Kind of scaling and its settings; None: unscaled.

  Reference:
    Su et al. 2021, arXiv:2104.09864, section 3.2.2; Llama 3.1's reference code, `apply_scaling`;
    Peng et al. 2023, arXiv:2309.00071, section 3.2; Ding et al. 2024, arXiv:2402.13753.
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  unscaled = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
  if scaling is None or scaling.kind == "dynamic":
    return unscaled
  if scaling.kind == "longrope":
    return unscaled / np.asarray(scaling.short_factor, np.float32)
  if scaling.kind == "linear":
    return (unscaled / scaling.factor).astype(np.float32)
  kept = _kept_by_yarn if scaling.kind == "yarn" else _kept_by_llama3
  share = kept(unscaled, theta, scaling)
  return (((1 - share) / scaling.factor + share) * unscaled).astype(np.float32)


def _kept_by_llama3(unscaled: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
  """Returns the share of each frequency that "llama3" does not divide."""
  del theta
  turns = scaling.original_max_position_embeddings * unscaled / (2 * np.pi)
  span = scaling.high_freq_factor - scaling.low_freq_factor
  return np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)


def _kept_by_yarn(unscaled: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
  """Returns the share of each frequency that "yarn" does not divide."""
  half = len(unscaled)

  def component(turns: float) -> float:
    """Returns the index i, not rounded, of the frequency with this number of turns."""
    context = scaling.original_max_position_embeddings
    return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

  first, last = component(scaling.beta_fast), component(scaling.beta_slow)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  # The upper bound is one of all E components although half of them exist, as the authors have it.
  first, last = max(first, 0), min(last, 2 * half - 1)
  if first == last:
    last += 0.001
  return 1.0 - np.clip((np.arange(half, dtype=np.float32) - first) / (last - first), 0.0, 1.0)


def angles(
  positions: Int[Array, "B T"], config: ModelConfig, table: int | None = 0
) -> tuple[Float[Array, "B T half"] | None, Float[Array, "B T half"] | None]:
  """Returns cosine and sine of position × frequency, times the attention factor, for `rotated`.

  Args:
    positions: Position of each token.
    config: Sizes and switches.
    table: Index in `config.ropes`; None for a layer without rotary embedding, which has no angles.
  """
  if table is None:
    return None, None
  chosen = config.ropes[table]
  found = frequencies(config.head_dim, chosen.theta, chosen.scaling)
  turned = positions[:, :, None].astype(jnp.float32) * jnp.asarray(found)[None, None, :]
  cos, sin = jnp.cos(turned), jnp.sin(turned)
  factor = 1.0 if chosen.scaling is None else chosen.scaling.attention_factor
  return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotated(
  x: Float[Array, "B T heads E"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T heads E"]:
  """Rotates every head; component i is paired with i + E/2 (Hugging Face's layout, not GGUF's)."""
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = cos[:, :, None, :], sin[:, :, None, :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
