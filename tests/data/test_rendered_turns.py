"""Recorded turns with tool calls, as small templates with the habits of real ones write them."""

import itertools
import json
import re

import jinja2
import numpy as np
import pytest

from grpo_jax.data import recorded_calls, rendered_turns
from grpo_jax.data.byte_tokenizer import END, ROLE, ByteTokenizer
from grpo_jax.data.formats import UNWRITTEN_TOOLS, RowError
from grpo_jax.data.groups import group_of
from grpo_jax.models.chat.rendering import TemplateRefusal
from grpo_jax.offline import recorded_groups
from tests.data import chat_templates
from tests.data.small_templates import SMALL

PUBLIC = chat_templates.public()

# Calls after text and thoughts, each turn with an end: Qwen.
HERMES = (
  "{% if tools %}<s>{% for t in tools %}{{ t | tojson }}{% endfor %}<end>{% endif %}"
  "{% for m in messages %}<{{ m.role }}>"
  "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
  "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
  "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<end>{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# A turn is one call and nothing else: Llama 3.
ALONE = (
  "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>"
  "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
  "{% endif %}{% set f = m.tool_calls[0].function %}"
  '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
  "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}<assistant>"
)
# A turn begins in the thoughts; it has no end, and what follows a call begins otherwise: GLM.
ENDLESS = (
  "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'tool' %}<obs>{% else %}"
  "<{{ m.role }}>{% endif %}{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
  "{% endif %}{{ m.content }}"
  "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
  "<assistant><think>"
)
# The first call alone is written, and thoughts are called `thinking`: gpt-oss.
FIRST = (
  "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.thinking }}"
  "{{ m.content }}"
  "{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}{% endif %}<end>{% endfor %}"
  "<assistant>"
)
# Thoughts are dropped from all turns, and those of the next turn may be begun: DeepSeek R1.
FORGETS = (
  "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
  "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}<end>{% endfor %}<assistant>"
)
OPENS = FORGETS + "<think>\n"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
REFUSING = "{{ raise_exception('no') if tools or messages[-1].tool_calls }}x"
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
MARKS = {"<end>": END, "<obs>": ROLE}


def refuse(reason):
  raise TemplateRefusal(reason)


class Templated(ByteTokenizer):
  """Bytes and two marks, with a chat template."""

  stop_ids = (END, ROLE)

  def __init__(self, template):
    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
    self._template = environment.from_string(template, globals={"raise_exception": refuse})

  def render(self, messages, *, tools=()):
    made = {"messages": messages, "tools": [*tools], "add_generation_prompt": True}
    return self._template.render(made)

  def prompt(self, messages, *, max_tokens, tools=()):
    found = super().prompt(messages, max_tokens=max_tokens)
    text = self.render(messages, tools=tools)
    return type(found)(text, self.encode(text))

  def encode(self, text):
    parts = re.split("(<end>|<obs>)", text)
    ids = [[MARKS[part]] if part in MARKS else [*part.encode()] for part in parts]
    return np.asarray([i for each in ids for i in each], np.int32)


def text_of(ids):
  names = {i: mark for mark, i in MARKS.items()}
  return "".join(names.get(i) or chr(i) for i in ids)


def calling(*names, text="", thoughts="", **arguments):
  message = {"role": "assistant", "content": text}
  if thoughts:
    message["reasoning_content"] = thoughts
  made = [recorded_calls.call(name, arguments, "call", "f:1", call_id=f"c{name}") for name in names]
  return {**message, "tool_calls": made} if made else message


@pytest.mark.parametrize(
  "template, message, expected",
  [
    (HERMES, calling("add", a=1), '[add {"a": 1}]<end>'),
    (HERMES, calling("add", "sub", text="So."), "So.[add {}][sub {}]<end>"),
    (HERMES, calling("add", thoughts="hm"), "<think>\nhm\n</think>\n\n[add {}]<end>"),
    (HERMES, calling(text="It is 2."), "It is 2.<end>"),
    (ALONE, calling("add", a=1), '{"name": "add", "parameters": {"a": 1}}<end>'),
    (ALONE, calling("add", text="So. "), 'So. {"name": "add", "parameters": {}}<end>'),
    (
      ALONE,
      calling("add", thoughts="hm"),
      '<think>hm</think>{"name": "add", "parameters": {}}<end>',
    ),
    (ENDLESS, calling("add", text="So."), "</think>So.(add)<obs>"),
    (ENDLESS, calling("add", thoughts="hm"), "hm</think>(add)<obs>"),
    (FIRST, calling("add", thoughts="hm", text="So."), "hmSo. to=add<end>"),
    (FORGETS, calling("add", thoughts="hm"), "<think>\nhm\n</think>\n\n(add)<end>"),
    (FORGETS, calling("add"), "(add)<end>"),
    (OPENS, calling("add", thoughts="hm"), "hm\n</think>\n\n(add)<end>"),
    (OPENS, calling("add"), "\n</think>\n\n(add)<end>"),
  ],
)
def test_a_turn_is_what_the_template_writes_after_its_header(template, message, expected):
  ids, is_ended = rendered_turns.turn(Templated(template), message, tools=[TOOL])
  assert (text_of(ids), is_ended) == (expected, True)


def test_a_turn_without_an_end_leaves_it_to_the_caller():
  ids, is_ended = rendered_turns.turn(Templated(ENDLESS), calling(text="It is 2."))
  assert (text_of(ids), is_ended) == ("</think>It is 2.", False)
  ids, is_ended = rendered_turns.turn(Templated(HERMES), calling("add"), max_characters=4)
  assert (text_of(ids), is_ended) == ("[add", False)


@pytest.mark.parametrize(
  "template, message, reason",
  [
    (ALONE, calling("add", "sub"), "one call"),
    (FIRST, calling("add", "sub"), "does not write all 1 calls of 'sub'"),
    (FIRST, calling("add", "add"), "does not write all 2 calls of 'add'"),
  ],
)
def test_a_call_that_the_template_does_not_write_is_refused(template, message, reason):
  with pytest.raises(TemplateRefusal, match=reason):
    rendered_turns.turn(Templated(template), message)


@pytest.mark.parametrize(
  "template, tools, its_calls",
  [
    (HERMES, True, True),
    (ALONE, True, True),
    (ENDLESS, True, True),
    (FIRST, True, True),
    (PLAIN, False, False),
    (REFUSING, False, False),
  ],
)
def test_a_template_is_known_by_what_it_writes(template, tools, its_calls):
  tokenizer = Templated(template)
  assert rendered_turns.writes_tools(tokenizer) is tools
  assert rendered_turns.writes_calls(tokenizer) is its_calls


def test_calls_of_a_prompt_are_text_where_the_template_writes_none():
  messages = [{"role": "user", "content": "Q"}, calling("add", text="So.", thoughts="hm")]
  assert rendered_turns.messages_for(Templated(HERMES), messages) == messages
  (_, said) = rendered_turns.messages_for(Templated(PLAIN), messages)
  as_text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
  assert said == {"role": "assistant", "content": f"<think>hm</think>So.\n{as_text}"}


CALL = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c"}
ANSWER = {"type": "function_call_output", "call_id": "c", "output": "2"}
SAID = {"type": "message", "role": "assistant", "content": [{"text": "It is 2."}]}
ROLLOUT = {
  "responses_create_params": {"input": "Q", "tools": [{"type": "function", "name": "add"}]},
  "response": {"output": [CALL, ANSWER, ANSWER, SAID]},
  "reward": 1.0,
}
# The same as chat completions have it.
CHAT = {
  "input": "Q",
  "tools": [TOOL],
  "output": [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **CALL}]},
    {"role": "tool", "content": "2", "tool_call_id": "c"},
    {"role": "tool", "content": "2", "tool_call_id": "c"},
    {"role": "assistant", "content": "It is 2."},
  ],
  "reward": 1.0,
}
RANKED = {
  "prompt": "Q",
  "tools": json.dumps([TOOL]),
  "group": [{"response": CHAT["output"], "rank": 1}],
}


