"""Dynamic sampling: what fills a step, what is kept, where it ends, and that it resumes exactly."""

import dataclasses
import json
import math
import operator

import numpy as np
import pytest

from grpo_jax.groups import filters, group_json
from grpo_jax.rollouts import group_source, stream
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, Turn

NAN = float("nan")


class Numbers:
  """Prompts 0, 1, 2, …; a curriculum that listens."""

  def __init__(self, count: int = 1000, position: int = 0, weights=()):
    self.count, self.position, self.weights = count, position, dict(weights)
    self.heard: list[int] = []

  def take(self, n: int) -> list[Prompt]:
    first, self.position = self.position, min(self.position + n, self.count)
    return [
      Prompt(f"set:0:{i}", np.asarray([i], np.int32), "env", {"n": i}, f"{i}", self.weight(i))
      for i in range(first, self.position)
    ]

  def weight(self, i: int) -> float:
    return self.weights.get(i, 1.0)

  def state(self) -> dict[str, int]:
    return {"position": self.position}

  def metrics(self) -> dict[str, float]:
    return {"data/broken_rows": 1.0, "data/epoch": self.position / self.count}

  def record_metrics(self, step: int, metrics) -> None:
    self.heard.append(step)


def rollout(reward: float, step: int, **fields) -> Rollout:
  rng = np.random.default_rng([step, int(10 * abs(reward)) if math.isfinite(reward) else 99])
  length = int(rng.integers(1, 6))
  return Rollout(
    completion_ids=rng.integers(0, 1000, length).astype(np.int32),
    loss_mask=np.arange(length) != 1,
    behavior_logprobs=np.where(np.arange(length) != 1, -rng.random(length), 0).astype(np.float32),
    weight_versions=np.full(length, step, np.int32),
    finish_reason=FinishReason.STOP,
    reward=reward,
    **fields,
  )


def sampler(rewards_of):
  """Returns what samples groups with these rewards, by the number of the prompt."""

  def sample(prompts, step):
    return [
      RolloutGroup(p, tuple(rollout(r, step) for r in rewards_of(int(p.text)))) for p in prompts
    ]

  return sample


def every(k: int):
  """Every k-th prompt has signal."""
  return lambda n: (0.0, 1.0) if n % k == 0 else (0.5, 0.5)


def make(
  rewards_of, *, prompts=None, sample=None, size=3, surplus=(), by_component=False, **dynamic
):
  return stream.OnlineStream(
    group_source.SynchronousSource(prompts or Numbers(), sample or sampler(rewards_of)),
    prompts_per_step=size,
    dynamic=stream.DynamicSampling(**dynamic),
    keep=lambda groups: filters.apply(groups, drop_no_signal=True, by_component=by_component),
    surplus=surplus,
  )


def numbers_of(groups) -> list[int]:
  return [int(group.prompt.text) for group in groups]


def test_without_dynamic_sampling_a_step_takes_what_comes():
  made = stream.OnlineStream(
    group_source.SynchronousSource(Numbers(count=5), sampler(every(2))), prompts_per_step=3
  )
  assert [numbers_of(made.take(step)) for step in range(3)] == [[0, 1, 2], [3, 4], []]
  assert made.state() == {"prompts": {"position": 5}, "surplus": []}
  assert isinstance(made, stream.GroupStream)


def test_a_step_is_filled_with_groups_that_have_signal_and_the_rest_is_the_next_steps():
  made = make(every(2), prompts_per_round=4)
  assert numbers_of(made.take(0)) == [0, 2, 4]  # of 0 … 7
  reported = made.metrics()
  assert reported == {
    "data/broken_rows": 2.0,  # one a round.
    "data/epoch": 8 / 1000,
    "dynamic_sampling/rounds": 2.0,
    "dynamic_sampling/prompts": 8.0,
    "dynamic_sampling/reward_mean": 0.5,
    "dynamic_sampling/from_surplus": 0.0,
    "dynamic_sampling/surplus": 1.0,
    "dynamic_sampling/limit_reached": 0.0,
    **{
      f"dynamic_sampling/discarded/{reason}": 4.0 if reason == "no_signal" else 0.0
      for reason in (*filters.apply(()).dropped, "zero_weight")
    },
  }
  assert numbers_of(made.take(1)) == [6, 8, 10]
  assert made.metrics()["dynamic_sampling/from_surplus"] == 1.0
  assert made.metrics()["dynamic_sampling/rounds"] == 1.0
  assert made.metrics()["dynamic_sampling/surplus"] == 0.0


