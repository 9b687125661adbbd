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


# What needs mathematics, by kind: gold answer, right answers, wrong answers.
MEANINGS = {
  "small and large numbers": [
    ("0.0000123", [r"1.23\times 10^{-5}", "1.23e-5"], ["0.0000119", r"\frac{1}{81301}"]),
    (r"6.6\times 10^{-34}", ["6.6e-34"], ["0", "0.0", "0.0000001", "9.1e-31", "6.7e-34"]),
    (r"\frac{1}{20!}", [], [r"\frac{1}{21!}", "0"]),
    ("e^{-50}", ["e^{-50}"], ["e^{-51}", "0"]),
    (r"\frac{1}{3}", ["0.333333", r"0.\overline{3}", "0.33333334"], ["0.33333", "0.333", "0.3333"]),
    (r"\frac{1}{8}", ["0.125", ".125", r"12.5\%"], ["0.1250001", "0.13"]),
    (r"\frac{189}{16384}", ["0.011535645"], ["0.0115356"]),
    (r"\pi", ["3.141593"], ["3.1416", r"\frac{22}{7}", r"\frac{355}{113}"]),
    (r"\sqrt{2}\cdot 10^{-9}", ["1.4142136e-9"], ["1.5e-9", "0"]),
    (r"\sqrt{10^{40}+1}", [], ["10^{20}"]),
    ("(0.0000001, 2)", [r"(10^{-7}, 2)"], ["(0.0000003, 2)"]),
    ("[0, 10^{-9}]", ["[0, 1e-9]"], [r"[0, 2\cdot 10^{-9}]"]),
    (r"\{10^{-9}, 1\}", [], [r"\{2\cdot 10^{-9}, 1\}"]),
    (
      r"\begin{pmatrix}0.0000001\\1\end{pmatrix}",
      [],
      [r"\begin{pmatrix}0.0000002\\1\end{pmatrix}"],
    ),
    (r"x=3\cdot 10^{-18}", ["x=3e-18"], ["x=5e-18"]),
    (r"\frac{x}{10^{18}}", [r"x\cdot 10^{-18}"], [r"\frac{x}{10^{17}}", "0"]),
    ("0.1x", [r"\frac{x}{10}"], ["0.1000001x"]),
    ("21 - i", ["21.0 + -1.0i", "-i+21"], ["21 + i"]),
  ],
  "words and symbols": [
    ("xy", ["yx", r"x\cdot y"], ["x+y"]),
    ("2xy", ["2yx"], ["2xz"]),
    ("3R^2", ["3R²"], ["3r^2"]),
    ("3t", ["3 t"], ["3", "3 s"]),
    ("n=3k", ["n = 3k"], ["3", "n=3"]),
  ],
  "units and percent": [
    (
      r"12\sqrt{13}\text{ feet}",
      [r"12\sqrt{13}", r"12\sqrt{13}\text{ ft}"],
      [r"12\sqrt{13}\text{ m}"],
    ),
    (r"33\frac13\%", [r"33\frac13", r"\frac13", r"\frac{100}{3}\%"], ["33", r"\frac13\%"]),
    (r"\frac13", [r"33\frac13\%"], [r"33\%"]),
    (r"\tan 15^\circ", [r"2-\sqrt3", r"\tan 15°"], [r"\tan 16^\circ", r"\tan 15"]),
    (
      "60",
      ["60 km/h"],
      ["60k", "60 dozen", r"60\text{ million}", r"60\text{ (or 61)}", "60 squared", "60!"],
    ),
  ],
  "characters and dress": [
    (
      r"\frac{\sqrt{3}}{2}",
      ["√3/2", r"\mathbf{\frac{\sqrt3}{2}}", r"\frac{√3}{2}"],
      ["√2/2", "3/2"],
    ),
    (r"\frac{11}{4}", ["2¾", "2 3/4", "11⁄4", "2.75", r"2\frac34"], ["2½", "2", "3/4"]),
    ("x^2+1", ["x²+1", r"\boldsymbol{x^2+1}", "**x^2+1**", r"\color{red}{x^2+1}"], ["x³+1", "x+1"]),
    (r"x \le 4", ["x ≤ 4", r"4 \ge x"], ["x ≥ 4", "x<4"]),
    (r"\emptyset", [r"\varnothing", "∅", r"\{\}"], ["0", r"\{0\}"]),
    (r"-\frac{1}{2}", ["−½", r"–\frac12"], ["½", r"\frac12"]),
    (r"2\pi", ["2π", "2*pi", r"{\bf 2\pi}"], ["2", "π"]),
  ],
  "adjacent numbers": [
    ("11", [], ["5 6", r"5\,6", r"\textcolor{red}{5}\;6"]),
    ("42", [r"\mathbf{4}2", r"\textcolor{red}{4}2"], [r"4\;2", "4 2"]),
    (r"3\frac14", ["3 1/4", "3.25"], [r"3\cdot\frac14", r"\frac34"]),
  ],
  "sets, intervals, vectors": [
    (r"(2,5)", ["2<x<5", "2, 5"], [r"\{2,5\}", "(5,2)", "[2,5]"]),
    (r"\{2,5\}", ["5, 2"], ["(2,5)"]),
    ("2,5", ["5,2", r"\{2,5\}"], ["(2,5)", "2"]),
    (r"(1,\infty)", ["x > 1"], [r"x \ge 1", "x < 1"]),
    (r"(-\infty,2)\cup(5,\infty)", [r"x<2 \text{ or } x>5"], [r"x<2 \text{ or } y>5"]),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", ["(1,2)"], ["(2,1)", r"\begin{pmatrix}1&2\end{pmatrix}"]),
  ],
}


@pytest.mark.long
def test_answers_mean_what_a_person_reads(grader):
  wrong = []
  for kind, cases in MEANINGS.items():
    for gold, right, others in cases:
      for answer in (*right, *others):
        result = asyncio.run(judge(grader, prompt(gold), rf"So it is \boxed{{{answer}}}"))
        if result.reward != float(answer in right):
          wrong.append((kind, gold, answer, result.reward))
  assert wrong == []


def test_graders_import_no_jax_and_nothing_of_the_package_but_the_sandbox(grader):
  modules = set(grader._pool.submit("loaded_modules").result())
  assert "math_verify" in modules and "sympy" in modules
  assert not {m.partition(".")[0] for m in modules} & {"jax", "grain", "transformers"}
  assert {m for m in modules if m.partition(".")[0] == "grpo_jax"} == set()


def test_rewards_and_format_are_separate():
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


@pytest.mark.long
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


@pytest.mark.long
def test_time_outs_are_counted_and_may_be_left_out_of_learning():
  settings = dict(timeout_s=0.5, workers=1, reward_timeout=math.nan, must_be_evaluated=False)
  with environments.make(math=settings) as made:
    text = r"\boxed{9^{9^{9^{9^9}}}}"
    result = asyncio.run(judge(made["math"], prompt("5"), text))
    assert math.isnan(result.total) and result.metrics["grader_timeout"] == 1.0
    assert made.metrics()["env/math/grader_timeouts"] == 1.0


@pytest.mark.long
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


@pytest.mark.long
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
