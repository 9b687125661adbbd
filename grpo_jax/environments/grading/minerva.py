r"""Compares answers as Minerva and DAPO do: both are normalised as text and must then be equal.

No mathematics is done: 1/2 does not equal 0.5. The rewriting rules are Minerva's list, as far as
verl's DAPO verifier kept it. Pure, and bounded: longer answers are not compared.

Reference:
  Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1, listing 1; DAPO, arXiv:2503.14476, as
  in verl's `math_dapo`. In addition, Markdown's ** around an answer and invisible characters are
  dropped here, and − is a minus.
"""

import re

from grpo_jax.environments.grading import notation

MAX_CHARS = 2000

_REPLACED = (
  ("an ", ""),
  ("a ", ""),
  (".$", "$"),
  (r"\$", ""),
  ("\\ ", ""),
  (" ", ""),
  ("mbox", "text"),
  (r",\text{and}", ","),
  (r"\text{and}", ","),
  (r"\text{m}", r"\text{}"),
)
# Units and filler words. The order matters: one may appear as another is removed.
_REMOVED = (
  *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
  *(r"\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
  *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
  *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
  *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_WRAPPERS = ("text", "textbf", "overline")
_UNWRAPPED = tuple(re.compile(rf"\\{name}" + r"\{([^}]*)\}") for name in _WRAPPERS)
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def equal(gold: str, answer: str) -> bool:
  """Returns whether two answers are the same text once normalised; never if it is empty."""
  if max(len(gold), len(answer)) > MAX_CHARS:
    return False
  wanted = normalized(gold)
  return bool(wanted) and wanted == normalized(answer)


def normalized(answer: str) -> str:
  r"""Rewrites an answer: what follows the last =, without units, \text, $ and short forms."""
  answer = notation.characters(answer).strip().strip("*").rpartition("=")[2]
  for before, after in _REPLACED:
    answer = answer.replace(before, after)
  for word in _REMOVED:
    answer = answer.replace(word, "")
  parts = answer.split("$", 2)
  answer = parts[1] if len(parts) == 3 else answer  # the first formula, if there is one.
  for pattern in _UNWRAPPED:
    answer = pattern.sub(r"\1", answer)
  answer = _BOXED.sub(r"\1", answer)
  answer = _SHORT_FRACTION.sub(r"frac{\1}{\2}", answer)
  answer = _SHORT_ROOT.sub(r"sqrt{\1}", answer)
  answer = answer.replace("$", "")
  digits = answer.replace(",", "")
  return digits if digits.isdigit() else answer.strip()
