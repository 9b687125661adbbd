"""The whole loop on a tiny model: what a run leaves, resuming, stopping, and that it learns."""

import json
import pathlib
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import transformers

import configs.base
from grpo_jax import metrics, train
from grpo_jax.building import exporting
from grpo_jax.config.configuration import ConfigError
from grpo_jax.data.formats import RowError
from grpo_jax.models import loading, tiny
from grpo_jax.run_folder import checkpointing, evaluation_log

pytestmark = pytest.mark.usefixtures("one_device")


class StopWhen:
  """A flag that is up once a run has written so many lines of metrics, and is looked at again."""

  def __init__(self, workdir: pathlib.Path, lines: int, looks: int = 0):
    self.workdir, self.lines, self.looks = workdir, lines, looks

  def __bool__(self) -> bool:
    file = self.workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if sum("weight_version" in line for line in lines) < self.lines:
      return False
    self.looks -= 1
    return self.looks < 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("data") / "rows.jsonl"
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(23)]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  held_out = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(23, 29)]
  path.with_name("held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in held_out))
  return path


@pytest.fixture(scope="module")
def make_config(model, rows):
  """Returns a function that makes the config of a run of seconds; `a__b=1` sets config.a.b."""

  def make(reward="vowels", **overrides):
    settings = {
      "total_steps": 3,
      "model__path": str(model),
      "model__compute_dtype": "float32",
      "mesh__data": 1,
      "data__path": str(rows),
      "evaluation__data__path": str(rows.with_name("held_out.jsonl")),
      "data__environment": "own",
      "rollout__prompts_per_step": 3,
      "rollout__group_size": 8,
      "rollout__max_tokens": 96,
      "sampling__max_tokens": 8,
      "engine__max_rows": 16,
      "batching__row_tokens": 128,
      "batching__microbatch_tokens": 128,  # one shape, which is compiled once.
      "loss__kl_coef": 0.0,
      "optim__learning_rate": 1e-2,
      "evaluation__every_steps": 2,
      "evaluation__num_prompts": 4,
      "checkpoint__every_steps": 1,
      "checkpoint__keep_last": None,
      "logging__sinks": ("jsonl", "console"),
      **overrides,
    }
    config = configs.base.get_config()
    config.environments = {"own": {"module": "function", "path": f"tests.rewards.{reward}"}}
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in settings.items()})
    return config

  return make


@pytest.fixture(scope="module")
def plain(make_config, tmp_path_factory) -> pathlib.Path:
  """The folder of an undisturbed run of three steps."""
  workdir = tmp_path_factory.mktemp("plain")
  train.train(make_config(), workdir)
  return workdir


UPDATES = {"learn__epochs": 2, "learn__minibatches": 2, "loss__kl_coef": 0.05}


@pytest.fixture(scope="module")
def several_updates(make_config, tmp_path_factory) -> pathlib.Path:
  """The folder of an undisturbed run of four optimizer steps a batch."""
  workdir = tmp_path_factory.mktemp("several-updates")
  train.train(make_config(**UPDATES), workdir)
  return workdir


def reported(workdir):
  """The lines of metrics.jsonl, without clocks and memory."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [metrics.reproducible(json.loads(line)) for line in lines]


def last_state(workdir):
  """The newest checkpoint's step, and every array of its state."""
  newest = checkpointing.open(workdir / "checkpoints").steps()[-1]
  folder = workdir / "checkpoints" / f"step_{newest:08d}" / "state"
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Orbax misses shardings, which arrays on the host have not.
    return newest, jax.tree.leaves(ocp.PyTreeCheckpointer().restore(folder))


