"""Equalities of the whole transformer: shared prefixes, remat, prefill, initialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import Attention

from grpo_jax.models import gradient_sums, layers, leaves, rotary, transformer
from grpo_jax.models.products import Products
from tests.models import tiny


def shared_prefix_row():
  """Returns a row of one prompt and two completions, and the two sequences it stands for."""
  prompt, first, second = (tiny.tokens((n,), seed=n) for n in (5, 3, 4))
  row = {
    "tokens": np.concatenate([prompt, first, second, [0, 0]]),
    "positions": np.concatenate([np.arange(5), 5 + np.arange(3), 5 + np.arange(4), [0, 0]]),
    "segment_ids": np.array([1] * 12 + [0] * 2),
    "branch_ids": np.array([0] * 5 + [1] * 3 + [2] * 4 + [0] * 2),
  }
  sequences = [np.concatenate([prompt, first])[None], np.concatenate([prompt, second])[None]]
  return {name: jnp.asarray(x)[None] for name, x in row.items()}, sequences


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shared_prefix_rows_have_the_hidden_states_of_separate_rows(family):
  config = tiny.config(family=family, qk_norm=family == "qwen3")
  params = tiny.random_params(config)
  row, (first, second) = shared_prefix_row()
  apply = tiny.jit(transformer.Transformer(config).apply)
  got = apply({"params": params}, *row.values())
  hidden = [apply({"params": params}, *tiny.plain(s)) for s in (first, second)]
  assert tiny.relative_error(got[:, :8], hidden[0]) < 1e-5
  assert tiny.relative_error(got[:, 8:12], hidden[1][:, 5:]) < 1e-5


@pytest.mark.long
def test_shared_prefix_rows_have_the_gradients_of_separate_rows():
  config = tiny.config(num_layers=2)
  params = tiny.random_params(config)
  row, (first, second) = shared_prefix_row()
  model = transformer.Transformer(config)

  def shared(params):
    hidden = jnp.sin(model.apply({"params": params}, *row.values()))
    return hidden[:, 5:12].sum()

  def separate(params):
    rows = [model.apply({"params": params}, *tiny.plain(s)) for s in (first, second)]
    return sum(jnp.sin(hidden[:, 5:]).sum() for hidden in rows)

  got, wanted = tiny.jit(jax.grad(shared))(params), tiny.jit(jax.grad(separate))(params)
  for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
    mine = np.asarray(_at(got, path))
    np.testing.assert_allclose(mine, leaf, atol=2e-5 * np.abs(leaf).max(), err_msg=str(path))


def _at(tree, path):
  for key in path:
    tree = tree[key.key]
  return tree


@pytest.mark.long
@pytest.mark.parametrize("compute_dtype", [jnp.float32, jnp.bfloat16])
def test_remat_changes_memory_but_no_value_and_no_gradient(compute_dtype):
  config = tiny.config(num_layers=6, num_kv_heads=6)
  params = tiny.random_params(config)
  inputs = tiny.plain(tiny.tokens((4, 40)))
  results, memory = {}, {}
  for remat in ("none", "dots", "full"):
    model = transformer.Transformer(config, Products(compute_dtype), remat)
    loss = lambda params, model=model: jnp.sin(model.apply({"params": params}, *inputs)).sum()
    compiled = tiny.jit(jax.value_and_grad(loss)).lower(params).compile()
    results[remat] = compiled(params)
    memory[remat] = compiled.memory_analysis().temp_size_in_bytes
  assert memory["none"] > memory["dots"] > memory["full"]
  for remat in ("dots", "full"):
    pairs = zip(jax.tree.leaves(results[remat]), jax.tree.leaves(results["none"]), strict=True)
    for got, wanted in pairs:
      np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_unknown_remat_policy_is_refused():
  config = tiny.config()
  model = transformer.Transformer(config, remat="some")
  with pytest.raises(ValueError, match="dots.*full.*none.*'some'"):
    model.apply({"params": tiny.random_params(config)}, *tiny.plain(tiny.tokens((1, 4))))


@pytest.mark.long
@pytest.mark.parametrize("compute_dtype", [jnp.float32, jnp.bfloat16])
def test_decoding_with_a_cache_by_the_same_functions_continues_a_prefill(compute_dtype):
  products = Products(compute_dtype)
  config = tiny.config(family="qwen3", qk_norm=True, num_layers=2)
  params = tiny.random_params(config)
  tokens, positions, segments = tiny.plain(tiny.tokens((2, 9)))
  model = transformer.Transformer(config, products)
  wanted = tiny.jit(model.apply)({"params": params}, tokens, positions, segments)
  first = [x[:, :8] for x in (tokens, positions, segments)]
  prefill = tiny.jit(
    lambda *inputs: transformer.prefill(params, config, *inputs, products=products)
  )
  hidden, (keys, values) = prefill(*first)
  tolerance = 1e-5 if compute_dtype == jnp.float32 else 0.02
  assert tiny.relative_error(hidden, wanted[:, :8]) < tolerance
  assert keys.shape == (config.num_layers, 2, 8, config.num_kv_heads, config.head_dim)
  x = tiny.jit(decode, static_argnames=("config", "products"))(
    params,
    keys,
    values,
    tokens[:, 8:],
    positions[:, 8:],
    config=config,
    products=products,
  )
  assert tiny.relative_error(x, wanted[:, 8:]) < tolerance


def decode(params, keys, values, token, position, *, config, products):
  """Computes the hidden state of one more token, layer by layer, as a sampler does."""
  cos, sin = rotary.angles(position, config)
  x = params["embed"][token]
  for index in range(config.num_layers):

    def attend(q, k, v, index=index):
      k = jnp.concatenate([keys[index], k], axis=1)
      v = jnp.concatenate([values[index], v], axis=1)
      q = q.reshape(q.shape[0], k.shape[2], -1, q.shape[3]) * q.shape[3] ** -0.5
      weights = jax.nn.softmax(products.contract("bkre,bske->bkrs", q, k), axis=-1)
      mixed = products.contract("bkrs,bske->bkre", weights, v)
      return mixed.reshape(q.shape[0], 1, -1, q.shape[3]), None

    own = {name: leaf[index] for name, leaf in params["layers"].items()}
    x, _, _ = layers.block(own, x, cos, sin, attend, config=config, products=products)
  return layers.rms_norm(x, params["final_norm"], config.rms_norm_eps)


@pytest.mark.parametrize("tied", [True, False])
def test_init_the_module_and_the_axes_agree_on_the_tree(tied):
  config = tiny.config(tie_embeddings=tied, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
  ours = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
  inputs = tiny.plain(tiny.tokens((1, 4)))
  module = transformer.Transformer(config)
  flax = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))["params"]
  assert ours == flax
  axes = transformer.logical_axes(config)
  is_names = lambda x: isinstance(x, tuple)
  ranks = jax.tree.map(len, axes, is_leaf=is_names)
  assert ranks == jax.tree.map(lambda x: x.ndim, ours)
  assert axes["layers"]["down"] == ("layers", "mlp", "embed")
  assert ours["layers"]["down"].shape == (3, 37, 24)
  head, layout = transformer.head(tiny.random_params(config), config)
  assert (head.shape, layout) == (((61, 24), "vd") if tied else ((24, 61), "dv"))


@pytest.mark.long
def test_init_draws_every_kernel_independently_with_deviation_002():
  config = tiny.config(hidden_size=64, intermediate_size=96)
  draw = tiny.jit(lambda key: transformer.init(key, config))
  params, again = draw(jax.random.key(0)), draw(jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, params, again)
  gate, up = params["layers"]["gate"], params["layers"]["up"]
  assert np.std(gate) == pytest.approx(0.02, rel=0.05)
  assert np.abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.05
  assert np.abs(np.corrcoef(gate[0].ravel(), gate[1].ravel())[0, 1]) < 0.05
  assert (params["final_norm"] == 1).all()


def test_stored_tensors_cover_every_value_of_the_tree_once():
  config = tiny.config(qkv_bias=True, qk_norm=True, family="qwen3", tie_embeddings=False)
  stored = leaves.stored(config)
  assert len({s.name for s in stored}) == len(stored)
  total = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(leaves.tree(config)))
  assert sum(np.prod(s.shape) for s in stored) == total


def test_attention_is_handed_in_from_outside():
  used = []

  class Watched(Attention):
    def __call__(self, q, *arguments, **settings):
      used.append(q.shape)
      return super().__call__(q, *arguments, **settings)

  config, attention = tiny.config(num_layers=2), Watched("reference")
  params = jax.eval_shape(lambda: tiny.random_params(config))
  inputs = tiny.plain(tiny.tokens((1, 4)))
  model = transformer.Transformer(config, attention=attention)
  trainer = functools.partial(transformer.hidden_states, remat="full", attention=attention)

  def in_place(params, *inputs):
    return trainer(gradient_sums.attach(params, params), config, *inputs)

  for compute in (
    lambda params, *inputs: model.apply({"params": params}, *inputs),
    lambda params, *inputs: trainer(params, config, *inputs),
    in_place,
    lambda params, *inputs: transformer.prefill(params, config, *inputs, attention=attention),
  ):
    used.clear()
    jax.eval_shape(compute, params, *inputs)
    assert set(used) == {(1, 4, 6, 8)}, compute
