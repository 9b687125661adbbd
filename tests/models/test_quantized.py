"""Quantised kernels: codes, errors, memory, reading, meshes, and gradients through them."""

import functools
import statistics
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.learn import adapters, sharding
from grpo_jax.models import (
  export,
  leaves,
  loading,
  lora,
  parameter_reading,
  quantized,
  safetensors,
  transformer,
)
from grpo_jax.models.errors import ModelError
from grpo_jax.models.placement import MeshPlacement
from grpo_jax.models.products import Products
from tests.models import tiny

FORMATS = pytest.mark.parametrize(
  "form", list(quantized.FORMATS.values()), ids=list(quantized.FORMATS)
)
# Two devices split every width into whole blocks.
CONFIG = tiny.config(
  hidden_size=128,
  intermediate_size=256,
  num_heads=16,
  num_kv_heads=8,
  num_layers=2,
  tie_embeddings=False,
)


def gaussian(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
  ("form", "inputs", "error", "bits"),
  [(quantized.Int8, 128, 0.0064, 8.25), (quantized.Nf4, 128, 0.092, 4.5)],
  ids=["int8", "nf4"],
)
def test_errors_and_memory_are_those_known_for_gaussians(form, inputs, error, bits):
  kernel = gaussian(3, inputs, 256)
  made = quantized.quantize(kernel, form)
  back = np.asarray(quantized.dequantized(made))
  assert made.shape == back.shape == kernel.shape
  assert np.linalg.norm(back - kernel) / np.linalg.norm(kernel) == pytest.approx(error, rel=0.02)
  assert 8 * sum(x.nbytes for x in jax.tree.leaves(made)) / kernel.size == bits


