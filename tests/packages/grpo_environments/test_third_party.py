"""Environments of verifiers, NeMo Gym and OpenEnv for real, as their packages have them.

They need packages that are not among those of the tests: `make test-environments` installs them
beside, verifiers 0.4 and 0.3, of which each process has one.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import pytest

from grpo_environments import openenv, verifiers
from grpo_jax import environments, main
from grpo_jax.data import nemo_gym
from grpo_jax.data.formats import PromptStyle
from tests.packages.grpo_environments.http_routes import (
  CHAT,
  call,
  endpoint,
  policy,
  prompt_of,
  run,
  serving,
)

ROOT = pathlib.Path(__file__).parents[3]
HUB = pathlib.Path(__file__).parent / "hub"
SERVERS = ROOT / ".venv-environments" / "servers"


def version():
  """Returns the version of verifiers; (0, 0) without it."""
  try:
    found = importlib.metadata.version("verifiers")
  except importlib.metadata.PackageNotFoundError:
    return 0, 0
  return tuple(int(part) for part in found.split(".")[:2])


pytestmark = [
  pytest.mark.slow,
  pytest.mark.environments,
  pytest.mark.timeout(300),
  pytest.mark.filterwarnings("default"),  # of other people's packages.
  pytest.mark.skipif(
    not importlib.util.find_spec("verifiers"),
    reason="verifiers is not installed: `make test-environments` installs it",
  ),
]
tasksets = pytest.mark.skipif(version() < (0, 4), reason="needs verifiers 0.4 or newer")
classic = pytest.mark.skipif(version() >= (0, 4), reason="needs verifiers before 0.4")


@pytest.fixture(autouse=True)
def hub(monkeypatch):
  """Makes the environments in hub/ known, to this process and to those that it starts."""
  monkeypatch.syspath_prepend(HUB)
  found = [str(HUB), str(ROOT), os.environ.get("PYTHONPATH", "")]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))


@pytest.fixture(scope="module")
def servers():
  """The addresses of real servers, by name."""
  command = [sys.executable, "-W", "ignore", pathlib.Path(__file__).with_name("real_servers.py")]
  env = {**os.environ, "PYTHONPATH": str(SERVERS)}
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  with subprocess.Popen(command, env=env, cwd=SERVERS, **pipes) as process:
    try:
      assert process.stdout is not None
      lines = iter(process.stdout.readline, "")
      yield json.loads(next(line for line in lines if line.startswith("{")))
    finally:
      process.terminate()


def source(name, split=None, size=5, **args):
  """Opens the rows of an environment."""
  config = types.SimpleNamespace(task=name, task_args=args, split=split, size=size, name=None)
  return verifiers.rows(config)


def attempts(rows, reply, **settings):
  """Returns the results of an attempt at each row, and the requests to the policy."""
  with environments.make(made=dict(module="verifiers", **settings)) as made:
    with serving({CHAT: policy(reply)}) as server:
      found = [
        run(made["made"], prompt_of(row, *row["messages"]), endpoint(server)) for row in rows
      ]
    return found, server.sent(CHAT)


def sums(messages, tools):
  """A policy that adds with a tool."""
  if messages[-1]["role"] != "tool":
    return call(tools[0]["function"]["name"], {"a": 30, "b": 4})
  content = messages[-1]["content"]
  return content if isinstance(content, str) else content[0]["text"]


def counting(messages, tools):
  """A policy that says 1, 2, 3."""
  return str(sum(message["role"] == "assistant" for message in messages) + 1)


# --- verifiers from 0.4 on ---


@tasksets
def test_a_taskset_of_one_turn():
  rows = source("hub-reverse", words=["abc", "xyz"])
  assert len(rows) == 2 and rows[1]["expected_answer"] == "zyx"
  results, asked = attempts(rows, lambda messages, _: messages[-1]["content"].split()[-1][::-1])
  assert [result.reward for result in results] == [{"exact": 0.75, "short": 0.25}] * 2
  assert results[0].metrics == {"accuracy": 1.0, "length": 3.0}
  assert asked[0]["messages"] == [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Reverse abc"},
  ]
  results, _ = attempts(rows, lambda *_: "abc")
  assert [result.total for result in results] == [0.25, 0.25] and not results[0].metrics["accuracy"]


@tasksets
def test_a_taskset_whose_environment_is_the_user():
  rows = source("hub_guess", size=5)
  assert len(rows) == 5
  results, asked = attempts([rows[2], rows[4]], counting)
  assert [result.total for result in results] == [1.0, 0.0]
  said = [message["content"] for message in asked[2]["messages"]]
  assert said == ["Guess a number from 1 to 9.", "1", "Higher.", "2", "Higher."]
  results, asked = attempts([rows[4]], counting, max_turns=1)
  assert results[0].total == 0.0 and len(asked) == 1


@tasksets
def test_a_taskset_with_a_tool():
  (result,), asked = attempts(source("hub_sums"), sums)
  assert result.total == 1.0 and len(asked) == 2
  assert asked[0]["tools"][0]["function"]["name"] == "add"
  assert asked[1]["messages"][-1]["role"] == "tool"


@tasksets
def test_nemo_gyms_own_server_as_a_taskset_of_verifiers(servers, tmp_path):
  """A taskset that the package brings, with tools behind MCP."""
  (tmp_path / "tasks.jsonl").write_text(counter_rows())
  rows = source(
    "nemo-gym", dataset=str(tmp_path / "tasks.jsonl"), task={"resources_url": servers["counter"]}
  )
  turns = iter([call("increment_counter", {"count": 3}), "done"])
  (result,), _ = attempts([rows[0]], lambda *_: next(turns))
  assert result.total == 1.0


@tasksets
def test_what_cannot_be_learned_from_is_refused_by_name():
  with pytest.raises(ValueError, match="no environment 'hub_nothing': the module hub_nothing is"):
    source("hub_nothing")
  with pytest.raises(ValueError, match="has load_environment, which verifiers .* does not support"):
    source("hub_classic_only")
  with environments.make(made=dict(module="verifiers", env={"id": "user-sim"})) as made:
    row = source("hub_reverse")[0]
    with serving({CHAT: policy(counting)}) as server:
      with pytest.raises(Exception, match="only one can be the policy") as caught:
        run(made["made"], prompt_of(row), endpoint(server))
  assert type(caught.value).__name__ == "EnvironmentFailure"


TEMPLATE = """{%- if tools -%}
<|im_start|>system
<tools>{{ tools | tojson }}</tools> Call: <tool_call>{"name", "arguments"}</tool_call><|im_end|>
{% endif %}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@tasksets
def test_a_run_learns_from_several_environments(model, tmp_path, one_device):
  kind = "grpo_environments.verifiers.rows"
  names = ("hub_reverse", "hub_guess", "hub_sums")
  template = tmp_path / "template.jinja"
  template.write_text(TEMPLATE)
  arguments = {
    "model.chat_template": template,
    "data.datasets": [{"kind": kind, "task": name, "size": 5} for name in names],
    "data.num_prompts_per_dataloader": 1,
    "model.path": model,
    "model.compute_dtype": "float32",
    "total_steps": 1,
    "rollout.prompts_per_step": 3,
    "rollout.group_size": 2,
    "rollout.max_tokens": 512,
    "sampling.max_tokens": 8,
    "engine.max_rows": 8,
    "data.split_validation_size": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.sinks": ("jsonl", "console"),
  }
  config = f"--config={ROOT / 'configs' / 'verifiers.py'}"
  flags = [f"--config.{name}={value}" for name, value in arguments.items()]
  before = signal.getsignal(signal.SIGTERM)
  assert main.main([config, f"--workdir={tmp_path / 'run'}", *flags]) == 0
  assert signal.getsignal(signal.SIGTERM) is before
  rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  assert rows[0]["rollout/completions"] == 6
  assert not [name for name in rows[0] if name.startswith("rollout/errors/")]


