"""Sums and products to compute, each made from its seed: tasks for `data.kind = "function"`.

With equal settings, problems and answers are those of reasoning-gym's tasks of the same names. To
install that package takes a C compiler.
"""

import math
import random

from grpo_jax.values import checked

_COUNT = checked.whole(low=1)


def chain_sum(
  *, seed: int, min_terms: int = 2, max_terms: int = 6, min_digits: int = 1, max_digits: int = 4
) -> dict[str, str]:
  """Makes a sum of natural numbers, some of them subtracted: 12 + 5 - 40.

  Args:
    seed: Random seed of the row.
    min_terms: Smallest number of terms.
    max_terms: Largest number of terms.
    min_digits: Smallest number of digits of the terms; those of one sum have equally many.
    max_digits: Largest number of digits of the terms.

  Returns:
    The fields `problem` and `expected_answer`.

  Raises:
    ValueError: A setting is out of range.
  """
  draw = random.Random(seed)
  first, *others = _numbers(draw, (min_terms, max_terms), (min_digits, max_digits))
  signs = [draw.choice("+-") for _ in others]
  expression = " ".join([str(first), *(f"{s} {n}" for s, n in zip(signs, others, strict=True))])
  value = first + sum(n if s == "+" else -n for s, n in zip(signs, others, strict=True))
  problem = f"State the final answer to the following arithmetic problem: {expression} ="
  return {"problem": problem, "expected_answer": str(value)}


def products(
  *, seed: int, min_terms: int = 2, max_terms: int = 2, min_digits: int = 1, max_digits: int = 5
) -> dict[str, str]:
  """Makes a product of natural numbers: 12 * 5 * 40.

  Args:
    seed: Random seed of the row.
    min_terms: Smallest number of factors.
    max_terms: Largest number of factors.
    min_digits: Smallest number of digits of the factors; those of one product have equally many.
    max_digits: Largest number of digits of the factors.

  Returns:
    The fields `problem` and `expected_answer`.

  Raises:
    ValueError: A setting is out of range.
  """
  draw = random.Random(seed)
  factors = _numbers(draw, (min_terms, max_terms), (min_digits, max_digits))
  expression = " * ".join(map(str, factors))
  problem = (
    f"Solve the following multiplication: {expression}. Give only the result as your final answer."
  )
  return {"problem": problem, "expected_answer": str(math.prod(factors))}


def _numbers(draw: random.Random, terms: tuple[int, int], digits: tuple[int, int]) -> list[int]:
  """Draws how many numbers there are, how many digits they have, and then the numbers."""
  for what, (low, high) in (("terms", terms), ("digits", digits)):
    values = {f"min_{what}": low, f"max_{what}": high}
    wrong = checked.problems(dict.fromkeys(values, _COUNT), values, prefix="data.task_args.")
    if not wrong and low > high:
      wrong = [f"data.task_args.min_{what}={low} is larger than data.task_args.max_{what}={high}"]
    if wrong:
      raise ValueError("; ".join(wrong))
  count, width = draw.randint(*terms), draw.randint(*digits)
  smallest = 10 ** (width - 1) if width > 1 else 0
  return [draw.randint(smallest, 10**width - 1) for _ in range(count)]
