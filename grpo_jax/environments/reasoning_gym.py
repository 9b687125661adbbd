"""Tasks of the reasoning-gym package, scored by each task's own scorer.

Works on prompts of `data.kind = "reasoning_gym"`: `info` has task, task_args and entry.
Tasks that compare strings are scored at once; the others in a sandbox, each answer in its own
process, which is killed if it takes too long. Some scorers pass the answer to `eval` or to
SymPy's parser: in the sandbox these know values and operators only and run nothing. Without a
sandbox these tasks are refused.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.environments.base import Environment, EnvironmentFactory, SingleTurn, StepResult
from grpo_jax.environments.grading import answers, comparison, confinement, notation
from grpo_jax.environments.grading.pool import GraderError, GraderTimeout, WorkerPool
from grpo_jax.errors import MissingExtra
from grpo_jax.registry import choose
from grpo_jax.types import Prompt

try:
  from grpo_jax.environments.grading import gym_score
except ImportError as error:
  raise MissingExtra("the environment reasoning_gym", "reasoning-gym", error) from error

_SOLVED = 1.0 - 1e-6
_NEEDED = ("task", "task_args", "entry")
_PACKAGES = ("reasoning-gym",)


class GymEnvironments(EnvironmentFactory):
  """Makes the environments, which share the sandboxes."""

  observation_roles = ()

  def __init__(
    self,
    pool: WorkerPool,
    *,
    answer: str,
    partial: bool,
    contains_reward: float,
    format_reward: float,
    reward_timeout: float,
    allow_unsandboxed: bool = False,
  ):
    self._pool = pool
    self._allow_unsandboxed = allow_unsandboxed
    self._extract = choose("answer form", answer, answers.EXTRACTORS)
    self._partial = partial
    self._contains_reward = contains_reward
    self._format_reward = format_reward
    self._reward_timeout = reward_timeout

  def __call__(self, prompt: Prompt) -> Environment:
    missing = [key for key in _NEEDED if key not in prompt.info]
    if missing:
      raise ValueError(
        f"prompt {prompt.prompt_id}: the reasoning_gym environment needs {missing} in info: it "
        "scores data of kind 'reasoning_gym'"
      )
    why_not = _why_refused(prompt.info["task"], self._pool.confinement, self._allow_unsandboxed)
    if why_not:
      raise ValueError(f"prompt {prompt.prompt_id}: {why_not}")
    return SingleTurn(self._judge, prompt)

  def answer(self, prompt: Prompt, text: str) -> str | None:
    """Returns the answer as text, without what never changes its meaning."""
    found = self._extract(text)
    return None if found is None else comparison.normalized(found)

  def metrics(self) -> dict[str, float]:
    """Returns the counts of the sandboxes."""
    return {f"grader_{name}": value for name, value in self._pool.counts().items()}

  def close(self) -> None:
    """Ends the sandboxes."""
    self._pool.close()

  async def _judge(self, prompt: Prompt, text: str) -> StepResult:
    answer = self._extract(text)
    score, timed_out = 0.0, False
    if answer is not None:
      try:
        score = await self._score(prompt.info, answer)
      except GraderTimeout:
        timed_out = True
    outcome = self._reward_timeout if timed_out else self._shaped(score, prompt.info, text)
    components = {"score": outcome, "format": self._format_reward * (answer is not None)}
    task = prompt.info["task"]  # in a mixture of tasks, each is reported separately.
    return StepResult(
      reward=components if self._format_reward else outcome,
      done=True,
      metrics={
        "accuracy": float(score >= _SOLVED),
        f"{task}/accuracy": float(score >= _SOLVED),
        "score": score,
        "has_answer": float(answer is not None),
        "grader_timeout": float(timed_out),
      },
    )

  async def _score(self, info: Mapping[str, Any], answer: str) -> float:
    if str(info["entry"]["answer"]).isascii():  # the scorer may not know "−5" or "５".
      answer = notation.characters(answer)
    arguments = (info["task"], dict(info["task_args"]), answer, info["entry"])
    if gym_score.has_plain_scorer(info["task"]):
      return gym_score.score(*arguments)
    try:
      score = await asyncio.wrap_future(self._pool.submit("score", *arguments))
    except GraderError:  # some scorers raise on an answer that they cannot read; counted.
      return 0.0
    is_score = isinstance(score, int | float) and math.isfinite(score)
    return float(score) if is_score else 0.0

  def _shaped(self, score: float, info: Mapping[str, Any], text: str) -> float:
    """Returns the reward for the task's score."""
    solved = score >= _SOLVED
    reward = score if self._partial or solved else 0.0
    answer = info["entry"]["answer"]  # None: the task has many right answers.
    if self._contains_reward and answer is not None and str(answer) in text.split():
      reward = max(reward, self._contains_reward)
    return reward


