"""Two and four processes compute what one does with as many devices: all that a step computes."""

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest

from grpo_jax.models import tiny
from tests import several
from tests.processes import spread_case

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# The cases that two and four processes compute.
CASES = {
  2: ("minibatches", "whitened", "adapter", "chosen", "taught", "divided"),
  4: ("whitened", "parts", "replicas"),
}
# Their reductions have two members, whose sum does not depend on the order.
EXACT = ("minibatches", "whitened", "adapter", "divided")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("spread")
  tiny.write(folder / "model")
  return folder


@pytest.fixture(scope="module")
def ran(folder):
  """Returns a function that has a given number of processes compute their cases, once."""

  def run(processes):
    sizes = {"processes": processes, "devices": 4 // processes}
    command = lambda address, index: [
      *(spread_case.__file__, folder / "model", folder / f"of_{processes}", address),
      *(processes, index, *CASES[processes]),
    ]
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}  # of the process compared with.
    started = several.start_python(command, folder / f"of_{processes}", **sizes, environment=flags)
    started.succeed(150)

  return functools.cache(run)


@pytest.fixture(scope="module")
def of_one(folder):
  """What one process computes, by case."""
  found = functools.partial(spread_case.measured, model=folder / "model", devices=jax.devices()[:4])
  return functools.cache(lambda name: found(spread_case.CASES[name]))


def computed(folder, processes, index, name):
  """Returns what a process computed in a case."""
  with np.load(folder / f"of_{processes}.{index}.npz") as stored:
    part = f"{name}/"
    return {key.removeprefix(part): stored[key] for key in stored if key.startswith(part)}


@pytest.mark.parametrize(
  ("processes", "name"), [(number, name) for number in CASES for name in CASES[number]]
)
def test_processes_compute_what_one_does(folder, ran, of_one, processes, name):
  ran(processes)
  found, expected = computed(folder, processes, 0, name), dict(of_one(name))
  of_process, of_all = found.pop("values read"), expected.pop("values read")
  split = np.prod(spread_case.CASES[name].sizes[1:]) / (4 // processes)
  assert of_process <= of_all / max(split, 1)
  assert found.keys() == expected.keys()
  for key, wanted in expected.items():
    if name in EXACT:
      np.testing.assert_array_equal(found[key], wanted, err_msg=key)
    elif key.startswith("weights"):
      np.testing.assert_allclose(found[key], wanted, rtol=2.4e-7, atol=1e-6, err_msg=key)
    else:
      np.testing.assert_allclose(found[key], wanted, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("processes", [2, 4])
def test_all_processes_have_the_same_bits(folder, ran, processes):
  """So no decision that depends on them can differ."""
  ran(processes)
  for name in CASES[processes]:
    first = computed(folder, processes, 0, name)
    for index in range(1, processes):
      other = computed(folder, processes, index, name)
      assert first.keys() == other.keys()
      for key in first.keys() - {"values read"}:
        np.testing.assert_array_equal(other[key], first[key], err_msg=f"{name} {key}")


def test_the_cases_do_what_they_are_for(folder, of_one):
  """Else equality would say little."""
  for name in spread_case.CASES:
    found = of_one(name)
    assert found["0/metric/train/grad_norm"] > 1e-4
    assert found["1/metric/train/skipped_share"] == 0
  divided = spread_case.CASES["divided"]
  settings = {"model": folder / "model", "devices": jax.devices()[:1]}
  whole = spread_case.measured(dataclasses.replace(divided, sizes=(1, 1, 1), context=1), **settings)
  for key, wanted in whole.items():
    if key.startswith("weights") or key.endswith("logprobs"):
      np.testing.assert_allclose(of_one("divided")[key], wanted, rtol=0, atol=2e-5, err_msg=key)
  assert of_one("minibatches")["1/metric/all/kl_to_initial"] > 0
  assert 0 < of_one("whitened")["0/metric/mismatch/seq_logprob_error_masked_share"] < 1
