"""Tokens chosen, and completions left out, over an optimizer step: the layout changes nothing.

A table of bigrams stands in for the transformer, so that little is compiled.
"""

import dataclasses
import functools

import equivalence_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.compilation.programs import Program
from grpo_jax.learn import optim, scoring, screening, selecting, sharding, train_step
from grpo_jax.rl import objectives
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.types import RolloutGroup

V = 96
SLOW = pytest.mark.slow
BEHAVIOR = {"use_behavior_logprobs": True}
LOSSES = {
  "top_entropy": {"top_entropy_share": 0.3},
  "kl_cov": {"loss": "kl_cov", "kl_cov_ratio": 0.2, "kl_cov_coef": 2.0, **BEHAVIOR},
  "clip_cov": {"loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, **BEHAVIOR},
  "clip_cov_interpolated": {
    **{"loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.1},
    **{"old_logprobs": "interpolated", "importance_correction": "token"},
  },
  "error": {"seq_logprob_error_threshold": 20.0},
  "error_and_entropy": {"seq_logprob_error_threshold": 20.0, "top_entropy_share": 0.3},
}
# At step 4, so that batches have the ages of tokens.
WHOLE = {"shapes": (packing.Shape(12, 64, 64),), "skip_zero_advantage": False, "step": 4}
LAYOUTS = {
  "microbatches": {"shapes": (packing.Shape(1, 32, 32),)},
  "rollouts-apart": {
    "share_prefixes": False,
    "pack": False,
    "shapes": (packing.Shape(16, 24, 24),),
  },
}


def logprobs(params, batch, with_entropy):
  """Returns log softmax(table[token before]) of the tokens that are learned from."""
  places = jnp.maximum(batch.loss_places, 0)
  at = lambda values, where: jnp.take_along_axis(values, where, axis=-1)
  before = at(batch.tokens, at(batch.predecessors, places))
  table = jax.nn.log_softmax(params["table"], axis=-1)
  entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)
  is_real = batch.loss_places >= 0
  of_tokens = jnp.where(is_real, table[before, at(batch.tokens, places)], 0)
  return of_tokens, jnp.where(is_real, entropy[before], 0) if with_entropy else None


def params():
  table = np.random.default_rng(5).normal(size=(V, V)).astype(np.float32)
  return {"table": jnp.asarray(table)}


def score_of(weights, batch):
  return logprobs(weights, batch, False)


SCORE = Program(jax.jit(score_of))


@functools.cache
def update_of(name, mesh=None, minibatches=1):
  objective = objectives.make(kl_coef=0.0, **LOSSES[name])
  tx, _ = optim.make(10, optimizer="sgd", learning_rate=1.0, max_grad_norm=None, weight_decay=0.0)
  shardings = None if mesh is None else {"table": sharding.whole(mesh)}
  made = train_step.make_update(
    logprobs, tx, objective, epochs=minibatches, report_entropy=False, shardings=shardings
  )
  return made, scoring.make_scorer(logprobs, mesh=mesh)


def moved(name, groups, advantages, *, mesh=None, epochs=1, **layout):
  """Returns how far one training step moves the weights, its metrics, and what was assembled."""
  update, score = update_of(name, mesh, epochs)
  assembled = batching.assemble(case.aged(groups), advantages, **(WHOLE | layout))
  minibatches = assembled.minibatches
  shardings = None if mesh is None else {"table": sharding.whole(mesh)}
  start = params() if mesh is None else jax.device_put(params(), shardings)
  if mesh is not None:
    minibatches = sharding.put(minibatches, mesh)
  if update.objective.drops_by_error or epochs > 1:
    minibatches = scoring.with_logprobs(minibatches, score, old_params=start)
  if update.objective.drops_by_error:
    minibatches = screening.screened(minibatches, threshold=20.0)
  before = np.asarray(start["table"])
  tx, _ = optim.make(10, optimizer="sgd", learning_rate=1.0, max_grad_norm=None, weight_decay=0.0)
  state, metrics, _ = update(train_step.init(start, tx, shardings=shardings), minibatches)
  values = {key: metric.value() for key, metric in metrics.items()}
  return np.asarray(state.params["table"]) - before, values, assembled


def assert_same(got, expected):
  assert np.abs(expected[0]).max() > 1e-3
  np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=2e-6)
  for name, value in expected[1].items():
    np.testing.assert_allclose(got[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@functools.cache
def whole(name, epochs=1):
  return moved(name, *case.ragged_groups(), epochs=epochs)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["microbatches", pytest.param("rollouts-apart", marks=SLOW)])
@pytest.mark.parametrize("name", LOSSES)
def test_layout_changes_neither_choice_nor_update(name, layout):
  got = moved(name, *case.ragged_groups(), **LAYOUTS[layout])
  assert_same(got, whole(name))
  if layout == "microbatches":
    assert len(got[2].minibatches[0].microbatches) >= 4
  share = "mismatch/seq_logprob_error_masked_share" if "error" in name else "train/selected_share"
  assert 0.05 < got[1][share] < 0.7


@pytest.mark.long
@pytest.mark.parametrize("name", ["clip_cov", "error_and_entropy"])
def test_order_of_groups_and_rollouts_changes_nothing(name):
  groups, advantages = case.ragged_groups()
  order = np.random.default_rng(3).permutation(len(groups))
  turned = [RolloutGroup(groups[i].prompt, groups[i].rollouts[::-1]) for i in order]
  assert_same(moved(name, turned, [advantages[i][::-1] for i in order]), whole(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_mesh_changes_nothing(name):
  mesh = sharding.make_mesh(data=4, fsdp=2, tensor=1)
  layout = {"shapes": (packing.Shape(16, 64, 64),)}
  assert_same(moved(name, *case.ragged_groups(), mesh=mesh, **layout), whole(name))


@pytest.mark.long
@pytest.mark.parametrize("name", ["clip_cov", pytest.param("top_entropy", marks=SLOW)])
def test_tokens_are_chosen_again_before_every_optimizer_step(name):
  got = moved(name, *case.ragged_groups(), epochs=3, **LAYOUTS["microbatches"])
  assert_same(got, whole(name, epochs=3))
  assert np.abs(got[0] - whole(name)[0]).max() > 1e-3


def test_the_choice_is_that_of_all_tokens_of_the_step():
  """By hand: entropies of all tokens, one threshold."""
  groups, advantages = case.ragged_groups()
  assembled = batching.assemble(groups, advantages, **(WHOLE | LAYOUTS["microbatches"]))
  update, _ = update_of("top_entropy")
  [minibatch] = assembled.minibatches
  chosen = update.selector(params(), minibatch, (0, 0, 0))
  table = jax.nn.log_softmax(params()["table"], axis=-1)
  entropy = np.asarray(-jnp.sum(jnp.exp(table) * table, axis=-1))
  of_tokens, found = [], []
  for batch in chosen.microbatches:
    for row, places in enumerate(np.asarray(batch.loss_places)):
      real = places[places >= 0]
      before = batch.tokens[row][batch.predecessors[row][real]]
      of_tokens += entropy[before].tolist()
      found += np.asarray(batch.selected)[row][places >= 0].tolist()
  threshold = np.quantile(np.asarray(of_tokens), 0.7)
  np.testing.assert_array_equal(found, np.asarray(of_tokens) >= threshold)


@pytest.mark.long
def test_the_choice_sees_the_old_logprobs_that_the_loss_interpolates():
  """Clip-Cov leaves out tokens whose ratio is clipped: it depends on π_old."""
  groups, advantages = case.ragged_groups()
  [minibatch] = batching.assemble(case.aged(groups), advantages, **WHOLE).minibatches
  [batch] = minibatch.microbatches
  policy = np.asarray(logprobs(params(), batch, False)[0])
  behavior = np.asarray(gather_loss_tokens(batch).behavior_logprobs)
  share = np.maximum(batch.ages, 0) / (np.maximum(batch.ages, 0) + 1)
  old = (behavior + share * (policy - behavior)).astype(np.float32)

  def chosen(name, **fields):
    options = {**LOSSES["clip_cov_interpolated"], "clip_cov_ratio": 1.0, "old_logprobs": name}
    made = selecting.Selector(objectives.make(kl_coef=0.0, **options).options, SCORE)
    given = dataclasses.replace(minibatch, microbatches=(dataclasses.replace(batch, **fields),))
    return np.asarray(made(params(), given, (0, 0, 0)).microbatches[0].selected)

  got = chosen("interpolated")
  np.testing.assert_array_equal(got, chosen("scored", old_logprobs=old))
  assert got.any() and not np.array_equal(got, chosen("scored"))


@pytest.mark.long
def test_completions_with_large_errors_count_in_no_denominator():
  """As if they had never been sampled, but for the baseline of their group."""
  groups, advantages = case.ragged_groups()
  table = np.asarray(jax.nn.log_softmax(params()["table"], axis=-1))
  kept, of_kept = [], []
  for group, own in zip(groups, advantages, strict=True):
    keep = [_error(table, group, rollout) <= 20.0 for rollout in group.rollouts]
    rollouts = tuple(r for r, is_kept in zip(group.rollouts, keep, strict=True) if is_kept)
    if rollouts:
      kept.append(dataclasses.replace(group, rollouts=rollouts))
      of_kept.append(own[np.asarray(keep)])
  assert 0 < sum(len(g.rollouts) for g in kept) < sum(len(g.rollouts) for g in groups)
  expected = moved("error", kept, of_kept)
  got = whole("error")
  np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=2e-6)
  for name in ("train/loss", "train/ratio_mean", "mismatch/abs_logprob_mean"):
    np.testing.assert_allclose(got[1][name], expected[1][name], rtol=1e-4, atol=1e-6)


def _error(table, group, rollout):
  ids = np.concatenate([group.prompt.token_ids[-1:], rollout.completion_ids])
  old = table[ids[:-1], ids[1:]]
  return np.exp(np.abs(old - rollout.behavior_logprobs))[rollout.loss_mask].mean()


def test_random_keys_do_not_depend_on_where_a_token_is_stored():
  groups, advantages = case.ragged_groups()
  seen = []
  for layout in LAYOUTS.values():
    keys = {}
    [made] = batching.assemble(groups, advantages, **(WHOLE | layout)).minibatches
    for batch in made.microbatches:
      drawn = selecting.random_keys(batch.tokens, batch.predecessors, (1, 2))
      for row, place in zip(*np.nonzero(batch.loss_mask), strict=True):
        chain, at = [], place
        while batch.predecessors[row, at] != at:
          chain, at = [*chain, int(batch.tokens[row, at])], batch.predecessors[row, at]
        keys[tuple(chain), int(batch.tokens[row, at])] = drawn[row, place]
    seen.append(keys)
  assert seen[0] == seen[1] and len(set(seen[0].values())) == len(seen[0]) > 50
  batch = batching.assemble(groups, advantages, **WHOLE).minibatches[0].microbatches[0]
  one, other = (selecting.random_keys(batch.tokens, batch.predecessors, (1, x)) for x in (2, 3))
  assert not np.isin(one, other).any()
