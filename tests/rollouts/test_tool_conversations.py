"""Conversations with declared tools, through chat templates: token ids, masks, every failure."""

import json

import numpy as np
import pytest

from grpo_jax import data, environments
from grpo_jax.building import groups
from grpo_jax.config import configuration
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.environments import isolation
from grpo_jax.models.chat import tool_calls
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
from grpo_jax.types import Prompt
from tests.data import chat_templates, small_templates

PUBLIC = chat_templates.public()
ASKED = ({"role": "user", "content": "What is 6 * 7?"},)
LLAMA3 = (  # a small template with the calls of Llama 3.1: one call a turn, answers of ipython.
  "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
  "{{ raise_exception('one call at once') }}{% endif %}<|start_header_id|>assistant"
  "<|end_header_id|>\n\n{{ '{\"name\": \"' + m.tool_calls[0].function.name + '\", ' }}"
  "{{ '\"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}<|eot_id|>"
  "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
  "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
  "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}<|eot_id|>{% endif %}"
  "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
  "{% endif %}"
)
TEMPLATES = {
  "hermes": small_templates.SMALL["keeps"],
  "llama3": LLAMA3,
  "gpt_oss": small_templates.SMALL["channels"],
}
STOPS = {
  "hermes": ("<|im_end|>",),
  "llama3": ("<|eot_id|>",),
  "gpt_oss": ("<|return|>", "<|call|>"),
}


def hermes(name, arguments):
  written = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>\n{written}\n</tool_call>"


# What a model writes to call, in each form: (name, arguments) → text.
CALLS = {
  "hermes": hermes,
  "llama3": lambda name, arguments: json.dumps({"name": name, "parameters": arguments}),
  "gpt_oss": lambda name, arguments: (
    f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    + json.dumps(arguments)
  ),
  "qwen3_coder": lambda name, arguments: (
    f"<tool_call>\n<function={name}>\n"
    + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    + "</function>\n</tool_call>"
  ),
  "glm4_moe": lambda name, arguments: (
    f"<tool_call>{name}\n"
    + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    + "</tool_call>"
  ),
}
FINAL = {"gpt_oss": "<|channel|>final<|message|>"}  # before the text of an answer.
ENDS_OF_CALLS = {"gpt_oss": "<|call|>", "glm4_moe": "<|observation|>"}


def talk(tokenizer, texts, ends, *, prompt=None, max_turns=9, max_tokens=None, **settings):
  """Holds one conversation in which the model writes the given texts; returns its rollout."""
  ids = [
    np.append(tokenizer.encode(text), tokenizer.encode(end))
    for text, end in zip(texts, ends, strict=True)
  ]
  engine = FakeEngine(
    np.zeros((tokenizer.vocab_size, tokenizer.vocab_size)),
    script=lambda request: ids[int(request.request_id.rpartition(".")[2])],
    decode=lambda tokens: tokenizer.decode(tokens, skip_special=False),
  )
  settings = {"tools": ("calculator", "tests.environments.my_tools"), "answer": "tag", **settings}
  with environments.make(tool_use=settings) as made:
    tools = made["tool_use"].tools
    text = tokenizer.render(ASKED, tools=tools)
    prompt = prompt or Prompt(
      "p:0:0",
      tokenizer.encode(text),
      "tool_use",
      {"expected_answer": "42"},
      text=text,
      messages=ASKED,
      tools=tuple(tools),
    )
    (group,) = collect_sync(
      engine,
      made,
      [prompt],
      tokenizer,
      step=0,
      group_size=1,
      seed=0,
      sampling=SamplingParams(max_tokens=max_tokens or 4000, stop_ids=tokenizer.stop_ids),
      limits=AttemptLimits(max_turns=max_turns, max_tokens=None, max_error_share=1.0),
    )
  return group.rollouts[0], ids


def made(form):
  return chat_templates.make(TEMPLATES[form], STOPS[form])


