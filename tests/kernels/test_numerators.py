"""A sweep whose numerators come from a kernel: float64, two passes, meshes, and faults put in."""

import dataclasses
import functools
import importlib
import logging
from typing import Any

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import implementations
from grpo_kernels.linear_logprobs import choice, core, mosaic_gpu, reference, sharded, token_local
from grpo_kernels.linear_logprobs import numerators as of_softmax
from grpo_kernels.linear_logprobs.mosaic_gpu_tiles import Tiles
from jax.sharding import Mesh
from test_choice import A100, CPU, H100, V5E
from test_cross_lowering import MODELS, logits_in, lowered, structs, sweep
from test_token_local import assert_same, case, clipped, differentiate, one_sweep, two_passes


@dataclasses.dataclass(frozen=True)
class Plain:
  """The definition of `numerators`, in JAX; E has the dtype of hidden."""

  def numerators(self, settings, hidden, head, targets, columns, references):
    logits = reference.dot(hidden, head, head_layout=settings.head_layout)
    size = logits.shape[1]
    column, real = jnp.arange(size)[None, :], size if columns is None else columns
    exponents = (logits - references[:, None]) / settings.temperature
    found = jnp.where(column < real, jnp.exp(exponents), 0.0)
    moment = jnp.sum(jnp.where(column < real, found * exponents, 0.0), axis=1)
    is_target = (column == targets[:, None]) & (column < real)
    statistics = core.Statistics(
      references,
      jnp.sum(found, axis=1),
      moment if settings.with_entropy else None,
      jnp.sum(jnp.where(is_target, logits, 0.0), axis=1),
    )
    largest = jnp.max(jnp.where(column < real, logits, core.LOWEST), axis=1)
    rows = -len(targets) % 8
    return jnp.pad(found, ((0, rows), (0, 0))).astype(hidden.dtype), largest, statistics


# Two row tiles at once, three parts of the vocabulary, two stages: all seams within a few tiles.
SMALL = Tiles(rows=128, columns=64, stages=2, lead=1, group=2, splits=3, chunk=128)


@dataclasses.dataclass(frozen=True)
class Interpreted:
  """The kernel for Hopper in its interpreter."""

  tiles: Tiles = SMALL

  def numerators(self, settings, *arguments):
    settings = dataclasses.replace(settings, interpret=True)
    return mosaic_gpu.Kernels(self.tiles).numerators(settings, *arguments)


@pytest.fixture
def use(monkeypatch):
  """Returns a function that makes every sweep use an implementation; the choice has its tests."""

  def use(kernels):
    monkeypatch.setattr(choice, "pick_sweep", lambda *_, **__: kernels)

  use(Plain())
  return use


free_entropy = functools.partial(one_sweep, differentiate_entropy=False)


def of_logprobs(logprobs, _, *rest):
  """The loss of `clipped` without the entropy."""
  return clipped(logprobs, None, *rest)


@pytest.mark.long
@pytest.mark.parametrize(
  ("n", "v", "temperature", "head_layout", "chunk", "dtype"),
  [
    (40, 301, 0.3, "vd", 8, "float32"),
    (41, 301, 1.0, "dv", 8, "float32"),
    (41, 301, 1.7, "vd", 5, "bfloat16"),
    (1, 97, 1.0, "vd", None, "float32"),
  ],
)
def test_loss_and_gradients_are_those_of_two_passes(
  n, v, temperature, head_layout, chunk, dtype, use
):
  inputs, data, constants = case(n, v, head_layout=head_layout, dtype=dtype)
  data["mask"][0] = True
  settings = {"head_layout": head_layout, "temperature": temperature}
  got = differentiate(
    free_entropy(of_logprobs, data, constants, token_chunk=chunk, **settings), inputs
  )
  expected = differentiate(two_passes(of_logprobs, data, constants, **settings), inputs)
  assert_same(got[0], expected[0], 2e-6)
  assert_same(got[1], expected[1], 5e-6 if dtype == "float32" else 8e-3)


def far_case():
  """Returns a case whose largest logits are 100 nats above all that is looked at before."""
  (hidden, head, _), data, constants = case(12, 301)
  hidden, head = np.array(hidden), np.array(head)
  hidden[:, 0] = 10.0
  head[:, 0], head[200:202, 0] = 0.0, 10.0
  return (jnp.asarray(hidden), jnp.asarray(head), jnp.arange(12, dtype=jnp.int32)), data, constants


def weighted(logprobs, _, data, constants):
  """A loss whose gradient does not vanish for improbable tokens."""
  del constants
  return jnp.sum(data["advantages"] * logprobs)


@pytest.mark.long
def test_a_largest_logit_that_is_far_above_the_reference_is_found_and_used(use, monkeypatch):
  inputs, data, constants = far_case()
  expected = differentiate(two_passes(weighted, data, constants), inputs)
  run = lambda: differentiate(free_entropy(weighted, data, constants, token_chunk=5), inputs)
  right = lambda got: assert_same((got[0][1], got[1]), (expected[0][1], expected[1]), 5e-6)
  right(run())
  monkeypatch.setattr(of_softmax, "MOST_POWERS", np.inf)
  with pytest.raises(AssertionError):
    right(run())


