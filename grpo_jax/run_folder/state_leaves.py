"""The leaves of a state: their names in a checkpoint, and the arrays that are stored for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.run_folder import stored_arrays


def named_leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves by path, e.g. "params.layers.q" or "opt_state.0.mu.embed", in tree order."""
  paths_and_leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths_and_leaves
  }
  if len(named) != len(paths_and_leaves):
    raise ValueError("two leaves of the state have the same path; do its keys contain dots?")
  return named


def _is_random_key(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw(leaf: Any) -> Any:
  """Returns the array stored for a leaf: a random key as its bits, a Python number as an array."""
  if _is_random_key(leaf):
    return jax.random.key_data(leaf)
  if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
    return leaf
  return np.asarray(leaf)


def placed(array: Any, like: Any) -> Any:
  """Returns a restored array as the same kind of leaf as `like`."""
  if _is_random_key(like):
    return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(like))
  if stored_arrays.is_bound(like) or isinstance(like, np.ndarray):
    return array
  if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
    return jnp.array(array)
  return type(like)(array)
