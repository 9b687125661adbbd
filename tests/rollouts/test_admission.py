"""The rule of sampling ahead: nothing becomes too old, nothing is lost, nothing waits in vain."""

import random

from grpo_jax.rollouts.admission import Ledger, Rule


def test_no_group_is_too_old_or_lost_in_two_thousand_random_schedules():
  overtaken = 0
  for seed in range(2000):
    draw = random.Random(seed)
    size = draw.randint(1, 6)
    rule = Rule(max_staleness=draw.randint(1, 4), groups_per_step=size)
    left = total = draw.randint(1, 30)
    ledger, learned = Ledger(rule), []
    for step in range(total + 1):
      while left and ledger.may_admit(min(size, left)):
        ledger.admit(min(size, left), version=step)
        left -= min(size, left)
      assert ledger.outstanding <= rule.capacity
      while (chosen := ledger.choose(size, step)) is None:
        finish(ledger, draw.choice(ledger.unfinished), draw)
      ages = [step - ledger.version_of(number) for number in chosen]
      assert all(0 <= age <= rule.max_staleness for age in ages), (seed, step)
      assert len(chosen) == min(size, total - len(learned))
      ledger.take(chosen)
      late = any(number < max(chosen, default=0) for number in ledger.unfinished)
      assert not (late and rule.in_turn)
      overtaken += late
      learned += chosen
      for number in ledger.unfinished:
        if draw.random() < 0.3:
          finish(ledger, number, draw)
    assert sorted(learned) == list(range(total)), seed
    assert not rule.in_turn or learned == sorted(learned)
  assert overtaken


def finish(ledger: Ledger, number: int, draw: random.Random) -> None:
  """Finishes a group; its tokens may be newer than its admission."""
  ledger.finish(number, ledger.version_of(number) + draw.randint(0, 1))


def admitted(*, k: int = 2, size: int = 2) -> Ledger:
  """Returns a ledger with all that may be admitted at version 0."""
  rule = Rule(max_staleness=k, groups_per_step=size)
  ledger = Ledger(rule)
  while ledger.may_admit(size):
    ledger.admit(size, version=0)
  return ledger


def test_a_step_takes_what_finished_first_as_long_as_the_others_keep_their_deadlines():
  ledger = admitted()  # 0 … 5 at version 0, to be learned from at steps 0, 1 and 2.
  for number in (5, 4):
    ledger.finish(number, 0)
  assert ledger.choose(2, step=0) == [4, 5]
  ledger.take([4, 5])
  ledger.admit(2, version=1)
  ledger.finish(6, 1)
  ledger.finish(7, 1)
  # 0 … 3 fill steps 1 and 2, whose deadline is 2: nothing newer finds room in step 1.
  assert ledger.choose(2, step=1) is None
  ledger.finish(3, 0)
  assert ledger.choose(2, step=1) is None
  ledger.finish(0, 0)
  assert ledger.choose(2, step=1) == [0, 3]


def test_one_step_ahead_a_step_waits_for_the_groups_of_the_next_prompts():
  ledger = admitted(k=1)
  for number in (3, 2, 1):
    ledger.finish(number, 0)
  assert ledger.choose(2, step=0) is None
  ledger.finish(0, 0)
  assert ledger.choose(2, step=0) == [0, 1]


def test_what_is_too_old_is_named_and_begins_again():
  ledger = admitted()  # 0 … 5, to be learned from at step 2 at the latest.
  for number in (0, 1, 4, 5):
    ledger.finish(number, 0)
  ledger.finish(2, 1)  # sampled by weights that came after its admission.
  assert ledger.too_old(2) == []
  assert ledger.too_old(3) == [0, 1, 3, 4, 5]
  ledger.restart([0, 1, 3, 4, 5], version=3)
  assert ledger.too_old(3) == [] and ledger.unfinished == (0, 1, 3, 4, 5)
  assert ledger.choose(1, step=3) == [2]


def test_groups_that_a_step_holds_count_as_outstanding_and_have_deadlines():
  ledger = admitted()  # 0 … 5, all to be learned from at step 2 at the latest.
  assert not ledger.may_admit(1)
  for number in (5, 4, 3):
    ledger.finish(number, 0)
  ledger.take([5, 4])
  ledger.finish(2, 0)
  ledger.finish(0, 0)
  ledger.take([3, 2, 0])
  assert ledger.may_admit(4, held=1) and not ledger.may_admit(5, held=1)
  ledger.admit(1, version=2)  # 6.
  ledger.finish(6, 2)
  ledger.finish(1, 0)
  # One held group is due at step 2 as well: of its two places, the other one is for 1.
  assert ledger.choose(1, step=2, held=[0]) == [1]


def test_a_restored_ledger_goes_on_with_the_numbers():
  ledger = Ledger(Rule(max_staleness=1, groups_per_step=2), first=7)
  ledger.restore(5, version=3)
  assert list(ledger.admit(2, version=4)) == [7, 8]
  assert ledger.version_of(5) == 3 and ledger.unfinished == (5, 7, 8)
