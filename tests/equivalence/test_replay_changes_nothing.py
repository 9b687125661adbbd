"""Replayed experts: packing, prefixes and devices change nothing; other experts change the loss."""

import dataclasses
import functools

import equivalence_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.learn import (
  adapters,
  optim,
  policy,
  scoring,
  sharding,
  token_scores,
  train_step,
)
from grpo_jax.models import leaves, lora, transformer
from grpo_jax.models.mixture import Mixture
from grpo_jax.rl import objectives

MIXTURE = Mixture(8, 2, width=24, normalised=True)
CONFIG = dataclasses.replace(case.CONFIG, family="qwen3_moe", qkv_bias=False, mixture=MIXTURE)
SHAPE = CONFIG.expert_shape


def recorded(share=1.0):
  """Returns groups whose experts are random; a share of the tokens has them."""
  rng = np.random.default_rng(5)
  groups, advantages = case.ragged_groups()

  def record(tokens):
    chosen = rng.permuted(np.tile(np.arange(8, dtype=np.int8), (tokens, 2, 1)), axis=-1)[..., :2]
    return np.where(rng.random((tokens, 1, 1)) < share, chosen, np.int8(-1))

  def with_experts(group):
    rollouts = (
      dataclasses.replace(one, experts=record(len(one.completion_ids))) for one in group.rollouts
    )
    of_prompt = record(len(group.prompt.token_ids))
    return dataclasses.replace(group, rollouts=tuple(rollouts), prompt_experts=of_prompt)

  return [with_experts(group) for group in groups], advantages


def gradients(data, **layout):
  """Loss, gradients of all that is trained, and metrics, with the experts of the groups."""
  options = {"experts": SHAPE} | layout
  loss, grads, assembled, metrics = case.gradients(*data, config=CONFIG, **options)
  router = grads["layers"].pop(leaves.ROUTER)
  assert not router.any()  # it is frozen.
  return loss, grads, assembled, metrics


@functools.cache
def replayed():
  return gradients(recorded(0.8))


@pytest.mark.long
def test_neither_prefixes_nor_packing_change_replay():
  alone = gradients(recorded(0.8), share_prefixes=False, pack=False)
  case.assert_same(alone, replayed())


@pytest.mark.long
def test_one_sweep_over_the_head_replays_the_same():
  data, loss = recorded(0.8), {"kl_coef": 0.0, "aggregation": "token_mean"}
  one, two = (gradients(data, loss=loss, one_sweep=sweep) for sweep in (True, False))
  case.assert_same(one, two)
  name = "router/changed_share"
  assert one[3][name].value() == two[3][name].value() == replayed()[3][name].value()


@pytest.mark.long
def test_replay_decides_where_tokens_go():
  own = gradients(recorded(0.8), experts=None)
  nothing = gradients(recorded(0.0))
  case.assert_same(nothing, own)  # where nothing is recorded, the router chooses.
  assert abs(replayed()[0] - own[0]) > 1e-3
  changed, share = (replayed()[3]["router/changed_share"], replayed()[2].metrics)
  assert 0.5 < changed.value() < 0.9  # 2 of 8 at random: the router agrees with a quarter.
  assert 0.7 < share["router/replayed_share"].value() < 0.9
  assert "router/changed_share" not in own[3] and "router/replayed_share" not in own[2].metrics


