r"""The program in a completion. Pure.

Only regular expressions look at it here: Python's own parser can be crashed by what a model
writes, so that stays in the sandbox.
"""

import re
import textwrap
from collections.abc import Callable

_FENCE = re.compile(
  r"^[ \t]*```[ \t]*(?P<label>[\w+-]*)[^\n`]*\n(?P<body>.*?)^[ \t]*```[ \t\r]*$", re.M | re.S
)
_TAG = re.compile(r"<code>(.*?)</code>", re.S)
_PYTHON = ("python", "python3", "py")


def fenced(text: str, entry: str = "") -> str | None:
  """Returns the last closed block between lines of ``` that is Python.

  Blocks labelled python go before unlabelled ones, others do not count; of several, the last
  that defines `entry` is taken, if one does.
  """
  found = [(m["label"].lower(), textwrap.dedent(m["body"])) for m in _FENCE.finditer(text)]
  labelled = [body for label, body in found if label in _PYTHON]
  blocks = labelled or [body for label, body in found if not label]
  defining = [body for body in blocks if entry and defines(body, entry)]
  return (defining or blocks or [None])[-1]


def tagged(text: str, entry: str = "") -> str | None:
  """Returns what stands in the last <code>…</code>; a fence directly within it is taken off."""
  found = _TAG.findall(text)
  return (fenced(found[-1], entry) or found[-1]) if found else None


def whole(text: str, entry: str = "") -> str | None:
  """Returns the text as it stands; None if it is blank."""
  return text if text.strip() else None


def anywhere(text: str, entry: str = "") -> str | None:
  """Returns the first of these that there is: a block in a fence, in a tag, the whole text."""
  return fenced(text, entry) or tagged(text, entry) or whole(text)


def defines(code: str, name: str) -> bool:
  """Tells whether code has a function, a class or a variable of this name at its top level."""
  pattern = (
    rf"^(?:(?:async[ \t]+)?def[ \t]+|class[ \t]+){re.escape(name)}\b|^{re.escape(name)}[ \t]*="
  )
  return re.search(pattern, code, re.M) is not None


def assemble(code: str, *, prompt_code: str, entry: str) -> list[str]:
  """Returns the texts that make the program, to be run one after another.

  Args:
    code: what the model wrote.
    prompt_code: the prompt, if it is code to be completed; else "".
    entry: name of the function under test, or "".

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
