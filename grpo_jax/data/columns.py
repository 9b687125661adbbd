r"""Readers of the columns of datasets: problems, answers, options, conversations. Pure.

A reader is a function (row, where) → value; it raises RowError for a row that it cannot read, and
LeftOut for one that the dataset itself marks as unusable.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.data import formats
from grpo_jax.data.formats import LeftOut, RowError

Row = Mapping[str, Any]
Column = Callable[[Row, str], Any]  # (row, where) → value.

# Answers of NuminaMath-1.5 that say that there is none.
_NO_ANSWERS = ("", "proof", "notfound")
_PREFERENCES = range(-3, 4)  # HelpSteer3: from "response 1 is much better" to "response 2 is".


def column(*names: str) -> Column:
  """Returns a reader of the first of several columns that a row has; "a.b.0" is a nested one."""

  def read(row: Row, where: str) -> Any:
    there = [name for name in names if name.partition(".")[0] in row]
    return formats.lookup(row, there[0] if there else names[0], where)

  return read


def after_hashes(*names: str) -> Column:
  """Reads the answer after the last #### of a worked solution, without thousands separators."""

  def read(row: Row, where: str) -> Any:
    solution = column(*names)(row, where)
    if not isinstance(solution, str) or "####" not in solution:
      return solution
    return solution.rpartition("####")[2].strip().replace(",", "")

  return read


def in_box(*names: str) -> Column:
  r"""Reads the content of the last \boxed{…}; a column without a box is the answer itself."""

  def read(row: Row, where: str) -> Any:
    solution = column(*names)(row, where)
    return last_boxed(solution) if isinstance(solution, str) else solution

  return read


def last_boxed(text: str) -> str:
  r"""Returns the content of the last \boxed{…} (or \boxed 5) of some text, or else all of it."""
  found = list(re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s{}$.,]+)", text))
  if not found:
    return text
  if found[-1][1] != "{":
    return found[-1][1]
  depth, start = 1, found[-1].end()
  for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
    depth += {"{": 1, "}": -1}.get(brace[0], 0)
    if not depth:
      return text[start : start + brace.start()].strip()
  return text


def without_instructions(name: str) -> Column:
  """Reads DAPO's prompts without the instruction around the problem, which asks for an answer
  after "Answer:", while our prompts ask for one in a box."""
  before = re.compile(
    r"\ASolve the following math problem step by step\.[^\n]*is the answer to the problem\.\s*"
  )
  after = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z")

  def read(row: Row, where: str) -> Any:
    text = column(name)(row, where)
    return after.sub("", before.sub("", text)) if isinstance(text, str) else text

  return read


def question_in_context(row: Row, where: str) -> str:
  """Reads SQuAD's paragraph and question as one text."""
  context = formats.as_text(column("context")(row, where), "'context'", where)
  question = formats.as_text(column("question")(row, where), "'question'", where)
  return f"{context}\n\nQuestion: {question}"


def listed_options(name: str) -> Column:
  """Reads the options of a question from a column that lists them, in the order of the letters."""

  def read(row: Row, where: str) -> dict[str, str]:
    return _lettered(column(name)(row, where), where)

  return read


def shuffled_options(right: str, *wrong: str) -> Column:
  """Reads the options from a column each, in an order that depends on the question only.

  The column of the right one is always the same, so that its letter must not be.
  """

  def read(row: Row, where: str) -> dict[str, str]:
    texts = [
      formats.as_text(column(name)(row, where), repr(name), where) for name in (right, *wrong)
    ]
    key = "\n".join(texts).encode()
    order = sorted(texts, key=lambda text: zlib.crc32(key + text.strip().encode()))
    return _lettered([text.strip() for text in order], where)

  return read


def letter_of(right: str, options: Column) -> Column:
  """Reads the letter of the right option, whose text is in a column."""

  def read(row: Row, where: str) -> str:
    text = formats.as_text(column(right)(row, where), repr(right), where).strip()
    return next(letter for letter, option in options(row, where).items() if option == text)

  return read


def _lettered(texts: Any, where: str) -> dict[str, str]:
  if not isinstance(texts, Sequence) or isinstance(texts, str) or not 2 <= len(texts) <= 26:
    raise RowError(where, f"options must be a list of 2 to 26 strings, got {texts!r:.100}")
  return {chr(ord("A") + i): formats.as_text(text, "option", where) for i, text in enumerate(texts)}


def boxed_alone(name: str) -> Column:
  r"""Reads the content of the last \boxed{…} of a solution; one without a box is a proof."""

  def read(row: Row, where: str) -> str:
    solution = formats.as_text(column(name)(row, where), repr(name), where)
    if not (found := last_boxed(solution)) or found == solution:
      raise LeftOut(where, f"{name!r} has no boxed answer", kind=formats.NO_ANSWER)
    return found

  return read


