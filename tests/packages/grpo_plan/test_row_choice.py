"""Over how many devices a plan divides rows: the choice, its reason, its remedy and its check."""

import dataclasses

import jax
import pytest
from grpo_kernels import implementations
from grpo_kernels.implementations import Chip

from grpo_plan import (
  advice,
  plan,
  plan_request,
  programs,
  report,
  row_choice,
  row_traffic,
  topologies,
  workload,
)
from grpo_plan.chips import CHIPS
from grpo_plan.compiling import Compiled

ROW = 2048
OPTIONS = [
  "--config=configs/long_context.py",
  "--config.mesh.context=1",
  "--config.engine.name=sglang",
  "--config.data.max_prompt_tokens=512",
  f"--config.rollout.max_tokens={ROW}",
  f"--config.sampling.max_tokens={ROW - 512}",
  f"--config.batching.row_tokens={ROW}",
  f"--config.batching.microbatch_tokens={ROW}",
]


class Machine:
  """Eight devices of this machine that pass for TPUs with a memory of any size."""

  def __init__(self, model, scratch, *overrides):
    self.config = plan_request.config_of([*OPTIONS, *overrides])
    self.model, _ = plan_request.model_of(self.config, str(model), scratch)
    self.scratch = scratch
    self.described = {}

  def topology(self, room):
    chip = dataclasses.replace(CHIPS["v5e"], usable=room)
    return topologies.Topology("v5e-8", chip, 8)

  def describe(self, config):
    """Returns the run of a config; its memory is that of an ample device."""
    key = (config.mesh, config.batching.microbatch_tokens)
    if key not in self.described:
      ample = self.topology(1 << 45)
      found = plan_request.by_arithmetic(config, self.model, ample, self.scratch)
      self.described[key] = found
    return self.described[key]

  def choose(self, room, *, update=None, compile_update=None, config=None):
    config = self.config if config is None else config
    return row_choice.choose(
      self.describe(config),
      config,
      self.describe,
      self.topology(room),
      assumed=workload.lengths(config),
      update=update,
      compile_update=compile_update or (lambda run: Compiled("update")),
    )


@pytest.fixture(scope="module")
def machine(model, tmp_path_factory):
  patch = pytest.MonkeyPatch()
  with patch.context() as patched:
    patched.setattr(topologies, "devices", lambda topology: jax.devices()[:8])
    patched.setattr(implementations, "chip_of", lambda device: Chip("tpu", "TPU v5 lite"))
    yield Machine(model, tmp_path_factory.mktemp("scratch"), "--config.model.remat=full")


@pytest.fixture(scope="module")
def counted(machine):
  """Bytes of an update by the number of parts, where everything fits."""
  found = machine.choose(1 << 45)
  assert [each.parts for each in found.alternatives] == [1, 2, 4, 8]
  return {each.parts: each.counted for each in found.alternatives}


def test_a_row_that_fits_stays_whole(machine, counted):
  assert counted[1] > counted[2] > counted[4] > counted[8]
  found = machine.choose(counted[1])
  assert found.chosen is found.own and found.own.parts == 1
  (line,) = row_choice.lines(found)
  assert line.startswith("rows over several devices: mesh.context=1 is chosen, as the config has")


