r"""Counts the right answers that the math environment misses, and the wrong ones that it pays.

    python scripts/spellings.py gsm8k_test.jsonl math500.jsonl --answer-key answer --sample 300

Each gold answer is written in at least ten right spellings (\mathbf, Markdown, zero-width marks, −
for -, 3½, 1 000, 12.5%, with and without its unit, …) and changed in several wrong ways (sign,
digits, order, unit, 3e-6 off, a hedge, …). Each is put in \boxed{} and judged by the environment
as it is. Rows are lines of JSON whose answer may be a whole solution that ends in #### ANSWER.
"""

import argparse
import asyncio
import collections
import pathlib
import random
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np

from grpo_jax import environments
from grpo_jax.commands import cli
from grpo_jax.data import formats
from grpo_jax.environments.base import AnyFactory, Environment
from grpo_jax.errors import ExpectedFailure
from grpo_jax.types import FinishReason, Prompt

_AROUND = (
  *("{}", " {} ", "${}$", r"\({}\)", "**{}**", r"\mathbf{{{}}}", r"\boldsymbol{{{}}}", "{{{}}}"),
  *(r"\displaystyle {}", r"\color{{blue}}{{{}}}", "\u200b{}\u200b", "\ufeff{}", "\u200e{}\u200e"),
)
_OF_NUMBERS = (
  *("x = {}", r"\approx {}", r"\text{{{}}}", r"\${}", r"{}\text{{ cm}}", "{} km/h", "{} apples"),
  *("{}.0", "{}.00", r"\underline{{{}}}", r"{{\rm {}}}", "{}°", "{}."),
)
_NOT_NUMBERS = (
  *("{} million", r"{}\text{{ dozen}}", "{}½", "{}√2", "{}x", r"\pm {}", r"{}\text{{ or }}7777"),
  *(r"{}\text{{ (or 7777)}}", "1 {}", "{}_{{37}}", r"\frac{{{}}}{{7}}", r"\{{{}, 7777\}}"),
)
_SIGNS = {r"\pi": "π", r"\infty": "∞", r"\cup": "∪", r"^\circ": "°", r"^{\circ}": "°"}
_OTHER_UNITS = {"km": "miles", "miles": "km", "cm": "m", "feet": "meters", "hours": "minutes"}
_FRACTION = re.compile(r"(?P<sign>-?)\\[dt]?frac\{(?P<above>\d+)\}\{(?P<below>\d+)\}")
_WITH_UNIT = re.compile(r"(?P<value>[\d.,!\\]+?)\s*\\(?:text|mbox)\{\s*(?P<unit>[a-z ]+)\}\.?")
_POINT = re.compile(r"(?:\\left)?\((?P<first>-?\d+),\s*(?P<second>-?\d+)(?:\\right)?\)")


def right(gold: str) -> Iterator[str]:
  """Yields right spellings of a gold answer."""
  yield from (form.format(gold) for form in _AROUND)
  yield from (gold.replace("-", minus) for minus in "−–")
  signs = re.sub(r"\\sqrt\{(\d+)\}", r"√\1", gold.replace("-", "−"))
  for command, sign in _SIGNS.items():
    signs = signs.replace(command, sign)
  yield re.sub(r"\^(\d)(?!\d)", lambda found: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(found[1])], signs)
  if re.fullmatch(r"-?\d+", number := _digits(gold)):
    grouped = f"{int(number):,}"
    yield from (grouped.replace(",", mark) for mark in (",", r"\,", "{,}", "'", "\u202f", " "))
    yield from (form.format(number) for form in _OF_NUMBERS)
    yield number.translate(str.maketrans("0123456789-", "０１２３４５６７８９－"))
  if found := _FRACTION.fullmatch(gold):
    sign, above, below = found.groups()
    value = Fraction(int(above), int(below))
    yield from (rf"\dfrac{{{sign}{above}}}{{{below}}}", rf"{sign}\tfrac{{{above}}}{{{below}}}")
    yield from (f"{sign}{above}/{below}", f"{sign}{above}⁄{below}", f"{sign}{float(value):.8g}")
    if value > 1 and value.denominator > 1:
      whole, rest = divmod(value.numerator, value.denominator)
      yield rf"{sign}{whole}\frac{{{rest}}}{{{value.denominator}}}"
      yield f"{sign}{whole} {rest}/{value.denominator}"
  if found := re.fullmatch(r"([\d.]+) ?\\%", gold):
    yield from (found[1], f"{found[1]}%", f"{found[1]} percent", f"{Decimal(found[1]) / 100:f}")
  if found := re.fullmatch(r"([\d.]+)\^\{?\\circ\}?", gold):
    yield from (found[1], f"{found[1]} degrees", rf"{found[1]}\text{{ degrees}}")
  if found := _WITH_UNIT.fullmatch(gold):
    yield from (found["value"], f"{found['value']} {found['unit']}")
  if found := re.fullmatch(r"\\text\{([A-Za-z ]+)\}", gold):
    yield from (found[1], rf"\textbf{{{found[1]}}}", f"“{found[1]}”")


