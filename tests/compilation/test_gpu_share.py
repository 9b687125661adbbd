"""The share of a GPU's memory that JAX takes: a run sets it, and a plan reads the same."""

import os

import pytest

from grpo_jax import api, interrupts, main
from grpo_jax.compilation import gpu_share
from grpo_jax.config import command_line
from grpo_jax.engines.options import EngineOptions
from grpo_jax.processes import starting

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
  ("engine", "given", "share"),
  [
    ("jax_sampler", {}, 0.92),
    ("sglang", {}, 0.75),
    ("my_engines.Mine", {}, 0.75),
    ("jax_sampler", {OLD: ".5"}, 0.5),
    ("sglang", {NEW: ".4"}, 0.4),
    ("sglang", {OLD: " "}, 0.75),
  ],
)
def test_a_plan_has_the_share_that_jax_has_after_a_run_set_it(engine, given, share):
  environment = dict(given)
  assert gpu_share.of_run(engine, environment) == share
  gpu_share.set_for_run(EngineOptions(name=engine), environment)
  # JAX refuses both names at once, and takes 75 % where neither is set.
  assert len(environment) <= 1
  seen = environment.get(OLD, environment.get(NEW, "")).strip()
  assert float(seen or 0.75) == share


@pytest.mark.parametrize("given", ["much", "0", "1.5", "nan"])
def test_a_share_that_is_not_one_names_the_variable(given):
  with pytest.raises(ValueError, match=f"{NEW}={given} must be a number above 0"):
    gpu_share.of_run("jax_sampler", {NEW: given})


@pytest.mark.parametrize("begin", ["command", "call"])
def test_a_run_sets_the_share_before_jax_looks_for_devices(begin, monkeypatch, tmp_path):
  for name in (OLD, NEW):
    monkeypatch.setenv(name, "")  # so that what the run sets is undone.

  def start(*_):
    seen.append(os.environ[OLD])
    raise interrupts.Stopped

  seen: list[str] = []
  monkeypatch.setattr(starting, "start", start)
  if begin == "command":
    command = command_line.parse(["--config=quickstart", f"--workdir={tmp_path}"])
    with interrupts.Flag() as stop:
      main.run(command, stop)
  else:
    with pytest.raises(interrupts.Stopped):
      api.train("quickstart", tmp_path)
  assert seen == ["0.92"]
