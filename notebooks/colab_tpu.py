# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # LoRA on one TPU chip: Qwen2.5-1.5B learns GSM8K
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/colab_tpu.ipynb)
#
# Qwen2.5-1.5B-Instruct solves school problems in words. Each step samples eight solutions to each
# of sixteen problems; a solution is right if the answer in its box is the expected one. A small
# adapter (LoRA) is trained, and the model itself stays as it is.
#
# The link opens this notebook on one TPU chip with 16 GB (Runtime > Change runtime type > v5e-1
# TPU). A v6e-1 runs the same cells, and faster.

# %% [markdown]
# The next cell installs the package if it is missing, as on Colab; that takes a few minutes. If
# Colab then asks to restart the session, do so, and run the notebook from here again.

# %% tags=["active-ipynb", "install"]
# try:
#   import grpo_jax
# except ImportError:
#   %pip install --quiet "grpo-jax[notebook,tpu] @ git+https://github.com/grpo-jax/grpo-jax"

# %% [markdown]
# ## Train
#
# `"gsm8k_tpu"` is a config of the package: 50 steps, in bfloat16, with an adapter of rank 32. The
# first line of its output names the device that computes. The model is downloaded, programs are
# compiled, and then the curve grows by a point with each step. By `grpo-jax plan`, a bound from the
# data sheets, a step takes at least 2 seconds on a v5e and 0.7 on a v6e; this was never measured on
# one. Interrupt the cell to stop early: a checkpoint is saved, and running the cell again continues
# the run.

# %%
import grpo_jax
from grpo_jax import notebook

run = grpo_jax.train(
  "gsm8k_tpu",
  "runs/gsm8k_tpu",
  on_step=notebook.LiveCurve(),
  **{"evaluation.at_start": False, "logging.sinks": ("jsonl", "tensorboard")},
)

# %% [markdown]
# ## Before and after
#
# The evaluations on problems that were not trained on, then one problem for the model without and
# with the adapter.

# %%
run.metrics().filter(regex="eval/.*(accuracy|reward_mean)$").dropna()

# %%
problem = "Ada buys 3 boxes of 12 pencils and gives away 8 of them. How many pencils does she have?"
print("before:", run.sample(problem, before=True))
print("after: ", run.sample(problem))

# %% [markdown]
# ## What was sampled, and how much memory it took

# %%
run.completions(-1, limit=8)

# %%
notebook.memory()

# %% [markdown]
# ## What next
#
# * [your_own_reward](your_own_reward.ipynb): score solutions with a function of yours.
# * [reading_a_run](reading_a_run.ipynb): what to look at, with pandas.
# * `run.workdir / "adapter"` is a folder that `peft`, SGLang and this package read. A disconnected
#   runtime loses its disk: copy it to Drive.
# * The page docs/tpu_vm.md goes from one chip to a machine of your own with eight.
