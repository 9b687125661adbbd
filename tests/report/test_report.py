"""The page of a run: self-contained, safe whatever a model wrote, and true to the run folder."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import fake_run
import numpy as np
import pytest
from rich.console import Console

from grpo_jax import metrics, report
from grpo_jax.report import figures, run_data, sampled_groups
from grpo_jax.run_folder import console, loggers
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

VOID = {"meta", "input", "link", "img", "br", "hr", "base", "embed", "source"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b>\u2028'\"{{DATA}}<!--"


class Page(HTMLParser):
  """What a browser would see of the page, as far as tags and texts go."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.texts: dict[int, str] = {}
    self.open: list[tuple[str, int]] = []
    self.feed(text)
    self.close()
    assert self.open == [], "tags are not closed in order"

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in VOID:
      self.open.append((tag, len(self.tags) - 1))

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    if self.open:
      place = self.open[-1][1]
      self.texts[place] = self.texts.get(place, "") + data

  def elements(self, tag):
    return [(attrs, self.texts.get(i, "")) for i, (t, attrs) in enumerate(self.tags) if t == tag]

  @property
  def data(self):
    def refuse(name):
      raise AssertionError(f"{name} is no JSON")

    (text,) = [text for attrs, text in self.elements("script") if attrs.get("id") == "data"]
    return json.loads(text, parse_constant=refuse)


def quiet_screen():
  return console.TrainingScreen(Console(quiet=True))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "a_run"
  return fake_run.make_run(folder, steps=30, screen=quiet_screen(), sinks=("jsonl", "console"))


def panel(page, title):
  (found,) = [one for one in page.data["panels"] if one["title"].startswith(title)]
  return found


def a_run(folder, rows=(), config=None):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  if config is not None:
    (folder / "config.json").write_text(json.dumps(config))
  return folder


@pytest.mark.long
def test_the_page_needs_nothing_but_itself(run_folder):
  text = report.write(run_folder).read_text(encoding="utf-8")
  page = Page(text)
  loading = {"src", "href", "action", "data", "poster", "srcset", "background", "xlink:href"}
  assert [(tag, a) for tag, a in page.tags if loading & set(a)] == []
  assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
  (style,) = [text for _, text in page.elements("style")]
  assert "url(" not in style and "@import" not in style
  code = "".join(text for attrs, text in page.elements("script") if "type" not in attrs)
  assert not re.search(r"\b(fetch|XMLHttpRequest|import|WebSocket|innerHTML|eval)\b", code)
  assert set(re.findall(r"https?://[^\"' ]+", code)) == {"http://www.w3.org/2000/svg"}  # a name.


@pytest.mark.long
def test_the_policy_of_the_page_lets_its_own_scripts_run_and_no_other(run_folder):
  page = Page(report.render(run_data.load(run_folder)))
  (policy,) = [a["content"] for a, _ in page.elements("meta") if a.get("http-equiv")]
  scripts = [text for attrs, text in page.elements("script") if "type" not in attrs]
  assert len(scripts) == 2
  assert "default-src 'none'" in policy
  allowed = re.search(r"script-src ([^;]*)", policy)
  assert allowed is not None and allowed[1].split() == [report._script_hash(s) for s in scripts]
  assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_curves_hold_what_was_recorded(run_folder):
  page = Page(report.render(run_data.load(run_folder)))
  rows, _ = metrics.parse_lines((run_folder / "metrics.jsonl").read_text())
  rewards = {row["step"]: row["rollout/reward_mean"] for row in rows if "train/loss" in row}
  stds = {row["step"]: row["rollout/reward_std"] for row in rows if "train/loss" in row}
  (series,) = panel(page, "Reward")["series"]
  assert series["x"] == list(rewards) == list(range(30))
  assert series["y"] == pytest.approx(list(rewards.values()), rel=1e-5)
  assert series["hi"] == pytest.approx([rewards[s] + stds[s] for s in rewards], rel=1e-5)
  assert series["lo"] == pytest.approx([rewards[s] - stds[s] for s in rewards], rel=1e-4, abs=1e-6)
  held_out = {one["label"]: one for one in panel(page, "Evaluation")["series"]}
  assert set(held_out) == {"heldout/accuracy", "heldout/pass@4"}
  assert held_out["heldout/accuracy"]["x"] == [0, 5, 10, 15, 20, 25, 30]
  assert panel(page, "Mismatch")["scale"] == "log"


