# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own reward
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/your_own_reward.ipynb)
#
# A reward is a function of this notebook, and a conversation is a class. Both run in threads of
# this process, so they may use whatever is in memory here. At the end: what failures look like.

# %% [markdown]
# The next cell installs the package if it is missing, as on Colab; that takes a few minutes. For a
# GPU write `grpo-jax[notebook,cuda12]`, for a TPU `grpo-jax[notebook,tpu]`.

# %% tags=["active-ipynb", "install"]
# try:
#   import grpo_jax
# except ImportError:
#   %pip install --quiet "grpo-jax[notebook] @ git+https://github.com/grpo-jax/grpo-jax"

# %% [markdown]
# ## A function
#
# It is given the text of the prompt, the completion and the fields of the row, and returns a
# number, or a dict of components that are added up. Each component gets metrics of its own.
#
# The rows are asked as they are: the system prompt of the config is for the config's own data, and
# only what the call names is used, such as `**{"data.system_prompt": "Be brief."}`. The first
# prompt is printed. Without `evaluation_rows` nothing is evaluated.

# %%
rows = [
  {"problem": f"Say {word}.", "expected_answer": word} for word in ("yes", "no", "stop", "go")
]


def brief(prompt, completion, info):
  said = info["expected_answer"] in completion.lower()
  return {"said": float(said), "length": -0.01 * len(completion)}


print(brief("Say yes.", "Yes!", rows[0]))

# %%
import grpo_jax
from grpo_jax import notebook

few = {"total_steps": 4, "sampling.max_tokens": 16, "logging.sinks": ("jsonl", "tensorboard")}
run = grpo_jax.train(
  "quickstart",
  "runs/your_own_reward",
  rows=rows,
  reward=brief,
  on_step=notebook.LiveCurve(),
  **few,
)
run.completions(-1, limit=8)

# %% [markdown]
# ## A conversation
#
# An environment is a class with `start`, `step` and `close`; one object plays one attempt. This one
# gives a second chance: after a wrong answer the model is told so, and may try again. Nothing is
# learned from the tokens that the environment writes.

# %%
from grpo_jax.environments.base import StepResult


class SecondChance:
  """Asks again, once, if the word was not said."""

  def __init__(self, prompt):
    self.word = prompt.info["expected_answer"]
    self.turn = 0

  async def start(self): ...

  async def step(self, text, completion_ids, finish_reason):
    self.turn += 1
    said = self.word in text.lower()
    if said or self.turn == 2:
      reward = float(said) / self.turn  # half of it on the second turn.
      return StepResult(reward=reward, done=True, metrics={"accuracy": float(said)})
    hint = f"No. Say only the word {self.word}."
    return StepResult(reward=0.0, done=False, observation=hint, observation_role="user")

  async def close(self): ...


conversation = grpo_jax.train(
  "quickstart",
  "runs/second_chance",
  rows=rows,
  reward=SecondChance,
  on_step=notebook.LiveCurve(),
  **{**few, "rollout.max_turns": 2},
)
conversation.rollouts(-1)[["completion", "turns", "reward", "finish_reason"]]

# %% [markdown]
# ## What failures look like
#
# A reward that raises, hangs or returns NaN harms its own attempt only: the attempt is left out
# of its group and counted by kind. If too many fail, the run stops and says why.

# %%
import math
import time


def unreliable(prompt, completion, info):
  kind = sum(map(ord, completion)) % 8
  if kind == 0:
    return math.nan
  if kind == 1:
    return info["no such field"]
  if kind == 2:
    time.sleep(2)  # longer than it may take, see below.
  return float(len(completion))


limits = {"total_steps": 1, "rollout.environment_timeout_s": 1.0, "rollout.max_error_share": 1.0}
failing = grpo_jax.train(
  "quickstart",
  "runs/unreliable",
  rows=rows,
  reward=unreliable,
  **{**few, **limits},
)
failing.metrics().filter(like="rollout/errors/")

# %%
attempts = failing.rollouts()
attempts.loc[attempts["error"] != "", ["completion", "reward", "advantage", "error"]].head()

# %% [markdown]
# `rollout.max_error_share` is 0.2 unless it is set, so most of these would have stopped the run. A
# reward that cannot be called is refused before anything is loaded:

# %%
try:
  grpo_jax.train("quickstart", "runs/refused", reward=lambda completions: 1.0)
except grpo_jax.configuration.ConfigError as error:
  print(error)
