"""Mixtures of experts: logits and gradients against transformers', given experts, files."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import torch
from jax.extend.core import jaxprs_in_params

from grpo_jax.models import config as model_config
from grpo_jax.models import gradient_sums, leaves, loading, lora, transformer
from grpo_jax.models.errors import ModelError
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import Products
from tests.models import tiny

BASE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "head_dim": 4}
SHARED = {**BASE, "shared_expert_intermediate_size": 9}
CASES = {
  "qwen3": ("qwen3_moe", {}),
  "qwen3-normalised": ("qwen3_moe", {"norm_topk_prob": True}),
  "qwen3-one-of-one": ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1}),
  "qwen3-all-experts": ("qwen3_moe", {"num_experts_per_tok": 5, "norm_topk_prob": True}),
  "qwen3-one-of-many": ("qwen3_moe", {"num_experts": 17, "num_experts_per_tok": 1}),
  "qwen3-more-experts-than-tokens": ("qwen3_moe", {"num_experts": 67, "num_experts_per_tok": 3}),
  "qwen3-tied-biases": ("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True}),
  "qwen3-narrow-gelu": ("qwen3_moe", {"moe_intermediate_size": 1, "hidden_act": "gelu"}),
  "qwen3-one-layer": ("qwen3_moe", {"num_hidden_layers": 1, "num_key_value_heads": 6}),
  "qwen2": ("qwen2_moe", {}),
  "qwen2-normalised-tied": ("qwen2_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
  "qwen2-without-biases": ("qwen2_moe", {"qkv_bias": False, "num_experts": 3}),
  "qwen2-wide-shared": ("qwen2_moe", {"shared_expert_intermediate_size": 41, "head_dim": 6}),
}
TOKENS = tiny.tokens((2, 9), seed=3)

IN_FLOAT64 = """
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64  # the model's code says float32 where it wants its highest precision.
from grpo_jax.models import leaves, loading, rotary, transformer

rotary.frequencies = lambda size, theta, _: theta ** (-np.arange(0, size, 2) / size)
folder = pathlib.Path(sys.argv[1])
tokens, weights = jnp.asarray(np.load(folder / "tokens.npy")), np.load(folder / "weights.npy")
for case in sys.argv[2:]:
  loaded = loading.load(folder / case, dtype=np.float64)

  def loss(params):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    hidden = transformer.hidden_states(params, loaded.config, tokens, positions, ones)
    head, layout = transformer.head(params, loaded.config)
    logits = hidden @ (head.T if layout == "vd" else head)
    return jnp.sum(logits * weights), logits

  quick = {"xla_backend_optimization_level": 0}
  compute = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=quick)
  (_, logits), found = compute(loaded.params)
  flat = jax.tree_util.tree_leaves_with_path(found)
  made = {"/".join(key.key for key in path): x for path, x in flat}
  np.savez(folder / f"{case}.npz", logits=logits, **made)
