"""Control tokens in text that is data: it is encoded so that it contains none.

A tokenizer recognises the text of its added tokens wherever it finds it: `<|im_end|>` in the output
of a program would end the message. Here such places are marked before a chat template writes the
text, and the parts at both sides of a mark are encoded separately.

All tokens that a tokenizer has beside its vocabulary count, "special" or not, but for white space.
Places are found by the library of the tokenizer itself, after its own normalisation. Also marked
are the ends of strings that could form a token with what the template writes beside them. A mark
that is in no token of the finished text changes nothing: the text is then encoded as a whole.
"""

import bisect
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.models.chat import tokenizer_files
from grpo_jax.models.chat.rendering import ConversationTooLarge, with_objects

# Tokens that a model writes in its own turn, which messages of the assistant may contain.
THOUGHTS_AND_CALLS = frozenset(
  f"<{slash}{name}>"
  for name in ("think", "tool_call", "arg_key", "arg_value")
  for slash in ("", "/")
)
# Names by which messages, tools and calls are read; other names of fields are text like any other.
_FIELDS = frozenset(
  "role content name tool_calls tool_call_id reasoning_content reasoning thinking type text id"
  " function arguments description parameters".split()
)
# Of a message of the assistant, what it said.
_OWN_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")
_MARKS = 8  # number of marks for each token of a conversation, at most.
_LONGER = 4  # factor by which normalisation shortens a string at most, about.

Places = tuple[int, ...]


class TrustedText(str):
  """Text whose control tokens are meant: that of the config, for example.

  It is equal to other text; what is made of it, by slicing or as JSON, is not trusted.
  """

  data: tuple[tuple[int, int], ...]  # beginnings and ends of its parts that are data.

  def __new__(cls, text: str, data: Iterable[tuple[int, int]] = ()) -> "TrustedText":
    made = super().__new__(cls, text)
    made.data = tuple(data)
    return made


def trusted(value: Any) -> Any:
  """Returns a value like that of JSON in which all strings are trusted."""
  return _mapped(value, lambda text, is_own: TrustedText(text))


def absent(word: str, *values: Any) -> str:
  """Returns a word that begins like this one and occurs in none of the values."""
  text, found, number = repr(values), word, 0
  while found in text:
    number += 1
    found = f"{word}{number}x"
  return found