def test_not_a_number_ends_and_stays_in_its_row(use):
  (hidden, head, targets), data, constants = case(12, 301)
  f = free_entropy(weighted, data, constants, token_chunk=6)
  _, (found, _) = jax.jit(f)(hidden.at[3].set(jnp.nan), head, targets)
  _, (right, _) = jax.jit(f)(hidden, head, targets)
  assert np.isnan(found[3])
  np.testing.assert_array_equal(np.delete(found, 3), np.delete(right, 3))


def test_targets_outside_the_vocabulary_have_nan_and_no_gradient(use):
  (hidden, head, targets), data, constants = case(12, 301)
  wrong = np.array(targets)
  wrong[3], wrong[5] = 301, -1
  data["mask"][[3, 5]] = False
  f = free_entropy(of_logprobs, data, constants, token_chunk=4)
  (loss, (logprobs, _)), gradients = jax.device_get(differentiate(f, (hidden, head, wrong)))
  assert np.isnan(logprobs[[3, 5]]).all() and np.isfinite(logprobs).sum() == 10
  (expected, _), right = jax.device_get(differentiate(f, (hidden, head, targets)))
  np.testing.assert_array_equal(loss, expected)
  assert np.isfinite(gradients[1]).all()
  np.testing.assert_array_equal(np.delete(gradients[0], [3, 5], 0), np.delete(right[0], [3, 5], 0))


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "v", "is_far"), [((2, 4), 301, False), ((2, 4), 301, True), ((1, 8), 5, False)], ids=str
)
def test_a_mesh_changes_nothing(sizes, v, is_far, use):
  inputs, data, constants = far_case() if is_far else case(16, v)
  loss = weighted if is_far else of_logprobs
  mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), ("rows", "vocab"))
  part = sharded.Partition(mesh, vocab_axis="vocab", token_axes=("rows",))
  got = differentiate(free_entropy(loss, data, constants, token_chunk=3, partition=part), inputs)
  expected = differentiate(free_entropy(loss, data, constants, token_chunk=3), inputs)
  assert_same(got, expected, 5e-6)


def test_loss_alone_takes_no_numerators(use):
  inputs, data, constants = case(12, 301)
  use(None)
  expected = jax.jit(free_entropy(of_logprobs, data, constants))(*inputs)
  use("no kernels")
  found = jax.jit(free_entropy(of_logprobs, data, constants))(*inputs)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def check(n, d, v, *, head_layout="vd", temperature=1.0, token_chunk=None):
  """Compares logprobs, entropies and gradients of a sweep in bfloat16 with float64."""
  inputs = conformance.random_case(n, d, v, dtype="bfloat16", head_layout=head_layout)
  g, _ = conformance.cotangents(n)
  data = {"advantages": jnp.asarray(g, jnp.float32)}
  settings: dict[str, Any] = {"temperature": temperature, "head_layout": head_layout}
  exact = conformance.oracle(*inputs, g=g, g_entropy=np.zeros(n), **settings)
  f = free_entropy(weighted, data, None, token_chunk=token_chunk, **settings)
  (_, outputs), gradients = differentiate(f, inputs)
  got = conformance.Outcome(*(np.asarray(x, np.float64) for x in (*outputs, *gradients)))
  conformance.assert_conforms(got, exact, conformance.TOLERANCES["gradient bfloat16"])
  return got


interpreted = pytest.mark.parametrize("name", conformance.parametrised("mosaic_gpu"))


@interpreted
@pytest.mark.parametrize(
  ("n", "d", "v", "head_layout", "temperature", "chunk"),
  [
    (300, 128, 200, "vd", 0.7, None),  # two chunks of two row tiles, the second beside nothing,
    (300, 64, 192, "dv", 1.7, 300),  # three row tiles in two rounds,
    (13, 64, 8, "vd", 1.0, 5),  # parts of the vocabulary without a column.
  ],
)
def test_kernel_agrees_with_float64(name, n, d, v, head_layout, temperature, chunk, use):
  use(Interpreted())
  check(n, d, v, head_layout=head_layout, temperature=temperature, token_chunk=chunk)


@interpreted
def test_kernel_agrees_with_float64_with_the_tiles_of_the_chip_and_repeats_its_bits(name, use):
  use(Interpreted(Tiles(group=1, splits=2)))
  runs = [check(150, 128, 208, temperature=0.7) for _ in range(2)]
  jax.tree.map(np.testing.assert_array_equal, *runs)


