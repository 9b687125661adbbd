"""The rule of sampling ahead: nothing becomes too old, nothing is lost, nothing waits in vain."""

import random

import pytest

from grpo_jax.rollouts.admission import AdmissionQueue, AdmissionRule


@pytest.mark.long
def test_no_group_is_too_old_or_lost_in_two_thousand_random_schedules():
  overtaken = 0
  for seed in range(2000):
    draw = random.Random(seed)
    size = draw.randint(1, 6)
    rule = AdmissionRule(max_staleness=draw.randint(1, 4), groups_per_step=size)
    left = total = draw.randint(1, 30)
    queue, learned = AdmissionQueue(rule), []
    for step in range(total + 1):
      while left and queue.may_admit(min(size, left)):
        queue.admit(min(size, left), version=step)
        left -= min(size, left)
      assert queue.outstanding <= rule.capacity
      while (chosen := queue.choose(size, step)) is None:
        finish(queue, draw.choice(queue.unfinished), draw)
      ages = [step - queue.version_of(number) for number in chosen]
      assert all(0 <= age <= rule.max_staleness for age in ages), (seed, step)
      assert len(chosen) == min(size, total - len(learned))
      queue.take(chosen)
      late = any(number < max(chosen, default=0) for number in queue.unfinished)
      assert not (late and rule.in_turn)
      overtaken += late
      learned += chosen
      for number in queue.unfinished:
        if draw.random() < 0.3:
          finish(queue, number, draw)
    assert sorted(learned) == list(range(total)), seed
    assert not rule.in_turn or learned == sorted(learned)
  assert overtaken


def finish(queue: AdmissionQueue, number: int, draw: random.Random) -> None:
  """Finishes a group; its tokens may be newer than its admission."""
  queue.finish(number, queue.version_of(number) + draw.randint(0, 1))


def admitted(*, k: int = 2, size: int = 2) -> AdmissionQueue:
  """Returns a ledger with all that may be admitted at version 0."""
  rule = AdmissionRule(max_staleness=k, groups_per_step=size)
  queue = AdmissionQueue(rule)
  while queue.may_admit(size):
    queue.admit(size, version=0)
  return queue


def test_a_step_takes_what_finished_first_as_long_as_the_others_keep_their_deadlines():
  queue = admitted()  # 0 … 5 at version 0, to be learned from at steps 0, 1 and 2.
  for number in (5, 4):
    queue.finish(number, 0)
  assert queue.choose(2, step=0) == [4, 5]
  queue.take([4, 5])
  queue.admit(2, version=1)
  queue.finish(6, 1)
  queue.finish(7, 1)
  # 0 … 3 fill steps 1 and 2, whose deadline is 2: nothing newer finds room in step 1.
  assert queue.choose(2, step=1) is None
  queue.finish(3, 0)
  assert queue.choose(2, step=1) is None
  queue.finish(0, 0)
  assert queue.choose(2, step=1) == [0, 3]


def test_one_step_ahead_a_step_waits_for_the_groups_of_the_next_prompts():
  queue = admitted(k=1)
  for number in (3, 2, 1):
    queue.finish(number, 0)
  assert queue.choose(2, step=0) is None
  queue.finish(0, 0)
  assert queue.choose(2, step=0) == [0, 1]


def test_what_is_too_old_is_named_and_begins_again():
  queue = admitted()  # 0 … 5, to be learned from at step 2 at the latest.
  for number in (0, 1, 4, 5):
    queue.finish(number, 0)
  queue.finish(2, 1)  # sampled by weights that came after its admission.
  assert queue.too_old(2) == []
  assert queue.too_old(3) == [0, 1, 3, 4, 5]
  queue.restart([0, 1, 3, 4, 5], version=3)
  assert queue.too_old(3) == [] and queue.unfinished == (0, 1, 3, 4, 5)
  assert queue.choose(1, step=3) == [2]


def test_groups_that_a_step_holds_count_as_outstanding_and_have_deadlines():
  queue = admitted()  # 0 … 5, all to be learned from at step 2 at the latest.
  assert not queue.may_admit(1)
  for number in (5, 4, 3):
    queue.finish(number, 0)
  queue.take([5, 4])
  queue.finish(2, 0)
  queue.finish(0, 0)
  queue.take([3, 2, 0])
  assert queue.may_admit(4, held=1) and not queue.may_admit(5, held=1)
  queue.admit(1, version=2)  # 6.
  queue.finish(6, 2)
  queue.finish(1, 0)
  # One held group is due at step 2 as well: of its two places, the other one is for 1.
  assert queue.choose(1, step=2, held=[0]) == [1]


def test_a_restored_queue_continues_with_the_numbers():
  queue = AdmissionQueue(AdmissionRule(max_staleness=1, groups_per_step=2), first=7)
  queue.restore(5, version=3)
  assert list(queue.admit(2, version=4)) == [7, 8]
  assert queue.version_of(5) == 3 and queue.unfinished == (5, 7, 8)
