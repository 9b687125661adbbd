"""The compiled Hopper kernel at the sizes of real models: `make test-gpu` on a machine with one."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensor_cores
from conformance import TOLERANCES
from grpo_kernels.linear_logprobs import choice, core, linear_logprobs
from grpo_kernels.linear_logprobs.token_local import linear_objective
from test_compiled_for_devices import BOUNDS, GIB
from test_cross_lowering import MODELS, TOKENS, passes, structs, sweep

CHIP = choice.current_chip()
REFUSAL = choice.IMPLEMENTATIONS["mosaic_gpu"].refusal(CHIP, jnp.bfloat16)
pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif(REFUSAL is not None, reason=f"mosaic_gpu {REFUSAL}; see `make test-gpu`"),
]
models = pytest.mark.parametrize("model", list(MODELS))
layouts = pytest.mark.parametrize("head_layout", ["vd", "dv"])
SAMPLE = 48  # tokens, and columns, that are compared with float64.


def inputs(model, head_layout="vd", tokens=TOKENS, vocabulary=None):
  """Returns hidden, head and targets in bf16; logits have a standard deviation of 3."""
  width, usual = MODELS[model]
  vocabulary = vocabulary or usual
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (tokens, width)) * (3 / width**0.5)
  head = jax.random.normal(keys[1], (vocabulary, width), jnp.bfloat16)
  head = head if head_layout == "vd" else head.T
  targets = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
  return hidden.astype(jnp.bfloat16), head, targets


@functools.cache
def outputs(model, head_layout, temperature=1.0, tokens=TOKENS, vocabulary=None, is_sweep=False):
  """Returns inputs, cotangents, and what the kernel makes of them, gradients included."""
  hidden, head, targets = inputs(model, head_layout, tokens, vocabulary)
  keys = jax.random.split(jax.random.key(1))
  cotangents = tuple(jax.random.normal(key, (tokens,)) for key in keys)
  settings = {"head_layout": head_layout, "temperature": temperature, "return_entropy": True}
  settings["implementation"] = "mosaic_gpu"

  def two_passes(hidden, head):
    f = lambda h, w: linear_logprobs(h, w, targets, **settings)
    found, pull = jax.vjp(f, hidden, head)
    return *found, *pull(cotangents)

  def one_sweep(hidden, head):
    def loss(hidden, head):
      f = lambda logprobs, _, weights, __: jnp.sum(weights * logprobs)
      free = {"differentiate_entropy": False, **settings}
      total, *found = linear_objective(hidden, head, targets, f, cotangents[0], **free)
      return total, found

    (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return *found, *gradients

  if is_sweep:
    cotangents = cotangents[0], jnp.zeros(tokens)
  run = jax.jit(one_sweep if is_sweep else two_passes)
  return (hidden, head, targets), cotangents, run(hidden, head)


def assert_close_to_float64(model, head_layout, *how, **more):
  """Compares some tokens, and some columns of the head's gradient, with float64."""
  given, cotangents, found = outputs(model, head_layout, *how, **more)
  tokens, temperature = len(given[0]), how[0] if how else 1.0
  hidden, head, targets = (np.asarray(x.astype(jnp.float32), np.float64) for x in given)
  head = head if head_layout == "vd" else head.T
  targets = targets.astype(int)
  g, g_entropy = (np.asarray(x, np.float64) for x in cotangents)
  logprobs, entropy, d_hidden, d_head = (
    np.asarray(x.astype(jnp.float32), np.float64) for x in found
  )
  rng = np.random.default_rng(0)
  rows = rng.choice(tokens, min(SAMPLE, tokens), replace=False)
  z = hidden[rows] @ head.T / temperature
  lse = np.logaddexp.reduce(z, axis=1)
  logp = z - lse[:, None]
  p = np.exp(logp)
  exact_entropy = -(p * logp).sum(axis=1)
  exact = np.take_along_axis(logp, targets[rows, None], axis=1)[:, 0]
  of_logprob, of_entropy = tensor_cores.allowed(hidden.shape[1], z, targets[rows], TOLERANCES)
  assert_within(logprobs[rows], exact, of_logprob)
  assert_within(entropy[rows], exact_entropy, of_entropy)

  slope = -p * (g[rows, None] + g_entropy[rows, None] * (logp + exact_entropy[:, None]))
  np.add.at(slope, (np.arange(len(rows)), targets[rows]), g[rows])
  assert_relative(d_hidden[rows], slope @ head / temperature)

  # All tokens at some columns: the normaliser of a token is what its logprob says.
  columns = np.unique(np.concatenate([targets[rows], rng.choice(head.shape[0], SAMPLE)]))
  target_logit = np.einsum("nd,nd->n", hidden, head[targets]) / temperature
  logp = hidden @ head[columns].T / temperature - (target_logit - logprobs)[:, None]
  slope = -np.exp(logp) * (g[:, None] + g_entropy[:, None] * (logp + entropy[:, None]))
  slope += np.where(targets[:, None] == columns, g[:, None], 0.0)
  of_head = d_head if head_layout == "vd" else d_head.T
  assert_relative(of_head[columns], slope.T @ hidden / temperature)


