# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Watch a model learn
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/quickstart.ipynb)
#
# SmolLM2-135M-Instruct learns to add and subtract: GRPO samples eight answers to each problem,
# scores them, and raises the probability of those that did better than the others of their group.
# No account and no accelerator is needed. On two CPU cores this notebook takes about five
# minutes.

# %% [markdown]
# The next cell installs the package if it is missing, as on Colab; that takes a few minutes. For a
# GPU write `grpo-jax[notebook,cuda12]`, for a TPU `grpo-jax[notebook,tpu]`.

# %% tags=["active-ipynb", "install"]
# try:
#   import grpo_jax
# except ImportError:
#   %pip install --quiet "grpo-jax[notebook] @ git+https://github.com/grpo-jax/grpo-jax"

# %% [markdown]
# ## Train
#
# `"quickstart"` is a config of the package; each of its options can be replaced by a keyword
# argument. The first two minutes go by without a curve: the model is downloaded, programs are
# compiled, and the first step is sampled. Interrupt the cell to stop early: a checkpoint is
# saved, and running the cell again continues the run.

# %%
import grpo_jax
from grpo_jax import notebook

run = grpo_jax.train(
  "quickstart",
  "runs/quickstart",
  on_step=notebook.LiveCurve(),
  **{"evaluation.at_start": False, "logging.sinks": ("jsonl", "tensorboard")},
)

# %% [markdown]
# ## Before and after
#
# The same questions, asked of the model that the run began with, and of the trained one. Answers
# are greedy unless `temperature` is given.

# %%
problems = ("17 + 25", "61 - 8", "48 + 37")
text = "State the final answer to the following arithmetic problem: {} ="
questions = [text.format(problem) for problem in problems]
print("before:", run.sample(questions, before=True))
print("after: ", run.sample(questions))

# %% [markdown]
# ## Look at the run
#
# Its curves, the completions of the last step with their rewards and advantages, and the report: a
# page with every metric and a browser of the sampled groups.

# %%
run

# %%
run.completions(-1, limit=8)

# %%
run.report()

# %% [markdown]
# ## What next
#
# * [your_own_reward](your_own_reward.ipynb): score completions with a function of this notebook.
# * [your_own_loss](your_own_loss.ipynb): write the loss yourself, on arrays.
# * [reading_a_run](reading_a_run.ipynb): what to look at, with pandas.
# * `run.workdir / "export"` is a Hugging Face folder with the trained model.
