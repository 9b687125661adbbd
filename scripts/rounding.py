"""Measures the effect of rounding on logits and gradients, and between sampler and trainer.

    python scripts/rounding.py FOLDER                                   # a model's own weights
    python scripts/rounding.py --sizes 4,512,1408,8,4 --family qwen2    # random weights
    python scripts/rounding.py FOLDER --prompts 8 --tokens 128 --json rounding.json

Four computations of the same weights are compared with float64: products in float32; bfloat16
factors with results in float32 and in bfloat16 (`model.product_dtype`); and everything in
bfloat16, as in Hugging Face's models. The loss is a policy gradient on sampled
completions. Then each of the first three samples completions, and the logprobs that the sampler
reports are compared with those that the trainer recomputes.

An error is relative, by norm, over all layers: |x - x64| / |x64|.
"""

import argparse
import asyncio
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from grpo_jax import models
from grpo_jax.commands import cli
from grpo_jax.compilation import precision
from grpo_jax.engines.base import GenerationRequest, SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.models import rotary, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_jax.rl import diagnostics
from grpo_jax.rl.logprobs import sequence_logprobs

TEXTS = (
  "The derivative of a product of two functions is",
  "def median(numbers):\n  ",
  "Question: A train leaves at 9:40 and arrives at 13:05. How long does it travel?\nAnswer:",
  "In the year 1905, a clerk of the patent office in Bern",
  "17 * 24 = ",
  "Dear Sir or Madam, I am writing to",
  "List three metals that are liquid near room temperature:",
  "Once upon a time there was a",
)
# Name → model.compute_dtype, model.product_dtype.
CASES: Mapping[str, tuple[str, str | None]] = {
  "float32": ("float32", None),
  "float32 products": ("bfloat16", "float32"),
  "bfloat16 products": ("bfloat16", None),
}
PLAIN = "all in bfloat16"


class Rows(NamedTuple):
  """Prompts with their sampled completions, padded on the right: [B T] each."""

  tokens: np.ndarray
  is_token: np.ndarray
  is_sampled: np.ndarray
  logprobs: np.ndarray  # As reported by the sampler; 0 elsewhere.
  advantages: np.ndarray  # [B]: 1 and -1 in turn.


