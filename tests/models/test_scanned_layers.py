"""Layers that differ, and the named values of a block. Gemma 3 has them: test_gemma3.py."""

import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from grpo_kernels.attention import AUTOMATIC

from grpo_jax.models import config as model_config
from grpo_jax.models import gradient_sums, layers, products, scanned_layers, transformer
from grpo_jax.models.config import LayerKind, Rope
from tests.models import tiny

KINDS = (LayerKind(4), LayerKind(None, None), LayerKind(6, 1))


def mixed(**options):
  """Returns a model with two windows, two rotary tables and a layer without one."""
  kinds = {"layer_kinds": KINDS, "further_ropes": (Rope(77.0),)}
  return tiny.config(**{**kinds, **options})


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_activations_are_those_of_transformers(name):
  x = np.linspace(-6, 6, 101, dtype=np.float32)
  ours = layers.ACTIVATIONS[model_config.ACTIVATIONS[name]]
  wanted = transformers.activations.ACT2FN[name](torch.tensor(x)).numpy()
  np.testing.assert_allclose(ours(jnp.asarray(x)), wanted, atol=2e-6)


def test_every_activation_of_a_config_has_a_function():
  assert set(model_config.ACTIVATIONS.values()) == set(layers.ACTIVATIONS)


def packed_row():
  """Returns a row of a prompt of 5 and completions of 9 and 8, and its two sequences."""
  prompt, first, second = (tiny.tokens((n,), seed=n) for n in (5, 9, 8))
  row = (
    np.concatenate([prompt, first, second]),
    np.concatenate([np.arange(5), 5 + np.arange(9), 5 + np.arange(8)]),
    np.ones(22, int),
    np.array([0] * 5 + [1] * 9 + [2] * 8),
  )
  sequences = [np.concatenate([prompt, each])[None] for each in (first, second)]
  return [jnp.asarray(x)[None] for x in row], sequences


@pytest.mark.long
def test_packed_rows_have_the_hidden_states_of_separate_rows():
  config = mixed()
  params = tiny.random_params(config)
  row, (first, second) = packed_row()
  apply = tiny.jit(transformer.Transformer(config).apply)
  got = apply({"params": params}, *row)
  hidden = [apply({"params": params}, *tiny.plain(s)) for s in (first, second)]
  assert tiny.relative_error(got[:, :14], hidden[0]) < 1e-5
  assert tiny.relative_error(got[:, 14:], hidden[1][:, 5:]) < 1e-5


@pytest.mark.long
def test_prefill_and_gradients_in_place_know_the_kinds():
  config = mixed()
  params = tiny.random_params(config)
  row, (first, _) = packed_row()

  def loss(params, summed):
    given = gradient_sums.attach(params, summed) if summed is not None else params
    remat = "none" if summed is None else "full"
    return jnp.sin(transformer.hidden_states(given, config, *row, remat=remat)).sum()

  zeros = jax.tree.map(jnp.zeros_like, params)
  wanted = tiny.jit(jax.grad(lambda params: loss(params, None)))(params)
  got = tiny.jit(jax.grad(lambda sums: loss(params, sums)))(zeros)
  for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(mine, right, atol=2e-5 * np.abs(right).max())
  inputs = tiny.plain(first)
  hidden, _ = tiny.jit(lambda *inputs: transformer.prefill(params, config, *inputs))(*inputs)
  plain = tiny.jit(lambda *inputs: transformer.hidden_states(params, config, *inputs))(*inputs)
  assert tiny.relative_error(hidden, plain) < 1e-5


def test_layers_that_are_alike_take_no_arrays():
  position, ids = jnp.arange(4)[None], jnp.ones((1, 4), int)
  for kinds in ((), (LayerKind(5),) * 3, (LayerKind(None, None),) * 3):
    config = tiny.config(layer_kinds=kinds)
    assert scanned_layers.kinds(config) == (None, None, None)
    options = {"attention": AUTOMATIC, "products": products.FLOAT32}
    given = scanned_layers.tokens(config, position, ids, None, **options)
    assert (given.seen.positions is None) == (config.kinds[0].window is None)
    assert scanned_layers.view(given, scanned_layers.kinds(config)).seen is given.seen


