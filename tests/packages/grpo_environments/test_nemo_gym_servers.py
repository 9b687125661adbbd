"""NeMo Gym's protocol, against servers that answer as those of nemo-gym 0.4.0 do."""

import json

import pytest

from grpo_jax import environments
from grpo_jax.data import nemo_gym
from grpo_jax.data.formats import PromptStyle
from grpo_jax.environments.isolation import EnvironmentFailure
from tests.environments.attempts import score
from tests.packages.grpo_environments.http_routes import (
  CHAT,
  call,
  endpoint,
  policy,
  prompt_of,
  run,
  says,
  serving,
)

ADD = {
  "type": "function",
  "name": "add",
  "description": "Adds.",
  "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
  "strict": True,
}
ROW = {
  "id": 7,
  "responses_create_params": {"input": [{"role": "user", "content": "1 + 2?"}], "tools": []},
  "expected_answer": 3,
  "agent_ref": {"type": "responses_api_agents", "name": "sums"},
  "response": {"output": []},
  "reward": 0.0,
}
WITH_TOOLS = {**ROW, "responses_create_params": {"input": "1 + 2?", "tools": [ADD]}}
OPEN = {"/openapi.json": says({"paths": {"/verify": {}, "/seed_session": {}}})}


def verifying(**answer):
  """Returns the routes of a resources server whose verification answers this."""
  seed = says({}, Set_Cookie="session=s1; path=/; httponly")
  return {**OPEN, "/seed_session": seed, "/verify": says({**ROW, "reward": 1.0, **answer})}


def making(server, **settings):
  quick = dict(timeout_s=10.0, retries=2, backoff_s=0.01, total_timeout_s=30.0)
  return environments.make(made=dict(module="nemo_gym", url=server.url, **quick, **settings))


def prompt(row=ROW, *messages):
  return prompt_of({"nemo_gym_row": row}, *messages)


def attempt(routes, reply, row=ROW, *messages, **settings):
  """Returns the result of an attempt, and the server with the requests to it and to the policy."""
  with serving({**routes, CHAT: policy(reply)}) as server:
    with making(server, **settings) as made:
      return run(made["made"], prompt(row, *messages), endpoint(server)), server


def test_a_turn_is_verified_with_the_row_as_it_was():
  reply = lambda messages, tools: "<think>One and two.</think>\n3"
  result, server = attempt(verifying(reward=0.5, found=True, words=4), reply)
  assert result.total == 0.5 and result.metrics == {"accuracy": 0.0, "found": 1.0, "words": 4.0}
  (seeded,), (sent,) = server.sent("/seed_session"), server.sent("/verify")
  assert seeded == {k: v for k, v in ROW.items() if k not in ("response", "reward")}
  thoughts, said = sent["response"]["output"]
  assert thoughts["type"] == "reasoning" and thoughts["summary"][0]["text"] == "One and two."
  assert said["role"] == "assistant" and said["content"][0]["text"] == "3"
  assert sent["response"]["object"] == "response" and sent["response"]["status"] == "completed"
  assert {**seeded, "response": sent["response"]} == sent
  cookies = {path: headers.get("Cookie") for path, _, headers in server.requests}
  assert cookies["/seed_session"] is None and cookies["/verify"] == "session=s1"
  assert cookies[CHAT] is None
  (chat,) = [headers for path, _, headers in server.requests if path == CHAT]
  assert chat["Authorization"] == "Bearer key-of-the-attempt"


@pytest.mark.parametrize("thoughts", ["reasoning", "text"])
def test_thoughts_of_the_endpoint_are_shown_as_asked_for(thoughts):
  reply = lambda *_: {"content": "3", "reasoning_content": "One and two."}
  _, server = attempt(verifying(), reply, thoughts=thoughts)
  output = server.sent("/verify")[0]["response"]["output"]
  if thoughts == "reasoning":
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["summary"][0]["text"] == "One and two."
  else:
    assert output[0]["content"][0]["text"] == "<think>One and two.</think>\n3"


def test_tools_are_called_on_the_server_and_verified_with_their_answers():
  turns = iter([call("add", {"a": 1}), call("shout", {}, 1), call("add", "[1", 2), "3"])
  routes = {**verifying(), "/add": says({"detail": "no"}, 422), "/shout": says("never")}
  result, server = attempt(routes, lambda messages, tools: next(turns), WITH_TOOLS)
  assert result.total == 1.0 and server.sent("/add") == [{"a": 1}]
  assert server.sent("/shout") == []  # not a tool of the row.
  tools = [body["tools"] for body in server.sent(CHAT)]
  kept = {key: ADD[key] for key in ("name", "description", "parameters")}
  assert tools == [[{"type": "function", "function": kept}]] * 4
  said = server.sent(CHAT)[-1]["messages"]
  assert [message["role"] for message in said] == ["user", *["assistant", "tool"] * 3]
  assert said[2] == {"role": "tool", "tool_call_id": "call_0", "content": '{"detail": "no"}'}
  assert "Not Found" in said[4]["content"] and "Invalid tool call" in said[6]["content"]
  (sent,) = server.sent("/verify")
  kinds = [item["type"] for item in sent["response"]["output"]]
  assert kinds == [*["function_call", "function_call_output"] * 3, "message"]
  assert sent["response"]["output"][0]["arguments"] == '{"a": 1}'
  assert sent["response"]["output"][1]["output"] == '{"detail": "no"}'
  cookies = [headers.get("Cookie") for path, _, headers in server.requests if path == "/add"]
  assert cookies == ["session=s1"]