def written_parts(rollout, tokenizer):
  """Returns the texts between sampled turns, special tokens included."""
  edges = np.flatnonzero(np.diff(rollout.loss_mask.astype(int))) + 1
  parts = np.split(rollout.completion_ids, edges)
  return [tokenizer.decode(part, skip_special=False) for part in parts[1::2]]


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_call_is_answered_as_the_template_has_tool_messages(form):
  tokenizer = made(form)
  assert tokenizer.tool_form == form
  call = CALLS[form]("calculator", {"expression": "6 * 7"})
  last = f"{FINAL.get(form, '')}It is <answer>42</answer>."
  ends = [ENDS_OF_CALLS.get(form, STOPS[form][0]), STOPS[form][0]]
  rollout, ids = talk(tokenizer, [call, last], ends)

  # The sampled ids, with only the template's tokens between them, which are not learned from.
  sampled = rollout.completion_ids[rollout.loss_mask]
  np.testing.assert_array_equal(sampled, np.concatenate(ids))
  (between,) = written_parts(rollout, tokenizer)
  assert (
    between
    == {
      "hermes": "\n<|im_start|>user<tool_response>\n42\n</tool_response><|im_end|>\n"
      "<|im_start|>assistant\n",
      "llama3": '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
      "<|start_header_id|>assistant<|end_header_id|>\n\n",
      "gpt_oss": "<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"
      '"42"<|end|><|start|>assistant',
    }[form]
  )
  assert (rollout.reward, rollout.turns, rollout.error) == (1.0, 2, "")
  assert rollout.metrics["calls"] == rollout.metrics["used_tool"] == 1.0
  assert rollout.metrics["failed_calls"] == rollout.metrics["malformed_calls"] == 0.0


@pytest.mark.skipif(not PUBLIC, reason="GRPO_JAX_CHAT_TEMPLATES names no folder of templates")
def test_conversations_through_the_templates_of_public_models():
  tried = []
  for name, file in PUBLIC.items():
    stops = chat_templates.STOPS.get(name, chat_templates.CHATML_STOPS)
    tokenizer = chat_templates.make(file.read_text(), stops, where=file.name)
    form = tokenizer.tool_form
    if form is None:
      continue
    tried.append(name)
    call = CALLS[form]("calculator", {"expression": "6 * 7"})
    bad = CALLS[form]("calculator", {"wrong": "6 * 7"})
    last = f"{FINAL.get(form, '')}<answer>42</answer>"
    end = "<|eot_id|>" if form == "llama3" else stops[-1]
    of_calls = ENDS_OF_CALLS.get(form, end)
    rollout, ids = talk(tokenizer, [bad, call, last], [of_calls, of_calls, end])
    assert (rollout.error, rollout.reward, rollout.turns) == ("", 1.0, 3), (name, rollout.error)
    np.testing.assert_array_equal(
      rollout.completion_ids[rollout.loss_mask], np.concatenate(ids), err_msg=name
    )
    first, second = written_parts(rollout, tokenizer)
    assert "unknown argument 'wrong'" in first.replace('\\"', '"') and "42" in second
  assert {"qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe"} <= {*tried}


@pytest.mark.skipif(not PUBLIC, reason="GRPO_JAX_CHAT_TEMPLATES names no folder of templates")
def test_what_public_templates_write_of_calls_is_parsed_back():
  tool = {
    "type": "function",
    "function": {
      "name": "f",
      "description": "?",
      "parameters": {
        "type": "object",
        "properties": {
          "a": {"type": "integer"},
          "b": {"type": ["number", "null"]},
          "s": {"type": "string"},
          "l": {"type": "array"},
          "o": {"type": "object"},
          "t": {"type": "boolean"},
        },
      },
    },
  }
  arguments = {"a": -3, "b": None, "s": '3 "é" </tool_call> <x>\n', "l": [1.5, "u"], "t": True}
  calls = [
    tool_calls.call("f", {**arguments, "o": {"k": {}}}),
    tool_calls.call("f", {"s": "null", "a": 10**20}),
  ]
  forms = set()
  for name, file in PUBLIC.items():
    stops = chat_templates.STOPS.get(name, chat_templates.CHATML_STOPS)
    tokenizer = chat_templates.make(file.read_text(), stops, where=file.name)
    form = tokenizer.tool_form
    if form is None:
      continue
    forms.add(form)
    some = calls[:1] if form in ("llama3", "gpt_oss") else calls
    for content in ("", "I look."):
      said = {"role": "assistant", "content": content, "tool_calls": some}
      before = tokenizer.render(ASKED, tools=[tool])
      after = tokenizer._template.write([*ASKED, said], tools=[tool], begin_assistant=False).text
      common = next(
        (i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), len(before)
      )
      found = tool_calls.parse(after[common:].rstrip("\n"), form, tools=[tool])
      assert [each["function"] for each in found.calls] == [c["function"] for c in some], name
      assert found.malformed == () and (
        form == "llama3" or content in (found.content, found.reasoning)
      ), name
  assert forms == {*tool_calls.FORMS}