def reference_logits(params: Any, config: ModelConfig, tokens: Any, dtype: Any) -> jax.Array:
  """Computes the logits of plain rows in one dtype throughout, like Hugging Face's models.

  Products are accumulated, and norms, softmax and silu computed, in float32 at least; their
  results are rounded to the dtype, and so are the residual stream and the logits. The code shares
  nothing with `grpo_jax.models` except the rotary frequencies. Do not jit it: XLA may omit
  roundings.

  Args:
    params: Parameters, as `transformer.init` makes them.
    config: Sizes and switches of the model.
    tokens: Ids, [B T], padded on the right.
    dtype: Dtype of the computation, float64 or bfloat16.

  Returns:
    Logits [B T V], in the dtype.
  """
  dtype = jnp.dtype(dtype)
  wide = jnp.promote_types(dtype, jnp.float32)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  rounded = lambda x: x.astype(dtype)

  def linear(x, w, b=None):
    y = jnp.einsum("...i,io->...o", x, w, preferred_element_type=wide)
    return rounded(y if b is None else y + b.astype(wide))

  def norm(x, w):
    x = x.astype(wide)
    return rounded(x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps)) * w

  length = tokens.shape[1]
  frequencies = rotary.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
  angles = jnp.arange(length)[:, None] * jnp.asarray(frequencies, wide)
  cos, sin = (rounded(jnp.tile(f(angles), 2))[:, None] for f in (jnp.cos, jnp.sin))

  def rope(x):
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin

  def attention(layer, x):
    q, k, v = (linear(x, layer[name], layer.get(f"{name}_bias")) for name in "qkv")
    q, k, v = (y.reshape(*y.shape[:2], -1, config.head_dim) for y in (q, k, v))
    if config.qk_norm:
      q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
    repeat = lambda y: jnp.repeat(y, config.num_heads // config.num_kv_heads, axis=2)
    q, k, v = rope(q), repeat(rope(k)), repeat(v)
    scores = rounded(jnp.einsum("bthe,bshe->bhts", q, k, preferred_element_type=wide))
    scores = jnp.where(np.tri(length, dtype=bool), scores * config.head_dim**-0.5, -jnp.inf)
    weights = rounded(jax.nn.softmax(scores.astype(wide), axis=-1))
    mixed = rounded(jnp.einsum("bhts,bshe->bthe", weights, v, preferred_element_type=wide))
    return linear(mixed.reshape(*mixed.shape[:2], -1), layer["o"], layer.get("o_bias"))

  def mlp(layer, x):
    gate, up = (linear(x, layer[name], layer.get(f"{name}_bias")) for name in ("gate", "up"))
    gated = rounded(jax.nn.silu(gate.astype(wide))) * up
    return linear(gated, layer["down"], layer.get("down_bias"))

  x = params["embed"][tokens]
  for index in range(config.num_layers):
    layer = {name: leaf[index] for name, leaf in params["layers"].items()}
    x = x + attention(layer, norm(x, layer["input_norm"]))
    x = x + mlp(layer, norm(x, layer["mlp_norm"]))
  head = params["embed"].T if config.tie_embeddings else params["head"]
  return linear(norm(x, params["final_norm"]), head)


def our_hidden(params: Any, config: ModelConfig, rows: Rows, products: Products) -> jax.Array:
  """Computes the hidden states from which the trainer's logprobs are computed, [B T D]."""
  positions = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
  model = transformer.Transformer(config, products)
  inputs = (jnp.asarray(rows.tokens), positions, jnp.asarray(rows.is_token, jnp.int32))
  hidden: Any = model.apply({"params": params}, *inputs)
  return hidden.astype(products.compute_dtype)


def our_logprobs(params: Any, config: ModelConfig, rows: Rows, products: Products) -> jax.Array:
  """Computes log π of every token like the trainer, [B T]; token 0 has 0."""
  head, layout = transformer.head(params, config)
  hidden = our_hidden(params, config, rows, products)
  found = sequence_logprobs(hidden, head, jnp.asarray(rows.tokens), head_layout=layout)
  assert not isinstance(found, tuple)  # no entropy was requested.
  return found


def our_logits(params: Any, config: ModelConfig, rows: Rows, products: Products) -> jax.Array:
  """Computes the logits of all places, [B T V], float32."""
  head, layout = transformer.head(params, config)
  hidden = our_hidden(params, config, rows, products)
  spec = "btd,vd->btv" if layout == "vd" else "btd,dv->btv"
  factors = (hidden, head.astype(hidden.dtype))
  return jnp.einsum(spec, *factors, preferred_element_type=jnp.float32)


def policy_loss(logprobs: jax.Array, rows: Rows) -> jax.Array:
  """Returns -mean of advantage × log π over the sampled tokens."""
  weights = rows.is_sampled * rows.advantages[:, None] / rows.is_sampled.sum()
  return -jnp.sum(logprobs * weights)


def reference_results(
  params: Any, config: ModelConfig, rows: Rows, dtype: Any
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Returns the reference's logits at the places before sampled tokens, and gradients by leaf."""

  def loss(params):
    logits = reference_logits(params, config, rows.tokens, dtype)
    wide = logits.astype(jnp.promote_types(dtype, jnp.float32))
    logprobs = jax.nn.log_softmax(wide[:, :-1], axis=-1)
    taken = jnp.take_along_axis(logprobs, rows.tokens[:, 1:, None], axis=-1)[..., 0]
    return policy_loss(jnp.pad(taken, ((0, 0), (1, 0))), rows), logits

  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  gradients, logits = jax.grad(loss, has_aux=True)(params)
  return _chosen(logits, rows), _by_leaf(gradients)


def our_results(
  params: Any, config: ModelConfig, rows: Rows, products: Products
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Returns the same for the program's own functions."""
  exact = precision.resolve(None, products.compute_dtype)

  def loss(params):
    return policy_loss(our_logprobs(params, config, rows, products), rows)

  gradients = jax.jit(precision.scoped(jax.grad(loss), exact))(params)
  logits = jax.jit(precision.scoped(lambda p: our_logits(p, config, rows, products), exact))(params)
  return _chosen(logits, rows), _by_leaf(gradients)


def _chosen(logits: jax.Array, rows: Rows) -> np.ndarray:
  """Returns the logits that sampled tokens were drawn from, [n V]."""
  return np.asarray(logits)[:, :-1][rows.is_sampled[:, 1:]].astype(np.float64)


def _by_leaf(gradients: Any) -> dict[str, np.ndarray]:
  named = {**gradients, **gradients["layers"]}
  return {name: np.asarray(named[name]) for name in named if name != "layers"}


def relative_error(x: np.ndarray, exact: np.ndarray) -> float:
  """Returns |x - exact| / |exact|."""
  exact = exact.astype(np.float64)
  return float(np.linalg.norm(x.astype(np.float64) - exact) / np.linalg.norm(exact))


def sample(
  params: Any, config: ModelConfig, prompts: Sequence[Any], case: str, tokens: int
) -> Rows:
  """Samples one completion of each prompt at temperature 1, in the numerics of a case."""
  compute_dtype, product_dtype = CASES[case]
  longest = max(map(len, prompts)) + tokens
  settings = {"compute_dtype": compute_dtype, "product_dtype": product_dtype}
  engine = JaxSampler(config, **settings, max_rows=len(prompts), max_length=longest)
  engine.load_weights(params, version=0)
  sampling = SamplingParams(max_tokens=tokens)
  requests = [
    GenerationRequest(str(i), np.asarray(prompt, np.int32), sampling, seed=i)
    for i, prompt in enumerate(prompts)
  ]

  async def collect():
    return {g.request_id: g async for g in engine.generate(requests)}

  try:
    found = asyncio.run(collect())
  finally:
    engine.close()
  shape = (len(prompts), longest)
  rows = Rows(
    tokens=np.zeros(shape, np.int32),
    is_token=np.zeros(shape, bool),
    is_sampled=np.zeros(shape, bool),
    logprobs=np.zeros(shape, np.float32),
    advantages=np.where(np.arange(len(prompts)) % 2, -1.0, 1.0),
  )
  for i, prompt in enumerate(prompts):
    generation = found[str(i)]
    stop = len(prompt) + len(generation.token_ids)
    rows.tokens[i, :stop] = [*prompt, *generation.token_ids]
    rows.is_token[i, :stop] = True
    rows.is_sampled[i, len(prompt) : stop] = True
    rows.logprobs[i, len(prompt) : stop] = generation.logprobs
  return rows


def mismatch(params: Any, config: ModelConfig, rows: Rows, products: Products) -> dict[str, float]:
  """Compares the logprobs that a sampler reported with those of the trainer."""
  exact = precision.resolve(None, products.compute_dtype)
  trainer = jax.jit(precision.scoped(lambda p: our_logprobs(p, config, rows, products), exact))(
    params
  )
  behavior, mask = jnp.asarray(rows.logprobs), jnp.asarray(rows.is_sampled)
  found = diagnostics.mismatch(trainer, behavior, mask)
  names = {"abs_logprob_mean": "mean |Δ|", "abs_logprob_max": "max |Δ|", "gen_kl_error": "KL (k3)"}
  return {text: float(found[f"mismatch/{name}"].value()) for name, text in names.items()}


def measure(params: Any, config: ModelConfig, prompts: Sequence[Any], tokens: int) -> Any:
  """Measures all cases.

  Args:
    params: Parameters in float32.
    config: Config of the model.
    prompts: Ids of each prompt.
    tokens: Number of tokens to sample for each prompt.

  Returns:
    {"logits": {case: error}, "gradients": {leaf: {case: error}}, "mismatch": {case: {name:
    nats}}}.
  """
  rows = sample(params, config, prompts, "float32", tokens)
  with jax.enable_x64(True):
    logits, gradients = reference_results(params, config, rows, jnp.float64)
  by_case = {
    name: functools.partial(our_results, products=Products(*CASES[name])) for name in CASES
  }
  by_case[PLAIN] = functools.partial(reference_results, dtype=jnp.bfloat16)
  found: dict[str, Any] = {"logits": {}, "gradients": {name: {} for name in gradients}}
  for case, compute in by_case.items():
    its_logits, its_gradients = compute(params, config, rows)
    found["logits"][case] = relative_error(its_logits, logits)
    for name, exact in gradients.items():
      found["gradients"][name][case] = relative_error(its_gradients[name], exact)
  found["mismatch"] = {
    case: mismatch(
      params, config, sample(params, config, prompts, case, tokens), Products(*CASES[case])
    )
    for case in CASES
  }
  return found


def tables(found: Any) -> str:
  """Returns the results as lines of text."""
  cases = list(found["logits"])
  lines = [f"{'relative error by norm':24}" + "".join(f"{case:>20}" for case in cases)]
  rows = {"logits": found["logits"]}
  rows |= {f"gradient of {name}": errors for name, errors in sorted(found["gradients"].items())}
  lines += [
    f"{name:24}" + "".join(f"{row[case]:20.2e}" for case in cases) for name, row in rows.items()
  ]
  lines.append("")
  lines.append(f"{'sampler, trainer; nats':24}" + "".join(f"{case:>20}" for case in CASES))
  for name in next(iter(found["mismatch"].values())):
    values = "".join(f"{found['mismatch'][case][name]:20.2e}" for case in CASES)
    lines.append(f"{name:24}{values}")
  return "\n".join(lines)


def _random_model(sizes: str, family: str) -> tuple[ModelConfig, Any]:
  """Makes a model of random weights with a vocabulary of 4096; heads have 64 numbers."""
  depth, width, between, heads, kv_heads = map(int, sizes.split(","))
  config = ModelConfig(
    family=family,
    vocab_size=4096,
    hidden_size=width,
    intermediate_size=between,
    num_layers=depth,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=64,
    tie_embeddings=True,
    qkv_bias=family == "qwen2",
    qk_norm=family == "qwen3",
  )
  return config, jax.jit(lambda: transformer.init(jax.random.key(0), config))()


def _prompts(folder: pathlib.Path | None, config: ModelConfig, count: int) -> list[Any]:
  """Returns the ids of prompts: texts, or random ones for a model without a tokenizer."""
  if folder is None:
    rng = np.random.default_rng(0)
    return [rng.integers(config.vocab_size, size=16) for _ in range(count)]
  tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
  return [tokenizer.encode(TEXTS[i % len(TEXTS)]).ids for i in range(count)]


def main(arguments: Sequence[str]) -> None:
  """Prints the tables of one model."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("folder", nargs="?", type=pathlib.Path, help="Hugging Face folder")
  parser.add_argument("--sizes", help="LAYERS,WIDTH,MLP,HEADS,KV_HEADS of random weights")
  parser.add_argument("--family", default="llama", choices=("llama", "qwen2", "qwen3"))
  parser.add_argument("--prompts", type=int, default=8)
  parser.add_argument("--tokens", type=int, default=64, help="tokens to sample for each prompt")
  parser.add_argument("--json", type=pathlib.Path, help="file for the numbers")
  given = parser.parse_args(arguments)
  if (given.folder is None) == (given.sizes is None):
    parser.error("give a folder or --sizes")
  if given.folder is None:
    config, params = _random_model(given.sizes, given.family)
  else:
    loaded = models.load(given.folder)
    config, params = loaded.config, loaded.params
  found = measure(params, config, _prompts(given.folder, config, given.prompts), given.tokens)
  print(tables(found))
  if given.json:
    given.json.write_text(json.dumps({"model": dataclasses.asdict(config), **found}, indent=2))


if __name__ == "__main__":
  sys.exit(cli.reported(main, sys.argv[1:]))
