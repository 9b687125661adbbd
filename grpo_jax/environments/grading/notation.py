r"""Rewrites the notation of an answer: the same value in plain ASCII or LaTeX. Pure, linear.

`characters` replaces characters only: every dash that people write as a minus becomes "-", digits
of all scripts become ASCII, blanks become " ", invisible marks disappear. It is safe for any text.

`latex` rewrites a short answer as the LaTeX that the readers of mathematics expect: 3½ becomes
3\frac{1}{2}, 2√3 becomes 2\sqrt{3}, x² becomes x^{2}, 1.5e-3 becomes 1.5\times 10^{-3}, 1 000 000
becomes 1000000, and \mathbf{x}, $x$, **x** become x. It never computes. Applying it twice changes
nothing more. Text that is longer than `MAX_CHARS` is returned unchanged.
"""

import re
import unicodedata

MAX_CHARS = 10_000

MINUS = "-‐‑‒–—―−﹘﹣－⁃➖˗"


class _Characters(dict[int, str]):
  """A table for `str.translate` that works out an entry when it is first needed."""

  def __missing__(self, code: int) -> str:
    self[code] = _plain(chr(code))
    return self[code]


def _plain(char: str) -> str:
  """Returns what a single character means in ASCII, otherwise the character."""
  if char.isascii():
    return char
  kind = unicodedata.category(char)
  if kind == "Nd":
    return str(unicodedata.decimal(char))
  if kind == "Cf" or "\ufe00" <= char <= "\ufe0f":  # joiners, direction marks, variants of glyphs.
    return ""
  if kind == "Zs":
    return " "
  if kind in ("Zl", "Zp"):
    return "\n"
  form = unicodedata.decomposition(char).partition(" ")[0]
  if form in ("<wide>", "<narrow>", "<font>"):  # Ａ and 𝐀 are an A.
    same = unicodedata.normalize("NFKC", char)
    return same if same.isascii() else char
  return char


_CHARACTERS = _Characters(
  {
    **dict.fromkeys(map(ord, MINUS), "-"),
    **{ord("\u2062"): "", ord("\u2063"): ",", ord("\u2064"): "+"},  # invisible ×, comma and plus.
    **{code: chr(code) for code in map(ord, "ℝℤℕℚℂ")},  # sets of numbers, and not letters.
    **{ord("٫"): ".", ord("٬"): ",", ord("٪"): "%", ord("’"): "'", ord("‘"): "'", ord("＇"): "'"},
  }
)

