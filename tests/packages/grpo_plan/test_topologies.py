"""Names of machines: what they mean, and the messages for those that do not exist."""

import importlib.util

import pytest
from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.decode_attention import choice as decode_choice
from grpo_kernels.implementations import Chip
from grpo_kernels.linear_logprobs import choice as head_choice

from grpo_jax.compilation import gpu_share
from grpo_plan import chips, topologies
from grpo_plan.chips import CHIPS
from grpo_plan.gpu_targets import TARGETS
from grpo_plan.topologies import PlanError


@pytest.mark.parametrize(
  ("name", "chip", "devices", "hosts", "slices", "shape"),
  [
    ("v5e-16", "v5e", 16, 4, 1, "4x4"),
    ("v5litepod-16", "v5e", 16, 4, 1, "4x4"),
    ("V5E-8", "v5e", 8, 1, 1, "2x4"),
    ("v5e:2x4", "v5e", 8, 1, 1, "2x4"),
    ("v5e-1", "v5e", 1, 1, 1, "1x1"),
    ("v5e-256", "v5e", 256, 64, 1, "16x16"),
    ("v6e-8", "v6e", 8, 1, 1, "2x4"),
    ("v5p-8", "v5p", 4, 1, 1, "2x2x1"),  # 8 TensorCores.
    ("v5p-32", "v5p", 16, 4, 1, "2x2x4"),
    ("v4-8", "v4", 4, 1, 1, "2x2x1"),
    ("2xv5e-16", "v5e", 32, 8, 2, "4x4"),
    ("h100:8", "h100", 8, 1, 1, ""),
    ("h100", "h100", 1, 1, 1, ""),
    ("2xh100:8", "h100", 16, 2, 2, ""),
    ("4xh200:4", "h200", 16, 4, 4, ""),
    ("cpu:4", "cpu", 4, 1, 1, ""),
    ("t4", "t4", 1, 1, 1, ""),
    ("L4:4", "l4", 4, 1, 1, ""),
    ("4090", "4090", 1, 1, 1, ""),
    ("rtx4090:1", "4090", 1, 1, 1, ""),
    ("RTX-5090:2", "5090", 2, 1, 1, ""),
    ("2x5090:8", "5090", 16, 2, 2, ""),
    ("a100-40:8", "a100-40", 8, 1, 1, ""),
    ("a100-80gb", "a100", 1, 1, 1, ""),
  ],
)
def test_names_mean_what_google_and_nvidia_sell(name, chip, devices, hosts, slices, shape):
  found = topologies.parse(name)
  assert (found.chip.name, found.devices, found.hosts) == (chip, devices, hosts)
  assert (found.slices, found.shape) == (slices, shape)


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("v5e-12", ["v5e-16", "v5e-8"]),
    ("v5p-4", ["v5p-8", "there are"]),
    ("v7e-8", ["v6e-8"]),
    ("h1oo:8", ["h100:8"]),
    ("h100:16", ["1 to 8 GPUs", "2xh100:8"]),
    ("h100-8", ["2xh100:8"]),
    ("v5e:3x3", ["4x4"]),
    ("0xv5e-16", ["v5e-16"]),
    ("", ["v5e-16"]),
    ("cpu:0", ["cpu:8"]),
    ("a100-60:8", ["a100-40:8"]),
    ("rtx3090:1", ["5090"]),
  ],
)
def test_unknown_names_name_the_nearest(name, words):
  with pytest.raises(PlanError) as refused:
    topologies.parse(name)
  assert all(word in str(refused.value) for word in words), refused.value


def test_all_offered_names_are_valid_and_stay_themselves():
  for name in topologies.valid():
    assert topologies.parse(name).name == name


def test_a_host_is_a_machine_of_its_own():
  hosts = {name: topologies.host_of(topologies.parse(name)).name for name in
           ("v5e-16", "v5p-32", "2xv5e-8", "2xh100:8", "v6e-8")}  # fmt: skip
  assert hosts == {
    "v5e-16": "v5e-4",
    "v5p-32": "v5p-8",
    "2xv5e-8": "v5e-8",
    "2xh100:8": "h100:8",
    "v6e-8": "v6e-8",
  }


@pytest.mark.parametrize(
  ("name", "extra"), [("v5e-16", "grpo-jax[plan-tpu]"), ("h100:8", "grpo-jax[plan-cuda]")]
)
def test_a_missing_compiler_is_one_message_that_says_what_to_install(monkeypatch, name, extra):
  monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
  with pytest.raises(PlanError) as refused:
    topologies.devices(topologies.parse(name))
  assert extra in str(refused.value) and "not needed" in str(refused.value)


def test_rates_have_sources_and_sensible_sizes():
  for chip in CHIPS.values():
    assert chip.sources and chip.of_usable
    assert 0.85 * chip.memory < chip.usable <= 1.08 * chip.memory
    assert chip.network < chip.link < chip.bandwidth
    # A T4 multiplies bfloat16 as float32: its 65 TFLOP/s are float16.
    assert chip.float32 < chip.bfloat16 or (chip.name, chip.bfloat16) == ("t4", chip.float32)


def test_a_device_is_known_by_the_name_that_jax_gives_it():
  found = {name: chips.of_kind(name) for name in (*chips.KINDS, "NVIDIA H100 PCIe", "cpu")}
  assert found["Tesla T4"] is CHIPS["t4"] and found["TPU v5 lite"] is CHIPS["v5e"]
  assert {chip.name for chip in found.values() if chip} == CHIPS.keys()
  # Other chips than those whose names they begin with.
  assert found["NVIDIA H100 PCIe"] is None and found["cpu"] is None
  assert chips.of_kind("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_a_plan_has_the_memory_that_jax_takes_in_a_run(monkeypatch):
  for name in gpu_share.NAMES:
    monkeypatch.delenv(name, raising=False)
  share = lambda engine, name="h100": chips.in_run(CHIPS[name], engine).usable / CHIPS[name].memory
  assert share("jax_sampler") == pytest.approx(0.92) and share("sglang") == pytest.approx(0.75)
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".4")
  assert share("sglang") == pytest.approx(0.4)
  assert chips.in_run(CHIPS["v5e"], "sglang") is CHIPS["v5e"]


@pytest.mark.parametrize("name", ["t4", "l4", "4090", "5090", "a100-40", "a100"])
def test_kernels_of_hopper_are_not_chosen_for_other_gpus(name):
  target = TARGETS[name]
  chip = Chip("gpu", target.name, target.capability)
  assert attention_choice.default(chip, "bfloat16", 128)[0] == "xla_blocked"
  assert head_choice.default(chip, "bfloat16", 1536)[0] == "xla_chunked"
  sizes = {"width": 128, "queries": 6, "tokens": (64,)}
  assert "Hopper" in (decode_choice.misfit("mosaic_gpu", chip, "bfloat16", **sizes) or "")
  assert f"major: {target.capability[:-2]} minor: {target.capability[-1]} " in target.text