def verifiable(name: str) -> Column:
  """Reads an answer of NuminaMath-1.5, or of a dataset made of it.

  Proofs and answers that were not found are left out, and so are rows whose problem or solution is
  marked as invalid.
  """

  def read(row: Row, where: str) -> Any:
    answer = column(name)(row, where)
    is_proof = str(row.get("question_type")).strip().lower() == "proof"
    if is_proof or answer is None or str(answer).strip().lower() in _NO_ANSWERS:
      reason = f"{name!r} is {answer!r}, and the question a proof" if is_proof else f"{answer!r}"
      raise LeftOut(where, f"no answer to compare: {reason}", kind=formats.NO_ANSWER)
    for mark in ("problem_is_valid", "solution_is_valid"):
      if row.get(mark, "Yes") not in ("Yes", True):
        raise LeftOut(where, f"{mark!r} is {row[mark]!r}", kind="marked as invalid")
    return answer

  return read


def letter_at(name: str, options: Column) -> Column:
  """Reads the right option from a column with its letter, or its number from 0."""

  def read(row: Row, where: str) -> str:
    given, letters = column(name)(row, where), [*options(row, where)]
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(letters):
      return letters[given]
    if isinstance(given, str) and given.strip().upper() in letters:
      return given.strip().upper()
    known = f"{letters[0]} to {letters[-1]}, or a number from 0 to {len(letters) - 1}"
    raise RowError(where, f"{name!r} is {given!r:.60}; there are: {known}")

  return read


def conversation(name: str) -> Column:
  """Reads a column with a conversation that ends with the answer of the assistant."""

  def read(row: Row, where: str) -> list[Mapping[str, Any]]:
    messages = column(name)(row, where)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
      raise RowError(where, f"{name!r} must be a list of messages, got {messages!r:.60}")
    last = messages[-1]
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
      raise RowError(where, f"{name!r} must end with a message of the assistant")
    return [*messages]

  return read


def preferred(row: Row, where: str) -> list[Mapping[str, Any]]:
  """Reads HelpSteer3's conversation with the preferred response, or the first one of a tie."""
  group = preference_group(row, where)
  best = min(group["group"], key=lambda member: member["rank"])
  return [*group["prompt"], {"role": "assistant", "content": best["response"]}]


def preference_group(row: Row, where: str) -> dict[str, Any]:
  """Reads HelpSteer3's two responses as a ranked group.

  The ranks are 1 and 1 + the strength of the preference (0 to 3).
  """
  context = column("context")(row, where)
  if isinstance(context, str):
    context = [{"role": "user", "content": context}]
  if not isinstance(context, Sequence):
    raise RowError(where, f"'context' must be a list of messages, got {context!r:.60}")
  preference = column("overall_preference")(row, where)
  if isinstance(preference, bool) or preference not in _PREFERENCES:
    raise RowError(where, f"'overall_preference' must be from -3 to 3, got {preference!r:.60}")
  ranks = {"response1": 1 + max(int(preference), 0), "response2": 1 + max(-int(preference), 0)}
  group = [
    {"response": formats.as_text(column(name)(row, where), repr(name), where), "rank": rank}
    for name, rank in ranks.items()
  ]
  return {"prompt": [*context], "group": group, "group_type": row.get("domain")}


def best_reply(row: Row, where: str) -> list[Mapping[str, Any]]:
  """Reads a thread of OpenAssistant (see `message_trees`) with its best reply."""
  replies = _replies(row, where)
  ranked = [each for each in replies if each.get("rank") is not None]
  best = min(ranked, key=lambda each: each["rank"]) if ranked else replies[0]
  return [*row["messages"], {"role": "assistant", "content": best["text"]}]


def reply_group(row: Row, where: str) -> dict[str, Any]:
  """Reads the ranked replies of a thread of OpenAssistant as a ranked group."""
  ranked = [each for each in _replies(row, where) if each.get("rank") is not None]
  if len(ranked) < 2:
    raise LeftOut(where, "fewer than two replies have a rank", kind="without ranked replies")
  group = [{"response": each["text"], "rank": each["rank"]} for each in ranked]
  return {"prompt": row["messages"], "group": group, "group_type": row.get("lang")}


def _replies(row: Row, where: str) -> Sequence[Mapping[str, Any]]:
  replies = column("replies")(row, where)
  for each in replies:
    formats.as_text(each.get("text"), "the text of a reply", where)
  return replies
