"""`model.attention` is asked wherever rows of tokens attend."""

import ast

import jax
import jax.numpy as jnp
import pytest
from grpo_kernels.attention import Attention, choice

import configs.base
from grpo_jax.building import groups
from grpo_jax.config.configuration import typed
from grpo_jax.engines import probe
from grpo_jax.models import classifier, transformer
from tests.engines import tiny
from tests.test_architecture import FILES, SATELLITES

CONFIG = tiny.config()
CHOSEN = Attention("reference")  # which no platform chooses by itself.
ROWS = jnp.ones((2, 8), jnp.int32)
ONE = jnp.ones(2, jnp.int32)


@pytest.fixture
def picked(monkeypatch):
  """The names of the implementations that are asked for."""
  names, pick = [], choice.pick
  spy = lambda name, *rest, **dtype: names.append(name) or pick(name, *rest, **dtype)
  monkeypatch.setattr(choice, "pick", spy)
  return names


def probed(params):
  asked = probe.Probe(CONFIG, compute_dtype="float32", num_valid_tokens=16, attention=CHOSEN)
  return asked.logprobs(params)


CONSUMERS = {
  "probe": probed,
  "reward model": lambda params: classifier.scores(
    {"body": params, "score": jnp.ones((1, CONFIG.hidden_size))},
    *(CONFIG, ROWS, ONE, ONE),
    attention=CHOSEN,
  ),
  "training": lambda params: transformer.hidden_states(
    params, CONFIG, ROWS, ROWS, ROWS, attention=CHOSEN
  ),
  "prefill": lambda params: transformer.prefill(params, CONFIG, ROWS, ROWS, ROWS, attention=CHOSEN),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_choice_reaches(consumer, picked):
  jax.eval_shape(CONSUMERS[consumer], tiny.params(CONFIG))
  assert set(picked) == {"reference"}


def calls(path):
  """Yields the calls by which a module computes hidden states."""
  names = ("Transformer", "hidden_states", "outputs", "prefill")
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      if node.func.attr in names and getattr(node.func.value, "id", "") == "transformer":
        yield node


@pytest.mark.long
def test_nobody_computes_hidden_states_without_the_choice():
  found = [(path, call) for path in [*FILES, *SATELLITES] for call in calls(path)]
  assert len(found) >= 3
  silent = [
    f"{path.name}:{call.lineno}"
    for path, call in found
    if "attention" not in {keyword.arg for keyword in call.keywords}
  ]
  assert silent == []


@pytest.mark.parametrize(
  ("own", "expected"), [({}, "reference"), ({"attention": "xla_blocked"}, "xla_blocked")]
)
def test_a_reward_model_follows_the_run_unless_it_has_a_choice_of_its_own(
  own, expected, monkeypatch
):
  config = configs.base.get_config()
  config.model.attention = "reference"
  with config.unlocked():
    config.environments = {"rm": {"module": "reward_model", "path": "somewhere", **own}}
    config.environments.mine = {"module": "tests.rewards.vowels"}
    config.environments.math = {"module": "math"}
  given, made = {}, groups.environments.make()
  spy = lambda **settings: given.update(settings) or made
  monkeypatch.setattr(groups.environments, "make", spy)
  monkeypatch.setattr(groups.modes, "needs_environments", lambda config: True)
  groups.make_environments(typed(config))
  assert given["rm"]["attention"] == expected
  assert "attention" not in {**given["mine"], **given["math"]}


def test_a_reward_model_refuses_an_unknown_implementation_before_it_loads():
  with pytest.raises(ValueError, match="no implementation 'flash'; there are reference"):
    groups.environments.make(rm={"module": "reward_model", "path": "nowhere", "attention": "flash"})
