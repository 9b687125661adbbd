"""A tiny model, ragged random groups, and one optimizer step's loss and gradients."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import batching
from grpo_jax import metrics as metric_sums
from grpo_jax.batching import packing
from grpo_jax.building import phases
from grpo_jax.learn import optim, scoring, sharding, token_scores, train_step
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_jax.rl import objectives
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

CONFIG = ModelConfig(
  family="qwen2",
  vocab_size=96,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  tie_embeddings=True,
  qkv_bias=True,
)


def rollout(rng, length, *, vocabulary=96, reward=None, turns=False, **changes):
  """Returns a random completion; with `turns`, a few of its tokens are the environment's."""
  mask = np.ones(length, bool)
  if turns and length > 4:
    mask[2:4] = False
  fields = {
    "completion_ids": rng.integers(0, vocabulary, length),
    "loss_mask": mask,
    "behavior_logprobs": np.where(mask, -rng.random(length) * 5, 0).astype(np.float32),
    "weight_versions": np.zeros(length, np.int32),
    "finish_reason": FinishReason.STOP,
    "reward": float(rng.random()) if reward is None else reward,
  }
  return Rollout(**(fields | changes))


def aged(groups):
  """Returns the groups with versions 0 to 4, which rise within completions; some are unknown."""

  def of(one):
    places = np.arange(len(one.completion_ids))
    versions = np.minimum(one.completion_ids[0] % 3 + places // 3, 4)
    return np.where(places % 7 == 6, -1, versions).astype(np.int32)

  def changed(group):
    rollouts = (dataclasses.replace(one, weight_versions=of(one)) for one in group.rollouts)
    return dataclasses.replace(group, rollouts=tuple(rollouts))

  return [changed(group) for group in groups]


def group(rng, name, prompt_length, lengths, *, vocabulary=96, weight=1.0, **options):
  """Returns a group of random rollouts of the given lengths."""
  prompt = Prompt(name, rng.integers(0, vocabulary, prompt_length), "none", weight=weight)
  rollouts = tuple(rollout(rng, n, vocabulary=vocabulary, **options) for n in lengths)
  return RolloutGroup(prompt, rollouts)


def ragged_groups(seed=0, vocabulary=96):
  """Returns groups of unequal sizes, prompts and completions, one of several turns; advantages."""
  rng = np.random.default_rng(seed)
  shapes = [(5, (7, 3, 11, 1)), (9, (4, 6)), (2, (8,)), (6, (2, 9, 5)), (7, (10, 3))]
  groups = [
    group(rng, f"p{i}", prompt, lengths, vocabulary=vocabulary, turns=i == 3)
    for i, (prompt, lengths) in enumerate(shapes)
  ]
  return groups, [rng.standard_normal(len(g.rollouts)).astype(np.float32) for g in groups]


@functools.cache
def params(seed=0, config=CONFIG, scale=4.0):
  """Returns random parameters, larger than at initialisation so that gradients are not tiny."""
  fresh = transformer.init(jax.random.key(seed), config)
  return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, fresh)


FULL_LOSS = {"kl_coef": 0.1, "entropy_coef": 0.05, "aggregation": "sequence_mean"}


# Many layouts, one shape, so that little is compiled.
LAYOUT = {"shapes": (packing.Shape(12, 64, 64),), "skip_zero_advantage": False}


@functools.cache
def table(seed=0):
  """Returns random embeddings, all parameters of a model without layers."""
  return {"embed": params(seed, scale=20.0)["embed"]}


def without_layers():
  """Patches the transformer: hidden states are embeddings, so that little is compiled."""
  embedded = lambda params, config, tokens, *_, **__: transformer.Outputs(
    params["embed"][tokens], {}
  )
  return mock.patch.object(transformer, "outputs", embedded)


@functools.cache
def scorer(config, has_layers=True):
  """Returns the scorer of all losses, so that it is compiled once."""
  return scoring.make_scorer(token_scores.make_logprobs(config, temperature=1.3))


@functools.cache
def updater(config, loss, remat, implementation, one_sweep, has_layers=True):
  """Returns the update, made once per setting, so that equal shapes compile once."""
  settings = {"temperature": 1.3, "remat": remat}
  logprobs = token_scores.make_logprobs(config, implementation=implementation, **settings)
  tx, _ = optim.make(10)
  objective = objectives.make(**dict(loss))
  token_loss = token_scores.make_token_loss(config, objective, **settings) if one_sweep else None
  return train_step.make_update(logprobs, tx, objective, report_entropy=True, token_loss=token_loss)


def gradients(
  groups,
  advantages,
  *,
  loss=None,
  remat="full",
  implementation=None,
  one_sweep=False,
  config=CONFIG,
  minibatch=0,
  has_layers=True,
  **layout,
):
  """Returns (loss, gradients, assembled, metrics) of an optimizer step; old and ref scored apart.

  The gradient of the head comes from two passes over the vocabulary, or from one sweep.
  """
  loss = FULL_LOSS if loss is None else loss
  update = updater(config, tuple(loss.items()), remat, implementation, one_sweep, has_layers)
  score = scorer(config, has_layers)
  weights = functools.partial(params, config=config) if has_layers else table
  assembled = batching.assemble(groups, advantages, **(LAYOUT | layout))
  made = assembled.minibatches
  with contextlib.nullcontext() if has_layers else without_layers():
    if update.objective.needs_ref:
      bare = made
      made = scoring.with_logprobs(made, score, old_params=weights(1), ref_params=weights(2))
      if update.objective.needs_teacher:
        taught = lambda batch: {"teacher_logprobs": score(weights(3), batch)}
        made = phases._with(made, [[*map(taught, x.microbatches)] for x in bare])
    (grads, value), parts, _ = update.gradients(weights(0), made[minibatch])
  metrics = metric_sums.merge(jax.device_get(parts))
  return float(value), jax.device_get(grads), assembled, metrics


