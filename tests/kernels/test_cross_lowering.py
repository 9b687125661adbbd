"""Both kernels lower for their platforms at the sizes of real models, on any machine."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from grpo_kernels.linear_logprobs import core, reference
from grpo_kernels.linear_logprobs.token_local import linear_objective

TOKENS = 16384
# (D, V)
MODELS = {
  "SmolLM2-135M": (576, 49152),
  "Qwen2.5-1.5B": (1536, 151936),
  "Qwen2.5-7B": (3584, 152064),
  "Llama-3-8B": (4096, 128256),
}
# The value and its gradients contain the forward pass.
PASSES_OF_MODELS = [*(("value_and_grad", model) for model in MODELS), ("forward", "Qwen2.5-1.5B")]
# Platform → (implementation, what its kernels are called in the lowered program).
KERNELS = {"cuda": ("mosaic_gpu", "mosaic_gpu"), "tpu": ("pallas_tpu", "tpu_custom_call")}


def structs(width, vocabulary, head_layout="vd"):
  """Returns the shapes of hidden, head and targets, in bf16."""
  head = (vocabulary, width) if head_layout == "vd" else (width, vocabulary)
  return (
    jax.ShapeDtypeStruct((TOKENS, width), jnp.bfloat16),
    jax.ShapeDtypeStruct(head, jnp.bfloat16),
    jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
  )


def passes(operate, *, with_entropy=True, **settings):
  """Returns the forward pass, and it with both gradients, of a loss of logprobs and entropy."""

  def loss(hidden, head, targets):
    outputs = operate(hidden, head, targets, return_entropy=with_entropy, **settings)
    logprobs, entropy = outputs if with_entropy else (outputs, jnp.zeros(1))
    return jnp.sum(logprobs * jnp.arange(TOKENS)) + 0.01 * jnp.sum(entropy**2)

  return {"forward": loss, "value_and_grad": jax.value_and_grad(loss, argnums=(0, 1))}


def sweep(**settings):
  """Returns the value and both gradients of a token-local loss, in one sweep."""

  def loss(hidden, head, targets):
    settings.setdefault("differentiate_entropy", False)

    def f(logprobs, entropy, *_):
      bonus = 0.01 * jnp.sum(entropy**2) if settings["differentiate_entropy"] else 0.0
      return jnp.sum(logprobs * jnp.abs(logprobs)) + bonus

    return linear_objective(hidden, head, targets, f, (), return_entropy=True, **settings)[0]

  return jax.value_and_grad(loss, argnums=(0, 1))


def lowered(function, arguments, platform):
  """Returns the StableHLO of a function for a platform that need not be here."""
  with jax.default_matmul_precision(None):  # as users have it; the suite asks for the highest.
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def logits_in(text, vocabulary):
  """Whether a program has an array of all logits."""
  return any(f"tensor<{a}x{b}x" in text for a, b in ((TOKENS, vocabulary), (vocabulary, TOKENS)))


@pytest.mark.long
@pytest.mark.parametrize("platform", list(KERNELS))
@pytest.mark.parametrize(("which", "model"), PASSES_OF_MODELS)
def test_kernel_lowers_at_the_sizes_of_real_models(platform, which, model):
  name, custom_call = KERNELS[platform]
  width, vocabulary = MODELS[model]
  operate = core.entry(importlib.import_module(f"grpo_kernels.linear_logprobs.{name}"))
  text = lowered(passes(operate)[which], structs(width, vocabulary), platform)
  assert custom_call in text
  assert not logits_in(text, vocabulary)


@pytest.mark.long
@pytest.mark.parametrize("platform", list(KERNELS))
def test_kernel_lowers_with_the_other_layout_a_temperature_and_an_odd_vocabulary(platform):
  name, custom_call = KERNELS[platform]
  operate = core.entry(importlib.import_module(f"grpo_kernels.linear_logprobs.{name}"))
  function = passes(operate, head_layout="dv", temperature=0.7)["value_and_grad"]
  text = lowered(function, structs(1536, 50257, "dv"), platform)
  assert custom_call in text
  assert not logits_in(text, 50257)


def test_logits_would_be_seen():
  text = lowered(passes(reference.linear_logprobs)["forward"], structs(576, 49152), "cuda")
  assert logits_in(text, 49152)
