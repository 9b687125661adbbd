"""The ways to find an answer in a completion and compare it with the reference. Pure."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.environments.grading import answers, choices, comparison, minerva
from grpo_jax.registry import choose

Info = Mapping[str, Any]  # the fields of a row; `expected_answer` is the reference.


@dataclasses.dataclass(frozen=True, slots=True)
class Verifier:
  """A way to verify. `form` is a key of answers.EXTRACTORS: where the answer must be."""

  form: str | None  # the default; None: `find` has its own order.
  find: Callable[[str, str | None, Info], str | None]  # (completion, form, info) -> answer.
  # (info, answer) -> whether it is right; None: undecided without mathematics, needs a worker.
  decide: Callable[[Info, str], bool | None]
  check: Callable[[Info], None] = lambda info: None  # raises ValueError for an unusable row.


def make(name: str, form: str | None) -> tuple[Verifier, str | None]:
  """Returns the verifier of that name, and where its answers must be.

  Raises:
    ValueError: The verifier or the form is unknown.
  """
  verifier = choose("verifier", name, VERIFIERS)
  form = form or verifier.form
  if form is not None:
    choose("answer form", form, answers.EXTRACTORS)
  return verifier, form


def _extract(text: str, form: str | None, info: Info) -> str | None:
  del info
  return answers.EXTRACTORS[form or "raw"](text)


def _equal_as_text(info: Info, answer: str) -> bool | None:
  return comparison.equal_as_text(answers.gold(info["expected_answer"]), answer)


def _equal_by_minerva(info: Info, answer: str) -> bool:
  return minerva.equal(answers.gold(info["expected_answer"]), answer)


def _choose(text: str, form: str | None, info: Info) -> str | None:
  return choices.find(text, choices.options_of(info), form)


def _is_choice(info: Info, answer: str) -> bool:
  return answer == _expected_letter(info)


def _expected_letter(info: Info) -> str | None:
  return choices.letter(answers.gold(info["expected_answer"]), choices.options_of(info))


def _check_choice(info: Info) -> None:
  if _expected_letter(info) is None:
    options = choices.options_of(info)
    known = f"the options are {options}" if options else "the row has no field options"
    raise ValueError(f"expected_answer {info['expected_answer']!r:.200} is not a choice: {known}")


VERIFIERS: dict[str, Verifier] = {
  "math_verify": Verifier("boxed", _extract, _equal_as_text),
  "minerva": Verifier("line", _extract, _equal_by_minerva),
  "multiple_choice": Verifier(None, _choose, _is_choice, _check_choice),
}