def test_nf4_has_the_values_of_bitsandbytes():
  # bitsandbytes/functional.py, get_4bit_type("nf4").
  theirs = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
  -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
  0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
  0.7229568362236023 1.0"""
  assert list(quantized.NF4_VALUES) == [float(x) for x in theirs.split()]
  # The quantiles of appendix E: 8 of the upper half, 7 of the lower, and 0, scaled to [-1, 1].
  offset = 0.9677083
  quantiles = np.vectorize(statistics.NormalDist().inv_cdf)
  upper = quantiles(np.linspace(offset, 0.5, 9)[:-1])
  lower = -quantiles(np.linspace(offset, 0.5, 8)[:-1])
  expected = np.sort(np.concatenate([upper, [0], lower])) / upper.max()
  np.testing.assert_allclose(quantized.NF4_VALUES, expected, atol=1e-6)


def test_every_value_of_the_tables_comes_back_exactly():
  scale = np.float32(0.25)
  column = np.tile(np.asarray(quantized.NF4_VALUES, np.float32), 8)[:, None] * scale
  made = quantized.quantize(column, quantized.Nf4)
  np.testing.assert_array_equal(quantized.dequantized(made), column)
  integers = np.arange(-127, 128, dtype=np.float32)[:, None]
  np.testing.assert_array_equal(
    quantized.dequantized(quantized.quantize(integers, quantized.Int8)), integers
  )


@FORMATS
def test_a_value_gets_the_nearest_code(form):
  kernel = gaussian(96, 3)  # the last block of nf4 is shorter.
  back = np.asarray(quantized.dequantized(quantized.quantize(kernel, form)))
  if form is quantized.Int8:
    scale = np.abs(kernel).max(axis=0, keepdims=True)
    table = np.arange(-127, 128) / 127
  else:
    blocks = np.abs(kernel[:64]).max(axis=0), np.abs(kernel[64:]).max(axis=0)
    scale = np.repeat(np.stack(blocks), [64, 32], axis=0)
    table = np.asarray(quantized.NF4_VALUES)
  nearest = np.abs(kernel[..., None] / np.broadcast_to(scale, kernel.shape)[..., None] - table)
  expected = table[nearest.argmin(axis=-1)] * scale
  np.testing.assert_allclose(back, expected, atol=1e-6)


@FORMATS
def test_zeros_stay_zeros_and_no_scale_is_infinite(form):
  kernel = np.zeros((64, 2), np.float32)
  kernel[0, 0] = -1e-30
  back = np.asarray(quantized.dequantized(quantized.quantize(kernel, form)))
  np.testing.assert_allclose(back, kernel, rtol=1e-6)


def test_an_odd_number_of_inputs_is_refused_for_nf4():
  with pytest.raises(ModelError, match="packs pairs of inputs, but a kernel has 37"):
    quantized.described((2, 37, 4), quantized.Nf4)
  assert quantized.described((2, 37, 4), quantized.Int8).shape == (2, 37, 4)


def test_a_split_within_a_block_is_refused_by_name():
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  lies = lambda *axes: NamedSharding(mesh, PartitionSpec(None, *axes))
  with pytest.raises(
    ModelError, match=r"mesh.fsdp splits the 192 inputs .* \[192, 8\] into parts of 48"
  ):
    quantized.described((2, 192, 8), quantized.Nf4, lies("fsdp", "tensor"))
  with pytest.raises(ModelError, match=r"mesh.fsdp × mesh.tensor splits the 256 inputs .* of 32"):
    quantized.described((2, 256, 8), quantized.Nf4, lies(("fsdp", "tensor"), None))
  found = quantized.described((2, 256, 8), quantized.Nf4, lies("fsdp", "tensor"))
  assert found.scale.sharding.shard_shape(found.scale.shape) == (2, 1, 4)
  found = quantized.described((2, 192, 8), quantized.Int8, lies("fsdp", "tensor"))
  assert found.codes.sharding.shard_shape(found.codes.shape) == (2, 48, 4)
  assert found.scale.sharding.shard_shape(found.scale.shape) == (2, 1, 4)


@pytest.mark.long
@FORMATS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_their_gradients_are_those_of_the_dequantised_matrix(form, dtype):
  products = Products(jnp.dtype(dtype))
  kernel = jax.tree.map(jnp.asarray, quantized.quantize(gaussian(64, 5), form))
  matrix = np.asarray(quantized.dequantized(kernel, products.compute_dtype), np.float32)
  x = jnp.asarray(gaussian(2, 3, 64, seed=1))
  y, pull = jax.vjp(lambda x: products.dot(x, kernel), x)
  cotangent = gaussian(2, 3, 5, seed=2)
  rounded = lambda x: np.asarray(jnp.asarray(x).astype(dtype), np.float32)
  np.testing.assert_allclose(y, rounded(x) @ matrix, rtol=1e-5, atol=1e-4)
  np.testing.assert_allclose(
    pull(jnp.asarray(cotangent))[0], rounded(cotangent) @ matrix.T, rtol=1e-5, atol=1e-4
  )


# Models.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return export.to_huggingface(
    tiny.random_params(CONFIG), CONFIG, tmp_path_factory.mktemp("m") / "m"
  )


def read(folder, base_dtype, mesh=None):
  dtypes = adapters.read_dtypes(lora.AdapterOptions(rank=2, base_dtype=base_dtype))
  lies = lambda axes: jax.tree.map(
    lambda leaf, at: jax.tree.map(
      lambda x: x.sharding, parameter_reading.described(leaf, at, dtypes)
    ),
    leaves.tree(CONFIG),
    sharding.param_shardings(axes, mesh, shapes=leaves.tree(CONFIG)),
  )
  return loading.load(folder, sharding=None if mesh is None else lies, dtype=dtypes).params


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_kernels_are_quantised_as_they_are_read(folder, base_dtype):
  params, form = read(folder, base_dtype), quantized.FORMATS[base_dtype]
  exact = tiny.random_params(CONFIG)
  for name, kernel in params["layers"].items():
    whole = np.asarray(exact["layers"][name])
    if "norm" in name:
      np.testing.assert_array_equal(kernel, whole)
      continue
    assert isinstance(kernel, form)
    jax.tree.map(np.testing.assert_array_equal, kernel, quantized.quantize(whole, form))
  assert params["embed"].dtype == params["head"].dtype == jnp.bfloat16
  assert params["final_norm"].dtype == jnp.float32


@pytest.mark.long
def test_no_kernel_is_on_the_host_in_full_precision(tmp_path, monkeypatch):
  config = tiny.config(hidden_size=256, intermediate_size=4096, num_layers=2, vocab_size=64)
  large = export.to_huggingface(tiny.random_params(config), config, tmp_path / "m")
  monkeypatch.setattr(parameter_reading, "CHUNK_VALUES", 1 << 14)
  dtypes = adapters.read_dtypes(lora.AdapterOptions(rank=2, base_dtype="nf4"))
  tensors = safetensors.open_folder(large)
  tracemalloc.start()
  parameter_reading.read_params(tensors, config, dtype=dtypes)
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  of_leaf = 2 * 256 * 4096  # weights.
  # The codes of all three leaves (CPUs share them with the host), and some rows: far below the four
  # bytes of one leaf in float32, or two in bfloat16.
  assert most < 2.5 * of_leaf


@functools.cache
def tokens():
  ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (4, 8)).astype(np.int32)
  return tiny.plain(ids)


def scores(params, inputs, products):
  """Returns hidden states, and their gradient with respect to an adapter and to the embeddings."""
  options = lora.AdapterOptions(rank=4, targets=("q", "o", "down"))
  rng = np.random.default_rng(2)
  own = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, "float32"),
    lora.tree(CONFIG, options),
  )

  def states(own, embed, frozen):
    weights = lora.join({**frozen, "embed": embed}, own, options.scale)
    return transformer.hidden_states(weights, CONFIG, *inputs, products=products, remat="full")

  def loss(own, embed, frozen):
    found = states(own, embed, frozen)
    return jnp.sum(found * found * jnp.arange(1.0, 129.0)[None, None]), found

  embed = params["embed"].astype(jnp.float32)
  compute = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, found), grads = compute(own, embed, params)
  return found, grads


def as_arrays(params):
  """Returns the same weights, dequantised."""
  stack = {name: quantized.dequantized(x) for name, x in params["layers"].items()}
  return {**params, "layers": stack}


def mixed(folder, mesh=None):
  """Returns a model with kernels of both formats among those with the same input."""
  int8, nf4 = (read(folder, base_dtype, mesh) for base_dtype in ("int8", "nf4"))
  stack = {name: nf4["layers"][name] for name in ("k", "up", "down")}
  return {**int8, "layers": {**int8["layers"], **stack}}


@pytest.mark.long
def test_a_model_on_a_mesh_computes_what_it_does_dequantised_on_one_device(folder):
  alone = mixed(folder)
  expected = scores(as_arrays(alone), tokens(), Products())
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
  params = mixed(folder, mesh)
  jax.tree.map(np.testing.assert_array_equal, params, alone)
  for name in ("q", "up"):
    codes = params["layers"][name].codes
    assert codes.addressable_shards[0].data.size == codes.size // 4
  inputs = sharding.put(tokens(), mesh)
  for found in (
    scores(params, inputs, Products(placement=MeshPlacement(mesh))),
    scores(alone, tokens(), Products()),
  ):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())