# --- verifiers before 0.4 ---


@classic
@pytest.mark.parametrize(
  "kind, reply, requests",
  [
    ("turn", lambda messages, _: messages[-1]["content"].split()[-1][::-1], 1),
    ("turns", counting, 3),
    ("tool", sums, 2),
  ],
)
def test_an_environment_of_load_environment(kind, reply, requests):
  before = signal.getsignal(signal.SIGTERM)
  rows = source("hub-classic", kind=kind)
  assert signal.getsignal(signal.SIGTERM) is before
  (result,), asked = attempts(rows, reply)
  assert result.total == 1.0 and result.metrics["accuracy"] == 1.0
  assert len(asked) == requests and bool(asked[0].get("tools")) == (kind == "tool")


@classic
def test_the_data_set_of_the_evaluation_and_the_packages_own_reasoning_gym():
  assert source("hub_classic", split="eval")[0]["expected_answer"] == "zyx"

  def added(messages, tools):
    terms = re.findall(r"[+-]? ?[0-9]+", messages[-1]["content"].rpartition(":")[2])
    return f"<answer>{sum(int(term.replace(' ', '')) for term in terms)}</answer>"

  results, _ = attempts(source("hub_classic", kind="reasoning_gym"), added)
  assert [result.metrics["accuracy"] for result in results] == [1.0, 1.0]


