"""Rollouts of NeMo Gym, real ones (NVIDIA-NeMo/Gym, Apache-2.0) and small ones of every shape."""

import json
import pathlib

import pytest

from grpo_jax import data
from grpo_jax.data import nemo_gym
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import PromptStyle, RowError
from grpo_jax.data.recorded import RecordedTurn, Style

FOLDER = pathlib.Path(__file__).parent / "nemo_gym"


def rows(name):
  return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def recording(row, **style):
  return nemo_gym.to_recording(row, "f:1", Style(**style))


def item(text, role="assistant", **fields):
  content = [{"type": "output_text", "text": text}] if role == "assistant" else text
  return {"type": "message", "role": role, "content": content, **fields}


def rollout(*items, **fields):
  params = {"input": [{"role": "user", "content": "Q"}], "tools": fields.pop("tools", [])}
  return {"responses_create_params": params, "response": {"output": list(items)}, **fields}


def test_a_real_game_has_the_turns_of_both_sides():
  found = recording(rows("blackjack")[0])
  assert [m["role"] for m in found.messages] == ["system", "user", "user"]
  hand = "Your hand: [8, 5, 3] = 16\nDealer shows: A\n"
  assert found.responses[0].turns == (
    RecordedTurn("assistant", "<action>hit</action>"),
    RecordedTurn("user", f"{hand}Respond with <action>hit</action> or <action>stand</action>."),
    RecordedTurn("assistant", "<action>hit</action>"),
  )
  assert found.responses[0].reward == -1.0
  assert found.group_type == "blackjack_gymnasium_agent"
  assert found.info["info"]["result"] == "bust"


def test_real_games_of_one_task_that_were_dealt_other_hands_are_groups_of_their_own():
  found = [recording(row) for row in rows("blackjack")]
  assert len({f.key for f in found}) == len({f.messages[-1]["content"] for f in found})


def test_a_real_answer_with_thoughts_is_what_the_model_has_sampled():
  (row,) = rows("reasoning_gym")
  thoughts = row["response"]["output"][0]["summary"][0]["text"]
  answer = row["response"]["output"][1]["content"][0]["text"]
  (turn,) = recording(row).responses[0].turns
  assert turn.text == f"<think>{thoughts}</think>{answer}"
  assert recording(row, reasoning="drop").responses[0].turns[0].text == answer
  assert recording(row).group_type == row["task_name"]


def test_the_simpler_shape_of_the_guides_is_read_alike():
  row = rollout(item("b"), reward=1.0)
  simple = {**row, "output": row["response"]["output"]}
  del simple["response"]
  assert recording(simple).responses == recording(row).responses
  del simple["output"][0]["role"]
  assert recording(simple).responses == recording(row).responses


def test_input_may_be_a_string_and_instructions_are_the_system_prompt():
  row = rollout(item("b"))
  row["responses_create_params"] = {"input": "Q", "instructions": "Be brief."}
  assert recording(row).messages == (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q"},
  )


