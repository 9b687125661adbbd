"""mode = "offline" on a tiny model: it learns, resumes, and equals online training."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

import configs.base
from grpo_jax import evaluation, report, train
from grpo_jax.config.configuration import ConfigError
from grpo_jax.data.formats import RowError
from grpo_jax.models import loading
from grpo_jax.report import figures, run_data
from tests.runs.test_train import StopWhen, assert_same_state, reported

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


WORDS = {"vowels": "aeiou", "digits": "12345"}


def ranked_rows(count, seed):
  """Groups in which words of one alphabet stand above words of another, mixed ones between."""
  rng = np.random.default_rng(seed)
  rows = []
  for i in range(count):
    kind = sorted(WORDS)[i % 2]
    letters = ["".join(rng.choice([*alphabet], 6)) for alphabet in (WORDS[kind], "qxzvk")]
    texts = [letters[0], letters[0][:3] + letters[1][:3], letters[1]]
    order = rng.permutation(3)
    group = [{"response": texts[rank], "rank": int(rank) + 1} for rank in order]
    rows.append({"prompt": f"{kind} {rng.integers(100, 999)}", "group": group, "group_type": kind})
  return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  return {
    "train": write(folder / "train.jsonl", ranked_rows(24, 0)),
    "held_out": write(folder / "held_out.jsonl", ranked_rows(12, 1)),
  }


@pytest.fixture(scope="module")
def make_config(model, files):
  """Returns a function that makes the config of a run of seconds; `a__b=1` sets config.a.b."""

  def make(**overrides):
    settings = {
      "mode": "offline",
      "total_steps": 4,
      "model__path": str(model),
      "model__compute_dtype": "float32",
      "mesh__data": 1,
      "data__path": str(files["train"]),
      "evaluation__data__path": str(files["held_out"]),
      "engine__name": "there_is_none",
      "rollout__prompts_per_step": 4,
      "batching__row_tokens": 128,
      "batching__row_buckets": (128,),
      "batching__microbatch_tokens": 128,  # one shape, which is compiled once.
      "loss__kl_coef": 0.0,
      "loss__importance_correction": "token",
      "loss__importance_truncation": "tis",
      "loss__importance_high": 2.0,
      "optim__learning_rate": 3e-3,
      "evaluation__every_steps": 2,
      "checkpoint__every_steps": 1,
      "logging__sinks": ("jsonl", "console"),
      "learn__report_all_every_steps": 0,
      "learn__report_kl_every_steps": 0,
      **overrides,
    }
    config = configs.base.get_config()
    config.environments = {"own": {"module": "function", "path": "tests.rewards.variety"}}
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in settings.items()})
    return config

  return make


def rollouts(workdir, step):
  lines = (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def weights(workdir):
  return jax.tree.leaves(loading.load(workdir / "export").params)


def assert_close_weights(one, other, *, atol):
  for a, b in zip(weights(one), weights(other), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def plain(make_config, tmp_path_factory) -> pathlib.Path:
  """The folder of an undisturbed run of four steps."""
  workdir = tmp_path_factory.mktemp("plain")
  train.train(make_config(), workdir)
  return workdir


def test_evaluate_gives_the_numbers_of_the_run(plain, files, tmp_path):
  measured = reported(plain)[4]
  for number, options in enumerate(
    [{}, {"sets": [str(files["held_out"])]}, {"sets": [str(files["held_out"])], "num_prompts": 6}]
  ):
    done = evaluation.run(f"{plain}:4", workdir=tmp_path / str(number), **options)
    ((name, found),) = done.models[0].sets.items()
    assert name == ("held_out" if options else "heldout")
    if "num_prompts" in options:
      assert (found.counts["groups"], found.counts["responses"]) == (6, 18)
      continue
    for key in ("accuracy", "exact_accuracy", "place_accuracy", "best_accuracy", "margin"):
      expected = measured[f"eval/heldout/{key}"]
      assert found.estimates[key].value == pytest.approx(expected, abs=1e-6), key
    for kind in ("digits", "vowels"):
      expected = measured[f"eval/heldout/{kind}/accuracy"]
      assert found.estimates[f"{kind}/accuracy"].value == expected
  lines = (tmp_path / "0/evaluations/heldout/step_000004.jsonl").read_text().splitlines()
  assert len(lines) == 36 and json.loads(lines[0])["policy_logprobs"][0] < 0
  assert "accuracy           " in done.summary() and "18 responses" in done.summary()
  with pytest.raises(ConfigError, match="--samples: the responses are recorded"):
    evaluation.run(f"{plain}:4", samples=2)


def test_ranking_accuracy_rises_on_held_out_groups(make_config, tmp_path):
  config = make_config(total_steps=18, evaluation__every_steps=0, checkpoint__every_steps=0)
  config.optim.learning_rate = 1e-2
  train.train(config, tmp_path)
  rows = reported(tmp_path)
  before, after = rows[0], rows[-1]
  assert before["eval/heldout/accuracy"] < 0.75
  assert after["eval/heldout/accuracy"] > 0.9
  assert after["eval/heldout/exact_accuracy"] > before["eval/heldout/exact_accuracy"] + 0.3
  assert after["eval/heldout/margin"] > before["eval/heldout/margin"] + 0.5
  for kind in WORDS:
    assert after[f"eval/heldout/{kind}/accuracy"] > 0.8
  assert after["eval/heldout/consistency"] > 0.8
  assert rows[-2]["train/rank_accuracy"] > 0.9


@pytest.mark.parametrize(
  "lines",
  [pytest.param(0, id="at_once", marks=pytest.mark.slow), pytest.param(1, id="after_a_step")],
)
def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(
  lines, make_config, plain, tmp_path
):
  train.train(make_config(), tmp_path, stop=StopWhen(tmp_path, lines))
  assert not (tmp_path / "export").exists()
  train.train(make_config(), tmp_path)
  assert reported(tmp_path) == reported(plain)
  assert_same_state(tmp_path, plain)


@pytest.mark.slow
def test_a_run_with_more_steps_scores_what_it_has_not_seen(make_config, plain, tmp_path):
  train.train(make_config(total_steps=2), tmp_path)
  seen = {path.name for path in (tmp_path / "behavior_logprobs").glob("chunk*")}
  assert len(seen) == 2
  train.train(make_config(total_steps=4), tmp_path)
  assert len(list((tmp_path / "behavior_logprobs").glob("chunk*"))) == 4
  assert reported(tmp_path)[3] == reported(plain)[3]
  assert_same_state(tmp_path, plain)


@pytest.mark.slow
def test_an_adapter_learns_from_recorded_groups_and_continues_where_it_was(make_config, tmp_path):
  options = {"model__lora__rank": 4, "model__lora__base_dtype": "int8", "loss__kl_coef": 0.05}
  config = functools.partial(make_config, **options, optim__learning_rate=2e-2)
  train.train(config(), tmp_path / "unbroken")
  stopped = tmp_path / "stopped"
  train.train(config(), stopped, stop=StopWhen(stopped, 1))
  train.train(config(), stopped)
  assert reported(stopped) == reported(tmp_path / "unbroken")
  assert_same_state(stopped, tmp_path / "unbroken")
  rows = [row for row in reported(stopped) if "rollout/staleness_max" in row]
  assert rows[0]["mismatch/abs_logprob_max"] < 1e-5  # the initial policy is the base.
  assert rows[0]["train/kl_to_reference"] < 1e-12  # the update rounds in another way.
  assert rows[3]["train/kl_to_reference"] > 1e-5


def test_behavior_logprobs_are_those_of_the_initial_policy(plain):
  rows = [row for row in reported(plain) if "rollout/staleness_max" in row]
  assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 2, 3]
  assert rows[0]["mismatch/abs_logprob_max"] < 1e-5
  assert rows[3]["mismatch/abs_logprob_max"] > 1e-3  # the policy has moved on; they have not.
  first = rollouts(plain, 0)
  assert all(record["weight_versions"] == [0] * len(record["loss_mask"]) for record in first)
  compared = [
    (ours, theirs)
    for record in first
    for ours, theirs in zip(record["policy_logprobs"], record["behavior_logprobs"], strict=True)
    if ours is not None
  ]
  assert len(compared) > 50
  np.testing.assert_allclose(*zip(*compared, strict=True), atol=1e-5)


@pytest.mark.slow
def test_later_epochs_draw_other_responses_with_the_same_logprobs(make_config, tmp_path):
  path = str(write(tmp_path / "rows.jsonl", ranked_rows(4, 2)))
  quiet = {"evaluation__every_steps": 0, "checkpoint__every_steps": 0}
  options = {"data__path": path, "offline__group_size": 2, "optim__learning_rate": 1e-2, **quiet}
  train.train(make_config(total_steps=4, **options), tmp_path / "run")
  pairs: dict[str, set[tuple[str, ...]]] = {}
  known: dict[tuple[str, str], list[list[float]]] = {}
  for step in range(4):
    records = rollouts(tmp_path / "run", step)
    assert len(records) == 4 * 2
    for first, second in zip(records[::2], records[1::2], strict=True):
      pairs.setdefault(first["prompt"], set()).add((first["completion"], second["completion"]))
    for record in records:
      place = record["prompt"], record["completion"]
      known.setdefault(place, []).append(record["behavior_logprobs"])
  assert len(pairs) == 4 and sum(map(len, pairs.values())) > 4
  again = [found for found in known.values() if len(found) > 1]
  assert len(again) > 4 and all(found[0] == each for found in again for each in found)


@pytest.mark.slow
def test_importance_correction_acts_on_recorded_groups(make_config, plain, tmp_path):
  off = {"correction": "none", "truncation": None, "high": float("inf")}
  options = {f"loss__importance_{name}": value for name, value in off.items()}
  train.train(make_config(**options), tmp_path)
  norms = [[row.get("train/grad_norm") for row in reported(run)] for run in (plain, tmp_path)]
  # At step 0 policy and behavior policy are one, so the weights are 1.
  assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)
  assert norms[0][3] != pytest.approx(norms[1][3], rel=1e-3)


ONLINE = {
  "mode": "online",
  "total_steps": 1,
  "engine__name": "jax_sampler",
  "engine__max_rows": 16,
  "sampling__max_tokens": 8,
  "rollout__group_size": 4,
  "data__environment": "own",
  "evaluation__at_start": False,
  "evaluation__at_end": False,
  "evaluation__every_steps": 0,
}


@pytest.fixture(scope="module")
def online(make_config, tmp_path_factory):
  """An online run of one step, and the file of its rollouts."""
  folder = tmp_path_factory.mktemp("online")
  problems = [{"problem": f"say {i}", "expected_answer": "x"} for i in range(4)]
  path = write(folder / "problems.jsonl", problems)
  train.train(
    make_config(**ONLINE, data__path=str(path), evaluation__data__path=str(path)), folder / "run"
  )
  return folder / "run"


def of_recorded(online, **options):
  """Options of a run on the rollouts of the online run."""
  path = str(online / "rollouts" / "step_000000.jsonl")
  quiet = {k: v for k, v in ONLINE.items() if k.startswith("evaluation")}
  return {"data__path": path, "evaluation__data__path": path, "total_steps": 1, **quiet, **options}


def by_text(records, *names):
  return sorted((r["prompt"], r["completion_ids"], *(r[name] for name in names)) for r in records)


@pytest.mark.parametrize("behavior", ["file", pytest.param("initial", marks=pytest.mark.slow)])
def test_a_step_on_recorded_rollouts_is_the_step_that_recorded_them(
  behavior, make_config, online, tmp_path
):
  config = make_config(**of_recorded(online, offline__behavior=behavior))
  train.train(config, tmp_path)
  ours, theirs = (rollouts(folder, 0) for folder in (tmp_path, online))
  exact = ("reward", "loss_mask", "prompt_ids", "finish_reason")
  assert by_text(ours, *exact) == by_text(theirs, *exact)
  if behavior != "initial":
    assert by_text(ours, "behavior_logprobs") == by_text(theirs, "behavior_logprobs")
  np.testing.assert_allclose(
    [r[2] for r in by_text(ours, "advantage")], [r[2] for r in by_text(theirs, "advantage")]
  )
  assert reported(tmp_path)[0]["train/grad_norm"] == pytest.approx(
    reported(online)[0]["train/grad_norm"], rel=1e-4
  )
  # Adam's first step is the sign of the gradient times 3e-3: a sum in another order, 1e-6 of it.
  assert_close_weights(tmp_path, online, atol=3e-5)


def test_environments_score_recorded_responses_as_they_score_sampled_ones(
  make_config, online, tmp_path
):
  records = rollouts(online, 0)
  rows = [{"input": r["prompt"], "output": r["completion"], "problem": "x"} for r in records]
  path = str(write(tmp_path / "rows.jsonl", rows))
  config = make_config(
    **of_recorded(online, offline__rewards="environment", data__environment="own"),
  )
  config.data.path = config.evaluation.data.path = path
  train.train(config, tmp_path / "run")
  by_completion = {r["completion"]: r["reward"] for r in records}
  found = rollouts(tmp_path / "run", 0)
  assert len(found) == len(records) and {r["environment"] for r in found} == {"own"}
  assert all(r["reward"] == by_completion[r["completion"]] for r in found)


def test_groups_without_signal_are_drawn_past_where_that_is_asked_for(make_config, tmp_path):
  rows = ranked_rows(12, 2)
  for row in rows[::2]:
    row["group"] = [{**member, "rank": 1} for member in row["group"]]
  path = str(write(tmp_path / "rows.jsonl", rows))
  config = make_config(total_steps=2, data__path=path, dynamic_sampling__enabled=True)
  train.train(config, tmp_path / "run")
  for row in reported(tmp_path / "run")[:2]:
    assert row["rollout/no_signal_share"] == 0.0 and row["rollout/prompts"] == 4


def test_a_broken_row_stops_the_run_with_its_place(make_config, tmp_path):
  rows = ranked_rows(8, 3)
  del rows[5]["group"][1]["rank"]
  path = str(write(tmp_path / "broken.jsonl", rows))
  with pytest.raises(RowError, match=r"broken\.jsonl:6: response 2: no key 'rank'"):
    train.train(make_config(data__path=path), tmp_path / "run")
  config = make_config(data__path=path, data__on_error="skip", total_steps=2)
  train.train(config, tmp_path / "skipped")
  assert sum(row.get("data/broken_rows", 0) for row in reported(tmp_path / "skipped")) == 1


@pytest.mark.long
def test_missing_logprobs_are_reported_where_the_file_must_have_them(make_config, tmp_path):
  config = make_config(offline__behavior="file")
  with pytest.raises(RowError, match=r"train\.jsonl:\d+: response 1 has no logprobs"):
    train.train(config, tmp_path)


@pytest.mark.slow
def test_data_that_change_under_a_run_are_noticed(make_config, files, tmp_path):
  path = tmp_path / "train.jsonl"
  path.write_text(files["train"].read_text())
  config = make_config(data__path=str(path), total_steps=3)
  train.train(config, tmp_path / "run", stop=StopWhen(tmp_path / "run", 1))
  path.write_text(path.read_text().replace('"response": "', '"response": "z'))
  with pytest.raises(ValueError, match="the tokens of this group are not those"):
    train.train(config, tmp_path / "run")


@pytest.mark.long
def test_the_report_speaks_of_ranking_and_of_no_engine(plain):
  page = (plain / "report.html").read_text()
  run = run_data.load(plain)
  titles = [panel["title"] for panel in figures.panels([run])]
  assert "Policy against the behavior policy" in titles
  assert not any("engine" in title for title in titles)
  assert ("engine", "there_is_none") not in report.facts(run)
  assert "Accuracy, heldout" in page and "heldout/vowels" in page
  assert not [w for w in report.warnings_of(run) if "Engine and trainer" in w]


def test_what_cannot_work_is_said_all_at_once(make_config):
  config = make_config(
    mode="of_line",
    offline__rank_reward="liner",
  )
  assert any("mode must be one of" in message for message in train.validate(config))
  config = make_config(offline__rank_reward="liner", data__task="chain_sum", data__path=None)
  found = "\n".join(train.validate(config))
  assert "did you mean 'linear'" in found and "has none" in found
  config = make_config(offline__rewards="environment", data__environment="math2")
  assert any("math2" in message for message in train.validate(config))
  assert not list(train.validate(make_config(data__environment="math2")))
