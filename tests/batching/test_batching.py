"""What goes where in a batch, what is left out, and that all of it is counted."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import layout, packing
from grpo_jax.types import ExpertShape, FinishReason, Prompt, Rollout, RolloutGroup


def rollout(length, reward=1.0, first=100, **changes):
  fields = {
    "completion_ids": np.arange(first, first + length),
    "loss_mask": np.ones(length, bool),
    "behavior_logprobs": np.full(length, -0.5, np.float32),
    "weight_versions": np.zeros(length, np.int32),
    "finish_reason": FinishReason.STOP,
    "reward": reward,
  }
  return Rollout(**(fields | changes))


def group(prompt_length, *rollouts, name="p", weight=1.0):
  return RolloutGroup(Prompt(name, np.arange(prompt_length), "none", weight=weight), rollouts)


def ones(groups):
  return [np.ones(len(g.rollouts), np.float32) for g in groups]


def rows_of(length, rows=1):
  return (packing.Shape(rows, length, length),)


def assemble(groups, advantages=None, **options):
  advantages = ones(groups) if advantages is None else advantages
  usual = {"shapes": rows_of(64), "skip_zero_advantage": False}
  return batching.assemble(groups, advantages, **(usual | options))


def value(assembled, name):
  return assembled.metrics[f"batch/{name}"].value()


def test_row_holds_prompt_once_and_branches_after_it():
  # Prompt 0 1 2, completions 100 101 and 200: worked by hand.
  made = assemble([group(3, rollout(2), rollout(1, first=200))], shapes=rows_of(8))
  batch = made.minibatches[0].microbatches[0]
  expected = {
    "tokens": [0, 1, 2, 100, 101, 200, 0, 0],
    "segment_ids": [1, 1, 1, 1, 1, 1, 0, 0],
    "branch_ids": [0, 0, 0, 1, 1, 2, 0, 0],
    "positions": [0, 1, 2, 3, 4, 3, 0, 0],
    "predecessors": [0, 0, 1, 2, 3, 2, 6, 7],
    "loss_mask": [0, 0, 0, 1, 1, 1, 0, 0],
    "rollout_ids": [-1, -1, -1, 0, 0, 1, -1, -1],
    "advantages": [0, 0, 0, 1, 1, 1, 0, 0],
    "behavior_logprobs": [0, 0, 0, -0.5, -0.5, -0.5, 0, 0],
    "loss_places": [3, 4, 5, -1, -1, -1, -1, -1],
  }
  for name, row in expected.items():
    np.testing.assert_array_equal(getattr(batch, name)[0], row, err_msg=name)
  assert (made.minibatches[0].denominators.tokens, made.minibatches[0].denominators.sequences) == (
    3.0,
    2.0,
  )


def test_second_segment_of_a_row_points_into_itself():
  made = assemble([group(2, rollout(2)), group(3, rollout(2))], shapes=rows_of(16))
  batch = made.minibatches[0].microbatches[0]
  # The larger segment, of the second group, goes in first.
  np.testing.assert_array_equal(batch.segment_ids[0, :10], [1, 1, 1, 1, 1, 2, 2, 2, 2, 0])
  np.testing.assert_array_equal(batch.predecessors[0, :9], [0, 0, 1, 2, 3, 5, 5, 6, 7])
  np.testing.assert_array_equal(batch.rollout_ids[0, :9], [-1, -1, -1, 0, 0, -1, -1, 1, 1])


def test_environment_tokens_of_a_completion_are_not_learned_from():
  mask = np.asarray([True, False, False, True])
  logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
  made = assemble([group(2, rollout(4, loss_mask=mask, behavior_logprobs=logprobs))])
  batch = made.minibatches[0].microbatches[0]
  np.testing.assert_array_equal(batch.loss_places[0][batch.loss_places[0] >= 0], [2, 5])
  assert made.minibatches[0].denominators.tokens == 2.0
  assert value(made, "loss_tokens") == 2.0


def test_group_larger_than_a_row_is_split_and_repeats_its_prompt():
  groups = [group(4, *(rollout(6, first=100 * i) for i in range(1, 6)))]
  made = assemble(groups, shapes=rows_of(16, 4))
  tokens = np.asarray(made.minibatches[0].microbatches[0].tokens)
  assert (tokens[:, :4] == np.arange(4)).all(axis=1).sum() == 3  # two, two and one completion.
  assert {int(t) for t in tokens.ravel()} >= {100, 205, 300, 405, 500}
  assert made.minibatches[0].denominators.sequences == 5.0


@pytest.mark.parametrize(
  ("bad", "reason", "options"),
  [
    (group(3, rollout(62)), "too_long", {}),
    (group(40, rollout(2)), "prompt_too_long", {"max_prompt_tokens": 39}),
    (group(64, rollout(2)), "prompt_too_long", {}),
    (group(3, rollout(0)), "empty", {}),
    (
      group(3, rollout(2, loss_mask=np.zeros(2, bool))),
      "empty",
      {},
    ),
    (group(3, rollout(2, reward=float("nan"))), "unscorable", {}),
    (group(3, rollout(2, reward=float("inf"))), "unscorable", {}),
    (
      group(3, rollout(2, finish_reason=FinishReason.LENGTH)),
      "truncated",
      {"drop_truncated": True},
    ),
    (group(3, rollout(2), weight=0.0), "zero_weight", {}),
  ],
)
def test_completion_that_cannot_be_learned_from_is_left_out_and_counted(bad, reason, options):
  good = group(3, rollout(2))
  made = assemble([bad, good], **options)
  assert value(made, f"left_out/{reason}") == 1.0
  assert sum(value(made, f"left_out/{r}") for r in batching.LEFT_OUT) == 1.0
  assert made.minibatches[0].denominators.sequences == 1.0
  assert [(p.group, p.rollout) for p in made.placements] == [(1, 0)]
  alone = assemble([bad], **options)
  assert alone.minibatches == ()
  assert value(alone, "optimizer_steps") == 0.0


def test_truncated_completion_is_learned_from_unless_filtered():
  made = assemble([group(3, rollout(2, finish_reason=FinishReason.LENGTH))])
  assert made.minibatches[0].denominators.sequences == 1.0


def test_length_limits_are_inclusive():
  made = assemble([group(30, rollout(34))], max_prompt_tokens=30)
  assert made.minibatches[0].microbatches[0].tokens.shape[1] == 64
  assert value(made, "left_out/too_long") == 0.0


def test_no_signal_gives_no_minibatch():
  groups = [group(3, rollout(2), rollout(3)), group(2, rollout(4))]
  zeros = [np.zeros(2, np.float32), np.zeros(1, np.float32)]
  made = assemble(groups, zeros, skip_zero_advantage=True)
  assert made.minibatches == ()
  assert value(made, "skipped_zero_advantage") == 3.0
  assert assemble([], []).minibatches == ()


def test_skipped_zero_advantages_stay_in_the_denominators():
  groups = [group(3, rollout(2), rollout(3)), group(2, rollout(4))]
  advantages = [np.asarray([1.0, 0.0], np.float32), np.zeros(1, np.float32)]
  made = assemble(groups, advantages, skip_zero_advantage=True)
  assert made.minibatches[0].denominators.tokens == 9.0
  assert made.minibatches[0].denominators.sequences == 3.0
  assert int(made.minibatches[0].microbatches[0].loss_mask.sum()) == 2


def test_groups_of_unequal_size_go_into_minibatches_whole_and_in_order():
  groups = [group(2, *[rollout(3)] * n, name=str(n)) for n in (1, 4, 2, 3, 5)]
  made = assemble(groups, minibatches=2)
  by_step = [{p.group for p in made.placements if p.minibatch == m} for m in (0, 1)]
  assert by_step == [{0, 1, 2}, {3, 4}]
  assert [m.denominators.sequences for m in made.minibatches] == [7.0, 8.0]
  shapes = {b.tokens.shape for m in made.minibatches for b in m.microbatches}
  assert len(shapes) == 1
  assert len(assemble(groups[:2], minibatches=4).minibatches) == 2


def test_every_learned_token_is_predicted_by_a_token_of_its_own_context():
  rng = np.random.default_rng(0)
  groups = [
    group(int(rng.integers(1, 9)), *(rollout(int(n)) for n in rng.integers(1, 12, size=5)))
    for _ in range(7)
  ]
  made = assemble(groups, shapes=rows_of(40, 2))
  for batch in made.minibatches[0].microbatches:
    for b, row in enumerate(np.asarray(batch.loss_places)):
      for place in row[row >= 0]:
        before = int(batch.predecessors[b, place])
        assert before < place
        assert batch.segment_ids[b, before] == batch.segment_ids[b, place]
        assert batch.positions[b, before] == batch.positions[b, place] - 1
        assert batch.branch_ids[b, before] in (0, int(batch.branch_ids[b, place]))


def test_microbatches_of_a_step_have_shapes_of_the_plan_and_no_others():
  rng = np.random.default_rng(0)
  load = packing.Load(prompt=64, completion=64, longest=128, group=8, groups=4)
  plan = packing.plan(load, cost=packing.Cost(), microbatch_tokens=1024, rows_multiple=2)
  seen = set()
  for _ in range(20):
    lengths = rng.integers(1, 65, size=int(rng.integers(0, 9)))
    groups = [
      group(38, *(rollout(int(n)) for n in lengths)) for _ in range(int(rng.integers(1, 5)))
    ]
    made = assemble(groups, shapes=plan)
    batches = [b for minibatch in made.minibatches for b in minibatch.microbatches]
    seen |= {packing.Shape(*b.tokens.shape, b.loss_places.shape[1]) for b in batches}
    learned = sum(int(b.loss_mask.sum()) for b in batches)
    assert learned == len(groups) * int(lengths.sum())
    places = value(made, "rows") * value(made, "row_tokens")
    assert places == sum(b.tokens.size for b in batches)
  assert len(plan) == 3
  assert seen <= set(plan) and len(seen) > 1


def test_packing_efficiency_is_tokens_per_place():
  made = assemble([group(3, rollout(2), rollout(1))], shapes=rows_of(8))
  assert value(made, "packing_efficiency") == 6 / 8


@pytest.mark.parametrize(
  ("groups", "advantages", "options", "message"),
  [
    ([group(2, rollout(1))], [np.ones(2, np.float32)], {}, r"sizes \[1\].*\[2\]"),
    ([group(0, rollout(1))], None, {}, "no token"),
    (
      [group(2, rollout(1))],
      [np.full(1, np.nan, np.float32)],
      {},
      "advantage of rollout 0 .*must be finite, got nan",
    ),
    ([group(2, rollout(1))], None, {"minibatches": 0}, "minibatches must be at least 1"),
    ([group(2, rollout(1))], None, {"shapes": ()}, "shapes needs a shape"),
    (
      [group(2, rollout(1))],
      None,
      {"shapes": (packing.Shape(1, 8, 4),)},
      "loss_tokens must be at least row_tokens",
    ),
  ],
)
def test_assemble_refuses_what_makes_no_sense(groups, advantages, options, message):
  with pytest.raises(ValueError, match=message):
    assemble(groups, advantages, **options)


def test_advantages_of_unscorable_rollouts_are_not_read():
  groups = [group(2, rollout(1, reward=float("nan")), rollout(2))]
  made = assemble(groups, [np.asarray([np.nan, 1.0], np.float32)])
  assert made.minibatches[0].denominators.tokens == 2.0


def test_repeated_prompts_are_counted():
  made = assemble([group(4, *[rollout(6)] * 3)], shapes=rows_of(16, 2))
  assert value(made, "repeated_prompt_tokens") == 4.0
  assert value(made, "packing_efficiency") == (16 + 10) / 32
  assert value(assemble([group(4, rollout(6), rollout(2))]), "repeated_prompt_tokens") == 0.0


def test_weights_are_on_the_tokens_of_a_completion_and_in_the_denominators():
  half, own = group(2, rollout(2), rollout(1), weight=0.5), group(3, rollout(3, weight=4.0))
  none = group(1, rollout(2, weight=0.0), rollout(1))
  made = assemble([half, own, none], shapes=rows_of(32))
  (batch,) = made.minibatches[0].microbatches
  by_length = {3: 4.0, 2: 0.5, 1: None}
  lengths = collections.Counter(batch.rollout_ids[0].tolist())
  for place, weight in zip(batch.loss_places[0], batch.weights[0], strict=True):
    if place < 0:
      assert weight == 0.0
    elif (expected := by_length[lengths[int(batch.rollout_ids[0, place])]]) is not None:
      assert weight == expected
  assert sorted(batch.weights[0][batch.loss_places[0] >= 0]) == [0.5] * 3 + [1.0] + [4.0] * 3
  counts = made.minibatches[0].denominators
  assert (counts.tokens, counts.sequences) == (0.5 * 3 + 4 * 3 + 1, 0.5 * 2 + 4 + 1)
  assert value(made, "loss_tokens") == 7.0 and value(made, "left_out/zero_weight") == 1.0
  places = batch.loss_places[0][batch.loss_places[0] >= 0]
  np.testing.assert_array_equal(batch.advantages[0][places], np.ones(7))


def test_batches_have_weights_only_if_one_is_not_1_or_the_run_expects_one():
  plain = group(2, rollout(2), weight=1.0), group(2, rollout(2), weight=0.0)
  assert assemble(plain).minibatches[0].microbatches[0].weights is None
  layouts = (
    layout.described(packing.Shape(1, 64, 64)),
    layout.described(packing.Shape(1, 64, 64), has_weights=True),
  )
  weighted = assemble([*plain, group(1, rollout(1), weight=0.5)]).minibatches[0].microbatches[0]
  shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
  expected = assemble(plain, weighted=True).minibatches[0]
  assert shapes(expected.microbatches[0]) == shapes(weighted)
  assert expected.microbatches[0].weights.sum() == expected.denominators.tokens == 2.0
  assert shapes(layouts[1]) == shapes(weighted) and len(shapes(layouts[0])) + 1 == len(
    shapes(weighted)
  )


def test_passes_over_the_minibatches_are_counted():
  groups = [group(2, rollout(3), name=str(i)) for i in range(4)]
  once, twice = (assemble(groups, minibatches=2, passes=n) for n in (1, 2))
  counts = {"loss_tokens": 12.0, "optimizer_steps": 2.0, "microbatches": 2.0}
  assert {name: value(once, name) for name in counts} == counts
  assert {name: value(twice, name) for name in counts} == {k: 2 * v for k, v in counts.items()}
  assert value(once, "rows") == value(twice, "rows")


def test_experts_lie_at_the_tokens_that_they_were_recorded_of():
  shape = ExpertShape(layers=2, chosen=1, experts=9)
  record = lambda *experts: np.broadcast_to(
    np.asarray(experts, np.int8)[:, None, None], (len(experts), 2, 1)
  )
  known = group(3, rollout(2, experts=record(4, 5)), rollout(1, experts=record(-1)))
  known = dataclasses.replace(known, prompt_experts=record(1, 2, 3))
  made = assemble([known, group(2, rollout(1))], shapes=rows_of(12), experts=shape)
  batch = made.minibatches[0].microbatches[0]
  assert batch.experts.dtype == np.int8 and batch.experts.shape == (1, 12, 2, 1)
  assert batch.experts[0, :, 1, 0].tolist() == [1, 2, 3, 4, 5, -1, *[-1] * 6]
  described = layout.described(rows_of(12)[0], experts=shape).experts
  assert (described.shape, described.dtype) == (batch.experts.shape, batch.experts.dtype)
  (alone,) = assemble([known]).minibatches
  assert alone.microbatches[0].experts is None