def test_nothing_with_signal_is_lost_or_given_twice():
  made = make(every(3), size=4, prompts_per_round=13)
  taken = [number for step in range(40) for number in numbers_of(made.take(step))]
  assert taken == list(range(0, 3 * 160, 3))


def test_a_surplus_that_fills_a_step_samples_nothing():
  made = make(every(1), size=2, prompts_per_round=6)
  assert [numbers_of(made.take(step)) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]
  assert made.metrics()["dynamic_sampling/rounds"] == 0.0
  assert math.isnan(made.metrics()["dynamic_sampling/reward_mean"])


def test_signal_is_that_of_the_scored_rewards_and_not_of_means():
  rewards = {0: (NAN, NAN), 1: (NAN, 1.0), 2: (0.4, 0.6), 3: (1.0, 1.0), 4: (NAN, 0.0, 1.0)}
  made = make(lambda n: rewards.get(n, (0.0, 1.0)), size=2, prompts_per_round=5)
  assert numbers_of(made.take(0)) == [2, 4]
  reported = made.metrics()
  assert reported["dynamic_sampling/discarded/no_signal"] == 2.0
  assert reported["dynamic_sampling/discarded/too_few_scored"] == 1.0


def test_prompts_of_weight_zero_fill_no_step():
  made = make(every(1), prompts=Numbers(weights={0: 0.0, 2: 0.0}), size=3)
  assert numbers_of(made.take(0)) == [1, 3, 4]
  assert made.metrics()["dynamic_sampling/discarded/zero_weight"] == 2.0


def test_failed_attempts_of_every_round_are_counted():
  def sample(prompts, step):
    failed = rollout(NAN, step, failure="timeout")
    return [RolloutGroup(p, (failed, rollout(0.5, step), rollout(0.5, step))) for p in prompts]

  made = make(every(1), sample=sample, max_rounds=4, on_limit="train")
  made.take(0)
  assert made.metrics()["rollout/errors/timeout"] == 12.0


def test_the_bound_raises_with_what_was_found_and_what_to_do():
  made = make(every(10), max_rounds=5)
  message = (
    r"drew 15 prompts in 5 rounds and has 2 of the 3 .*no_signal 13.*max_rounds.*on_limit='train'"
  )
  with pytest.raises(stream.TooFewGroups, match=message):
    made.take(0)


def test_a_step_filled_in_the_last_round_does_not_reach_the_bound():
  made = make(every(5), max_rounds=4)
  assert numbers_of(made.take(0)) == [0, 5, 10]
  assert made.metrics()["dynamic_sampling/rounds"] == 4.0
  assert made.metrics()["dynamic_sampling/limit_reached"] == 0.0


@pytest.mark.parametrize("k", [10, 1000])
def test_at_the_bound_the_step_may_continue_with_what_was_found(k, caplog):
  made = make(every(k), prompts=Numbers(position=1), max_rounds=4, on_limit="train")
  groups = made.take(0)
  found = [10] if k == 10 else []
  assert numbers_of(groups) == [*found, 1, 2, 3][:3]  # never none: the data has not ended.
  assert numbers_of(filters.apply(groups, drop_no_signal=True).kept) == found
  assert made.metrics()["dynamic_sampling/limit_reached"] == 1.0
  assert f"has {len(found)} of the 3 groups" in caplog.text
  assert made.state()["surplus"] == []


def test_the_end_of_the_data_is_not_a_failure_and_loses_no_surplus():
  made = make(every(2), prompts=Numbers(count=9), prompts_per_round=8, max_rounds=2)
  assert numbers_of(made.take(0)) == [0, 2, 4]
  assert numbers_of(made.take(1)) == [6, 8]
  assert made.metrics()["dynamic_sampling/limit_reached"] == 0.0
  assert made.take(2) == []
  last = make(every(2), prompts=Numbers(count=2, position=1))
  assert numbers_of(last.take(0)) == [1]  # shown, and left out by the loop's filters.
  assert last.take(1) == []


def same(one, other) -> bool:
  return json.dumps([group_json.encode(g) for g in one]) == json.dumps(
    [group_json.encode(g) for g in other]
  )