CALL = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c"}
ANSWER = {"type": "function_call_output", "call_id": "c", "output": "2"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def test_tool_calls_are_calls_of_the_assistant_and_their_outputs_a_turn():
  row = rollout(item("Let me add."), CALL, ANSWER, item("It is 2."), tools=[ADD])
  found = recording(row)
  as_text = 'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
  function = {"name": "add", "arguments": {"a": 1}}
  call = {"id": "c", "type": "function", "function": function}
  said = {"role": "assistant", "content": "Let me add.", "tool_calls": [call]}
  answer = {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"}
  assert found.responses[0].turns == (
    RecordedTurn("assistant", as_text, message=said),
    RecordedTurn("tool", "2", message=answer),
    RecordedTurn("assistant", "It is 2."),
  )
  (tool,) = found.tools
  assert tool["function"]["name"] == "add" and tool["function"]["parameters"] == {"type": "object"}
  # Without tools, the same turns are text, and the template gets no tools.
  ignored = recording(row, tools="ignore")
  assert [turn.text for turn in ignored.responses[0].turns] == [as_text, "2", "It is 2."]
  assert ignored.responses[0].turns[0].message is None and ignored.tools == ()


def test_thoughts_text_and_calls_in_another_order_remain_text():
  row = rollout(CALL, item("I have called it."), tools=[ADD])
  (turn,) = recording(row).responses[0].turns
  assert turn.message is None and turn.text.endswith("</tool_call>I have called it.")


def test_a_prompt_may_hold_calls_of_earlier_turns():
  row = rollout(item("a"))
  row["responses_create_params"]["input"] += [CALL, ANSWER]
  messages = recording(row).messages
  assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
  assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
  assert messages[2]["name"] == "add"


def test_a_model_that_was_forbidden_to_call_tools_was_offered_none():
  row = rollout(item("a"), tools=[ADD])
  row["responses_create_params"]["tool_choice"] = "none"
  assert recording(row).tools == ()


def test_an_item_with_placeholder_tokens_is_not_the_response():
  """Some agents end their rollouts with an empty message that no model has sampled."""
  ids = {"prompt_token_ids": [0], "generation_token_ids": [0], "generation_log_probs": [0.0]}
  found = recording(rollout(item("b"), item("", **ids)))
  assert found.prompt_ids is None and [t.text for t in found.responses[0].turns] == ["b"]


def test_a_prompt_may_be_a_system_message_alone():
  row = rollout(item("b"))
  row["responses_create_params"]["input"] = [{"role": "system", "content": "You are an agent."}]
  assert [m["role"] for m in recording(row).messages] == ["system"]


def test_the_last_message_of_the_environment_is_not_part_of_the_response():
  assert len(recording(rollout(item("a"), item("bye", "user"))).responses[0].turns) == 1


def test_recorded_tokens_are_taken_as_they_are():
  first = item("x", prompt_token_ids=[1, 2], generation_token_ids=[3], generation_log_probs=[-0.5])
  second = item(
    "y",
    prompt_token_ids=[1, 2, 3, 9, 9],
    generation_token_ids=[4, 5],
    generation_log_probs=[-0.25, -1],
  )
  empty = item("", prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[])
  found = recording(rollout(first, item("env", "user"), second, empty, tools=[{"name": "t"}]))
  assert found.prompt_ids == (1, 2)
  assert found.responses[0].turns == (
    RecordedTurn("assistant", "", (3,), (-0.5,)),
    RecordedTurn("environment", "", (9, 9)),
    RecordedTurn("assistant", "", (4, 5), (-0.25, -1.0)),
  )


def test_an_incomplete_response_is_truncated():
  assert recording(rollout(item("a", status="incomplete"))).responses[0].is_truncated
  row = rollout(item("a"))
  row["response"]["status"] = "incomplete"
  assert recording(row).responses[0].is_truncated
  assert not recording(rollout(item("a", status="completed"))).responses[0].is_truncated


def test_rollouts_are_prompts_for_online_training(tmp_path):
  """By name and by themselves; every other field reaches the environment."""
  for kind in ("nemo_gym", "auto"):
    stream = data.make(
      ByteTokenizer(),
      path=FOLDER / "blackjack.jsonl",
      format=kind,
      shuffle=False,
      epochs=1,
      environment="own",
    )
    prompts = stream.take(9)
    assert len(prompts) == 5
    assert prompts[0].text.startswith("<role>system\nYou are playing Blackjack.")
    assert prompts[0].text.endswith("or <action>stand</action>.<end><role>assistant\n")
    assert prompts[0].info["agent_ref"]["name"] == "blackjack_gymnasium_agent"
    assert "response" not in prompts[0].info


def test_a_task_with_tools_is_a_prompt_with_tools(tmp_path):
  path = tmp_path / "tasks.jsonl"
  row = rollout(item("a"), tools=[ADD], expected_answer="2")
  row["responses_create_params"]["input"] += [CALL, ANSWER]
  path.write_text(json.dumps(row) + "\n")
  (prompt,) = data.make_held_out(ByteTokenizer(), path=path)
  assert [tool["function"]["name"] for tool in prompt.tools] == ["add"]
  assert prompt.text.startswith("<role>tools\n") and '"add"' in prompt.text
  # ByteTokenizer writes no calls: they are text.
  assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><end>' in prompt.text


def test_the_expected_answer_of_a_prompt_is_the_field_that_is_named():
  row = rollout(item("a"), answer="42")
  record = nemo_gym.to_prompt(row, "f:1", PromptStyle(output_key="answer"))
  assert record.info["expected_answer"] == "42"


@pytest.mark.parametrize(
  "row, message",
  [
    ({"responses_create_params": {"input": "Q"}}, "no key 'output'"),
    ({"responses_create_params": "Q", "output": [item("a")]}, "must be an object, got a string"),
    ({"responses_create_params": {}, "output": [item("a")]}, "no key 'input'"),
    (rollout(), "'output' must be a list of items, got an empty list"),
    (rollout(item("a", "user")), "must begin with what the assistant wrote"),
    (rollout({"type": "image"}), "item 1 of 'output' has type 'image'; there are: message, "),
    (rollout({"type": "message", "role": None, "content": "a"}), "has role None"),
    (rollout({"type": "function_call", "name": "f", "arguments": "{"}), "are not JSON"),
    (rollout(item("a"), tools=[{"type": "web_search"}]), "tool 1 has type 'web_search'; only"),
    (rollout(item("a"), tools=[{"parameters": {}}]), "tool 1 has no name"),
    (rollout(item("a"), tools={"name": "f"}), "'tools' must be a list of functions"),
    (rollout(item("a"), reward="1"), "'reward' must be a number"),
    (
      rollout(item("a", prompt_token_ids=[1], generation_token_ids=[2], generation_log_probs=[])),
      "1 generation_token_ids, 0 log_probs",
    ),
    (
      rollout(
        item("a", prompt_token_ids=[1], generation_token_ids=[2], generation_log_probs=[-1]),
        item("b", prompt_token_ids=[1, 3], generation_token_ids=[4], generation_log_probs=[-1]),
      ),
      "item 2 of 'output': its prompt_token_ids do not begin with the tokens before it",
    ),
  ],
)
def test_a_broken_rollout_says_where_and_what(row, message):
  with pytest.raises(RowError, match=message) as error:
    recording(row)
  assert str(error.value).startswith("f:1: ")


def test_tools_can_be_ignored():
  assert recording(rollout(item("a"), tools=[{"name": "f"}]), tools="ignore").responses
