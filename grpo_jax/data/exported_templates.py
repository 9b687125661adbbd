"""The chat templates of an export: other programs write the prompts of a run with them."""

from collections.abc import Mapping

import numpy as np

from grpo_jax.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from grpo_jax.models.chat import exported
from grpo_jax.models.chat.rendering import Renderer, TemplateError
from grpo_jax.models.chat.template import ChatTemplate

_PROBES = ("1 + 1 = ?", " a", "\na", "")  # texts that a tokenizer may begin differently.


def of(tokenizer: Tokenizer) -> Mapping[str, str]:
  """Returns templates by name that write what a tokenizer's own template writes.

  Returns:
    The templates, one of them named "default"; empty: the templates of the folder do so.

  Raises:
    TemplateError: The tokenizer has no template, and a template cannot write what its texts begin
      with.
  """
  if not isinstance(tokenizer, HuggingFaceTokenizer):
    return {}
  if isinstance(tokenizer.template, ChatTemplate):
    return tokenizer.template.exported()
  first = tokenizer.decode(tokenizer.beginning, skip_special=False)
  for template in exported.plain(first):
    if _is_alike(Renderer(template, where="the template of the export"), tokenizer):
      return {"default": template}
  raise TemplateError(
    f"no chat template can write what the tokenizer puts at the beginning of texts ({first!r})"
  )


def _is_alike(renderer: Renderer, tokenizer: HuggingFaceTokenizer) -> bool:
  """Returns whether the tokens of a template's output are those of the tokenizer's prompts."""
  conversations = [
    [{"role": "system", "content": text}, {"role": "user", "content": f"{text}b"}]
    for text in _PROBES
  ]
  return all(
    np.array_equal(
      tokenizer.encode(renderer.render(messages, {}).text),
      tokenizer.apply_chat_template(messages),
    )
    for messages in conversations
  )
