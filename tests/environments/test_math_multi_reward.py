"""The three components of the reward, and what GDPO makes of them."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments.math_multi_reward import components
from grpo_jax.rl import estimators
from grpo_jax.types import FinishReason, Prompt

GOOD = "<think>a</think>\n<answer>18</answer>"

# (completion, correct, format, integer), as NeMo RL's worker scores them for the gold answer 18.
CASES = [
  (GOOD, 1, 1, 1),
  (GOOD + "\n", 1, 1, 1),
  (GOOD + "\n\n", 1, 0, 1),
  (" " + GOOD, 1, 0, 1),
  ("x" + GOOD, 1, 0, 1),
  ("<think>a</think><answer>18</answer>", 1, 0, 1),
  ("<think>a</think>\n<answer> 18 </answer>", 1, 1, 1),
  ("<think>a\nb</think>\n<answer>17</answer>", 0, 1, 1),
  ("<think>a</think>\n<answer>17</answer> or <answer>18</answer>", 1, 0, 1),
  ("<think><think></think>\n</think>\n<answer>1.5</answer>", 0, 1, 0),
  ("<think>1\n2</think>\n<answer>eighteen\n</answer>", 0, 1, 0),
  ("<think></think>\n<answer></answer>", 0, 1, 0),
  ("<think>a</think>\n<answer>-18</answer>", 0, 1, 0),
  ("18", 1, 0, 1),
  (" 18 ", 1, 0, 1),
  ("<answer>18", 1, 0, 1),
  ("the answer is 18", 0, 0, 0),
  ("", 0, 0, 0),
]


@pytest.mark.parametrize(("text", "correct", "form", "integer"), CASES)
def test_components_are_those_of_nemo_rl(text, correct, form, integer):
  assert components(text, "18") == {"correct": correct, "format": form, "integer": integer}


def judged(text, expected, prompt=""):
  factory = environments.make(math={"module": "math_multi_reward"})["math"]
  info = {"expected_answer": expected}
  environment = factory(Prompt("p", np.asarray([1]), "math", info, text=prompt))
  return asyncio.run(environment.step(text, np.asarray([1]), FinishReason.STOP))


@pytest.mark.parametrize("expected", ["18", " 18", "5 + 13 = 18\n#### 18", "so it is \\boxed{18}"])
def test_the_gold_answer_may_be_a_whole_solution(expected):
  result = judged(GOOD, expected)
  assert result.components == {"correct": 1.0, "format": 1.0, "integer": 1.0}
  assert (result.total, result.done, result.metrics) == (3.0, True, {"accuracy": 1.0})
  assert judged("<answer>8</answer>", expected).metrics == {"accuracy": 0.0}


def test_a_thought_that_the_chat_template_begins_is_part_of_the_format():
  written = {
    "<think>": "easy\n</think>\n<answer>18</answer>",
    "<think>\n": "easy</think>\n<answer>18</answer>",
    "<think>\n\n</think>\n\n": "<answer>18</answer>",  # thinking is switched off.
  }
  for end, text in written.items():
    prompt = f"<|im_start|>assistant\n{end}"
    assert judged(text, "18", prompt).components["format"] == 1.0, end
    assert judged(GOOD, "18", prompt).components["format"] == 1.0, end  # it writes both again.
    assert judged(text, "18").components["format"] == 0.0, end
    assert judged("18", "18", prompt).components["correct"] == 1.0, end
    assert judged(f"x{text}"[:-1], "18", prompt).components["format"] == 0.0, end
  assert judged("<answer>18</answer>", "18", "Use <think> tags.").components["format"] == 0.0


def test_a_row_without_an_answer_is_refused():
  with pytest.raises(ValueError, match="prompt p: math_multi_reward needs expected_answer"):
    judged(GOOD, "")


@pytest.mark.long
def test_gdpo_distinguishes_completions_whose_sums_are_equal():
  texts = ["<think>a</think>\n<answer>x</answer>", "17", "18", "<think>a</think>"]
  found = [components(text, "18") for text in texts]
  rewards = jnp.asarray([[[each[name] for each in found]] for name in sorted(found[0])])
  assert rewards.sum(axis=0)[0, :2].tolist() == [1.0, 1.0]
  estimator = estimators.make("gdpo", weights=(1.0, 0.5, 0.5))
  scored = jnp.ones((1, 4), bool)
  advantages = np.asarray(estimator(rewards.sum(axis=0), scored, components=rewards))[0]
  # By hand, std with ddof 1: correct (0 0 1 0), format (1 0 0 0), integer (0 1 1 0).
  z = lambda x: (np.asarray(x) - np.mean(x)) / np.std(x, ddof=1)
  total = z([0, 0, 1, 0]) + 0.5 * z([1, 0, 0, 0]) + 0.5 * z([0, 1, 1, 0])
  np.testing.assert_allclose(advantages, z(total), rtol=1e-4)
  assert abs(advantages[0] - advantages[1]) > 0.03
