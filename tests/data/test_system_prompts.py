"""System prompts and chat templates without a system role: merged or refused, never lost."""

import json

import pytest

from grpo_jax.data import prompts
from grpo_jax.data.formats import RowError
from tests.data import chat_templates
from tests.data.small_templates import SMALL

SYSTEM, ASKED = "Count with care.", "2 + 2?"
# As Gemma 3's: the system's message is the beginning of the user's.
MERGES = (
  "{{ bos_token }}{% if messages[0].role == 'system' %}"
  "{% set first = messages[0].content + '\n\n' %}"
  "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
  "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>{{ m.role }}\n"
  "{{ (first if loop.first else '') + m.content | trim }}<end_of_turn>\n{% endfor %}"
)
ROWS = {
  "config": ({"problem": ASKED, "expected_answer": "4"}, {"system_prompt": SYSTEM}),
  "row": (
    {
      "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}],
      "expected_answer": "4",
    },
    {},
  ),
}


def prompt(template, tmp_path, *, of="config", **settings):
  row, fields = ROWS[of]
  made = chat_templates.make(template, chat_templates.STOPS["gemma3"], where="gemma.jinja")
  file = tmp_path / "rows.json"
  file.write_text(json.dumps([row]))
  return prompts.open_dataset(made, path=file, **{**fields, **settings}).prompt(0, epoch=0)


@pytest.mark.parametrize("of", ROWS)
def test_a_template_that_merges_the_system_prompt_into_the_question_is_used(of, tmp_path):
  wanted = f"<bos><start_of_turn>user\n{SYSTEM}\n\n{ASKED}<end_of_turn>\n"
  assert prompt(MERGES, tmp_path, of=of).text == wanted


@pytest.mark.parametrize("of", ROWS)
def test_a_template_that_refuses_system_prompts_is_refused_with_what_helps(of, tmp_path):
  wanted = r"gemma.jinja: .*must alternate.*refuses messages of role 'system'; .*prompt_template"
  with pytest.raises(RowError, match=wanted):
    prompt(SMALL["alternates"], tmp_path, of=of)
  fields = {"prompt_template": SYSTEM + "\n\n{}"}
  if of == "config":
    found = prompt(SMALL["alternates"], tmp_path, system_prompt=None, **fields)
    assert f"{SYSTEM}\n\n{ASKED}" in found.text


@pytest.mark.parametrize("of", ROWS)
def test_a_template_that_leaves_system_prompts_out_is_refused(of, tmp_path):
  silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
  with pytest.raises(RowError, match="leaves out messages of role 'system'; .*prompt_template"):
    prompt(silent, tmp_path, of=of)
  assert prompt(silent, tmp_path, system_prompt=None).text == ASKED


def test_a_template_that_refuses_anything_is_not_blamed_for_the_system_prompt(tmp_path):
  with pytest.raises(RowError, match="fails: .*never") as error:
    prompt("{{ raise_exception('never') }}", tmp_path)
  assert "role 'system'" not in str(error.value)
