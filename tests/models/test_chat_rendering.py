"""Chat templates render as in transformers, and what is wrong with one is said in one line."""

import json
import threading

import numpy as np
import pytest
import tokenizers
import transformers

from grpo_jax.models.chat.rendering import Renderer, TemplateError, TemplateRefusal

CHAT = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "2 + 2?"},
  {"role": "assistant", "content": "4", "reasoning": "Two and two."},
  {"role": "user", "content": "<é>", "name": None},
]
# Passages of published templates, and of whatever transformers adds to Jinja.
HONEST = {
  "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
  "trim": "{{- bos_token }}\n{%- for m in messages %}\n    {{- m.content | trim + '|' }}\n"
  "{%- endfor %}\n",
  "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
  "{% endfor %}{{ ns.n }}",
  "loopcontrols": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
  "{{ m.content }}{% endfor %}",
  "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
  "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
  "{% endfor %}",
  "reasoning": "{% for m in messages %}{% if m.reasoning_content is defined %}"
  "<think>{{ m.reasoning_content }}</think>{{ m.thinking }}{% endif %}{% endfor %}",
  "none": "{{ 'name' in messages[3] }}{{ tools is none }}{{ documents }}",
  "macro": "{% macro f(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ f(m) }}"
  "{% endfor %}",
  "dict": "{{ dict(a=1)['a'] }}{{ messages[0].get('x', 'y') }}{{ messages[::-1][0].role }}",
  "methods": "{{ messages[0].content.upper().split(' ')[0] ~ 'x'.startswith('x') }}",
}


@pytest.fixture(scope="module")
def oracle():
  """A tokenizer of transformers, for its own rendering."""
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
  return transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")


def test_arguments_of_calls_that_are_json_text_are_objects_in_templates():
  """As in SGLang and vLLM; a string within them stays a string."""
  template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
  renderer = Renderer(template, where="a.jinja")
  call = lambda arguments: {"type": "function", "function": {"name": "f", "arguments": arguments}}
  said = lambda *calls: [{"role": "assistant", "content": "", "tool_calls": [*map(call, calls)]}]
  inner = {"a": '{"b": 1}', "c": ["7", 1.0, None]}
  assert renderer.render(said(json.dumps(inner), " "), {}).text == json.dumps(inner) + "{}"
  assert renderer.render(said(inner), {}).text == json.dumps(inner)
  deep = '{"a":' * 300 + "1" + "}" * 300
  for wrong in ('{"a": ', "[1]", "7", "null", "text", "[" * 100_000, deep):
    with pytest.raises(TemplateRefusal, match=r"a\.jinja.*arguments of a tool call are not a JSON"):
      renderer.render(said(wrong), {})
  assert renderer.render([{"role": "assistant", "content": "", "tool_calls": []}], {}).text == ""
  for odd in ("text", [1, {"function": 2}, {"function": {}}]):  # a template may refuse these.
    messages = [{"role": "assistant", "content": "", "tool_calls": odd}]
    assert Renderer("x", where="a.jinja").render(messages, {}).text == "x"


@pytest.mark.parametrize("name", HONEST)
def test_honest_templates_render_as_transformers_does(name, oracle):
  theirs = oracle.apply_chat_template(
    CHAT, chat_template=HONEST[name], tokenize=False, add_generation_prompt=True
  )
  variables = {"bos_token": "<s>", "add_generation_prompt": True, "tools": None, "documents": None}
  renderer = Renderer(HONEST[name], where="a.jinja")
  assert renderer.render(CHAT, variables).text == theirs


HOSTILE = {
  "multiplied": ("{{ 'a' * 10 ** 18 }}", "needs more memory than there is"),
  "indent": ("{{ messages | tojson(indent=10 ** 18) }}", "needs more memory than there is"),
  "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
  "macros": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply"),
  "nested": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "too deeply"),
  "class": ("{{ messages.__class__.__mro__ }}", "unsafe"),
  "globals": ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
  "attr": ("{{ (messages | attr('__class__')).__mro__ }}", "fails"),
  "format-attr": ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
  "mutate": ("{{ messages.append(1) }}", "unsafe"),
  "include": ("{% include '/etc/passwd' %}", "fails"),
  "import": ("{% import 'os' as os %}", "fails"),
  "namespace": ("{% set n = namespace(__class__=1) %}", "fails"),
  "syntax": ("{% if", "line 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_and_hostile_templates_end_in_one_line(name):
  template, message = HOSTILE[name]
  with pytest.raises(TemplateError, match=f"^a.jinja: .*(?:{message})") as raised:
    Renderer(template, where="a.jinja").render(CHAT, {})
  assert "\n" not in str(raised.value) and len(str(raised.value)) < 700


def test_a_refusal_is_of_the_conversation_and_not_of_the_template():
  template = "{% if messages[0].role != 'user' %}{{ raise_exception('no system') }}{% endif %}ok"
  renderer = Renderer(template, where="a.jinja")
  with pytest.raises(TemplateRefusal, match="a.jinja: .*line 1: TemplateError: no system"):
    renderer.render(CHAT, {})
  assert renderer.render(CHAT[1:], {}).text == "ok"
  with pytest.raises(TemplateRefusal, match="at least one message"):
    renderer.render([], {})


def test_long_texts_are_cut_and_counted():
  renderer = Renderer("{% for m in messages %}{{ m.content }}{% endfor %}", where="a.jinja")
  chat = [{"role": "user", "content": "é🙂" * 1_000_000}] * 2
  found = renderer.render(chat, {}, max_characters=10)
  assert (found.text, found.characters > 10) == ("é🙂" * 5, True)
  assert renderer.render(chat, {}).text == "é🙂" * 2_000_000
  assert renderer.render([{"role": "user", "content": "\ud800"}], {}).text == "\ud800"


def test_values_that_json_does_not_have_reach_templates_as_plain_ones():
  renderer = Renderer("{{ messages[0].content + 1 }} {{ x }} {{ y }}", where="a.jinja")
  message = {"role": "user", "content": np.int64(1)}
  assert renderer.render([message], {"x": np.float32(0.5), "y": object()}).text == "2 0.5 <object>"


def test_threads_share_a_renderer():
  renderer, found = Renderer("{{ messages[0].content }}", where="a.jinja"), {}

  def render(number):
    texts = [renderer.render([{"role": "user", "content": f"{number}"}], {}) for _ in range(50)]
    found[number] = {text.text for text in texts}

  threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == {number: {str(number)} for number in range(4)}