def test_the_parts_of_a_step_add_up_to_it(run_folder):
  page = Page(report.render(run_data.load(run_folder)))
  parts = panel(page, "Time of a step")["series"]
  totals = run_data.curve(run_data.load(run_folder), "time/step_s")[1]
  assert [part["label"] for part in parts] == ["sample", "score", "learn", "sync", "other"]
  assert np.sum([part["y"] for part in parts], axis=0) == pytest.approx(totals, rel=1e-4)


def test_every_recorded_metric_is_in_some_figure(run_folder):
  run = run_data.load(run_folder)
  page = Page(report.render(run))
  others = {one["title"] for one in page.data["others"]}
  patterns = [c for p in figures.PANELS for c in (*p.curves.values(), p.band) if "*" not in c]
  recorded = {name for row in run.rows for name in row} - {"step", "time/step_s"}
  in_panels = set(patterns) | {"eval/heldout/accuracy", "eval/heldout/pass@4"}
  assert recorded - in_panels - others == set()
  assert others & in_panels == set()


def test_the_outcome_is_at_the_top(run_folder):
  run = run_data.load(run_folder)
  first, last = run.rows[0]["eval/heldout/accuracy"], run.rows[-1]["eval/heldout/accuracy"]
  found = {name: rest for name, *rest in report.tiles(run)}
  gain = f"{100 * (last - first):+.1f} points, step 0 to 30"
  assert found["Accuracy, heldout"] == [console.share(first), console.share(last), gain]
  assert found["Steps"] == ["", "30", "of 30"]
  assert ("model", "HuggingFaceTB/SmolLM2-135M-Instruct") in report.facts(run)


def test_sampled_groups_are_those_of_the_files(run_folder):
  page = Page(report.render(run_data.load(run_folder)))
  steps = page.data["samples"]
  assert (steps[0]["step"], steps[-1]["step"]) == (0, 29)
  assert len(steps) == sampled_groups.MAX_STEPS
  lines = (run_folder / "rollouts" / "step_000029.jsonl").read_text().splitlines()
  record = json.loads(lines[11])  # the fourth rollout of the second group.
  shown = steps[-1]["groups"][1]["rollouts"][3]
  assert shown["texts"] == record["token_texts"]
  assert "".join(shown["texts"]) == record["completion"]
  assert (shown["reward"], shown["advantage"]) == (record["reward"], record["advantage"])
  expected = np.asarray(record["policy_logprobs"]) - np.asarray(record["behavior_logprobs"])
  assert shown["delta"] == pytest.approx(list(expected), rel=6e-3)
  assert steps[-1]["groups"][1]["prompt"] == record["prompt"]
  a, b = map(int, re.findall(r"\d+", record["prompt"]))
  assert steps[-1]["groups"][1]["expected"] == record["expected_answer"] == str(a + b)


def hostile_rollout(**fields) -> Rollout:
  return Rollout(
    completion_ids=np.arange(2, dtype=np.int32),
    loss_mask=np.ones(2, bool),
    behavior_logprobs=np.asarray([-0.5, -0.5], np.float32),
    weight_versions=np.zeros(2, np.int32),
    finish_reason=FinishReason.STOP,
    reward=1.0,
    text=EVIL * 2,
    reward_components={EVIL: 1.0},
    **fields,
  )


def test_nothing_that_is_written_by_others_becomes_markup(tmp_path):
  folder = a_run(
    tmp_path / 'x"><img src=y onerror=alert(3)>'.replace("/", ""), config={EVIL: EVIL, "seed": EVIL}
  )
  prompt = Prompt(EVIL, np.zeros(1, np.int32), EVIL, {"expected_answer": EVIL}, text=EVIL)
  logger = loggers.make(
    folder, decode=lambda ids: EVIL * len(ids), sinks=("jsonl", "console"), screen=quiet_screen()
  )
  logger.write_rollouts(0, [RolloutGroup(prompt, (hostile_rollout(),))], [np.ones(1, np.float32)])
  logger.write(0, {f"env/{EVIL}/reward_mean": 1.0, "eval/<b>/accuracy": 0.5})
  text = report.write(folder).read_text(encoding="utf-8")
  page = Page(text)
  assert [tag for tag, _ in page.tags if tag == "script"] == ["script"] * 3
  assert "img" not in [tag for tag, _ in page.tags]
  assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
  (written,) = [t for attrs, t in page.elements("script") if attrs.get("id") == "data"]
  assert not set("<>&\u2028") & set(written)
  assert "alert(1)</script>" not in text and "<b>/accuracy" not in text
  group = page.data["samples"][0]["groups"][0]
  assert (group["prompt"], group["rollouts"][0]["texts"]) == (EVIL, [EVIL, EVIL])
  assert group["rollouts"][0]["components"] == {EVIL: 1.0}
  assert group["expected"] == EVIL


