"""Products of groups of rows: three forms of one definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import grouped_products
from tests.models import tiny

# Rows of each group; further rows, which belong to none; widths.
CASES = {
  "some": ([3, 0, 7, 1], 2, 5, 6),
  "one-group-has-all": ([0, 9, 0], 0, 4, 3),
  "one-group": ([6], 1, 3, 2),
  "none": ([0, 0], 3, 2, 3),
  "more-groups-than-rows": ([0, 1, 0, 0, 0, 2, 0, 0, 0, 1], 0, 3, 1),
  "longer-than-a-block": ([300, 0, 150], 7, 2, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_forms_agree(case):
  counts, beyond, width, out = CASES[case]
  rng, rows = np.random.default_rng(0), sum(counts) + beyond
  x, y, w = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((rows, width), (rows, out), (len(counts), width, out))
  )
  sizes = jnp.array(counts, jnp.int32)
  ends = np.cumsum(counts)
  products, gradients = np.zeros((rows, out)), np.zeros(w.shape)
  for group, (start, end) in enumerate(zip(ends - counts, ends, strict=True)):
    products[start:end] = np.float64(x[start:end]) @ w[group]
    gradients[group] = np.float64(x[start:end]).T @ y[start:end]
  for form in (*grouped_products.FORMS, None):

    def compute(x, y, w, turned, form=form):
      of_rows = grouped_products.products(x, w, sizes, form=form)
      other = grouped_products.products(x, turned, sizes, is_transposed=True, form=form)
      return of_rows, other, grouped_products.gradients(x, y, sizes, form=form)

    found = tiny.jit(compute)(x, y, w, w.swapaxes(1, 2))
    for got, wanted in zip(found, (products, products, gradients), strict=True):
      np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=str(form))


def test_the_form_is_that_of_the_platform_of_a_program():
  shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 4), (2, 4, 3))]
  sizes = jnp.array([5, 3], jnp.int32)
  lowered = jax.jit(lambda x, w: grouped_products.products(x, w, sizes)).trace(*shapes)
  texts = {at: lowered.lower(lowering_platforms=(at,)).as_text() for at in ("cpu", "tpu", "cuda")}
  assert "ragged_dot" in texts["tpu"] and "ragged_dot" in texts["cuda"]
  assert "ragged_dot" not in texts["cpu"] and "while" in texts["cpu"]
