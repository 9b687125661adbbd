"""Products in bfloat16 whose results are rounded: at which places, how often, by how much."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import parts

from grpo_jax.models import layers, leaves, mixed_precision, rotary, transformer
from grpo_jax.models.products import FLOAT32, Products
from tests.models import tiny

BFLOAT16 = Products("bfloat16")
WIDE = Products("bfloat16", "float32")


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rounded(x):
  """Returns what bfloat16 keeps of float64 numbers."""
  return np.asarray(np.asarray(x, jnp.bfloat16), np.float64)


def distance(x, exact):
  return np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)


def test_results_are_written_in_the_compute_dtype_unless_float32_is_asked_for():
  assert BFLOAT16.out_dtype == Products(jnp.bfloat16, jnp.bfloat16).out_dtype == jnp.bfloat16
  assert (BFLOAT16, hash(BFLOAT16)) == (Products(jnp.bfloat16), hash(Products(jnp.bfloat16)))
  assert WIDE.out_dtype == FLOAT32.out_dtype == Products("float32").out_dtype == jnp.float32
  with pytest.raises(ValueError, match="product_dtype='bfloat16' needs .*, not 'float32'"):
    Products("float32", "bfloat16")


def test_sums_are_float32_and_are_rounded_once_also_where_float32_follows():
  """As XLA leaves out conversions to bfloat16 and back, if it may."""
  x, w = random(5, 3000).astype(jnp.bfloat16), random(3000, 70, seed=1).astype(jnp.bfloat16)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)

  @tiny.jit
  def after(x, w):
    y = BFLOAT16.dot(x, w, BFLOAT16.out_dtype)
    return y, y.astype(jnp.float32), jax.nn.silu(y.astype(jnp.float32))

  y, wide, silu = after(x, w)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(wide, y.astype(jnp.float32))
  np.testing.assert_allclose(silu, jax.nn.silu(y.astype(jnp.float32)), rtol=1e-6, atol=1e-30)
  # Sums in bfloat16 would be off by many units of the last bit.
  assert np.mean(np.asarray(wide, np.float64) == rounded(exact)) > 0.99
  eager = BFLOAT16.dot(x, w, BFLOAT16.out_dtype)
  np.testing.assert_array_equal(eager, y)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_accelerators_round_in_the_product_and_cpus_behind_it(platform):
  operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((5, 30), (30, 7))]
  product = jax.jit(functools.partial(mixed_precision.einsum, "ti,io->to", dtype=jnp.bfloat16))
  text = product.trace(*operands).lower(lowering_platforms=(platform,)).as_text()
  behind = "(tensor<5x30xbf16>, tensor<30x7xbf16>) -> tensor<5x7xf32>"
  if platform == "cpu":  # the factors stay bfloat16: XLA is not to convert a kernel.
    assert behind in text and "reduce_precision" in text
  else:
    assert behind.replace("f32", "bf16") in text and "f32" not in text.replace("bf16", "")
  assert "case" not in text and text.count("dot_general") == 1


def of_mlp(config, x, params, cotangent):
  """Computes the MLP and its gradients in float64, rounded at the places that are promised."""
  x, weights = rounded(x), {name: rounded(params[name]) for name in ("gate", "up", "down")}
  bias = {n: np.asarray(params.get(f"{n}_bias", 0.0), np.float64) for n in ("gate", "up", "down")}
  gate, up = (rounded(x @ weights[n]) + bias[n] for n in ("gate", "up"))
  sigmoid = 1 / (1 + np.exp(-gate))
  gated = rounded(gate * sigmoid * up)
  y = gated @ weights["down"] + bias["down"]
  g = rounded(cotangent)
  of_gated = rounded(g @ weights["down"].T)
  of_gate = of_gated * up * sigmoid * (1 + gate * (1 - sigmoid))
  of_up = of_gated * gate * sigmoid
  flat = lambda a: a.reshape(-1, a.shape[-1])
  gradients = {
    "down": flat(gated).T @ flat(g),
    "gate": flat(x).T @ flat(rounded(of_gate)),
    "up": flat(x).T @ flat(rounded(of_up)),
  }
  if config.mlp_bias:  # of sums that were not rounded.
    gradients |= {"gate_bias": flat(of_gate).sum(0), "up_bias": flat(of_up).sum(0)}
    gradients["down_bias"] = flat(np.asarray(cotangent, np.float64)).sum(0)
  of_x = rounded(of_gate) @ weights["gate"].T + rounded(of_up) @ weights["up"].T
  return y, of_x, gradients


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_the_mlp_rounds_gate_up_their_product_and_each_cotangent_once(mlp_bias):
  config = tiny.config(mlp_bias=mlp_bias)
  names = [name for name in leaves.layer(config) if re.match("gate|up|down", name)]
  params = {name: tiny.random_params(config)["layers"][name][0] for name in names}
  x, cotangent = random(2, 9, 24), random(2, 9, 24, seed=1)

  @tiny.jit
  def ours(params, x):
    y, pull = jax.vjp(lambda p, x: layers.mlp(p, x, config=config, products=BFLOAT16), params, x)
    return y, *pull(cotangent)

  y, gradients, of_x = ours(params, x)
  wanted_y, wanted_of_x, wanted = of_mlp(config, x, params, cotangent)
  # A rounding more or less, anywhere, is 1e-3; a sum in another order flips few of them.
  assert distance(y, wanted_y) < 2e-4
  assert distance(of_x, wanted_of_x) < 2e-4
  for name, exact in wanted.items():
    assert distance(gradients[name], exact) < 2e-4, name
  assert {g.dtype for g in (y, of_x, *gradients.values())} == {jnp.dtype(jnp.float32)}


def of_qkv(config, params, x, angles):
  """Computes q, k and v in float64, rounded where it is promised: products, before their biases."""
  cos, sin = (np.asarray(a, np.float64)[:, :, None] for a in angles)
  found = []
  for name in "qkv":
    y = rounded(rounded(x) @ rounded(params[name])) + np.asarray(params[f"{name}_bias"], np.float64)
    y = y.reshape(*y.shape[:2], -1, config.head_dim)
    if name != "v":
      if config.qk_norm:
        scale = np.sqrt(np.mean(y**2, -1, keepdims=True) + config.rms_norm_eps)
        y = y / scale * np.asarray(params[f"{name}_norm"], np.float64)
      a, b = np.split(y, 2, -1)
      y = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    found.append(y)
  return found


@pytest.mark.parametrize("qk_norm", [False, True])
def test_q_k_and_v_are_rounded_as_products_and_not_their_biases(qk_norm):
  config = tiny.config(qkv_bias=True, qk_norm=qk_norm)
  params = {name: x[0] for name, x in tiny.random_params(config)["layers"].items()}
  params["k_bias"] = params["k_bias"] * 300  # as Qwen2.5's: rounded, it would be off by 0.3.
  x = random(2, 9, 24)
  angles = rotary.angles(jnp.broadcast_to(jnp.arange(9), (2, 9)), config)
  cotangents = [random(2, 9, heads, 8, seed=heads) for heads in (6, 2, 2)]

  @tiny.jit
  def ours(params, x):
    settings = {"config": config, "products": BFLOAT16}
    outputs, pull = jax.vjp(lambda p, x: layers.project_qkv(p, x, *angles, **settings), params, x)
    return outputs, pull(tuple(cotangents))

  outputs, (gradients, _) = ours(params, x)
  for got, exact in zip(outputs, of_qkv(config, params, x, angles), strict=True):
    np.testing.assert_allclose(got, exact, atol=2e-4 * np.abs(exact).max())
  v = np.asarray(cotangents[2], np.float64).reshape(18, -1)
  assert distance(gradients["v"], rounded(x).reshape(18, -1).T @ rounded(v)) < 1e-6
  assert distance(gradients["v_bias"], v.sum(0)) < 1e-6
  assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def arrays(text):
  """Returns the shapes, with dtypes, of a lowered program's dots and of what its loops carry."""
  dots = re.findall(r"dot_general .* -> tensor<(\w+)>", text)
  loops = re.findall(r"stablehlo\.while\(.*?\) : (.*)", text)
  return dots, [shape for carried in loops for shape in re.findall(r"tensor<(\w+)>", carried)]


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_no_program_writes_a_product_of_the_mlps_width_in_float32(remat):
  config = tiny.config(num_layers=3)  # of width 37 between, 24, heads 48 and 16.
  params = tiny.random_params(config)
  inputs = tiny.plain(tiny.tokens((4, 10)))

  def written(products):
    model = transformer.Transformer(config, products, remat)
    loss = lambda params: jnp.sin(model.apply({"params": params}, *inputs)).sum()
    return arrays(
      jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    )

  dots, carried = written(BFLOAT16)
  widths = r"(4x10|3x4x10)x(37|48|16)x"
  of_attended = ["4x10x48xf32"]  # the cotangent of what `o` projects.
  assert [shape for shape in dots if re.fullmatch(rf"{widths}f32", shape)] == of_attended
  assert not [shape for shape in carried if re.fullmatch(rf"{widths}f32", shape)], remat
  assert len([shape for shape in dots if re.fullmatch(rf"{widths}bf16", shape)]) >= 6
  assert {"24x37xf32", "37x24xf32", "4x10x24xf32"} <= set(dots)  # weights' gradients, down.
  if remat == "dots":  # gate, up, q, k and v are kept as they were written.
    assert carried.count("3x4x10x37xbf16") >= 2 and "3x4x10x48xbf16" in carried
  dots, carried = written(WIDE)
  assert len([shape for shape in dots if re.fullmatch(rf"{widths}f32", shape)]) >= 7


