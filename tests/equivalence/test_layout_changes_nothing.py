"""Packing, prefixes, padding, order and microbatches leave loss and gradients as they are."""

import dataclasses
import functools

import equivalence_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.models import transformer


@functools.cache
def shared():
  """Loss and gradients with packed rows and shared prefixes."""
  return case.gradients(*case.ragged_groups())


MICROBATCHES = {"shapes": (packing.Shape(1, 32, 32),)}


@pytest.mark.long
@pytest.mark.parametrize(
  "layout",
  [
    pytest.param({"share_prefixes": False}, id="packed-rollouts"),
    pytest.param({"share_prefixes": False, "pack": False}, id="one-row-per-rollout"),
    pytest.param({"pack": False}, id="one-row-per-group"),
    pytest.param({"shapes": (packing.Shape(1, 150, 150),)}, id="one-long-row"),
  ],
)
def test_layout_changes_neither_loss_nor_gradients(layout):
  got = case.gradients(*case.ragged_groups(), **layout)
  layouts = [np.asarray(x[2].minibatches[0].microbatches[0].tokens) for x in (got, shared())]
  assert not np.array_equal(*layouts)  # else nothing was tested.
  case.assert_same(got, shared())


@pytest.mark.long
def test_microbatches_of_different_shapes_equal_one():
  shapes = (packing.Shape(3, 24, 24), packing.Shape(1, 18, 18))
  mixed = case.gradients(*case.ragged_groups(), shapes=shapes)
  batches = mixed[2].minibatches[0].microbatches
  assert {batch.tokens.shape for batch in batches} == {(3, 24), (1, 18)}
  assert len(batches) >= 3 and len(shared()[2].minibatches[0].microbatches) == 1
  assert mixed[2].metrics["batch/repeated_prompt_tokens"].value() > 0  # groups were split, too.
  case.assert_same(mixed, shared())


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["token_mean", "constant_length"])
def test_microbatches_and_prefixes_change_nothing_for_other_aggregations(aggregation):
  loss = {"kl_coef": 0.0, "aggregation": aggregation}
  if aggregation == "constant_length":
    loss["max_completion_tokens"] = 12
  measure = functools.partial(case.gradients, *case.ragged_groups(), loss=loss, has_layers=False)
  many = measure(**MICROBATCHES, share_prefixes=False)
  assert len(many[2].minibatches[0].microbatches) >= 4
  case.assert_same(many, measure())


@pytest.mark.long
def test_order_of_groups_and_rollouts_changes_nothing():
  groups, advantages = case.ragged_groups()
  order = np.random.default_rng(3).permutation(len(groups))
  turned = [type(groups[i])(groups[i].prompt, tuple(reversed(groups[i].rollouts))) for i in order]
  got = case.gradients(turned, [advantages[i][::-1] for i in order])
  case.assert_same(got, shared())


@pytest.mark.long
def test_leaving_zero_advantages_out_changes_nothing_without_kl_and_entropy():
  groups, advantages = case.ragged_groups()
  advantages[1][:] = 0
  advantages[3][1] = 0
  loss = {"kl_coef": 0.0, "aggregation": "token_mean"}
  measure = functools.partial(case.gradients, groups, advantages, loss=loss, has_layers=False)
  full, lean = measure(), measure(skip_zero_advantage=True)
  assert lean[2].metrics["batch/skipped_zero_advantage"].value() == 3
  assert lean[2].minibatches[0].denominators == full[2].minibatches[0].denominators
  case.assert_same(lean, full)


@pytest.mark.long
@pytest.mark.parametrize(("remat", "implementation"), [("none", "reference"), ("dots", None)])
def test_neither_rematerialisation_nor_the_kernel_changes_anything(remat, implementation):
  settings = {"remat": remat, "implementation": implementation}
  case.assert_same(case.gradients(*case.ragged_groups(), **settings), shared())


