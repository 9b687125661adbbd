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
# On Colab, the next cell installs the package; this takes a few minutes. Elsewhere it does nothing:
# install the package first (in a clone: `pip install -e ".[notebook]"`).

# %% tags=["install"]
import os
import pathlib
import shutil
import subprocess
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to other notebooks.
if "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ:
  if "jax" in sys.modules:  # Colab has an older one, which this cell replaces.
    raise RuntimeError("JAX is imported already: choose Runtime > Restart session, then run again")
  has_tpu = "TPU_ACCELERATOR_TYPE" in os.environ or any(pathlib.Path("/dev").glob("accel*"))
  has_gpu = shutil.which("nvidia-smi") is not None
  extra = "notebook,tpu" if has_tpu else "notebook,cuda12" if has_gpu else "notebook"
  address = "https://github.com/grpo-jax/grpo-jax"
  package = f"grpo-jax[{extra}] @ git+{address}"
  # The versions that the tests ran with, of this Python.
  versions = f"{address}/raw/main/constraints/py3{sys.version_info[1]}.txt"
  pip = [sys.executable, "-m", "pip", "install", "--quiet", package, "--constraint", versions]
  subprocess.run(pip, check=True)

# %% tags=["settings"]
import tempfile

import grpo_jax
from grpo_jax import notebook
from grpo_jax.models import tiny

options = {}
if os.environ.get("GRPO_JAX_NOTEBOOK_FAST") == "1":  # for tests: a tiny random model, a few steps.
  os.chdir(tempfile.mkdtemp())

  def letters(prompt, completion, info):  # what a random model can earn.
    return sum(map(ord, completion)) % 7 / 6

  options = {
    "reward": letters,
    "model.path": str(tiny.write("tiny")),
    "total_steps": 2,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "sampling.max_tokens": 8,
    "evaluation.num_prompts": 4,
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
  }

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
run = grpo_jax.train(
  "quickstart",
  "runs/your_own_loss",
  on_step=notebook.LiveCurve(),
  **{
    "loss.loss": "__main__.my_loss",
    "total_steps": 4,
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.sinks": ("jsonl", "tensorboard"),
    **options,
  },
)
run

# %% [markdown]
# A mistake in a loss is one message, before anything is computed. This one forgot the policy:


# %%
def forgetful(policy_logprobs, advantages):
  return -advantages


try:
  grpo_jax.train("quickstart", "runs/mistake", **{**options, "loss.loss": "__main__.forgetful"})
except grpo_jax.configuration.ConfigError as error:
  print(error)
