"""Reward functions of the user's own: what they may return, time-outs, faults."""

import numpy as np
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax import environments
from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.rollouts.failures import error_counts
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
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
def listed(prompt, completion, info): return [1.0] if completion == "1" else 1.0
def empty(prompt, completion, info): return {} if completion == "1" else 1.0
def text(prompt, completion, info): return "0.5" if completion == "1" else 1.0
def text_part(prompt, completion, info): return {"a": "0.5" if completion == "1" else 0.5}
def nan_part(prompt, completion, info): return {"a": float("nan") if completion == "1" else 0.5}
DETAILS = "x" * 5000
def inner(depth):
  if depth: inner(depth - 1)
  raise ValueError(DETAILS)
def deep(prompt, completion, info):
  return inner(9) if completion == "1" else 1.0
def library(prompt, completion, info):
  import json
  return json.loads(completion + "x") if completion == "1" else 1.0
def exhausted(prompt, completion, info):
  return next(iter(completion[1:])) if completion == "1" else 1.0
class Silent(Exception):
  def __str__(self): return self.reason
def silent(prompt, completion, info):
  if completion == "1": raise Silent
  return 1.0
exec("def typed(prompt, completion, info):\\n  return {'0': 1.0, '2': 1.0}[completion]")
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


def score(name: str, *, limits: AttemptLimits | None = None, **settings):
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
      limits=limits or AttemptLimits(environment_timeout_s=20.0, max_error_share=0.5),
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["blocks", "sleeps"])
def test_a_function_has_a_time_out_of_its_own(name):
  group = score(name, timeout_s=0.3)
  assert np.isnan(group.rewards).tolist() == [False, True, False]
  assert error_counts([group]) == {"rollout/errors/timeout": 1.0}
  assert group.rollouts[1].error == "timeout: no answer within 0.3 s"


@pytest.mark.parametrize(
  ("name", "error"),
  [
    ("raises", "LookupError: no key for 1\n"),
    (
      "nothing",
      "TypeError: rewards_of_a_user.nothing returned None: None is not a number; it must",
    ),
    (
      "listed",
      "TypeError: rewards_of_a_user.listed returned [1.0]: [1.0] is not a number; it must",
    ),
    ("empty", "ValueError: rewards_of_a_user.empty returned {}: the reward has no components; it"),
    ("text", "TypeError: rewards_of_a_user.text returned '0.5': '0.5' is a string, not a number"),
    ("text_part", "TypeError: rewards_of_a_user.text_part returned {'a': '0.5'}: '0.5' is a str"),
    ("nan_part", "nan: rewards_of_a_user.nan_part gave the reward {'a': nan}"),
  ],
)
def test_a_fault_of_a_function_costs_its_completion_and_is_reported(name, error):
  group = score(name)
  assert np.isnan(group.rewards).tolist() == [False, True, False]
  assert group.rollouts[1].error.startswith(error)
  assert group.rollouts[1].reward_components == {}


def test_a_reward_that_raises_shows_the_last_frames_of_the_users_code_within_bounds():
  (failed,) = [each for each in score("deep").rollouts if each.error]
  said, *frames = failed.error.split("\n")
  assert said.startswith("ValueError: xxxxx") and len(said) < 450
  # The three innermost frames, each with its function and the beginning of its source line.
  assert [frame.partition(", in ")[2].partition(":")[0] for frame in frames] == ["inner"] * 3
  assert all("rewards_of_a_user.py:" in frame and "inner(" in frame for frame in frames[:2])
  assert frames[-1].endswith("raise ValueError(DETAILS)") and len(failed.error) <= 1500
  # A library that the reward has called has the last frame, after those of the reward.
  (called,) = [each for each in score("library").rollouts if each.error]
  _, first, last = called.error.split("\n")
  assert "rewards_of_a_user.py:" in first and "json.loads(completion" in first
  assert "decoder.py:" in last


@pytest.mark.parametrize(
  ("name", "said", "place"),
  [
    ("exhausted", "StopIteration: ", "in exhausted: return next(iter("),
    ("silent", "Silent: (its __str__ raised AttributeError)", "in silent: "),
    ("typed", "KeyError: '1'", "<string>:2, in typed: "),
  ],
)
def test_the_place_of_an_unusual_error_is_shown(name, said, place):
  """`next` of nothing, which coroutines turn into a RuntimeError; an exception without a message;
  code of `exec`, whose source is not known."""
  (failed,) = [each for each in score(name).rollouts if each.error]
  first, *frames = failed.error.split("\n")
  assert first == said and place in frames[-1]


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
