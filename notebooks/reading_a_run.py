# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a run
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/reading_a_run.ipynb)
#
# Every run leaves its metrics and all of its completions as JSON lines. This notebook reads them
# with pandas, and ends with a checklist. It opens `runs/quickstart` if that is there (the
# notebook [quickstart](quickstart.ipynb) makes it), and trains a few steps otherwise.

# %% [markdown]
# The next cell installs the package if it is missing, as on Colab; that takes a few minutes. For a
# GPU write `grpo-jax[notebook,cuda12]`, for a TPU `grpo-jax[notebook,tpu]`.

# %% tags=["active-ipynb", "install"]
# try:
#   import grpo_jax
# except ImportError:
#   %pip install --quiet "grpo-jax[notebook] @ git+https://github.com/grpo-jax/grpo-jax"

# %%
import grpo_jax

try:
  run = grpo_jax.open("runs/quickstart")
except FileNotFoundError:
  run = grpo_jax.train(
    "quickstart",
    "runs/quickstart",
    total_steps=4,
    **{"evaluation.every_steps": 0, "evaluation.at_start": False, "evaluation.at_end": False},
  )
run

# %% [markdown]
# ## Metrics: one row per step
#
# docs/metrics.md explains every name. Three come first: is the reward rising, how many completions
# teach nothing, and how random is the policy still?

# %%
metrics = run.metrics()
metrics[["rollout/reward_mean", "signal/lost_share", "rollout/behavior_entropy"]].dropna(how="all")

# %% [markdown]
# ## Rollouts: one row a completion

# %%
rollouts = run.rollouts()
rollouts["tokens"] = rollouts["completion_ids"].str.len()
rollouts[["step", "prompt_id", "completion", "tokens", "reward", "advantage"]].tail()

# %% [markdown]
# ### Groups without signal
#
# If all completions of a group get the same reward, their advantages are zero and the group teaches
# nothing. Too easy or too hard? The mean reward of these groups says which.

# %%
groups = rollouts.groupby(["step", "prompt_id"])["reward"].agg(["mean", "std"])
silent = groups[groups["std"] == 0]
print(f"{len(silent)} of {len(groups)} groups have equal rewards")
silent["mean"].value_counts().rename("groups").to_frame()

# %% [markdown]
# ### Length against reward
#
# Do longer completions earn more? A model that learns to write more, or to stop at once, shows here
# first. Truncated completions never finished their answer.

# %%
lengths = rollouts.groupby("step")[["tokens", "reward"]].corr().xs("reward", level=1)["tokens"]
ended = rollouts.groupby("finish_reason")[["tokens", "reward"]].mean()
print("correlation of length and reward by step:", lengths.round(2).to_dict())
ended

# %% [markdown]
# ### Engine against trainer
#
# The engine samples with its own programs; the trainer computes the log-probabilities of the same
# tokens again. They must agree: differences beyond rounding mean that the weights, the template
# or a kernel differ. Only completions that were learned from have both.

# %%
import numpy as np

learned = rollouts[rollouts["policy_logprobs"].notna()]
differences = [
  abs(ours - theirs)
  for row in learned.itertuples()
  for ours, theirs in zip(row.policy_logprobs, row.behavior_logprobs, strict=True)
  if ours is not None and theirs is not None
]
print(f"{len(differences)} tokens, largest difference {max(differences, default=np.nan):.1e} nats")

# %% [markdown]
# ### Distance from the initial weights
#
# `all/kl_to_initial` is measured every `learn.report_kl_every_steps` steps, and so is
# `train/kl_to_reference`, which is in every step if `loss.kl_coef` is above 0. Without either, the
# ratio of the update says how far one step went.

# %%
wanted = ["all/kl_to_initial", "train/kl_to_reference", "train/ratio_mean", "train/grad_norm"]
metrics[[name for name in wanted if name in metrics]].dropna(how="all")

# %% [markdown]
# ## Checklist
#
# 1. The reward rises, and so does the evaluation on held-out data. If only the reward rises, read
#    completions: the model may have found a gap in it.
# 2. `signal/lost_share` stays below 0.7. Otherwise the problems are too easy or too hard.
# 3. Few completions are truncated (`rollout/truncated_share`), and none fail (`rollout/errors/*`).
# 4. The entropy falls slowly. At 0 nothing new is tried.
# 5. Engine and trainer agree (`mismatch/*`).
# 6. The KL to the initial weights grows slowly, without jumps.
#
# `run.report()` draws all of these. The next cell shows what was actually written:

# %%
run.completions(-1, limit=12)
