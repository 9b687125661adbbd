"""What each matrix product of a run is compiled to on a GPU and on a TPU, read from StableHLO."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching, precision
from grpo_jax.engines import decoding, probe, scheduling
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import optim, train_step
from grpo_jax.rl import objectives
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup
from tests.engines import tiny

PLATFORMS = ("cuda", "tpu")
DOT = re.compile(r"stablehlo\.dot_general (.*?) : \((.*?)\) -> ")
ASKED = re.compile(r"precision = \[(\w+), (\w+)\]")


def products(function, arguments, platform):
  """Counts the products of a program: (element type of the factors, precision asked for).

  Leaves go in one by one: what describes a lowered program puts no arrays into our types.
  """
  leaves, structure = jax.tree.flatten(arguments)
  program = jax.jit(lambda leaves: function(*jax.tree.unflatten(structure, leaves)))
  lowered = program.trace(leaves).lower(lowering_platforms=(platform,))
  found = collections.Counter()
  for line in lowered.as_text().splitlines():
    match = DOT.search(line)
    assert match or "dot_general" not in line, line
    if match:
      types = set(re.findall(r"x([a-z]+\d+)>", match[2]))
      asked = ASKED.search(match[1])
      assert len(types) == 1, line
      found[types.pop(), asked[1] if asked else "DEFAULT"] += 1
  return found


def batch():
  """A microbatch of two completions."""
  rollouts = tuple(
    Rollout(
      completion_ids=np.asarray(ids),
      loss_mask=np.ones(len(ids), bool),
      behavior_logprobs=np.full(len(ids), -1.0, np.float32),
      weight_versions=np.zeros(len(ids), np.int32),
      finish_reason=FinishReason.STOP,
      reward=float(reward),
    )
    for reward, ids in enumerate([[2, 3], [4]])
  )
  group = RolloutGroup(Prompt("p", np.asarray([1, 5]), "none"), rollouts)
  (minibatch,) = batching.assemble([group], [np.asarray([-1.0, 1.0])], row_tokens=32).minibatches
  return minibatch.microbatches[0], minibatch.denominators


def programs(compute_dtype, name, *, one_sweep):
  """Yields the name, the jitted function and the arguments of each program of a run."""
  config = tiny.config()
  exact = precision.resolve(name, compute_dtype)
  params = tiny.params(config)
  settings = {"compute_dtype": jnp.dtype(compute_dtype)}
  logprobs = train_step.make_logprobs(config, **settings)
  objective = objectives.make(kl_coef=0.0)
  token_loss = train_step.make_token_loss(config, objective, **settings) if one_sweep else None
  tx, _ = optim.make(10, learning_rate=1e-3)
  update = train_step.make_update(
    logprobs, tx, objective, token_loss=token_loss, matmul_precision=exact
  )
  data, denominators = batch()
  yield "update", update.differentiate, (params, data, denominators)
  opt_state = jax.eval_shape(tx.init, params)
  yield "optimizer", update.apply, (params, opt_state, params, jnp.zeros(()))
  if one_sweep:
    return
  score = train_step.make_scorer(logprobs, matmul_precision=exact)
  yield "scorer", score, (params, data)
  watch = train_step.make_watcher(logprobs, matmul_precision=exact)
  yield "watcher", watch, (params, data)
  options = JaxSampler(config, **settings, matmul_precision=name)._options
  weights = decoding.split_layers(params, options)
  cache = decoding.empty_cache(2, 32, options)
  ids, lengths = np.zeros((1, 8), np.int32), np.zeros(1, np.int32)
  prefill = jax.jit(lambda *a: decoding.prefill(*a, options))
  yield "prefill", prefill, (weights, cache, ids, lengths, lengths)
  rows = scheduling.make_rows([], 2, [])
  decode = jax.jit(lambda *a: decoding.decode(*a, options))
  yield "decode", decode, (weights, cache, cache, rows, jnp.int32(0))
  tokens = jnp.asarray([[1, 2, 3]])
  static = (config, settings["compute_dtype"], exact)
  yield "probe", lambda *a: probe._logprobs(*a, *static), (params, tokens)


# compute dtype, model.matmul_precision → (factors, precision) of all products.
EXPECTED = {
  ("float32", None): ("f32", "HIGHEST"),
  ("float32", "tensorfloat32"): ("f32", "HIGH"),
  ("float32", "default"): ("f32", "DEFAULT"),
  ("bfloat16", None): ("bf16", "DEFAULT"),
}


@pytest.mark.parametrize("one_sweep", [False, True], ids=["two passes", "one sweep"])
@pytest.mark.parametrize(("dtype", "name"), EXPECTED)
def test_every_product_of_every_program_is_in_the_precision_of_the_run(dtype, name, one_sweep):
  wanted = EXPECTED[dtype, name]
  seen = set()
  with jax.default_matmul_precision(None):  # as users have it; the suite asks for the highest.
    for program, function, arguments in programs(dtype, name, one_sweep=one_sweep):
      for platform in PLATFORMS:
        found = products(function, arguments, platform)
        seen.add(program)
        assert set(found) == (set() if program == "optimizer" else {wanted}), (program, found)
        print(program, platform, dict(found))
  assert {"update", "optimizer"} <= seen
