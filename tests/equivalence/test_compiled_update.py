"""What the compiled update holds in memory: no logits of a batch, no second model."""

import functools
import re

import equivalence_case as case
import jax
import jax.numpy as jnp
import pytest

from grpo_jax.batching import layout, packing
from grpo_jax.learn import optim, token_scores, train_step
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.rl import objectives
from grpo_jax.types import Batch, Denominators

V, D, ROWS, N = 1009, 24, 3, 29  # primes: a product of them in a shape is no accident.
CONFIG = ModelConfig("llama", V, D, 40, 2, 4, 2, 6, tie_embeddings=True)


@functools.cache
def compiled(implementation, **loss):
  """Returns the compiled gradient function of a microbatch of ROWS rows with N learned tokens."""
  logprobs = token_scores.make_logprobs(CONFIG, implementation=implementation)
  tx, _ = optim.make(10)
  objective = objectives.make(kl_coef=0.0, **loss)
  update = train_step.make_update(logprobs, tx, objective, report_entropy=False)
  arrays = layout.blank(packing.Shape(ROWS, 64, N))
  batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
  params = jax.eval_shape(lambda: case.params(config=CONFIG))
  # Of the leaves: `lower` would put descriptions of arrays into a Batch, which checks its types.
  leaves, tree = jax.tree.flatten(batch)
  first = lambda params, leaves: update.differentiate(
    params, update.start(params), tree.unflatten(leaves), Denominators(1.0, 1.0)
  )
  return jax.jit(first).lower(params, leaves).compile()


def holds_logits(text):
  """Returns whether some buffer has the vocabulary beside (rows ×) learned tokens or places."""
  shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"\w\d+\[([\d,]+)\]", text)}
  tokens = {ROWS * N, N, ROWS * 64, 64}
  return any(V in shape and tokens & set(shape) for shape in shapes)


@pytest.mark.long
@pytest.mark.parametrize("loss", [{}, {"entropy_coef": 0.1}], ids=["", "entropy"])
def test_no_buffer_of_tokens_by_vocabulary_is_alive(loss):
  lean, full = compiled("xla_chunked", **loss), compiled("reference", **loss)
  assert holds_logits(full.as_text())  # so the search would find them.
  assert not holds_logits(lean.as_text())
  saved = full.memory_analysis().temp_size_in_bytes - lean.memory_analysis().temp_size_in_bytes
  assert saved > 0.5 * ROWS * N * V * 4


@pytest.mark.long
def test_entropy_is_computed_only_where_it_is_asked_for():
  assert (
    compiled("xla_chunked").cost_analysis()["flops"]
    < compiled("xla_chunked", entropy_coef=0.1).cost_analysis()["flops"]
  )


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_optimizer_works_in_place(max_grad_norm):
  config = ModelConfig("llama", 4096, 64, 128, 4, 4, 2, 16, tie_embeddings=True)
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
  tx, schedule = optim.make(10, max_grad_norm=max_grad_norm, weight_decay=0.1)
  update = train_step.make_update(
    token_scores.make_logprobs(config),
    tx,
    objectives.make(kl_coef=0.0),
    schedule=schedule,
    report_entropy=False,
  )
  opt_state = jax.eval_shape(tx.init, params)
  memory = update.apply.lower(params, opt_state, params, jnp.zeros(())).compile().memory_analysis()
  model = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
  assert memory.alias_size_in_bytes >= 3 * model  # parameters and two moments, overwritten.
  assert memory.temp_size_in_bytes < 0.02 * model