@interpreted
@pytest.mark.parametrize("columns", [0, 64, 150])
def test_columns_that_are_not_real_have_no_numerators(name, columns):
  hidden, head, targets = conformance.random_case(20, 64, 200, dtype="bfloat16")
  head = head.at[columns:].set(100.0)
  settings = core.Settings(with_entropy=True)
  arguments = (settings, hidden, head, targets, jnp.int32(columns), jnp.zeros(20))
  found, right = Interpreted().numerators(*arguments), Plain().numerators(*arguments)
  assert not np.asarray(found[0])[:, columns:].any()
  for mine, expected in zip(jax.tree.leaves(found[2]), jax.tree.leaves(right[2]), strict=True):
    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
  if columns:
    np.testing.assert_allclose(found[1], right[1], rtol=1e-6)


# Module, function, and its replacement.
FAULTS = {
  "missing-wait-for-a-free-slot": ("mosaic_gpu_kernels", "await_free", lambda *_: None),
  "missing-wait-for-a-copy": ("mosaic_gpu_kernels", "await_full", lambda *_: None),
  "dropped-tail-tile": (
    "mosaic_gpu_kernels",
    "tiles_over",
    lambda size, tile: max(1, size // tile),
  ),
  "target-not-replaced": ("token_local", "_replaced", lambda numerators, *_: numerators),
}


@interpreted
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_fault_in_the_kernel_is_seen(monkeypatch, name, fault, use):
  use(Interpreted())
  sizes = {"n": 5, "d": 192, "v": 328, "temperature": 0.7}  # six tiles, the last of them ragged.
  if fault is None:
    check(**sizes)
    return
  module, function, wrong = FAULTS[fault]
  monkeypatch.setattr(f"grpo_kernels.linear_logprobs.{module}.{function}", wrong)
  jax.clear_caches()  # what was traced without the fault.
  try:
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
      check(**sizes)
  finally:
    # As the interpreter asks for after an error.
    interpreter = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
    importlib.import_module(interpreter).reset_gpu_interpret_mode_state()
    jax.clear_caches()


@pytest.mark.long
@pytest.mark.parametrize(("model", "head_layout"), [("Qwen2.5-1.5B", "vd"), ("Llama-3-8B", "dv")])
def test_sweep_lowers_at_the_sizes_of_real_models(model, head_layout):
  with implementations.assumed_chip(H100):
    run = sweep(head_layout=head_layout)
    text = lowered(run, structs(*MODELS[model], head_layout), "cuda")
  assert "linear_logprobs_numerators" in text
  assert not logits_in(text, MODELS[model][1])


SIZES = {"dtype": "bfloat16", "width": 1536, "columns": 151936, "head_layout": "vd"}


@pytest.mark.parametrize(
  ("chip", "change", "reason"),
  [
    (CPU, {}, ""),
    (V5E, {}, ""),
    (A100, {}, "runs on NVIDIA GPUs of the Hopper generation"),
    (H100, {"dtype": "float32"}, "computes in bfloat16, got float32"),
    (H100, {"width": 100}, "multiple of 64, got 100"),
    (H100, {"columns": 50257}, "multiple of 8, got 50257"),
    (H100, {"columns": 50264, "head_layout": "dv"}, "multiple of 64, got 50264"),
    (H100, {"differentiates_entropy": True}, "no gradient of the entropy"),
  ],
)
def test_sweep_is_plain_xla_where_the_kernel_does_not_fit(chip, change, reason, caplog):
  implementations.log_once.cache_clear()
  sizes = {**SIZES, "differentiates_entropy": False, **change}
  with caplog.at_level(logging.INFO, "grpo_kernels.linear_logprobs"):
    assert [choice.pick_sweep(None, chip, **sizes) for _ in range(2)] == [None, None]
  (record,) = caplog.records
  assert record.getMessage().startswith(f"linear_objective on {chip}: plain XLA")
  assert reason in record.getMessage()
  assert choice.pick_sweep("xla_chunked", chip, **sizes) is None
  if reason:
    with pytest.raises(NotImplementedError, match=reason):
      choice.pick_sweep("mosaic_gpu", chip, **sizes)


def test_sweep_takes_the_kernel_on_hopper(caplog):
  implementations.log_once.cache_clear()
  with caplog.at_level(logging.INFO, "grpo_kernels.linear_logprobs"):
    assert choice.pick_sweep(None, H100, differentiates_entropy=False, **SIZES) is mosaic_gpu
  assert [r.getMessage() for r in caplog.records] == [f"linear_objective on {H100}: mosaic_gpu"]
  with pytest.raises(ValueError, match="no implementation 'pallas_tpu'"):
    choice.pick_sweep("pallas_tpu", V5E, differentiates_entropy=False, **SIZES)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(16384, 151936), (16384, 49152), (300, 151936)])
def test_chunks_of_the_kernel_are_whole_tiles_and_a_part_of_the_tokens(tokens, vocabulary):
  chunk = token_local.chunk_size(tokens, vocabulary, "gpu", is_fused=True)
  assert chunk % token_local.FUSED_ROWS == 0 or chunk < token_local.FUSED_ROWS
  assert chunk < tokens and chunk * vocabulary <= token_local.MAX_NUMERATORS