def test_products_with_one_input_keep_it_once_for_their_gradients():
  """Of a layer's seven products, three have one input and two another."""
  config = tiny.config(num_layers=3, hidden_size=40)
  params = tiny.random_params(config)
  inputs = tiny.plain(tiny.tokens((4, 10)))
  model = transformer.Transformer(config, BFLOAT16, "none")
  loss = lambda params: jnp.sin(model.apply({"params": params}, *inputs)).sum()
  forward, backward = re.findall(
    r"stablehlo\.while\(.*?\) : (.*)", jax.jit(jax.grad(loss)).lower(params).as_text()
  )
  for loop in (forward, backward):
    assert loop.count("tensor<3x4x10x40xbf16>") == 2


def of_former_mlp(params, x, products):
  gate, up = products.dots(params, ("gate", "up"), x)
  return products.dot(jax.nn.silu(gate) * up, params["down"])


@pytest.mark.parametrize("products", [FLOAT32, WIDE], ids=["float32", "wide"])
def test_with_results_in_float32_nothing_has_changed(products):
  config = tiny.config()
  params = {name: x[0] for name, x in tiny.random_params(config)["layers"].items()}
  x = random(2, 9, 24)
  found = []
  for mlp in (functools.partial(layers.mlp, config=config), of_former_mlp):
    loss = lambda p, x, mlp=mlp: jnp.sin(mlp(p, x, products=products)).sum()
    text = jax.jit(jax.value_and_grad(loss)).lower(params, x).as_text()
    found.append(re.sub(r"@\w+", "", text))
  assert found[0] == found[1]


