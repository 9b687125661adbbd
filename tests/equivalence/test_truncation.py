"""A truncated distribution: the sampler's numbers, in any layout, and on a mesh."""

import asyncio
import functools

import equivalence_case as case
import jax
import numpy as np
import pytest
from grpo_kernels.truncation import Truncation

from grpo_jax import batching
from grpo_jax import metrics as metric_sums
from grpo_jax.batching import packing
from grpo_jax.engines.base import GenerationRequest, SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import optim, scoring, sharding, token_scores, train_step
from grpo_jax.models import transformer
from grpo_jax.rl import objectives
from grpo_jax.types import Prompt, RolloutGroup

FILTERS = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
TRUNCATION = Truncation(**FILTERS, num_valid=90)
LOSS = objectives.make(**case.FULL_LOSS)


@functools.cache
def functions(truncation):
  return token_scores.make_logprobs(case.CONFIG, temperature=1.3, truncation=truncation)


@functools.cache
def update():
  tx, _ = optim.make(10)
  return train_step.make_update(functions(TRUNCATION), tx, LOSS, report_entropy=True)


@functools.cache
def scorers():
  return [scoring.make_scorer(functions(t)) for t in (TRUNCATION, None)]


def gradients(**layout):
  """Returns loss and gradients of a truncated distribution, and the metrics."""
  assembled = batching.assemble(*case.ragged_groups(), **(case.LAYOUT | layout))
  old, whole = scorers()
  [made] = scoring.with_logprobs(
    assembled.minibatches,
    whole,
    old_score=old,
    old_params=case.params(1),
    ref_params=case.params(2),
  )
  (grads, value), parts, _ = update().gradients(case.params(0), made)
  return float(value), jax.device_get(grads), metric_sums.merge(jax.device_get(parts))


@functools.cache
def sampled():
  """Groups that the embedded sampler drew with the filters, at temperature 1.3."""
  sampling = SamplingParams(max_tokens=9, temperature=1.3, logprobs="truncated", **FILTERS)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 90, n).astype(np.int32) for n in (5, 3)]
  requests = [
    GenerationRequest(f"{p}.{g}", ids, sampling, 10 * p + g)
    for p, ids in enumerate(prompts)
    for g in range(4)
  ]

  async def collect(engine):
    return {g.request_id: g async for g in engine.generate(requests)}

  with JaxSampler(case.CONFIG, max_rows=8, max_length=64, num_valid_tokens=90) as engine:
    engine.load_weights(case.params(0), version=0)
    found = asyncio.run(collect(engine))
  groups = []
  for p, ids in enumerate(prompts):
    of_prompt = [found[f"{p}.{g}"] for g in range(4)]
    rollouts = tuple(
      case.rollout(
        rng,
        len(each.token_ids),
        completion_ids=each.token_ids,
        behavior_logprobs=np.asarray(each.logprobs, np.float32),
      )
      for each in of_prompt
    )
    groups.append(RolloutGroup(Prompt(f"p{p}", ids, "none"), rollouts))
  return groups


@functools.cache
def sampled_batch():
  """The same as a batch."""
  advantages = [np.ones(4, np.float32)] * 2
  assembled = batching.assemble(sampled(), advantages, **case.LAYOUT)
  [minibatch] = assembled.minibatches
  [batch] = minibatch.microbatches
  assert (np.asarray(batch.loss_places) >= 0).sum() == 72
  return batch


def mismatch(scorer):
  """Returns the largest difference between the sampler's logprobs and the trainer's."""
  batch = sampled_batch()
  trained = np.asarray(scorer(case.params(0), batch))
  places = np.asarray(batch.loss_places)
  behavior = np.take_along_axis(np.asarray(batch.behavior_logprobs), np.maximum(places, 0), axis=1)
  return np.abs(np.where(places >= 0, trained - behavior, 0)).max()


@pytest.mark.long
def test_the_trainers_logprobs_are_those_of_the_sampler():
  truncated, whole = scorers()
  assert mismatch(truncated) < 1e-5
  assert mismatch(whole) > 0.05


@pytest.mark.long
def test_all_completions_are_measured_under_it_and_the_drift_under_the_whole_softmax():
  watch = scoring.make_watcher(functions(TRUNCATION))
  found, scores = watch(case.params(0), sampled_batch())
  assert found["all/abs_logprob_max"].value() < 1e-5
  assert found["all/outside_truncation_share"].value() == 0.0
  whole = scorers()[1](case.params(0), sampled_batch())
  np.testing.assert_allclose(scores.full, whole, atol=1e-5)
  assert np.abs(scores.logprobs - whole).max() > 0.05


@pytest.mark.long
@pytest.mark.parametrize(
  "layout",
  [
    pytest.param(
      {"share_prefixes": False, "pack": False}, id="one-row-per-rollout", marks=pytest.mark.slow
    ),
    pytest.param({"shapes": (packing.Shape(1, 32, 32),)}, id="microbatches"),
  ],
)
def test_layout_changes_neither_loss_nor_gradients(layout):
  plain = gradients()
  assert plain[2]["mismatch/outside_truncation_share"].value() > 0.1  # random tokens.
  case.assert_same(gradients(**layout), plain)


@pytest.mark.slow
def test_the_kl_is_that_of_whole_distributions():
  found = gradients()[2]["train/kl_to_reference"].value()
  whole, _, _, metrics = case.gradients(*case.ragged_groups())
  assert found == pytest.approx(metrics["train/kl_to_reference"].value(), rel=1e-5)
  assert gradients()[0] != pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
def test_a_mesh_changes_neither_loss_nor_gradients():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  axes = transformer.logical_axes(case.CONFIG)
  shardings = sharding.param_shardings(axes, mesh, shapes=case.params(0))
  logprobs = token_scores.make_logprobs(
    case.CONFIG, temperature=1.3, truncation=TRUNCATION, **case.placed_on(mesh)
  )
  tx, _ = optim.make(10)
  loss = objectives.make(kl_coef=0.0, entropy_coef=0.05)
  on_mesh = train_step.make_update(logprobs, tx, loss, report_entropy=True, shardings=shardings)
  alone = train_step.make_update(functions(TRUNCATION), tx, loss, report_entropy=True)
  assembled = batching.assemble(
    *case.ragged_groups(), shapes=(packing.Shape(8, 64, 64),), skip_zero_advantage=False
  )
  [expected], [placed] = assembled.minibatches, sharding.put(assembled.minibatches, mesh)
  got = on_mesh.gradients(jax.device_put(case.params(0), shardings), placed)[0]
  wanted = alone.gradients(case.params(0), expected)[0]
  case.assert_same(*((float(v), jax.device_get(g)) for g, v in (got, wanted)))