class ControlTokens:
  """The control tokens of a tokenizer."""

  def __init__(self, backend: Any, *, templates: Sequence[str] = ()):
    """Reads the added tokens.

    Args:
      backend: Tokenizer of transformers.
      templates: Sources of the chat templates.
    """
    added = backend.added_tokens_decoder.values()
    self._tokens = [token for token in added if len(token.content.strip()) > 1]
    fast = getattr(backend, "backend_tokenizer", None)
    self._normalizer = fast.normalizer if fast is not None else None
    self._templates = "\n".join(templates)

  def marked(self, *values: Any, has_own_turns: bool = False, most: int | None = None) -> "Marked":
    """Marks where messages, tools or calls could write control tokens.

    Args:
      values: Lists like those of JSON.
      has_own_turns: Whether messages of the assistant are what the model could have written: they
        may contain `THOUGHTS_AND_CALLS`.
      most: Number of control tokens in their text above which they are refused; None: any.

    Raises:
      ConversationTooLarge: There are more.
      TemplateRefusal: The arguments of a call are not an object.
    """
    # Escapes in the JSON text of arguments could spell a control token.
    values = tuple([with_objects(each) for each in value] for value in values)
    places: dict[Any, Places] = {}
    count = 0

    def find(text: str, is_own: bool) -> str:
      nonlocal count
      key = (text, getattr(text, "data", None), is_own)  # trusted text is equal to other text.
      if key not in places:
        places[key] = self._places(text, is_own and has_own_turns, most)
      count += len(places[key])
      if most is not None and count > _MARKS * most:
        raise ConversationTooLarge(f"more than {most} control tokens in its text")
      return text

    def insert(text: str, is_own: bool) -> str:
      found = places[text, getattr(text, "data", None), is_own]
      return mark.join(_split(text, found)) if found else text

    for each in values:
      _mapped_messages(each, find)
    if not any(places.values()):
      return Marked(self, values, "")
    mark = _unused_digits(values)
    return Marked(self, tuple(_mapped_messages(each, insert) for each in values), mark)

  def apart(self, text: str, *, most: int) -> list[str]:
    """Splits a string into parts without control tokens, at no more than about `most` places."""
    return _split(text, self._cuts(text, False, most))

  def cuts_at(self, text: str, places: Places) -> list[int]:
    """Returns those of the places, ascending, at which text must be split."""
    found, todo = [], [(0, len(text))]
    while todo:
      begin, end = todo.pop()
      cuts = []
      for start, stop, _ in self._spans(text[begin:end]):
        inside = bisect.bisect_right(places, begin + start)
        if inside < len(places) and places[inside] < begin + stop:
          cuts.append(places[inside])
      found += cuts
      todo += _parts(begin, cuts, end)
    return sorted(found)

  def _places(self, text: str, is_own: bool, most: int | None) -> Places:
    """Returns the places of a string at which it may have to be split, or more than `most`."""
    parts = text.data if isinstance(text, TrustedText) else ((0, len(text)),)
    found: set[int] = set()
    for begin, end in parts:
      part = text[begin:end]
      found.update(begin + place for place in (*self._cuts(part, is_own, most), *self._edges(part)))
    return tuple(sorted(found))

  def _cuts(self, text: str, is_own: bool, most: int | None) -> list[int]:
    """Returns the places at which a string must be split to contain no control token, or more of
    them than `most`."""
    found, todo = [], [(0, len(text))]
    while todo and (most is None or len(found) <= most):
      begin, end = todo.pop()
      cuts = []
      for start, stop, token in self._spans(text[begin:end]):
        core = text[begin + start : begin + stop]
        first = len(core) - len(core.lstrip()) + 1
        if first < len(core.rstrip()) and not (is_own and token in THOUGHTS_AND_CALLS):
          cuts.append(begin + start + first)
      found += cuts
      todo += _parts(begin, cuts, end)
    return sorted(found)

  def _edges(self, text: str) -> Iterator[int]:
    """Yields the ends of a string, without white space, that could be within a control token."""
    core = text.strip()
    if not core or not self._tokens:
      return
    begin = len(text) - len(text.lstrip())
    near = _LONGER * self._longest
    heads, tails = self._spellings(core[:near]), self._spellings(core[-near:])
    is_inside = len(core) <= near and any(each in self._joined for each in heads)
    is_inside = is_inside and not self._is_known(core)
    lengths = range(1, self._longest)
    if is_inside or any(head[:n] in self._ends for head in heads for n in lengths):
      yield begin
    if is_inside or any(tail[-n:] in self._beginnings for tail in tails for n in lengths):
      yield begin + len(core)

  def _is_known(self, word: str) -> bool:
    """Returns whether a chat template may compare a string with this word."""
    if f"'{word}'" in self._templates or f'"{word}"' in self._templates:
      return True
    after = (rest[:1] for rest in self._templates.split(f".{word}")[1:])  # an attribute.
    return any(not (each.isalnum() or each == "_") for each in after)

  def _spans(self, text: str) -> list[tuple[int, int, str]]:
    """Returns where control tokens begin and end in text, and the tokens."""
    if not any(map(self._head.search, self._spellings(text))):
      return []
    with tokenizer_files.guarded():
      found = self._finder.encode(text, add_special_tokens=False)
    return [
      (*place, token)
      for place, token in zip(found.offsets, found.tokens, strict=True)
      if token != tokenizer_files.UNKNOWN
    ]

  def _spellings(self, text: str) -> set[str]:
    """Returns text as it is, and as the tokenizer normalises it if that can make tokens of it."""
    if self._normalizer is None or not any(token.normalized for token in self._tokens):
      return {text}
    with tokenizer_files.guarded():
      return {text, self._normalizer.normalize_str(text)}

  @functools.cached_property
  def _finder(self) -> Any:
    return tokenizer_files.finder(self._tokens, self._normalizer)

  @functools.cached_property
  def _texts(self) -> set[str]:
    """Text of the tokens, in all spellings that are compared."""
    each = (self._spellings(t.content) if t.normalized else {t.content} for t in self._tokens)
    return {text.strip() for texts in each for text in texts}

  @functools.cached_property
  def _head(self) -> re.Pattern[str]:
    """Matches the first two characters of every token."""
    heads = {text[:2] for text in self._texts}
    return re.compile("|".join(map(re.escape, sorted(heads))) or r"(?!)")

  @functools.cached_property
  def _joined(self) -> str:
    return "\0".join(self._texts)

  @functools.cached_property
  def _beginnings(self) -> set[str]:
    return {text[:n] for text in self._texts for n in range(1, len(text))}

  @functools.cached_property
  def _ends(self) -> set[str]:
    return {text[-n:] for text in self._texts for n in range(1, len(text))}

  @functools.cached_property
  def _longest(self) -> int:
    return max(map(len, self._texts), default=0)


