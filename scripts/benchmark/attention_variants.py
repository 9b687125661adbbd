"""Ways to compute attention in packed rows, and its gradients, for scripts/gpu_day.py to time."""

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any

import head_variants
import jax
import jax.numpy as jnp
from grpo_kernels.attention import attention

from grpo_jax.models.products import Products

CUDNN = "cudnn, plain causal"  # a bar: it does not know branches, and computes more pairs.
REFERENCE, BOTH = "reference", "forward+backward"
PASSES = {"forward": 4, BOTH: 12}  # operations for a pair, head and channel.


def make_inputs(batch: Any, heads: Sequence[int], dtype: str) -> list[Any]:
  """Returns queries, keys, values, cotangents [B T heads width], segments and branches [B T]."""
  sizes = zip(jax.random.split(jax.random.key(0), 4), (0, 1, 1, 0), strict=True)
  shape = batch.segment_ids.shape
  arrays = [jax.random.normal(key, (*shape, heads[i], heads[2]), dtype) for key, i in sizes]
  return [*arrays, *map(jax.device_put, (batch.segment_ids, batch.branch_ids))]


def first_head(inputs: Sequence[Any]) -> list[Any]:
  """Returns the first head of the inputs in float32."""
  return [*(x[:, :, :1].astype("float32") for x in inputs[:4]), *inputs[4:]]


def compile_programs(names: Sequence[str], inputs: Sequence[Any], dtype: str) -> dict[Any, Any]:
  """Returns compiled programs by (name, pass); the reason, as text, for one that cannot run.

  The reference has one for the first head in float32. They are compiled several at a time.
  """

  def attend(name: str, given: Sequence[Any], segments: Any, branches: Any) -> Any:
    if name == CUDNN:
      return jax.nn.dot_product_attention(*given, is_causal=True, implementation="cudnn")
    q, k, v = given
    products = Products("float32" if name == REFERENCE else dtype)
    return attention(q, k, v, segments, branches, products=products, implementation=name)

  def both(name: str, q: Any, k: Any, v: Any, cotangent: Any, *ids: Any) -> Any:
    out, pull = jax.vjp(lambda *given: attend(name, given, *ids), q, k, v)
    return out, *pull(cotangent.astype(out.dtype))

  def compiled(key: tuple[str, str]) -> Any:
    name, which = key
    forward = lambda q, k, v, cotangent, *ids: attend(name, (q, k, v), *ids)
    function = functools.partial(both, name) if which == BOTH else forward
    if name == REFERENCE:
      with jax.default_matmul_precision("float32"):
        return jax.jit(function).lower(*first_head(inputs)).compile()
    try:
      return jax.jit(function).lower(*inputs).compile()
    except (RuntimeError, *head_variants.REFUSALS) as error:
      return f"{type(error).__name__}: {str(error).strip()[:300]}"

  keys = [(REFERENCE, BOTH), *((name, which) for name in names for which in PASSES)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return dict(zip(keys, pool.map(compiled, keys), strict=True))


def checked(run: Callable[..., Any], inputs: Sequence[Any], exact: Sequence[Any]) -> dict[str, Any]:
  """Returns the "errors" of output and gradients, and whether repetition has the "same_bits".

  Args:
    run: Compiled forward and backward pass.
    inputs: Its inputs; cotangents of heads after the first are replaced by 0.
    exact: Output and gradients of the first head, float32.
  """
  q, k, v, cotangent, *ids = inputs
  first, again = (run(q, k, v, cotangent.at[:, :, 1:].set(0), *ids) for _ in range(2))
  found = [x[:, :, :1].astype(jnp.float32) for x in first]
  norm = lambda x: float(jnp.sqrt(jnp.sum(x * x)))
  return {
    "errors": [norm(x - y) / norm(y) for x, y in zip(found, exact, strict=True)],
    "same_bits": all(bool((x == y).all()) for x, y in zip(first, again, strict=True)),
  }