def test_parallel_calls_are_answered_in_order_and_failures_are_counted():
  tokenizer = made("hermes")
  first = "\n".join(
    [
      "Let me see.",
      hermes("calculator", {"expression": "1 / 0"}),
      hermes("returns", {"what": "text"}),
      hermes("nothing", {}),
      hermes("calculator", {}),
      "<tool_call>{bad</tool_call>",
      hermes("fails", {"how": "x"}),
    ]
  )
  texts = [first, "<tool_call>", "<answer>42</answer>"]
  rollout, _ = talk(tokenizer, texts, ["<|im_end|>"] * 3)
  answers, second = written_parts(rollout, tokenizer)
  found = [part.partition("\n</tool")[0] for part in answers.split("<tool_response>\n")[1:]]
  assert found[:2] == ["error: division by zero", "ü\nx"]
  assert found[2].startswith("error: there is no tool 'nothing'; there are: calculator, weather")
  assert found[3:] == [
    "error: calculator: the argument expression is missing",
    "error: fails: KeyError: 'x'",
    "error: malformed call: invalid JSON at character 2: Expecting property name enclosed in double"
    " quotes",
  ]
  assert second.count("<tool_response>") == 1 and "malformed call: invalid JSON" in second
  assert {name: value for name, value in rollout.metrics.items() if value} == {
    "accuracy": 1.0,
    "has_answer": 1.0,
    "calls": 5.0,
    "failed_calls": 4.0,
    "malformed_calls": 2.0,
    "unknown_tools": 1.0,
    "wrong_arguments": 1.0,
    "tool_errors": 2.0,
    "used_tool": 1.0,
  }


@pytest.mark.parametrize("form", ["llama3", "gpt_oss"])
def test_malformed_calls_are_answered_also_by_templates_of_one_call(form):
  tokenizer = made(form)
  bad = CALLS[form]("calculator", {"expression": "1"}).removesuffix("}")
  two = "; ".join([CALLS[form]("calculator", {"expression": "1"})] * 2)
  texts = [bad, two if form == "llama3" else bad, f"{FINAL.get(form, '')}<answer>42</answer>"]
  ends = [ENDS_OF_CALLS.get(form, STOPS[form][0])] * 2 + [STOPS[form][0]]
  rollout, _ = talk(tokenizer, texts, ends)
  assert (rollout.error, rollout.reward, rollout.metrics["malformed_calls"]) == ("", 1.0, 2.0)
  assert all("malformed call" in part for part in written_parts(rollout, tokenizer))


CALL = hermes("calculator", {"expression": "1"})


def test_ids_of_calls_are_unique_in_a_conversation():
  template = TEMPLATES["hermes"].replace(
    "{{ m.content }}\n</tool", "{{ m.content }} {{ m.tool_call_id }}\n</tool"
  )
  tokenizer = chat_templates.make(template, STOPS["hermes"])
  rollout, _ = talk(tokenizer, [CALL * 2, CALL, "<answer>42</answer>"], ["<|im_end|>"] * 3)
  first, second = written_parts(rollout, tokenizer)
  assert "call00000\n" in first and "call00001\n" in first and "call00032\n" in second


@pytest.mark.parametrize(
  ("texts", "settings", "rewards", "metrics"),
  [
    ([CALL, "<answer>41</answer>"], {}, 0.0, {"has_answer": 1.0, "accuracy": 0.0}),
    (["<think><answer>42</answer></think>No."], {}, 0.0, {"has_answer": 0.0}),
    ([CALL, CALL, f"<answer>42</answer>{CALL}"], {"max_calls": 2}, 0.0, {"calls": 2.0}),
    ([CALL * 3], {"max_calls": 2}, 0.0, {"calls": 0.0}),
    ([CALL, "<answer>42</answer>"], {"reward_wrong": -1.0}, 1.0, {}),
    ([CALL, CALL, "none"], {"reward_wrong": -1.0}, -1.0, {}),
    ([CALL, CALL], {"reward_wrong": -1.0, "max_turns": 2}, -1.0, {}),
    (["<tool_call>", CALL, CALL, "<answer>42</answer>"], {"call_reward": 0.25}, 1.25, {}),
    ([CALL, "wörds"], {"reward_function": "tests.rewards.vowels"}, None, {}),
  ],
)
def test_the_final_answer_is_judged(texts, settings, rewards, metrics):
  tokenizer = made("hermes")
  rollout, _ = talk(tokenizer, texts, ["<|im_end|>"] * len(texts), **settings)
  assert rollout.error == ""
  if rewards is not None:
    assert rollout.reward == rewards
  assert metrics.items() <= rollout.metrics.items()
  if "call_reward" in settings:
    assert rollout.reward_components == {"correct": 1.0, "call": 0.25}


def test_a_turn_that_is_cut_runs_no_call():
  tokenizer = made("hermes")
  length = len(tokenizer.encode(CALL))
  rollout, _ = talk(tokenizer, [CALL], ["<|im_end|>"], max_tokens=length)
  assert rollout.is_truncated and rollout.metrics["calls"] == 0.0 and rollout.reward == 0.0


