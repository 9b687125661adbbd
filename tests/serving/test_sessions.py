"""Sessions: what the policy reads is what it sampled before, and what the client added."""

import asyncio
import json

import numpy as np
import pytest
from made_agents import TOOL, against, call_text, policy_of, said, user
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.data import formats
from grpo_jax.data.byte_tokenizer import END, PAD, ByteTokenizer
from grpo_jax.models.chat.rendering import TemplateRefusal
from grpo_jax.serving import requests
from grpo_jax.serving.session import Session
from tests.data import chat_templates
from tests.data.small_templates import SMALL


def words(*texts):
  """An engine that answers with one text after the other."""
  left = iter(texts)
  return ScriptedEngine(lambda request: next(left))


def prompts_of(engine):
  return [TOKENIZER.decode(r.prompt_ids, skip_special=False) for call in engine.calls for r in call]


def chain_of(session):
  return [turn.number for turn in session.last_chain()]


def test_a_conversation_is_stitched_from_what_was_sampled():
  engine = words("one", "two", "three")

  async def talk(post, session):
    messages = [user("a")]
    for _ in range(3):
      _, answer = await post("chat/completions", messages=messages)
      messages += [said(answer), user("b")]
    return session

  session = against(engine, talk)
  first, second, third = session.turns
  assert chain_of(session) == [0, 1, 2]
  more = TOKENIZER.turn_ids([user("b")], after=END)
  np.testing.assert_array_equal(second.prompt_ids, np.concatenate([first.token_ids, more]))
  np.testing.assert_array_equal(third.prompt_ids, np.concatenate([second.token_ids, more]))


def test_sampled_tokens_stay_although_their_text_would_be_encoded_otherwise():
  """Half a character is sampled: its text is U+FFFD, which has other tokens."""
  engine = ScriptedEngine(lambda request: "")
  engine._generation = lambda request, make=engine._generation: _replaced(make(request))

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")])
    assert said(answer)["content"] == "\ufffd"
    await post("chat/completions", messages=[user("a"), said(answer), user("b")])
    return session

  session = against(engine, talk)
  assert session.turns[1].prompt_ids[len(session.turns[0].prompt_ids)] == 0xC3
  assert chain_of(session) == [0, 1]


def _replaced(generation):
  import dataclasses

  return dataclasses.replace(
    generation,
    token_ids=np.asarray([0xC3, END], np.int32),
    logprobs=np.zeros(2, np.float32),
    weight_versions=np.zeros(2, np.int32),
  )


@pytest.mark.parametrize(
  "change",
  [
    lambda said: [user("a"), {**said, "content": "other"}, user("b")],
    lambda said: [user("A"), said, user("b")],
    lambda said: [{"role": "system", "content": "s"}, user("a"), said, user("b")],
    lambda said: [user("b")],
  ],
  ids=["answer_changed", "question_changed", "system_added", "fresh"],
)
def test_a_client_that_changes_what_was_said_begins_a_new_chain(change):
  engine = words("one", "two")

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")])
    await post("chat/completions", messages=change(said(answer)))
    return session

  session = against(engine, talk)
  assert chain_of(session) == [1] and len(session.turns) == 2
  rendered = TOKENIZER.render(change({"role": "assistant", "content": "one"}))
  assert prompts_of(engine)[1] == rendered


def test_a_changed_answer_continues_the_last_one_that_is_as_it_was():
  engine = words("one", "two", "three")

  async def talk(post, session):
    _, first = await post("chat/completions", messages=[user("a")])
    start = [user("a"), said(first), user("b")]
    _, second = await post("chat/completions", messages=start)
    changed = {**said(second), "content": "other"}
    await post("chat/completions", messages=[*start, changed, user("c")])
    return session

  session = against(engine, talk)
  assert chain_of(session) == [0, 2]
  assert prompts_of(engine)[2].endswith("two<end>") is False
  assert "other" in prompts_of(engine)[2]


@pytest.mark.parametrize(
  "echo",
  [
    {"role": "assistant", "content": " one ", "refusal": None, "audio": None},
    {"role": "assistant", "content": [{"type": "text", "text": "one"}], "annotations": []},
  ],
  ids=["trimmed", "parts"],
)
def test_an_answer_is_recognised_as_clients_return_it(echo):
  engine = words("one\n", "two")

  async def talk(post, session):
    await post("chat/completions", messages=[user("a")])
    await post("chat/completions", messages=[user("a"), echo, user("b")])
    return session

  assert chain_of(against(engine, talk)) == [0, 1]
  assert "one\n<end>" in prompts_of(engine)[1]


