r"""Mathematics with a reward of three components, as the GDPO recipe of NeMo RL has it.

  correct   the text in <answer>…</answer> is the gold answer, letter by letter
  format    the completion is <think>…</think>, a line break, and one <answer>…</answer>; if the
            prompt ends with <think>, as some chat templates do, the completion continues there
  integer   the text in <answer>…</answer> consists of digits

Each is 0 or 1. A completion without tags is an answer as a whole, as in NeMo RL: `18` alone is
correct and an integer, in the wrong format. The gold answer is `info["expected_answer"]`: an
answer, or a whole solution that ends in `#### answer` (GSM8K) or has `\boxed{answer}`.

Reference:
  `HFMultiRewardVerifyWorker` of NeMo RL, the environment `math_multi_reward`; Liu et al. 2026,
  GDPO, arXiv:2601.05242.
"""

import re

from grpo_jax.environments.base import Environment, EnvironmentFactory, SingleTurn, StepResult
from grpo_jax.environments.grading import answers
from grpo_jax.types import Prompt

# What a chat template may put in front of the completion.
_BEGUN_THOUGHT = re.compile(r"<think>\s*(?P<end></think>\s*)?\Z")
_THOUGHT_CHARS = 100  # at the end of a prompt.
_FORMAT = re.compile(r"<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)


def answer(text: str) -> str:
  """Returns what follows the last <answer>, up to </answer>; without tags the whole text."""
  return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def components(text: str, gold: str, prompt: str = "") -> dict[str, float]:
  """Returns the three components of the reward.

  Args:
    text: Completion.
    gold: Right answer.
    prompt: Rendered prompt. A <think> at its end, open or closed, is part of the format.
  """
  found = answer(text)
  if begun := _BEGUN_THOUGHT.search(prompt[-_THOUGHT_CHARS:]):
    text = f"<think></think>\n{text.lstrip()}" if begun["end"] else f"<think>{text}"
  # Counted first: with one of each, matching takes linear time.
  is_tagged = text.count("<answer>") == 1 and text.count("</answer>") == 1
  is_formatted = is_tagged and _FORMAT.match(text) is not None
  return {
    "correct": float(found == gold),
    "format": float(is_formatted),
    "integer": float(found.isdigit()),
  }


class MathMultiRewardEnvironments(EnvironmentFactory):
  """Makes the environments."""

  def __call__(self, prompt: Prompt) -> Environment:
    expected = prompt.info.get("expected_answer")
    if not isinstance(expected, str) or not expected.strip():
      raise ValueError(f"prompt {prompt.prompt_id}: math_multi_reward needs expected_answer")
    return SingleTurn(self._judge, prompt)

  def answer(self, prompt: Prompt, text: str) -> str | None:
    """Returns the answer as text; None if it is empty."""
    return answer(text) or None

  def _judge(self, prompt: Prompt, text: str) -> StepResult:
    found = components(text, answers.gold(prompt.info["expected_answer"]), prompt.text)
    return StepResult(reward=found, done=True, metrics={"accuracy": found["correct"]})


def make() -> MathMultiRewardEnvironments:
  """Makes the environment.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, which is the component `correct`.
  """
  return MathMultiRewardEnvironments()