def test_weights_of_a_part_of_the_keys_are_rounded_as_those_of_all_keys():
  scores = 8 * random(50, 64)
  weights = lambda highest: jnp.exp(scores - parts.softmax_shift(highest, BFLOAT16))
  of_all = rounded(weights(scores.max(axis=-1, keepdims=True)))
  of_part = rounded(weights(scores[:, :9].max(axis=-1, keepdims=True)))
  powers = np.log2(of_part / of_all)
  assert np.mean(powers == np.round(powers)) > 0.995
  assert 0.5 <= of_all.max(axis=-1).min() and of_all.max() <= 1 and powers.max() > 3
  plain = rounded(jnp.exp(scores - scores[:, :9].max(axis=-1, keepdims=True)))
  assert np.mean(np.log2(plain / of_all) == np.round(np.log2(plain / of_all))) < 0.5


@pytest.mark.parametrize("highest", [-1e30, -3e5, -1.0, 0.0, 20.0, 3e5])
def test_what_is_subtracted_from_scores_is_never_below_the_highest(highest):
  highest = jnp.float32(highest)
  assert highest <= parts.softmax_shift(highest, BFLOAT16) <= highest + 1 + 1e-6 * abs(highest)
  assert parts.softmax_shift(highest, FLOAT32) == highest