@pytest.mark.parametrize(
  "settings, reply, calls, status",
  [
    (dict(agent="non_executing_simple_agent"), lambda *_: call("add", {}), 0, "completed"),
    (dict(max_steps=3), lambda *_: call("add", {}), 3, "completed"),
    ({}, lambda messages, _: 400 if len(messages) > 1 else call("add", {}), 1, "incomplete"),
  ],
  ids=["not_executed", "max_steps", "no_room"],
)
def test_a_conversation_ends(settings, reply, calls, status):
  routes = {**verifying(), "/add": says({})}
  result, server = attempt(routes, reply, WITH_TOOLS, **settings)
  assert result.total == 1.0 and len(server.sent("/add")) == calls
  assert server.sent("/verify")[0]["response"]["status"] == status


def test_an_episode_is_played_step_by_step():
  dealt = says({"observation": "You have 12.", "info": {}}, Set_Cookie="game=g; path=/")
  steps = iter(
    [
      {"observation": "You have 15.", "reward": 0.25, "info": {}},
      {"observation": None, "reward": 1, "terminated": True, "info": {"value": 20, "won": "yes"}},
    ]
  )
  routes = {
    "/openapi.json": says({"paths": {"/reset": {}, "/step": {}}}),
    "/reset": dealt,
    "/step": lambda body, _: (200, next(steps), {}),
  }
  recorded = {**ROW, "terminated": True}  # a recorded rollout: its input ends with another hand.
  deal, hand = {"role": "user", "content": "Deal."}, {"role": "user", "content": "You have 9."}
  result, server = attempt(routes, lambda *_: "hit", recorded, deal, hand)
  assert result.total == 1.25 and result.metrics["value"] == 20
  assert result.metrics["accuracy"] == 1 and result.metrics["terminated"] == 1
  first, second = server.sent(CHAT)
  assert [m["content"] for m in first["messages"]] == ["Deal.", "You have 12."]
  assert [m["content"] for m in second["messages"][2:]] == ["hit", "You have 15."]
  assert [len(body["response"]["output"]) for body in server.sent("/step")] == [1, 1]


def test_rows_without_tools_need_no_conversation():
  with serving(verifying(accuracy=False)) as server, making(server, agent="single_turn") as made:
    assert not made["made"].is_agent
    result = score(made["made"], prompt(), "3")
    assert result.total == 1.0 and result.metrics["accuracy"] == 0.0
    assert server.sent("/seed_session") == []
    with pytest.raises(EnvironmentFailure, match="declares 1 tools, which single_turn does not"):
      score(made["made"], prompt(WITH_TOOLS), "3")


def test_files_of_several_environments_name_their_servers():
  with serving(verifying(reward=0.25)) as one, serving(verifying(reward=0.75)) as other:
    urls = {"games": other.url}
    with making(one, agent="single_turn", urls=urls, fields={"id": 1, "seed": 5}) as made:
      games = {**ROW, "agent_ref": {"name": "games"}}
      assert [score(made["made"], prompt(row), "3").total for row in (ROW, games)] == [0.25, 0.75]
    assert one.sent("/verify")[0]["id"] == 7 and one.sent("/verify")[0]["seed"] == 5


FAULTS = {
  "500": (says({"detail": "boom"}, 500), "EndpointFailed", 3),
  "422": (says({"detail": [{"loc": ["body", "question"]}]}, 422), "EndpointRefused", 1),
  "no_reward": (says({"score": 1}), "EndpointUnreadable", 3),
  "text": (says("<html>"), "EndpointUnreadable", 3),
  "nan": (says('{"reward": NaN}'), "EndpointUnreadable", 3),
}


@pytest.mark.parametrize("fault, kind, tries", FAULTS.values(), ids=FAULTS)
def test_a_verification_that_fails_is_a_failure_of_its_kind(fault, kind, tries):
  with serving({**verifying(), "/verify": fault, CHAT: policy(lambda *_: "3")}) as server:
    with making(server) as made:
      with pytest.raises(EnvironmentFailure) as caught:
        run(made["made"], prompt(), endpoint(server))
      assert caught.value.kind == kind and len(server.sent("/verify")) == tries
      assert made.metrics()["env/made/endpoint_failed_calls"] == 1.0


def test_a_step_is_never_repeated():
  routes = {
    "/openapi.json": says({"paths": {"/reset": {}, "/step": {}}}),
    "/reset": says({"observation": "Go."}),
    "/step": says({}, 500),
    CHAT: policy(lambda *_: "hit"),
  }
  with serving(routes) as server, making(server) as made:
    with pytest.raises(EnvironmentFailure):
      run(made["made"], prompt(), endpoint(server))
    assert len(server.sent("/step")) == 1


def test_what_cannot_work_is_said_before_the_run():
  made = environments.make(made=dict(module="nemo_gym", url="http://127.0.0.1:9", backoff_s=0.0))
  with made, pytest.raises(ValueError, match="resources server http://127.0.0.1:9 cannot be used"):
    environments.check(made, [prompt()])
  with serving({}) as server, making(server) as made:  # it answers, but has no description.
    environments.check(made, [prompt()])
    with pytest.raises(ValueError, match="needs rows of NeMo Gym, with responses_create_params"):
      environments.check(made, [prompt_of({"problem": "1 + 2?"})])
  for settings, message in [
    ({}, "url must be the address"),
    ({"url": "localhost:80"}, "url must be http"),
    ({"url": "http://h", "agent": "simple"}, "unknown agent 'simple'"),
    ({"url": "http://h", "max_steps": 0}, "max_steps"),
  ]:
    with pytest.raises(ValueError, match=message):
      environments.make(made=dict(module="nemo_gym", **settings))


def test_the_row_reaches_the_environment_as_it_was():
  record = nemo_gym.to_prompt(ROW, "f:1", PromptStyle(output_key="expected_answer"))
  assert record.info["nemo_gym_row"] == ROW
  json.dumps(record.info["nemo_gym_row"])
