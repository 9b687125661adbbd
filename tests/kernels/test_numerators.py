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
from grpo_kernels.linear_logprobs import (
  choice,
  core,
  mosaic_gpu,
  mosaic_gpu_tiles,
  pallas_tpu,
  pallas_tpu_tiles,
  reference,
  sharded,
  token_local,
)
from grpo_kernels.linear_logprobs import numerators as of_softmax
from jax.sharding import Mesh
from test_choice import A100, CPU, H100, V5E, V6E
from test_cross_lowering import MODELS, logits_in, lowered, structs, sweep
from test_token_local import assert_same, case, clipped, differentiate, one_sweep, two_passes


@dataclasses.dataclass(frozen=True)
class Plain:
  """The definition of `numerators`, in JAX; E has the dtype of hidden. The rest is a kernel's."""

  like: Any = mosaic_gpu

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

  def __getattr__(self, name):
    return getattr(self.like, name)


# On a GPU two row tiles at once, three parts of the vocabulary, two stages; on a TPU two groups of
# lanes to a tile: all seams within a few tiles.
KERNELS = {
  "mosaic_gpu": mosaic_gpu.Kernels(
    mosaic_gpu_tiles.Tiles(rows=128, columns=64, stages=2, lead=1, group=2, splits=3, chunk=128)
  ),
  "pallas_tpu": pallas_tpu.PallasTpu(
    tiles=pallas_tpu_tiles.Tiles(rows=128, columns=256, chunk=512, vmem_limit_bytes=1 << 20)
  ),
}
CHOSEN = {
  "mosaic_gpu": mosaic_gpu.Kernels(mosaic_gpu_tiles.Tiles(group=1, splits=2)),
  "pallas_tpu": pallas_tpu.PallasTpu("TPU v6 lite"),
}


@dataclasses.dataclass(frozen=True)
class Interpreted:
  """A kernel in its interpreter."""

  kernels: Any

  def numerators(self, settings, *arguments):
    settings = dataclasses.replace(settings, interpret=True)
    return self.kernels.numerators(settings, *arguments)

  def __getattr__(self, name):
    return getattr(self.kernels, name)


@pytest.fixture
def use(monkeypatch):
  """Returns a function that makes every sweep use an implementation; the choice has its tests."""

  def use(kernels):
    monkeypatch.setattr(choice, "pick_sweep", lambda *_, **__: kernels)

  use(Plain())
  return use


LIKE = [pytest.param(Plain(x), id=x.__name__.rpartition(".")[2]) for x in (mosaic_gpu, pallas_tpu)]


free_entropy = functools.partial(one_sweep, differentiate_entropy=False)


def of_logprobs(logprobs, _, *rest):
  """The loss of `clipped` without the entropy."""
  return clipped(logprobs, None, *rest)


@pytest.mark.long
@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("with_bonus", [False, True])
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
  n, v, temperature, head_layout, chunk, dtype, with_bonus, like, use
):
  loss, of_sweep = (clipped, one_sweep) if with_bonus else (of_logprobs, free_entropy)
  use(like)
  inputs, data, constants = case(n, v, head_layout=head_layout, dtype=dtype)
  data["mask"][0] = True
  settings = {"head_layout": head_layout, "temperature": temperature}
  got = differentiate(of_sweep(loss, data, constants, token_chunk=chunk, **settings), inputs)
  expected = differentiate(two_passes(loss, data, constants, **settings), inputs)
  assert_same(got[0], expected[0], 2e-6)
  assert_same(got[1], expected[1], 5e-6 if dtype == "float32" else 8e-3)


