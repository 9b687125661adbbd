"""Measures how fast this machine multiplies matrices: `python ceiling.py OUT.json`.

Square products of float32 with NumPy and with JAX, and of bfloat16 with float32
sums with JAX; the best of several, because other programs can only slow them down.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (1024, 1536, 2048)
REPEATS = 8


def best_gflops(multiply: Callable[[], object], size: int) -> float:
  """Returns the best rate, in 1e9 floating point operations per second, of size³ products."""
  multiply()  # compiles, starts threads.
  seconds = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    multiply()
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds) / 1e9


def measure(size: int) -> dict[str, float]:
  """Returns the rates for one size, by library and type."""
  left, right = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
  product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))

  def with_jax(dtype) -> Callable[[], object]:
    a, b = jnp.asarray(left, dtype), jnp.asarray(right, dtype)
    return lambda: product(a, b).block_until_ready()

  return {
    "numpy_float32": best_gflops(lambda: left @ right, size),
    "jax_float32": best_gflops(with_jax(jnp.float32), size),
    "jax_bfloat16": best_gflops(with_jax(jnp.bfloat16), size),
  }


def main(path: str) -> None:
  """Writes {library_type: GFLOP/s of the fastest size}."""
  by_size = [measure(size) for size in SIZES]
  best = {name: max(rates[name] for rates in by_size) for name in by_size[0]}
  pathlib.Path(path).write_text(json.dumps(best))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("path", metavar="OUT.json")
  main(parser.parse_args().path)