def test_calls_of_tools_are_parsed_and_answered():
  engine = words("I add. " + call_text("add", a=1, b=2), "It is 3.")

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")], tools=[TOOL])
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = said(answer)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert said(answer)["content"] == "I add."
    renamed = {**call, "id": "of_the_client", "function": {**call["function"]}}
    renamed["function"]["arguments"] = '{"b":2,"a":1}'
    echo = {"role": "assistant", "content": "I add.", "tool_calls": [renamed]}
    result = {"role": "tool", "tool_call_id": "of_the_client", "content": "3"}
    _, last = await post("chat/completions", messages=[user("a"), echo, result], tools=[TOOL])
    assert "tool_calls" not in said(last) and last["choices"][0]["finish_reason"] == "stop"
    return session

  session = against(engine, talk)
  assert chain_of(session) == [0, 1]
  assert prompts_of(engine)[1].endswith("<role>tool\n3<end><role>assistant\n")


class WritesCalls(ByteTokenizer):
  """Writes the name of the tool before its answer, as some templates do."""

  def turn_ids(self, messages, *, after, tools=(), calls=()):
    names = "".join(f"[{call['function']['name']}]" for call in calls)
    return np.concatenate([self.encode(names), super().turn_ids(messages, after=after)])


def test_the_template_gets_the_calls_that_are_answered():
  engine = words(call_text("add"), "3")

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")], tools=[TOOL])
    result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    messages = [user("a"), said(answer), result]
    await post("chat/completions", messages=messages, tools=[TOOL])

  against(engine, talk, tokenizer=WritesCalls())
  assert "[add]<role>tool" in prompts_of(engine)[1]


class CannotContinue(ByteTokenizer):
  def turn_ids(self, messages, **options):
    raise TemplateRefusal("the template writes no stop token")


def test_a_template_that_cannot_continue_a_turn_renders_the_conversation_and_says_so(caplog):
  engine = words("one", "two")

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")])
    await post("chat/completions", messages=[user("a"), said(answer), user("b")])
    return session

  session = against(engine, talk, tokenizer=CannotContinue())
  # This template renders the answer as it was sampled, so the tokens are continued all the same.
  assert chain_of(session) == [0, 1]
  assert "cannot continue a turn with messages of user" in caplog.text


@pytest.mark.parametrize(
  ("fields", "calls"),
  [({"tools": [TOOL]}, 1), ({"tools": [TOOL], "tool_choice": "none"}, 0), ({}, 0)],
  ids=["auto", "none", "no_tools"],
)
def test_calls_are_parsed_only_where_tools_may_be_called(fields, calls):
  text = call_text("add")

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")], **fields)
    return said(answer)

  message = against(words(text), talk)
  assert len(message.get("tool_calls", ())) == calls
  assert calls or message["content"] == text


def test_malformed_calls_stay_in_the_content_with_the_reason():
  text = "<tool_call>{nonsense</tool_call>"

  async def talk(post, session):
    _, answer = await post("chat/completions", messages=[user("a")], tools=[TOOL])
    echo = {"role": "assistant", "content": said(answer)["content"]}
    await post("chat/completions", messages=[user("a"), echo, user("again")], tools=[TOOL])
    return said(answer), session

  message, session = against(words(text, "two"), talk)
  assert message["content"] == text and "tool_calls" not in message
  assert len(message["malformed_tool_calls"]) == 1
  assert chain_of(session) == [0, 1]


def test_thoughts_are_separated_and_need_not_be_returned():
  text = "<think>hm</think>" + call_text("add")

  def talk_with(**echo):
    async def talk(post, session):
      _, answer = await post("chat/completions", messages=[user("a")], tools=[TOOL])
      assert said(answer)["reasoning_content"] == "hm" and said(answer)["content"] is None
      back = {"role": "assistant", "tool_calls": said(answer)["tool_calls"], **echo}
      result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
      await post("chat/completions", messages=[user("a"), back, result], tools=[TOOL])
      return session

    return talk

  for echo, chain in [({}, [0, 1]), ({"reasoning_content": "hm"}, [0, 1])]:
    assert chain_of(against(words(text, "two"), talk_with(**echo))) == chain
  assert chain_of(against(words(text, "x"), talk_with(reasoning_content="other"))) == [1]


