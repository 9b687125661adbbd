"""The language rule of CONTRIBUTING.md, as far as patterns can hold it.

Checked are the prose of README, CONTRIBUTING, SECURITY and docs/, the docstrings and strings
(messages, explanations) of Python files, and the comments of configs. Code in Markdown is not
prose: neither blocks nor `names`. Run it alone with

    python -m pytest -q --noconftest tests/test_words.py
"""

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
  *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
  *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = [
  path
  for folder in ("grpo_jax", "kernels", "configs", "scripts")
  for path in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [path for path in PAGES if path.exists()]
WITH_COMMENTS = [*sorted((ROOT / "configs").glob("*.py")), ROOT / "grpo_jax" / "config" / "base.py"]

# (pattern, what to write). Patterns ignore case unless they begin with (?-i:
RULES = [
  (r"(?<!there )\b(is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|later\b)", "is not a …"),
  (r"(?<!there )\b(?-i:is|are|was|were) (?-i:none)\b", "is not one; no such …"),
  (r"\banew\b", "again"),
  (r"\bwhoever\b", "anyone who"),
  (r"\bwhatsoever\b", "at all"),
  (r"\b(to|can|could|cannot) be had\b", "available"),
  (r"\bso many\b", "that many"),
  (r"\bhence\b", "so"),
  (r"\b(thereof|therein|whereof|wherein|herewith|thereupon)\b", "of it, in it, …"),
  (r"\ba text\b(?! (file|field|column|editor|box|block|prompt|model))", "a string; text"),
  (r"\bbe it\b", "whether"),
  (r"\b(go|goes|going|gone|went) on\b(?! (the|a|an|its|their) )", "continue"),
  (r"(?<!all )(?<!some )(?<!each )(?<!both )\bof which\b", "a second sentence"),
  (r"\bin the place of\b", "in place of, instead of"),
  (r"\bin the stead of\b", "instead of"),
  (r"\bbears?\b(?! in mind)", "have"),
  (r"\bstays? at home\b", "a plain statement"),
  (r"\bfor want of\b", "because there is no …"),
  (r"\bsees? to it that\b", "makes sure that"),
  (r"\b(stand|stands|stood) (at|on|beside|before|below|above|under|where|there|here)\b", "is"),
  (r"\b(stand|stands|stood|standing) in\b(?! for\b)", "is in"),
  (
    r"\b(told|tell|tells|telling)\b"
    r"(?! apart\b)(?!(?: \w+){1,4} apart\b)"
    r"(?! (?:(?:the|a|an|each|every|all|its|your)(?: of)? )?\w+"
    r" (?:not )?(to|how|which|what|when|whether)\b)",
    "log, report, say; distinguish",
  ),
]
# A blank of a pattern is also the end of a line.
RULES = [
  (re.compile(pattern.replace(" ", r"\s"), re.IGNORECASE), instead) for pattern, instead in RULES
]
ARGUMENT = re.compile(
  r"^ +\*{0,2}(\w+): (of|from|in|at|on|by|with|for|to|that|which|as|under|after|before|until|"
  r"those|per)\b"
)
SECTION = re.compile(r"^( *)(Args|Attributes|Returns|Yields|Raises|Reference):$")

# File and words that a rule would catch, and that are right where they are.
ALLOWED: set[tuple[str, str]] = {
  (
    "grpo_jax/environments/scoring/formats.py",
    "stand in",
  ),  # the judge's prompt: scores depend on it.
}


def faults(text):
  """Yields (line, words, what to write) for what the rules catch, counting lines from 0."""
  flush = re.sub(r"\n[ \t]+", "\n", text)
  for rule, instead in RULES:
    for match in rule.finditer(flush):
      yield flush.count("\n", 0, match.start()), " ".join(match[0].split()), instead
  is_argument = False
  for number, line in enumerate(text.splitlines()):
    if section := SECTION.match(line):
      is_argument = section[2] in ("Args", "Attributes")
    elif is_argument and (match := ARGUMENT.match(line)):
      yield number, match[0].strip(), "a noun phrase: `seed: Random seed of the run.`"


def prose_of_page(path):
  """Returns the text of a Markdown file with code blanked out: [(first line, text)]."""
  blank = lambda match: re.sub(r"[^\n]", " ", match[0])
  text = re.sub(r"^```.*?^```", blank, path.read_text(), flags=re.DOTALL | re.MULTILINE)
  return [(1, re.sub(r"``.*?``|`[^`\n]*`|\]\([^)]*\)", "`", text))]


def prose_of_module(path):
  """Returns the docstrings and strings of a Python file, and comments of configs."""
  source = path.read_text()
  found = []
  inside = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.JoinedStr):
      inside |= {id(value) for value in node.values}
      parts = [v.value if isinstance(v, ast.Constant) else "0" for v in node.values]
      found.append((node.lineno, "".join(map(str, parts))))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
      found.append((node.lineno, node.value))
  if path in WITH_COMMENTS:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
  strip = lambda text: re.sub(r"`[^`\n]*`", "`", text)
  return [(line, strip(text)) for line, text in found if " " in text]


def found_in(path):
  name = path.relative_to(ROOT).as_posix()
  pieces = prose_of_page(path) if path.suffix == ".md" else prose_of_module(path)
  for first, text in pieces:
    for line, words, instead in faults(text):
      if (name, words.lower()) not in ALLOWED:
        yield f"{name}:{first + line}: {words!r}: write {instead}"


def test_prose_keeps_the_language_rule():
  wrong = [fault for path in [*PAGES, *MODULES] for fault in found_in(path)]
  assert not wrong, f"{len(wrong)} places:\n" + "\n".join(wrong)


def test_allowed_words_are_still_there():
  for name, words in ALLOWED:
    assert words in (ROOT / name).read_text().lower(), (name, words)


@pytest.mark.parametrize(
  "text",
  [
    "a row whose rank is no number",
    "which are no\ntokens",
    "a value that is none",
    "begins anew",
    "Whoever asks first",
    "cannot be had from the hub",
    "so many rows",
    "Hence it stops",
    "a text that is JSON",
    "be it a file or a folder",
    "the run goes on",
    "servers, of which one hangs",
    "in the place of the mean",
    "every request bears a header",
    "the program stands in a sandbox",
    "they stand\n  before the mean",
    "the reason is told once",
    "tells of the update",
    "f(x).\n\nArgs:\n  seed: of the run.",
    "f(x).\n\n  Args:\n    path: from which it is read.",
  ],
)
def test_the_rule_catches(text):
  assert list(faults(text))


@pytest.mark.parametrize(
  "text",
  [
    "there is no such file",
    "There are no rows; there is none",
    "is no longer needed, is no more than 3",
    "Returns None; x is None",
    "a text file, the text of a page",
    "an array of shape [N]",
    "it tells the server to stop, and tells each of them how",
    "two kinds that are hard to tell apart; told apart by length",
    "θ stands for the parameters; a stand-in; it stands in for the mean",
    "bear in mind",
    "f(x).\n\nArgs:\n  seed: Random seed of the run.\n\nRaises:\n  ValueError: of odd numbers.",
  ],
)
def test_the_rule_does_not_catch(text):
  assert list(faults(text)) == []