@classic
def test_rewards_of_groups_are_refused_by_name():
  with pytest.raises(ValueError, match=r"rewards of whole groups \(best_of_the_group\)"):
    source("hub_classic", kind="group")
  with pytest.raises(ValueError, match="tasksets need verifiers 0.4 or newer"):
    source("json")


# --- servers ---


def counter_rows():
  """Returns rows of NeMo Gym's example of a session."""
  tool = {
    "type": "function",
    "name": "increment_counter",
    "description": "",
    "parameters": {
      "type": "object",
      "properties": {"count": {"type": "integer", "description": ""}},
      "required": ["count"],
      "additionalProperties": False,
    },
    "strict": True,
  }
  content = [{"role": "user", "content": "add 3 then 1"}]
  params = {"input": content, "tools": [tool], "parallel_tool_calls": False}
  row = {"responses_create_params": params, "initial_count": 4, "expected_count": 7}
  return json.dumps(row) + "\n"


def gym(url, row, reply, **settings):
  """Returns the result of an attempt at a row of NeMo Gym."""
  record = nemo_gym.to_prompt(row, "f:1", PromptStyle(output_key=None))
  with environments.make(made=dict(module="nemo_gym", url=url, **settings)) as made:
    with serving({CHAT: policy(reply)}) as server:
      return run(made["made"], prompt_of(record.info, *record.messages), endpoint(server))


@tasksets
def test_nemo_gyms_session_with_tools(servers):
  for count, reward in ((3, 1.0), (5, 0.0)):
    turns = iter([call("increment_counter", {"count": count}), "done"])
    row = json.loads(counter_rows())
    assert gym(servers["counter"], row, lambda *_, turns=turns: next(turns)).total == reward


@tasksets
def test_nemo_gyms_blackjack_is_played(servers):
  row = {"responses_create_params": {"input": [{"role": "user", "content": "Deal me in."}]}}
  result = gym(servers["blackjack"], row, lambda *_: "<action>stand</action>")
  assert result.total in (-1.0, 0.0, 1.0) and result.metrics["terminated"] == 1.0


@tasksets
def test_nemo_gyms_reasoning_gym_verifies(servers):
  import reasoning_gym

  entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
  row = {"responses_create_params": {"input": entry["question"]}, **entry}
  for settings in ({}, {"max_steps": 1}):
    reply = lambda *_: f"<answer>{entry['answer']}</answer>"
    assert gym(servers["reasoning_gym"], row, reply, **settings).metrics["score"] == 1.0
  assert gym(servers["reasoning_gym"], row, lambda *_: "no").total < 1.0


@tasksets
def test_openenvs_server_is_played(servers):
  with environments.make(made=dict(module="openenv", url=servers["openenv"])) as made:
    with serving({CHAT: policy(counting)}) as server:
      row = openenv.rows(seed=2)
      result = run(made["made"], prompt_of(row, *row["messages"]), endpoint(server))
  assert result.total == 1.0 and result.metrics["steps"] == 3
