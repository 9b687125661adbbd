"""The kernels of attention lower for their platforms at the sizes of real models, anywhere."""

import re

import jax
import jax.numpy as jnp
import pytest
from grpo_kernels.attention import core, mosaic_gpu, pallas_tpu, visible

# (query heads, key/value heads, width of a head)
MODELS = {
  "SmolLM2-135M": (9, 3, 64),
  "Qwen2.5-0.5B": (14, 2, 64),
  "Qwen2.5-1.5B": (12, 2, 128),
  "Llama-3-8B": (32, 8, 128),
  "Qwen3-4B": (32, 8, 128),
}
# Platform → its kernels, and how often their custom call is in the program: the output, dQ, dK with
# dV, and on a GPU their sums.
KERNELS = {"cuda": (mosaic_gpu, "@mosaic_gpu", 4), "tpu": (pallas_tpu, "tpu_custom_call", 3)}
BFLOAT16 = core.Settings(core.Plain(jnp.bfloat16))
LENGTH = 4160  # no multiple of a tile; no size of a model is as large.


def structs(model, length, *, rows=1):
  """Returns the shapes of q, k, v in bf16, and those of segments, branches and positions."""
  heads, kv_heads, width = MODELS[model]
  q, k = (jax.ShapeDtypeStruct((rows, length, n, width), jnp.bfloat16) for n in (heads, kv_heads))
  numbers = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  return q, k, k, numbers, numbers, numbers


def passes(implementation, *, window=None):
  """Returns the forward pass, and it with the gradients of a loss, as functions of `structs`."""

  def loss(q, k, v, segment_ids, branch_ids, positions):
    seen = visible.visible(
      segment_ids, branch_ids, positions=None if window is None else positions, window=window
    )
    out, log_sum = core.attend(implementation, BFLOAT16, q, k, v, seen)
    return jnp.sum(out**2) + 1e-3 * jnp.sum(log_sum)

  return {"forward": loss, "value_and_grad": jax.value_and_grad(loss, argnums=(0, 1, 2))}


def of_part(implementation, model, length, *, parts, window=None):
  """Returns the gradients of a loss of the queries of one part of a row, and its arguments."""
  _, k, v, *numbers = structs(model, length)
  q, *_, of_queries = structs(model, length // parts)

  def loss(q, k, v, of_queries, order, segment_ids, positions):
    seen = visible.visible(segment_ids, positions=positions, window=window)
    seen = seen._replace(places=visible.Places(of_queries, order))
    if window is not None:
      seen = seen._replace(positions=of_queries)
    return jnp.sum(core.attend(implementation, BFLOAT16, q, k, v, seen)[0] ** 2)

  return jax.value_and_grad(loss, argnums=(0, 1, 2)), (q, k, v, of_queries, *numbers)


def squares_in(text, length):
  """Whether a program has an array with as many elements as a row has pairs."""
  wholes = {-(-length // tile) * tile for tile in (1, 128, 256)}
  sizes = f"(?:{'|'.join(map(str, sorted(wholes)))})"
  return re.search(rf"(?<!\d){sizes}[x,]{sizes}(?!\d)", text) is not None


def lowered(function, arguments, platform):
  """Returns the StableHLO of a function for a platform that need not be here."""
  with jax.default_matmul_precision(None):  # as users have it; the suite asks for the highest.
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def assert_lowers(platform, arguments, *, window=None):
  """Fails unless attention with gradients lowers to a platform's kernels and no array of pairs."""
  implementation, custom_call, count = KERNELS[platform]
  text = lowered(passes(implementation, window=window)["value_and_grad"], arguments, platform)
  assert text.count(custom_call) == count
  assert not squares_in(text, LENGTH)


@pytest.mark.long
@pytest.mark.parametrize("platform", list(KERNELS))
@pytest.mark.parametrize("model", list(MODELS))
def test_kernels_lower_at_the_sizes_of_real_models(model, platform):
  assert_lowers(platform, structs(model, LENGTH))


@pytest.mark.long
@pytest.mark.parametrize("platform", list(KERNELS))
def test_kernels_lower_with_a_window(platform):
  assert_lowers(platform, structs("Qwen3-4B", LENGTH, rows=2), window=500)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("platform", list(KERNELS))
def test_kernels_lower_for_an_eighth_of_a_row(platform, window):
  """The queries of 4096 places of 32768, and all keys."""
  implementation, custom_call, count = KERNELS[platform]
  function, arguments = of_part(implementation, "Llama-3-8B", 32768, parts=8, window=window)
  text = lowered(function, arguments, platform)
  assert text.count(custom_call) == count


@pytest.mark.long
@pytest.mark.parametrize("platform", list(KERNELS))
def test_layers_that_are_written_out_lower_the_kernel_once(platform):
  implementation, custom_call, _ = KERNELS[platform]

  def layers(q, k, v, segment_ids, *_):
    seen = visible.visible(segment_ids)
    seen = seen._replace(tiles=implementation.prepare(seen, q.shape[-1]))
    for _ in range(3):
      q = core.unrounded(implementation, BFLOAT16, q, k, v, seen)[0].astype(q.dtype)
    return q

  text = lowered(layers, structs("SmolLM2-135M", 256), platform)
  assert text.count(custom_call) == 1


def test_pairs_would_be_seen():
  scores = lambda q, k, *_: jnp.einsum("bthe,bshe->bhts", q[:, :, : k.shape[2]], k)
  arguments = structs("SmolLM2-135M", LENGTH)
  assert squares_in(lowered(scores, arguments, "cuda"), LENGTH)
