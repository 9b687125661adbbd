"""The documentation site: links become addresses or fail, and docstrings become pages."""

import importlib.util
import io
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


def settings():
  """Returns docs/conf.py as a module."""
  spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def conf():
  return settings()


@pytest.mark.parametrize(
  "folder, link, becomes",
  [
    ("docs", "data.md#formats", "/data.md#formats"),
    ("docs", "../README.md", "/index.md"),
    ("docs", "../configs/base.py", "REPOSITORY/blob/main/configs/base.py"),
    (".", "docs/images/report.png", "/images/report.png"),
    (".", "CHANGELOG.md", "REPOSITORY/blob/main/CHANGELOG.md"),
    ("docs", "missing.md", "missing.md"),
    ("docs", "https://example.org/a", "https://example.org/a"),
    ("docs", "#formats", "#formats"),
  ],
)
def test_links_lead_to_pages_or_to_the_repository(conf, folder, link, becomes):
  becomes = becomes.replace("REPOSITORY", conf.REPOSITORY)
  assert conf.link_to_files(f"see [it]({link}).", ROOT / folder) == f"see [it]({becomes})."


def rendered(conf, text):
  lines = text.splitlines()
  conf.read_docstring(None, "function", "f", None, None, lines)
  return lines


def test_indented_blocks_of_docstrings_are_shown_as_they_are(conf):
  assert rendered(conf, "Sum:\n\n  a | b * c\n\nso `x`s |o| and *n.\n\nArgs:\n  a: One.") == [
    *("Sum:", "", "::", "", "  a | b * c", ""),
    *(r"so `x`\ s \|o\| and \*n.", "", "Args:", "  a: One."),
  ]
  assert rendered(conf, "Why:\n  As it is.\n    Deeper.") == [
    *("Why:", "", "::", "", "  As it is.", "    Deeper.")
  ]
  items = "* one\n  goes further\n\n  more of it"
  assert rendered(conf, items) == items.splitlines()
  assert rendered(conf, "an *emphasis* and `a*b|c`") == ["an *emphasis* and `a*b|c`"]


def test_every_page_is_in_the_contents():
  """Sphinx reports a missing one, too; this takes no build."""
  listed = set((DOCS / "index.md").read_text().split())
  pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
  assert {page for page in pages if page != "index"} <= listed


def test_the_reference_covers_all_of_the_mathematics_and_names_only_modules_that_exist():
  text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
  modules = [line.split(":: ")[1] for line in text.splitlines() if ".. automodule::" in line]
  assert len(modules) == len(set(modules)) > 40
  assert [name for name in modules if importlib.util.find_spec(name) is None] == []
  private = {"arrays", "groups", "numerics", "policy_terms", "__init__"}
  public = {path.stem for path in (ROOT / "grpo_jax" / "rl").glob("*.py")} - private
  assert {f"grpo_jax.rl.{name}" for name in public} <= set(modules)


GOOD = "# Page\n\n[base](../configs/base.py) and [heading](#page), `code`.\n"


@pytest.mark.filterwarnings("ignore")  # of Sphinx's dependencies.
@pytest.mark.parametrize(
  "page, fault",
  [
    (GOOD, ""),
    (GOOD + "[no file](missing.md)\n", "missing.md"),
    (GOOD + "[no heading](#nothing)\n", "nothing"),
    (GOOD + "[no source](../grpo_jax/missing.py)\n", "missing.py"),
    (GOOD + "![no image](images/missing.png)\n", "missing.png"),
    (GOOD + "```{eval-rst}\n.. automodule:: grpo_jax.missing\n```\n", "grpo_jax.missing"),
  ],
  ids=lambda value: value.split("](")[0][-8:].strip() or "none",
)
def test_what_is_missing_is_reported(tmp_path, page, fault):
  application = pytest.importorskip("sphinx.application", reason="pip install -e .[docs]")
  (tmp_path / "index.md").write_text(page)
  warnings = io.StringIO()
  site = application.Sphinx(
    str(tmp_path),
    str(DOCS),
    str(tmp_path / "out"),
    str(tmp_path / "trees"),
    "dummy",
    status=None,
    warning=warnings,
  )
  site.build()
  assert (fault in warnings.getvalue()) if fault else not warnings.getvalue()
