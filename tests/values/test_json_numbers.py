"""Numbers in strict JSON."""

import json
import math

import numpy as np
import pytest

from grpo_jax.values import json_numbers


@pytest.mark.parametrize("value", [0.1, -0.0, 3, 1e300, math.inf, -math.inf, np.float32(0.1)])
def test_every_number_comes_back_from_strict_json(value):
  text = json.dumps(json_numbers.encoded(value), allow_nan=False)
  back = json_numbers.decoded(json.loads(text))
  assert back == value and math.copysign(1, back) == math.copysign(1, value)


def test_nan_comes_back_also_from_older_files():
  assert json_numbers.encoded(math.nan) == "nan"
  assert math.isnan(json_numbers.decoded("nan")) and math.isnan(json_numbers.decoded(None))


@pytest.mark.parametrize(
  "value, expected",
  [(1, 1.0), (0.5, 0.5), (np.float64(2), 2.0), (math.nan, None), (-math.inf, None), ("x", None)],
)
def test_what_is_not_finite_is_null_for_readers(value, expected):
  assert json_numbers.finite(value) == expected