@pytest.mark.long
def test_an_adapter_of_attention_has_the_gradients_that_its_merged_weights_imply():
  """By the chain rule: of A they are s dW Bᵀ, of B s Aᵀ dW, whatever the layout."""
  options = lora.AdapterOptions(2, 6.0, ("q", "k", "v", "o"), base_dtype="float32")
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  composition = adapters.composition(CONFIG, mesh, options, seed=0)
  _, policy_of = policy.begin(case.params(0, CONFIG), composition, copy=None)
  rng = np.random.default_rng(8)
  draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 8, jnp.float32)
  adapter = jax.tree.map(draw, lora.tree(CONFIG, options))
  difference = {name: options.scale * each["a"] @ each["b"] for name, each in adapter.items()}
  base = case.params(0, CONFIG)
  layers = base["layers"] | {name: base["layers"][name] + x for name, x in difference.items()}
  found = [
    adapted_gradients(weights, **layout)
    for weights, layout in (
      (base | {"layers": layers}, {}),
      (policy_of.weights(adapter), {}),
      (policy_of.weights(adapter), {"share_prefixes": False, "pack": False}),
    )
  ]
  (loss, whole), *ours = found
  transposed = lambda x: np.swapaxes(x, -1, -2)
  wanted = {
    name: {
      "a": options.scale * whole["layers"][name] @ transposed(each["b"]),
      "b": options.scale * transposed(each["a"]) @ whole["layers"][name],
    }
    for name, each in adapter.items()
  }
  for own in ours:
    case.assert_same(own, (loss, wanted), 5e-5)


def adapted_gradients(weights, **layout):
  """Loss and gradients of what is trained of some weights, with the recorded experts."""
  groups, advantages = recorded(0.8)
  made = batching.assemble(groups, advantages, experts=SHAPE, **(case.LAYOUT | layout)).minibatches
  old, ref = case.params(1, CONFIG), case.params(2, CONFIG)
  made = scoring.with_logprobs(made, case.scorer(CONFIG), old_params=old, ref_params=ref)
  update = case.updater(CONFIG, tuple(case.FULL_LOSS.items()), "full", None, False)
  (grads, loss), *_ = update.gradients(weights, made[0])
  return float(loss), jax.device_get(grads)


@pytest.mark.long
def test_only_the_policy_replays():
  """The old policy's logprobs depend on the experts, the reference's do not."""
  groups, advantages = recorded()
  made = batching.assemble(groups, advantages, experts=SHAPE, **case.LAYOUT).minibatches
  old, ref = case.params(1, CONFIG), case.params(2, CONFIG)
  score = case.scorer(CONFIG)
  scored = scoring.with_logprobs(made, score, old_params=old, ref_params=ref)
  [batch], [bare] = scored[0].microbatches, made[0].microbatches
  alone = scoring.unreplayed(bare)
  np.testing.assert_array_equal(batch.old_logprobs, score(old, bare))
  np.testing.assert_array_equal(batch.ref_logprobs, score(ref, alone))
  assert np.abs(batch.old_logprobs - score(old, alone)).max() > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2, "tensor": 2}], ids=str)
def test_devices_change_nothing_of_replay(sizes):
  groups, advantages = recorded(0.8)
  shapes = {"shapes": (packing.Shape(8, 64, 64),), "skip_zero_advantage": False}
  (minibatch,) = batching.assemble(groups, advantages, experts=SHAPE, **shapes).minibatches
  objective, (tx, _) = objectives.make(kl_coef=0.0, aggregation="token_mean"), optim.make(10)
  found = []
  for mesh in (None, sharding.make_mesh(**sizes)):
    of_mesh, shardings = {}, None
    params, batch = case.params(0, CONFIG), minibatch
    if mesh is not None:
      of_mesh, axes = case.placed_on(mesh), transformer.logical_axes(CONFIG)
      shardings = sharding.param_shardings(axes, mesh, shapes=params)
      params, batch = jax.device_put(params, shardings), sharding.put(batch, mesh)
    logprobs = token_scores.make_logprobs(CONFIG, **of_mesh)
    update = train_step.make_update(
      logprobs, tx, objective, report_entropy=False, shardings=shardings
    )
    (grads, loss), (metrics,), _ = update.gradients(params, batch)
    grads = jax.device_get(grads)
    grads["layers"].pop(leaves.ROUTER)
    found.append((float(loss), grads, metrics["router/changed_share"].value()))
  one, eight = found
  case.assert_same(eight, one)
  assert eight[2] == one[2]
