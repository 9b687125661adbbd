"""Reward functions of the user's own: what they may return, time-outs, faults."""

import numpy as np
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax import environments
from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.rollouts.collecting import Limits, collect_sync, error_counts
from grpo_jax.types import Prompt

MODULE = """
import asyncio, time
import numpy as np

def number(prompt, completion, info): return len(completion) / info["scale"]
async def later(prompt, completion, info):
  await asyncio.sleep(0.01)
  return {"a": 0.5, "b": -0.25}
def of_numpy(prompt, completion, info): return np.float32(0.5)
def truth(prompt, completion, info): return completion == "1"
def blocks(prompt, completion, info): time.sleep(2.0 if completion == "1" else 0.0); return 1.0
async def sleeps(prompt, completion, info):
  await asyncio.sleep(30 if completion == "1" else 0)
  return 1.0
async def raises(prompt, completion, info):
  if completion == "1": raise LookupError("no key for " + completion)
  return 1.0
def nothing(prompt, completion, info): return None if completion == "1" else 1.0
def text(prompt, completion, info): return "0.5" if completion == "1" else 1.0
def text_part(prompt, completion, info): return {"a": "0.5" if completion == "1" else 0.5}
def nan_part(prompt, completion, info): return {"a": float("nan") if completion == "1" else 0.5}
def pair(prompt, completion): return 1.0
def scaled(prompt, completion, info, *, scale): return scale
class Judge:
  def __call__(self, prompt, completion, info): return 0.75
judge = Judge()
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  (tmp_path / "rewards_of_a_user.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)


def score(name: str, *, limits: Limits | None = None, **settings):
  """Scores the completions "0", "1", "2" of one prompt; returns the group."""
  task = Prompt("x:0:0", TOKENIZER.encode("a"), "mine", {"scale": 4})
  engine = ScriptedEngine(lambda r: r.request_id.rpartition("#")[2].partition(".")[0])
  path = f"rewards_of_a_user.{name}"
  with environments.make(mine=dict(module="function", path=path, **settings)) as made:
    (group,) = collect_sync(
      engine,
      made,
      [task],
      TOKENIZER,
      group_size=3,
      sampling=SamplingParams(max_tokens=4, stop_ids=(END,)),
      seed=0,
      step=0,
      limits=limits or Limits(environment_timeout_s=20.0, max_error_share=0.5),
    )
  return group


def test_a_least_reward_makes_a_verdict_of_rewards():
  group = score("number", solved=0.5)  # completions of one letter have the reward 0.25.
  assert [rollout.metrics["accuracy"] for rollout in group.rollouts] == [0.0] * 3
  parts = score("later", solved=0.25)
  assert parts.rollouts[0].metrics["accuracy"] == 1.0
  assert parts.rollouts[0].reward_components == {"a": 0.5, "b": -0.25}
  assert "accuracy" not in score("number").rollouts[0].metrics
  with pytest.raises(ValueError, match="solved must be a number, got True"):
    score("number", solved=True)


@pytest.mark.parametrize(
  ("name", "rewards"),
  [
    ("number", [0.25] * 3),
    ("later", [0.25] * 3),
    ("of_numpy", [0.5] * 3),
    ("truth", [0.0, 1.0, 0.0]),
    ("judge", [0.75] * 3),
  ],
)
def test_a_function_returns_a_number_or_components_at_once_or_later(name, rewards):
  group = score(name)
  assert group.rewards.tolist() == rewards
  parts = {"a": 0.5, "b": -0.25} if name == "later" else {}
  assert [r.reward_components for r in group.rollouts] == [parts] * 3


@pytest.mark.parametrize("name", ["blocks", "sleeps"])
def test_a_function_has_a_time_out_of_its_own(name):
  group = score(name, timeout_s=0.3)
  assert np.isnan(group.rewards).tolist() == [False, True, False]
  assert error_counts([group]) == {"rollout/errors/timeout": 1.0}
  assert group.rollouts[1].error == "timeout: no answer within 0.3 s"


@pytest.mark.parametrize(
  ("name", "error"),
  [
    ("raises", "LookupError: no key for 1"),
    ("nothing", "TypeError: "),
    ("text", "TypeError: '0.5' is a string, not a number"),
    ("text_part", "TypeError: '0.5' is a string, not a number"),
    ("nan_part", "nan: the reward is {'a': nan}"),
  ],
)
def test_a_fault_of_a_function_costs_its_completion_and_is_told(name, error):
  group = score(name)
  assert np.isnan(group.rewards).tolist() == [False, True, False]
  assert group.rollouts[1].error.startswith(error)
  assert group.rollouts[1].reward_components == {}


@pytest.mark.parametrize(
  ("name", "settings", "message"),
  [
    ("pair", {}, r"pair\(prompt, completion\) cannot be called as \(prompt, completion, info\)"),
    ("scaled", {}, "missing a required argument: 'scale'"),
    ("scaled", {"scal": 1}, r"\(prompt, completion, info, scal=…\)"),
  ],
)
def test_a_function_of_another_signature_is_refused_before_the_run(name, settings, message):
  with pytest.raises(ValueError, match=message):
    score(name, settings=settings)
  assert score("scaled", settings={"scale": 3.0}).rewards.tolist() == [3.0] * 3


def test_a_time_out_must_be_positive():
  with pytest.raises(ValueError, match="timeout_s must be a finite number > 0"):
    score("number", timeout_s=0.0)