def assert_within(mine, exact, allowed):
  """Compares values with those of float64, each with its own allowed error."""
  error = np.abs(mine - exact)
  worst = np.argmax(error / allowed)
  assert (error <= allowed).all(), f"{mine[worst]} for {exact[worst]} ± {allowed[worst]:.2g}"


def assert_relative(mine, exact):
  """Compares gradients by their Euclidean norms."""
  size, error = np.linalg.norm(exact), np.linalg.norm(mine - exact)
  assert error <= TOLERANCES["gradient bfloat16"] * size + 1e-5, f"{error} of {size}"


@layouts
@models
def test_kernel_agrees_with_float64_at_the_size_of(model, head_layout):
  assert_close_to_float64(model, head_layout)


@pytest.mark.parametrize(
  ("tokens", "vocabulary", "temperature", "head_layout"),
  [
    (1, 49152, 1.0, "vd"),
    (1000, 50257, 0.3, "vd"),
    (257, 50257, 1.7, "dv"),
    (300, 1, 1.0, "vd"),
    (300, 127, 1.0, "dv"),
    (4097, 8191, 1.0, "vd"),
  ],
)
def test_kernel_agrees_with_float64_at_odd_sizes(tokens, vocabulary, temperature, head_layout):
  assert_close_to_float64("SmolLM2-135M", head_layout, temperature, tokens, vocabulary)


@models
def test_sweep_agrees_with_float64_at_the_size_of(model):
  assert_close_to_float64(model, "vd", is_sweep=True)


def test_sweep_agrees_with_float64_at_an_odd_size_and_a_temperature():
  assert_close_to_float64("SmolLM2-135M", "dv", 0.3, 2999, 8192, is_sweep=True)


@pytest.mark.parametrize("is_sweep", [False, True])
@models
def test_repetition_is_bitwise_equal(model, is_sweep):
  (hidden, head, targets), _, _ = outputs(model, "vd")
  two_passes = passes(core.entry(choice.load("mosaic_gpu")))["value_and_grad"]
  run = jax.jit(sweep() if is_sweep else two_passes)
  first = run(hidden, head, targets)
  for _ in range(5):
    again = run(hidden, head, targets)
    assert all(bool(x) for x in jax.tree.leaves(jax.tree.map(jnp.array_equal, first, again)))


MEASURE = """
import json, sys, jax, jax.numpy as jnp
from grpo_kernels.linear_logprobs import linear_logprobs
tokens, width, vocabulary = map(int, sys.argv[1:])
make = jax.jit(lambda k, s: jax.random.normal(k, s, jnp.bfloat16), static_argnums=1)
hidden = make(jax.random.key(0), (tokens, width))
head = make(jax.random.key(1), (vocabulary, width))
targets = jnp.zeros(tokens, jnp.int32)
loss = lambda h, w: linear_logprobs(h, w, targets, implementation="mosaic_gpu").sum()
run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(hidden, head).compile()
before = jax.devices()[0].memory_stats()["bytes_in_use"]
peak_before = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
out = jax.block_until_ready(run(hidden, head))
stats = jax.devices()[0].memory_stats()
results = sum(x.nbytes for x in jax.tree.leaves(out))
print(json.dumps([peak_before, stats["peak_bytes_in_use"], before + results]))
"""


@pytest.mark.parametrize("model", list(BOUNDS["mosaic_gpu", "value_and_grad"]))
def test_memory_that_the_device_counts_is_within_bounds(model):
  # A process of its own: a device never forgets its peak.
  width, vocabulary = MODELS[model]
  command = [sys.executable, "-c", MEASURE, str(TOKENS), str(width), str(vocabulary)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  peak_before, peak, kept = json.loads(done.stdout.splitlines()[-1])
  assert peak > peak_before, "making the inputs took more than the kernel: nothing was measured"
  bound = BOUNDS["mosaic_gpu", "value_and_grad"][model]
  assert peak - kept <= bound, f"{(peak - kept) / GIB:.3f} GiB beside inputs and gradients"


def test_kernel_is_the_default_here():
  hidden, head, targets = inputs("SmolLM2-135M", tokens=64)
  chosen = linear_logprobs(hidden, head, targets)
  named = linear_logprobs(hidden, head, targets, implementation="mosaic_gpu")
  assert bool(jnp.all(chosen == named))


@models
def test_chunked_form_has_the_memory_that_it_promises(model):
  run = jax.jit(passes(core.entry(choice.load("xla_chunked")))["value_and_grad"])
  memory = run.lower(*structs(*MODELS[model])).compile().memory_analysis()
  assert memory.temp_size_in_bytes <= BOUNDS["xla_chunked", "value_and_grad"][model]