@pytest.mark.parametrize(
  "rows",
  [
    [],
    [{"step": 0}],
    [{"step": 0, "train/loss": None, "rollout/reward_mean": None, "rollout/reward_std": None}],
    [{"step": s, "rollout/reward_mean": math.nan, "train/grad_norm": math.inf} for s in range(3)],
    [{"step": 0, "train/loss": "a text", "time/step_s": [1]}],
    [{"step": 0, "eval/heldout/accuracy": 0.5}],
  ],
  ids=["empty", "bare", "null", "not finite", "no numbers", "evaluation only"],
)
def test_a_run_with_nothing_to_draw_still_has_a_page(tmp_path, rows):
  page = Page(report.write(a_run(tmp_path, rows)).read_text(encoding="utf-8"))
  drawn = [one for figure in page.data["panels"] for one in figure["series"]]
  assert len(drawn) == (1 if rows and "eval/heldout/accuracy" in rows[0] else 0)
  assert page.data["samples"] == []


def test_what_cannot_be_read_is_named_on_the_page(tmp_path):
  folder = a_run(tmp_path, [{"step": 0, "train/loss": 1.0}])
  (folder / "config.json").write_text("{broken")
  with open(folder / "metrics.jsonl", "a") as file:
    file.write("{half\n")
  (folder / "rollouts").mkdir()
  (folder / "rollouts" / "step_000000.jsonl").write_text('{"group": 0}\n{"gro\n[]\n')
  text = report.write(folder).read_text(encoding="utf-8")
  assert "config.json could not be read" in text and "lines [2] could not be read" in text
  assert Page(text).data["samples_note"] == "No group was readable."
  with pytest.raises(FileNotFoundError, match="a run folder is needed"):
    report.write(tmp_path / "nowhere")


def test_a_step_that_was_written_twice_is_drawn_once(tmp_path):
  rows = [{"step": s, "train/entropy": v} for s, v in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0))]
  page = Page(report.write(a_run(tmp_path, rows)).read_text(encoding="utf-8"))
  (series,) = panel(page, "Entropy")["series"]
  assert (series["x"], series["y"]) == ([0, 1], [3.0, 4.0])