"""


def model_of(case, **more):
  family, options = CASES[case]
  given = {**(SHARED if family == "qwen2_moe" else BASE), **options, **more}
  return tiny.hf_model(family, **given)


@pytest.mark.long
@pytest.mark.parametrize("part", [0, 1])
def test_logits_and_gradients_are_those_of_transformers_in_float64(part, tmp_path, monkeypatch):
  weights = np.random.default_rng(2).standard_normal((*TOKENS.shape, 61))
  np.save(tmp_path / "tokens.npy", TOKENS)
  np.save(tmp_path / "weights.npy", weights)
  models = {case: model_of(case) for case in list(CASES)[part::2]}
  loaded = {case: tiny.saved(model, tmp_path / case) for case, model in models.items()}
  command = [sys.executable, "-c", IN_FLOAT64, str(tmp_path), *models]
  done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path.cwd())
  assert done.returncode == 0, done.stderr
  monkeypatch.setattr(torch, "float32", torch.float64)
  monkeypatch.setattr(torch, "float", torch.float64)
  monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
  for case, model in models.items():
    model.double().set_experts_implementation("eager")
    size = 2 * len(model.model.rotary_emb.inv_freq)
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    model.model.rotary_emb.inv_freq = 10000.0**-exponents
    logits = model(torch.tensor(TOKENS)).logits
    (logits * torch.tensor(weights)).sum().backward()
    ours = np.load(tmp_path / f"{case}.npz")
    assert logits.dtype == torch.float64 and ours["logits"].dtype == np.float64
    assert tiny.relative_error(ours["logits"], logits.detach().numpy()) < 1e-9, case
    for stored in leaves.stored(loaded[case].config):
      gradient = ours["/".join(stored.path)][stored.index]
      assert np.shape(gradient) == stored.own.shape
      gradient = gradient.T if stored.leaf.is_kernel else gradient
      if stored.leaf.kind == "router":
        assert not np.any(gradient)
        continue
      wanted = gradient_of(model, stored)
      error = np.abs(gradient - wanted).max()
      assert error < 1e-9 * max(np.abs(wanted).max(), 1e-3), (case, stored.name)


def gradient_of(model, stored):
  """Returns transformers' gradient of one tensor of a file."""
  parameters = dict(model.named_parameters())
  if stored.expert is None:
    return parameters[stored.name].grad.numpy()
  prefix, part = stored.name.split(f"experts.{stored.expert}.")
  name = "down_proj" if part.startswith("down") else "gate_up_proj"
  both = parameters[f"{prefix}experts.{name}"].grad[stored.expert].numpy()
  if name == "down_proj":
    return both
  return np.split(both, 2)[0 if part.startswith("gate") else 1]


CONFIG = tiny.config(
  family="qwen2_moe",
  tie_embeddings=False,
  qkv_bias=True,
  mixture=Mixture(6, 3, 5, normalised=True, shared_width=4),
)
PARAMS = tiny.random_params(CONFIG)


@tiny.jit
def outputs(params, inputs, experts=None):
  return transformer.outputs(params, CONFIG, *inputs, experts=experts)


def test_given_experts_are_used_and_the_others_are_those_of_the_router():
  inputs = tiny.plain(tiny.tokens((2, 7)))
  own = outputs(PARAMS, inputs)
  chosen = jnp.moveaxis(own.extras["experts"], 0, 2)
  assert chosen.shape == (2, 7, 3, 3) and chosen.dtype == jnp.int32
  assert np.all(np.sort(chosen)[..., 1:] > np.sort(chosen)[..., :-1])  # three different ones.
  again = outputs(PARAMS, inputs, chosen)
  np.testing.assert_array_equal(again.hidden, own.hidden)

  others = (chosen + 1) % 6
  moved = outputs(PARAMS, inputs, others)
  assert tiny.relative_error(moved.hidden, own.hidden) > 1e-3
  np.testing.assert_array_equal(jnp.moveaxis(moved.extras["experts"], 0, 2), others)

  part = others.at[:, 2:, :, 1].set(-1)  # one entry below 0 leaves all three to the router.
  mixed = outputs(PARAMS, inputs, part)
  np.testing.assert_array_equal(mixed.hidden[:, :2], moved.hidden[:, :2])
  first = jnp.moveaxis(mixed.extras["experts"], 0, 2)
  np.testing.assert_array_equal(
    first[:, 2:, 0], chosen[:, 2:, 0]
  )  # the first layer's input is same.
  with pytest.raises(ValueError, match=r"\[2, 3\] are given to a model with \(3, 3\)"):
    outputs(PARAMS, inputs, chosen[:, :, :2])


@pytest.mark.long
def test_gradients_with_given_experts_are_the_same_with_sums_in_place():
  inputs = tiny.plain(tiny.tokens((2, 7)))
  experts = jnp.asarray(tiny.tokens((2, 7, 3, 3), vocab_size=6)).at[:, 3].set(-1)

  def loss(sums, is_in_place):
    params = gradient_sums.attach(PARAMS, sums) if is_in_place else sums
    settings = {"remat": "full" if is_in_place else "dots", "experts": experts}
    return jnp.sum(jnp.sin(transformer.hidden_states(params, CONFIG, *inputs, **settings)))

  wanted = tiny.jit(jax.grad(lambda params: loss(params, False)))(PARAMS)
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  got = tiny.jit(jax.grad(lambda sums: loss(sums, True)))(zeros)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), got, wanted)


