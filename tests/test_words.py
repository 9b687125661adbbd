"""The language rule of CONTRIBUTING.md, as far as patterns can hold it.

Checked are the prose of README, CONTRIBUTING, SECURITY, AGENTS, BUILD_NOTES and docs/, the
docstrings and strings (messages, explanations) of Python files, the entries of docstrings'
sections, and the comments of configs. Code in Markdown is not prose: neither blocks nor `names`.
Run it alone with

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
  *(ROOT / f"{name}.md" for name in "README CONTRIBUTING SECURITY AGENTS BUILD_NOTES".split()),
  *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = [
  path
  for folder in ("grpo_jax", "kernels", "packages", "configs", "scripts")
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
  (r"\bsomebody\b", "a user, another user"),
  (r"\bforeign code\b", "user code"),
  (r"\barguments as (of|the)\b", "takes the arguments of"),
  (
    r"\b(one|(one|a) (number|line|curve|colour|string|record|entry|row)) a"
    r" (step|row|token|group|prompt|rollout|run|metric|field|layer|minute|class)\b",
    "one per …",
  ),
]
# In names of tests, which are read without context, these words are wrong in every sense.
NAME_RULE = (re.compile(r"\b(told|tells?|stands?|stood|standing)\b"), "log, report, say; is")
# A blank of a pattern is also the end of a line.
RULES = [
  (re.compile(pattern.replace(" ", r"\s"), re.IGNORECASE), instead) for pattern, instead in RULES
]
ARGUMENT = re.compile(
  r"^ +\*{0,2}(\w+): (of|from|in|at|on|by|with|for|to|that|which|as|under|after|before|until|"
  r"those|per)\b"
)
SECTION = re.compile(r"^( *)(Args|Attributes|Returns|Yields|Raises|Reference):$")
# An entry of Args, Attributes or Raises: "seed: Random seed of the run."
ENTRY = re.compile(r"^( *)(\*{0,2}[\w., ]+?): (.+)$")
# What an argument's entry must not begin with: it would not be a noun phrase.
NOT_A_NOUN = re.compile(r"(What|Which|Whose|Where|How|As|See|Becomes|Made|Of|All of) ")
# What an entry of Raises must not begin with: nothing before it says what "it" is.
PRONOUN = re.compile(r"(It|They|If|For|Naming|Unless) ")

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


def entries(docstring):
  """Yields (line, section, text) of each entry in the sections of a docstring, lines from 0."""
  section, margin, entry = "", 0, None
  for number, line in enumerate(docstring.splitlines()):
    indent = len(line) - len(line.lstrip())
    if (heading := SECTION.match(line)) or not line.strip() or indent <= margin:
      if entry:
        yield entry
      section, margin = (heading[2], len(heading[1])) if heading else ("", 0)
      entry = None
      continue
    named = ENTRY.match(line) if section in ("Args", "Attributes", "Raises") else None
    if section and (entry is None or (indent == margin + 2 and named)):
      if entry:
        yield entry
      entry = number, section, named[3] if named else line.strip()
    elif entry:
      entry = *entry[:2], f"{entry[2]} {line.strip()}"
  if entry:
    yield entry


def wrong_entries(docstring):
  """Yields (line, text, what to write) for entries that are not complete phrases."""
  for number, section, text in entries(docstring):
    if text[0].islower() and not re.match(r"[\w.]*[_(.\[`]", text.split()[0]):
      yield number, text[:40], "a capital and a complete phrase: `seed: Random seed of the run.`"
    elif section != "Reference" and not text.endswith((".", "!", "?", "`", ":")):
      yield number, text[-40:], "a full stop at the end"
    elif section in ("Args", "Attributes") and NOT_A_NOUN.match(text):
      yield number, text[:40], "a noun phrase: `stop: Flag that …`, `kind: Kind of …`"
    elif section == "Raises" and PRONOUN.match(text):
      yield number, text[:40], "a sentence with its subject: `ConfigError: The folder …`"


def docstrings(path):
  """Yields (first line, docstring) of a Python file."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
      yield node.body[0].lineno, text


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


def named_in(path):
  """Yields (line, name) of the functions and classes of a Python file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
      yield node.lineno, node.name


def name_faults(name):
  """Yields (words, what to write) for what the rules catch in a name."""
  words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("_", " ").strip().lower()
  for rule, instead in [*RULES, NAME_RULE]:
    for match in rule.finditer(words):
      yield match[0], instead


def test_names_in_tests_keep_the_language_rule():
  wrong = [
    f"{path.relative_to(ROOT)}:{line}: {name}: {words!r}: write {instead}"
    for path in sorted((ROOT / "tests").rglob("*.py"))
    for line, name in named_in(path)
    for words, instead in name_faults(name)
  ]
  assert not wrong, f"{len(wrong)} names:\n" + "\n".join(wrong)


def test_entries_of_docstrings_are_complete_phrases():
  wrong = [
    f"{path.relative_to(ROOT)}:{first + line}: {text!r}: write {instead}"
    for path in MODULES
    for first, docstring in docstrings(path)
    for line, text, instead in wrong_entries(docstring)
  ]
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
    "a sink of somebody's own",
    "foreign code may raise anything",
    "Makes a screen; arguments as of `Screen`.",
    "one line a rollout",
  ],
)
def test_the_rule_catches(text):
  assert list(faults(text))


@pytest.mark.parametrize(
  "name",
  [
    "test_a_run_goes_on",
    "test_kinds_are_told_apart",
    "ToldResult",
    "test_a_number_is_no_word",
    "begins_anew",
  ],
)
def test_the_rule_catches_names(name):
  assert list(name_faults(name))


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


@pytest.mark.parametrize(
  "entry",
  [
    "Args:\n    seed: random seed of the run.",
    "Args:\n    seed: Random seed of the run",
    "Args:\n    stop: Becomes true at the end.",
    "Args:\n    kind: What is read.\n    seed: Random seed.",
    "Attributes:\n    name: See `make`.",
    "Raises:\n    ValueError: if lengths differ.",
    "Raises:\n    ConfigError: It cannot be made.",
    "Raises:\n    ConfigError, OSError: the folder cannot\n      be made.",
    "Returns:\n    the metrics.",
    "Yields:\n    Rows",
  ],
)
def test_the_rule_of_entries_catches(entry):
  assert list(wrong_entries(f"Does it.\n\n  {entry}\n  "))


@pytest.mark.parametrize(
  "entry",
  [
    "Args:\n    seed: Random seed\n      of: the run.\n    *scratch: Memory.",
    "Args:\n    mode: Mode, one of:\n      a: this\n      b: that.",
    "Raises:\n    ConfigError: The folder cannot be made.",
    "Returns:\n    (state, extra), bit for bit.",
    "Returns:\n    {name: value} of all metrics.",
    "Returns:\n    The rows, and the other\n    lines: they are broken.",
    "Returns:\n    old_logprobs and the rest.",
    "Reference:\n    Su et al. 2021, arXiv:2104.09864, section 3.2.2",
  ],
)
def test_the_rule_of_entries_does_not_catch(entry):
  assert list(wrong_entries(f"Does it.\n\n  {entry}\n  ")) == []