_GLYPHS = str.maketrans(
  {
    **{"×": r"\times ", "✕": r"\times ", "⨯": r"\times ", "·": r"\cdot ", "⋅": r"\cdot "},
    **{"∙": r"\cdot ", "∗": "*", "÷": r"\div ", "∕": "/", "±": r"\pm ", "∓": r"\mp ", "∶": ":"},
    **{"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≦": r"\le ", "≧": r"\ge "},
    **{"⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≃": r"\approx "},
    **{"∈": r"\in ", "∉": r"\notin ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus "},
    **{"∅": r"\emptyset ", "⌀": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"},
    **{"ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∣": "|", "∠": r"\angle "},
    **{"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "△": r"\triangle "},
    **{"∫": r"\int ", "∑": r"\sum ", "∏": r"\prod ", "∂": r"\partial ", "→": r"\to ", "′": "'"},
    **{"°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "…": r"\ldots ", "∘": r"\circ "},
    **{"⟨": "(", "⟩": ")", "“": "", "”": "", "„": "", "✓": "", "✔": "", "✅": "", "☑": ""},
    **{"⁄": "/", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "√": r"\sqrt", "。": ".", "、": ","},
  }
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙᵢⱼₖₘ", "0123456789+-=()aeoxnijkm")
VULGAR = "[½⅓⅔¼¾⅕-⅞⅐-⅒↉]"  # fractions of one character.
_SUPERSCRIPT, _SUBSCRIPT = "[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]{1,40}", "[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙᵢⱼₖₘ]{1,40}"
_SCRIPTS = re.compile(
  rf"(?P<above>[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,9}})⁄(?P<below>[₀₁₂₃₄₅₆₇₈₉]{{1,9}})"
  rf"|(?P<up>{_SUPERSCRIPT})|(?P<down>{_SUBSCRIPT})|(?P<vulgar>{VULGAR})"
)

# Commands without a meaning: sizes, fonts (as switches), blanks, ticks.
_DROPPED = {
  *("left", "right", "middle", "displaystyle", "textstyle", "scriptstyle", "scriptscriptstyle"),
  *("limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl"),
  *("biggr", "Biggl", "Biggr", "bf", "rm", "it", "sf", "tt", "sl", "boldmath", "normalfont"),
  *("bfseries", "itshape", "rmfamily", "checkmark", "hfill", "blacksquare", "square"),
  *("tiny", "small", "normalsize", "large", "Large", "LARGE", "huge", "Huge", "nonumber", "qed"),
}
_SPACES = {"quad", "qquad", "thinspace", "enspace", "medspace", "thickspace", ",", ";", ":", " "}
_NOTHING = {"negthinspace", "negmedspace", "negthickspace", "!", "(", ")", "[", "]"}
# Commands around mathematics that change its looks only.
_DRESS = {
  *("mathbf", "boldsymbol", "bm", "pmb", "bold", "mathit", "mathsf", "mathtt", "mathnormal"),
  *("boxed", "fbox", "framebox", "underline", "ensuremath", "emph", "smash", "mathstrut"),
}
_TEXT = {
  *("text", "mathrm", "textrm", "textbf", "textit", "textsf", "texttt", "textnormal", "textup"),
  *("mbox", "hbox", "textmd", "textsc", "textsl"),
}
_SWITCHES = {"bf", "rm", "it", "sf", "tt", "sl"}
_KINDS = {"text": _TEXT, "dress": _DRESS, "fence": {"left", "right", "middle"}}
_LEFT_OUT = {  # together with their argument.
  *("color", "textcolor", "colorbox", "hspace", "vspace", "tag", "label"),
  *("phantom", "hphantom", "vphantom"),
}
_RENAMED = {
  **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
  **{"varnothing": "emptyset", "leq": "le", "geq": "ge", "neq": "ne", "dbinom": "binom"},
  **{"leqslant": "le", "geqslant": "ge", "tbinom": "binom", "lbrace": "{", "rbrace": "}"},
}
_TOKEN = re.compile(r"\\(?P<command>[A-Za-z]+|.)\s*|(?P<brace>[{}])|[^\\{}]+|\\", re.DOTALL)

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_REWRITES = tuple(
  (re.compile(pattern), replacement)
  for pattern, replacement in (
    (r"^\s*([-+]?) ?\$ ?([\d.][^$]*)$", r"\1\\$\2"),  # dollars, if no other $ follows.
    (r"(?<!\\)[$~`\"]", " "),
    (r"\s+", " "),
    # Emphasis of Markdown around all of it, or around one part; 2**3 is a power.
    (r"(?<![\w)}\]*^])(\*{2,3})(?=[^\s*])([^*]{1,200})\1(?![\w({\[*])", r"\2"),
    (r"(?<![\w)}\]*^])__(?=[^\s_])([^_]{1,200})__(?![\w({\[*])", r"\1"),
    (r"^ ?([*_])([^*_]{1,200})\1 ?$", r"\2"),
    (r"(?<=[\w)}\]]) ?\*\* ?(?=[\w({\\+-])", "^"),
    (r"^ ?(?:=|\\(?:approx|simeq|sim|cong)\b|(?:approximately|about|roughly|exactly)\b)", ""),
    (r"^ ?(?i:minus|negative) (?=\\?[\d.$])", "-"),
    (r"\\\{ ?\\\}", r"\\emptyset "),
    (r"(?<=\d) ?[xX] ?(?=10 ?\^)", r"\\times "),
    (r"\^ ?\{ ?(?:\^ ?)?\\circ ?\}|\^ ?(?:\^ ?)?\\circ(?![A-Za-z]) ?", r"^\\circ "),  # degrees.
    # Thousands: 1,234 and 1{,}234 and 1 234 and 1'234 and 1_234; (1,234) has two parts.
    (r"\{,\}", ","),
    (r"(?<![\^_A-Za-z])\{ ?([.+-]) ?\}", r"\1"),  # {-}5.
    (
      r"(?<![\w.,(\[])(?<!\\\{)(\d{1,3})((?:,\d{3}){1,10}|(?: \d{3}){1,10}|(?:'\d{3}){1,10}"
      r"|(?:_\d{3}){1,10})"
      r"(?![\d_]|[ ,']\d)",
      lambda found: found[1] + re.sub(r"\D", "", found[2]),
    ),
    (
      rf"(?<![\w.\\}}])({_NUMBER})[eE]([-+]?\d{{1,4}})(?![\w.])",
      lambda found: rf"{found[1]}\times 10^{{{int(found[2])}}}",
    ),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<=\d)\.(?![\d\\])", ""),
    (
      r"(?<![\d.])(\d{1,30})\.(\d{0,30})\\(?:overline|bar) ?(?:\{(\d{1,30})\}|(\d))",
      lambda found: _repeating(found[1], found[2], found[3] or found[4]),
    ),
    (r"(?<![\w./}^_])(\d+) (\d+) ?/ ?(\d+)(?![\w./])", r"\1\\frac{\2}{\3}"),  # 3 1/2.
    # Words of plain text.
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z\\])(?i:infinity|infty|inf)(?![A-Za-z])", r"\\infty "),
    (r"(?<![A-Za-z\\])(sqrt|sin|cos|tan|log|ln|exp|arcsin|arccos|arctan)(?= ?\()", r"\\\1"),
    (r"\\text\{ ?(?i:percent|pct) ?\}", r"\\%"),
    (r"(?<![A-Za-z\\])(?i:percentage|percent|pct)(?![A-Za-z])|(?<!\\)%", r"\\%"),
    (r"^ ?([-+]?) ?([\d.,]{1,400}) ?([€£¥₹]) ?$", r"\1\3\2"),  # 15 €.
    (r",? (?:and|or) ", ", "),
    (r"\\sqrt(\[\d\])? ?(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])|\\pi\b)", r"\\sqrt\1{\2}"),
    (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
    (r"\^ ?([-+]\d+)", r"^{\1}"),
    (r"\^ ?\{ ?(st|nd|rd|th) ?\}", r"\\text{\1}"),
    (r", ?,", ","),
    (r"\+ ?-", "-"),
  )
)
_PARENTHESES = re.compile(r"(?:\\sqrt(?:\[\d\])?|\\exp|\^)? ?\(|(?P<closing>\))")


def characters(text: str) -> str:
  """Returns text in which dashes, digits, blanks and full-width forms are those of ASCII."""
  return text if text.isascii() else text.translate(_CHARACTERS)


def fraction_of(vulgar: str) -> tuple[str, str]:
  """Returns numerator and denominator of a fraction of one character."""
  above, _, below = unicodedata.normalize("NFKC", vulgar).partition("⁄")
  return above, below


def latex(answer: str) -> str:
  """Returns an answer in LaTeX, without dress; see above."""
  if len(answer) > MAX_CHARS:
    return answer
  answer = _undressed(_SCRIPTS.sub(_script, characters(answer)).translate(_GLYPHS))
  for pattern, replacement in _REWRITES:
    answer = pattern.sub(replacement, answer)
  answer = _with_braces(answer)
  for _ in range(3):
    answer = _without_outer_braces(answer.strip().rstrip(" .,;:\\"))
  return answer


def _script(found: re.Match[str]) -> str:
  """Returns superscripts, subscripts and fractions of Unicode as LaTeX."""
  if found["vulgar"]:
    return r"\frac{{{}}}{{{}}}".format(*fraction_of(found["vulgar"]))
  if found["above"]:
    above, below = found["above"].translate(RAISED), found["below"].translate(_LOWERED)
    return rf"\frac{{{above}}}{{{below}}}"
  if found["up"]:
    return f"^{{{found['up'].translate(RAISED)}}}"
  return f"_{{{found['down'].translate(_LOWERED)}}}"


def _repeating(whole: str, first: str, period: str) -> str:
  r"""Returns whole.first\overline{period} as a fraction."""
  above = int(whole + first + period) - int(whole + first)
  return rf"\frac{{{above}}}{{{(10 ** len(period) - 1) * 10 ** len(first)}}}"


def _undressed(text: str) -> str:
  """Removes fonts, colours, sizes and blanks of LaTeX, and \text around what is not words."""
  written: list[str] = []
  open_groups: list[tuple[str, int]] = []  # (kind, place of the opening brace in `written`).
  waiting = ""  # kind of the group whose brace must come next.
  skipped = 0  # depth within an argument that is left out.
  for token in _TOKEN.finditer(text):
    command, brace = token["command"], token["brace"]
    if skipped or waiting == "left out":
      skipped += {"{": 1, "}": -1}.get(brace or "", 0)
      if not skipped and not brace:  # an argument of one character.
        written.append(token[0][1:])
      waiting = "" if skipped else "dress"  # what a colour is given to.
    elif brace == "{":
      open_groups.append((waiting if waiting in ("text", "dress") else "plain", len(written)))
      written.append("{")
      waiting = ""
    elif brace:
      written.append("}")
      if open_groups:
        _close(written, *open_groups.pop())
    elif command is None:
      is_fence = waiting == "fence" and token[0].startswith(".")  # \left. has no bracket.
      written.append(token[0][is_fence:])
      waiting = ""
    elif command in _LEFT_OUT:
      waiting = "left out"
    else:
      waiting = next((kind for kind, names in _KINDS.items() if command in names), "")
      if command in _SWITCHES and open_groups and written[-1] == "{":
        open_groups[-1] = ("dress", open_groups[-1][1])
      written.append("" if waiting else _command(command, token[0]))
  return "".join(written)


def _command(command: str, token: str) -> str:
  """Returns a command as it is written here; "" if it has no meaning."""
  if command in _DROPPED or command in _NOTHING:
    return ""
  if command in _SPACES:
    return " "
  if command == "degree":
    return r"^\circ "
  return f"\\{_RENAMED.get(command, command)}{' ' if token[-1].isspace() else ''}"


def _close(written: list[str], kind: str, start: int) -> None:
  """Decides what remains of a group that ends here: its braces, its content or \text."""
  if kind == "plain":
    return
  last = next((part.strip() for part in reversed(written[:start]) if part.strip()), "")
  content = "".join(written[start + 1 : -1])
  if kind == "text":
    words = content.strip(" ,.")
    if words in ("and", "or"):
      written[start:] = [", "]
      return
    follows_value = last[-1:].isalnum() or last[-1:] in (")", "}", "]", "%")
    if last in ("/", r"\cdot"):  # between units.
      follows_value = any(part.startswith(r"\text{") for part in written[start - 4 : start])
    if follows_value and words not in ("", "e", "i") and not re.search(r"\\|^[\W\d]+$", words):
      written[start:] = [rf"\text{{{content}}}"]
      return
  needs_braces = last in ("^", "_") or last.endswith(("^", "_")) or last.startswith("\\")
  written[start:] = [f"{{{content}}}" if needs_braces else content]


def _with_braces(text: str) -> str:
  r"""Rewrites \sqrt(…) and ^(…) with braces, and \exp(…) as a power of e."""
  pieces: list[str] = []
  closings: list[str] = []
  end = 0
  for found in _PARENTHESES.finditer(text):
    pieces.append(text[end : found.start()])
    end = found.end()
    if found["closing"]:
      pieces.append(closings.pop() if closings else ")")
      continue
    command = found[0][:-1].strip()
    closings.append("}" if command else ")")
    pieces.append({"": "(", r"\exp": "e^{"}.get(command, f"{command}{{"))
  return text if closings else "".join([*pieces, text[end:]])


def _without_outer_braces(text: str) -> str:
  """Removes a pair of braces around all of it."""
  if not (text.startswith("{") and text.endswith("}")):
    return text
  depth = 0
  for place, char in enumerate(text):
    depth += {"{": 1, "}": -1}.get(char, 0)
    if depth == 0 and place < len(text) - 1:
      return text
  return text[1:-1].strip()
