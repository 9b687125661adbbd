"""What a factory of environments may be, and which of its members count."""

import functools

import numpy as np
import pytest

from grpo_jax import environments, registry
from grpo_jax.environments.base import EnvironmentFactory, SingleTurn, as_factory
from grpo_jax.rollouts.attempt import Attempt
from grpo_jax.types import Prompt

PROMPT = Prompt("x:0:0", np.zeros(1, np.int32), "env", {"expected_answer": "7"}, text="a")


def plain(prompt):
  return SingleTurn(lambda p, text: 1.0, prompt)


class Quiet(EnvironmentFactory):
  """Defines no more than it must."""

  def __call__(self, prompt):
    return plain(prompt)


class Full:
  """An object with all members, and no base class: it needs to import nothing of ours."""

  stop_strings = ("</a>",)
  timeout_s = 2.5

  def __init__(self):
    self.closed = 0

  def __call__(self, prompt):
    return plain(prompt)

  def metrics(self):
    return {"made": 3.0}

  def close(self):
    self.closed += 1


class OfAttempt(SingleTurn):
  """A class of environments: `metrics` and `close` are those of an attempt."""

  stop_strings = ("</b>",)
  timeout_s = 1.5

  def __init__(self, prompt, bonus=0.0):
    super().__init__(lambda p, text: bonus, prompt)

  def metrics(self):
    raise AssertionError("called on the class")

  async def close(self):
    raise AssertionError("called on the class")


class Computed(SingleTurn):
  """Its members have values only in an environment."""

  def __init__(self, prompt):
    super().__init__(lambda p, text: 1.0, prompt)

  @property
  def timeout_s(self):
    return 1.0

  @property
  def stop_strings(self):
    return ("</c>",)


@pytest.mark.parametrize(
  ("made", "stops", "timeout_s", "metrics"),
  [
    (plain, (), None, {}),
    (lambda prompt: plain(prompt), (), None, {}),
    (Quiet(), (), None, {}),
    (Full(), ("</a>",), 2.5, {"env/env/made": 3.0}),
    (OfAttempt, ("</b>",), 1.5, {}),
    (functools.partial(OfAttempt, bonus=1.0), ("</b>",), 1.5, {}),
    (Computed, (), None, {}),
  ],
  ids=["function", "lambda", "subclass", "object", "class", "class_with_settings", "properties"],
)
def test_members_count_where_they_are_and_have_defaults_elsewhere(made, stops, timeout_s, metrics):
  factory = as_factory(made)
  assert isinstance(factory, EnvironmentFactory) and as_factory(factory) is factory
  assert (tuple(factory.stop_strings), factory.timeout_s) == (stops, timeout_s)
  assert isinstance(factory(PROMPT), SingleTurn)
  assert Attempt(PROMPT, 0, factory, step=0).stop_strings == stops
  with environments.Environments({"env": made}) as named:
    assert named.metrics() == metrics
  assert not isinstance(made, Full) or made.closed == 1


def test_a_factory_must_say_how_environments_are_made():
  with pytest.raises(NotImplementedError):
    EnvironmentFactory()(PROMPT)


def test_what_is_left_of_a_failing_close_is_the_users_error():
  class Failing(Quiet):
    def close(self):
      raise OSError("no such process")

  with pytest.raises(OSError, match="no such process"):
    environments.Environments({"env": Failing()}).close()


@pytest.mark.parametrize("name", ["math", "code", "function", "sliding_puzzle", "tool_use"])
def test_the_factories_of_the_package_are_of_the_base_class(name):
  module = registry.module("grpo_jax.environments", name, hidden=())
  (of_module,) = (value for key, value in vars(module).items() if key.endswith("Environments"))
  assert issubclass(of_module, EnvironmentFactory)
