"""Chat templates of exports: transformers renders with them what the run has rendered."""

import json
import keyword

import jinja2
import pytest
import transformers
from transformers.utils import chat_template_utils

from grpo_jax.data import exported_templates, tokenizer
from grpo_jax.models import export, files, tiny
from grpo_jax.models.chat import exported
from grpo_jax.models.chat.rendering import TemplateError, TemplateRefusal
from tests.data import beginnings, chat_templates, small_templates

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHATS = (
  [{"role": "user", "content": "hi"}],
  [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hi\n"}],
  [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>\nx\n</think>\n\nb"},
    {"role": "user", "content": "c"},
  ],
  [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "add"},
  ],
)
ARGUMENTS = (
  {},
  {"enable_thinking": False, "add_vision_id": True},
  {"enable_thinking": True, "date_string": "01 Jan 2020", "reasoning_effort": "high"},
  {"bos_token": "<|im_end|>", "eos_token": "e", "thinking": None, "not": 1, "no-name": 2},
)
# Variables in a macro, a loop, a condition and text; text and blanks at the beginning.
VARIABLES = (
  "\n  {% if flag %}{{ flag | tojson }}{% endif %}\n{% macro m(x) %}{{ flag }}{{ x }}{% endmacro %}"
  "{% if other is not defined %}{% set other = 'o' %}{% endif %}"
  "{% for message in messages %}{% generation %}{{ m(message.content) }}{{ other }}"
  "{{ bos_token }}{{ eos_token }}{% endgeneration %}\n{% endfor %}"
)


@pytest.fixture
def base(tmp_path):
  """A folder with a tokenizer."""
  (tmp_path / "base").mkdir()
  tiny.write_tokenizer(tmp_path / "base")
  return tmp_path / "base"


def written(base, made, folder):
  """Writes the tokenizer and templates of an export; returns transformers' tokenizer of it."""
  folder.mkdir(exist_ok=True)
  export.copy_tokenizer(base, folder)
  if templates := exported_templates.of(made):
    export.write_templates(templates, folder)
  return transformers.AutoTokenizer.from_pretrained(folder)


def rendered(one, chat, tools):
  """Returns what our tokenizer or transformers' writes; None: it refuses."""
  try:
    if isinstance(one, tokenizer.HuggingFaceTokenizer):
      return one.apply_chat_template(chat, tools=tools).tolist()
    return one.apply_chat_template(chat, tools=tools or None, add_generation_prompt=True).input_ids
  except Exception:  # jinja's, or ours.
    return None


@pytest.mark.long
def test_every_template_renders_as_in_the_run(base, tmp_path):
  """With variables, tools and several turns; in transformers, and read by us again."""
  sources = {**small_templates.SMALL, "variables": VARIABLES, **chat_templates.public()}
  wrong = []
  for name, source in sources.items():
    for values in (*ARGUMENTS, {"flag": [{"a": 'x"\\\n{% %}é🙂'}, 1e-7, None, -3, True]}):
      made = tokenizer.load(base, chat_template=str(source), template_args=values)
      theirs = written(base, made, tmp_path / "out")
      again = tokenizer.load(tmp_path / "out")
      for chat in CHATS:
        for tools in ([], [TOOL]):
          wanted = rendered(made, chat, tools)
          if wanted is None and tools:
            continue  # we refuse templates that ignore tools.
          if not wanted == rendered(theirs, chat, tools) == rendered(again, chat, tools):
            wrong.append((name, values, chat, tools))
  assert not wrong


def test_without_a_template_the_export_has_one_that_writes_the_same(tmp_path):
  for kind in beginnings.KINDS:
    folder = tmp_path / kind
    folder.mkdir()
    made = tokenizer.load(beginnings.write(kind, folder), chat_template="plain")
    theirs = written(folder, made, tmp_path / f"{kind}_out")
    for chat in CHATS[:3]:
      assert rendered(made, chat, []) == rendered(theirs, chat, []), (kind, chat)
    with pytest.raises(TemplateRefusal):
      made.render(CHATS[0], tools=[TOOL])
    assert rendered(theirs, CHATS[0], [TOOL]) is None