class Asked(Templated):
  """Keeps what a turn was continued with."""

  def turn_ids(self, messages, *, after, tools=(), calls=()):
    self.continued = (messages, after, tools, calls)
    return self.encode("{...}")


def groups(tmp_path, row, tokenizer, **options):
  path = tmp_path / "f.jsonl"
  path.write_text(json.dumps(row) + "\n")
  dataset = recorded_groups.open_groups(
    tokenizer, options=recorded_groups.RecordedOptions(**options), on_error="stop", path=path
  )
  return group_of(dataset.prompt(0, epoch=0)).group


@pytest.mark.parametrize("row", [ROLLOUT, CHAT, RANKED], ids=["nemo_gym", "recorded", "ranked"])
def test_a_recorded_conversation_with_tools_is_learned_as_the_template_has_it(tmp_path, row):
  tokenizer = Asked(HERMES)
  group = groups(tmp_path, row, tokenizer)
  assert [tool["function"]["name"] for tool in group.prompt.tools] == ["add"]
  assert group.prompt.text.startswith('<s>{"function"') and group.prompt.text.endswith(
    "<assistant>"
  )
  (rollout,) = group.rollouts
  assert text_of(rollout.completion_ids) == '[add {"a": 1}]<end>{...}It is 2.<end>'
  assert text_of(rollout.completion_ids[~rollout.loss_mask]) == "{...}"
  # Both answers are one continuation, with what templates need to write them.
  messages, after, tools, made = tokenizer.continued
  answer = {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"}
  assert messages == [answer, answer] and after == END
  assert tools == group.prompt.tools and made[0]["function"]["arguments"] == {"a": 1}


def test_a_template_without_tools_is_refused_with_what_helps(tmp_path):
  with pytest.raises(RowError, match=r"f.jsonl:1: .* a tool, .*does not write.*'ignore'") as error:
    groups(tmp_path, ROLLOUT, Asked(PLAIN))
  assert error.value.kind == UNWRITTEN_TOOLS
  group = groups(tmp_path, ROLLOUT, Asked(PLAIN), tools="ignore")
  as_text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
  assert text_of(group.rollouts[0].completion_ids) == f"{as_text}<end>{{...}}It is 2.<end>"
  with pytest.raises(RowError, match=r"f.jsonl:1: one call; offline.tools='ignore' reads"):
    row = {**ROLLOUT, "response": {"output": [CALL, CALL, ANSWER]}}
    groups(tmp_path, row, Asked(ALONE))


def test_rows_with_tools_that_are_not_written_are_counted_when_a_file_is_opened(tmp_path, caplog):
  plain = {**ROLLOUT, "responses_create_params": {"input": "Q"}}
  path = tmp_path / "f.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in (ROLLOUT, plain, ROLLOUT)))
  dataset = recorded_groups.open_groups(
    Asked(PLAIN), options=recorded_groups.RecordedOptions(), on_error="skip", path=path
  )
  assert len(dataset) == 1
  assert "skipped 2 of 3 rows: 2 with tools that the chat template does not write" in caplog.text


def test_calls_without_declared_tools_are_text_where_the_template_writes_none(tmp_path):
  row = {**ROLLOUT, "responses_create_params": {"input": "Q"}}
  assert "<tool_call>" in groups(tmp_path, row, Asked(PLAIN)).rollouts[0].text
  assert groups(tmp_path, row, Asked(HERMES)).rollouts[0].text.startswith("[add")


@pytest.mark.parametrize(
  "given, reason",
  [
    ("{", "'tools' are not JSON"),
    ({"name": "add"}, "'tools' must be a list"),
    (["add"], "tool 1 must be an object"),
    ([{"function": {}}], "tool 1 has no name"),
    ([{"type": "mcp", "name": "x"}], "tool 1 has type 'mcp'"),
    ([{"name": "x", "parameters": "{"}], "parameters of tool 1 are not JSON"),
  ],
)
def test_broken_tools_are_named(given, reason):
  with pytest.raises(RowError, match=f"f:1: {reason}"):
    recorded_calls.tools_of(given, "f:1")


@pytest.mark.parametrize(
  "given, reason",
  [
    ("add", "tool_calls of m must be a list"),
    (["add"], "call 1 of m must be an object"),
    ([{"function": {}}], "call 1 of m has no name of a function"),
    ([{"function": {"name": "f", "arguments": "{"}}], "arguments of call 1 of m are not JSON"),
  ],
)
def test_broken_calls_are_named(given, reason):
  with pytest.raises(RowError, match=f"f:1: {reason}"):
    recorded_calls.checked({"role": "assistant", "tool_calls": given}, "m", "f:1")


QWEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
LLAMA = '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
OSS = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
# What is learned of a call, an answer of the tool and an answer to the user: two turns, in the form
# of each template; None: it writes no tools.
LEARNED = {
  "keeps": (QWEN, "It is 2.<|im_end|>"),
  "drops_thoughts": (QWEN, "It is 2.<|im_end|>"),
  "opens_thought": (f"\n</think>\n\n{QWEN}", "\n</think>\n\nIt is 2.<|im_end|>"),
  "alternates": None,
  "leaves_out": None,
  "channels": (OSS, "<|channel|>final<|message|>It is 2.<|return|>"),
  "gemma3": None,
  "glm4moe": (GLM, "It is 2.<|endoftext|>"),
  "gptoss": (OSS, "<|channel|>final<|message|>It is 2.<|return|>"),
  "llama3": None,
  "llama3_1": (LLAMA, "It is 2.<|eot_id|>"),
  "llama3_2": (LLAMA, "It is 2.<|eot_id|>"),
  "phi3_5": None,
  "qwen2_5": (QWEN, "It is 2.<|im_end|>"),
  "qwen3": (QWEN, "It is 2.<|im_end|>"),
  "qwen3_5_think": (f"\n</think>\n\n{XML}<|im_end|>", "\n</think>\n\nIt is 2.<|im_end|>"),
  "qwen3_instruct_2507": (QWEN, "It is 2.<|im_end|>"),
}


@pytest.mark.parametrize("name", [n for n in LEARNED if n in {*SMALL, *PUBLIC}])
def test_a_recorded_call_is_learned_in_the_form_of_the_template(name, tmp_path):
  """Small templates always; those of public models where GRPO_JAX_CHAT_TEMPLATES names them."""
  template = SMALL[name] if name in SMALL else PUBLIC[name].read_text()
  stops = chat_templates.STOPS.get(name, chat_templates.CHATML_STOPS)
  tokenizer = chat_templates.make(template, stops)
  described = {"type": "function", "name": "add", "description": "Adds.", "parameters": {}}
  params = {"input": "Q", "tools": [described]}
  row = {**ROLLOUT, "responses_create_params": params}
  row["response"] = {"output": [CALL, ANSWER, SAID]}
  if LEARNED[name] is None:
    with pytest.raises(RowError, match="does not write tools"):
      groups(tmp_path, row, tokenizer)
    return
  group = groups(tmp_path, row, tokenizer)
  (rollout,) = group.rollouts
  learned, ids = [], rollout.completion_ids
  for sampled, run in itertools.groupby(range(len(ids)), lambda i: bool(rollout.loss_mask[i])):
    text = tokenizer.decode([int(ids[i]) for i in run], skip_special=False)
    learned += [text] if sampled else []
    assert sampled or "2" in text
  assert tuple(learned) == LEARNED[name] and "Adds." in group.prompt.text
