"""What a run chooses by memory replaces None, is recorded, and is kept when the run continues."""

import json

import configs.base
from grpo_jax.building import named_code
from grpo_jax.config import chosen_options, configuration, run_options
from grpo_jax.config.configuration import typed

VALUES = {"model.remat": "dots", "engine.max_rows": 512, "engine.cache_gib": 2.5}


def config_of(**values):
  config = configs.base.get_config()
  config.update_from_flattened_dict({name.replace("__", "."): x for name, x in values.items()})
  return typed(config)


def stored(config):
  return json.loads(json.dumps(configuration.to_json(config)))


def test_what_is_given_is_not_chosen():
  chosen = chosen_options.resolved(config_of(model__remat="none"), VALUES)
  assert (chosen.model.remat, chosen.engine.max_rows) == ("none", 512)
  assert chosen.chosen_by_memory == ("engine.cache_gib", "engine.max_rows")
  sizes = run_options.sampler_sizes(chosen)
  assert sizes["whole_caches"] and sizes["sampled_bytes"] == 5 << 29
  given = config_of(model__remat="none", engine__max_rows=512, engine__cache_gib=1.0)
  assert chosen_options.resolved(given, VALUES) == given
  assert not run_options.sampler_sizes(given)["whole_caches"]
  assert "chosen_by_memory" not in stored(given)


def test_a_run_that_continues_keeps_its_choice():
  before = chosen_options.resolved(config_of(), VALUES)
  assert chosen_options.continued(config_of(), stored(before)) == before
  changed = chosen_options.continued(config_of(model__remat="full"), stored(before))
  assert (changed.model.remat, changed.engine.max_rows) == ("full", 512)
  assert changed.chosen_by_memory == ("engine.cache_gib", "engine.max_rows")


def test_a_run_from_before_there_was_a_choice_continues_with_its_values():
  before = config_of(model__remat="full", engine__max_rows=64)
  after = chosen_options.continued(config_of(), stored(before))
  assert after == before
  assert not configuration.differences(stored(before), after).serious
  assert chosen_options.continued(config_of(), {}) == config_of()


def test_commands_on_a_stored_run_choose_for_their_own_machine(tmp_path):
  configuration.write(chosen_options.resolved(config_of(), VALUES), tmp_path / "config.json")
  found = named_code.config_to_run(tmp_path)
  assert found.engine.max_rows is None and found.model.remat is None
  assert found.chosen_by_memory is None and found.engine.cache_gib is None
  given = named_code.config_to_run(tmp_path, changes=["--config.engine.max_rows=7"])
  assert given.engine.max_rows == 7
  configuration.write(config_of(engine__max_rows=9), tmp_path / "config.json")
  assert named_code.config_to_run(tmp_path).engine.max_rows == 9
