"""`engine.devices`: what a run is refused for, and which devices the mesh gets."""

import jax
import pytest

import configs.base
from grpo_jax.config import device_options, run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_plan import plan_request


def config_of(**options):
  config = configs.base.get_config()
  config.update_from_flattened_dict({k.replace("__", "."): x for k, x in options.items()})
  return config


def complaints(**options):
  found = run_options.validate(config_of(**options))
  return [each for each in found if "engine." in each or "mesh" in each]


REFUSED = {
  "a device that does not exist": (
    {"engine__devices": (1, 8)},
    "engine.devices=(1, 8) needs devices that do not exist: 8; they are numbered from 0 to 7",
  ),
  "several": ({"engine__devices": (9, 8)}, "needs devices that do not exist: 9, 8; they"),
  "twice": ({"engine__devices": (3, 3)}, "engine.devices=(3, 3) names a device twice"),
  "all": (
    {"engine__devices": tuple(range(8))},
    "takes all 8 devices, the trainer needs at least one",
  ),
  "none": ({"engine__devices": ()}, "engine.devices must be"),
  "below zero": ({"engine__devices": (-1,)}, "engine.devices must be"),
  "servers": (
    {"engine__devices": (7,), "engine__name": "sglang"},
    "engine.devices=(7,) are devices of the embedded sampler, but engine.name='sglang'",
  ),
  "processes": (
    {"engine__devices": (7,), "distributed__processes": 2},
    "engine.devices=(7,) needs a run of one process, there are 2",
  ),
  "a mesh that does not fit what is left": (
    {"engine__devices": (6, 7), "mesh__fsdp": 4},
    "(engine.devices=(6, 7) leaves the trainer 6 of 8 devices)",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(name):
  options, message = REFUSED[name]
  [found] = complaints(**options)
  assert message in found and "\n" not in found


def test_the_mesh_has_the_devices_that_are_left():
  assert not complaints(engine__devices=(0, 5), mesh__fsdp=3)
  config = config_of(engine__devices=(0, 5), mesh__fsdp=3)
  mesh = device_options.trainer_mesh(typed(config))
  assert [device.id for device in mesh.devices.flat] == [1, 2, 3, 4, 6, 7]
  assert dict(mesh.shape) == {"data": 2, "fsdp": 3, "tensor": 1}
  assert device_options.of_sampler(typed(config)) == [jax.devices()[0], jax.devices()[5]]
  config = config_of()
  assert device_options.trainer_mesh(typed(config)).size == 8
  assert device_options.of_sampler(typed(config)) is None


def test_a_plan_of_such_a_run_is_refused():
  with pytest.raises(ConfigError, match=r"engine.devices=\(7,\): a plan describes"):
    plan_request._check_engine(config_of(engine__devices=(7,)))
