"""Tool calls in a model's text: every form, what is malformed, and text that wants to be slow."""

import json
import time

import pytest

from grpo_jax.models.chat import tool_calls
from grpo_jax.models.chat.tool_calls import MAX_CALLS, Malformed, Parsed, parse

ADD = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "Adds.",
    "parameters": {
      "type": "object",
      "properties": {
        "a": {"type": "integer"},
        "b": {"type": ["number", "null"]},
        "say": {"type": "string"},
        "list": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "how": {"enum": ["3", "4"]},
        "is_big": {"type": "boolean"},
      },
      "required": ["a"],
    },
  },
}
ARGUMENTS = {"a": 3, "b": None, "say": "3 </tool_call>", "list": ["é"], "how": "3", "is_big": True}
# One call with these arguments, in each form.
WRITTEN = {
  "hermes": (
    '<tool_call>\n{"name": "add", "arguments": ' + json.dumps(ARGUMENTS) + "}\n</tool_call>"
  ),
  "llama3": '{"name": "add", "parameters": ' + json.dumps(ARGUMENTS) + "}<|eot_id|>",
  "gpt_oss": (
    "<|channel|>analysis<|message|>Hm, to=functions.no<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    f"{json.dumps(ARGUMENTS)}<|call|>"
  ),
  "qwen3_coder": (
    "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\nNone\n</parameter>\n"
    "<parameter=say>\n3 </tool_call>\n</parameter>\n"
    '<parameter=list>\n["é"]\n</parameter>\n<parameter=how>\n3\n</parameter>\n'
    "<parameter=is_big>\nTrue\n</parameter>\n</function>\n</tool_call>"
  ),
  "glm4_moe": (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>null</arg_value>\n<arg_key>say</arg_key>\n<arg_value>3 </tool_call></arg_value>\n"
    '<arg_key>list</arg_key>\n<arg_value>["é"]</arg_value>\n'
    "<arg_key>how</arg_key><arg_value>3</arg_value>\n"
    "<arg_key>is_big</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
  ),
}
TAGGED = ("hermes", "qwen3_coder", "glm4_moe")


def made(name, arguments, number=0):
  return {**tool_calls.call(name, arguments), "id": f"call{number:05d}"}


def reasons(found: Parsed) -> str:
  return "\n".join(each.reason for each in found.malformed)


@pytest.mark.parametrize("form", tool_calls.FORMS)
def test_a_call_in_every_form_has_its_name_and_arguments(form):
  found = parse(WRITTEN[form], form, tools=[ADD])
  assert found.calls == (made("add", ARGUMENTS),) and not found.malformed
  assert found.content == ""


@pytest.mark.parametrize("form", tool_calls.FORMS)
@pytest.mark.parametrize(
  "text", ["The sum is 3.", "", "{}", '{"answer": 3}', "a to=b c", "\n x \n"]
)
def test_text_without_a_call_is_the_content_unchanged(form, text):
  assert parse(text, form) == Parsed(text)
  assert parse(f"{text}<|im_end|>", form) == Parsed(text)


@pytest.mark.parametrize("form", TAGGED)
def test_parallel_calls_are_in_order_with_ids_that_continue(form):
  text = f"First.\n{WRITTEN[form]}\n{WRITTEN[form]}<|im_end|>"
  found = parse(text, form, tools=[ADD], first_id=7)
  assert found.calls == (made("add", ARGUMENTS, 7), made("add", ARGUMENTS, 8))
  assert found.content == "First."


@pytest.mark.parametrize("form", TAGGED)
def test_calls_in_thoughts_are_not_calls(form):
  thought = f"Perhaps {WRITTEN[form]}?"
  for text in (f"<think>{thought}</think>Yes.", f"{thought}</think>\n\nYes."):
    assert parse(text, form, tools=[ADD]) == Parsed("Yes.", reasoning=thought)
  assert parse(f"<think>{thought}", form).calls == ()
  found = parse(f"<think>\nHm.\n</think>\n\nYes.{WRITTEN[form]}", form, tools=[ADD])
  assert (found.reasoning, found.content, len(found.calls)) == ("Hm.", "Yes.", 1)


