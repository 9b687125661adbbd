"""Decisions, the log of measurements, the changelog and the page for agents: complete and right."""

import pathlib
import re
import shlex
import tomllib

from packaging.version import Version

from grpo_jax import registry
from grpo_jax.commands import cli
from grpo_jax.config import command_line, removed

ROOT = pathlib.Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").iterdir())
NOTES = (ROOT / "BUILD_NOTES.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
AGENTS = (ROOT / "AGENTS.md").read_text()
DATE = r"\d{4}-\d\d-\d\d"
PARTS = ["Context", "Decision", "Consequence", "What would change it"]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_decisions_are_numbered_dated_short_and_complete():
  wrong = []
  for number, path in enumerate(DECISIONS, 1):
    lines = path.read_text().splitlines()
    title, date = re.match(r"# (\d{3}) \w", lines[0]), re.match(f"Decided .*{DATE}", lines[2])
    if not re.fullmatch(f"{number:03}-[a-z0-9-]+\\.md", path.name):
      wrong.append(f"{path.name}: not number {number:03}")
    if title is None or int(title[1]) != number or date is None or len(lines) > 40:
      wrong.append(f"{path.name}: title, date or length ({len(lines)} lines)")
    if re.findall(r"^\*\*([\w ]+)\.\*\*", path.read_text(), re.M) != PARTS:
      wrong.append(f"{path.name}: not the parts {PARTS}")
  assert wrong == [] and len(DECISIONS) > 20


def test_the_notes_list_every_decision_with_its_title_and_no_other():
  index = dict(re.findall(r"^\| \[\d{3}\]\(docs/decisions/([^)]+)\) (.+?) \|", NOTES, re.M))
  titles = {path.name: path.read_text().splitlines()[0][6:] for path in DECISIONS}
  assert index == titles


def test_the_log_is_by_date_and_newest_first():
  dates = re.findall(r"^## (.+)$", NOTES.split("\n# Log\n")[1], re.M)
  assert len(dates) > 3 and all(re.fullmatch(DATE, date) for date in dates)
  assert dates == sorted(set(dates), reverse=True)


def test_links_of_the_pages_at_the_root_lead_to_files():
  pages = ["AGENTS.md", "BUILD_NOTES.md", "CHANGELOG.md", "CONTRIBUTING.md"]
  broken = [
    f"{page}: {target}"
    for page in pages
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
    if "://" not in target and not (ROOT / target).exists()
  ]
  assert broken == []


def test_the_changelog_has_versions_and_the_newest_is_that_of_the_package():
  """The form is that of https://keepachangelog.com."""
  versions = re.findall(rf"^## \[([\d.]+)\] - (Unreleased|{DATE})$", CHANGELOG, re.M)
  assert len(versions) == len(re.findall("^## ", CHANGELOG, re.M)) > 1
  numbers = [Version(number) for number, _ in versions]
  assert numbers == sorted(set(numbers), reverse=True)
  assert [when for _, when in versions[1:] if when == "Unreleased"] == []
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  here = Version(project["version"])
  assert here.base_version == versions[0][0] and here.is_devrelease == (
    versions[0][1] == "Unreleased"
  )
  for section in CHANGELOG.split("\n## ")[1:]:
    kinds = re.findall(r"^### (.+)$", section, re.M)
    assert kinds and len(kinds) == len(set(kinds)) and set(kinds) <= set(KINDS), section[:20]


def test_the_changelog_says_what_to_use_instead_of_everything_that_was_removed():
  rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", CHANGELOG, re.M)
  listed = {
    name for names, instead in rows if instead.strip() for name in re.findall("`([^`]+)`", names)
  }
  options = {*removed.OPTIONS, *(f"--{flag}" for flag in removed.FLAGS)}
  commands = {f"grpo-jax {command}" for command in cli.REMOVED}
  assert sorted({*options, *commands, *registry.SATELLITES} - listed) == []


def spans(text):
  return re.findall(r"`([^`\n]+)`", text)


def test_commands_on_the_page_for_agents_and_in_contributing_exist():
  targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
  wrong = []
  for text in spans(AGENTS + (ROOT / "CONTRIBUTING.md").read_text()):
    program, name = [*text.split(), "", ""][:2]
    known = {"make": targets, "grpo-jax": cli.COMMANDS}.get(program)
    if name and known is not None and name not in known:
      wrong.append(text)
  assert wrong == [] and "make test" in spans(AGENTS)


def test_runs_on_the_page_for_agents_have_valid_arguments(monkeypatch):
  monkeypatch.chdir(ROOT)
  runs = [text for text in spans(AGENTS) if text.startswith("grpo-jax train ")]
  assert len(runs) > 1
  for text in runs:
    _, _, config, *arguments = shlex.split(text)
    try:
      command_line.parse([f"--config={config}", *arguments])
    except command_line.HelpWanted:
      pass


def test_metrics_on_the_page_for_agents_exist():
  table = (ROOT / "docs" / "metrics.md").read_text()
  areas = r"(signal|rollout|train|batch|mismatch|perf|eval|all|time)/[\w/*]+"
  names = [text for text in spans(AGENTS) if re.fullmatch(areas, text)]
  assert len(names) > 5
  assert [
    name for name in names if not re.search(re.escape(name).replace(r"\*", r"\w*"), table)
  ] == []


def test_the_page_for_agents_is_one_page():
  assert len(AGENTS.splitlines()) <= 80