@pytest.mark.long
@pytest.mark.parametrize("name", ["xla_blocked", "mosaic_gpu", "pallas_tpu"])
def test_each_layer_visits_the_tiles_of_its_own_window(name):
  """One array of lists for all layers, in which that of a window is shorter."""
  position, ids = jnp.arange(4096)[None], jnp.ones((1, 4096), int)
  config = tiny.config(layer_kinds=(LayerKind(512), LayerKind(), LayerKind(1024)))
  prepare = importlib.import_module(f"grpo_kernels.attention.{name}").prepare
  attention = types.SimpleNamespace(
    prepared=lambda seen, **_: seen._replace(tiles=prepare(seen, 64))
  )
  given = scanned_layers.tokens(
    config, position, ids, None, attention=attention, products=products.FLOAT32
  )
  kinds = scanned_layers.kinds(config)

  def visited(layer):
    tiles = scanned_layers.view(given, jax.tree.map(lambda x: x[layer], kinds)).seen.tiles
    if name == "xla_blocked":
      return int(tiles.is_live.sum())
    return int((tiles.forward if name == "mosaic_gpu" else tiles.by_queries).count.sum())

  # Of 256 tokens: 2 or 4 tiles of a window and a part of another, of at most 16.
  found = [visited(layer) for layer in range(3)]
  assert found == ([150, 528, 252] if name == "mosaic_gpu" else [45, 136, 70])


def test_kinds_of_layers_add_no_program_and_no_layer():
  """One scan whatever the kinds: its body is traced once, and is not unrolled."""
  inputs = tiny.plain(tiny.tokens((1, 8)))

  def text(count):
    config = tiny.config(num_layers=count, layer_kinds=KINDS[:2] * (count // 2))
    params = jax.eval_shape(lambda: tiny.random_params(config))
    run = lambda params: transformer.hidden_states(params, config, *inputs)
    return str(jax.make_jaxpr(run)(params))

  assert text(8).count("dot_general") == text(2).count("dot_general")


@pytest.mark.long
def test_statistics_of_layers_come_with_their_gradients():
  """A router's loss, for instance, though no layer of today has one."""
  weights, x = jnp.asarray([[2.0], [3.0]]), jnp.asarray([1.5])
  zeros = jnp.zeros_like(weights)

  def block(weight, x, given, kind):
    del given, kind
    return x * weight, {"balance": (weight * x) ** 2}

  def loss(sums, x, run):
    output, extras = run(gradient_sums.Stack(weights, sums), x)
    return output.sum() + 0.1 * extras["balance"].sum()

  def by_hand(weights, x):
    one = weights[0] * x
    two = weights[1] * one
    return (two + 0.1 * (one**2 + two**2)).sum()

  run = lambda stack, x: gradient_sums.run(block, stack, x, None)
  got = jax.grad(loss, argnums=(0, 1))(zeros, x, run)
  for mine, right in zip(got, jax.grad(by_hand, argnums=(0, 1))(weights, x), strict=True):
    np.testing.assert_allclose(mine, right, rtol=1e-6)


def test_outputs_have_a_place_for_statistics():
  config = tiny.config()
  params = jax.eval_shape(lambda: tiny.random_params(config))
  run = lambda params: transformer.outputs(params, config, *tiny.plain(tiny.tokens((1, 4))))
  found = jax.eval_shape(run, params)
  assert found.hidden.shape == (1, 4, 24) and found.extras == {}


@pytest.mark.long
def test_norms_start_at_one_whatever_their_offset():
  config = tiny.config(norm_offset=1.0, post_norms=True)
  params = transformer.init(jax.random.key(0), config)
  for name in ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
    np.testing.assert_array_equal(params["layers"][name], 0)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"layer_kinds": KINDS[:2]}, "2 layer_kinds are given for 3 layers"),
    ({"layer_kinds": (LayerKind(rope=1),) * 3}, "layer 0 has rope 1, but the model has 1 tables"),
    ({"layer_kinds": (LayerKind(0),) * 3}, "window of layer 0 must be at least 1, got 0"),
    ({"activation": "tanh"}, "unknown activation 'tanh'; have .*gelu_tanh.*silu"),
  ],
)
def test_configs_that_do_not_fit_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    tiny.config(**options)


def test_plain_kinds_of_all_layers_are_as_none():
  assert tiny.config(layer_kinds=(LayerKind(),) * 3) == tiny.config()
