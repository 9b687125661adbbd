"""Ways to compute Σ log p(target) under a linear head in JAX, for `linear_logprobs.py` to time."""

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels.linear_logprobs import linear_logprobs
from grpo_kernels.linear_logprobs.token_local import linear_objective

# Reasons why a variant cannot run, reported in its row: sizes or a platform that it
# rejects, a missing package, a device whose memory is full.
REFUSALS = (ValueError, NotImplementedError, ImportError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to compute the loss."""

  name: str
  layout: str | None  # layout of its head; None: that of the command line.
  loss: Callable[..., jax.Array]  # (hidden, head, targets, weights, *, layout) -> scalar


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled variant, on its inputs."""

  seconds: Callable[[int], float]  # time per call, over that many consecutive calls.
  temporary_bytes: int  # beyond inputs and outputs.
  peak_bytes: int  # inputs and outputs included.
  loss: float  # mean over the tokens, in nats.


def by_implementation(hidden, head, targets, weights, *, layout, name):
  """Returns Σ w log p by an implementation of grpo_kernels."""
  logprobs: Any = linear_logprobs(hidden, head, targets, head_layout=layout, implementation=name)
  return jnp.sum(weights * logprobs)


def materialised(hidden, head, targets, weights, *, layout):
  """Returns Σ w log p with all logits in memory, float32, differentiated by JAX."""
  axis = {"vd": 1, "dv": 0}[layout]
  logits = jax.lax.dot_general(
    hidden, head, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
  )
  chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  return jnp.sum(weights * (chosen - jax.nn.logsumexp(logits, axis=-1)))


def one_sweep(hidden, head, targets, weights, *, layout, name=None):
  """Returns Σ w log p, whose gradients are computed in the forward pass."""
  total, _, _ = linear_objective(
    hidden,
    head,
    targets,
    lambda logprobs, entropy, weights, constants: jnp.sum(weights * logprobs),
    weights,
    head_layout=layout,
    implementation=name,
  )
  return total


def by_tokamax(hidden, head, targets, weights, *, layout):
  """Returns Σ -log p by tokamax's chunked XLA; its weights are all -1."""
  del weights, layout
  tokamax = importlib.import_module("tokamax")
  return tokamax.linear_softmax_cross_entropy_loss(
    hidden, targets, head, reduction="sum", implementation="chunked_xla"
  )


TILE = (1024, 2048)  # tokens × columns of the vocabulary.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def tiled(hidden, head, targets, weights, layout):
  """Returns Σ w log p by tiles of 1024 tokens × 2048 columns, in plain XLA; head [D V].

  The structure of tokamax's `chunked_xla` at its default tiles: a loop over
  tokens, containing one over the vocabulary; tile products, running log-sum-exp and
  accumulators in the dtype of the inputs. The backward pass recomputes each tile
  and adds to its slices of both gradients. Sizes are padded to tiles.
  """
  return _tiled_forward(hidden, head, targets, weights, layout)[0]


def _tiled_forward(hidden, head, targets, weights, layout):
  del layout
  hidden_p, head_p, targets_p = _padded(hidden, head, targets)
  dtype = hidden.dtype

  def over_tokens(_, rows):
    h, t = rows

    def over_columns(j, carry):
      lse, chosen = carry
      z = h @ _columns(head_p, j)
      lse = jnp.logaddexp(lse, jax.nn.logsumexp(_without_padding(z, j, head), axis=-1))
      onehot = jax.nn.one_hot(t - j * TILE[1], TILE[1], dtype=dtype)
      return lse, chosen + jnp.sum(z * onehot, axis=-1)

    start = jnp.full(TILE[0], -jnp.inf, dtype), jnp.zeros(TILE[0], dtype)
    return None, jax.lax.fori_loop(0, head_p.shape[1] // TILE[1], over_columns, start)

  _, (lse, chosen) = jax.lax.scan(over_tokens, None, _blocks(hidden_p, targets_p))
  lse, chosen = (x.reshape(-1)[: hidden.shape[0]] for x in (lse, chosen))
  total = jnp.sum(weights * (chosen - lse).astype(jnp.float32))
  return total, (hidden, head, targets, weights, lse)


def _tiled_backward(layout, residuals, cotangent):
  del layout
  hidden, head, targets, weights, lse = residuals
  hidden_p, head_p, targets_p = _padded(hidden, head, targets)
  pad = (0, hidden_p.shape[0] - hidden.shape[0])
  scale_p = jnp.pad((cotangent * weights).astype(hidden.dtype), pad)
  lse_p = jnp.pad(lse, pad)

  def over_tokens(d_head, rows):
    h, t, lse, scale = rows

    def over_columns(j, carry):
      d_hidden, d_head = carry
      w = _columns(head_p, j)
      onehot = jax.nn.one_hot(t - j * TILE[1], TILE[1], dtype=h.dtype)
      p = jnp.exp(_without_padding(h @ w, j, head) - lse[:, None])
      s = scale[:, None] * (onehot - p)
      d_hidden = d_hidden + s @ w.T
      d_tile = _columns(d_head, j) + h.T @ s
      return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_tile, j * TILE[1], 1)

    start = jnp.zeros_like(h), d_head
    d_hidden, d_head = jax.lax.fori_loop(0, head_p.shape[1] // TILE[1], over_columns, start)
    return d_head, d_hidden

  d_head, d_hidden = jax.lax.scan(
    over_tokens, jnp.zeros_like(head_p), _blocks(hidden_p, targets_p, lse_p, scale_p)
  )
  d_hidden = d_hidden.reshape(hidden_p.shape)[: hidden.shape[0]]
  return d_hidden, d_head[:, : head.shape[1]], None, None


tiled.defvjp(_tiled_forward, _tiled_backward)


def _padded(hidden, head, targets):
  """Returns the inputs with zeros up to whole tiles."""
  rows, columns = -hidden.shape[0] % TILE[0], -head.shape[1] % TILE[1]
  return (
    jnp.pad(hidden, ((0, rows), (0, 0))),
    jnp.pad(head, ((0, 0), (0, columns))),
    jnp.pad(targets, (0, rows)),
  )


def _blocks(*arrays):
  """Returns each array cut into the blocks of tokens that a scan visits."""
  return tuple(x.reshape(-1, TILE[0], *x.shape[1:]) for x in arrays)


def _columns(head, j):
  """Returns the head's columns of tile j."""
  return jax.lax.dynamic_slice_in_dim(head, j * TILE[1], TILE[1], 1)


def _without_padding(logits, j, head):
  """Returns the tile's logits, with those of padded columns set to -inf."""
  column = j * TILE[1] + jnp.arange(TILE[1])
  return jnp.where((column < head.shape[1])[None, :], logits, -jnp.inf)


def make_inputs(tokens: int, width: int, vocabulary: int, dtype: str) -> dict[str, Any]:
  """Returns random inputs; logits have a standard deviation of 3."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (tokens, width)) * (3.0 / width**0.5)
  head = jax.random.normal(keys[1], (vocabulary, width), dtype)
  return {
    "hidden": hidden.astype(dtype),
    "vd": head,
    "dv": jnp.asarray(head.T),
    "targets": jax.random.randint(keys[2], (tokens,), 0, vocabulary),
    "weights": jnp.full(tokens, -1.0),  # an argument, so that nothing is constant-folded.
  }


def compile_program(variant: Variant, inputs: dict[str, Any], which: str, layout: str) -> Program:
  """Returns the compiled variant.

  Raises:
    One of `REFUSALS`: The variant cannot run here; the message says why.
  """
  layout = variant.layout or layout
  arguments = inputs["hidden"], inputs[layout], inputs["targets"], inputs["weights"]
  loss = lambda h, w, t, g: variant.loss(h, w, t, g, layout=layout)
  function = loss if which == "forward" else jax.value_and_grad(loss, argnums=(0, 1))
  compiled = jax.jit(function).lower(*arguments).compile()
  memory = compiled.memory_analysis()
  assert memory is not None, "every measured backend reports its allocations"

  def seconds(calls: int) -> float:
    return seconds_per_call(lambda: compiled(*arguments), calls)

  total = jax.tree.leaves(compiled(*arguments))[0]
  arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
  return Program(
    seconds=seconds,
    temporary_bytes=memory.temp_size_in_bytes,
    peak_bytes=arrays + memory.temp_size_in_bytes - memory.alias_size_in_bytes,
    loss=float(total) / inputs["hidden"].shape[0],
  )


def make_matmul(size: int, dtype: str) -> Callable[[int], float]:
  """Returns a timer of size³ matrix products, with the signature of `Program.seconds`."""
  keys = jax.random.split(jax.random.key(1))
  a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
  product = jax.jit(jnp.matmul)

  return lambda calls: seconds_per_call(lambda: product(a, b), calls)


def seconds_per_call(call: Callable[[], Any], calls: int) -> float:
  """Returns the time per call, over consecutive calls: the device executes them in order."""
  start = time.perf_counter()
  last = None
  for _ in range(calls):
    last = call()
  jax.block_until_ready(last)
  return (time.perf_counter() - start) / calls


def _of(name: str) -> Variant:
  """Returns the variant of one implementation of grpo_kernels."""
  return Variant(name, None, functools.partial(by_implementation, name=name))


VARIANTS = {
  variant.name: variant
  for variant in (
    _of("mosaic_gpu"),
    _of("pallas_tpu"),
    _of("xla_chunked"),
    Variant("token_local", None, one_sweep),
    Variant("token_local_xla", None, functools.partial(one_sweep, name="xla_chunked")),
    Variant("xla_materialised", None, materialised),
    Variant(
      "xla_tiles_1024x2048",
      "dv",
      lambda h, w, t, g, *, layout: tiled(h, w, t, g, layout),
    ),
    Variant("tokamax_chunked_xla", "dv", by_tokamax),
  )
}