def test_a_beginning_that_no_template_can_write_is_reported(tmp_path, monkeypatch):
  made = tokenizer.load(beginnings.write("llama3", tmp_path), chat_template="plain")
  monkeypatch.setattr(made, "decode", lambda ids, **_: "<b>")  # not the text of the token.
  with pytest.raises(TemplateError, match="no chat template can write.*'<b>'"):
    exported_templates.of(made)


def test_an_unchanged_template_is_copied_with_all_named_ones(base, tmp_path):
  (base / "additional_chat_templates").mkdir()
  (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
  (base / "chat_template.jinja").write_text("default")
  made = tokenizer.load(base)
  theirs = written(base, made, tmp_path / "out")
  assert theirs.chat_template == {"default": "default", "tool_use": "{{ tools | tojson }}"}
  assert rendered(made, CHATS[0], [TOOL]) == rendered(theirs, CHATS[0], [TOOL])


@pytest.mark.parametrize("form", ["files", "list"])
def test_named_templates_get_the_variables_and_are_replaced_by_another_template(
  base, tmp_path, form
):
  """As transformers 5 stores them, and in the list that transformers 4 reads."""
  named = {"default": "D{{ x }}", "tool_use": "T{{ x }}{{ tools | tojson }}", "../rag": "R{{ x }}"}
  settings = files.read_json(base / "tokenizer_config.json")
  settings.pop("chat_template")
  if form == "list":
    settings["chat_template"] = [{"name": k, "template": text} for k, text in named.items()]
  else:
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    (base / "chat_template.jinja").write_text(named["default"])
    (base / "chat_template.json").write_text("{}")
  (base / "tokenizer_config.json").write_text(json.dumps(settings))
  made = tokenizer.load(base, template_args={"x": 7})
  theirs = written(base, made, tmp_path / "out")
  for tools in ([], [TOOL]):
    assert rendered(made, CHATS[0], tools) == rendered(theirs, CHATS[0], tools)
  assert theirs.decode(rendered(theirs, CHATS[0], [])) == "D7"
  reported = files.read_json(tmp_path / "out" / "tokenizer_config.json").get("chat_template")
  assert ([each["name"] for each in reported] if form == "list" else reported) == (
    ["default", "tool_use"] if form == "list" else None
  )
  other = tokenizer.load(base, chat_template="{{ messages[0].content }}!")
  theirs = written(base, other, tmp_path / "out")
  assert theirs.chat_template == "{{ messages[0].content }}!"
  names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
  assert not names & {"tool_use.jinja", "rag.jinja", "chat_template.json"}
  assert not (tmp_path / "rag.jinja").exists()


def test_a_caller_may_still_set_the_variables(base, tmp_path):
  made = tokenizer.load(base, chat_template="{{ x }}{{ y }}", template_args={"x": 1, "y": 2})
  theirs = written(base, made, tmp_path / "out")
  assert theirs.apply_chat_template(CHATS[0], x=5, tokenize=False) == "52"


def test_every_name_that_a_template_can_read_is_kept():
  """Jinja is the oracle: names of which a template reads the value, among all words of Python."""
  environment = chat_template_utils._compile_jinja_template("").environment
  for name in (*keyword.kwlist, *keyword.softkwlist, "none", "namespace", "_x", "é", "x-y", "0x"):
    kept = exported.with_variables("", {name: 7}, fixed=())
    try:
      read = environment.from_string(f"{{{{ {name} }}}}").render(**{name: 7})
    except jinja2.TemplateError:
      read = ""
    if kept:
      again = environment.from_string(f"{kept}{{{{ {name} }}}}").render()
      assert again == (read if name != "namespace" else again), name
    else:
      assert read != "7", name


def test_values_that_only_python_has_are_written_as_jinja_reads_them():
  text = exported.with_variables("", {"a": float("inf"), "b": (1, -float("inf"))}, fixed=())
  assert text == (
    "{%- set a = a if a is defined else 1e999 %}\n"
    "{%- set b = b if b is defined else [1, -1e999] %}\n"
  )
