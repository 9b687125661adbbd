"""Meshes and servers that cannot be: one line with the fields to set, before anything is made."""

import json
import pathlib

import jax
import pytest

import grpo_jax.train  # (main imports it later: its seconds are not this test's.)
from grpo_jax import main
from grpo_jax.building import checks
from grpo_jax.config import command_line, configuration
from grpo_jax.learn import sharding
from grpo_jax.models import loading, tiny

ROOT = pathlib.Path(__file__).parents[2]


class Gpu:
  platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"


def complaints(name, *flags):
  command = command_line.parse([f"--config={ROOT / 'configs' / name}", *flags])
  return list(grpo_jax.train.validate(command.config))


@pytest.mark.parametrize("count", [1, 8])
def test_the_config_for_gpus_fits_one_and_eight(monkeypatch, count):
  monkeypatch.setattr(jax, "devices", lambda *_: [Gpu()] * count)
  assert complaints("math_1b_gpu.py") == []


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--config.mesh.fsdp=1", "needs 1 device, there are 8 (NVIDIA H100"),
    ("--config.mesh.tensor=3", "needs a multiple of 3 devices, there are 8 (NVIDIA H100"),
    ("--config.mesh.fsdp=16", "needs 16 devices, there are 8 (NVIDIA H100"),
  ],
)
def test_a_mesh_that_does_not_fit_is_one_line_before_anything_is_made(
  monkeypatch, tmp_path, capsys, flag, message
):
  monkeypatch.setattr(jax, "devices", lambda *_: [Gpu()] * 8)
  config = ROOT / "configs" / "math_1b_gpu.py"
  assert main.main([f"--config={config}", f"--workdir={tmp_path / 'w'}", flag]) == 2
  said = capsys.readouterr().err
  assert message in said and "mesh.fsdp=-1" in said and "Traceback" not in said
  assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
  ("error", "reason"),
  [
    (
      RuntimeError("Unable to initialize backend 'cuda':\n no driver"),
      "Unable to initialize backend 'cuda': no driver",
    ),
    (AssertionError(), "JAX_PLATFORMS=rocm names no platform that works here"),  # as JAX 0.10 does.
  ],
)
def test_no_device_at_all_is_one_line(monkeypatch, error, reason):
  def devices(*_):
    raise error

  monkeypatch.setenv("JAX_PLATFORMS", "rocm")
  monkeypatch.setattr(jax, "devices", devices)
  (complaint,) = complaints("math_1b.py")
  assert complaint.startswith(f"JAX finds no device: {reason}")


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("arguments=('--host=0.0.0.0',)", "set engine.sglang.host"),
    ("arguments=('--api-k=SECRET',)", "GRPO_JAX_SGLANG_API_KEY"),
    ("command=('serve','--host','0.0.0.0')", "set engine.sglang.host"),
    ("addresses=('http://me:SECRET@host:1',)", "without a password"),
    ("environment={'GRPO_JAX_SGLANG_API_KEY':'SECRET'}", "in the environment of the run"),
  ],
)
def test_options_of_servers_are_refused_before_anything_is_made(flag, message):
  flags = ["--config.engine.name=sglang", f"--config.engine.sglang.{flag}"]
  (complaint,) = complaints("math_1b.py", *flags)
  assert message in complaint and "SECRET" not in complaint
  assert complaints("math_1b.py", f"--config.engine.sglang.{flag}") == []  # not used.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tiny model: 4 heads, width 32."""
  return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


def test_heads_that_the_mesh_does_not_divide_are_refused_in_one_line(folder):
  mesh = sharding.make_mesh(data=1, tensor=8)
  with pytest.raises(configuration.ConfigError, match="mesh.tensor=8 does not divide .* 4 att"):
    checks.check_split(mesh, loading.read_facts(folder))


def test_a_mesh_that_does_not_divide_experts_is_refused_in_one_line(folder, tmp_path):
  mesh = lambda **sizes: sharding.make_mesh(**{"data": 1, "fsdp": 1, **sizes})
  with pytest.raises(configuration.ConfigError, match="mesh.expert=8 divides experts, but .* none"):
    checks.check_split(mesh(expert=8), loading.read_facts(folder))
  facts = loading.read_facts(tiny.write(tmp_path / "mixture", family="qwen3_moe"))  # 8 experts.
  checks.check_split(mesh(expert=8), facts)
  of_six = sharding.make_mesh(data=1, expert=6, devices=jax.devices()[:6])
  with pytest.raises(configuration.ConfigError, match="mesh.expert=6 does not divide .* 8 experts"):
    checks.check_split(of_six, facts)


def test_what_a_mesh_leaves_whole_is_said(folder, tmp_path, caplog):
  model = json.loads((folder / "config.json").read_text()) | {"vocab_size": 259}
  (tmp_path / "config.json").write_text(json.dumps(model))
  checks.check_split(sharding.make_mesh(fsdp=2, tensor=2), loading.read_facts(tmp_path))
  assert "mesh.tensor=2 does not divide the vocabulary of 259" in caplog.text
  caplog.clear()
  facts = loading.read_facts(folder)
  checks.check_split(sharding.make_mesh(fsdp=3, devices=jax.devices()[:3]), facts)
  assert "mesh.fsdp=3 does not divide the model's width of 32" in caplog.text
  caplog.clear()
  checks.check_split(sharding.make_mesh(fsdp=8), facts)
  assert caplog.text == ""
