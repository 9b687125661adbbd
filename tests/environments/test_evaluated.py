r"""What an answer may leave to compute: echoes of problems are refused, final forms are not."""

import asyncio

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments.grading import evaluated
from grpo_jax.types import FinishReason, Prompt
from tests import sandboxes

# Gold answer, and a problem that has it, as it could be copied into the box.
ECHOES = [
  (r"\frac12", r"\int_0^1 x \, dx"),
  ("55", r"\sum_{i=1}^{10} i"),
  ("120", r"\binom{10}{3}"),
  ("3628800", "10!"),
  ("1", r"\lim_{x\to0}\frac{\sin x}{x}"),
  ("6", r"\gcd(12,18)"),
  ("1024", "2^{10}"),
  ("2x", r"\frac{d}{dx}x^2"),
  ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
  ("3", "|{-3}|"),
  ("7", r"\max(3,7)"),
  ("2", r"\lfloor 2.7\rfloor"),
  ("72", "48+48/2"),
  ("17", r"3+14 \text{ apples}"),
  ("156", r"12\cdot13"),
  ("4", r"\sqrt{16}"),
  ("3", r"\log_2 8"),
  (r"\frac12", r"\sin 30^\circ"),
  ("36", r"\operatorname{lcm}(12,18)"),
  # Others of the same kinds.
  ("-2", r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
  ("3", r"\left\lvert -3\right\rvert"),
  ("6", r"\text{gcd}(12,18)"),
  ("24", r"\prod_{k=1}^4 k"),
  ("120", r"{10 \choose 3}"),
  ("120", r"\frac{10!}{3!\,7!}"),
  ("3", r"17 \bmod 7"),
  ("2x", r"\frac{\partial}{\partial x} x^2"),
  ("2x", r"\frac{\mathrm{d}(x^2)}{\mathrm{d}x}"),
  ("6", "2(3)"),
  ("6", r"2 \times 3"),
  ("2", r"\frac{6}{3}"),
  ("3", r"6 \div 2"),
  ("3", r"{6 \over 2}"),
  ("0.75", r"\frac{1}{2}+\frac14"),
  ("3", r"\frac{1/2}{1/6}"),
  (r"\frac12", "2^{-1}"),
  ("2", "8^{1/3}"),
  ("5", "-(-5)"),
  ("5", "x+5-x"),
  ("-1", "i^2"),
  ("-1", r"e^{i\pi}"),
  ("1", r"\mathrm{e}^{0}"),
  ("72", "x = 48+24"),
  ("72", "72 = 48+24"),
  ("72", "48+24, 72"),
  ("50", r"50\% \cdot 100"),
  ("(3,4)", "(1+2,2^2)"),
  (r"\begin{pmatrix}3\\4\end{pmatrix}", r"\begin{pmatrix}1+2\\4\end{pmatrix}"),
  (
    r"\begin{pmatrix}3\\4\end{pmatrix}",
    r"\begin{pmatrix}1\\1\end{pmatrix}+\begin{pmatrix}2\\3\end{pmatrix}",
  ),
  (r"\{1\}", r"\{1,2\}\cap\{1,3\}"),
  (r"\{1,2\}", r"\{1\}\cup\{2\}"),
  ("5", "√25"),
  ("6x", r"2\cdot 3x"),
  ("11", "5 6"),
  ("8", "2³"),
  ("5", "|−5|"),
  (r"6\pi", r"2\cdot 3\pi"),
]
FINAL = [
  *(("72", text) for text in ("72", "72.0", "x=72", r"\$72", r"72 \text{ dollars}", "72 cm^2")),
  *(("72", text) for text in (r"72\,\mathrm{m/s}", "72 m/s^2", r"(72)", "+72", "48+24=72")),
  *((r"\frac12", text) for text in (r"\dfrac{1}{2}", r"\frac{3}{6}", "0.5", r"50\%", "1/2")),
  *((r"\frac{14}{3}", text) for text in (r"4\frac{2}{3}", r"4 \frac23", "4 2/3", "14/3")),
  *(("300000000", text) for text in (r"3\times10^8", r"3 \cdot 10^{8}", "3e+8", "300,000,000")),
  ("90", r"90^\circ"),
  (r"\frac{-3}{4}", r"-\frac{3}{4}"),
  ("0.001", "10^{-3}"),
  (r"\frac13", r"0.\overline{3}"),
  (r"2\sqrt3", r"\sqrt{12}"),
  (r"\sqrt{2}", "2^{1/2}"),
  (r"2\pi", "2π"),
  (r"\frac{\pi}{2}", r"\pi/2"),
  ("x^2+2x+1", "(x+1)^2"),
  (r"\frac{x}{2}", r"\frac{1}{2}x"),
  ("6-5i", "-5i+6"),
  (r"e^{i\pi/3}", r"\cos\frac{\pi}{3}+i\sin\frac{\pi}{3}"),
  (r"\ln 2", r"\log 2"),
  (r"1\pm\sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
  ("2^{10}", "4^5"),
  (r"\binom{10}{3}", r"\binom{10}{7}"),
  ("[2,5)", "[2, 5)"),
  (r"(-\infty, 0) \cup (0, \infty)", r"\mathbb{R} \setminus \{0\}"),
  ("1,-2", r"1 \text{ and } -2"),
  ("2516_8", "2516_{8}"),
  (r"\text{Evelyn}", "Evelyn"),
]


@pytest.mark.parametrize(("gold", "answer"), ECHOES)
def test_an_echo_of_the_problem_is_left_undone(gold, answer):
  assert evaluated.left_undone(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), FINAL)
def test_a_final_form_leaves_nothing(gold, answer):
  assert not evaluated.left_undone(gold, answer)


def test_what_the_gold_answer_leaves_may_be_left():
  for _, answer in ECHOES:
    assert not evaluated.left_undone(answer, answer), answer


@pytest.mark.parametrize(
  "text", ["", "{", "}", "^", "_", "\\", r"\frac", r"\begin{", "((((", "x^", "!"]
)
def test_broken_text_is_read_too(text):
  evaluated.left_undone("5", text)
  evaluated.left_undone(text, "5")


def test_deep_nesting_is_left_undone_and_ends():
  for opening, closing in (("{", "}"), (r"\sqrt{", "}"), (r"\frac{1}{1+", "}"), ("x^{", "}")):
    assert evaluated.left_undone("5", opening * 900 + "2" + closing * 900)
  assert evaluated.left_undone("5", r"\frac" * 900)


def reward(factory, gold, answer):
  async def attempt():
    prompt = Prompt("x:0:0", np.zeros(1, np.int32), "math", {"expected_answer": gold})
    environment = factory(prompt)
    await environment.start()
    text = rf"\boxed{{{answer}}}"
    return await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)

  return asyncio.run(attempt()).total


@pytest.mark.long
def test_the_option_decides():
  settings = dict(module="math", workers=1, timeout_s=20.0, sandbox=sandboxes.any_kind())
  loose = dict(settings, must_be_evaluated=False)
  with environments.make(strict=settings, loose=loose) as made:
    echo = ("120", r"\binom{10}{3}")
    assert [reward(made[name], *echo) for name in ("strict", "loose")] == [0.0, 1.0]
    assert reward(made["strict"], r"\frac12", r"\frac{3}{6}") == 1.0
    assert reward(made["strict"], "2^{10}", "4^5") == 1.0
