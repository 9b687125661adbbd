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
  options = {
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
# ## Train
#
# `"quickstart"` is a config of the package; each of its options can be replaced by a keyword
# argument. The first two minutes go by without a curve: the model is downloaded, programs are
# compiled, and the first step is sampled. Interrupt the cell to stop early: a checkpoint is
# saved, and running the cell again continues the run.

# %%
settings = {"evaluation.at_start": False, "logging.sinks": ("jsonl", "tensorboard"), **options}
curve = notebook.LiveCurve()
run = grpo_jax.train("quickstart", "runs/quickstart", on_step=curve, **settings)

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