@pytest.mark.parametrize(("least", "fsdp"), [(2, 4), (4, 2), (8, 1)])
def test_the_least_number_of_parts_that_holds_a_row_is_chosen(machine, counted, least, fsdp):
  found = machine.choose(counted[least])
  assert found.chosen.parts == least
  sizes = {"mesh.context": least, "mesh.fsdp": fsdp}
  assert found.chosen.changes == {**sizes, "batching.microbatch_tokens": ROW // least}
  assert found.chosen.run.mesh.shape["context"] == least
  text = "\n".join(row_choice.lines(found))
  assert "1: " in text and "does not fit" in text and "the compiler agrees" in text
  assert f"chosen: mesh.context={least}, the least that holds a row of {ROW} tokens" in text
  assert f"--config.mesh.context={least} --config.mesh.fsdp={fsdp}" in text


def test_none_is_chosen_where_none_holds_a_row(machine, counted):
  found = machine.choose(counted[8] - 1, compile_update=pytest.fail)
  assert found.chosen is None and found.smallest.parts == 8
  assert row_choice.to_json(found)["chosen"] is None
  assert f"chosen: none, for none holds a row of {ROW} tokens" in "\n".join(row_choice.lines(found))


def test_what_the_compiler_refuses_is_not_chosen(machine, counted):
  asked = []

  def compile_update(run):
    asked.append(run.mesh.shape["context"])
    return Compiled("update", temporaries=1, is_refused=asked[-1] == 2)

  found = machine.choose(counted[2], compile_update=compile_update)
  assert asked == [2, 4] and found.chosen.parts == 4
  text = "\n".join(row_choice.lines(found))
  assert "the compiler does not agree: it refuses the update with mesh.context=2" in text
  assert "the compiler agrees: the update with mesh.context=4" in text


def test_the_compiler_decides_about_the_mesh_of_the_config(machine, counted):
  fits = machine.choose(counted[8], update=Compiled("update"), compile_update=pytest.fail)
  assert fits.own.fits(counted[8])
  refused = machine.choose(counted[1], update=Compiled("update", is_refused=True))
  assert refused.chosen.parts == 2


def test_fewer_parts_give_their_devices_to_fsdp(machine, counted):
  words = [*OPTIONS, "--config.model.remat=full", "--config.mesh.context=8"]
  config = plan_request.config_of([*words, f"--config.batching.microbatch_tokens={ROW // 8}"])
  found = machine.choose(counted[4], config=config)
  assert found.own.parts == 8 and found.chosen.parts == 4
  sizes = {"mesh.context": 4, "mesh.fsdp": 2}
  assert found.chosen.changes == {**sizes, "batching.microbatch_tokens": ROW // 4}
  # What is advised beside a mesh that fits is compiled, and not advised if it is refused.
  assert "the compiler agrees: the update with mesh.context=4" in "\n".join(row_choice.lines(found))
  refused = lambda run: Compiled("update", is_refused=True)
  kept = machine.choose(
    counted[4], config=config, update=Compiled("update"), compile_update=refused
  )
  assert kept.chosen is kept.own


def test_the_choice_is_the_first_remedy_and_in_the_json(machine, counted):
  topology, run = machine.topology(counted[4]), machine.describe(machine.config)
  need = plan.Need("update", 0, Compiled("update", temporaries=counted[1]))
  made = plan.Plan(run, topology, (need,), workload.lengths(machine.config), (), ())
  asked = []

  def compile_job(other, job):
    asked.append((other.mesh.shape["context"], programs.program_of(job.name)))
    return Compiled(job.name, temporaries=1)

  made = plan.with_rows(made, machine.config, machine.describe, compile_job)
  assert asked == [(4, "update")]
  first = advice.remedies(made)[0]
  assert first.change == "mesh.context=4 mesh.fsdp=2 batching.microbatch_tokens=512"
  assert first.saved >= made.worst.peak - made.room
  assert "chosen: mesh.context=4" in report.text(made, source="a test")
  content = report.to_json(made, source="a test", arguments=[])["choices"]["mesh.context"]
  assert content["chosen"] == 4
  sizes = [each["mesh.fsdp"] for each in content["alternatives"]]
  assert sizes == [8, 4, 2, 1]
  assert [each["fits"] for each in content["alternatives"]] == [False, False, True, True]


def test_one_device_has_no_choice_and_unknown_memory_neither(machine):
  run = machine.describe(machine.config)
  inputs = {"assumed": workload.lengths(machine.config), "update": None}
  choose = lambda run, topology: row_choice.choose(
    run, machine.config, machine.describe, topology, compile_update=pytest.fail, **inputs
  )
  one = dataclasses.replace(machine.topology(1), devices=1)
  assert choose(run, one) is None
  assert choose(dataclasses.replace(run, choices=None), machine.topology(1)) is None


def test_parts_receive_the_keys_of_the_others_and_copies_the_gradients(machine):
  run = machine.describe(machine.config)
  (weights, gradients) = row_traffic.of_update(run)
  assert (weights.kind, weights.axes) == ("all-gather", "fsdp+context")
  assert gradients.bytes == run.arrays.sums * 8 * 7 / 8
  found = machine.choose(1 << 45).alternatives
  moved = {each.parts: row_traffic.of_update(each.run) for each in found}
  keys = {n: sum(one.bytes for one in of if one.axes == "context") for n, of in moved.items()}
  model = run.model
  kv = 2 * ROW * model.num_layers * model.num_kv_heads * model.head_dim
  for parts, got in keys.items():
    share = (parts - 1) / parts
    assert got == pytest.approx(share * (kv * (2 * 2 + 4) + ROW * model.hidden_size * (2 + 4)))
