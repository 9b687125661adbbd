"""The probe tells wrong weights from right ones."""

import jax
import numpy as np
import pytest

from grpo_jax.engines import probe
from tests.engines import tiny

CONFIG = tiny.config()


@pytest.fixture(scope="module")
def asked():
  return probe.Probe(CONFIG, compute_dtype="float32", num_valid_tokens=tiny.VOCABULARY)


@pytest.fixture(scope="module")
def right(asked):
  return np.asarray(asked.logprobs(tiny.params(CONFIG)))


def leaf_paths():
  return [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(tiny.params(CONFIG))]


def changed(path, change):
  """Returns the parameters with one leaf changed."""
  of_leaf = lambda p, x: change(x) if jax.tree_util.keystr(p) == path else x
  return jax.tree_util.tree_map_with_path(of_leaf, tiny.params(CONFIG))


def differs(asked, right, tree):
  with pytest.raises(probe.WrongWeights, match="server 1 does not sample from the weights"):
    found = np.asarray(asked.logprobs(tree))
    probe.check(found, right, tolerance=probe.TOLERANCES["float32"], what="server 1")


def test_logprobs_are_those_of_the_model(asked, right):
  tree = tiny.params(CONFIG)
  each = tiny.model_logprobs(CONFIG, tree, asked.ids[:1], asked.ids[1:])
  np.testing.assert_allclose(right, tiny.of_tokens(each, asked.ids[1:]), atol=1e-5)
  assert probe.check(right, right, tolerance=0.0, what="server 1") == 0.0


@pytest.mark.parametrize("path", leaf_paths())
def test_one_tensor_slightly_off_is_found(asked, right, path):
  differs(asked, right, changed(path, lambda x: x * 1.05))


def test_two_layers_swapped_are_found(asked, right):
  # Of every stacked parameter: (layers, ...).
  stacked = [p for p in leaf_paths() if "layers" in p]
  assert stacked
  for path in stacked:
    differs(asked, right, changed(path, lambda x: x[::-1]))


def test_weights_of_the_step_before_are_found(asked, right):
  """One step of Adam moves each parameter by about the learning rate."""
  tree = tiny.params(CONFIG)
  before = jax.tree.map(lambda x: x - 1e-3, tree)
  differs(asked, right, before)


def test_logprobs_that_are_not_numbers_are_found(right):
  broken = right.copy()
  broken[3] = np.nan
  with pytest.raises(probe.WrongWeights):
    probe.check(broken, right, tolerance=1e9, what="server 1")


def test_one_token_that_is_off_is_found_and_reported(right):
  off = right.copy()
  off[3] += 0.01
  with pytest.raises(probe.WrongWeights, match=r"up to 0.01 nats .*probe_tolerance is 0.005"):
    probe.check(off, right, tolerance=0.005, what="server 1")
  assert 0.009 < probe.check(off, right, tolerance=0.02, what="server 1") < 0.011


def test_probe_asks_for_ids_of_the_tokenizer_only():
  for size in (5, 61, 50_000):
    ids = probe.probe_ids(size)
    assert len(ids) == probe.LENGTH and 0 <= min(ids) and max(ids) < size
    assert ids == probe.probe_ids(size)
