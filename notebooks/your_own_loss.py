# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own loss
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/your_own_loss.ipynb)
#
# The mathematics of GRPO is a library of pure functions on arrays, `grpo_jax.rl`. This notebook
# writes the clipped loss of GRPO in a few lines, compares it with the one of the library, and then
# trains a model with it. The first part needs no model and no accelerator.

# %% [markdown]
# The next cell installs the package if it is missing, as on Colab; that takes a few minutes. For a
# GPU write `grpo-jax[notebook,cuda12]`, for a TPU `grpo-jax[notebook,tpu]`.

# %% tags=["active-ipynb", "install"]
# try:
#   import grpo_jax
# except ImportError:
#   %pip install --quiet "grpo-jax[notebook] @ git+https://github.com/grpo-jax/grpo-jax"

# %% [markdown]
# ## The loss in a few lines
#
# A group of completions of one prompt has rewards $r_i$; the advantage of a completion says how
# much better it is than its group, $A_i = (r_i - \bar r) / (\sigma_r + \epsilon)$. With the ratio
# $\rho = \pi / \pi_{old}$ of each token, the loss is the mean over all tokens of $-\min(\rho A,
# \mathrm{clip}(\rho, 1 - c, 1 + c) A)$.

# %%
import jax
import jax.numpy as jnp

from grpo_jax.rl import advantages, aggregate, masks, objectives
from grpo_jax.types import LossTokens


def my_loss(policy_logprobs, advantages, old_logprobs, clip_low=0.2, clip_high=0.2):
  """Loss of each token, [B N]: to be minimised."""
  ratio = jnp.exp(policy_logprobs - old_logprobs)
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return -jnp.minimum(ratio * advantages, clipped * advantages)


rewards = jnp.asarray([[1.0, 0.0, 0.0, 1.0]])  # one prompt, four completions: [P G].
stop_id = 2
completions = jnp.asarray([[5, 6, 2, 0], [5, 2, 0, 0], [7, 7, 7, 2], [7, 5, 2, 0]])  # [B N]
mask = masks.until_stop(completions, stop_ids=(stop_id,))  # what follows the stop is padding.
mine = advantages.grpo(rewards).reshape(-1, 1) * mask  # [B N]
old = -jax.random.exponential(jax.random.key(0), mask.shape)  # log-probabilities when sampled.
policy = old + 0.3 * jax.random.normal(jax.random.key(1), mask.shape)  # and now.


def mean_loss(policy_logprobs):
  per_token = my_loss(policy_logprobs, mine, old)
  return jnp.sum(per_token * mask) / jnp.sum(mask)


value, gradient = jax.value_and_grad(mean_loss)(policy)
print(f"loss {value:.6f}")

# %% [markdown]
# ## The same from the library
#
# `objectives.make` combines a loss, a KL term, an importance correction and a reduction by name.
# Its value and its gradient must be those of the lines above.

# %%
objective = objectives.make(loss="clipped", kl_coef=0.0)
tokens = LossTokens(
  mask=mask,
  sequence_ids=None,  # a row is one completion.
  advantages=jnp.broadcast_to(mine, mask.shape),
  behavior_logprobs=old,
  old_logprobs=old,
)
denominators = aggregate.local_denominators(mask)


def of_library(policy_logprobs):
  return objective(policy_logprobs, None, tokens, denominators)


(expected, metrics), expected_gradient = jax.value_and_grad(of_library, has_aux=True)(policy)
assert jnp.allclose(value, expected, atol=1e-6)
assert jnp.allclose(gradient, expected_gradient, atol=1e-6)
print("loss and gradient agree; largest difference", float(abs(gradient - expected_gradient).max()))

# %% [markdown]
# ## Train with it
#
# The trainer takes a function of yours by its path: `__main__` is this notebook. It is given the
# arrays that its parameters name, and checked before a model is loaded: shapes, dtypes, purity, and
# that its gradient reaches the policy. The contract is in docs/algorithms.md.

# %%
import grpo_jax
from grpo_jax import notebook

run = grpo_jax.train(
  "quickstart",
  "runs/your_own_loss",
  on_step=notebook.LiveCurve(),
  total_steps=4,
  **{
    "loss.loss": "__main__.my_loss",
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.sinks": ("jsonl", "tensorboard"),
  },
)
run

# %% [markdown]
# A mistake in a loss is one message, before anything is computed. This one forgot the policy:


# %%
def forgetful(policy_logprobs, advantages):
  return -advantages


mistake: dict = {"loss.loss": "__main__.forgetful"}
try:
  grpo_jax.train("quickstart", "runs/mistake", **mistake)
except grpo_jax.configuration.ConfigError as error:
  print(error)