def assert_same(got, expected, tolerance=2e-5):
  """Compares loss and every leaf of the gradient, relative to the leaf's largest entry."""
  assert got[0] == np.float32(expected[0]) or abs(got[0] - expected[0]) < 1e-5 * (
    1 + abs(expected[0])
  )
  assert_trees_same(got[1], expected[1], tolerance)


def assert_trees_same(got, expected, tolerance=2e-5):
  leaves, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, expected))
  for (path, a), (_, b) in zip(leaves, wanted, strict=True):
    largest = np.abs(b).max()
    assert largest > 0, f"{jax.tree_util.keystr(path)} has no gradient: the test is blind"
    np.testing.assert_allclose(
      a, b, rtol=0, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path)
    )


def placed_on(mesh):
  """Returns how logprobs and losses are computed on a mesh, as `train_step` takes it."""
  return {
    "products": Products(placement=sharding.placement(mesh)),
    "partition": sharding.head_partition(mesh),
  }


def trained(mesh, *, optimizer="adamw", steps=2, one_sweep=False, **loss):
  """Returns the state after a few training steps on a mesh (None: one device), and metrics."""
  groups, advantages = ragged_groups()
  start = jax.tree.map(jnp.copy, params())  # the update consumes it.
  shardings, of_mesh = None, {}
  if mesh is not None:
    shardings = sharding.param_shardings(transformer.logical_axes(CONFIG), mesh, shapes=start)
    of_mesh = placed_on(mesh)
  objective = objectives.make(**(FULL_LOSS | {"kl_coef": 0.0} | loss))
  tx, schedule = optim.make(
    10, optimizer=optimizer, learning_rate=1e-2, max_grad_norm=0.5, weight_decay=0.0
  )
  token_loss = None
  if one_sweep:
    token_loss = token_scores.make_token_loss(CONFIG, objective, **of_mesh)
  update = train_step.make_update(
    token_scores.make_logprobs(CONFIG, **of_mesh),
    tx,
    objective,
    schedule=schedule,
    shardings=shardings,
    token_loss=token_loss,
    report_entropy=False,
  )
  state = train_step.init(start, tx, shardings=shardings)
  made = {"shapes": (packing.Shape(8, 64, 64),), "skip_zero_advantage": False}
  assembled = batching.assemble(groups, advantages, **made)
  minibatches = assembled.minibatches
  if mesh is not None:
    minibatches = sharding.put(minibatches, mesh)
  for _ in range(steps):
    state, metrics, _ = update(state, minibatches)
  return state, metrics


def compiled_on_mesh(sizes, *, one_sweep):
  """Compiles the gradients of a microbatch on a mesh, for a model whose head is its own.

  Returns:
    The compiled function; V, a multiple of a prime; (leaves of the gradients and the loss on the
    mesh, the same on one device).
  """
  vocabulary = 8 * 41
  config = dataclasses.replace(CONFIG, vocab_size=vocabulary, tie_embeddings=False)
  objective = objectives.make(kl_coef=0.0, entropy_coef=0.05)
  tx, _ = optim.make(10)
  made = {"shapes": (packing.Shape(8, 64, 64),), "skip_zero_advantage": False}
  assembled = batching.assemble(*ragged_groups(), **made)
  whole = params(0, config)

  def first(mesh):
    shardings, of_mesh = None, {}
    if mesh is not None:
      axes = transformer.logical_axes(config)
      shardings = sharding.param_shardings(axes, mesh, shapes=whole)
      of_mesh = placed_on(mesh)
    token_loss = None
    if one_sweep and mesh is not None:
      token_loss = token_scores.make_token_loss(config, objective, **of_mesh)
    logprobs = token_scores.make_logprobs(config, **of_mesh)
    options = {"shardings": shardings, "token_loss": token_loss}
    update = train_step.make_update(logprobs, tx, objective, report_entropy=False, **options)
    [minibatch] = assembled.minibatches
    placed = whole
    if mesh is not None:
      placed, minibatch = jax.device_put(whole, shardings), sharding.put(minibatch, mesh)

    def differentiate(params, batch, denominators):
      return update.differentiate(params, update.start(params), batch, denominators)[0]

    return differentiate, (placed, minibatch.microbatches[0], minibatch.denominators)

  f, arguments = first(sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True))))
  alone, of_alone = first(None)
  both = [(f, arguments), (alone, of_alone)]
  expected = [jax.tree.leaves(jax.device_get(g(*given))) for g, given in both]
  # Of the leaves: `lower` would put descriptions of arrays into a Batch, which checks its types.
  leaves, tree = jax.tree.flatten(arguments)
  compiled = jax.jit(lambda leaves: f(*tree.unflatten(leaves))).lower(leaves).compile()
  return compiled, vocabulary, expected


def replace(group, index, **changes):
  """Returns the group with one rollout changed."""
  rollouts = list(group.rollouts)
  rollouts[index] = dataclasses.replace(rollouts[index], **changes)
  return RolloutGroup(group.prompt, tuple(rollouts))
