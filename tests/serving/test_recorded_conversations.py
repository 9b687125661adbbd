"""Conversations with the embedded sampler of a mixture: the trainer goes where the sampler went."""

import numpy as np
import pytest
from made_agents import Agents, collected, prompts
from scripted_engine import TOKENIZER
from test_agents import Asks, asks

from grpo_jax.engines.base import SamplingParams
from grpo_jax.models.mixture import Mixture
from tests.engines import tiny
from tests.engines.test_recorded_experts import outputs

pytestmark = pytest.mark.long

CONFIG = tiny.config(
  "qwen3", vocab_size=TOKENIZER.vocab_size, mixture=Mixture(8, 2, width=24, normalised=True)
)
# This model writes bytes at random, one in six of which ends a turn.
SAMPLING = SamplingParams(max_tokens=48, stop_ids=tuple(range(0, 256, 6)))
LENGTH = 192  # of all sequences, so that one program scores them.


@pytest.fixture(scope="module")
def engine():
  with tiny.sampler(CONFIG, record_experts=True) as engine:
    yield engine


class NewWeights:
  """An engine that has other weights in its second call, which is that of the second turn."""

  def __init__(self, engine, trees):
    self._engine, self._left = engine, list(enumerate(trees))

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def generate(self, requests, **options):
    version, tree = self._left.pop(0)
    self._engine.load_weights(tree, version=version)
    return self._engine.generate(requests, **options)


def sampled(engine, environment):
  groups = collected(engine, environment, prompts("a", "bcd"), group_size=3, sampling=SAMPLING)
  for group in groups:
    for rollout in group.rollouts:
      assert rollout.turns == 2 and not rollout.error
      record = np.concatenate([group.prompt_experts, rollout.experts])
      ids = np.concatenate([group.prompt.token_ids, rollout.completion_ids]).astype(np.int32)
      yield rollout, ids, record


def trained(tree, ids, experts):
  """Logprobs of all tokens but the first, and the experts of all, as the trainer has them."""
  room = LENGTH - len(ids)
  experts = np.pad(experts, ((0, room), (0, 0), (0, 0)), constant_values=-1)
  logprobs, chosen = outputs(CONFIG, tree, np.pad(ids, (0, room)), experts)
  return tiny.of_tokens(np.asarray(logprobs), np.roll(ids, -1))[: len(ids) - 1], np.asarray(chosen)


@pytest.mark.parametrize("environment", [Asks, Agents(asks)], ids=["environment", "agent"])
def test_all_tokens_of_both_turns_have_the_experts_of_the_trainer(engine, environment):
  """Also what was written between the turns, which the second turn read as its prompt."""
  tree = tiny.params(CONFIG)
  for rollout, ids, record in sampled(engine, environment):
    assert 0 < (~rollout.loss_mask).sum() and rollout.loss_mask[-1]
    nothing = np.full_like(record, -1)
    _, chosen = trained(tree, ids, nothing)
    np.testing.assert_array_equal(record[:-1], chosen[: len(ids) - 1])
    np.testing.assert_array_equal(record[-1:], nothing[-1:])
    logprobs, _ = trained(tree, ids, record)
    learned = rollout.loss_mask
    own = logprobs[-len(learned) :][learned]
    np.testing.assert_allclose(own, rollout.behavior_logprobs[learned], atol=2e-5)


def test_weights_between_the_turns_leave_the_first_turn_its_experts(engine):
  trees = [tiny.params(CONFIG, seed) for seed in range(2)]
  changed = 0
  for rollout, ids, record in sampled(NewWeights(engine, trees), Asks):
    mask = rollout.loss_mask
    assert set(rollout.weight_versions[mask].tolist()) == {0, 1}
    start = len(ids) - len(mask)
    first = start + int(np.argmin(mask)) - 1  # the second turn was the first to read it.
    nothing = np.full_like(record, -1)
    (of_old, old), (_, new) = (trained(tree, ids, nothing) for tree in trees)
    np.testing.assert_array_equal(record[:first], old[:first])
    np.testing.assert_array_equal(record[first:-1], new[first : len(ids) - 1])
    behavior = rollout.behavior_logprobs[: first + 1 - start]
    np.testing.assert_allclose(of_old[start - 1 : first], behavior, atol=2e-5)
    changed += int((old[:first] != new[:first]).any())
  assert changed > 0