def test_a_row_may_only_declare_tools_that_can_run():
  with environments.make(tool_use={"tools": ("calculator",)}) as made:
    factory = made["tool_use"]
    prompt = Prompt("p:0:0", np.zeros(1, np.int32), "tool_use", {"expected_answer": "4"})
    tools = [{"type": "function", "function": {"name": name}} for name in ("calculator", "search")]
    factory(Prompt(**{**vars_of(prompt), "tools": tuple(tools[:1])}))
    with pytest.raises(ValueError, match="p:0:0: its row declares the tool 'search', which this"):
      factory(Prompt(**{**vars_of(prompt), "tools": tuple(tools)}))


def vars_of(prompt):
  return {name: getattr(prompt, name) for name in ("prompt_id", "token_ids", "environment", "info")}


@pytest.mark.parametrize(
  ("settings", "reason"),
  [
    ({"tools": ("calculater",)}, "there is no tool 'calculater'"),
    ({"tools": "calculator"}, "tools must be a list"),
    ({"tools": ("calculator", "calculator")}, "two tools have the name 'calculator'"),
    ({"tools": ("calculator",), "observation_role": "tool"}, "belong to the calculator in the tex"),
    ({"tools": ("calculator",), "solved": 1.0}, "need reward_function"),
    ({"tools": ("calculator",), "reward_function": "tests.rewards.none"}, "has no function 'none'"),
    ({"reward_function": "tests.rewards.vowels"}, "reward_function needs declared tools"),
    ({"tools": ("calculator",), "tool_timeout_s": 0}, "tool_timeout_s must be a finite number"),
    ({"tools": ("calculator",), "answer": "tags"}, "did you mean 'tag'"),
  ],
)
def test_settings_that_cannot_work_are_refused(settings, reason):
  with pytest.raises(ValueError, match=reason):
    environments.make(tool_use=settings)


def test_an_unknown_form_of_calls_is_a_failure_that_says_what_to_set():
  tokenizer = made("hermes")
  tokenizer._tool_form = None
  rollout, _ = talk(tokenizer, [CALL], ["<|im_end|>"])
  assert rollout.failure == "RuntimeError" and "set model.tool_calls" in rollout.error


def test_a_parser_of_the_user_runs_in_the_thread_of_the_environment():
  def parser(text, tools):
    assert [tool["function"]["name"] for tool in tools][0] == "calculator"
    if text.startswith("raise"):
      raise LookupError("no form")
    calls = [tool_calls.call("calculator", {"expression": text[1:]})] if text[0] == "=" else []
    return tool_calls.Parsed(text, tuple(calls))

  tokenizer = made("hermes")
  tokenizer._tool_form = parser
  rollout, _ = talk(tokenizer, ["=6*7", "<answer>42</answer>"], ["<|im_end|>"] * 2)
  assert rollout.reward == 1.0 and "42" in written_parts(rollout, tokenizer)[0]
  rollout, _ = talk(tokenizer, ["raise"], ["<|im_end|>"])
  assert rollout.error.startswith("LookupError: no form\n") and "in parser" in rollout.error


@pytest.mark.parametrize(
  "tools",
  [
    ("calculator",),
    ({"name": "flat"},),
    ({"type": "web_search"},),
    ({"type": "function", "function": {}},),
    3,
  ],
)
def test_tools_of_an_environment_in_another_form_are_refused(tools):
  class Mine:
    def __call__(self, prompt):
      raise NotImplementedError

  factory = Mine()
  factory.tools = tools  # pyright: ignore[reportAttributeAccessIssue]
  made = environments.Environments({"mine": factory})
  with pytest.raises(configuration.ConfigError, match="environments.mine.tools|not iterable"):
    groups.with_tools(data.open_dataset, made)


def test_an_environment_without_tools_gets_text_as_before():
  heard = []

  class Listening:
    async def start(self):
      pass

    async def step(self, text, completion_ids, finish_reason):
      heard.append(text)
      return isolation.StepResult(1.0, done=True)

    async def close(self):
      pass

  tokenizer = made("hermes")
  prompt = Prompt("p:0:0", tokenizer.encode("?"), "mine", {})
  ids = np.append(tokenizer.encode(CALL), tokenizer.encode("<|im_end|>"))
  engine = FakeEngine(
    np.zeros((tokenizer.vocab_size, tokenizer.vocab_size)),
    script=lambda request: ids,
  )
  sampling = SamplingParams(max_tokens=4000, stop_ids=tokenizer.stop_ids)
  options = dict(
    step=0, group_size=1, seed=0, sampling=sampling, limits=AttemptLimits(max_tokens=None)
  )
  collect_sync(engine, {"mine": lambda prompt: Listening()}, [prompt], tokenizer, **options)
  assert heard == [CALL]
