r"""Multiple choice: which letter some text chooses. Pure, linear in the text.

A choice is a letter, (C), C., option C, \text{(C)}, or the text of an option in full. Several
letters ("A or B") choose nothing, and neither does a letter that no option has.
"""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from grpo_jax.environments.grading import answers, comparison

_LETTERS = "ABCDEFGHIJ"  # when the options are not known.
_MAX_CHARS = 2000  # length of one place where a choice may be.

# "Answer", and what it is in the languages of multilingual MMLU.
_WORDS = (
  *("answer", "choice", "option", "antwort", "antwoord", "réponse", "respuesta", "resposta"),
  *("risposta", "ответ", "jawaban", "jibu", "odpowiedź", "cevap", "svar", "đáp án", "trả lời"),
  *("答案", "答复", "答曰", "回答", "解答", "答", "答え", "정답", "답변", "답"),
  *("الإجابة", "إجابة", "الجواب", "उत्तर", "উত্তর", "ìdáhùn", "idahun"),
)
# Composed or not: normalizing a long text would take time quadratic in its marks.
_SPELLINGS = {unicodedata.normalize(form, word) for word in _WORDS for form in ("NFC", "NFD")}
_FULL_WIDTH = str.maketrans({code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)})
_FIRST = "".join(sorted({each for word in _SPELLINGS for each in word[0] + word[0].upper()}))
_STATED = re.compile(
  rf"(?=[{_FIRST}])(?:" + "|".join(map(re.escape, sorted(_SPELLINGS, key=len, reverse=True))) + r")"
  r"(?:\s{0,3}\([a-z]{1,3}\))?[ \t]{0,3}"
  r"(?::|ः|ঃ|is\b:?|ist\b:?|est\b:?|es\b:?|è\b:?|是:?|هي:?|هو:?)[ \t]{0,3}([^\n]*)",
  re.IGNORECASE,
)
# Letters of other alphabets that stand for A to D.
_OTHER_ALPHABETS = str.maketrans("أبجد" + "অবডঢ", "ABCD" + "ABCD")
_DRESS = re.compile(r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf|boxed|mbox)\s*\{|[{}$*_`\s]+|\\[,;! ]")
_LETTER = re.compile(
  r"(?P<named>(?:option|choice|answer)\s+)?(?P<open>[(\[]?)(?P<letter>[A-Z])(?P<close>[)\]]?)"
  r"(?P<after>[.:,;!?\-–—](?=\s|$)|(?=\s|$))(?P<rest>.*)",
  re.IGNORECASE | re.DOTALL,
)
_ANOTHER = re.compile(
  r"\s*(?:(?:and|or|/|,|&|\|)\s*[(\[]?[A-Z][)\]]?(?:[.,;:\s]|$)|(?:[(\[]?[A-Z][)\]]?\s*)+$)"
)


def options_of(info: Mapping[str, Any]) -> dict[str, str]:
  """Returns a row's options as letter → text: its field `options` or `choices`, a list or a
  mapping; empty if there are none.

  Raises:
    ValueError: The field is neither, or has too many entries.
  """
  given = info.get("options", info.get("choices"))
  if given is None:
    return {}
  if isinstance(given, Mapping):
    return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
  if not isinstance(given, (list, tuple)) or len(given) > 26:
    raise ValueError(f"options must be a list of at most 26 or a mapping, got {given!r:.200}")
  return {chr(ord("A") + place): str(text) for place, text in enumerate(given)}


def find(text: str, options: Mapping[str, str], form: str | None = None) -> str | None:
  r"""Returns the letter that a completion chooses; None if it chooses none.

  Args:
    text: Text of the completion.
    options: Options, as `options_of` returns them.
    form: Key of answers.EXTRACTORS: where the choice must be. None: in the last \boxed{}, otherwise
      <answer>, otherwise the last "Answer: …" or "the answer is …", otherwise the last line.
  """
  if form is not None:
    return letter(answers.EXTRACTORS[form](text), options)
  for place in (answers.boxed, answers.tagged):
    found = place(text)
    if found is not None:
      return letter(found, options)
  plain = text.translate(_FULL_WIDTH)  # a colon may be a full-width one.
  if stated := _STATED.findall(plain):
    return letter(stated[-1], options)
  return letter(plain.rstrip().rpartition("\n")[2], options)


def letter(fragment: str | None, options: Mapping[str, str]) -> str | None:
  """Returns the letter that a short text chooses: by its text or by its letter.

  Args:
    fragment: Text such as "(C)", "C. seven", "seven"; None chooses nothing.
    options: Options, as `options_of` returns them; if empty, the letters A to J are valid.
  """
  if fragment is None or len(fragment) > _MAX_CHARS:
    return None
  fragment = unicodedata.normalize("NFKC", fragment)
  meant = [name for name, text in options.items() if _plain(text) == _plain(fragment)]
  if len(meant) == 1:
    return meant[0]
  bare = _DRESS.sub(" ", fragment).strip().translate(_OTHER_ALPHABETS)
  match = _LETTER.match(bare)
  if match is None or (match["open"] and not match["close"]):
    return None
  chosen, rest = match["letter"].upper(), match["rest"]
  if chosen not in (options or _LETTERS) or _ANOTHER.match(f"{match['after']}{rest}"):
    return None
  is_marked = bool(match["named"] or match["close"] or match["after"])
  return None if _is_word(match["letter"], rest) and not is_marked else chosen


def _is_word(found: str, rest: str) -> bool:
  """Returns whether a bare letter begins a sentence: "A cat", "I think", "c equals"."""
  return bool(rest.strip()) and (found.islower() or found in "AI")


def _plain(text: str) -> str:
  return " ".join(_DRESS.sub(" ", comparison.normalized(text)).casefold().rstrip(".").split())
