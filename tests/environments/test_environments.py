"""Environments by name, their results, and reward functions of the user's own."""

import asyncio

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments.base import SingleTurn, StepResult
from grpo_jax.types import FinishReason, Prompt

PROMPT = Prompt("x:0:0", np.zeros(1, np.int32), "mine", {"wanted": "b"}, text="say b")


def step(environment, text: str) -> StepResult:
  async def body():
    await environment.start()
    result = await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)
    await environment.close()
    return result

  return asyncio.run(body())


@pytest.fixture
def user_modules(tmp_path, monkeypatch):
  (tmp_path / "my_rewards.py").write_text(
    "def words(prompt, completion, info, *, scale=1.0):\n"
    "  assert prompt == 'say b'\n"
    "  return {'hit': scale * (info['wanted'] in completion), 'short': 0.5}\n"
    "async def later(prompt, completion, info):\n"
    "  return float(len(completion))\n"
    "LIMIT = 3\n"
  )
  (tmp_path / "my_env.py").write_text(
    "from grpo_jax.environments.base import SingleTurn\n"
    "def make(*, bonus):\n"
    "  return lambda prompt: SingleTurn(lambda p, text: bonus + len(text), prompt)\n"
  )
  (tmp_path / "broken_env.py").write_text("import no_such_library\n")
  monkeypatch.syspath_prepend(tmp_path)


def test_reward_of_components_adds_up():
  result = StepResult({"a": 1.0, "b": -0.25}, done=True)
  assert result.total == 0.75 and result.components == {"a": 1.0, "b": -0.25}
  assert StepResult(0.5, done=True).components == {}


@pytest.mark.parametrize(
  ("reward", "total"),
  [(0.5, 0.5), ({"a": 1.0, "b": 2.0}, 3.0), (StepResult(0.25, done=True), 0.25)],
)
def test_single_turn_takes_a_number_components_or_a_result(reward, total):
  result = step(SingleTurn(lambda prompt, text: reward, PROMPT), "text")
  assert result.total == total and result.done


def test_reward_functions_are_found_by_dotted_path(user_modules):
  settings = dict(module="function", path="my_rewards.words", settings={"scale": 2.0})
  with environments.make(
    mine=settings, later=dict(module="function", path="my_rewards.later")
  ) as e:
    assert step(e["mine"](PROMPT), "abc").components == {"hit": 2.0, "short": 0.5}
    assert step(e["later"](PROMPT), "abc").total == 3.0


@pytest.mark.parametrize("module", ["my_env", "my_env.make"])
def test_a_module_of_the_users_own_needs_no_package(user_modules, module):
  with environments.make(mine=dict(module=module, bonus=0.5)) as made:
    assert step(made["mine"](PROMPT), "abc").total == 3.5


@pytest.mark.parametrize(
  "module, message",
  [
    ("my_env.py", "modules are named without .py"),
    ("my_env.mak", "my_env has no function 'mak'.*did you mean 'make'"),
    ("my_rewards", "has no make.*write my_rewards.NAME"),
    ("my_emv", "no module 'my_emv'.*as in `import`"),
    ("my_emv.Guess", "cannot import 'my_emv'"),
    ("my_rewards.LIMIT", "not a function but int"),
  ],
)
def test_what_is_not_an_environment_is_refused_with_what_it_is(user_modules, module, message):
  with pytest.raises(ValueError, match=message):
    environments.make(mine=dict(module=module))


def test_a_class_is_named_by_its_dotted_path_and_takes_settings(user_modules, tmp_path):
  (tmp_path / "my_guess.py").write_text(
    "from grpo_jax.environments.base import StepResult\n"
    "class Guess:\n"
    "  def __init__(self, task, low=0.0): self.low = low\n"
    "  async def start(self): pass\n"
    "  async def step(self, text, *_): return StepResult(self.low + len(text), True)\n"
    "  async def close(self): pass\n"
  )
  settings = dict(module="my_guess.Guess")
  with environments.make(a=settings, b=settings | {"low": 2.0}) as made:
    assert step(made["a"](PROMPT), "abc").total == 3.0
    assert step(made["b"](PROMPT), "abc").total == 5.0
  with pytest.raises(ValueError, match="takes no 'lo' .did you mean 'low'"):
    environments.make(a=settings | {"lo": 2.0})
  assert environments.total_timeout_s("a", settings) == 0.0