def far_case():
  """Returns a case whose largest logits are 100 nats above all that is looked at before."""
  (hidden, head, _), data, constants = case(12, 301)
  data["advantages"] /= 100  # for a loss of size 1, as the comparison expects.
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
@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize(
  ("sizes", "v", "loss"),
  [
    ((2, 4), 301, of_logprobs),
    ((2, 4), 301, weighted),
    ((2, 4), 301, clipped),
    ((1, 8), 5, clipped),
  ],
  ids=lambda x: getattr(x, "__name__", str(x)),  # each process has other addresses of functions.
)
def test_a_mesh_changes_nothing(sizes, v, loss, like, use):
  use(like)
  chunk = 4 if like.loops_over_all else 3
  inputs, data, constants = far_case() if loss is weighted else case(16, v)
  of_sweep = one_sweep if loss is clipped else free_entropy
  mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), ("rows", "vocab"))
  part = sharded.Partition(mesh, vocab_axis="vocab", token_axes=("rows",))
  got = differentiate(of_sweep(loss, data, constants, token_chunk=chunk, partition=part), inputs)
  expected = differentiate(of_sweep(loss, data, constants, token_chunk=chunk), inputs)
  assert_same(got, expected, 5e-6)


def test_targets_outside_a_vocabulary_that_a_mesh_pads_have_no_gradient(use):
  (hidden, head, targets), data, constants = case(12, 301)
  data["mask"][3] = False
  part = sharded.Partition(Mesh(np.asarray(jax.devices()[:2]), ("vocab",)), vocab_axis="vocab")
  for of_sweep, loss in ((free_entropy, of_logprobs), (one_sweep, clipped)):
    f = of_sweep(loss, data, constants, partition=part)
    _, (d_hidden, d_head) = differentiate(f, (hidden, head, targets.at[3].set(301)))
    assert np.isfinite(d_hidden).all() and np.isfinite(d_head).all()


@pytest.mark.parametrize("like", LIKE)
def test_chunks_behind_the_last_live_token_change_nothing(like, use):
  use(like)
  inputs, data, constants = case(24, 301)
  data["mask"] &= np.arange(24) < 11
  run = lambda live: differentiate(
    free_entropy(of_logprobs, data, constants, token_chunk=8, live=live), inputs
  )
  got, expected = run(jnp.int32(11)), run(None)
  assert_same((got[0][0], got[1]), (expected[0][0], expected[1]), 1e-6)
  assert not np.asarray(got[0][1][0])[16:].any()


def test_loss_alone_takes_no_numerators(use):
  inputs, data, constants = case(12, 301)
  use(None)
  expected = jax.jit(free_entropy(of_logprobs, data, constants))(*inputs)
  use("no kernels")
  found = jax.jit(free_entropy(of_logprobs, data, constants))(*inputs)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def with_entropy(logprobs, entropy, data, constants):
  """The loss of `weighted`, and as much of the entropy."""
  return weighted(logprobs, entropy, data, constants) + jnp.sum(data["of_entropy"] * entropy)


def check(n, d, v, *, head_layout="vd", temperature=1.0, bonus=0.0, scale=3.0, **how):
  """Compares logprobs, entropies and gradients of a sweep in bfloat16 with float64."""
  inputs = conformance.random_case(n, d, v, dtype="bfloat16", head_layout=head_layout, scale=scale)
  g, g_entropy = conformance.cotangents(n)
  g_entropy = bonus * g_entropy
  data = {
    "advantages": jnp.asarray(g, jnp.float32),
    "of_entropy": jnp.asarray(g_entropy, "float32"),
  }
  settings: dict[str, Any] = {"temperature": temperature, "head_layout": head_layout}
  exact = conformance.oracle(*inputs, g=g, g_entropy=g_entropy, **settings)
  f = one_sweep if bonus else free_entropy
  f = f(with_entropy if bonus else weighted, data, None, **how, **settings)
  (_, outputs), gradients = differentiate(f, inputs)
  got = conformance.Outcome(*(np.asarray(x, np.float64) for x in (*outputs, *gradients)))
  conformance.assert_conforms(got, exact, conformance.TOLERANCES["gradient bfloat16"])
  return got


interpreted = pytest.mark.parametrize("name", conformance.INTERPRETED)


