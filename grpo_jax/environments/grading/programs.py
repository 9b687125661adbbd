r"""Finds the program in a completion. Pure, linear in the text.

Only regular expressions are used here: Python's own parser can be crashed by what a model
writes, so it runs in the sandbox only.
"""

import os
import re
from collections.abc import Callable, Iterator

# A line with a fence: what is before its first one, and what is behind.
_LINE = re.compile(r"^(?P<front>[^\n]*?)(?P<mark>`{3,}|~{3,})(?P<behind>[^\n]*)$", re.MULTILINE)
_LABEL = re.compile(r"[ \t]*\{?\.?(?P<label>[\w+-]*)")
_ONLY_A_LABEL = re.compile(r"[ \t]*[A-Za-z][\w+.#-]*[ \t\r]*")
_BEHIND_CLOSING = re.compile(r"[ \t]*(?:</?\|?\w{1,30}\|?>[ \t]*){0,9}[.,;:!*]{0,3}[ \t\r]*")
_TAG_IN_FRONT = re.compile(r"<\w{1,30}>[ \t]*\Z")
_MARGIN = " \t>\ufeff\u200b"  # of a line: blanks, quotations, invisible marks.
_PYTHON = ("python", "python3", "py")


def fenced(text: str, entry: str = "") -> str | None:
  """Returns the last closed Python block between fences, as CommonMark has them.

  A fence is a line of at least three ` or ~ with a label behind; it is closed by a line of at
  least as many. In addition, text or a tag may be before an opening fence that has a label, a tag
  or full stop behind a closing one, and code before it if no other closes the block.

  Blocks labelled python take precedence over unlabelled ones; others do not count. Of several, the
  last that defines `entry` is returned, if one does. Blocks behind </think> take precedence.
  """
  blocks = _python_blocks(text.rpartition("</think>")[2]) or _python_blocks(text)
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


def _python_blocks(text: str) -> list[str]:
  """Returns the blocks labelled python, otherwise those without a label."""
  found = list(_blocks(text))
  labelled = [body for label, body in found if label in _PYTHON]
  return [_dedented(body) for body in labelled or [body for label, body in found if not label]]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
  """Yields label and content of the blocks between an opening fence and a closing one."""
  fence, label, content = "", "", 0  # the open block: its fence, label and where it begins.
  early = 0  # where the block ends if no line closes it: before a fence behind code.
  for line in _LINE.finditer(text):
    mark, behind = line["mark"], line["behind"]
    is_alone = not line["front"].strip(_MARGIN)
    if fence and mark.startswith(fence) and _BEHIND_CLOSING.fullmatch(behind):
      if is_alone:
        yield label, text[content : line.start()]
        fence = ""
      else:
        early = early or line.start("mark")
    elif not fence or (early and is_alone):
      is_opening = (
        is_alone or _ONLY_A_LABEL.fullmatch(behind) or _TAG_IN_FRONT.search(line["front"])
      )
      if not is_opening or (mark[0] == "`" and "`" in behind) or line.end() == len(text):
        continue
      if fence:
        yield label, text[content:early]
      found = _LABEL.match(behind)
      fence, label, content = mark, found["label"].lower() if found else "", line.end() + 1
      early = 0
  if fence and early:
    yield label, text[content:early]


def _dedented(code: str) -> str:
  """Removes quotation marks and the white space that all lines begin with, as textwrap.dedent."""
  lines = [line if line.strip(" \t") else "" for line in code.split("\n")]
  if any(lines) and all(line.lstrip(" \t").startswith(">") for line in lines if line):
    lines = [line.lstrip(" \t")[1:] for line in lines]
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
