"""Ages of tokens in batches: where they stand, in every layout; and that a batch can lack them."""

import dataclasses

import jax
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import layout, packing
from grpo_jax.learn import sharding
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def a_group(name, prompt_tokens, *versions):
  """Returns a group whose tokens were sampled by these versions; None: by the environment."""
  rollouts = tuple(
    Rollout(
      completion_ids=np.arange(len(own)),
      loss_mask=np.asarray([v is not None for v in own]),
      behavior_logprobs=np.zeros(len(own), np.float32),
      weight_versions=np.asarray([-1 if v is None else v for v in own], np.int32),
      finish_reason=FinishReason.STOP,
      reward=0.0,
    )
    for own in versions
  )
  return RolloutGroup(Prompt(name, np.zeros(prompt_tokens, np.int64), "none"), rollouts)


GROUPS = [
  a_group("a", 3, [2, 2, 3], [3, None, None, 4, 5]),
  a_group("b", 2, [5], [0, 1, 2, 3, 4, 5], [-1, 4]),
  a_group("c", 4, [4, 4, 4, 4]),
]
LAYOUTS = {
  "packed": {"shapes": (packing.Shape(4, 32, 32),)},
  "padded": {"shapes": (packing.Shape(8, 12, 12),), "share_prefixes": False, "pack": False},
  "microbatches": {"shapes": (packing.Shape(1, 16, 16),)},
  "minibatches": {"shapes": (packing.Shape(2, 32, 32),), "minibatches": 3},
}


def assemble(groups=None, **options):
  groups = GROUPS if groups is None else groups
  ones = [np.ones(len(group.rollouts), np.float32) for group in groups]
  return batching.assemble(groups, ones, **({"skip_zero_advantage": False} | options))


def test_ages_are_at_the_loss_tokens():
  made = assemble(GROUPS[:1], shapes=(packing.Shape(2, 12, 12),), step=6)
  [batch] = made.minibatches[0].microbatches
  np.testing.assert_array_equal(batch.loss_places[0], [3, 4, 5, 6, 9, 10, *[-1] * 6])
  np.testing.assert_array_equal(batch.ages[0], [4, 4, 3, 3, 2, 1, *[-1] * 6])
  np.testing.assert_array_equal(batch.ages[1], np.full(12, -1))
  assert batch.ages.dtype == np.int32


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_has_its_age_in_every_layout(name):
  made = assemble(**LAYOUTS[name], step=5)
  assert len(made.minibatches) == (3 if name == "minibatches" else 1)
  ages = [[batch.ages.astype(np.float32) for batch in one.microbatches] for one in made.minibatches]
  for group, found in zip(GROUPS, batching.per_rollout(made, ages, GROUPS), strict=True):
    for rollout, own in zip(group.rollouts, found, strict=True):
      versions = rollout.weight_versions
      expected = np.where(versions >= 0, 5 - versions, -1)
      np.testing.assert_array_equal(own[rollout.loss_mask], expected[rollout.loss_mask])
      assert np.isnan(own[~rollout.loss_mask]).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_a_step_batches_are_as_if_there_were_no_ages(name):
  without, aged = assemble(**LAYOUTS[name]), assemble(**LAYOUTS[name], step=5)
  for one, other in zip(without.minibatches, aged.minibatches, strict=True):
    for plain, batch in zip(one.microbatches, other.microbatches, strict=True):
      assert plain.ages is None
      assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(batch)) - 1
      for field in dataclasses.fields(plain):
        if field.name != "ages":
          np.testing.assert_array_equal(getattr(plain, field.name), getattr(batch, field.name))


def test_a_token_newer_than_the_step_is_refused():
  with pytest.raises(ValueError, match="step 4 must be sampled by .* version 4, got version 5"):
    assemble(**LAYOUTS["packed"], step=4)


def test_described_batches_have_the_shapes_of_real_ones():
  [shape] = LAYOUTS["packed"]["shapes"]
  [batch] = assemble(shapes=(shape,), step=5).minibatches[0].microbatches
  described = layout.described(shape, has_ages=True)
  like = lambda tree: jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), tree)
  assert like(described) == like(batch)
  assert layout.described(shape).ages is None


def test_objectives_get_the_ages_also_from_a_mesh():
  mesh = sharding.make_mesh(data=4, fsdp=2, tensor=1)
  [batch] = assemble(shapes=(packing.Shape(8, 16, 16),), step=5).minibatches[0].microbatches
  placed = gather_loss_tokens(sharding.put(batch, mesh))
  np.testing.assert_array_equal(placed.ages, batch.ages)
  assert {shard.data.shape for shard in sharding.put(batch, mesh).ages.addressable_shards} == {
    (1, 16)
  }