@pytest.mark.long
def test_a_long_run_of_long_completions_gives_a_page_below_five_megabytes(tmp_path):
  rng = np.random.default_rng(0)
  steps = 2000
  rows = [{"step": s, **{f"env/e/{i}": rng.random() for i in range(15)}} for s in range(0, steps)]
  folder = a_run(tmp_path, rows)
  (folder / "rollouts").mkdir()
  record = {
    "rollout": 0,
    "prompt_id": "p",
    "environment": "e",
    "prompt": "x" * 100_000,
    "completion": "word " * 3000,
    "reward": 0.5,
    "reward_components": {},
    "advantage": 0.1,
    "finish_reason": "length",
    "turns": 1,
    "completion_ids": list(range(3000)),
    "token_texts": ["word "] * 3000,
    "loss_mask": [1] * 3000,
    "behavior_logprobs": [-0.123456] * 3000,
    "policy_logprobs": [-0.123457] * 3000,
    "weight_versions": [7] * 3000,
  }
  line = "".join(
    json.dumps({**record, "group": i // 8, "rollout": i % 8}) + "\n" for i in range(56)
  )
  (folder / "rollouts" / "step_000000.jsonl").write_text(line)
  for step in range(1, 60):
    (folder / "rollouts" / f"step_{step:06d}.jsonl").hardlink_to(
      folder / "rollouts/step_000000.jsonl"
    )
  path = report.write(folder)
  assert 2_000_000 < path.stat().st_size < 5_000_000
  data = Page(path.read_text(encoding="utf-8")).data
  shown = data["samples"]
  assert {0, 59} <= {one["step"] for one in shown}
  assert len(shown[0]["groups"]) == sampled_groups.MAX_GROUPS
  rollout = shown[0]["groups"][0]["rollouts"][0]
  assert len(rollout["texts"]) + rollout["omitted"] == rollout["length"] == 3000
  assert f"{len(shown)} of 60 recorded steps" in data["samples_note"]
  curve = data["others"][0]["series"][0]
  assert len(curve["x"]) == len(curve["y"]) <= figures.MAX_POINTS
  assert np.mean(curve["y"]) == pytest.approx(np.mean([row["env/e/0"] for row in rows]), abs=1e-6)


def test_environment_tokens_and_missing_logprobs_look_different(tmp_path):
  record = {
    "group": 0, "rollout": 0, "prompt_id": "p", "environment": "e", "prompt": "",
    "completion": "ab", "reward": None, "reward_components": {}, "advantage": None,
    "finish_reason": "env_done", "turns": 2, "completion_ids": [1, 2], "token_texts": ["a", "b"],
    "loss_mask": [1, 0], "behavior_logprobs": [-1.0, 0.0], "policy_logprobs": [-1.5, None],
    "weight_versions": [3, -1],
  }  # fmt: skip
  shown = sampled_groups._rollout(record)
  assert (shown["mask"], shown["delta"]) == ([1, 0], [-0.5, None])
  assert shown["sampled"] == "after 3 updates"
  without = sampled_groups._rollout(record | {"policy_logprobs": None, "token_texts": None})
  assert (without["delta"], without["texts"]) == (None, ["ab"])


def groups_file(tmp_path, groups):
  """A run folder with one step, of groups that have, or lack, the trainer's logprobs."""
  folder = a_run(tmp_path, [{"step": 0, "rollout/turns_mean": 1.0, "rollout/turns_max": 1}])
  (folder / "rollouts").mkdir()
  record = {
    "rollout": 0, "prompt_id": "p", "environment": "e", "prompt": "", "completion": "a",
    "reward": 1.0, "reward_components": {}, "advantage": 0.0, "finish_reason": "stop", "turns": 1,
    "completion_ids": [1, 2], "token_texts": ["a", "b"], "loss_mask": [1, 1],
    "behavior_logprobs": [-1.0, -1.0], "weight_versions": [0, 0],
  }  # fmt: skip
  lines = [record | {"group": i, "policy_logprobs": [p, p]} for i, p in enumerate(groups)]
  (folder / "rollouts/step_000000.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
  return folder


@pytest.mark.parametrize("learned_from", [[1, 4], [40, 41], [*range(20)], []])
def test_groups_that_were_learned_from_are_shown_first(tmp_path, learned_from):
  groups = [-1.0 if i in learned_from else None for i in range(42)]
  (step,), _ = sampled_groups.samples(run_data.load(groups_file(tmp_path, groups)))
  compared = [rollout["delta"] is not None for g in step["groups"] for rollout in g["rollouts"]]
  found = min(len(learned_from), sampled_groups.MAX_GROUPS)
  assert compared == [True] * found + [False] * (sampled_groups.MAX_GROUPS - found)


def test_a_huge_file_is_not_searched_to_its_end(tmp_path, monkeypatch):
  monkeypatch.setattr(sampled_groups, "MAX_SCAN", 3000)
  (step,), _ = sampled_groups.samples(run_data.load(groups_file(tmp_path, [*[None] * 40, -1.0])))
  assert len(step["groups"]) == sampled_groups.MAX_GROUPS
  assert all(rollout["delta"] is None for g in step["groups"] for rollout in g["rollouts"])


@pytest.mark.parametrize("most, is_shown", [(1, False), (2, True)])
def test_turns_are_drawn_only_where_there_is_more_than_one(tmp_path, most, is_shown):
  rows = [{"step": s, "rollout/turns_mean": 1.0, "rollout/turns_max": most} for s in range(3)]
  page = Page(report.write(a_run(tmp_path, rows)).read_text(encoding="utf-8"))
  titles = [one["title"] for one in page.data["panels"] + page.data["others"]]
  assert any(title.startswith("Turns") for title in titles) == is_shown


FLAT = {
  "train/clip_low_share": 0.0,
  "train/clip_high_share": 0.0,
  "mismatch/token_mult_prob_error": 1.0000042,
  "all/kl_to_initial": 0.0,
}


@pytest.mark.parametrize(
  "changed, drawn",
  [
    ({}, None),
    ({"train/clip_high_share": 0.001}, "Tokens clipped"),
    ({"mismatch/token_mult_prob_error": 1.002}, "Multiplicative probability error"),
    ({"all/kl_to_initial": 1e-6}, "Distance from the initial weights"),
    ({"mismatch/token_mult_prob_error": None}, "Multiplicative probability error"),
  ],
)
def test_figures_without_content_are_a_sentence(tmp_path, changed, drawn):
  rows = [{"step": 0, **FLAT}, {"step": 1, **FLAT, **changed}]
  page = Page(report.write(a_run(tmp_path, rows)).read_text(encoding="utf-8"))
  assert [one["title"] for one in page.data["panels"]] == [drawn] * (drawn is not None)
  assert len(page.data["quiet"]) == 3 - (drawn is not None)
  assert page.data["others"] == []


def test_a_figure_without_any_measurement_has_no_sentence(tmp_path):
  page = Page(report.write(a_run(tmp_path, [{"step": 0}])).read_text(encoding="utf-8"))
  assert page.data["quiet"] == []


def test_a_sentence_is_about_the_steps_that_measured_it(tmp_path):
  """The distance of step 0 is measured before any update, and says nothing about what moved."""
  distance = {"all/kl_to_initial": 0.0}
  rows = [{"step": 0, **FLAT}, *({"step": s, "rollout/reward_mean": s} for s in range(1, 9))]
  sentences = quiet_sentences(tmp_path / "a", rows)
  assert [s for s in sentences if "agree" in s and "(1 step)" in s]
  assert not [s for s in sentences if "moved" in s]
  rows[5] |= distance
  rows[7] |= distance
  (moved,) = [s for s in quiet_sentences(tmp_path / "b", rows) if "moved" in s]
  assert moved.endswith("is 0 wherever it was measured after the first update (2 steps).")
  # A reference that each step copies from the policy is at no distance, wherever the policy goes.
  rows = [{"step": s, "train/kl_to_reference": 0.0} for s in range(9)]
  assert not quiet_sentences(tmp_path / "c", rows)


def quiet_sentences(folder, rows):
  return Page(report.write(a_run(folder, rows)).read_text(encoding="utf-8")).data["quiet"]


def test_a_single_curve_is_named_unless_the_title_says_what_it_is(tmp_path):
  names = ("eval/heldout/accuracy", "signal/lost/equal_rewards", "perf/peak_rss_gib")
  rows = [{"step": s, **dict.fromkeys((*names, "train/grad_norm"), 0.5 + s)} for s in range(2)]
  page = Page(report.write(a_run(tmp_path, rows)).read_text(encoding="utf-8"))
  named = {one["title"].split(",")[0]: one["named"] for one in page.data["panels"]}
  assert named.pop("Gradient norm") is False and len(named) == 3 and all(named.values())


def test_the_only_step_has_a_reward_and_no_change_of_it(tmp_path):
  tiles = report.tiles(run_data.load(a_run(tmp_path, [{"step": 0, "rollout/reward_mean": 0.5}])))
  assert ("Reward in training", "", "0.500", "of the only step") in tiles


def test_every_text_of_a_group_is_cut(tmp_path):
  folder = groups_file(tmp_path, [-1.0])
  path = folder / "rollouts/step_000000.jsonl"
  long = "X" * 1_000_000
  texts = dict.fromkeys(("prompt_id", "environment", "prompt", "expected_answer", "error"), long)
  record = json.loads(path.read_text()) | texts | {"token_texts": [long, long], "completion": long}
  record["reward_components"] = {f"{i}{long[:5000]}": 1.0 for i in range(100)}
  path.write_text("".join(json.dumps(record | x) + "\n" for x in ({}, {"token_texts": None})))
  text = report.write(folder).read_text(encoding="utf-8")
  assert len(text) < 150_000
  (group,) = Page(text).data["samples"][0]["groups"]
  assert group["expected"].endswith("more characters]") and len(group["rollouts"]) == 2


def test_a_prompt_that_is_cut_is_shown_as_cut(tmp_path):
  path = groups_file(tmp_path, [-1.0]) / "rollouts/step_000000.jsonl"
  record = json.loads(path.read_text())
  ids = list(range(7))
  path.write_text(json.dumps(record | {"prompt": "abc", "prompt_is_cut": True, "prompt_ids": ids}))
  (group,) = Page(report.write(tmp_path).read_text(encoding="utf-8")).data["samples"][0]["groups"]
  assert group["prompt"] == "abc … [cut to 7 tokens]"


# What the script makes of [low, high, unit], and of first and last steps.
AXES = """
globalThis.document = {getElementById: () => ({textContent: "{}"})};
%s
const found = %s.map(([low, high, unit]) => bounds(low, high, unit, "line"));
const steps = %s.map(([first, last]) => stepTicks(first, last));
console.log(JSON.stringify([found, steps]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_axes_end_at_ticks_and_steps_are_whole():
  values = [[10.8, 24, "tokens"], [24, 48, "count"], [0.3, 0.38, "share"], [0, 0, "nats"]]
  values += [[0, 1, "share"], [-0.2, 0.49, "reward"], [5, 5, "turns"]]
  steps = [[-0.5, 0.5], [6.5, 7.5], [0, 2], [0, 13], [0, 1000]]
  script = report._script("charts.html").split("class Panel")[0]
  code = AXES % (script, json.dumps(values), json.dumps(steps))
  done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
  found, ticks = json.loads(done.stdout)
  expected = [[10, 25], [0, 60], [0, 0.4], [0, 1], [0, 1], [-0.2, 0.6], [4.5, 5.5]]
  assert [pytest.approx(one, abs=1e-9) for one in expected] == found
  assert ticks == [[0], [7], [0, 1, 2], [0, 5, 10], [0, 200, 400, 600, 800, 1000]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_groups_of_the_last_training_step_are_shown_first():
  (function,) = re.findall(
    r"^function shownFirst.*?^}", report._script("browser.html"), re.DOTALL | re.MULTILINE
  )
  lists = [[None, None, "heldout"], [None, "heldout"], ["heldout", "other"], [None]]
  steps = json.dumps([[{"set": name} for name in names] for names in lists])
  code = f"{function}\nconsole.log(JSON.stringify({steps}.map(shownFirst)));"
  done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
  assert json.loads(done.stdout) == [1, 0, 1, 0]


@pytest.mark.parametrize(
  "versions, expected",
  [
    ([0, 0], "before any update"),
    ([-1, -1], "by weights that are not known"),
    ([1, 1], "after 1 update"),
    ([13], "after 13 updates"),
    ([4, 3, 5], "after 3 to 5 updates"),
    ([0, 1], "after 0 to 1 updates"),
    ([], "no token"),
  ],
)
def test_the_weights_that_sampled_are_named_in_words(versions, expected):
  assert console.sampled_from(versions) == expected


# Runs the functions of the page that need no page.
TICKS = """
globalThis.document = {getElementById: () => ({textContent: "{}"})};
%s
const found = [];
for (const [low, high] of %s) {
  for (const unit of ["", "share", "nats"]) found.push(tickLabels(ticks(low, high, 4), unit));
  if (low > 0) found.push(tickLabels(logTicks(low / 1.3, high * 1.3), ""));
}
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_ticks_of_flat_curves_are_distinct():
  bounds = [[1, 1 + 1e-6], [0.9, 1.1], [1, 1.00001], [0.5, 0.5001], [-1e-9, 1e-9], [3, 3.0001]]
  bounds += [[12345.1, 12345.2], [1e8, 1e8 + 10], [0.00012345, 0.00012346], [3, 3], [2e-13, 2e-13]]
  bounds += [[-1.00001, -1], [0, 0.02], [1e-20, 1e20]]
  script = report._script("charts.html").split("class Panel")[0]
  ranges = [[low, high] if low < high else [low * 0.9, low * 1.1] for low, high in bounds]
  code = TICKS % (script, json.dumps(ranges))
  done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
  found = json.loads(done.stdout)
  assert len(found) > 40
  for labels in found:
    assert len(labels) >= 2 and len(set(labels)) == len(labels), labels
    assert max(map(len, labels)) < 18


def test_steps_are_spread_from_both_ends_inwards():
  order = sampled_groups._spread(list(range(100)), 5)
  assert order[:2] == [99, 0] and sorted(order) == [0, 25, 50, 74, 99]
  assert sampled_groups._spread([], 5) == [] and sampled_groups._spread([7], 5) == [7]


def test_an_unhealthy_end_is_described_in_words(tmp_path):
  rows = [{"step": s, "signal/lost_share": 0.0 if s < 18 else 0.9} for s in range(20)]
  run = run_data.load(a_run(tmp_path, rows))
  assert report.warnings_of(run) == [
    "90% of the completions give nothing to learn from (signal/lost/* says why)."
  ]
  assert report.warnings_of(run_data.load(a_run(tmp_path, rows[:18]))) == []


def test_first_steps_without_signal_are_on_the_page_with_reason_and_remedy(tmp_path):
  silent = {"signal/lost_share": 1.0, "signal/lost/group_of_one": 4.0}
  rows = [{"step": 0, **silent}, {"step": 1, **silent}, {"step": 2, "signal/lost_share": 0.5}]
  page = report.render(run_data.load(a_run(tmp_path, rows)))
  assert "Steps 0 to 1: NOTHING TO LEARN FROM" in page and "8 completions are the only" in page
  assert "advantages.estimator=&#x27;reinforce_pp&#x27;" in page
  page = report.render(run_data.load(a_run(tmp_path / "b", rows[2:])))
  assert "NOTHING TO LEARN FROM" not in page


def test_device_memory_is_at_the_top_where_it_is_counted(tmp_path):
  rows = [{"step": 0, "rollout/reward_mean": 0.5, "perf/device_peak_gib": 3.25}]
  tiles = report.tiles(run_data.load(a_run(tmp_path, rows)))
  assert ("Device memory", "", "3.2 GiB", "peak of the fullest device") in tiles
  rows[0].pop("perf/device_peak_gib")
  tiles = report.tiles(run_data.load(a_run(tmp_path / "cpu", rows)))
  assert not [tile for tile in tiles if "memory" in tile[0]]


def test_several_runs_are_drawn_into_one_page_without_groups(tmp_path, run_folder):
  other = a_run(tmp_path / "b", [{"step": 0, "rollout/reward_mean": 0.5}], {"total_steps": 7})
  runs = [run_data.load(run_folder), run_data.load(other)]
  page = Page(report.render_comparison(runs))
  assert [one["label"] for one in panel(page, "Reward")["series"]] == ["a_run", "b"]
  assert page.data["samples"] is None
  assert "total_steps</span> = &quot;30 | 7&quot;" in report.render_comparison(runs)
  with pytest.raises(ValueError, match="at least 2 runs, got 1"):
    report.render_comparison(runs[:1])


def test_the_command_line_writes_the_page_and_names_what_is_missing(tmp_path, run_folder, capsys):
  (run_folder / "report.html").unlink(missing_ok=True)
  assert report.main([str(run_folder)]) == 0
  assert capsys.readouterr().out.strip() == str(run_folder / "report.html")
  assert report.main([str(tmp_path / "nowhere")]) == 2
  assert "nowhere" in capsys.readouterr().err
  assert report.main([]) == 2
  assert report.main(["--help"]) == 0


@pytest.mark.parametrize("left", [None, "notes.txt", "tensorboard", "report.html"])
def test_a_folder_without_a_run_is_refused_in_one_line_and_left_alone(tmp_path, left, capsys):
  if left:
    (tmp_path / left).write_text("")
  assert report.main([str(tmp_path)]) == 2
  printed = capsys.readouterr()
  assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out
  assert "metrics.jsonl" in printed.err
  assert [path.name for path in tmp_path.iterdir()] == ([left] if left else [])


def test_the_folder_of_several_runs_names_them(tmp_path, capsys):
  a_run(tmp_path / "first", [{"step": 0}])
  assert report.main([str(tmp_path)]) == 2
  assert capsys.readouterr().err.endswith("; there are runs in it: first\n")


@pytest.mark.long
def test_the_comparison_script_prints_runs_side_by_side(tmp_path, run_folder):
  root = Path(report.__file__).parents[2]
  other = a_run(tmp_path / "b", [{"step": 0, "rollout/reward_mean": 0.25}], {"total_steps": 7})
  done = subprocess.run(
    [
      sys.executable,
      root / "scripts" / "compare_runs.py",
      run_folder,
      other,
      "--html",
      tmp_path / "c.html",
    ],
    capture_output=True,
    text=True,
    env={
      "PYTHONPATH": f"{root}:{root / 'kernels'}:{root / 'packages'}",
      "JAX_PLATFORMS": "cpu",
      "PATH": "",
    },
    check=True,
  )
  rows = [line.split() for line in done.stdout.splitlines()]
  assert ["metric", "unit", "a_run", "b"] in rows
  assert ["total_steps", "30", "7"] in rows
  (reward,) = [row for row in rows if row[:1] == ["rollout/reward_mean"]]
  assert reward[-1] == "0.2500"
  assert (tmp_path / "c.html").stat().st_size > 10_000