def wrong(gold: str) -> Iterator[str]:
  """Yields wrong answers that are near a gold answer."""
  yield from ("0.0000001", r"\text{pears}", r"\text{ }")
  if re.fullmatch(r"-?\d+", number := _digits(gold)):
    value = int(number)
    yield from (str(value + 1), f"{value}.001", f"{value - 1} 1", f"{value - 1}+1")
    yield from (form.format(number) for form in _NOT_NUMBERS if value)
    if value:
      yield from (str(-value).replace("-", minus) for minus in "-−–")
      yield from (f"{value}0", rf"\frac{{{2 * value}}}{{2}}", f"{value}e3")
    if (turned := number[::-1]).isdigit() and int(turned) != value:
      yield turned
  elif found := _FRACTION.fullmatch(gold):
    sign, above, below = found["sign"], int(found["above"]), int(found["below"])
    other = "" if sign else "−"
    yield from (rf"{other}\frac{{{above}}}{{{below}}}", rf"{sign}\frac{{{above + 1}}}{{{below}}}")
    yield from (f"{sign}{above / below * factor:.12g}" for factor in (1.0001, 1.000003))
    if above != below:
      yield rf"{sign}\frac{{{below}}}{{{above}}}"
  elif found := re.fullmatch(r"\\text\{([A-Za-z]{2,})\}", gold):
    turned = found[1][::-1]
    yield f"{found[1]}^2"
    if turned.lower() != found[1].lower():
      yield from (turned, rf"\text{{{turned}}}")
  elif found := re.search(r"\d+", gold):
    yield f"{gold[: found.start()]}{int(found[0]) + 1}{gold[found.end() :]}"
  if found := _WITH_UNIT.fullmatch(gold):
    other = _OTHER_UNITS.get(found["unit"], "parsecs")
    yield from (rf"{found['value']}\text{{ {other}}}", f"{found['value']} {other}")
  if found := re.fullmatch(r"(\d+)_\{?(\d+)\}?", gold):
    yield f"{found[1]}_{{{int(found[2]) + 1}}}"
  if (found := _POINT.fullmatch(gold)) and found["first"] != found["second"]:
    first, second = found.groups()
    yield from (f"({second},{first})", rf"\{{{first},{second}\}}")


def _digits(gold: str) -> str:
  return re.sub(r",\\!\s*|(?<=\d),(?=\d{3})", "", gold)


def read(path: str, key: str) -> list[tuple[str, str]]:
  """Returns (gold answer as it is in the file, its value) of each distinct value.

  Raises:
    ExpectedFailure: The file cannot be read, or a row has no answer.
  """
  try:
    lines = pathlib.Path(path).read_bytes().splitlines()
  except OSError as error:
    raise ExpectedFailure(f"cannot read {path}: {error.strerror}") from error
  places = [f"{path}:{number}" for number in range(1, len(lines) + 1)]
  rows = [formats.parse_line(*each) for each in zip(lines, places, strict=True)]
  golds = [
    formats.as_answer(formats.lookup(row, key, where), key, where)
    for row, where in zip(rows, places, strict=True)
  ]
  values = {gold.rpartition("####")[2].strip(): gold for gold in golds}
  return [(gold, value) for value, gold in values.items() if value]


async def judged(factory: AnyFactory, gold: str, answers: list[str]) -> list[str]:
  """Returns the answers that are paid."""

  async def is_paid(answer: str) -> bool:
    prompt = Prompt("x:0:0", np.zeros(1, np.int32), "math", {"expected_answer": gold})
    environment = factory(prompt)
    assert isinstance(environment, Environment)
    text = rf"So it is \boxed{{{answer}}}."
    result = await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)
    return bool(result.metrics["accuracy"])

  paid = await asyncio.gather(*map(is_paid, answers))
  return [answer for answer, is_right in zip(answers, paid, strict=True) if is_right]


def main(words: Sequence[str]) -> None:
  """Prints the table, and some of the failures."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("files", nargs="+", help="files of rows in JSON lines")
  parser.add_argument("--answer-key", default="answer", help="field of the gold answer")
  parser.add_argument(
    "--sample", type=int, help="number of golds from each file, drawn with seed 0"
  )
  parser.add_argument("--examples", type=int, default=5, help="number of failures that are shown")
  arguments = parser.parse_args(words)
  files = {path: read(path, arguments.answer_key) for path in arguments.files}
  print(
    "| file | golds | right spellings | missed | wrong answers | paid |\n|---|---|---|---|---|---|"
  )
  failures: list[str] = []
  with environments.make(math=dict(workers=2, timeout_s=20.0)) as made:
    for path, golds in files.items():
      if arguments.sample and arguments.sample < len(golds):
        golds = random.Random(0).sample(golds, arguments.sample)
      counts: collections.Counter[str] = collections.Counter()
      for gold, value in golds:
        good, bad = list(dict.fromkeys(right(value))), list(dict.fromkeys(wrong(value)))
        paid = asyncio.run(judged(made["math"], gold, good + bad))
        missed, forged = set(good) - set(paid), set(bad) & set(paid)
        counts.update(right=len(good), missed=len(missed), wrong=len(bad), paid=len(forged))
        failures += [f"missed: {answer!r} for {value!r}" for answer in sorted(missed)]
        failures += [f"paid: {answer!r} for {value!r}" for answer in sorted(forged)]
      numbers = [counts[name] for name in ("right", "missed", "wrong", "paid")]
      print(f"| {pathlib.Path(path).stem} | {len(golds)} | {' | '.join(map(str, numbers))} |")
  for failure in random.Random(0).sample(failures, min(arguments.examples, len(failures))):
    print(failure)


if __name__ == "__main__":
  sys.exit(cli.reported(main, sys.argv[1:]))
