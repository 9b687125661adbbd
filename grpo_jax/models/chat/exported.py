"""Chat templates for other programs, which render like a run with its own variables. Pure."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# Variables that the program that renders a template sets itself, and what transformers names so.
RESERVED = (
  *("messages", "tools", "documents", "add_generation_prompt"),
  *("conversations", "chat_template", "continue_final_message", "return_assistant_tokens_mask"),
)
# Words of Jinja, which cannot be names of variables.
_WORDS = ("not", "true", "false", "none")


def with_variables(template: str, values: Mapping[str, Any], *, fixed: Collection[str]) -> str:
  """Returns a template that writes what the given one writes with these variables.

  Args:
    template: Jinja source of the template.
    values: Values of the variables, such as {"enable_thinking": False}: those that a program gets
      that sets none. JSON has to be able to express them.
    fixed: Names of variables that every program sets, such as `bos_token`; here they are replaced.
  """
  lines = []
  for name, value in values.items():
    if name.isidentifier() and name.lower() not in _WORDS:
      kept = "" if name in fixed else f"{name} if {name} is defined else "
      lines.append(f"{{%- set {name} = {kept}{_literal(value)} %}}\n")  # Jinja drops the line end.
  return "".join(lines) + template


def plain(first: str) -> Iterator[str]:
  """Yields templates that join the contents of messages with line ends, as `plain.Plain` does.

  They differ in the blank between `first` and the text: none, one, or one unless the text has one.
  A tokenizer that begins texts with a blank of its own may need it after a special token.

  Args:
    first: Text of the tokens that the tokenizer puts first, such as BOS.
  """
  refusal = "this model was trained without a chat template, and so without tools"
  for blank in ("", " ", "{{- '' if text.startswith(' ') else ' ' }}") if first else ("",):
    yield (
      f"{{%- if tools %}}{{{{- raise_exception({_literal(refusal)}) }}}}{{% endif %}}\n"
      '{%- set text = messages | map(attribute="content") | join("\\n") ~ "\\n" %}\n'
      f"{{{{- {_literal(first)} }}}}{blank}{{{{ text }}}}"
    )


def _literal(value: Any) -> str:
  """Returns a value of JSON as Jinja writes it."""
  if isinstance(value, Mapping):
    pairs = (f"{_literal(str(name))}: {_literal(each)}" for name, each in value.items())
    return f"{{{', '.join(pairs)}}}"
  if isinstance(value, list | tuple):
    return f"[{', '.join(map(_literal, value))}]"
  if isinstance(value, str):  # a character that UTF-8 cannot express is escaped.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
  if value is None or isinstance(value, bool):
    return str(value).lower()
  return repr(value).replace("inf", "1e999").replace("nan", "(1e999 - 1e999)")