def objection(
  task: str, *, sandbox: str = confinement.BEST, allow_unsandboxed: bool = False, **_: Any
) -> str:
  """Returns why a task cannot be scored with these settings; "" if it can.

  Args:
    task: Name of the reasoning-gym dataset.
    sandbox: Sandbox option of `make`.
    allow_unsandboxed: Option of `make`.

  Raises:
    ValueError: The sandbox does not work on this machine.
  """
  return _why_refused(task, confinement.find(sandbox), allow_unsandboxed)


def _why_refused(task: str, found: confinement.Confinement, allow_unsandboxed: bool) -> str:
  if found.is_sandbox or allow_unsandboxed or not gym_score.computes(task):
    return ""
  return (
    f"the scorer of the reasoning-gym task {task!r} evaluates the text of the model, which needs "
    f"a sandbox: {found.why_not}. allow_unsandboxed=True scores it without one"
  )


def make(
  *,
  answer: str = "raw",
  partial: bool = True,
  contains_reward: float = 0.0,
  format_reward: float = 0.0,
  reward_timeout: float = 0.0,
  timeout_s: float = 5.0,
  workers: int = 2,
  memory_gib: float = 4.0,
  sandbox: str = confinement.BEST,
  allow_unsandboxed: bool = False,
) -> GymEnvironments:
  r"""Makes the reasoning-gym environment.

  Args:
    answer: Part that is scored: "raw" (the whole completion, stripped), "tag"
      (<answer>…</answer>), "boxed", "hash" (after ####), "last_number", "any" (boxed, otherwise
      hash, otherwise the last number). Without an answer there the score is 0.
    partial: Whether the task's scores between 0 and 1 are rewarded; otherwise only full scores.
    contains_reward: Smallest reward of a completion in which the expected answer is one of
      the words; 0: off.
    format_reward: Added if there is an answer in the required place; the reward then has
      the components "score" and "format".
    reward_timeout: Reward of an answer that could not be scored in time; may be NaN.
    timeout_s: Longest time of one scoring, in seconds.
    workers: Number of sandboxes, which is also the number of simultaneous scorings; they start at
      the first scoring that needs one.
    memory_gib: Limit of the address space of a scoring, in GiB; 0: no limit.
    sandbox: "best" (bubblewrap, otherwise landlock, whichever works here), "bubblewrap",
      "landlock", or "limits", which leaves more open: docs/code_environment.md.
    allow_unsandboxed: Whether to score tasks whose scorer evaluates the text of the model even if
      "best" finds neither bubblewrap nor landlock.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy (score 1, whatever the reward),
    score, has_answer, grader_timeout; and TASK/accuracy for each task.

  Raises:
    ValueError: The sandbox does not work on this machine, or an option is out of range.
  """
  pool = WorkerPool(
    gym_score.__file__,
    packages=_PACKAGES,
    sandbox=sandbox,
    workers=workers,
    timeout_s=timeout_s,
    memory_gib=memory_gib,
  )
  return GymEnvironments(
    pool,
    answer=answer,
    partial=partial,
    contains_reward=contains_reward,
    format_reward=format_reward,
    reward_timeout=reward_timeout,
    allow_unsandboxed=allow_unsandboxed,
  )
