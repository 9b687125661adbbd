"""`grpo-jax plan` without a topology: what the machine is, what fits it, how to name another."""

import pytest

from grpo_jax.commands import cli
from grpo_jax.compilation import accelerators
from grpo_jax.compilation.accelerators import Accelerators
from grpo_plan import here, machines, plan_request, topologies


@pytest.fixture
def machine(monkeypatch):
  """A function that makes this machine one with these accelerators."""

  def has(platform, *names, memory=0):
    gpus = Accelerators("gpu", names, "580.65") if platform == "gpu" else None
    monkeypatch.setattr(accelerators, "gpus", lambda root=None: gpus)
    tpus = Accelerators("tpu", names) if platform == "tpu" else None
    monkeypatch.setattr(accelerators, "tpus", lambda root=None: tpus)
    monkeypatch.setattr(accelerators, "smi", lambda *_: [[str(memory)]] * len(names))

  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setattr(topologies, "check_compiler", lambda topology: None)
  return has


@pytest.mark.parametrize(
  ("platform", "names", "topology"),
  [
    ("gpu", ["Tesla T4"], "t4:1"),
    ("gpu", ["NVIDIA GeForce RTX 4090"] * 2, "4090:2"),
    ("gpu", ["NVIDIA H100 80GB HBM3"] * 8, "h100:8"),
    ("gpu", ["NVIDIA H100 PCIe"], None),
    ("gpu", ["Tesla T4", "NVIDIA L4"], None),
    ("tpu", ["TPU v5e"] * 8, "v5e-8"),
    ("tpu", ["TPU v5p"] * 4, "v5p-8"),
    ("cpu", [], "cpu:1"),
  ],
)
def test_a_machine_is_planned_for_by_what_it_has(machine, platform, names, topology):
  machine(platform, *names)
  found = here.found()
  assert found.topology == topology
  assert topology is None or topologies.parse(topology).name == topology
  assert not names or names[0] in found.line


@pytest.mark.parametrize(
  ("visible", "topology"),
  [("2,3", "h100:2"), ("0", "l4:1"), ("1,9,2", "h100:1"), ("GPU-8a", "l4:1"), ("0,1", None)],
)
def test_gpus_that_are_hidden_from_jax_do_not_count(machine, visible, topology):
  machine("gpu", "NVIDIA L4", *["NVIDIA H100 80GB HBM3"] * 7)
  assert here.found(environment={"CUDA_VISIBLE_DEVICES": visible}).topology == topology


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_where_all_gpus_are_hidden_the_cpu_computes_and_the_line_says_why(machine, visible):
  machine("gpu", *["NVIDIA L4"] * 2)
  found = here.found(environment={"CUDA_VISIBLE_DEVICES": visible})
  assert found.topology == "cpu:1"
  assert found.line == "this machine has 2 x NVIDIA L4, hidden by CUDA_VISIBLE_DEVICES"


def test_without_arguments_it_says_which_configs_fit_and_how(machine, capsys):
  machine("gpu", "NVIDIA GeForce RTX 4090")
  assert cli.run(["plan"]) == 0
  said = capsys.readouterr().out
  assert "1 x NVIDIA GeForce RTX 4090 (driver 580.65)" in said
  cells = [cell for cell in machines.cells().values() if cell.machine == "4090:1"]
  assert cells and all(machines.command(cell) in said for cell in cells if cell.fits)
  assert said.count("does not fit") == sum(not cell.fits for cell in cells) > 0


def test_on_a_cpu_it_says_what_runs_there_and_how_to_name_another_machine(machine, capsys):
  machine("cpu")
  assert cli.run(["plan"]) == 0
  said = capsys.readouterr().out
  for words in ("no GPU and no TPU", "grpo-jax train quickstart", "--topology=h100:8"):
    assert words in said


def test_a_missing_compiler_is_one_line_with_the_command_of_pip(machine, capsys, monkeypatch):
  machine("gpu", "Tesla T4")
  monkeypatch.undo()
  monkeypatch.setattr(accelerators, "gpus", lambda root=None: Accelerators("gpu", ("Tesla T4",)))
  monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda module: None)
  assert cli.run(["plan"]) == 0
  assert capsys.readouterr().out.count('pip install "grpo-jax[plan-cuda]"') == 1
  assert cli.run(["plan", "math_1b"]) == 2
  said = capsys.readouterr().err.splitlines()
  assert "planned for t4:1" in said[0] and 'pip install "grpo-jax[plan-cuda]"' in said[1]
  assert len(said) == 2


def test_a_gpu_that_is_not_in_the_table_names_one_of_no_more_memory(machine, capsys):
  machine("gpu", "NVIDIA L40S", memory=46068)
  assert cli.run(["plan"]) == 0
  assert "--topology=a100-40:1" in capsys.readouterr().out
  assert cli.run(["plan", "math_1b"]) == 2
  assert "NVIDIA L40S" in capsys.readouterr().err


def test_a_config_without_a_machine_is_planned_for_this_one(machine, monkeypatch):
  machine("tpu", "TPU v5e")
  seen = []

  def stop(topology, config):
    seen.append((topology.name, config.model.path))
    raise topologies.PlanError("seen")

  monkeypatch.setattr(plan_request, "in_run", stop)
  assert cli.run(["plan", "math_1b"]) == 2
  assert seen == [("v5e-1", "Qwen/Qwen2.5-1.5B-Instruct")]