def test_a_package_module_of_the_users_own_is_found(user_modules, tmp_path):
  package = tmp_path / "my_package"
  package.mkdir()
  (package / "__init__.py").write_text("")
  (package / "env.py").write_text((tmp_path / "my_env.py").read_text())
  with environments.make(mine=dict(module="my_package.env", bonus=0.5)) as made:
    assert step(made["mine"](PROMPT), "abc").total == 3.5
  with pytest.raises(ValueError, match="environment 'mine'.*bonus"):
    environments.make(mine=dict(module="my_package.env"))


def test_a_class_of_environments_is_a_factory(tmp_path, monkeypatch):
  (tmp_path / "own_package").mkdir()
  (tmp_path / "own_package" / "guess.py").write_text(
    "from grpo_jax.environments.base import StepResult\n"
    "class Guess:\n"
    "  def __init__(self, prompt): self.wanted = prompt.info['wanted']\n"
    "  async def start(self): pass\n"
    "  async def step(self, text, *_): return StepResult(float(text == self.wanted), True)\n"
    "  async def close(self): pass\n"
    "  def metrics(self): return {}\n"
    "def make(): return Guess\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  with environments.make(mine=dict(module="own_package.guess")) as made:
    assert step(made["mine"](PROMPT), "b").total == 1.0
    assert made.metrics() == {}


def test_unknown_names_list_what_there_is(user_modules):
  with pytest.raises(ValueError, match="no module 'maths'.*did you mean 'math'.*reasoning_gym"):
    environments.make(maths={})
  with pytest.raises(ValueError, match="environment 'math'.*'answr'"):
    environments.make(math=dict(answr="boxed"))
  with pytest.raises(ValueError, match="no module 'base'"):
    environments.make(base={})
  with pytest.raises(ValueError, match="no function 'word'.*did you mean 'words'"):
    environments.make(x=dict(module="function", path="my_rewards.word"))
  with pytest.raises(ValueError, match="is not a function but int"):
    environments.make(x=dict(module="function", path="my_rewards.LIMIT"))
  with pytest.raises(ValueError, match="named by 'package.module.function', got 'words'"):
    environments.make(x=dict(module="function", path="words"))
  with environments.make(math={}) as made:
    with pytest.raises(ValueError, match="unknown environment 'maht'.*did you mean 'math'"):
      made["maht"]


def row(number, **info):
  return Prompt(f"rows:0:{number}", np.zeros(1, np.int32), "math", info)


def test_prompts_that_an_environment_cannot_score_are_refused_before_anything_is_sampled():
  with environments.make(math={}) as made:
    bare = [row(0, agent_ref="x", reward=1.0), row(1, agent_ref="y")]
    with pytest.raises(
      ValueError, match="'math' accepts none of the 2 .*needs expected_answer.*row:"
    ):
      environments.check(made, bare)
    with pytest.raises(ValueError, match="this row: agent_ref, reward"):
      environments.check(made, bare[:1])
    environments.check(made, [*bare, row(2, expected_answer="4")])  # single rows are counted later.


def test_a_factory_of_the_users_that_fails_on_a_prompt_is_named_with_its_error():
  def factory(prompt):
    return prompt.info["wanted"]

  place = r"accepts none of the 1 prompts.*test_environments.py:\d+: KeyError: 'wanted'"
  with pytest.raises(ValueError, match=place):
    environments.check({"math": factory}, [row(0)])


def test_an_import_error_inside_a_users_module_names_its_place(user_modules):
  with pytest.raises(ValueError, match=r"broken_env.py:1: ModuleNotFoundError.*no_such_library"):
    environments.make(x=dict(module="function", path="broken_env.reward"))


def test_settings_that_an_environment_lacks_name_the_nearest_that_it_has(user_modules):
  with pytest.raises(ValueError, match="'sums' .math. takes no 'wokers' .did you mean 'workers'"):
    environments.make(sums=dict(module="math", wokers=1))
  with pytest.raises(ValueError, match="'code': total_timeout_s must be a number, got '9s'"):
    environments.total_timeout_s("code", dict(total_timeout_s="9s"))
  with pytest.raises(ValueError, match="environment 'function' .function. needs path$"):
    environments.make(function={})
