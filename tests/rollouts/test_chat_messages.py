"""Observations that are chat messages: tools, calls, roles that a chat template cannot write."""

from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from grpo_jax.data.byte_tokenizer import END, ByteTokenizer
from grpo_jax.engines.base import SamplingParams
from grpo_jax.environments.base import EnvironmentFactory, StepResult, as_factory
from grpo_jax.models.chat.turn_texts import TurnRefusal
from grpo_jax.rollouts import conversations
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
from grpo_jax.types import Prompt
from tests.data import chat_templates
from tests.data.small_templates import SMALL

TOOL = {"type": "function", "function": {"name": "add", "description": "?", "parameters": {}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}
ANSWERS = tuple(
  {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": text} for text in "45"
)


class Asking:
  """Answers the first turn with a result, and ends with the second."""

  def __init__(self, result):
    self.results = [result, StepResult(1.0, done=True)]

  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    return self.results.pop(0)

  async def close(self):
    pass


class Recording(ByteTokenizer):
  """A tokenizer that keeps how turns were continued."""

  def __init__(self):
    self.asked = []

  def turn_ids(self, messages, **options):
    self.asked.append((messages, options))
    return super().turn_ids(messages, **options)


def run(result, tokenizer, **limits):
  prompt = Prompt("set:0:0", tokenizer.encode("q"), "env", text="q", tools=(TOOL,))
  limits = AttemptLimits(max_turns=2, max_error_share=1.0, **limits)
  sampling = SamplingParams(max_tokens=16, stop_ids=(END,))
  engine = ScriptedEngine(lambda r: "x")
  options: dict[str, Any] = dict(group_size=1, sampling=sampling, seed=0, step=0, limits=limits)
  environments = {"env": lambda p: Asking(result)}
  return collect_sync(engine, environments, [prompt], tokenizer, **options)[0].rollouts[0]


def answering(**fields):
  return StepResult(0.0, done=False, observation="not read", **fields)


def test_several_messages_are_read_in_place_of_the_observation():
  tokenizer = Recording()
  found = run(answering(messages=ANSWERS, tool_calls=[CALL]), tokenizer)
  ((messages, options),) = tokenizer.asked
  assert tuple(messages) == ANSWERS
  assert options == {"after": END, "tools": (TOOL,), "calls": (CALL,)}
  written = tokenizer.decode(found.completion_ids[~found.loss_mask], skip_special=False)
  assert written == "<role>tool\n4<end><role>tool\n5<end><role>assistant\n"
  assert found.turns == 2 and found.reward == 1.0


def test_long_messages_are_cut_before_they_are_rendered():
  tokenizer = Recording()
  long = [{**message, "content": "x" * 3_000_000} for message in ANSWERS]
  found = run(answering(messages=long), tokenizer, max_tokens=64)
  assert max(len(message["content"]) for message in tokenizer.asked[0][0]) < 1000
  assert found.is_truncated and found.turns == 1


@pytest.mark.parametrize(
  "fields",
  [
    {"messages": "4"},
    {"messages": [{"content": "4"}]},
    {"messages": [4]},
    {"tool_calls": {"name": "add"}},
  ],
)
def test_messages_of_another_form_are_a_failure_of_the_environment(fields):
  result = answering()
  for name, value in fields.items():
    object.__setattr__(result, name, value)  # as an environment without type checks might do.
  assert run(result, Recording()).failure == "type"


def test_a_role_that_the_template_cannot_write_ends_the_run():
  class Strict(Recording):
    def turn_ids(self, messages, **options):
      raise TurnRefusal("a.jinja: the chat template cannot continue with role 'tool'")

  with pytest.raises(TurnRefusal, match="role 'tool'"):
    run(answering(observation_role="tool"), Strict())


class Factory(EnvironmentFactory):
  def __init__(self, *roles):
    self.observation_roles = roles


def test_roles_are_checked_against_the_template():
  def refused(template, factory, tools=()):
    stops = chat_templates.STOPS.get(template, chat_templates.CHATML_STOPS)
    made = chat_templates.make(SMALL[template], stops)
    return sorted(conversations.refusals(made, as_factory(factory), tools))

  assert refused("alternates", Factory("user")) == []
  assert refused("alternates", Factory("tool")) == ["tool"]
  assert refused("alternates", EnvironmentFactory()) == ["tool"]  # not declared: the usual ones.
  assert refused("alternates", Factory()) == []
  assert refused("forgets", EnvironmentFactory()) == ["tool", "user"]
  assert refused("channels", Factory("tool")) == ["tool"]  # without the name of a tool.
  assert refused("channels", Factory("user", "tool"), (TOOL,)) == []
  assert refused("keeps", Factory("tool"), (TOOL,)) == []
  assert refused("leaves_out", Factory("tool")) == ["tool"]

  class Declaring(Asking):
    observation_roles = ("tool",)

  assert refused("alternates", Declaring) == ["tool"]