@interpreted
@pytest.mark.parametrize("bonus", [0.0, 1.0])
@pytest.mark.parametrize(
  ("n", "d", "v", "head_layout", "temperature", "chunk"),
  [
    (300, 128, 200, "vd", 0.7, None),  # two chunks of two row tiles, the second beside nothing,
    (300, 64, 192, "dv", 1.7, 300),  # three row tiles in two rounds,
    (13, 64, 8, "vd", 1.0, 5),  # parts of the vocabulary without a column.
  ],
)
def test_kernel_agrees_with_float64(name, n, d, v, head_layout, temperature, chunk, bonus, use):
  use(Interpreted(KERNELS[name]))
  how = {"head_layout": head_layout, "temperature": temperature, "token_chunk": chunk}
  check(n, d, v, bonus=bonus, **how)


@pytest.mark.parametrize("scale", [3.0, 12.0])
def test_gradient_of_the_entropy_is_as_exact_for_sure_tokens(scale, use):
  check(64, 64, 512, bonus=100.0, scale=scale, token_chunk=32)


@interpreted
def test_kernel_agrees_with_float64_with_the_tiles_of_the_chip_and_repeats_its_bits(name, use):
  use(Interpreted(CHOSEN[name]))
  runs = [check(150, 128, 208, temperature=0.7) for _ in range(2)]
  jax.tree.map(np.testing.assert_array_equal, *runs)


@interpreted
@pytest.mark.parametrize("columns", [0, 64, 150])
def test_columns_that_are_not_real_have_no_numerators(name, columns):
  hidden, head, targets = conformance.random_case(20, 64, 200, dtype="bfloat16")
  head = head.at[columns:].set(100.0)
  settings = core.Settings(with_entropy=True)
  arguments = (settings, hidden, head, targets, jnp.int32(columns), jnp.zeros(20))
  found = Interpreted(KERNELS[name]).numerators(*arguments)
  right = Plain().numerators(*arguments)
  assert not np.asarray(found[0])[:, columns:].any()
  for mine, expected in zip(jax.tree.leaves(found[2]), jax.tree.leaves(right[2]), strict=True):
    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
  if columns:
    np.testing.assert_allclose(found[1], right[1], rtol=1e-6)


@interpreted
def test_vocabulary_of_the_kernel_is_split_over_a_mesh(name, use):
  use(Interpreted(KERNELS[name]))
  part = sharded.Partition(Mesh(np.asarray(jax.devices()[:2]), ("vocab",)), vocab_axis="vocab")
  check(13, 64, 528, temperature=0.7, token_chunk=5, partition=part)


