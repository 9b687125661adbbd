"""An adapter on a quantised base is trained alike in every layout and on every mesh."""

import jax
import numpy as np
import pytest

from grpo_jax.batching.packing import Shape
from tests.processes import spread_case
from tests.processes.spread_case import Case

pytestmark = pytest.mark.slow  # tests/learn/test_lora.py compares gradients.

# Two minibatches, so old logprobs of the adapter of before; a reference, which is the base.
SETTINGS = {
  **spread_case.SGD,
  **spread_case.LORA,
  "optim.learning_rate": 10.0,  # gradients of B are small: W counts s A B only.
  "model.lora.base_dtype": "int8",
  "loss.kl_coef": 0.1,
  "learn.minibatches": 2,
  "learn.report_kl_every_steps": 1,
}
EACH_ALONE = {"batching.pack": False, "batching.share_prefixes": False}


@pytest.fixture(scope="module")
def measured(model):
  def measure(sizes, devices, changes, shape):
    case = Case(sizes, {**SETTINGS, **changes})
    return spread_case.measured(case, model, jax.devices()[:devices], shape=shape)

  return measure


@pytest.fixture(scope="module")
def whole(measured):
  """What one device computes of one packed microbatch a step."""
  return measured((1, 1, 1), 1, {}, spread_case.SHAPE)


@pytest.mark.parametrize(
  ("sizes", "devices", "changes", "shape"),
  [
    pytest.param((1, 1, 1), 1, {}, Shape(2, 64, 64), id="microbatches"),
    pytest.param((1, 1, 1), 1, EACH_ALONE, Shape(16, 64, 64), id="one-row-per-completion"),
    pytest.param((2, 2, 2), 8, {}, spread_case.SHAPE, id="eight-devices"),
    pytest.param((1, 8, 1), 8, {}, spread_case.SHAPE, id="fsdp"),
  ],
)
def test_layouts_and_meshes_change_nothing(measured, whole, sizes, devices, changes, shape):
  found = measured(sizes, devices, changes, shape)
  adapted = [key for key in whole if key.startswith("weights") and key[-2:] in (".a", ".b")]
  assert len(adapted) == 14 and all(np.abs(whole[key]).max() > 1e-4 for key in adapted)
  for key in adapted:
    scale = np.abs(whole[key]).max()
    np.testing.assert_allclose(found[key], whole[key], rtol=0, atol=2e-5 * scale, err_msg=key)
  for step in range(2):
    key = f"{step}/logprobs"
    np.testing.assert_allclose(found[key], whole[key], rtol=0, atol=2e-5, err_msg=key)
    for name in ("train/adapter_norm", "lora/relative_change", "train/kl_to_reference"):
      key = f"{step}/metric/{name}"
      np.testing.assert_allclose(found[key], whole[key], rtol=1e-4, atol=1e-7, err_msg=key)


def test_the_reference_is_the_base(whole):
  assert whole["0/metric/all/kl_to_initial"] == 0.0
  assert whole["1/metric/all/kl_to_initial"] > 1e-7
