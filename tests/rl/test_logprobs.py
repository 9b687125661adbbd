"""The shift by one, the gather, and what `rl` may import."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import logprobs
from grpo_jax.types import Batch

VOCABULARY, WIDTH = 11, 4


def _batch():
  """One row: prompt 3 4, completions (5 6) and (7), padding; nothing learned of token 6's mate."""
  row = {
    "tokens": [3, 4, 5, 6, 7, 0, 0],
    "segment_ids": [1, 1, 1, 1, 1, 0, 0],
    "branch_ids": [0, 0, 1, 1, 2, 0, 0],
    "positions": [0, 1, 2, 3, 2, 0, 0],
    "predecessors": [0, 0, 1, 2, 1, 0, 0],
    "rollout_ids": [-1, -1, 0, 0, 7, -1, -1],
    "loss_places": [2, 3, 4, -1],
  }
  arrays = {key: jnp.asarray([value], jnp.int32) for key, value in row.items()}
  mask = jnp.asarray([[False, False, True, True, True, False, False]])
  places = jnp.arange(7, dtype=jnp.float32)[None]
  return Batch(loss_mask=mask, advantages=places, behavior_logprobs=-places, **arrays)


def _model(layout, seed=0, length=7):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(1, length, WIDTH)), jnp.float32)
  head = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
  return hidden, head if layout == "vd" else head.T


def _all_logprobs(hidden, head, temperature=1.0):
  return np.asarray(jax.nn.log_softmax(hidden @ head.T / temperature, axis=-1))


@pytest.mark.parametrize("layout", ["vd", "dv"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_completion_is_predicted_from_the_prompts_last_token(layout, temperature):
  hidden, head = _model(layout)
  options = {"head_layout": layout, "temperature": temperature}
  got = jax.jit(functools.partial(logprobs.token_logprobs, **options))(hidden, head, _batch())
  table = _all_logprobs(hidden, _model("vd")[1], temperature)[0]
  # token 5 from place 1 (the prompt's last), 6 from place 2, 7 from place 1 again; then padding.
  expected = [table[1, 5], table[2, 6], table[1, 7], 0.0]
  np.testing.assert_allclose(got[0], expected, rtol=1e-5)


@pytest.mark.long
def test_entropy_comes_from_the_same_distributions():
  hidden, head = _model("vd")
  _, entropy = logprobs.token_logprobs(hidden, head, _batch(), return_entropy=True)
  table = _all_logprobs(hidden, head)[0]
  expected = -(np.exp(table) * table).sum(axis=-1)[[1, 2, 1]]
  np.testing.assert_allclose(entropy[0], [*expected, 0.0], rtol=1e-5)


@pytest.mark.long
def test_places_that_do_not_predict_hold_anything_without_a_trace():
  hidden, head = _model("vd")
  junk = hidden.at[0, jnp.asarray([0, 3, 4, 5, 6])].set(jnp.nan)
  batch = _batch()
  differentiate = jax.jit(
    jax.value_and_grad(lambda h, w: logprobs.token_logprobs(h, w, batch).sum(), argnums=(0, 1))
  )
  value, grads = jax.device_get(differentiate(junk, head))
  expected, expected_grads = differentiate(hidden, head)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  for got, want in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(grads[0][0, [0, 3, 4, 5, 6]], np.zeros((5, WIDTH)))


@pytest.mark.long
def test_plain_rows_are_predicted_from_the_token_before():
  hidden, head = _model("vd", length=4)
  got = logprobs.sequence_logprobs(hidden, head, jnp.asarray([[1, 2, 3, 4]]))
  table = _all_logprobs(hidden, head)[0]
  np.testing.assert_allclose(got[0], [0.0, table[0, 2], table[1, 3], table[2, 4]], rtol=1e-5)


def test_gathered_tokens_keep_their_own_values_and_number_sequences_again():
  batch = dataclasses.replace(_batch(), old_logprobs=jnp.full((1, 4), -3.0))
  tokens = logprobs.gather_loss_tokens(batch)
  np.testing.assert_array_equal(tokens.mask, [[True, True, True, False]])
  np.testing.assert_array_equal(tokens.sequence_ids, [[0, 0, 1, 1]])  # rollout 7 is the second.
  np.testing.assert_array_equal(tokens.advantages, [[2, 3, 4, 0]])
  np.testing.assert_array_equal(tokens.behavior_logprobs, [[-2, -3, -4, 0]])
  np.testing.assert_array_equal(tokens.old_logprobs, np.full((1, 4), -3.0))
  assert tokens.ref_logprobs is None


def test_rows_without_tokens_to_learn_from_are_defined():
  batch = dataclasses.replace(_batch(), loss_places=jnp.full((1, 4), -1))
  tokens = logprobs.gather_loss_tokens(batch)
  assert not tokens.mask.any() and (np.asarray(tokens.sequence_ids) == 0).all()
  hidden, head = _model("vd")
  np.testing.assert_array_equal(logprobs.token_logprobs(hidden, head, batch), np.zeros((1, 4)))


IMPORT = """
import sys, time, jax, jax.numpy
before, start = set(sys.modules), time.perf_counter()
from grpo_jax.rl import (advantages, aggregate, diagnostics, estimators, importance, kl,
  logprobs, losses, masks, objectives, sequence_losses)
print(time.perf_counter() - start)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.long
def test_rl_imports_fast_and_without_models_tokenizers_or_optimizers():
  result = subprocess.run(
    [sys.executable, "-c", IMPORT],
    capture_output=True,
    text=True,
    check=True,
    env={"PYTHONPATH": ":".join(path for path in sys.path if path), "JAX_PLATFORMS": "cpu"},
  )
  seconds, modules = result.stdout.splitlines()
  assert float(seconds) < 2.0
  effectful = {"flax", "transformers", "optax", "orbax", "grain", "torch", "safetensors"}
  effectful |= {"huggingface_hub", "tensorboardX", "ml_collections", "absl", "aiohttp", "requests"}
  assert not effectful & set(modules.split())
  assert {"grpo_jax", "grpo_kernels"} <= set(modules.split())