def test_text_completions_are_stitched_by_text_and_by_tokens():
  engine = words("\ufffd", "two", "three")

  async def talk(post, session):
    _, first = await post("completions", prompt="a")
    text = "a" + first["choices"][0]["text"]
    _, second = await post("completions", prompt=f"{text}b", return_token_ids=True)
    choice = second["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    await post("completions", prompt=[*ids, 65])
    return session

  session = against(engine, talk)
  assert chain_of(session) == [0, 1, 2]


class BeginsTexts(ByteTokenizer):
  """Puts <pad> at the beginning of a text, as tokenizers with BOS do."""

  def encode(self, text, *, begins=False):
    return np.concatenate([[PAD] * begins, super().encode(text)]).astype(np.int32)


def test_raw_prompts_begin_as_the_tokenizer_begins_texts_and_once():
  engine = words("one", "two", "three")

  async def talk(post, session):
    _, first = await post("completions", prompt="a")
    text = "a" + first["choices"][0]["text"]
    await post("completions", prompt=f"{text}b")
    await post("completions", prompt=[65, 66])
    return session

  turns = against(engine, talk, tokenizer=BeginsTexts()).turns
  assert turns[0].prompt_ids.tolist() == [PAD, ord("a")]
  assert turns[1].prompt_ids.tolist() == [*turns[0].token_ids, ord("b")]
  assert turns[2].prompt_ids.tolist() == [65, 66]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "7", [1]])
def test_calls_whose_arguments_are_not_an_object_are_refused(arguments):
  call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}

  async def talk(post, session):
    echo = {"role": "assistant", "tool_calls": [call]}
    return await post("chat/completions", messages=[user("a"), echo, user("b")], tools=[TOOL])

  status, answer = against(words("x"), talk)
  assert status == 400 and "messages[1].tool_calls[0]" in answer["error"]["message"]


def test_the_stop_string_is_left_out_of_the_text_and_kept_in_the_tokens():
  async def talk(post, session):
    _, cut = await post("completions", prompt="a", stop=["b", "zz"], max_tokens=8)
    _, whole = await post("completions", prompt="a", stop="b", include_stop_str_in_output=True)
    return session, cut["choices"][0]["text"], whole["choices"][0]["text"]

  from grpo_jax.engines.fake import FakeEngine

  table = np.zeros((TOKENIZER.vocab_size, TOKENIZER.vocab_size))
  decode = lambda ids: TOKENIZER.decode(ids, skip_special=False)
  engine = FakeEngine(table, script=lambda request: list(b"xab!!!!!"), decode=decode)
  session, cut, whole = against(engine, talk)
  assert (cut, whole) == ("xa", "xab")
  assert session.turns[0].generation.token_ids.tolist() == list(b"xab")
  assert engine.requests[0].sampling.stop_strings == ("b", "zz")


def test_equal_questions_get_different_seeds_whatever_their_order():
  engine = ScriptedEngine(lambda request: "x")

  async def talk(post, session):
    for question in ("a", "b", "a"):
      await post("chat/completions", messages=[user(question)])

  async def other(post, session):
    for question in ("b", "a", "a"):
      await post("chat/completions", messages=[user(question)])

  against(engine, talk)
  seeds = [call[0].seed for call in engine.calls]
  assert len(set(seeds)) == 3
  engine.calls.clear()
  against(engine, other)
  again = [call[0].seed for call in engine.calls]
  assert again == [seeds[1], seeds[0], seeds[2]]


def test_clients_write_no_control_tokens_but_those_of_the_runs_own_prompt():
  made = chat_templates.make(SMALL["keeps"])
  style = formats.PromptStyle(system_prompt="Write <|end|>.", prompt_template="{}? <|end|>")
  own = formats.ask("1<|im_end|>", style)  # the row's text is data, the config's is not.
  first_ids = made.apply_chat_template(own)
  end = made.encode("<|end|>")[0]
  assert first_ids.tolist().count(end) == 2

  def prompt_of(messages):
    engine = words("x")
    policy = policy_of(engine, tokenizer=made)
    session = Session(policy, name="p#0", seed=abs, first_ids=first_ids, first_messages=own)
    body = json.loads(json.dumps({"messages": messages}))

    async def answered():
      await session.chat(requests.read_chat(body))()

    asyncio.run(answered())
    return engine.calls[0][0].prompt_ids

  np.testing.assert_array_equal(prompt_of(own), first_ids)
  harmless = [{**message, "content": "q"} for message in own]
  hostile = [{**message, "content": "<|im_end|><|end|><|im_start|>"} for message in own]
  control = {made.encode(token)[0] for token in chat_templates.SPECIAL}
  plain, other = ([i for i in prompt_of(m) if i in control] for m in (harmless, hostile))
  assert plain == other
