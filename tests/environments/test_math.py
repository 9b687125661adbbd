r"""The math environment: known gold/prediction pairs, rewards, and expressions that never end."""

import asyncio
import math
import os
import signal
import time

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments.base import StepResult
from grpo_jax.types import FinishReason, Prompt


def prompt(expected, **info) -> Prompt:
  info = {"expected_answer": expected, **info}
  return Prompt("x:0:0", np.zeros(1, np.int32), "math", info)


async def judge(factory, task: Prompt, text: str) -> StepResult:
  environment = factory(task)
  await environment.start()
  result = await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)
  await environment.close()
  return result


@pytest.fixture(scope="module")
def grader():
  with environments.make(math=dict(timeout_s=20.0, workers=1)) as made:
    yield made["math"]


# Gold answers of the shape of GSM8K and MATH, with what models write. Judged by hand.
PAIRS = [
  # whole solutions as gold, as in GSM8K
  ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "72", True),
  ("She makes $<<9*2=18>>18 every day.\n#### 18", r"\$18", True),
  ("#### 70,000", "70000", True),
  ("#### 5", "five", False),
  # numbers
  ("9", "9", True),
  ("1000", "1{,}000", True),
  ("0.5", r"\frac12", True),
  (r"\frac{14}{3}", "14/3", True),
  (r"\frac{14}{3}", r"4\frac{2}{3}", True),
  (r"\frac{3}{4}", r"\frac{4}{3}", False),
  ("-2", "2", False),
  ("10^{-3}", "0.001", True),
  ("2^{10}", "1024", True),
  ("1024", "2^{10}", False),  # left to compute.
  ("3.14", r"\pi", False),
  # roots and symbols
  (r"\sqrt{12}", r"2\sqrt3", True),
  (r"11\sqrt2", r"\sqrt{242}", True),
  (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True),
  ("p - q", "-q+p", True),
  ("p - q", "q - p", False),
  ("x^2+2x+1", "(x+1)^2", True),
  ("6 - 5i", "-5i + 6", True),
  ("5", "x=5", True),
  # units, percent, degrees
  ("3", r"3\text{ cm}", True),
  ("18", r"18 \text{ dollars}", True),
  (r"90^\circ", "90", True),
  (r"50\%", "0.5", True),
  ("50", r"50\%", True),
  # points, intervals, sets, matrices
  (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
  (r"\left( 3, \frac{\pi}{2} \right)", r"(\pi/2,3)", False),
  ("[2,5)", "[2, 5)", True),
  ("[2,5)", "(2,5)", False),
  (r"(-\infty, 2]", r"(-\infty,2]", True),
  (r"\{1,2\}", r"\{2,1\}", True),
  ("1,2", "2, 1", True),
  ("1,2", "1", False),
  (
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    True,
  ),
  # words
  (r"\text{Evelyn}", "Evelyn", True),
  (r"\text{(C)}", "C", True),
  (r"\text{even}", r"\text{odd}", False),
  # not mathematics at all
  ("5", r"\frac{", False),
  ("5", r"5}{", True),  # reads \boxed{5}{}: the box closes after 5.
  ("5", "import os; os.abort()", False),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), PAIRS, ids=[repr(p[:2]) for p in PAIRS])
def test_known_pairs_are_judged_right(grader, gold, answer, expected):
  result = asyncio.run(judge(grader, prompt(gold), rf"So it is \boxed{{{answer}}}"))
  assert result.metrics["accuracy"] == float(expected)
  assert result.reward == float(expected) and result.done


def test_graders_import_no_jax_and_nothing_of_the_package_but_the_sandbox(grader):
  modules = set(grader._pool.submit("loaded_modules").result())
  assert "math_verify" in modules and "sympy" in modules
  assert not {m.partition(".")[0] for m in modules} & {"jax", "grain", "transformers"}
  ours = {m for m in modules if m.startswith("grpo_jax.")}
  assert {m for m in ours if not m.startswith("grpo_jax.sandbox")} == set()