def assert_same_state(one, other):
  (step, arrays), (other_step, other_arrays) = last_state(one), last_state(other)
  assert step == other_step and len(arrays) == len(other_arrays) > 20
  for a, b in zip(arrays, other_arrays, strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def weights(workdir):
  return jax.tree.leaves(loading.load(workdir / "export").params)


def assert_same_weights(one, other):
  for a, b in zip(weights(one), weights(other), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_run_leaves_what_tools_rely_on(make_config, tmp_path, capsys):
  template = tmp_path / "own.jinja"
  template.write_text(f"{{{{ mark }}}}{tiny.CHAT_TEMPLATE}")
  config = make_config(
    model__chat_template=str(template),
    logging__sinks=("jsonl", "tensorboard", "console"),
    loss__kl_coef=0.01,
    export__dtype="bfloat16",
    export__max_shard_gb=2e-5,
  )
  config.model.chat_template_args.mark = "!"
  train.train(config, tmp_path)
  left = {path.name for path in tmp_path.iterdir()}
  assert left >= {"config.json", "metrics.jsonl", "tensorboard", "rollouts", "checkpoints"}
  assert left >= {"export", "report.html"}
  index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
  files = sorted((tmp_path / "export").glob("*.safetensors"))
  assert len(files) > 2 and {path.name for path in files} == {*index["weight_map"].values()}
  assert index["metadata"]["total_size"] == 2 * sum(leaf.size for leaf in weights(tmp_path))
  rows = reported(tmp_path)
  assert [row["step"] for row in rows] == [0, 1, 2, 3]  # 3: the evaluation of the final weights.
  assert [row["weight_version"] for row in rows[:3]] == [0, 1, 2]
  assert {"eval/heldout/reward_mean", "rollout/reward_mean"} <= set(rows[0])
  # 0 but for rounding: scorer and update sum over the vocabulary in different orders.
  assert rows[1]["train/kl_to_reference"] > 1e-9 > 1e-12 > abs(rows[0]["train/kl_to_reference"])
  assert not metrics.unknown({name for row in rows for name in row if name != "step"})
  evaluated = [(name, step) for name, step, _ in evaluation_log.files(tmp_path)]
  assert evaluated == [("heldout", step) for step in (0, 2, 3)]
  line = (tmp_path / "evaluations" / "heldout" / "step_000002.jsonl").read_text().splitlines()[0]
  of_training = (tmp_path / "rollouts" / "step_000000.jsonl").read_text().splitlines()[0]
  assert json.loads(line).keys() == json.loads(of_training).keys()
  printed = capsys.readouterr().out
  assert "0/3" in printed and printed.count("model.remat='full'") == 1
  stored = json.loads((tmp_path / "config.json").read_text())
  assert stored["model"]["remat"] == "full" and stored["chosen_by_memory"] == ["model.remat"]
  ending = printed[printed.index("final weights:") :]
  assert f"final weights: {tmp_path / 'export'}\n" in ending and "from_pretrained" in ending
  assert ending.endswith(f"report: {tmp_path / 'report.html'} (open it in a browser)\n")
  template.unlink()  # a later export does not need it.
  again = exporting.run(str(tmp_path), tmp_path / "again").folder
  written = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
  assert {path.name: path.read_bytes() for path in again.iterdir()} == written
  reader = transformers.AutoTokenizer.from_pretrained(again)
  for row in rollouts_of_the_first_step(tmp_path):
    asked = row["prompt"].removeprefix("!<|im_start|>user\n").partition("<|im_end|>")[0]
    chat = [{"role": "user", "content": asked}]
    assert (
      reader.apply_chat_template(chat, add_generation_prompt=True).input_ids == row["prompt_ids"]
    )


def rollouts_of_the_first_step(workdir):
  lines = (workdir / "rollouts" / "step_000000.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.long
def test_recorded_rollouts_hold_the_trainers_logprobs_beside_the_engines(plain):
  records = rollouts_of_the_first_step(plain)
  assert len(records) == 3 * 8
  compared = 0
  for record in records:
    for ours, theirs in zip(record["policy_logprobs"], record["behavior_logprobs"], strict=True):
      if ours is not None:
        assert abs(ours - theirs) < 1e-5
        compared += 1
  assert compared > 30


def test_the_reward_rises(make_config, tmp_path):
  config = make_config(
    total_steps=25,
    evaluation__every_steps=0,
    checkpoint__every_steps=0,
  )
  train.train(config, tmp_path)
  rewards = [
    row["rollout/reward_mean"] for row in reported(tmp_path) if "rollout/reward_mean" in row
  ]
  assert np.mean(rewards[:3]) < 0.15
  assert np.mean(rewards[-3:]) > 0.5


@pytest.mark.long
@pytest.mark.parametrize(
  ("lines", "looks"), [(0, 0), (1, 1), (2, 0)], ids=["at_once", "later", "before_evaluating"]
)
def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(
  lines, looks, make_config, several_updates, tmp_path
):
  stop = StopWhen(tmp_path, lines, looks)
  train.train(make_config(**UPDATES), tmp_path, stop=stop)
  assert not (tmp_path / "export").exists()
  train.train(make_config(**UPDATES), tmp_path)
  assert reported(tmp_path) == reported(several_updates)
  assert_same_state(tmp_path, several_updates)
  assert_same_weights(tmp_path, several_updates)


# Steps 1 and 2 begin with groups that earlier weights sampled: the surplus.
DYNAMIC = {
  "reward": "vowels_of_some",
  "dynamic_sampling__enabled": True,
  "dynamic_sampling__prompts_per_round": 5,
  "shaping__overlong_buffer_tokens": 4,
  "evaluation__at_start": False,
  "evaluation__every_steps": 0,
  "evaluation__at_end": False,
}


@pytest.mark.slow
def test_a_run_with_dynamic_sampling_continues_with_its_surplus(make_config, tmp_path):
  unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
  train.train(make_config(**DYNAMIC), unbroken)
  train.train(make_config(**DYNAMIC), broken, stop=StopWhen(broken, 1, 1))  # in the second step.
  assert len(reported(broken)) == 1 and not (broken / "export").exists()
  train.train(make_config(**DYNAMIC), broken)
  steps = reported(unbroken)
  assert reported(broken) == steps
  assert_same_state(broken, unbroken)
  assert_same_weights(broken, unbroken)
  assert max(step["dynamic_sampling/from_surplus"] for step in steps) > 0
  assert max(step["rollout/staleness_max"] for step in steps) == 1.0
  assert [step["rollout/prompts"] for step in steps] == [3.0] * 3
  assert [step["rollout/no_signal_share"] for step in steps] == [0.0] * 3


@pytest.mark.long
def test_a_finished_run_with_more_steps_continues(make_config, plain, tmp_path):
  train.train(make_config(total_steps=2), tmp_path)
  train.train(make_config(total_steps=3), tmp_path)
  assert_same_weights(tmp_path, plain)


@pytest.mark.long
def test_other_seeds_give_other_runs(make_config, plain, tmp_path):
  config = make_config(total_steps=1)
  config.seed += 1
  train.train(config, tmp_path)
  one, other = (
    [record["behavior_logprobs"] for record in rollouts_of_the_first_step(run)]
    for run in (plain, tmp_path)
  )
  assert one != other


@pytest.mark.long
def test_drift_and_entropy_of_all_completions_are_known_without_a_kl_in_the_loss(plain):
  assert "NOTHING TO LEARN" not in (plain / "report.html").read_text()
  first, second, last = reported(plain)[:3]
  assert first["all/kl_to_initial"] == 0.0 < last["all/kl_to_initial"]
  assert "all/kl_to_initial" not in second and "train/kl_to_reference" not in second
  assert last["train/kl_to_reference"] == last["all/kl_to_initial"]  # k3, as by default.
  assert first["all/covered_token_share"] == 1.0 >= first["batch/computed_token_share"]
  # Where the update computes everything, both are of the same tokens.
  if first["batch/computed_token_share"] == 1.0:
    assert first["all/entropy"] == pytest.approx(first["train/entropy"], rel=1e-5)
  assert first["rollout/behavior_entropy"] == pytest.approx(first["all/approx_entropy"], rel=1e-4)


@pytest.mark.long
def test_steps_without_signal_change_nothing_and_are_counted(make_config, model, tmp_path, capsys):
  config = make_config(reward="constant", total_steps=2)
  train.train(config, tmp_path)
  rows = reported(tmp_path)
  assert [row["rollout/no_signal_share"] for row in rows[:2]] == [1.0, 1.0]
  assert [row["batch/optimizer_steps"] for row in rows[:2]] == [0.0, 0.0]
  assert [row["signal/lost_share"] for row in rows[:2]] == [1.0, 1.0]
  printed = capsys.readouterr().out
  assert "Step 0: NOTHING TO LEARN FROM" in printed
  assert "NOTHING WAS LEARNED FROM REWARDS in this run" in printed
  # Nothing is computed by the update, so all completions are measured.
  assert rows[0]["train/entropy"] == rows[0]["all/entropy"] > 0
  assert all(row["mismatch/sampling_importance_ratio"] == pytest.approx(1.0) for row in rows[:2])
  before = jax.tree.leaves(loading.load(model).params)
  for old, new in zip(before, weights(tmp_path), strict=True):
    np.testing.assert_array_equal(old, new)


@pytest.mark.long
def test_equal_weights_of_all_rows_train_the_same_and_a_weight_of_one_to_the_bit(
  make_config, rows, tmp_path
):
  """The estimator whitens; a weight of the rewards would be one of nothing."""
  lines = list(map(json.loads, rows.read_text().splitlines()))
  for name, weight in (("none", None), ("one", 1), ("half", 0.5), ("some", None)):
    (tmp_path / name).mkdir()
    weighted = lines if weight is None else [{**row, "loss_multiplier": weight} for row in lines]
    if name == "some":
      weighted = [{**row, "loss_multiplier": 0.25 + i % 2} for i, row in enumerate(lines)]
    path = tmp_path / name / "rows.jsonl"  # one name: prompts have the same ids, and seeds.
    path.write_text("".join(json.dumps(row) + "\n" for row in weighted))
    options = {"advantages__estimator": "reinforce_pp", "loss__kl_coef": 0.05}
    only = {"total_steps": 1, "evaluation__every_steps": 0, "optim__optimizer": "sgd"}
    only |= {"optim__weight_decay": 0.0, "optim__learning_rate": 1.0}
    train.train(make_config(data__path=str(path), **options, **only), tmp_path / name / "run")
  none, one, half, some = (tmp_path / name / "run" for name in ("none", "one", "half", "some"))
  assert_same_weights(one, none)
  for a, b, c in zip(weights(half), weights(none), weights(some), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert np.abs(c - b).max() > 1e-4
  logged = [rollouts_of_the_first_step(run)[0].get("loss_multiplier") for run in (one, half)]
  assert logged == [None, 0.5]


@pytest.mark.long
def test_the_run_ends_with_the_data(make_config, tmp_path, capsys):
  train.train(make_config(total_steps=50, data__epochs=1, evaluation__every_steps=0), tmp_path)
  assert "the data ended after 8 steps" in capsys.readouterr().out
  assert len([row for row in reported(tmp_path) if "rollout/prompts" in row]) == 8  # 23 rows, by 3.


@pytest.mark.long
def test_on_one_update_per_batch_the_ratio_is_one(plain):
  rows = [row for row in reported(plain) if "train/ratio_min" in row]
  assert rows
  for row in rows:
    assert row["train/ratio_min"] == row["train/ratio_max"] == 1.0


@pytest.mark.long
def test_later_updates_on_a_batch_see_the_logprobs_from_before_the_first(make_config, tmp_path):
  train.train(make_config(total_steps=1, learn__epochs=3), tmp_path)
  row = reported(tmp_path)[0]
  assert row["batch/optimizer_steps"] == 3.0 and row["batch/microbatches"] == 9.0  # of 3 epochs.
  assert row["train/ratio_max"] > 1.0 > row["train/ratio_min"]
  assert row["mismatch/abs_logprob_max"] < 1e-5  # old against behavior: the first policy's.


@pytest.mark.long
@pytest.mark.parametrize(
  "options",
  [
    pytest.param(
      {"advantages__estimator": "reinforce_pp", "loss__kl_in_reward": True, "loss__kl_coef": 0.1},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"advantages__estimator": "rloo", "loss__loss": "gspo", "loss__aggregation": "sequence_mean"},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      {"loss__entropy_coef": 0.01, "loss__loss": "cispo", "loss__importance_correction": "token"},
      marks=pytest.mark.slow,
    ),
    {"batching__drop_truncated": True, "filters__drop_no_signal": True},
  ],
  ids=["reinforce_pp", "gspo", "cispo", "filters"],
)
def test_every_kind_of_objective_trains(options, make_config, tmp_path):
  options = {**options, "evaluation__at_start": False, "evaluation__every_steps": 0}
  config = make_config(total_steps=2, **options)
  assert not list(train.validate(config))
  train.train(config, tmp_path)
  rows = [row for row in reported(tmp_path) if "train/loss" in row]
  assert rows and all(np.isfinite(row["train/grad_norm"]) for row in rows)


def test_what_cannot_work_is_said_all_at_once(make_config):
  config = make_config(
    total_steps=0,
    sampling__temperature=0.0,
    loss__dual_clip=0.5,
    evaluation__pass_k=(4,),
    advantages__estimator="grop",
    data__environment="math2",
  )
  found = "\n".join(train.validate(config))
  for expected in ("total_steps", "temperature", "dual_clip", "pass_k", "'grpo'", "math2"):
    assert expected in found


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"shaping__overlong_buffer_tokens": 9}, "from 1 to max_completion_tokens=8, got 9"),
    ({"shaping__scale_from": (1, 0)}, "scale_from must rise"),
    (
      {"shaping__overlong_buffer_tokens": 2, "shaping__max_completion_tokens": 20},
      "of more than 18 tokens, but none can have more than 8",
    ),
    (
      {"shaping__overlong_buffer_tokens": 2, "rollout__max_turns": 2},
      "needs shaping.max_completion_tokens where rollout.max_turns=2",
    ),
    (
      {"dynamic_sampling__max_rounds": 0},
      "dynamic_sampling.max_rounds must be an integer >= 1, got 0",
    ),
    (
      {
        "dynamic_sampling__enabled": True,
        "dynamic_sampling__max_rounds": 2,
        "dynamic_sampling__prompts_per_round": 1,
      },
      "draws at most 2 prompts per step, too few for rollout.prompts_per_step=3",
    ),
    (
      {
        "dynamic_sampling__enabled": True,
        "rollout__group_size": 1,
        "advantages__estimator": "reinforce_pp",
      },
      "no signal within a group",
    ),
    ({"export__dtype": "bfloat17"}, "export.dtype must be one of 'float32', 'bfloat16'"),
    ({"export__max_shard_gb": 0.0}, "export.max_shard_gb must be a finite number > 0"),
    ({"export__max_shard_gb": float("nan")}, "export.max_shard_gb must be a finite number > 0"),
    ({"filters__min_scored": 9}, "min_scored=9 is above rollout.group_size=8"),
    (
      {"filters__max_truncated_share": 2.0},
      "filters.max_truncated_share must be a finite number from 0 to 1",
    ),
  ],
)
def test_options_of_rewards_and_groups_that_cannot_work_are_named(options, expected, make_config):
  assert not list(train.validate(make_config()))
  assert expected in "\n".join(train.validate(make_config(**options)))


@pytest.mark.parametrize(
  ("row_tokens", "message"),
  [
    (
      3000,
      "rollout.max_tokens and batching.row_tokens let a prompt .* have 3000 tokens, but the"
      " model in .* reads 2048 .*: lower one of them",
    ),
    (None, "rollout.max_tokens lets a prompt .* have 4096 tokens, .*: lower it"),
  ],
)
def test_completions_beyond_the_models_context_are_refused_at_the_start(
  row_tokens, message, make_config, tmp_path
):
  config = make_config(rollout__max_tokens=4096, batching__row_tokens=row_tokens)
  with pytest.raises(ConfigError, match=message):
    train.train(config, tmp_path)


@pytest.mark.long
def test_a_broken_row_stops_the_run_with_its_place(make_config, rows, tmp_path):
  broken = tmp_path / "broken.jsonl"
  broken.write_text(rows.read_text().replace('"6 + 6"', "6 + 6"))
  config = make_config(data__path=str(broken), evaluation__data__path=str(rows), total_steps=9)
  with pytest.raises(RowError, match=r"broken\.jsonl:7"):
    train.train(config, tmp_path / "run")
  assert (tmp_path / "run" / "report.html").exists()