@dataclasses.dataclass(frozen=True)
class Marked:
  """Values with marks where text may have to be split."""

  tokens: ControlTokens
  values: tuple[Any, ...]
  mark: str  # "": there are none.

  @functools.cached_property
  def characters(self) -> int:
    """Number of characters of all marks."""
    return repr(self.values).count(self.mark) * len(self.mark) if self.mark else 0

  def pieces(self, text: str) -> list[str]:
    """Returns the parts of a template's output that are encoded separately."""
    if not self.mark:
      return [text]
    parts = text.split(self.mark)
    place, places = 0, []
    for part in parts[:-1]:
      place += len(part)
      places.append(place)
    bare = "".join(parts)
    return _split(bare, self.tokens.cuts_at(bare, tuple(places)))


def _parts(begin: int, cuts: Sequence[int], end: int) -> list[tuple[int, int]]:
  """Returns the parts between cuts, ascending; none if there is no cut."""
  return [*zip((begin, *cuts), (*cuts, end), strict=True)] if cuts else []


def _split(text: str, cuts: Sequence[int]) -> list[str]:
  return [text[begin:end] for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True)]


def _unused_digits(values: Any) -> str:
  """Returns digits that occur in none of the values; no end of them is their beginning.

  Digits survive upper case, JSON and HTML.
  """
  text, number = repr(values), 0o5270361425
  while (found := f"8{number:o}") in text:
    number += 1
  return found


def _mapped_messages(values: Sequence[Any], change: Callable[[str, bool], str]) -> list[Any]:
  """Returns messages, tools or calls with all strings changed, apart from roles; see `_mapped`."""
  found = []
  for value in values:
    if not isinstance(value, Mapping):
      found.append(_mapped(value, change))
      continue
    own = _OWN_FIELDS if value.get("role") == "assistant" else ()
    made = {
      _mapped_name(name, change): each if name == "role" else _mapped(each, change, name in own)
      for name, each in value.items()
    }
    found.append(made)
  return found


def _mapped(value: Any, change: Callable[[str, bool], str], is_own: bool = False) -> Any:
  """Returns a value like that of JSON with all its strings changed.

  Args:
    value: The value.
    change: Function from a string, and whether it is what an assistant said, to another.
    is_own: Whether strings in the value are what an assistant said.
  """
  if isinstance(value, str):
    return change(value, is_own)
  if isinstance(value, list | tuple):
    return [_mapped(each, change, is_own) for each in value]
  if value is None or isinstance(value, int | float) or not isinstance(value, Mapping):
    return value
  return {_mapped_name(n, change): _mapped(each, change, is_own) for n, each in value.items()}


def _mapped_name(name: Any, change: Callable[[str, bool], str]) -> Any:
  return name if name in _FIELDS else _mapped(name, change)