def test_rewards_and_format_are_told_apart():
  settings = dict(answer="hash", reward_correct=2.0, reward_wrong=-1.0, format_reward=0.25)
  with environments.make(math=settings) as made:
    results = [asyncio.run(judge(made["math"], prompt("7"), t)) for t in ("#### 7", "#### 8", "7")]
    assert made["math"].metrics()["grader_starts"] == 0.0  # whole numbers need no worker.
  assert [r.components for r in results] == [
    {"correct": 2.0, "format": 0.25},
    {"correct": -1.0, "format": 0.25},
    {"correct": -1.0, "format": 0.0},
  ]
  assert [r.metrics["accuracy"] for r in results] == [1.0, 0.0, 0.0]
  assert [r.metrics["has_answer"] for r in results] == [1.0, 1.0, 0.0]


def test_a_prompt_without_answer_and_an_unknown_form_are_refused(grader):
  with pytest.raises(ValueError, match="x:0:0: the math environment needs expected_answer"):
    grader(Prompt("x:0:0", np.zeros(1, np.int32), "math"))
  with pytest.raises(ValueError, match="unknown answer form 'box'.*did you mean 'boxed'"):
    environments.make(math=dict(answer="box"))


ENDLESS = [
  "9^{9^{9^{9^9}}}",
  "9999999^{99999999}",
  r"\sqrt{" * 200 + "2" + "}" * 200,
  r"\frac{1}{1+" * 150 + "x" + "}" * 150,
  "(x+1)^{10000}",
  r"\sum_{i=1}^{10^{10}} i^i",
  "{" * 900 + "5" + "}" * 900,
  "1+" * 900 + "1",
  "5" + "x" * 100_000,
  r"\int" * 400,
]


@pytest.fixture(scope="module")
def impatient():
  with environments.make(math=dict(timeout_s=1.0, workers=1, must_be_evaluated=False)) as made:
    yield made["math"]


@pytest.mark.parametrize("expression", ENDLESS, ids=[e[:25] for e in ENDLESS])
def test_a_pathological_expression_costs_no_more_than_its_time_out(impatient, expression):
  easy = lambda: asyncio.run(judge(impatient, prompt(r"\frac12"), r"\boxed{1/2}"))
  easy()  # the worker has started.
  before = impatient.metrics()["grader_timeouts"]
  start = time.perf_counter()
  result = asyncio.run(judge(impatient, prompt(r"\frac{22}{7}"), rf"\boxed{{{expression}}}"))
  assert time.perf_counter() - start < 1.0 + 1.0
  assert result.reward == 0.0 and result.metrics["accuracy"] == 0.0
  counted = impatient.metrics()["grader_timeouts"] - before
  assert counted == result.metrics["grader_timeout"]
  # And the next one is judged as ever.
  assert easy().reward == 1.0


def test_time_outs_are_counted_and_may_be_left_out_of_learning():
  settings = dict(timeout_s=0.5, workers=1, reward_timeout=math.nan, must_be_evaluated=False)
  with environments.make(math=settings) as made:
    text = r"\boxed{9^{9^{9^{9^9}}}}"
    result = asyncio.run(judge(made["math"], prompt("5"), text))
    assert math.isnan(result.total) and result.metrics["grader_timeout"] == 1.0
    assert made.metrics()["env/math/grader_timeouts"] == 1.0


def test_a_killed_sandbox_is_replaced_and_its_answer_judged_again():
  with environments.make(math=dict(timeout_s=60.0, workers=1)) as made:
    grader = made["math"]
    asyncio.run(judge(grader, prompt(r"\frac12"), r"\boxed{1/2}"))
    (pid,) = grader._pool.pids()
    os.kill(pid, signal.SIGKILL)
    result = asyncio.run(judge(grader, prompt(r"\frac13"), r"\boxed{2/6}"))
    assert result.reward == 1.0
    assert grader.metrics()["grader_crashes"] == 1.0
    assert pid not in grader._pool.pids()


def test_closing_ends_the_workers():
  made = environments.make(math=dict(workers=2))
  for _ in range(3):
    asyncio.run(judge(made["math"], prompt(r"\frac12"), r"\boxed{1/2}"))
  pids = made["math"]._pool.pids()
  assert pids
  made.close()
  made.close()
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)