@pytest.mark.parametrize("per_round", [2, 5, 11])
def test_a_stream_made_again_from_its_state_continues_exactly(per_round):
  options = {"size": 4, "prompts_per_round": per_round}
  unbroken = make(every(3), **options)
  broken = make(every(3), **options)
  for step in range(12):
    expected = unbroken.take(step)
    assert same(broken.take(step), expected)
    assert broken.metrics() == pytest.approx(unbroken.metrics(), nan_ok=True)
    state = json.loads(json.dumps(broken.state(), allow_nan=False))
    assert state == unbroken.state()
    prompts = Numbers(**state["prompts"])
    broken = make(every(3), prompts=prompts, surplus=state["surplus"], **options)


def test_a_taken_step_that_was_not_learned_is_taken_again_from_the_state_before_it():
  made = make(every(2), prompts_per_round=5)
  made.take(0)
  state = made.state()
  expected = made.take(1)
  again = make(
    every(2),
    prompts=Numbers(**state["prompts"]),
    surplus=state["surplus"],
    prompts_per_round=5,
  )
  assert same(again.take(1), expected)


def test_groups_are_written_bit_for_bit():
  exotic = rollout(
    -0.1,
    3,
    text='é\n"\ud7ff',
    reward_components={"a": NAN, "b": 1 / 3},
    metrics={"m": math.inf},
    turn_log=(Turn(3, 2, 0.5), Turn(1, 0, NAN)),
    error="timeout: no answer",
  )
  empty = Rollout(
    completion_ids=np.zeros(0, np.int32),
    loss_mask=np.zeros(0, bool),
    behavior_logprobs=np.zeros(0, np.float32),
    weight_versions=np.zeros(0, np.int32),
    finish_reason=FinishReason.LENGTH,
    reward=NAN,
    turns=2,
  )
  prompt = Prompt("a:0:1", np.asarray([5, 6], np.int32), "env", text="text", weight=0.5)
  prompt = dataclasses.replace(prompt, info={"any": object(), "expected_answer": 7})
  prompt = dataclasses.replace(prompt, dataset="a", is_cut=True, stop_strings=("x",), where="f:1")
  made = RolloutGroup(prompt, (exotic, empty), exotic)
  text = json.dumps(group_json.encode(made), allow_nan=False)
  back = group_json.decode(json.loads(text))
  assert back.greedy is not None and back.greedy.text == exotic.text
  alone = group_json.encode(RolloutGroup(prompt, (empty,)))
  assert "greedy" not in alone and group_json.decode(alone).greedy is None
  assert (back.prompt.prompt_id, back.prompt.environment, back.prompt.text) == (
    "a:0:1",
    "env",
    "text",
  )
  assert back.prompt.weight == 0.5 and back.prompt.info == {"expected_answer": "7"}
  assert (
    back.prompt.dataset == "a"
    and back.prompt.where == "f:1"
    and back.prompt.is_cut
    and back.prompt.stop_strings == ()
  )
  for before, after in zip((exotic, empty), back.rollouts, strict=True):
    for name in ("completion_ids", "loss_mask", "behavior_logprobs", "weight_versions"):
      one, other = (operator.attrgetter(name)(made) for made in (before, after))
      assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    assert repr(before.reward) == repr(after.reward)
    assert repr(before.reward_components) == repr(after.reward_components)
    assert before.metrics == after.metrics and before.text == after.text
    assert (before.finish_reason, before.turns) == (after.finish_reason, after.turns)
    assert (repr(before.turn_log), before.error) == (repr(after.turn_log), after.error)


def test_components_that_differ_are_signal_where_they_are_learned_from():
  def sample(prompts, step):
    pair = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    return [
      RolloutGroup(p, tuple(rollout(1.0, step, reward_components=c) for c in pair)) for p in prompts
    ]

  def taken(by_component):
    options = {"sample": sample, "max_rounds": 2, "on_limit": "train"}
    made = make(every(1), by_component=by_component, **options)
    made.take(0)
    return made.metrics()["dynamic_sampling/limit_reached"]

  assert (taken(True), taken(False)) == (0.0, 1.0)


def test_prompts_that_listen_hear_of_every_step():
  listening = Numbers()
  made = make(every(1), prompts=listening)
  made.record_metrics(4, {"rollout/reward_mean": 0.5})
  assert listening.heard == [4]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_rounds": 0}, "max_rounds must be an integer >= 1"),
    ({"prompts_per_round": 0}, "prompts_per_round must be an integer >= 1"),
  ],
)
def test_senseless_bounds_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    stream.DynamicSampling(**options)
