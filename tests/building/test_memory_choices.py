"""What a run recomputes and how many rows it samples follow from the memory of its devices."""

import types
from typing import Any

import jax
import pytest
from grpo_kernels import implementations
from grpo_kernels.implementations import Chip

import configs.base
from grpo_jax import processes
from grpo_jax.building import computation, memory_choices, weights_spec
from grpo_jax.config import chosen_options, configuration, run_options
from grpo_jax.config.configuration import typed
from grpo_jax.learn import sharding, update_memory
from grpo_jax.learn.update_memory import UpdateMemory
from grpo_jax.models import loading
from grpo_jax.run_folder import workdirs

SETTINGS = {
  "rollout.prompts_per_step": 8,
  "rollout.group_size": 16,
  "rollout.max_tokens": 256,
  "sampling.max_tokens": 128,
  "data.max_prompt_tokens": 128,
}
GPU = Chip("gpu", "NVIDIA H100 80GB HBM3", "9.0")


@pytest.fixture(scope="module")
def sizes(model):
  return loading.read_config(model)


def config_of(**values):
  config = configs.base.get_config()
  given = {name.replace("__", "."): value for name, value in values.items()}
  config.update_from_flattened_dict({**SETTINGS, **given})
  return run_options.resolved(typed(config))


def choose(sizes, room, chip=GPU, devices=1, **values) -> Any:
  mesh = sharding.make_mesh(data=1, fsdp=devices, devices=jax.devices()[:devices])
  with implementations.assumed_chip(chip):
    return memory_choices.choose(config_of(**values), sizes, mesh, room=room)


@pytest.fixture(scope="module")
def ample(sizes):
  return choose(sizes, 1 << 40)


def test_a_cpu_and_a_device_of_unknown_memory_take_what_takes_least(sizes):
  reasons = "for a CPU", "because a device does not report its memory"
  for (chip, room), reason in zip(
    ((Chip("cpu", "cpu"), 1 << 40), (GPU, None)), reasons, strict=True
  ):
    found = choose(sizes, room, chip)
    assert (found.config.model.remat, found.config.engine.max_rows) == ("full", 64)
    assert found.config.chosen_by_memory == ("engine.max_rows", "model.remat")
    assert found.config.engine.cache_gib is None
    (line,) = found.lines
    values = "model.remat='full', engine.max_rows=64"
    assert line == f"{values}: chosen {reason} (docs/memory.md)"
  assert choose(sizes, None, model__remat="dots", engine__max_rows=3).lines == ()


@pytest.mark.long
def test_with_ample_memory_nothing_is_recomputed_and_a_step_is_one_wave(ample):
  assert (ample.config.model.remat, ample.config.engine.max_rows) == ("none", 8 * 16)
  assert ample.rows.whole_caches and not ample.warnings
  assert "128 completions" in ample.lines[0] and "recomputes nothing" in ample.lines[1]


def learning(room):
  """Returns what an update takes: 100 for arrays, and 50, 300 or 800 for what it keeps."""
  memory = lambda kept: UpdateMemory(kept, 10, 20, 20, 40, 30)
  updates = {"full": memory(50), "dots": memory(300), "none": memory(800)}
  return memory_choices.Learning(room, 100, updates)


@pytest.mark.parametrize(
  ("room", "fastest"),
  [(2000, "none"), (1089, "none"), (1087, "dots"), (534, "dots"), (532, "full"), (200, None)],
)
def test_the_fastest_choice_that_leaves_a_tenth_free_is_taken(room, fastest):
  assert learning(room).fastest == fastest


def test_the_error_of_an_update_names_the_choice_that_takes_less():
  assert learning(600).remedy("none").startswith("set model.remat='dots' (")
  assert learning(300).remedy("none").startswith("set model.remat='full' (")
  assert learning(600).remedy("full").startswith("lower batching")
  assert "'full'" in memory_choices.Choices(config_of(model__remat="dots")).remedy


def test_the_programs_have_the_remedy(sizes):
  config = config_of(model__remat="none")
  mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
  made = computation.make(config, sizes, mesh, run_options.objective(config), remedy="rest")
  assert made.update.differentiate.remedy == "rest"
  assert "model.remat" not in made.score.remedy


