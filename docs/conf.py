"""The documentation site: the Markdown pages of this folder, and a reference from docstrings.

`make docs` builds it into build/docs. Warnings are errors: a link to a missing page, file or
heading makes the build fail.
"""

import os
import pathlib
import re
from typing import Any

import grpo_jax

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/grpo-jax/grpo-jax"

project = "grpo_jax"
author = copyright = "The grpo_jax contributors"
version = release = grpo_jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"grpo_jax {version}"
html_theme_options = {"source_repository": f"{REPOSITORY}/", "source_directory": "docs/"}
html_copy_source = False
highlight_language = "none"  # of blocks that name none: shell commands, formulas, drawings.
smartquotes_action = "D"  # dashes; quotes stay as they are.
myst_heading_anchors = 4

default_role = "code"  # `name` in a docstring is code, as in Markdown.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Reference"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]  # annotations name types of packages that are not here.

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Reference|Warns):$")
ITEM = re.compile(r"([*-]|\d+\.) ")
CODE = re.compile(r"(?<!`)(`[^`]+`)(?!`)")
STAR = re.compile(r"(?<![\w*\\])\*(?!\w[^*]*\w\*|\w\*|[ *])")


def site_link(target: str, folder: pathlib.Path) -> str | None:
  """Returns what a relative link of a Markdown file becomes on the site.

  Args:
    target: Path of the link, without its anchor.
    folder: Folder of the file that holds the link.

  Returns:
    A path relative to docs/ for pages and images, the address in the repository for other files,
    None if there is no such file.
  """
  path = pathlib.Path(os.path.normpath(folder / target))
  if not path.exists():
    return None
  if path == ROOT / "README.md":
    return "/index.md"
  if path.is_relative_to(DOCS):
    return f"/{path.relative_to(DOCS).as_posix()}"
  return f"{REPOSITORY}/blob/main/{path.relative_to(ROOT).as_posix()}"


def link_to_files(text: str, folder: pathlib.Path) -> str:
  """Returns Markdown whose links lead to pages of the site, or to files of the repository."""

  def replaced(match: re.Match[str]) -> str:
    target = site_link(match[1], folder)
    return match[0] if target is None else f"]({target}{match[2] or ''})"

  return LINK.sub(replaced, text)


def read_page(app: Any, page: str, source: list[str]) -> None:
  source[0] = link_to_files(source[0], (DOCS / page).parent)


def read_included(app: Any, path: pathlib.Path, page: str, source: list[str]) -> None:
  source[0] = link_to_files(source[0], pathlib.Path(os.path.normpath(DOCS / path)).parent)


def read_docstring(
  app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
  """Turns a docstring into reStructuredText.

  Docstrings are plain text with `code`, *emphasis* and Google's sections. Their indented blocks
  (formulas, tables, code) are shown as they are; marks of reStructuredText mean nothing in them.
  """
  marked: list[str] = []
  left_as_is = in_block = False  # sections and items of lists have indented lines of their own.
  for line in lines:
    indented = line.startswith(" ")
    if line and not indented:
      left_as_is, in_block = bool(SECTION.match(line) or ITEM.match(line)), False
    elif indented and not left_as_is and not in_block and marked:
      marked += ["::", ""] if not marked[-1] else ["", "::", ""]
      in_block = True
    marked.append(line if in_block else escaped(line))
  lines[:] = marked


def escaped(line: str) -> str:
  """Returns a line of prose in which only `code` and *emphasis* are marks."""
  parts = CODE.split(line)
  for i in range(0, len(parts), 2):
    parts[i] = STAR.sub(r"\\*", parts[i]).replace("|", r"\|").replace("``", r"\`\`")
  for i in range(1, len(parts), 2):
    if re.match(r"\w", parts[i + 1]):
      parts[i] += "\\ "
  return "".join(parts)


def shorten_signature(
  app: Any,
  what: str,
  name: str,
  obj: object,
  options: Any,
  signature: str | None,
  result: str | None,
) -> tuple[str, str | None] | None:
  """Shows `Float[Array, "P G"]` as it is written in the code."""
  if signature is None:
    return None
  short = lambda text: text.replace("jaxlib._jax.Array", "Array").replace("jax.Array", "Array")
  return short(signature), result and short(result)


def setup(app: Any) -> None:
  app.connect("source-read", read_page)
  app.connect("include-read", read_included)
  app.connect("autodoc-process-docstring", read_docstring, priority=400)
  app.connect("autodoc-process-signature", shorten_signature)