def test_every_expert_on_every_token_is_the_same_as_groups():
  inputs = tiny.plain(tiny.tokens((2, 7)))
  of = lambda products: tiny.jit(
    lambda params: transformer.hidden_states(params, CONFIG, *inputs, products=products)
  )(PARAMS)
  assert tiny.relative_error(of(Products(every_expert=True)), of(Products())) < 1e-5


def test_fused_experts_are_read_as_those_that_are_apart(tmp_path):
  model = model_of("qwen3-normalised")
  apart = tiny.saved(model, tmp_path / "apart")
  fused = tiny.saved(model, tmp_path / "fused", save_original_format=False)
  with safetensors.safe_open(tmp_path / "fused" / "model.safetensors", "np") as file:
    assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()
  jax.tree.map(np.testing.assert_array_equal, fused.params, apart.params)
  assert loading.look(tmp_path / "fused") == apart.config
  settings = json.loads((tmp_path / "fused" / "config.json").read_text())
  settings["moe_intermediate_size"] = 6
  (tmp_path / "fused" / "config.json").write_text(json.dumps(settings))
  with pytest.raises(ModelError, match=r"missing: .*experts.0.gate_proj.weight \[6, 24\]"):
    loading.look(tmp_path / "fused")


REFUSED = {
  "dense layers": ({"mlp_only_layers": [1]}, "mlp_only_layers needs an empty list"),
  "sparse step": ({"decoder_sparse_step": 2}, r"decoder_sparse_step needs 1 \(experts in every"),
  "two numbers": ({"num_experts": 4}, "num_experts is 4, but num_local_experts is 5"),
  "too many": ({"num_experts_per_tok": 6}, "between 1 and num_experts 5, got 6"),
  "no width": ({"moe_intermediate_size": 0}, "moe_intermediate_size needs a whole number from 1"),
  "windows": (
    {"use_sliding_window": True, "sliding_window": 5},
    "use_sliding_window needs false in this family",
  ),
  "another family": (
    {"architectures": ["Qwen3ForCausalLM"]},
    r"mixture of experts \(supported in Qwen2MoeForCausalLM, Qwen3MoeForCausalLM\)",
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mixture_cannot_be_is_refused(case):
  changes, message = REFUSED[case]
  hf = {**model_of("qwen3").config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
  assert model_config.from_hf(hf).mixture == Mixture(5, 2, 7)
  assert model_config.from_hf({**hf, "router_aux_loss_coef": 0.3}) == model_config.from_hf(hf)
  with pytest.raises(ModelError, match=message):
    model_config.from_hf({**hf, **changes})


def test_without_adapters_of_their_own_experts_have_no_gradients():
  options = lora.AdapterOptions(2, targets=("q", "o"))
  adapter = lora.init(jax.random.key(0), CONFIG, options)
  adapter = jax.tree.map(lambda x: x + 0.1, adapter)
  inputs = tiny.plain(tiny.tokens((1, 5)))

  def loss(adapter, base):
    joined = lora.join(base, adapter, options.scale)
    return jnp.sum(jnp.sin(transformer.hidden_states(joined, CONFIG, *inputs, remat="full")))

  base = {**PARAMS, "layers": {k: v.astype(jnp.bfloat16) for k, v in PARAMS["layers"].items()}}
  traced = jax.jit(jax.grad(loss)).trace(adapter, base)
  kinds = [eqn.params["kind"] for eqn in equations(traced.jaxpr.jaxpr) if "kind" in eqn.params]
  assert set(kinds) == {"rows"}  # of matrices, which are frozen, no gradients.
  merged = lora.merged(lora.join(PARAMS, adapter, options.scale)["layers"]["q"])
  assert merged.shape == PARAMS["layers"]["q"].shape


def equations(jaxpr):
  """Returns the equations of a program and of the programs within."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner)


def test_a_token_uses_its_experts_weights_and_no_others():
  of_attention = 24 * 8 * (6 + 2 + 2 + 6)
  of_experts = 24 * 6 + 3 * 3 * 24 * 5 + 3 * 24 * 4 + 24  # router, 3 of 6 experts, shared, switch.
  assert leaves.used_by_token(CONFIG) == of_attention + of_experts
  dense = tiny.config()
  assert leaves.used_by_token(dense) == of_attention + 3 * 24 * 37
