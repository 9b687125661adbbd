"""Losses, advantages and schedules as users write them, right and wrong; named by dotted paths."""

import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.rl import advantages as ours
from grpo_jax.rl import losses

CALLS = [0.0]


def clipped(policy_logprobs, old_logprobs, advantages, *, clip_low=0.2, clip_high=0.2):
  """A copy of the clipped surrogate."""
  ratio = losses.ratio(policy_logprobs, old_logprobs)
  bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  return jnp.maximum(-ratio * advantages, -bounded * advantages)


def group_mean(rewards, mask, *, eps=1e-6):
  """A copy of GRPO's advantages."""
  return ours.group_relative(rewards, mask, eps=eps)


def cosine(learning_rate, total_steps, final_share=0.0):
  """A copy of the cosine schedule."""
  return optax.cosine_decay_schedule(learning_rate, total_steps, alpha=final_share)


def with_args(policy_logprobs, advantages, *, power=1.0, other):
  return -advantages * policy_logprobs * power + other * policy_logprobs**2


def by_completion(policy_logprobs, old_logprobs, advantages, mask, sequence_ids):
  ratio = losses.sequence_ratio(policy_logprobs, old_logprobs, mask, sequence_ids)
  return -ratio * advantages


def by_row(policy_logprobs, advantages, mask):
  return -advantages * policy_logprobs / jnp.sum(mask * jnp.exp(policy_logprobs), -1, keepdims=True)


def mixing(policy_logprobs, advantages):
  return -advantages * (policy_logprobs - jnp.mean(policy_logprobs))


def scalar(policy_logprobs, advantages):
  return -jnp.mean(policy_logprobs * advantages)


def half(policy_logprobs, advantages):
  return (-policy_logprobs * advantages).astype(jnp.bfloat16)


def pair(policy_logprobs, advantages):
  return -policy_logprobs * advantages, {}


def infinite(policy_logprobs, advantages):
  return -advantages / (advantages + 0.5) * policy_logprobs


def without_gradient(policy_logprobs, advantages):
  return -advantages + 0.0 * policy_logprobs


def branching(policy_logprobs, advantages):
  return -policy_logprobs if advantages[0, 0] > 0 else policy_logprobs


def raising(policy_logprobs, advantages):
  raise KeyError("of\nthe user")


def nameless(logprobs, advantages):
  return -logprobs * advantages


def impure(policy_logprobs, advantages):
  import jax

  def draw(x):
    CALLS[0] += 1.0
    return np.full(x.shape, CALLS[0], np.float32)

  like = jax.ShapeDtypeStruct(policy_logprobs.shape, jnp.float32)
  return -policy_logprobs * advantages * jax.pure_callback(draw, like, advantages)


def of_padding(rewards, mask):
  return rewards - jnp.mean(rewards)


def zero(rewards, mask):
  return 0.0 * rewards


def by_prompt(rewards, mask):
  return jnp.sum(rewards, axis=-1)


def not_a_number(rewards, mask):
  count = jnp.sum(mask, -1, keepdims=True)
  centered = jnp.where(mask, rewards - jnp.sum(rewards, -1, keepdims=True) / count, 0.0)
  return centered / jnp.sqrt(jnp.sum(centered**2, -1, keepdims=True) / count)


def of_components(rewards, mask, components):
  return jnp.where(mask, jnp.sum(components, axis=0) - 1.0, 0.0)


def negative(learning_rate):
  return lambda step: learning_rate * (1.0 - step / 2)


def vector(learning_rate):
  return lambda step: jnp.full((2,), learning_rate)


def no_function(learning_rate):
  return learning_rate


def falling(learning_rate, total_steps, *, by=2.0):
  return lambda step: learning_rate * by ** (-step / total_steps)


not_callable = 3


def rateless(learning_rate):
  return {}["rate"]
