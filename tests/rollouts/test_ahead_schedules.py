"""Sampling ahead under random schedules: dynamic sampling, kills, other bounds; and failures."""

import json
import logging
import random

import pytest

from grpo_jax.groups import group_json
from grpo_jax.interrupts import Stopped
from grpo_jax.rollouts import stream
from tests.rollouts.shuffled import Numbers, Shuffled, group, number_of, opened


def drawn(seed):
  """Returns a random kind of run."""
  draw = random.Random(seed)
  per_step, k = draw.randint(1, 5), draw.randint(1, 4)
  is_dynamic = draw.random() < 0.6
  count = draw.randint(0, 60)
  useless = {n for n in range(count) if is_dynamic and draw.random() < draw.choice([0.1, 0.5, 0.8])}
  kind = {
    "per_step": per_step,
    "max_staleness": k,
    "count": count,
    "useless": useless,
    "total_steps": draw.choice([10**6, 3, 7]),
    "block": draw.randint(1, k * per_step) if is_dynamic else per_step,
  }
  if is_dynamic:
    of_round = {"prompts_per_round": kind["block"], "max_rounds": 1000, "on_limit": "train"}
    kind["dynamic"] = stream.DynamicSampling(**of_round)
  return kind, draw


def changed(kind, draw):
  """Returns the same run with other bounds."""
  per_step, k = draw.randint(1, 5), draw.randint(1, 4)
  is_dynamic = "dynamic" in kind
  block = draw.randint(1, k * per_step) if is_dynamic else per_step
  more = {"per_step": per_step, "max_staleness": k, "block": block}
  if is_dynamic:
    of_round = {"prompts_per_round": block, "max_rounds": 1000, "on_limit": "train"}
    more["dynamic"] = stream.DynamicSampling(**of_round)
  return kind | more


def learned_from(kind, draw, *, changes):
  """Runs to the end, stopped here and there; returns the prompts, and whether the data ended."""
  state, learned, step, is_over = {}, [], 0, False
  while step < kind["total_steps"] and not is_over:
    if changes and state:
      kind = changed(kind, draw)
    attempts = Shuffled(draw.random(), version=step)
    made = opened(attempts, state=state, **kind)
    for _ in range(draw.randint(1, 4)):
      if step == kind["total_steps"]:
        break
      groups = made.take(step)
      is_over = not groups
      if is_over or draw.random() < 0.2:
        break  # killed before the step is learned: the state is the one before it.
      check(groups, step, made, kind, is_changed=changes)
      for _ in range(draw.choice([0, 1, 20])):
        if attempts.in_flight:
          attempts.finish_one()
      made.settle()
      step += 1
      attempts.version = step
      learned += [n for n in map(number_of, groups) if n not in kind["useless"]]
      state = json.loads(json.dumps(made.state()))
  return learned, is_over


def check(groups, step, made, kind, *, is_changed):
  source = made._source
  assert len(groups) == kind["per_step"] or source._is_over
  if is_changed:
    return  # a surplus may be older than a bound that was larger before.
  for versions in (g.rollouts[0].weight_versions[g.rollouts[0].loss_mask] for g in groups):
    assert all(0 <= step - version <= kind["max_staleness"] for version in versions)
  held = source._queue.outstanding + len(made._surplus)
  assert held <= (kind["max_staleness"] + 1) * kind["per_step"]


@pytest.mark.parametrize("changes", [False, True], ids=["same_bounds", "other_bounds"])
@pytest.mark.long
def test_every_prompt_is_learned_from_once_and_none_too_late(changes, caplog):
  caplog.set_level(logging.ERROR)
  ends = 0
  for seed in range(150):
    kind, draw = drawn(seed)
    learned, is_over = learned_from(kind, draw, changes=changes)
    assert len(learned) == len({*learned}), seed
    if is_over:
      ends += 1
      assert sorted(learned) == sorted({*range(kind["count"])} - kind["useless"]), seed
    if kind["max_staleness"] == 1 and not changes:
      assert learned == sorted(learned), seed
  assert ends > 50


def test_a_surplus_of_a_larger_bound_is_learned_from_with_a_warning(caplog):
  left = [group_json.encode(group(prompt, 0, 1)) for prompt in Numbers(3).take(3)]
  made = opened(
    Shuffled(0, version=2),
    per_step=2,
    max_staleness=1,
    dynamic=stream.DynamicSampling(),
    state={"prompts": {"position": 3}, "surplus": left},
  )
  assert [number_of(each) for each in made.take(2)] == [0, 1]
  assert "3 groups that an earlier step left over are older than rollout.max_staleness=1" in (
    caplog.text
  )


def test_groups_that_are_too_old_for_a_smaller_bound_are_sampled_again(caplog):
  caplog.set_level(logging.INFO)
  attempts = Shuffled(0)
  made = opened(attempts, max_staleness=3)
  for step in range(3):
    made.take(step)
    while attempts.in_flight:
      attempts.finish_one()
    attempts.version = step + 1
  state = json.loads(json.dumps(made.state()))
  later = Shuffled(0, version=3)
  again = opened(later, max_staleness=1, state=state)
  ages = [3 - g.rollouts[0].weight_versions.min() for g in again.take(3)]
  assert max(ages) <= 1 and len(ages) == 4
  assert "8 groups are too old for rollout.max_staleness=1" in caplog.text


# --- what goes wrong while a step is learned ---


class Failing(Shuffled):
  """Attempts that fail once `error` is set."""

  error: BaseException | None = None

  def wait(self, stop=False):
    if self.error is not None:
      raise self.error
    super().wait(stop)


@pytest.mark.parametrize("error", [LookupError("the engine is lost"), Stopped()], ids=str)
def test_before_an_update_what_happens_ends_the_run_at_once(error):
  attempts = Failing(0, slow=range(4, 8))
  made = opened(attempts, max_staleness=1)
  made.take(0)
  attempts.error = error
  with pytest.raises(type(error)):
    made.settle(has_learned=False)


def test_after_an_update_a_failure_ends_the_next_step():
  attempts = Failing(0, slow=range(4, 8))
  made = opened(attempts, max_staleness=1)
  made.take(0)
  attempts.error = LookupError("the engine is lost")
  made.settle(has_learned=True)
  state = json.loads(json.dumps(made.state()))  # is saved: the update is not lost.
  with pytest.raises(LookupError, match="the engine is lost"):
    made.take(1)
  again = opened(Shuffled(0, version=1), max_staleness=1, state=state)
  assert [number_of(each) for each in again.take(1)] == [4, 5, 6, 7]


def test_after_an_update_a_run_that_is_asked_to_end_says_what_is_sampled_again(caplog):
  attempts = Failing(0, slow=range(4, 8))
  made = opened(attempts, max_staleness=1)
  made.take(0)
  attempts.error = Stopped()
  made.settle(has_learned=True)
  assert "4 groups are still under way" in caplog.text
  again = opened(Shuffled(0, version=1), max_staleness=1, state=made.state())
  assert [number_of(each) for each in again.take(1)] == [4, 5, 6, 7]


def test_groups_under_way_are_waited_for_a_while_when_the_run_is_asked_to_end(monkeypatch):
  from grpo_jax.rollouts import ahead

  now = [100.0]
  monkeypatch.setattr(ahead.time, "monotonic", lambda: now[0])
  asked: list[int] = []
  later = ahead._Later(asked, 10.0)
  assert not later
  now[0] += 50
  asked.append(1)
  assert not later  # the time begins when it is asked.
  now[0] += 9.9
  assert not later
  now[0] += 0.2
  assert later