# Kernel → fault → place in its modules, and what is there instead.
FAULTS = {
  "mosaic_gpu": {
    "missing-wait-for-a-free-slot": ("mosaic_gpu_kernels.await_free", lambda *_: None),
    "missing-wait-for-a-copy": ("mosaic_gpu_kernels.await_full", lambda *_: None),
    "dropped-tail-tile": (
      "mosaic_gpu_kernels.tiles_over",
      lambda size, tile: max(1, size // tile),
    ),
    "target-not-replaced": ("mosaic_gpu.Kernels.replaced", lambda _, values, *__: values),
  },
  "pallas_tpu": {
    "dropped-tail-tile": ("pallas_tpu_tiles.tiles_over", lambda size, tile: max(1, size // tile)),
    "unmasked-tail": ("pallas_tpu_kernels.is_column", lambda column, _: column >= 0),
    "no-temperature": ("pallas_tpu_kernels._tempered", lambda _, difference: difference),
    "target-not-replaced": ("pallas_tpu.PallasTpu.replaced", lambda _, values, *__: values),
  },
}


@pytest.mark.parametrize(
  ("name", "fault"),
  [
    pytest.param(*one.values, fault, marks=one.marks)
    for one in conformance.INTERPRETED
    for fault in (None, *FAULTS[one.values[0]])
  ],
)
def test_fault_in_the_kernel_is_seen(monkeypatch, name, fault, use):
  use(Interpreted(KERNELS[name]))
  sizes = {"n": 5, "d": 192, "v": 328, "temperature": 0.7}  # the last tile of columns is ragged.
  if fault is None:
    check(**sizes)
    return
  place, wrong = FAULTS[name][fault]
  monkeypatch.setattr(f"grpo_kernels.linear_logprobs.{place}", wrong)
  jax.clear_caches()  # what was traced without the fault.
  try:
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
      check(**sizes)
  finally:
    if name == "mosaic_gpu":  # as its interpreter asks for after an error.
      interpreter = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
      importlib.import_module(interpreter).reset_gpu_interpret_mode_state()
    jax.clear_caches()


@pytest.mark.long
@pytest.mark.parametrize(("chip", "platform"), [(H100, "cuda"), (V5E, "tpu"), (V6E, "tpu")])
@pytest.mark.parametrize(("model", "head_layout"), [("Qwen2.5-1.5B", "vd"), ("Llama-3-8B", "dv")])
def test_sweep_lowers_at_the_sizes_of_real_models(model, head_layout, chip, platform):
  with implementations.assumed_chip(chip):
    run = sweep(head_layout=head_layout)
    text = lowered(run, structs(*MODELS[model], head_layout), platform)
  assert "linear_logprobs_numerators" in text
  assert not logits_in(text, MODELS[model][1])


SIZES = {"dtype": "bfloat16", "width": 1536, "columns": 151936, "head_layout": "vd"}


@pytest.mark.parametrize(
  ("chip", "change", "reason"),
  [
    (CPU, {}, ""),
    (V5E, {"dtype": "float32"}, "has numerators in bfloat16, got float32"),
    (V5E, {"width": 65536}, "does not fit in the chip's VMEM at a width of 65536"),
    (A100, {}, "runs on NVIDIA GPUs of the Hopper generation"),
    (H100, {"dtype": "float32"}, "computes in bfloat16, got float32"),
    (H100, {"width": 100}, "multiple of 64, got 100"),
    (H100, {"columns": 50257}, "multiple of 8, got 50257"),
    (H100, {"columns": 50264, "head_layout": "dv"}, "multiple of 64, got 50264"),
  ],
)
def test_sweep_is_plain_xla_where_the_kernel_does_not_fit(chip, change, reason, caplog):
  implementations.log_once.cache_clear()
  sizes = {**SIZES, **change}
  with caplog.at_level(logging.INFO, "grpo_kernels.linear_logprobs"):
    assert [choice.pick_sweep(None, chip, **sizes) for _ in range(2)] == [None, None]
  (record,) = caplog.records
  assert record.getMessage().startswith(f"linear_objective on {chip}: plain XLA")
  assert reason in record.getMessage()
  assert choice.pick_sweep("xla_chunked", chip, **sizes) is None
  if reason:
    with pytest.raises(NotImplementedError, match=reason):
      choice.pick_sweep(choice.SWEEPS[chip.platform], chip, **sizes)


@pytest.mark.parametrize(
  ("chip", "kernel", "columns"),
  [(H100, mosaic_gpu, 151936), (V5E, pallas_tpu, 151936), (V6E, pallas_tpu, 50257)],
)
def test_sweep_takes_the_kernel_of_the_chip(chip, kernel, columns, caplog):
  implementations.log_once.cache_clear()
  name = kernel.__name__.rpartition(".")[2]
  sizes = {**SIZES, "columns": columns}
  with caplog.at_level(logging.INFO, "grpo_kernels.linear_logprobs"):
    assert choice.pick_sweep(None, chip, **sizes) is kernel
  assert [r.getMessage() for r in caplog.records] == [f"linear_objective on {chip}: {name}"]
  assert choice.pick_sweep(name, chip, **sizes) is kernel


def test_sweep_has_no_other_kernels():
  with pytest.raises(ValueError, match=r"no implementation 'reference'.* mosaic_gpu, pallas_tpu"):
    choice.pick_sweep("reference", V5E, **SIZES)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(16384, 151936), (16384, 49152), (300, 151936)])
def test_chunks_of_the_kernel_are_whole_tiles_and_a_part_of_the_tokens(
  tokens, vocabulary, platform
):
  rows = token_local.FUSED_ROWS[platform]
  for arrays in (1, 2):
    chunk = token_local.chunk_size(tokens, vocabulary, platform, arrays)
    assert chunk % rows == 0 or chunk < rows
    assert chunk < tokens and arrays * chunk * vocabulary <= token_local.MAX_NUMERATORS[platform]
