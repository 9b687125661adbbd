"""Chat templates as the text that they write for conversations."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.models.chat import exported
from grpo_jax.models.chat.rendering import Rendered, Renderer, TemplateRefusal
from grpo_jax.models.chat.tokenizer_files import OpenedTokenizer
from grpo_jax.models.errors import ModelError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}.
PLAIN = "plain"  # as `chat_template`: no template, the contents of the messages, line by line.

_PROBE = "xProbeOfToolsx"  # a name that no template writes.
_PROBE_TOOL = {
  "type": "function",
  "function": {
    "name": _PROBE,
    "description": "?",
    "parameters": {"type": "object", "properties": {}},
  },
}


class ChatTemplate:
  """The chat template of a model."""

  def __init__(self, opened: OpenedTokenizer, variables: Mapping[str, Any]):
    """Describes the template; nothing is rendered before it is needed.

    Args:
      opened: Files of the tokenizer. Without a template, writing raises ModelError.
      variables: Further variables of the template, such as `enable_thinking`.
    """
    self.where = opened.template_file
    self._opened, self._given = opened, variables
    self._variables = {**opened.backend.special_tokens_map, **variables}
    self._folder = opened.backend.name_or_path
    self._renderer = self._tools_renderer = None
    if opened.template:
      self._renderer = self._tools_renderer = Renderer(opened.template, where=self.where)
    if opened.tools_template:
      self._tools_renderer = Renderer(opened.tools_template, where=self.where)

  def write(
    self,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    begin_assistant: bool = True,
    max_characters: int | None = None,
  ) -> Rendered:
    """Writes a conversation.

    Args:
      messages: The conversation.
      tools: Tools that the model may call.
      begin_assistant: Whether the beginning of the assistant's next turn is written.
      max_characters: Length to which the text is cut; None: it is not cut.

    Raises:
      TemplateRefusal: The template rejects the conversation, or ignores the tools.
      TemplateError: The template is broken.
      ModelError: There is no template.
    """
    self.require(tools)
    return self._rendered(messages, tools, begin_assistant, max_characters)

  def exported(self) -> dict[str, str]:
    """Returns templates by name, for other programs, that write what this one does; empty if those
    of the folder do."""
    own = self._opened.named or {"default": self._opened.template or ""}
    if not self._opened.template or (self._opened.named and not self._given):
      return {}
    fixed = self._opened.backend.special_tokens_map
    return {
      name: exported.with_variables(template, self._given, fixed=fixed)
      for name, template in own.items()
    }

  def require(self, tools: Sequence[Tool]) -> None:
    """Raises TemplateRefusal if there are tools and the template ignores them."""
    if tools and self._ignores_tools:
      raise TemplateRefusal(
        f"{self.where}: the chat template does not write tools; use another template"
        " (model.chat_template=FILE), or describe the tools in the prompt and declare none"
      )

  @functools.cached_property
  def _ignores_tools(self) -> bool:
    try:
      text = self._rendered([{"role": "user", "content": "?"}], [_PROBE_TOOL], True, None).text
    except TemplateRefusal:  # the template rejects this conversation; others may work.
      return False
    return _PROBE not in text

  def _rendered(
    self,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    begin_assistant: bool,
    max_characters: int | None,
  ) -> Rendered:
    renderer = self._tools_renderer if tools else self._renderer
    if renderer is None:
      raise ModelError(
        f"the tokenizer in {self._folder!r} has no chat template; set model.chat_template to a"
        f" .jinja file or a template, or to {PLAIN!r} for none (base models)"
      )
    variables = {
      **self._variables,
      "tools": [dict(tool) for tool in tools] or None,
      "documents": None,
      "add_generation_prompt": begin_assistant,
    }
    found = renderer.render(messages, variables, max_characters=max_characters)
    try:
      found.text.encode()
    except UnicodeEncodeError as error:
      raise TemplateRefusal(
        f"{self.where}: the chat template writes half a surrogate pair"
      ) from error
    return found