@functools.cache
def reinforce():
  """Returns the gradient of Σ factor · log π of the tokens of plain rows, compiled once."""
  model = transformer.Transformer(case.CONFIG)

  def total(params, tokens, factor):
    ones = jnp.ones_like(tokens)  # causal attention: what pads the end is not seen.
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = model.apply({"params": params}, tokens, positions, ones, None)
    logprobs = jax.nn.log_softmax(logits[:, :-1] @ params["embed"].T / 1.3, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[:, :, 0]
    return jnp.sum(chosen * factor[:, 1:])

  return jax.jit(jax.grad(total))


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_on_policy_gradient_is_that_of_reinforce_on_plain_sequences(aggregation):
  # With πθ = π_old the surrogate's gradient is -Σ A ∇log π / denominator. The
  # oracle gives every prompt + completion a row, shifts by slicing and takes the
  # log-softmax of all logits: it shares no layout with the trainer.
  groups, advantages = case.ragged_groups()
  loss = {"kl_coef": 0.0, "aggregation": aggregation}
  got = case.gradients(groups, advantages, loss=loss)
  rollouts = [(g.prompt.token_ids, r) for g in groups for r in g.rollouts]
  longest = max(len(prompt) + len(r.completion_ids) for prompt, r in rollouts)
  tokens = np.zeros((len(rollouts), longest), np.int32)
  factor = np.zeros((len(rollouts), longest), np.float32)  # of log π of each token.
  learned = sum(int(r.loss_mask.sum()) for _, r in rollouts)
  for i, ((prompt, r), advantage) in enumerate(
    zip(rollouts, np.concatenate(advantages), strict=True)
  ):
    end = len(prompt) + len(r.completion_ids)
    tokens[i, :end] = np.concatenate([prompt, r.completion_ids])
    of_sequence = len(rollouts) * int(r.loss_mask.sum())
    divisor = learned if aggregation == "token_mean" else of_sequence
    factor[i, len(prompt) : end] = -advantage * r.loss_mask / divisor
  expected = reinforce()(case.params(), tokens, factor)
  case.assert_trees_same(got[1], jax.device_get(expected))


@pytest.mark.long
def test_rollouts_left_out_do_not_touch_the_others():
  groups, advantages = case.ragged_groups()
  expected = case.gradients(groups, advantages)
  rng = np.random.default_rng(9)
  bad = case.group(rng, "bad", 5, (6, 90, 0))
  bad = case.replace(bad, 0, reward=float("nan"))
  overlong = case.group(rng, "overlong", 80, (3,))
  silent = case.group(rng, "silent", 4, (5,), weight=0.0)
  nan = np.full(3, np.nan, np.float32)
  got = case.gradients(
    [bad, *groups, overlong, silent],
    [nan, *advantages, np.ones(1, np.float32), np.ones(1, np.float32)],
  )
  case.assert_same(got, expected)


@pytest.mark.long
def test_prompt_weight_scales_what_is_learned_from_it():
  """The loss of 11 tokens of weight 1/2 and 9 of weight 1 is divided by 14.5, and not by 20."""
  rng = np.random.default_rng(4)
  whole = [case.group(rng, "a", 4, (5, 6)), case.group(rng, "b", 4, (4, 5))]
  weighted = [
    type(whole[0])(_with_weight(whole[0].prompt, 0.5), whole[0].rollouts),
    whole[1],
  ]
  advantages = [np.asarray([1.0, -2.0], np.float32), np.asarray([0.5, -1.0], np.float32)]
  settings = {"loss": {"kl_coef": 0.0, "aggregation": "token_mean"}, "has_layers": False}
  got = case.gradients(weighted, advantages, **settings)
  share = np.float32(20 / (0.5 * 11 + 9))
  expected = case.gradients(whole, [share * advantages[0] / 2, share * advantages[1]], **settings)
  case.assert_same(got, expected)


def test_per_rollout_brings_every_logprob_home():
  groups, advantages = case.ragged_groups()
  assembled = batching.assemble(
    groups,
    advantages,
    shapes=(packing.Shape(2, 32, 32),),
    minibatches=2,
    skip_zero_advantage=False,
  )
  # The token itself stands in for its logprob.
  values = [
    [
      np.take_along_axis(np.asarray(b.tokens), np.maximum(b.loss_places, 0), 1).astype(np.float32)
      for b in minibatch.microbatches
    ]
    for minibatch in assembled.minibatches
  ]
  home = batching.per_rollout(assembled, values, groups)
  for g, of_group in zip(groups, home, strict=True):
    for r, own in zip(g.rollouts, of_group, strict=True):
      np.testing.assert_array_equal(own, np.where(r.loss_mask, r.completion_ids, np.nan))


def _with_weight(prompt, weight):
  return type(prompt)(prompt.prompt_id, prompt.token_ids, prompt.environment, weight=weight)


def weighed(groups, *weights):
  """Returns the groups with a weight each; the first completion has half of it."""

  def of(one, weight):
    prompt = dataclasses.replace(one.prompt, weight=weight)
    first = dataclasses.replace(one.rollouts[0], weight=0.5)
    return type(one)(prompt, (first, *one.rollouts[1:]))

  return [of(one, weight) for one, weight in zip(groups, weights, strict=True)]


@pytest.mark.long
def test_weighted_completions_are_learned_from_alike_in_any_layout():
  groups, advantages = case.ragged_groups()
  settings = {"loss": {"kl_coef": 0.1, "entropy_coef": 0.05}, "has_layers": False}
  expected = case.gradients(weighed(groups, 0.5, 1.0, 0.5, 1.5, 0.0), advantages, **settings)
  # Twice as much of all, the fourth group three times, in one sweep, over microbatches.
  several = weighed([*groups[:3], *[groups[3]] * 3], 1.0, 2.0, 1.0, 1.0, 1.0, 1.0)
  layout = MICROBATCHES | {"share_prefixes": False, "one_sweep": True}
  several_advantages = [*advantages[:3], *[advantages[3]] * 3]
  got = case.gradients(several, several_advantages, **settings, **layout)
  case.assert_same(got, expected)
  plain = case.gradients(groups[:4], advantages[:4], **settings)
  assert abs(plain[0] - expected[0]) > 1e-3  # else nothing was tested.
