"""The reasoning-gym environment: every task's own scorer, answer forms, rewards, time-outs."""

import asyncio
import itertools
import sys

import numpy as np
import pytest

from configs import quickstart
from grpo_jax import data, environments
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.environments import grading
from grpo_jax.environments.base import StepResult
from grpo_jax.environments.grading import answers, gym_score
from grpo_jax.environments.grading.pool import WorkerPool
from grpo_jax.types import FinishReason, Prompt


def tasks(name: str, size: int = 3, **task_args) -> list[Prompt]:
  return data.make_held_out(
    ByteTokenizer(),
    kind="reasoning_gym",
    task=name,
    task_args=task_args,
    size=size,
    task_seed=1,
    max_prompt_tokens=100_000,
    environment="reasoning_gym",
  )


def judge(factory, prompt: Prompt, text: str) -> StepResult:
  async def body():
    environment = factory(prompt)
    await environment.start()
    return await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)

  return asyncio.run(body())


@pytest.mark.parametrize(
  ("text", "settings", "reward", "accuracy"),
  [
    ("{a}", {}, 1.0, 1.0),
    (" {a}\n", {}, 1.0, 1.0),
    ("It is {a} .", dict(partial=False), 0.0, 0.0),
    ("It is {a} .", dict(partial=False, contains_reward=0.5), 0.5, 0.0),
    ("It is{a}", dict(partial=False, contains_reward=0.5), 0.0, 0.0),  # no word of its own.
    ("{a}", dict(partial=False, contains_reward=0.5), 1.0, 1.0),
    ("", dict(contains_reward=0.5), 0.0, 0.0),
    ("so <answer>{a}</answer>", dict(answer="tag"), 1.0, 1.0),
    ("so <answer>\u200b{a}\ufeff</answer>", dict(answer="tag"), 1.0, 1.0),
    ("{a}", dict(answer="tag"), 0.0, 0.0),
    (r"\boxed{{{a}}}", dict(answer="boxed"), 1.0, 1.0),
    ("1 and then {a}.", dict(answer="last_number"), 1.0, 1.0),
  ],
)
def test_rewards_by_answer_form_and_shaping(text, settings, reward, accuracy):
  (prompt,) = tasks("letter_counting", size=1)
  with environments.make(reasoning_gym=settings) as made:
    result = judge(made["reasoning_gym"], prompt, text.format(a=prompt.info["expected_answer"]))
    assert made["reasoning_gym"].metrics()["grader_starts"] == 0.0  # compares texts: no worker.
  assert (result.total, result.metrics["accuracy"]) == (reward, accuracy)


def test_without_the_package_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  for module in ("grpo_jax.environments.reasoning_gym", gym_score.__name__):
    monkeypatch.delitem(sys.modules, module, raising=False)
  monkeypatch.delattr(grading, "gym_score")
  needed = r"needs a package \(.*reasoning_gym.*\): pip install 'grpo-jax\[reasoning-gym\]'"
  with pytest.raises(ValueError, match=f"^the reasoning-gym task 'chain_sum' {needed}"):
    tasks("chain_sum")
  with pytest.raises(ValueError, match=f"^the environment reasoning_gym {needed}"):
    environments.make(reasoning_gym={})