@pytest.mark.parametrize(
  ("form", "text", "reason"),
  [
    ("hermes", "<tool_call>{bad}</tool_call>", "invalid JSON at character 2"),
    (
      "hermes",
      '<tool_call>{"name": "f", "arguments": {}}',
      "expected </tool_call>.*end of the turn",
    ),
    ("hermes", '<tool_call>{"name": "f"} so</tool_call>', "expected </tool_call>.*'so</tool"),
    ("hermes", '<tool_call>["f"]</tool_call>', "a call is an object"),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', "a call is an object"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "a call is an object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '"arguments" must be an'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', "-Infinity"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "1e999 is too"),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>', "the name 'name' twice"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"\\ud800": 1}}</tool_call>', "surrogate"),
    ("hermes", "<tool_call>", "invalid JSON at character 1"),
    ("hermes", '{"name": "f"}</tool_call>', "there is no <tool_call> before </tool_call>"),
    ("qwen3_coder", "<tool_call>f</tool_call>", "expected <function=, got 'f</tool_call>'"),
    ("qwen3_coder", "<tool_call><function=f></tool_call>", "expected </function>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</tool_call>", "no </parameter>"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "does not name a function"),
    (
      "qwen3_coder",
      "<tool_call><function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>",
      "'a' is given twice",
    ),
    ("glm4_moe", "<tool_call>f<arg_key>a</arg_key></tool_call>", "expected <arg_value>"),
    ("glm4_moe", "<tool_call></tool_call>", "does not name a function"),
    ("glm4_moe", "<tool_call>f", "expected </tool_call>"),
    ("llama3", '{"name": "f", "parameters": {"a": }', "invalid JSON"),
    ("llama3", "<|python_tag|>brave_search.call(query='x')", "invalid JSON at character 1"),
    ("llama3", '<|python_tag|>{"f": 1}', '"parameters"'),
    ("llama3", '{"name": "f", "parameters": 3}', '"parameters" must be an object'),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|message|>{<|call|>", "invalid JSON"),
    (
      "gpt_oss",
      "<|channel|>commentary to=functions.f <|message|>[]<|call|>",
      "must be a JSON object",
    ),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{} {}", "text after the JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.f {}<|call|>", r"no <\|message\|>"),
  ],
)
def test_a_malformed_call_says_what_is_wrong(form, text, reason):
  found = parse(text, form)
  assert not found.calls and len(found.malformed) == 1
  with pytest.raises(ValueError, match=reason):
    raise ValueError(reasons(found))


def test_a_malformed_call_keeps_its_name_and_spares_the_others():
  good = '<tool_call>{"name": "f"}</tool_call>'
  found = parse(
    f'<tool_call>{{"name": "g", "arguments": 3}}</tool_call>{good}<tool_call>[{good}', "hermes"
  )
  assert [each["id"] for each in found.calls] == ["call00000", "call00001"]
  assert [each.name for each in found.malformed] == ["g", ""]


@pytest.mark.parametrize("form", ["llama3", "gpt_oss"])
def test_forms_of_one_call_a_turn_ignore_the_others_and_say_so(form):
  mark = "<|start|>assistant" if form == "gpt_oss" else "; "
  text = WRITTEN[form].removesuffix("<|eot_id|>")
  found = parse(text + mark + text, form)
  assert len(found.calls) == 1 and "only one call can be made in a turn" in reasons(found)


def test_llama_s_call_may_follow_the_python_tag_and_its_text():
  found = parse('I look.<|python_tag|>{"name": "f", "arguments": {"a": 1}}<|eom_id|>', "llama3")
  assert found == Parsed("I look.", (made("f", {"a": 1}),))


def test_llama_s_answer_may_be_an_object_with_a_name():
  answer = '{"name": "Ada", "age": 36}'
  assert parse(answer, "llama3", tools=[ADD]) == Parsed(answer)
  assert parse('{"name": "add"}', "llama3", tools=[ADD]).calls == (made("add", {}),)


def test_a_string_that_may_be_null_is_null_where_it_is_written():
  schema = {"properties": {"s": {"type": ["string", "null"]}, "t": {"type": "string"}}}
  tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
  for word in ("None", "null"):
    text = "<tool_call>f<arg_key>s</arg_key><arg_value>W</arg_value>"
    text += "<arg_key>t</arg_key><arg_value>W</arg_value></tool_call>"
    found = parse(text.replace("W", word), "glm4_moe", tools=tools)
    assert found.calls == (made("f", {"s": None, "t": word}),)


