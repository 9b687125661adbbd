"""A whole run that trains adapters of experts: what samples, checkpoints and exports hold."""

import json

import jax
import numpy as np
import pytest

import grpo_jax
from grpo_jax.building import exporting
from grpo_jax.models import adapter_files, leaves, loading, tiny
from tests.runs import test_lora_runs

pytestmark = pytest.mark.long

SETTINGS = {
  "model__compute_dtype": "bfloat16",
  "model__lora__base_dtype": "bfloat16",
  "loss__kl_coef": 0.0,  # as few programs as a run can have.
  "learn__minibatches": 1,
  "learn__report_all_every_steps": 0,
  "learn__report_kl_every_steps": 0,
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """The folder of a run of two steps in bfloat16."""
  folder = tmp_path_factory.mktemp("experts")
  model = tiny.write(folder / "model", family="qwen3_moe")
  test_lora_runs.run(model, folder, **SETTINGS)
  return folder / "run"


def test_the_run_trains_the_experts_and_samples_from_what_it_trains(workdir):
  found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  lines = [line for line in found if "weight_version" in line]
  assert [line["weight_version"] for line in lines] == [0, 1]
  assert 0 < lines[1]["lora/merged_share"] < 1.5
  for line in lines:
    assert line["mismatch/abs_logprob_mean"] < 0.02 and line["lora/relative_change"] > 1e-3
  read = adapter_files.read(workdir / "adapter", loading.read_config(workdir.parent / "model"))
  assert {*read} == {*"qkvo", *leaves.EXPERTS}
  assert all(np.any(parts["b"]) for parts in read.values())


def test_a_checkpoint_is_read_as_the_files_were_written(workdir, tmp_path):
  wanted = loading.load(workdir / "export").params
  exporting.run(f"{workdir}:2", tmp_path / "again")
  for found in (loading.load(tmp_path / "again").params, grpo_jax.open(workdir).params):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
  base = loading.load(workdir.parent / "model").params["layers"]
  for name in leaves.EXPERTS:
    assert np.abs(np.asarray(wanted["layers"][name]) - base[name]).max() > 1e-4
  alone = exporting.run(f"{workdir}:2", tmp_path / "alone", only_adapter=True).folder
  for path in (workdir / "adapter").iterdir():
    assert (alone / path.name).read_bytes() == path.read_bytes()
