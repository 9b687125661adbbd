"""Every option about rewards and groups, switched on in the real loop, does what it says.

Each row of the table runs one step with an engine that writes what a script says, up to the
update, and looks at what the run folder tells of it.
"""

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs.base
from grpo_jax import train
from grpo_jax.building import online, phases
from grpo_jax.engines.base import GenerationRequest
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.models import tiny
from grpo_jax.run_folder import keeper
from grpo_jax.types import Mean
from tests import rewards as rewards_module

MAX_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class StepOutput:
  """What a run of one step left."""

  metrics: dict
  records: list[dict]

  def column(self, name: str) -> np.ndarray:
    """A field of every rollout, NaN for null."""
    return np.asarray([record[name] for record in self.records], np.float64)

  def is_cut(self) -> np.ndarray:
    return np.asarray([record["finish_reason"] == "length" for record in self.records])

  def tokens(self) -> np.ndarray:
    return np.asarray([sum(record["loss_mask"]) for record in self.records])

  def is_learned(self) -> np.ndarray:
    """Whether a rollout went through the update."""
    return np.asarray([record["policy_logprobs"][0] is not None for record in self.records])


def completion(prompt: int, attempt: int) -> str:
  """What the engine writes: 1 to 9 letters; with the stop id 8 are too many."""
  return "aexioyuzw"[: 1 + (3 * attempt + prompt + attempt // 3) % 9]


def scripted_engine(config, folder, tokenizer, workdir):
  """In place of `online._engine`: the engine of the run, whatever is in the config."""

  def script(request: GenerationRequest) -> list[int]:
    row, _, attempt = request.request_id.rpartition(":")[2].partition("#")
    text = completion(int(row), int(attempt.partition(".")[0]))
    return [*tokenizer.encode(text).tolist(), *tokenizer.stop_ids]

  return FakeEngine(np.zeros((tokenizer.vocab_size, tokenizer.vocab_size)), script=script)


def no_update(state, minibatches, before, **_):
  """In place of `phases.learn`: only shows which tokens an update would have seen."""
  logprobs = [[jnp.zeros(m.loss_places.shape) for m in b.microbatches] for b in minibatches]
  changed = {"train/skipped_share": Mean(0.0, 1.0)}
  return dataclasses.replace(state, step=state.step + 1), changed, logprobs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns a function that runs one step and tells; `a__b=1` sets config.a.b."""
  folder = tmp_path_factory.mktemp("options")
  model = tiny.write(folder / "model")
  rows = folder / "rows.jsonl"
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(40)]
  rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = {}

  def once(reward="vowels", **options) -> StepOutput:
    key = json.dumps([reward, options])
    if key not in found:
      workdir = folder / str(len(found))
      config = make_config(model, rows, reward, options)
      assert not list(train.validate(config))
      train.train(config, workdir)
      found[key] = read(workdir)
    return found[key]

  first = jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: first)  # a run takes all there are.
    patch.setattr(online, "_engine", scripted_engine)
    patch.setattr(phases, "learn", no_update)
    patch.setattr(keeper.Keeper, "save", lambda _: None)
    patch.setattr(phases, "publish", lambda *_, **__: None)
    yield once


def make_config(model, rows, reward, options):
  settings = {
    "total_steps": 1,
    "model.path": str(model),
    "model.compute_dtype": "float32",
    "mesh.data": 1,
    "data.path": str(rows),
    "data.environment": "own",
    "data.shuffle": False,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 8,
    "rollout.max_tokens": 96,
    "sampling.max_tokens": MAX_TOKENS,
    "batching.row_tokens": 128,
    "batching.row_buckets": (128,),
    "batching.skip_zero_advantage": False,
    "loss.kl_coef": 0.0,
    "advantages.estimator": "dr_grpo",  # no scale, which would hide linear maps of rewards.
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "evaluation.every_steps": 0,
    "logging.sinks": ("jsonl", "console"),
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
    **{name.replace("__", "."): value for name, value in options.items()},
  }
  config = configs.base.get_config()
  config.environments = {"own": {"module": "function", "path": f"tests.rewards.{reward}"}}
  config.update_from_flattened_dict(settings)
  return config


def read(workdir: pathlib.Path) -> StepOutput:
  metrics = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0])
  lines = (workdir / "rollouts" / "step_000000.jsonl").read_text().splitlines()
  return StepOutput(metrics, [json.loads(line) for line in lines])


def centred(rewards) -> np.ndarray:
  """Advantages of Dr. GRPO."""
  groups = np.asarray(rewards).reshape(-1, 8)
  return (groups - groups.mean(axis=1, keepdims=True)).ravel()


@pytest.mark.long
def test_the_plain_run_is_worth_comparing_with(run):
  plain = run()
  assert 0.1 <= plain.is_cut().mean() < 0.9
  assert len(set(plain.tokens())) > 4 and len(set(plain.column("reward"))) > 2
  np.testing.assert_array_equal(plain.column("shaped_reward"), plain.column("reward"))
  np.testing.assert_allclose(plain.column("advantage"), centred(plain.column("reward")), atol=1e-6)
  assert plain.is_learned().all()
  assert not [name for name in plain.metrics if name.startswith(("shaping/", "dynamic"))]


def scaled(plain, changed):
  rewards = plain.column("reward")
  assert changed.metrics["shaping/clamped_share"] == (rewards > 0.125).mean() > 0
  return np.minimum(rewards, 0.125) / 0.125 * 3 - 1


def stopped_properly(plain, changed):
  return np.where(plain.is_cut(), 0.5, 1.0) * plain.column("reward")


def overlong(plain, changed):
  penalties = np.clip((plain.tokens() - 2) / 4, 0, 1)  # L_max 6, L_buf 4.
  assert changed.metrics["shaping/overlong_share"] == (penalties > 0).mean() > 0
  return plain.column("reward") - 0.5 * penalties


def overlong_without_floor(plain, changed):
  penalties = np.clip((plain.tokens() - 2) / 4, 0, None)
  assert penalties.max() == 1.5
  return plain.column("reward") - penalties


BUFFER = {"shaping__overlong_buffer_tokens": 4, "shaping__max_completion_tokens": 6}
SHAPINGS = {
  "scaling": (scaled, {"shaping__scale_from": (0, 0.125), "shaping__scale_to": (-1, 2)}),
  "stop_properly": (stopped_properly, {"shaping__stop_properly_coef": 0.5}),
  "overlong": (overlong, {**BUFFER, "shaping__overlong_penalty": 0.5}),
  "overlong_without_floor": (overlong_without_floor, {**BUFFER, "shaping__overlong_floor": False}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPINGS)
def test_shaping_changes_the_advantages_and_leaves_the_recorded_reward(name, run):
  expect, options = SHAPINGS[name]
  plain, changed = run(), run(**options)
  np.testing.assert_array_equal(changed.column("reward"), plain.column("reward"))
  expected = expect(plain, changed)
  np.testing.assert_allclose(changed.column("shaped_reward"), expected, atol=1e-6)
  np.testing.assert_allclose(changed.column("advantage"), centred(expected), atol=1e-6)
  assert np.abs(changed.column("advantage") - plain.column("advantage")).max() > 0.05
  assert changed.metrics["rollout/reward_mean"] == plain.metrics["rollout/reward_mean"]
  assert changed.metrics["shaping/reward_mean"] == pytest.approx(expected.mean(), abs=1e-6)


@pytest.mark.long
def test_the_overlong_penalty_ends_where_completions_are_cut_if_no_limit_is_given(run):
  changed = run(shaping__overlong_buffer_tokens=4)
  penalties = np.clip((changed.tokens() - MAX_TOKENS + 4) / 4, 0, 1)
  np.testing.assert_allclose(changed.column("shaped_reward"), changed.column("reward") - penalties)
  assert penalties.max() == 1.0


@pytest.mark.slow
def test_weights_of_components_are_learned_from(run):
  gdpo = {"advantages__estimator": "gdpo"}
  both = run("vowels_and_brevity", **gdpo)
  brevity = run("vowels_and_brevity", **gdpo, advantages__weights=(1.0, 0.0))
  vowels = run("vowels_and_brevity", **gdpo, advantages__weights=(0.0, 1.0))
  components = [record["reward_components"] for record in both.records]
  for changed, name in ((brevity, "brevity"), (vowels, "vowels")):
    own = np.asarray([component[name] for component in components]).reshape(-1, 8)
    spread = own.std(axis=1, ddof=1, keepdims=True)
    normal = (own - own.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread + 1e-6, 1)
    white = (normal - normal.mean()) / normal.std(ddof=1)
    np.testing.assert_allclose(changed.column("advantage"), white.ravel(), atol=1e-4)
  assert np.abs(both.column("advantage") - brevity.column("advantage")).max() > 0.1
  assert np.abs(both.column("advantage") - vowels.column("advantage")).max() > 0.1


@pytest.mark.long
def test_a_wrong_number_of_weights_names_the_components(run):
  with pytest.raises(ValueError, match=r"has 3 numbers.* 2 reward components.*: brevity, vowels"):
    run("vowels_and_brevity", advantages__estimator="gdpo", advantages__weights=(1, 1, 1))


@pytest.mark.long
def test_penalties_reach_gdpo_as_well(run):
  gdpo = {"advantages__estimator": "gdpo"}
  plain = run("vowels_and_brevity", **gdpo)
  for options in (BUFFER, {"shaping__stop_properly_coef": 0.0}):
    changed = run("vowels_and_brevity", **gdpo, **options)
    difference = changed.column("advantage") - plain.column("advantage")
    assert np.abs(difference).max() > 0.1


def maxrl(rewards, tokens):
  means = rewards.mean(axis=1, keepdims=True)
  return np.where(means > 0, (rewards - means) / np.where(means > 0, means, 1), 0)


def opo(rewards, tokens):
  return rewards - ((rewards * tokens).sum(axis=1) / tokens.sum(axis=1))[:, None]


def pass_at_k(rewards, tokens):
  pairs = list(itertools.combinations(range(8), 2))
  best = np.stack([rewards[:, pair].max(axis=1) for pair in pairs], axis=1)
  with_one = [best[:, [i in pair for pair in pairs]].mean(axis=1) for i in range(8)]
  centred = np.stack(with_one, axis=1) - best.mean(axis=1, keepdims=True)
  return centred / (best.std(axis=1, keepdims=True) + 1e-6)


def remax(rewards, tokens):
  texts = [completion(prompt, 8) for prompt in range(4)]  # the ninth attempt is the greedy one.
  greedy = [rewards_module.vowels("", text[:MAX_TOKENS], {}) for text in texts]
  return rewards - np.asarray(greedy)[:, None]


ESTIMATORS = {
  "maxrl": (maxrl, {}),
  "opo": (opo, {}),
  "pass_at_k": (pass_at_k, {"advantages__pass_k": 2}),
  "remax": (remax, {}),
}


@pytest.mark.long
@pytest.mark.parametrize(
  "name", ["remax", *(pytest.param(x, marks=pytest.mark.slow) for x in ESTIMATORS if x != "remax")]
)
def test_estimators_compute_advantages_of_the_groups_of_a_run(name, run):
  expect, options = ESTIMATORS[name]
  plain, changed = run(), run(advantages__estimator=name, **options)
  rewards, tokens = (x.reshape(4, 8) for x in (changed.column("reward"), changed.tokens()))
  expected = expect(rewards, tokens)
  np.testing.assert_allclose(changed.column("advantage"), expected.ravel(), rtol=1e-4, atol=1e-5)
  assert np.abs(changed.column("advantage") - plain.column("advantage")).max() > 0.02
  assert len(changed.records) == 32  # the greedy attempts are not among them,
  same = [name for name in plain.metrics if name.startswith("rollout/") and "greedy" not in name]
  assert same and all(changed.metrics[name] == plain.metrics[name] for name in same)  # nor counted.
  if name == "remax":
    greedy = (rewards - expected)[:, 0]
    assert changed.metrics["rollout/greedy_reward_mean"] == pytest.approx(greedy.mean())


@pytest.mark.long
def test_the_reward_of_greedy_attempts_is_shaped_like_the_others(run):
  plain = run(advantages__estimator="remax")
  changed = run(advantages__estimator="remax", shaping__scale_from=(0, 1), shaping__scale_to=(0, 3))
  np.testing.assert_allclose(changed.column("advantage"), 3 * plain.column("advantage"), atol=1e-5)


@pytest.mark.long
def test_the_reward_is_that_of_the_function_named(run):
  plain, other = run(), run("constant")
  assert set(other.column("reward")) == {1.0} != set(plain.column("reward"))


@pytest.mark.long
def test_dynamic_sampling_replaces_groups_without_signal(run):
  plain = run("vowels_of_some")
  changed = run("vowels_of_some", dynamic_sampling__enabled=True)
  assert plain.metrics["rollout/no_signal_share"] == 0.5  # prompts 0 and 3.
  assert changed.metrics["rollout/no_signal_share"] == 0.0
  names = lambda run: list(dict.fromkeys(record["prompt_id"] for record in run.records))
  assert names(plain) == [f"rows:0:{i}" for i in (0, 1, 2, 3)]
  assert names(changed) == [f"rows:0:{i}" for i in (1, 2, 4, 5)]
  assert changed.metrics["dynamic_sampling/surplus"] == 1.0
  assert changed.metrics["batch/loss_tokens"] == changed.tokens().sum()


@pytest.mark.long
def test_dynamic_sampling_looks_at_rewards_before_they_are_shaped(run):
  """A constant reward with an overlong penalty has signal, but not to dynamic sampling."""
  options = {"dynamic_sampling__enabled": True, "dynamic_sampling__on_limit": "train"}
  changed = run("constant", **options, **BUFFER, dynamic_sampling__max_rounds=2)
  assert changed.metrics["shaping/no_signal_share"] < 1.0
  assert changed.metrics["dynamic_sampling/limit_reached"] == 1.0
  assert changed.metrics["dynamic_sampling/discarded/no_signal"] == 8.0
  assert changed.metrics["filter/no_signal"] == 4.0
  assert changed.metrics["batch/optimizer_steps"] == 0.0


FILTERS = {
  "drop_no_signal": ("no_signal", {"filters__drop_no_signal": True}),
  "min_reward_mean": ("reward_mean_too_low", {"filters__min_reward_mean": 0.3}),
  "max_reward_mean": ("reward_mean_too_high", {"filters__max_reward_mean": 0.3}),
  "max_truncated_share": ("too_many_truncated", {"filters__max_truncated_share": 0.1}),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.long
def test_filtered_groups_are_not_learned_from(name, run):
  reason, options = FILTERS[name]
  plain, changed = run("vowels_of_some"), run("vowels_of_some", **options)
  dropped = changed.metrics[f"filter/{reason}"]
  assert plain.metrics[f"filter/{reason}"] == 0.0 < dropped
  assert plain.is_learned().all()
  assert changed.is_learned().sum() == 8 * (4 - dropped)


@pytest.mark.long
def test_groups_with_too_few_scored_completions_are_left_out(run):
  plain = run("broken_for_some", rollout__max_error_share=1.0)
  changed = run("broken_for_some", rollout__max_error_share=1.0, filters__min_scored=6)
  scored = np.isfinite(plain.column("reward")).reshape(-1, 8).sum(axis=1)
  assert plain.metrics["filter/too_few_scored"] == 0.0
  assert changed.metrics["filter/too_few_scored"] == (scored < 6).sum() > 0
  np.testing.assert_array_equal(changed.is_learned().reshape(-1, 8).any(axis=1), scored >= 6)


@pytest.mark.long
def test_a_round_of_dynamic_sampling_draws_the_configured_number_of_prompts(run):
  changed = run(
    "vowels_of_some", dynamic_sampling__enabled=True, dynamic_sampling__prompts_per_round=9
  )
  assert changed.metrics["dynamic_sampling/prompts"] == 9.0
  assert changed.metrics["dynamic_sampling/surplus"] == 2.0


@pytest.mark.long
def test_overlong_filtering_leaves_truncated_completions_in_the_baseline_only(run):
  plain, changed = run(), run(batching__drop_truncated=True)
  np.testing.assert_array_equal(changed.is_learned(), ~plain.is_cut())
  np.testing.assert_array_equal(changed.column("advantage"), plain.column("advantage"))
  assert changed.metrics["batch/left_out/truncated"] == plain.is_cut().sum()


@pytest.mark.long
def test_advantages_are_clipped(run):
  plain, changed = run(), run(advantages__clip_low=-0.02, advantages__clip_high=0.03)
  expected = np.clip(plain.column("advantage"), -0.02, 0.03)
  assert changed.metrics["batch/advantage_max"] == pytest.approx(0.03)
  assert plain.metrics["batch/advantage_max"] == pytest.approx(plain.column("advantage").max())
  assert plain.metrics["batch/advantage_std"] == pytest.approx(plain.column("advantage").std())
  np.testing.assert_allclose(changed.column("advantage"), expected, rtol=1e-6)
  assert np.abs(plain.column("advantage")).max() > 0.1


@pytest.mark.long
def test_a_reward_that_takes_too_long_costs_its_completion_only(run):
  options = {"rollout__environment_timeout_s": 0.4, "rollout__max_error_share": 1.0}
  options["rollout__environment_concurrency"] = 32
  plain, changed = run(), run("slow_for_some", **options)
  is_long = np.asarray([len(record["completion"]) > 4 for record in plain.records])
  assert changed.metrics["rollout/errors/timeout"] == is_long.sum() > 0
  np.testing.assert_array_equal(np.isnan(changed.column("reward")), is_long)
  np.testing.assert_array_equal(changed.is_learned(), ~is_long)