def test_a_schema_in_another_form_leaves_the_text_of_a_value():
  text = "<tool_call>f<arg_key>s</arg_key><arg_value>3</arg_value></tool_call>"
  for schema in ({"type": 5}, {"type": {}}, {"anyOf": 3}, {"oneOf": True}, {"anyOf": {"a": 1}}, 7):
    for parameters in ({"properties": {"s": schema}}, schema, [schema]):
      tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
      assert parse(text, "glm4_moe", tools=tools).calls == (made("f", {"s": "3"}),), parameters
  deep = {"type": "integer"}
  for _ in range(2000):
    deep = {"anyOf": [deep]}
  tools = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": deep}}}}
  ]
  assert parse(text, "glm4_moe", tools=tools).calls == (made("f", {"s": "3"}),)


def test_gpt_oss_has_its_answer_in_the_final_channel():
  thought = "<|channel|>analysis<|message|>Hm.<|end|>"
  text = f"{thought}<|start|>assistant<|channel|>final<|message|>3.<|return|>"
  assert parse(text, "gpt_oss") == Parsed("3.", reasoning="Hm.")
  # The recipient may come before the channel, as the template writes it.
  text = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
  assert parse(text, "gpt_oss").calls == (made("f", {}),)


def test_the_number_of_calls_in_a_turn_is_bounded():
  found = parse('<tool_call>{"name": "f"}</tool_call>' * (MAX_CALLS + 9), "hermes")
  assert len(found.calls) == MAX_CALLS
  assert found.malformed == (Malformed("more than 32 calls in one turn; the others are not read"),)
  assert len(parse("<tool_call>{" * 99, "hermes").malformed) == MAX_CALLS + 1


def test_a_parser_of_your_own_is_bounded_and_checked():
  def lines(text, tools):
    return Parsed("", tuple(tool_calls.call(line, {}) for line in text.splitlines()))

  assert parse("f\ng<|im_end|>", lines).calls == (made("f", {}), made("g", {}, 1))
  found = parse("f\n" * 40, lines)
  assert len(found.calls) == MAX_CALLS and "more than 32 calls" in reasons(found)
  for wrong in (
    None,
    Parsed("", ({"name": "f"},)),
    Parsed("", (tool_calls.call("f", {}) | {"function": {"name": "f"}},)),
  ):
    with pytest.raises(TypeError, match="the parser of tool calls returned"):
      parse("", lambda text, tools, wrong=wrong: wrong)
  with pytest.raises(ValueError, match="unknown form of tool calls 'herms'; there are: hermes"):
    parse("", "herms")


def test_deep_json_is_malformed_whatever_the_depth():
  for depth in (70, 900, 100_000):
    text = (
      '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
    )
    assert "nested more than 64 deep" in reasons(parse(text, "hermes"))
  digits = '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"
  assert "more than 300 digits" in reasons(parse(digits, "hermes"))


HOSTILE = (
  "<tool_call>",
  "<tool_call>[",
  '<tool_call>{"name":"',
  '<tool_call>["<tool_call>[",',
  "</tool_call>",
  "</think>",
  "<think>",
  "<|im_end|>",
  "<tool_call><function=f><parameter=a>",
  "<tool_call>f<arg_key>a</arg_key><arg_value>",
  "<|start|>assistant to=functions.a<|message|>",
  ' {"name": "f", "parameters": {"a":',
  "<|python_tag|>",
  " \n",
  "\\ud800",
  '<tool_call>{"name":"f"}</tool_call></think>',
)


@pytest.mark.parametrize("form", tool_calls.FORMS)
def test_a_mebibyte_of_hostile_text_is_parsed_at_once(form):
  started = time.monotonic()
  for part in HOSTILE:
    found = parse(part * ((1 << 20) // len(part)), form)
    assert len(found.calls) <= MAX_CALLS and len(found.malformed) <= MAX_CALLS + 1
    assert sum(len(each.reason) + len(each.name) for each in found.malformed) < 10_000
  assert time.monotonic() - started < 20  # about 0.2 s; quadratic would be an hour.


@pytest.mark.parametrize(
  ("template", "form"),
  [
    ('{% for t in tools %}{% endfor %}<tool_call>{"name", "arguments"}</tool_call>', "hermes"),
    ("{{ tools }}<tool_call><function=f><parameter=a></tool_call> arguments", "qwen3_coder"),
    ("{{ tools }}<tool_call><arg_key><arg_value></tool_call> arguments", "glm4_moe"),
    ('{{ tools }}ipython \'{"name": "\' \'"parameters": \'', "llama3"),
    ("{{ tools }}<|channel|> functions.", "gpt_oss"),
    ("{{ messages }}<tool_call></tool_call> arguments", None),
    ("{{ tools }}", None),
  ],
)
def test_a_template_shows_its_form(template, form):
  assert tool_calls.form_of(template) == form
