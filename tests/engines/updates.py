"""New weights at chosen chunks of the embedded sampler, for the tests of this folder."""

import contextlib

import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.engines import continuous_batching
from grpo_jax.learn import scoring, token_scores
from grpo_jax.models.products import Products
from grpo_jax.processes import arrays
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup
from tests.engines import tiny

SHAPE = packing.Shape(8, 256, 256)


@contextlib.contextmanager
def before_chunks(actions):
  """Calls functions before chunks of a sampler's session; the first chunk has the number 0."""
  advance, count = continuous_batching.ContinuousBatcher.advance, 0

  def advanced(self, *arguments):
    nonlocal count
    action, count = actions.get(count), count + 1
    if action is not None:
      action()
    return advance(self, *arguments)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(continuous_batching.ContinuousBatcher, "advance", advanced)
    yield


def run(engine, requests, trees, chunks):
  """Samples while an engine gets weights, a version more each time.

  The new weights sample from the chunk on that follows the one they came before: the sampler reads
  which weights it has before it calls the batcher.

  Args:
    engine: Sampler that has weights.
    requests: Requests of one call.
    trees: Weights to load.
    chunks: Number of the chunk before which each of them comes, ascending.
  """
  first = engine.weight_version + 1
  loads = {
    chunk: lambda version=first + i, tree=tree: engine.load_weights(tree, version=version)
    for i, (chunk, tree) in enumerate(zip(chunks, trees, strict=True))
  }
  with before_chunks(loads):
    return tiny.run(engine, requests)


def trainer_logprobs(model_config, trees, requests, generations):
  """Returns what the trainer's scorer says of every token under each weights: {name: [V n]}."""
  by_prompt = {}
  for request in requests:
    by_prompt.setdefault(request.prompt_ids.tobytes(), []).append(request)
  groups = [
    RolloutGroup(
      Prompt(members[0].request_id, members[0].prompt_ids, "none"),
      tuple(_rollout(generations[request.request_id]) for request in members),
    )
    for members in by_prompt.values()
  ]
  zeros = [np.zeros(len(group.rollouts), np.float32) for group in groups]
  made = batching.assemble(groups, zeros, shapes=(SHAPE,), skip_zero_advantage=False)
  logprobs = token_scores.make_logprobs(model_config, temperature=1.0, products=Products())
  score = scoring.make_scorer(logprobs)
  found = {request.request_id: [] for request in requests}
  for tree in trees:
    values = [
      [arrays.fetch(score(tree, batch)) for batch in minibatch.microbatches]
      for minibatch in made.minibatches
    ]
    of_groups = batching.per_rollout(made, values, groups)
    for members, of_group in zip(by_prompt.values(), of_groups, strict=True):
      for request, of_tokens in zip(members, of_group, strict=True):
        found[request.request_id].append(of_tokens)
  return {name: np.stack(of_trees) for name, of_trees in found.items()}


def _rollout(generation):
  length = len(generation.token_ids)
  return Rollout(
    completion_ids=generation.token_ids,
    loss_mask=np.ones(length, bool),
    behavior_logprobs=generation.logprobs,
    weight_versions=generation.weight_versions,
    finish_reason=FinishReason.STOP,
    reward=0.0,
  )


def mismatch(generations, wanted):
  """Returns the largest |logprob when sampled - that of the token's version|; versions from 0."""
  return max(
    np.abs(x.logprobs - wanted[name][x.weight_versions, np.arange(len(x.token_ids))]).max()
    for name, x in generations.items()
  )
