"""The example of docs/linear_logprobs.md runs as it stands."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import reference

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "linear_logprobs.md"


@pytest.mark.long
def test_example_runs_and_differentiates():
  (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  assert len([line for line in code.splitlines() if line.strip()]) <= 12
  names = {}
  exec(code, names)

  def definition(hidden, head):
    logprobs, entropy = reference.linear_logprobs(
      hidden, head, names["targets"], temperature=0.7, return_entropy=True
    )
    return -jnp.mean(names["advantages"] * logprobs) - 0.01 * jnp.mean(entropy)

  expected = jax.grad(definition, argnums=(0, 1))(names["hidden"], names["head"])
  for mine, theirs in zip((names["d_hidden"], names["d_head"]), expected, strict=True):
    mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
    assert mine.shape == theirs.shape
    assert np.linalg.norm(mine - theirs) <= 0.01 * np.linalg.norm(theirs) + 1e-6


def test_pictures_of_the_page_exist():
  for name in re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text()):
    assert (PAGE.parent / name).exists()
