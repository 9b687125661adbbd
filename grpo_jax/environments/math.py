r"""Mathematics and multiple choice: the completion's answer is compared with the gold one.

  math_verify      equal according to math-verify, e.g. 1/2 and 0.5
  minerva          the same text once normalised, as DAPO and Minerva compare
  multiple_choice  the same letter, however it is written, or the text of that option

The gold answer is `info["expected_answer"]`: an answer, or a whole solution that ends in
`#### answer` (GSM8K) or has `\boxed{answer}` (MATH). An option says where the model's answer
must be (see grading/answers.py). Words and decimals are compared at once (grading/comparison.py);
comparisons that need mathematics run in a sandbox, each in its own process, which is killed if it
takes too long.
"""

import asyncio
from pathlib import Path

from grpo_jax.environments.base import Environment, EnvironmentFactory, SingleTurn, StepResult
from grpo_jax.environments.grading import answers, comparison, confinement, evaluated, verifiers
from grpo_jax.environments.grading.pool import GraderError, GraderTimeout, WorkerPool
from grpo_jax.types import Prompt

_GRADER = Path(answers.__file__).with_name("equality.py")
_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


class MathEnvironments(EnvironmentFactory):
  """Makes the environments, which share the sandboxes."""

  observation_roles = ()

  def __init__(
    self,
    pool: WorkerPool,
    *,
    verifier: str,
    answer: str | None,
    reward_correct: float,
    reward_wrong: float,
    reward_timeout: float,
    format_reward: float,
    max_answer_chars: int,
    must_be_evaluated: bool,
  ):
    self._pool = pool
    self._verifier, self._form = verifiers.make(verifier, answer)
    self._reward_correct = reward_correct
    self._reward_wrong = reward_wrong
    self._reward_timeout = reward_timeout
    self._format_reward = format_reward
    self._max_answer_chars = max_answer_chars
    self._must_be_evaluated = must_be_evaluated

  def __call__(self, prompt: Prompt) -> Environment:
    expected = prompt.info.get("expected_answer")
    if not isinstance(expected, str) or not expected.strip():
      raise ValueError(f"prompt {prompt.prompt_id}: the math environment needs expected_answer")
    self._verifier.check(prompt.info)
    return SingleTurn(self._judge, prompt)

  def answer(self, prompt: Prompt, text: str) -> str | None:
    """Returns the answer as text, without what never changes its meaning; 1/2 and 0.5 differ."""
    found = self._verifier.find(text, self._form, prompt.info)
    return None if found is None else comparison.normalized(found)

  def metrics(self) -> dict[str, float]:
    """Returns the counts of the sandboxes."""
    return {f"grader_{name}": value for name, value in self._pool.counts().items()}

  def close(self) -> None:
    """Ends the sandboxes."""
    self._pool.close()

  async def _judge(self, prompt: Prompt, text: str) -> StepResult:
    answer = self._verifier.find(text, self._form, prompt.info)
    timed_out = False
    correct = False
    if answer is not None and len(answer) <= self._max_answer_chars:
      try:
        correct = await self._is_right(prompt, answer)
      except GraderTimeout:
        timed_out = True
    return self._result(answer is not None, correct, timed_out)

  async def _is_right(self, prompt: Prompt, answer: str) -> bool:
    known = self._verifier.decide(prompt.info, answer)
    if known is not None:
      return known
    wanted, found = comparison.read_pair(answers.gold(prompt.info["expected_answer"]), answer)
    if self._must_be_evaluated and evaluated.left_undone(wanted.value, found.value):
      return False
    percents = wanted.unit.is_percent, found.unit.is_percent
    try:
      verdict = await asyncio.wrap_future(
        self._pool.submit("equal", wanted.value, found.value, *percents)
      )
    except GraderError:  # the expression needs more memory than a process may use.
      return False
    return verdict is True

  def _result(self, has_answer: bool, correct: bool, timed_out: bool) -> StepResult:
    outcome = self._reward_timeout if timed_out else self._reward_wrong
    outcome = self._reward_correct if correct else outcome
    components = {"correct": outcome, "format": self._format_reward * has_answer}
    return StepResult(
      reward=components if self._format_reward else outcome,
      done=True,
      metrics={
        "accuracy": float(correct),
        "has_answer": float(has_answer),
        "grader_timeout": float(timed_out),
      },
    )


def make(
  *,
  verifier: str = "math_verify",
  answer: str | None = None,
  reward_correct: float = 1.0,
  reward_wrong: float = 0.0,
  reward_timeout: float = 0.0,
  format_reward: float = 0.0,
  timeout_s: float = 5.0,
  workers: int = 2,
  memory_gib: float = 4.0,
  max_answer_chars: int = 2000,
  must_be_evaluated: bool = True,
  sandbox: str = confinement.BEST,
) -> MathEnvironments:
  r"""Makes the math environment.

  Args:
    verifier: "math_verify", "minerva" or "multiple_choice" (whose rows may have a field
      `options`, a list or letter → text).
    answer: Place of the answer: "boxed" (last \boxed{}), "hash" (after ####),
      "tag" (<answer>…</answer>), "line" (after the last "Answer:"), "last_number", "any"
      (boxed, otherwise hash, otherwise the last number), "raw" (the whole text). A completion
      without an answer there is wrong. None: boxed for math_verify, line for minerva;
      multiple_choice has its own order (grading/choices.py).
    reward_correct: Reward of a right answer.
    reward_wrong: Reward of a wrong answer, and of a completion without one.
    reward_timeout: Reward of an answer that could not be judged in time. NaN excludes the
      attempt from learning; the default gives no reward to unreadable answers.
    format_reward: Added if there is an answer in the required place; the reward then has
      the components "correct" and "format".
    timeout_s: Longest time of one comparison, in seconds.
    workers: Number of sandboxes, which is also the number of simultaneous comparisons; they start
      at the first comparison that needs one.
    memory_gib: Limit of the address space of a comparison, in GiB; 0: no limit.
    max_answer_chars: Longest answer that is compared; a longer one is wrong.
    must_be_evaluated: For math_verify: whether an answer is wrong if it leaves something to compute
      that the gold answer does not (`\int_0^1 x\,dx` or `48+24` for a number). Otherwise a problem
      copied into the box would be right. See grading/evaluated.py.
    sandbox: "best" (bubblewrap, otherwise landlock, whichever works here; otherwise a process with
      limits and a warning), "bubblewrap", "landlock" or "limits": docs/code_environment.md.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, has_answer, grader_timeout.

  Raises:
    ValueError: The sandbox does not work on this machine, or an option is out of range.
  """
  pool = WorkerPool(
    _GRADER,
    packages=_PACKAGES,
    sandbox=sandbox,
    workers=workers,
    timeout_s=timeout_s,
    memory_gib=memory_gib,
  )
  return MathEnvironments(
    pool,
    verifier=verifier,
    answer=answer,
    reward_correct=reward_correct,
    reward_wrong=reward_wrong,
    reward_timeout=reward_timeout,
    format_reward=format_reward,
    max_answer_chars=max_answer_chars,
    must_be_evaluated=must_be_evaluated,
  )