def test_what_does_not_fit_is_said_with_the_choice_that_would():
  said = memory_choices.too_large(learning(600), "none")
  assert "model.remat='none' may not fit" in said and "model.remat='dots' fits with" in said
  said = memory_choices.too_large(learning(100), "full")
  assert "no choice of model.remat fits" in said and "batching.microbatch_tokens" in said


@pytest.mark.long
def test_rows_fill_what_the_update_leaves(sizes, ample):
  update = ample.learning.updates["full"].total
  room = ample.learning.beside + update + ample.rows.caches
  few = choose(sizes, room)
  assert few.config.engine.max_rows < 128 and few.config.model.remat != "none"
  (warning,) = choose(sizes, 1 << 20, model__remat="none").warnings
  assert "no choice of model.remat fits" in warning


@pytest.mark.long
def test_caches_grow_beside_scores_and_beside_an_update_where_it_runs_meanwhile(
  sizes, ample, monkeypatch
):
  lengths = {"rollout__max_tokens": 1 << 15, "sampling__max_tokens": 32000}
  long = choose(sizes, 1 << 40, **lengths, engine__max_rows=128)
  update = long.learning.updates["full"].total
  room = long.learning.beside + 2 * update

  def most(scores, chip=GPU, **values):
    monkeypatch.setattr(update_memory, "of_scores", lambda replica: scores)
    found = choose(sizes, room, chip, **lengths, engine__max_rows=128, **values)
    return found.config.engine.cache_gib * 2**30

  beside_an_update = most(0, rollout__max_staleness=1)
  assert most(update, rollout__max_staleness=1) == beside_an_update
  assert most(0) > beside_an_update + 0.7 * update
  assert most(0, Chip("tpu", "TPU v5e")) == most(update, Chip("tpu", "TPU v5e"))
  assert most(0) - most(update // 2) == pytest.approx(update // 2, abs=2**26)


@pytest.mark.long
def test_devices_that_split_the_state_need_less(sizes, ample):
  split = choose(sizes, 1 << 40, devices=4)
  assert split.learning.beside < ample.learning.beside / 3


@pytest.mark.long
def test_an_adapter_keeps_the_copy_of_its_base_during_updates(sizes):
  found = choose(sizes, 1 << 40, model__lora__rank=4)
  assert found.config.model.remat == "none"
  served = choose(sizes, 1 << 40, model__lora__rank=4, engine__name="sglang")
  assert found.learning.beside > served.learning.beside and served.rows is None
  assert served.config.engine.max_rows is None


def test_all_processes_choose_by_the_smallest_memory(monkeypatch):
  def room(*own, others=()):
    devices = [types.SimpleNamespace(memory_stats=lambda each=each: each) for each in own]
    mesh: Any = types.SimpleNamespace(local_devices=devices)
    monkeypatch.setattr(processes, "exchange", lambda value, what: [value, *others])
    return memory_choices.room_of(mesh)

  of = lambda limit: {"bytes_limit": limit}
  assert room(of(70), of(60)) == 60
  assert room(of(70), of(60), others=[50, 80]) == 50
  assert room(of(70), others=[None]) is None
  assert room(of(70), None) is None and room({}) is None


def test_only_a_run_with_a_checkpoint_keeps_its_choice(tmp_path, monkeypatch):
  config, values = config_of(), {"model.remat": "none", "engine.max_rows": 128}
  chosen = chosen_options.resolved(config, values)
  assert memory_choices.continued(config, tmp_path) == config
  configuration.write(chosen, tmp_path / "config.json")
  assert memory_choices.continued(config, tmp_path) == config
  monkeypatch.setattr(workdirs, "steps", lambda folder: [3])
  assert memory_choices.continued(config, tmp_path) == chosen


@pytest.mark.parametrize(("room", "rows"), [(1 << 40, 256), (1 << 24, None)])
def test_an_evaluation_samples_as_many_as_its_own_memory_holds(sizes, room, rows):
  mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
  full = weights_spec.described_weights(sizes, weights_spec.shardings_of(sizes, mesh))
  with implementations.assumed_chip(GPU):
    found = memory_choices.choose_rows(config_of(), sizes, full, mesh, room=room).config
    given = config_of(engine__max_rows=3)
    assert memory_choices.choose_rows(given, sizes, full, mesh, room=room).config == given
  most = found.engine.max_rows
  assert most is not None and (most == rows if rows else 8 <= most < 256)
  assert memory_choices.choose_rows(config_of(), sizes, full, mesh, room=room).config == config_of()
