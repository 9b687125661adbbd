"""Which implementation is taken, and what the entry refuses."""

import logging

import conformance
import numpy as np
import pytest
from grpo_kernels import implementations
from grpo_kernels import linear_logprobs as package
from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.linear_logprobs import choice, linear_logprobs, pallas_tpu_tiles

H100 = choice.Chip("gpu", "NVIDIA H100 80GB HBM3", "9.0")
A100 = choice.Chip("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
V5E = choice.Chip("tpu", "TPU v5 lite")
V6E = choice.Chip("tpu", "TPU v6 lite")
CPU = choice.Chip("cpu", "cpu")


def test_suite_knows_every_implementation():
  assert set(conformance.INTERPRETERS) == set(package.IMPLEMENTATIONS)


@pytest.mark.parametrize(
  ("chip", "dtype", "width", "name"),
  [
    (CPU, "bfloat16", 64, "xla_chunked"),
    (H100, "bfloat16", 1536, "mosaic_gpu"),
    (H100, "bfloat16", 100, "xla_chunked"),
    (H100, "float32", 1536, "xla_chunked"),
    (A100, "bfloat16", 1536, "xla_chunked"),
    (V5E, "bfloat16", 1536, "pallas_tpu"),
    (V5E, "float32", 100, "pallas_tpu"),
  ],
)
def test_default_fits_the_chip(chip, dtype, width, name):
  assert choice.default(chip, dtype, width)[0] == name


@pytest.mark.long
def test_choice_is_logged_once(caplog):
  implementations.log_once.cache_clear()
  hidden, head, targets = conformance.random_case(2, 8, 31, dtype="float32")
  with caplog.at_level(logging.INFO, "grpo_kernels.linear_logprobs"):
    chosen = linear_logprobs(hidden, head, targets)
    linear_logprobs(hidden, head, targets)
  assert [r.getMessage() for r in caplog.records] == ["linear_logprobs on cpu: xla_chunked"]
  named = linear_logprobs(hidden, head, targets, implementation="xla_chunked")
  np.testing.assert_array_equal(chosen, named)


@pytest.mark.parametrize("name", ["mosaic_gpu", "pallas_tpu"])
def test_named_kernel_that_cannot_run_raises_with_the_reason(name):
  hidden, head, targets = conformance.random_case(2, 64, 31, dtype="bfloat16")
  with pytest.raises(NotImplementedError, match=f"{name}.* runs on .*; this process .* on cpu"):
    linear_logprobs(hidden, head, targets, implementation=name)


def test_kernel_refuses_other_chips_and_dtypes_with_the_reason():
  with pytest.raises(NotImplementedError, match=r"Hopper.*9\.x.*; this process .*A100"):
    choice.pick("mosaic_gpu", A100, dtype="bfloat16", width=64)
  with pytest.raises(NotImplementedError, match="in bfloat16, got float32"):
    choice.pick("mosaic_gpu", H100, dtype="float32", width=64)


def test_unknown_implementation_is_named_beside_those_that_exist():
  hidden, head, targets = conformance.random_case(2, 8, 31, dtype="float32")
  with pytest.raises(ValueError, match="no implementation 'palas'; there are .*xla_chunked"):
    linear_logprobs(hidden, head, targets, implementation="palas")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"head_layout": "vh"}, "'vd' or 'dv'"),
    ({"head_layout": "dv"}, "width 8.*width 31"),
    ({"temperature": 0.0}, "above 0"),
  ],
)
def test_entry_refuses_what_makes_no_sense(change, message):
  hidden, head, targets = conformance.random_case(2, 8, 31, dtype="float32")
  with pytest.raises(ValueError, match=message):
    linear_logprobs(hidden, head, targets, **change)


def test_an_assumed_chip_is_the_current_one_until_the_end():
  here = choice.current_chip()
  with pytest.raises(RuntimeError), implementations.assumed_chip(V6E):
    assert choice.current_chip() == attention_choice.current_chip() == V6E
    assert pallas_tpu_tiles.device_kind() == "TPU v6 lite"
    with implementations.assumed_chip(H100):
      assert choice.current_chip() == H100
    assert choice.current_chip() == V6E
    raise RuntimeError
  assert choice.current_chip() == here
