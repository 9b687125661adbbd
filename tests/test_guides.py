"""docs/guides.md names options, commands, metrics, files and pages: every one of them exists."""

import fnmatch
import importlib.util
import itertools
import pathlib
import re

import pytest
from ml_collections import ConfigDict

import configs.base
from grpo_jax import metrics
from grpo_jax.commands import cli

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guides.md").read_text()
AREAS = "rollout signal train batch shaping mismatch perf env eval data all time filter"
# Names of sections whose fields the user names: a task, an environment.
FREE = ("environments.", "data.tasks.")


def table_rows():
  """Yields the cells of every row of the tables of statements."""
  for line in TEXT.splitlines():
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    if len(cells) == 3 and re.fullmatch(r"[1-5](, [1-5])*", cells[0]):
      yield cells


# What the tables say of this program; the other cells have NeMo RL's names.
CODE = [word for row in table_rows() for word in re.findall(r"`([^`]+)`", row[2])]


def alternatives(name):
  """Yields the names that one with braces stands for: a.{b,c}."""
  parts = [part.split(",") for part in re.split(r"[{}]", name)]
  for words in itertools.product(*parts):
    yield "".join(words)


def has_field(name):
  """Whether a config has a field, or, for a pattern, fields of it."""
  if name.startswith(FREE):
    return True
  section = configs.base.get_config()
  *sections, last = name.rstrip(".").split(".")
  for word in sections:
    section = section.get(word) if isinstance(section, ConfigDict) else None
    if section is None:
      return False
  return any(fnmatch.fnmatchcase(field, last) for field in section)


def named(pattern, words=CODE):
  """Returns what a pattern with one group finds, each once, in order."""
  found = [name for word in words for name in re.findall(pattern, word)]
  return sorted({one for name in found for one in alternatives(name)})


FIELD = r"config\.([a-z][\w.*]*(?:\{[\w,]+\})?)"


def test_every_option_exists():
  sections = "|".join(configs.base.get_config())
  bare = named(rf"^((?:{sections})\.[\w.*]*(?:\{{[\w,]+\}})?)(?:=|$)")
  fields = [name for name in {*named(FIELD), *bare} if not name.endswith(".md")]
  assert len(fields) > 80
  assert sorted(name for name in fields if not has_field(name)) == []


def test_every_metric_exists():
  found = named(rf"^((?:{'|'.join(AREAS.split())})/[^ `]+)$")
  names = [re.sub("NAME|SET|TYPE|N(?=/)|K$", "x", name).replace("*", "accuracy") for name in found]
  assert len(names) > 40
  assert metrics.unknown(names) == []


def test_every_file_and_page_exists():
  places = "configs|docs|grpo_jax|tests|scripts"
  found = {*re.findall(rf"((?:{places})/[\w/.]*\w\.(?:py|md))", TEXT)}
  found |= {f"docs/{name}" for name in re.findall(r"(?<![\w/])(\w+\.md)", TEXT)}
  assert len(found) > 40
  assert sorted(name for name in found if not (ROOT / name).exists()) == []


def test_every_command_and_flag_exists():
  used = {(words[1], *words[2:]) for word in CODE if (words := word.split())[0] == "grpo-jax"}
  assert {words[0] for words in used} <= set(cli.COMMANDS) and len(used) >= 3
  for name, *arguments in used:
    module, _, _ = cli.COMMANDS[name][0].partition(":")
    text = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
      assert flag in text, (name, flag)


def test_every_statement_has_an_answer():
  rows = list(table_rows())
  assert len(rows) > 140
  assert [row for row in rows if not row[1] or not row[2]] == []
  assert {guide for row in rows for guide in row[0].split(", ")} == set("12345")


@pytest.mark.parametrize("name", ["loss.kl_coeff", "rollout.nothing.*", "evaluations.datasets"])
def test_a_field_that_is_missing_is_found_out(name):
  assert not has_field(name)
