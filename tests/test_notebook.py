"""Displays of notebooks: what they show, and that what a model wrote is only ever text."""

import html.parser
import re
import sys
import types

import pytest

from grpo_jax import notebook

HOSTILE = "</td><script>alert(1)</script>\u202e\x1b[2J<img src=x onerror=alert(1)>"
RECORD = {
  "prompt_id": "rows:0:1",
  "prompt": HOSTILE,
  "completion": HOSTILE,
  "reward": 0.5,
  "reward_components": {HOSTILE: 0.5},
  "advantage": None,
  "finish_reason": "stop",
  "error": "",
}
ROWS = [
  {"step": step, "weight_version": step, "rollout/reward_mean": 0.1 * step, **evaluated}
  for step, evaluated in enumerate(
    [{"eval/heldout/accuracy": 0.25}, {}, {"eval/heldout/accuracy": 0.5}]
  )
]


class Elements(html.parser.HTMLParser):
  """The names of all elements and attributes of a piece of HTML."""

  def __init__(self, text):
    super().__init__()
    self.found = set()
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.found |= {tag, *(name for name, _ in attrs)}


def test_what_a_model_wrote_is_text_in_a_table():
  table = notebook.completions([RECORD], title=HOSTILE)
  shown = table._repr_html_()
  assert not Elements(shown).found & {"script", "img", "onerror"}
  assert "\u202e" not in shown and "\x1b" not in shown and "alert(1)" in shown


def test_names_of_runs_and_metrics_are_text():
  rows = [{"step": 1, f"eval/{HOSTILE}/accuracy": 0.5, "rollout/reward_mean": 1.0}]
  shown = notebook.run_html(HOSTILE, [HOSTILE], notebook.curve(rows))
  assert not Elements(shown).found & {"script", "img", "onerror"}


def test_a_table_shows_as_many_completions_as_asked_for_and_counts_the_rest():
  records = [RECORD | {"completion": "a" * 1000}] * 5
  table = notebook.completions(records, limit=2)
  assert table._repr_html_().count("<tr>") == 3 and "3 more" in table._repr_html_()
  assert "[400 more characters]" in repr(table) and repr(table).endswith("3 more")


def test_a_table_says_that_a_prompt_is_cut():
  record = RECORD | {"prompt": "What is", "prompt_ids": [1, 2], "prompt_is_cut": True}
  assert "What is … [cut to 2 tokens]" in repr(notebook.completions([record]))


def test_a_report_is_shown_in_a_frame_of_its_own(tmp_path):
  path = tmp_path / "report.html"
  path.write_text('<!doctype html><script>"&"</script>')
  page = notebook.Page(path)
  shown = page._repr_html_()
  assert Elements(shown).found >= {"iframe", "srcdoc", "sandbox"} and "<script" not in shown
  assert "&lt;script&gt;&quot;&amp;&quot;" in shown and page == path and page.exists()


def test_a_curve_shows_rewards_and_evaluations():
  shown = notebook.curve(ROWS, total_steps=14)
  assert shown._repr_html_().count("<svg") == 2 and "step 14" in shown._repr_html_()
  assert repr(shown).splitlines() == [
    "reward 0 → 0.2000 ▁▅█",
    "heldout accuracy 0.2500 → 0.5000 ▁█",
  ]
  assert repr(notebook.curve([])) == "no step is done yet"


@pytest.mark.parametrize("values", [[0.3], [-2.0, 5.0], [1e9, 1e9], [float("nan"), None]])
def test_a_curve_of_any_values_stays_in_its_frame(values):
  rows = [{"step": step, "rollout/reward_mean": value} for step, value in enumerate(values)]
  shown = notebook.curve(rows)._repr_html_()
  heights = [float(y) for y in re.findall(r'cy="([-\d.]+)"', shown)]
  assert "nan" not in shown and all(0 <= y <= 200 for y in heights)


def test_a_long_run_has_a_curve_of_few_points():
  rows = [{"step": step, "rollout/reward_mean": 0.0} for step in range(10_000)]
  assert len(notebook.curve(rows)._repr_html_()) < 20_000


def test_a_live_curve_is_one_display_that_is_updated(monkeypatch):
  shown = []
  handle = types.SimpleNamespace(update=lambda curve: shown.append(("update", repr(curve))))
  display = lambda curve, display_id: shown.append(("display", repr(curve))) or handle
  module = types.ModuleType("IPython.display")
  vars(module)["display"] = display
  ipython = types.ModuleType("IPython")
  vars(ipython)["get_ipython"] = lambda: object()
  monkeypatch.setitem(sys.modules, "IPython", ipython)
  monkeypatch.setitem(sys.modules, "IPython.display", module)
  live = notebook.LiveCurve(total_steps=2)
  live.on_evaluation(0, {"eval/heldout/accuracy": 0.25})
  live(0, {"rollout/reward_mean": 0.1, "eval/heldout/accuracy": 0.25})
  live(1, {"rollout/reward_mean": 0.3})
  assert [kind for kind, _ in shown] == ["display", "update", "update"]
  assert shown[-1][1].startswith("reward 0.1000 → 0.3000")


def test_a_live_curve_prints_lines_where_there_is_no_notebook(monkeypatch, capsys):
  monkeypatch.delitem(sys.modules, "IPython", raising=False)
  live = notebook.LiveCurve()
  live(0, {"rollout/reward_mean": 0.1})
  assert capsys.readouterr().out == "reward 0.1000 ▁\n"


def test_memory_names_this_process():
  assert re.match(r"this process: \d+\.\d GiB, at its peak \d+\.\d GiB", repr(notebook.memory()))
