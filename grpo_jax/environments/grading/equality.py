r"""Decides with math-verify whether two answers are equal. Run it in a sandbox: it may never end.

math-verify's own time-outs (signals) are off; the process of a call is killed if it takes too
long. Answers are parsed as LaTeX only: the other parser evaluates Python expressions, which
`prepare` also disables in SymPy.
"""

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from grpo_jax.sandbox import expressions

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)


def equal(gold: str, answer: str) -> bool:
  r"""Returns whether `answer` means the same as `gold`; False if it cannot be read.

  Args:
    gold: Reference answer, as it would appear in \boxed{}.
    answer: Answer of the model.
  """
  answer = answer.rstrip(".").strip()
  return bool(verify(_parse(gold), _parse(answer), timeout_seconds=None))


def _parse(answer: str) -> list[Any]:
  return parse(rf"\boxed{{{answer}}}", _LATEX, parsing_timeout=None)  # pyright: ignore[reportArgumentType] None turns it off


# One answer of each form: the parser's tables fill as it reads, and later processes inherit them.
_FORMS = (
  (r"\frac{1}{2}", "0.5"),
  (r"x^2 - 2x + \sqrt{3}", r"-2 \cdot x + x^{2} + \sqrt[2]{3}"),
  (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
  (r"(-\infty, 2] \cup [3, 5)", r"[3,5) \cup (-\infty,2]"),
  (r"\{1, 2\}", r"\{2, \text{ or } 1\}"),
  (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 4/2 \end{pmatrix}"),
  (r"x = 5\%", r"5^\circ"),
  (r"e^{i\theta} \log 2 \sin x", r"\sin(x) \log(2) e^{i \theta}"),
  (r"x \le 5, y > 3", "10^{-3}"),
)


def prepare() -> None:
  """Disables evaluation of strings in SymPy, and lets the parser read one answer of each form."""
  expressions.guard("math_verify")
  for gold, answer in _FORMS:
    equal(gold, answer)