def test_signs_of_unicode_are_those_of_ascii():
  """A scorer that reads numbers, without its sandbox."""
  find = answers.EXTRACTORS["last_number"]
  paid = {"right": 0.0, "wrong": 0.0}
  prompts = tasks("chain_sum", size=40, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
  prompts = [prompt for prompt in prompts if int(prompt.info["expected_answer"])]  # −0 is right.
  for prompt in prompts:
    value = int(prompt.info["expected_answer"])
    for kind, is_negative in (("right", value < 0), ("wrong", value >= 0)):
      text = f"The answer is {'−' * is_negative}{abs(value)}."
      arguments = (prompt.info["task"], prompt.info["task_args"], find(text), prompt.info["entry"])
      paid[kind] += gym_score.score(*arguments) == 1.0
  assert len(prompts) > 30 and paid == {"right": len(prompts), "wrong": 0.0}


def test_the_quickstart_pays_what_the_scorer_of_chain_sum_pays_and_starts_no_grader():
  find = answers.EXTRACTORS["last_number"]
  forms = ("{a}", "It is {a}.", "{a}.00", "0 + {a} = {a}", "−{m}", "{w}", "{a}.5", "{a},000", "?")
  prompts = tasks("chain_sum", size=8, min_terms=2, max_terms=2, min_digits=1, max_digits=2)
  paid = {0.0: 0, 1.0: 0}
  with environments.make(**quickstart.get_config().environments.to_dict()) as made:
    for prompt, form in itertools.product(prompts, forms):
      value = int(prompt.info["expected_answer"])
      text = form.format(a=value, m=abs(value), w=value + 1)
      entry = prompt.info["task"], prompt.info["task_args"], find(text), prompt.info["entry"]
      wanted = float(gym_score.score(*entry) == 1.0)
      result = judge(made["arithmetic"], prompt, text)
      assert result.total == result.metrics["accuracy"] == wanted, text
      paid[wanted] += 1
    assert min(paid.values()) > 20 and made["arithmetic"].metrics()["grader_starts"] == 0.0


def test_partial_scores_are_the_tasks_own():
  (prompt,) = tasks("letter_counting", size=1)
  answer = prompt.info["expected_answer"]
  text = f"it is {answer}"
  with environments.make(reasoning_gym={}) as made:
    # The package's scorer: the share of the text that the answer makes up.
    assert judge(made["reasoning_gym"], prompt, text).total == len(answer) / len(text)


@pytest.mark.long
@pytest.mark.parametrize(
  "task", ["chain_sum", "countdown", "prime_factorization", "knights_knaves"]
)
def test_tasks_with_scorers_of_their_own_judge_in_workers(task):
  prompts = tasks(task, size=1)
  entry = prompts[0].info["entry"]
  with environments.make(reasoning_gym=dict(workers=1, timeout_s=20.0)) as made:
    right = judge(made["reasoning_gym"], prompts[0], str(entry["answer"]))
    wrong = judge(made["reasoning_gym"], prompts[0], "no idea")
  assert right.metrics["accuracy"] == 1.0 and right.total == 1.0
  assert wrong.metrics["accuracy"] == 0.0 and wrong.total < 0.2


@pytest.mark.long
def test_the_tasks_scorer_decides_what_counts_as_right():
  (prompt,) = tasks("chain_sum", size=1)
  with environments.make(reasoning_gym=dict(workers=1, timeout_s=20.0)) as made:
    same = f"{prompt.info['expected_answer']}.00"  # the package takes this as the same number.
    assert judge(made["reasoning_gym"], prompt, same).metrics["accuracy"] == 1.0


@pytest.mark.long
def test_format_reward_is_a_component_of_its_own():
  (prompt,) = tasks("chain_sum", size=1)
  with environments.make(reasoning_gym=dict(answer="boxed", format_reward=0.25)) as made:
    result = judge(made["reasoning_gym"], prompt, r"\boxed{nothing}")
  assert result.components == {"score": 0.0, "format": 0.25}


@pytest.mark.long
def test_a_worker_imports_the_package_before_the_time_of_its_first_call_runs():
  (prompt,) = tasks("countdown", size=1)
  with environments.make(gym=dict(module="reasoning_gym", workers=1, timeout_s=20.0)) as made:
    assert judge(made["gym"], prompt, prompt.info["entry"]["answer"]).metrics["accuracy"] == 1.0
    assert "reasoning_gym" in made["gym"]._pool.submit("loaded_modules").result()


def test_a_scorer_that_hangs_is_killed_and_counted(tmp_path):
  from grpo_jax.environments.reasoning_gym import GymEnvironments

  grader = tmp_path / "grader.py"
  grader.write_text("def score(*arguments):\n  while True: pass\n")
  pool = WorkerPool(grader, workers=1, timeout_s=0.5)
  made = GymEnvironments(
    pool,
    answer="raw",
    partial=True,
    contains_reward=0.0,
    format_reward=0.0,
    reward_timeout=0.0,
  )
  (prompt,) = tasks("countdown", size=1)
  result = judge(made, prompt, "1+1")
  made.close()
  assert result.total == 0.0 and result.metrics["grader_timeout"] == 1.0
  assert made.metrics()["grader_timeouts"] == 1.0


def test_prompts_of_other_data_are_refused():
  with environments.make(reasoning_gym={}) as made:
    with pytest.raises(ValueError, match="needs .*'task'.* in info"):
      made["reasoning_gym"](Prompt("x:0:0", np.zeros(1, np.int32), "reasoning_gym"))
