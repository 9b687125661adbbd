"""The table of docs/machines.md is what its data say, and these are what arithmetic gives."""

import math
import pathlib
import re
import sys
import types

import jax
import pytest

from grpo_jax.compilation import gpu_share
from grpo_jax.learn import sharding
from grpo_jax.models import config as model_config
from grpo_jax.models import leaves
from grpo_plan import architectures, machines, plan_request, programs, topologies

ROOT = pathlib.Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts"))
import machines as script  # noqa: E402

CELLS = machines.cells()


@pytest.fixture(autouse=True)
def usual_share(monkeypatch):
  for name in gpu_share.NAMES:
    monkeypatch.delenv(name, raising=False)


def test_the_page_has_the_table_of_the_data():
  page = script.PAGE.read_text()
  assert script.with_table(page) == page, "python scripts/machines.py --page"
  for mark, options in machines.MARKS.items():
    row = " ".join(f"--config.{option}" for option in options)
    assert f"| {mark} | `{row}` |" in page


def test_every_machine_has_every_model():
  wanted = {(m, n, t) for m in machines.MACHINES for n in machines.MODELS for t in machines.CONFIGS}
  assert CELLS.keys() == wanted


def test_the_room_of_a_machine_is_what_a_run_has():
  for cell in CELLS.values():
    assert cell.usable == script.usable(cell.machine), cell.machine


def state_of(model, machine, training, marks):
  """Bytes of weights, moments, reference and sums of gradients on one device."""
  sizes = model_config.from_hf(architectures.SHAPES[model])
  devices = topologies.parse(machine).devices
  if training == "full":
    copies = 1 + (1 if "c" in marks else 2) + ("a" not in marks) + 1
    return (
      4 * copies * sum(math.prod(x.shape) for x in jax.tree.leaves(leaves.tree(sizes))) / devices
    )
  mesh = sharding.make_mesh(data=1, fsdp=devices, tensor=1, devices=jax.devices()[:devices])
  run = types.SimpleNamespace(model=sizes, mesh=mesh)
  base = "int8" if "d" in marks else "nf4" if "e" in marks else "bfloat16"
  return programs.base_bytes(run, base) + 4 * programs.adapter_bytes(run, 32)


def test_the_state_of_every_cell_is_that_of_the_models_sizes():
  seen = {}
  for (machine, model, training), cell in CELLS.items():
    for tried in cell.tried:
      key = model, training, tried.marks, topologies.parse(machine).devices
      if key not in seen:
        seen[key] = state_of(model, machine, training, tried.marks)
      assert tried.state == pytest.approx(seen[key], rel=2e-3), (key, tried)
      # The arrays of an update are the state, and what of the sampler is not freed.
      assert tried.state <= tried.learning < 1.9 * tried.state


def test_the_options_of_every_cell_are_the_first_of_the_ladder_that_fit():
  for (machine, _, training), cell in CELLS.items():
    ladder = machines.ladder(machine, training)
    assert tuple(each.marks for each in cell.tried) == ladder[: len(cell.tried)]
    assert not any(each.fits(cell.usable) for each in cell.tried[:-1])
    assert cell.fits or len(cell.tried) == len(ladder)
    for each in cell.tried:  # what cannot fit is not compiled, and all else is, or is counted.
      known = each.update is not None or each.counted > 0
      assert known != (max(each.learning, each.sampling) > cell.usable)


def test_the_options_of_the_table_are_valid_and_its_commands_name_them():
  for training in machines.CONFIGS:
    for marks in {marks for m in machines.MACHINES for marks in machines.ladder(m, training)}:
      plan_request.config_of([f"--config={machines.CONFIGS[training]}", *machines.overrides(marks)])
  cell = CELLS["t4:1", "Qwen2.5-1.5B", "LoRA"]
  assert machines.command(cell) == (
    "grpo-jax train math_1b_lora --config.model.path=Qwen/Qwen2.5-1.5B-Instruct"
    " --config.model.compute_dtype=float32"
  )


def test_the_first_commands_of_the_page_are_of_configs_of_the_table():
  commands = re.findall(r"^ *grpo-jax (?:train|plan) (\w+)", script.PAGE.read_text(), re.MULTILINE)
  assert {*commands} == {"quickstart", machines.CONFIGS["LoRA"]}
