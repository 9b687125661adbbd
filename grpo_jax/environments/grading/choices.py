r"""Multiple choice: which letter some text chooses. Pure, linear in the text.

A choice is a letter, (C), C., option C, \text{(C)}, or the text of an option in full. Several
letters ("A or B") choose nothing, and neither does a letter that no option has.
"""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from grpo_jax.environments.grading import answers, comparison, notation

_LETTERS = "ABCDEFGHIJ"  # when the options are not known.
_MAX_CHARS = 2000  # length of one place where a choice may be.

# "Answer", and what it is in the languages of multilingual MMLU.
_WORDS = (
  *("answer", "choice", "option", "antwort", "antwoord", "réponse", "respuesta", "resposta"),
  *("risposta", "ответ", "jawaban", "jibu", "odpowiedź", "cevap", "svar", "đáp án", "trả lời"),
  *("答案", "答复", "答曰", "回答", "解答", "答", "故", "应", "正确选项", "答え", "正解"),
  *("정답", "답변", "답", "คำตอบ", "απάντηση", "תשובה", "پاسخ", "جواب", "відповідь", "odpověď"),
  *("vastaus", "válasz", "răspuns"),
  *("الإجابة", "إجابة", "الجواب", "उत्तर", "উত্তর", "ìdáhùn", "idahun"),
)
# Composed or not: normalizing a long text would take time quadratic in its marks.
_SPELLINGS = {unicodedata.normalize(form, word) for word in _WORDS for form in ("NFC", "NFD")}
_FIRST = "".join(sorted({each for word in _SPELLINGS for each in word[0] + word[0].upper()}))
# "is", and what it is in these languages; the particles of Korean, Japanese and Chinese.
_IS = (
  *("is", "ist", "est", "es", "è", "é", "e\u0301", "är", "er", "jest", "adalah", "ni", "là"),
  *("हल", "হল", "হলো", "है", "คือ", "είναι", "היא", "je", "on", "este"),
)
_STATED = re.compile(
  rf"(?=[{_FIRST}])(?:" + "|".join(map(re.escape, sorted(_SPELLINGS, key=len, reverse=True))) + r")"
  r"(?:et|en|nya)?(?:[ ](?:correcte?|correct[ao]|corrett[ao]|corret[ao]|final|finale)(?!\w))?"
  r"(?:\s{0,3}\([a-z]{1,3}\))?[ \t]{0,3}[*_`]{0,3}[ \t]{0,3}"
  r"(?::|ः|ঃ|=>?|-{1,2}>|[→⇒]|-(?=\s)|(?:"
  + "|".join(_IS)
  + r")\b:?|[是为為选選은는はが]:?|هي:?|هو:?)"
  r"[ \t]{0,3}[*_`]{0,3}[ \t]{0,3}(?:\r?\n[ \t]{0,3}){0,3}([^\n]*)",
  re.IGNORECASE,
)
# Letters of other alphabets that stand for A to D.
_OTHER_ALPHABETS = str.maketrans("أبجد" + "অবডঢ", "ABCD" + "ABCD")
_DRESS = re.compile(
  r"\\(?:text\w{0,6}|math\w{2}|bold\w{0,6}|bm|boxed|fbox|mbox|underline|emph|rm|bf)(?![A-Za-z])"
  r"\s*\{?"
  r"|\\[,;:! ()\[\]]|[{}$*_`\s\"“”„«»「」『』《》【】〔〕<>]+|(?<!\w)['‘’]|['‘’](?!\w)"
)
_NO_WORDS = re.compile(r"[^\w(\[]{1,20}")
_NOT_BUT = re.compile(r"not [(\[]?[A-Z][)\]]?,? but (?:rather )?")
_LETTER = re.compile(
  r"(?P<named>(?:option|choice|answer)\s+)?(?P<open>[(\[]?)(?P<letter>[A-Z])(?P<close>[)\]]?)"
  r"(?P<after>(?:[.:,;!?。、।۔؟…]{1,9}|[\-–—])(?=\s|$|[^\x00-\x7f])|(?=\s|$)"
  r"|(?:입니다|이다|이에요|예요|번|です|だ|である|选项|選項|项|項)(?=[\s.,。、!]|$))(?P<rest>.*)",
  re.IGNORECASE | re.DOTALL,
)
_ANOTHER = re.compile(
  r"[?!\s]*(?:(?:[Aa]nd|[Oo]r|und|oder|ou|et|o|y|e|и|или|ya|veya|或|和|と|また|또는|및|[/,&|、;+])"
  r"\s*[(\[]?(?P<letter>[A-Z])[)\]]?(?:[.,;:?!、。\s]|$)|(?P<more>(?:[(\[]?[A-Z][)\]]?[?!\s]*)+)$)"
)
_LAST_LETTER = re.compile(
  r"(?i:(?!.*(?:not|n't|\bexcept|\bneither|\bnor|\bor)\b))[^()]*(\([A-Z]\))[.!]?"
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
      <answer>, otherwise the last "Answer: …" or "the answer is …", otherwise the last line. A
      choice behind the last </think> takes precedence.
  """
  if form is not None:
    return letter(answers.EXTRACTORS[form](text), options)
  _, thought, answer = text.rpartition("</think>")
  return (_find(answer, options) if thought else None) or _find(text, options)


def _find(text: str, options: Mapping[str, str]) -> str | None:
  for place in (answers.boxed, answers.tagged):
    found = place(text)
    if found is not None:
      stated = _STATED.findall(notation.characters(found))
      return letter(found, options) or letter(stated[-1] if stated else None, options)
  plain = notation.characters(text)  # a colon may be a full-width one.
  if stated := _STATED.findall(plain):
    return letter(stated[-1], options)
  line = plain.rstrip().rpartition("\n")[2]
  at_end = _LAST_LETTER.fullmatch(line) if len(line) <= _MAX_CHARS else None
  return letter(at_end[1] if at_end else line, options)


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
  bare = _DRESS.sub(" ", notation.characters(fragment)).strip().translate(_OTHER_ALPHABETS)
  bare = _NOT_BUT.sub("", bare, count=1) if _NOT_BUT.match(bare) else bare
  symbols = _NO_WORDS.match(bare)
  match = _LETTER.match(bare, symbols.end() if symbols else 0)
  if match is None or (match["open"] and not match["close"]):
    return None
  letters = options or _LETTERS
  chosen, rest = match["letter"].upper(), match["rest"]
  another = _ANOTHER.match(f"{match['after']}{rest}")
  if chosen not in letters or (another and (another["more"] or another["letter"] in letters)):
    return None
  is_marked = bool(match["named"] or match["close"] or match["after"])
  return None if _is_word(match["letter"], rest) and not is_marked else chosen


def _is_word(found: str, rest: str) -> bool:
  """Returns whether a bare letter begins a sentence: "A cat", "I think", "c equals"."""
  return bool(rest.strip()) and (found.islower() or found in "AI")


def _plain(text: str) -> str:
  return " ".join(_DRESS.sub(" ", comparison.normalized(text)).casefold().rstrip(".").split())
