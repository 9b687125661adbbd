"""Environments of verifiers before 0.4, one for each kind."""

import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> str:
  """Adds two numbers.

  Args:
    a: First number.
    b: Second number.
  """
  return str(a + b)


async def exact(completion, answer) -> float:
  said = completion[-1]
  return float((said["content"] if isinstance(said, dict) else said.content) == answer)


async def always(completion) -> float:
  return 0.5


async def best_of_the_group(completions) -> list[float]:
  return [0.0] * len(completions)


class Guess(vf.MultiTurnEnv):
  async def env_response(self, messages, state, **kwargs):
    return [vf.UserMessage(content="Higher.")]

  @vf.stop
  async def found(self, state):
    said = [m for m in state["trajectory"][-1:] if m["completion"][-1].content == state["answer"]]
    return bool(said)


async def found(state) -> float:
  return float(state["stop_condition"] == "found")


def load_environment(kind: str = "turn"):
  one = lambda question, answer: Dataset.from_list([{"question": question, "answer": answer}])
  if kind == "tool":
    return vf.ToolEnv(
      tools=[add], max_turns=4, dataset=one("30 + 4?", "34"), rubric=vf.Rubric(funcs=[exact])
    )
  if kind == "turns":
    return Guess(max_turns=5, dataset=one("Guess.", "3"), rubric=vf.Rubric(funcs=[found]))
  if kind == "group":
    return vf.SingleTurnEnv(dataset=one("?", "3"), rubric=vf.Rubric(funcs=[best_of_the_group]))
  if kind == "reasoning_gym":
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

    return ReasoningGymEnv("chain_sum", num_train_examples=2, num_eval_examples=1, seed=1)
  return vf.SingleTurnEnv(
    dataset=one("Reverse abc", "cba"),
    eval_dataset=one("Reverse xyz", "zyx"),
    system_prompt="Be brief.",
    rubric=vf.Rubric(funcs=[exact, always], weights=[1.0, 0.0]),
  )
