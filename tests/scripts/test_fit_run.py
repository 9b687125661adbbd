"""scripts/fit_run.py: which arrays lie beside which program, from a config and a model's sizes."""

import os

import jax
import numpy as np
import pytest

from grpo_jax.building import computation
from grpo_jax.compilation.programs import Job
from grpo_jax.models import leaves, loading

COMMAND = ["--config=configs/math_1b.py", "--target=cpu", "--devices=8"]
SMALL = {
  "drift",
  "empty gradients",
  "optimizer state",
  "copy of the weights",
  "tensor of the export",
  "advantages",
}


@pytest.fixture(scope="module")
def fit_run():
  """The script, which asks for one device unless told otherwise and sets variables for XLA."""
  before = dict(os.environ)
  with pytest.MonkeyPatch.context() as patch:
    from scripts import fit_run, targets

    patch.setattr(targets, "devices", lambda target, count: jax.devices()[:count])
    os.environ.clear()
    os.environ.update(before)
    yield fit_run


@pytest.fixture(scope="module")
def planned(fit_run, model):
  return fit_run.plan(fit_run.parse([*COMMAND, f"--model={model}"]))


def without_engine(fit_run, model, *overrides):
  """Returns the arrays of a run whose completions are sampled elsewhere; nothing is traced."""
  of_engine = "--config.engine.name=sglang"
  question = fit_run.parse([*COMMAND, f"--model={model}", of_engine, *overrides])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(computation.Computation, "jobs", lambda self: [])
    return fit_run.plan(question)[0]


def parameters(folder):
  """Returns the number of a model's parameters."""
  return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(leaves.tree(loading.look(folder))))


def test_weights_moments_and_reference_are_split_over_the_devices(planned, model):
  arrays, count = planned[0], parameters(model)
  assert arrays.weights == arrays.reference == 4 * count / 8
  assert arrays.optimizer == pytest.approx(2 * arrays.weights, abs=64)  # and some counters.
  assert arrays.initial == 0


def test_sampler_keeps_layers_and_head_in_bfloat16_and_its_caches(planned, model):
  config = loading.look(model)
  embed = config.vocab_size * config.hidden_size
  norms = 2 * config.num_layers * config.hidden_size + config.hidden_size
  kernels = parameters(model) - embed - norms
  head = embed if config.tie_embeddings else 0
  assert planned[0].sampler == pytest.approx(2 * (kernels + head) / 8, rel=0.02)
  token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
  ring, pages = 64 * 512 * token / 8, 64 * 64 * token  # pages stand on every device.
  assert planned[0].caches == ring + pages


def test_every_program_of_the_run_is_counted_or_known_to_be_small(planned, fit_run):
  names = [job.name for job in planned[1]]
  assert {fit_run.program_of(name) for name in names} - {None} == set(fit_run.PROGRAMS)
  for name in names:
    assert fit_run.program_of(name) or any(name.startswith(small) for small in SMALL), name


def test_loss_without_kl_has_no_reference_but_reads_the_initial_weights(fit_run, model):
  arrays = without_engine(fit_run, model, "--config.loss.kl_coef=0")
  assert (arrays.reference, arrays.initial) == (0, arrays.weights)
  off = ("--config.loss.kl_coef=0", "--config.learn.report_kl_every_steps=0")
  assert without_engine(fit_run, model, *off).initial == 0


def test_mesh_of_the_config_decides_what_a_device_holds(fit_run, model, planned):
  copied = ("--config.mesh.data=8", "--config.mesh.fsdp=1")
  arrays = without_engine(fit_run, model, *copied)
  assert arrays.weights == 8 * planned[0].weights
  assert (arrays.sampler, arrays.caches) == (0, 0)  # SGLang's servers are not counted.


def test_arrays_beside_each_program(fit_run):
  arrays = fit_run.Arrays(1, 2, reference=10, sampler=100, caches=1000, initial=10000)
  assert {name: arrays.beside(name) for name in fit_run.PROGRAMS} == {
    "reading prompts": 1113,
    "sampling": 1113,
    "score": 1113,
    "watch": 10013,
    "update": 14,
    "optimizer": 14,
  }


def test_largest_shape_of_each_program_is_compiled(fit_run):
  names = ["update 1 × 448 (448)", "update 3 × 2304 (2304)", "update 4 × 448 (999999)"]
  names += [
    "optimizer",
    "optimizer state",
    "sampling 8 rows",
    "sampling 64 rows",
    "drift 8 × 9 (9)",
  ]
  found = fit_run.largest([Job(name, lambda: None) for name in names])
  assert [job.name for job in found] == [names[1], "optimizer", "sampling 64 rows"]


@pytest.mark.parametrize(
  ("room", "is_refused", "verdict"),
  [(150, False, "fits v5e"), (149, False, "DOES NOT FIT v5e"), (150, True, "DOES NOT FIT v5e")],
)
def test_verdict(fit_run, room, is_refused, verdict):
  gib = 2**30
  needs = [
    fit_run.Need("update 3 × 8 (8)", 100 * gib, 90 * gib, 20 * gib, 30 * gib, is_refused, 1.0),
    fit_run.Need("optimizer", 120 * gib, 120 * gib, 0, gib, False, 1.0),
  ]
  assert fit_run.fits(needs, room * gib) == verdict.startswith("fits")
  text = fit_run.table(needs, fit_run.Arrays(1, 2), room * gib, "v5e")
  assert f"{verdict}: 150.00 of {room}.00 GiB (update 3 × 8 (8))" in text


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--config.engine.max_row=3", "max_row"),
    ("--model=nowhere", "nowhere"),
    ("--config.mesh.fsdp=3", "mesh.fsdp=3"),
  ],
)
def test_wrong_arguments_are_explained(fit_run, capsys, argument, message):
  with pytest.raises(SystemExit) as ended:
    fit_run.parse([*COMMAND, argument])
  assert ended.value.code == 2
  assert message in capsys.readouterr().err


def test_config_that_cannot_work_is_explained(fit_run, model, capsys):
  wrong = "--config.optim.optimizer=nothing"
  assert fit_run.main([*COMMAND, f"--model={model}", wrong]) == 2
  assert "nothing" in capsys.readouterr().err


def test_model_is_the_one_of_the_config(fit_run):
  assert fit_run.parse(COMMAND).model.hidden_size == 1536
