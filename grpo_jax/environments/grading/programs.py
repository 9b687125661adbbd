r"""Finds the program in a completion. Pure, linear in the text.

Only regular expressions are used here: Python's own parser can be crashed by what a model
writes, so it runs in the sandbox only.
"""

import os
import re
from collections.abc import Callable, Iterator

_FENCE = "```"
_LABEL = re.compile(r"[ \t]*(?P<label>[\w+-]*)")
_PYTHON = ("python", "python3", "py")


def fenced(text: str, entry: str = "") -> str | None:
  """Returns the last closed Python block between lines of ```.

  Blocks labelled python take precedence over unlabelled ones; others do not count. Of several,
  the last that defines `entry` is returned, if one does.
  """
  found = list(_blocks(text))
  labelled = [body for label, body in found if label in _PYTHON]
  blocks = [_dedented(b) for b in labelled or [body for label, body in found if not label]]
  defining = (body for body in reversed(blocks) if entry and defines(body, entry))
  return next(defining, blocks[-1] if blocks else None)


def tagged(text: str, entry: str = "") -> str | None:
  """Returns the content of the last <code>…</code>, without a fence directly inside it."""
  found = _last_between(text, "<code>", "</code>")
  return None if found is None else fenced(found, entry) or found


def whole(text: str, entry: str = "") -> str | None:
  """Returns the text unchanged; None if it is blank."""
  return text if text.strip() else None


def anywhere(text: str, entry: str = "") -> str | None:
  """Returns the first of these that is present: a fenced block, a tagged one, the whole text."""
  return fenced(text, entry) or tagged(text, entry) or whole(text)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
  """Yields label and content of the blocks between an opening line of ``` and a closing one."""
  label, content = "", None  # content: where the content of an open block begins.
  end = -1  # end of the last line that was read.
  while (at := text.find(_FENCE, end + 1)) >= 0:
    line, after = text.rfind("\n", end + 1, at) + 1 or end + 1, at + len(_FENCE)
    end = text.find("\n", after)
    is_last = end < 0
    end = len(text) if is_last else end
    if text[line:at].strip(" \t"):
      continue
    if content is not None and not text[after:end].strip(" \t\r"):
      yield label, text[content:line]
      content = None
    elif content is None and not is_last and "`" not in text[after:end]:
      found = _LABEL.match(text, after, end)
      label, content = found["label"].lower() if found else "", end + 1


def _dedented(code: str) -> str:
  """Removes the white space that all lines begin with, like textwrap.dedent."""
  lines = [line if line.strip(" \t") else "" for line in code.split("\n")]
  indents = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line]
  margin = len(os.path.commonprefix([min(indents), max(indents)])) if indents else 0
  return "\n".join(line[margin:] for line in lines)


def _last_between(text: str, opening: str, closing: str) -> str | None:
  """Returns what is between the last pair of tags; a tag within a pair is content.

  Pairs are found from the left: a pair begins at the first opening tag after the previous pair.
  """
  found, at = None, 0
  last = text.rfind(closing)
  while 0 <= (start := text.find(opening, at)) < last:
    end = text.find(closing, start)
    found, at = (start + len(opening), end), end + len(closing)
  return None if found is None else text[slice(*found)]


def defines(code: str, name: str) -> bool:
  """Returns whether code defines a function, class or variable of this name at its top level."""
  pattern = (
    rf"^(?:(?:async[ \t]+)?def[ \t]+|class[ \t]+){re.escape(name)}\b|^{re.escape(name)}[ \t]*="
  )
  return re.search(pattern, code, re.M) is not None


def assemble(code: str, *, prompt_code: str, entry: str) -> list[str]:
  """Returns the pieces of code that form the program, to be run one after another.

  Args:
    code: Code that the model wrote.
    prompt_code: The prompt, if it is code to be completed; otherwise "".
    entry: Name of the function under test, or "".

  Returns:
    Code that defines the function, after the prompt's imports and helpers; or the prompt
    with the code as its continuation.
  """
  if not prompt_code:
    return [code]
  if defines(code, entry) or defines(code, "Solution"):
    return [prompt_code, code]
  return [prompt_code + code]


Extractor = Callable[[str, str], str | None]
EXTRACTORS: dict[str, Extractor] = {
  "fence": fenced,
  "tag": tagged,
  "raw": whole,
  "any": anywhere,
}
