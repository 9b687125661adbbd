# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # LoRA on a T4: Qwen2.5-0.5B learns GSM8K
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/colab_t4.ipynb)
#
# Qwen2.5-0.5B-Instruct solves school problems in words. Each step samples eight solutions to each
# of eight problems; a solution is right if the answer in its box is the expected one. A small
# adapter (LoRA) is trained, and the model itself stays as it is.
#
# The link opens this notebook on the GPU that Colab lends free of charge, a T4 of 16 GB (otherwise:
# Runtime > Change runtime type > T4 GPU).

# %% [markdown]
# The next cell installs the package if it is missing, as on Colab; that takes a few minutes. If
# Colab then asks to restart the session, do so, and run the notebook from here again.

# %% tags=["active-ipynb", "install"]
# try:
#   import grpo_jax
# except ImportError:
#   %pip install --quiet "grpo-jax[notebook,cuda12] @ git+https://github.com/grpo-jax/grpo-jax"

# %% [markdown]
# ## Train
#
# `"gsm8k_t4"` is a config of the package: 20 steps, with the model in bfloat16, products in float32
# and an adapter of rank 32. The first line of its output names the device that computes. The model
# is downloaded, programs are compiled, and then the curve grows by a point with each step. By
# `grpo-jax plan`, a bound from the data sheet of a T4, a step takes at least 6 seconds; this was
# never measured on one. Interrupt the cell to stop early: a checkpoint is saved, and running the
# cell again continues the run.

# %%
import grpo_jax
from grpo_jax import notebook

run = grpo_jax.train(
  "gsm8k_t4",
  "runs/gsm8k_t4",
  on_step=notebook.LiveCurve(),
  **{"evaluation.at_start": False, "logging.sinks": ("jsonl", "tensorboard")},
)

# %% [markdown]
# ## Before and after
#
# The same problem for the model without and with the adapter.

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
# ## Keep the result
#
# The adapter is a folder of 70 MB that `peft`, SGLang and this package read. A disconnected runtime
# loses its disk: download the file, or copy the folder to Drive.

# %%
import shutil

shutil.make_archive("adapter", "zip", run.workdir / "adapter")

# %% [markdown]
# ## What next
#
# * [your_own_reward](your_own_reward.ipynb): score solutions with a function of yours.
# * [reading_a_run](reading_a_run.ipynb): what to look at, with pandas.
# * More steps: `total_steps=100` in the call above, with the same folder, continues the run.
# * The page docs/lora.md has the memory of larger models on this GPU.
