"""Keeps credentials out of what leaves the machine: configurations, reports, messages."""

import html
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from grpo_jax import errors
from grpo_jax.http import redaction
from grpo_jax.http.redaction import MASK
from grpo_jax.values import json_text

_SHORTEST = 6  # characters; shorter values would be found in any text.
_WORDS = "password|passwd|secret|credentials?|authorization|bearer"
# api_key, HF_TOKEN, --admin-api-key; but not input_key, max_tokens, tokens.
_SECRET_FIELD = re.compile(
  rf"(?i)({_WORDS}|(api|access|secret|private|auth|write)[_-]?(key|token)|(^|[_-])token$)"
)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH")
_NOT_SECRET = re.compile(r"(_PATH|_FILE|_DIR|_SOCK|TOKENIZERS?_\w+)$")
_OPTION = re.compile(r"^(--?[\w-]+)=(.+)$", re.DOTALL)
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(rf"(?i)(?<=[?&])((?:{_WORDS}|[\w-]*token|[\w-]*key|sig|signature)=)[^&\s#\"']+")


def of_environment() -> set[str]:
  """Returns the values of the environment variables whose names speak of a secret."""
  return {
    value
    for name, value in os.environ.items()
    if _is_secret_variable(name) and len(value) >= _SHORTEST
  }


class Masked:
  """A configuration without its secrets. They are then masked in other texts as well.

  Secret are values of fields such as `api_key`, `token` or `password`, of variables such as
  `HF_TOKEN`, of options such as `--api-key=`, users and passwords in addresses, and whatever
  equals the value of an environment variable of such a name.
  """

  def __init__(self, config: Mapping[str, Any]):
    """Masks a configuration of JSON values."""
    self._secrets = of_environment()
    self._collect(config)
    self.config: dict[str, Any] = self._masked(config)

  def text(self, text: str) -> str:
    """Returns text of any format without the secrets."""
    for secret in sorted(self._secrets, key=len, reverse=True):
      for spelling in {secret, html.escape(secret), json.dumps(secret)[1:-1], quote(secret)}:
        text = text.replace(spelling, MASK)
    return _QUERY.sub(rf"\g<1>{MASK}", _USER.sub(MASK, text))

  def _collect(self, value: Any, name: str = "") -> None:
    """Adds the secrets among the values of a field and below it."""
    if isinstance(value, Mapping):
      for key, each in value.items():
        self._collect(each, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
      for before, each in zip(["", *value], value, strict=False):
        is_option = isinstance(before, str) and before.startswith("-")
        self._collect(each, before.lstrip("-") if is_option else name)
    elif isinstance(value, str):
      if option := _OPTION.match(value):
        name, value = option[1].lstrip("-"), option[2]
      is_secret = _SECRET_FIELD.search(name) or _is_secret_variable(name)
      if is_secret and len(value) >= _SHORTEST:
        self._secrets.add(value)

  def _masked(self, value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
      return {str(key): self._masked(each, str(key)) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
      return [self._masked(each, name) for each in value]
    if not isinstance(value, str) or not value:
      return value
    is_secret = _SECRET_FIELD.search(name) or _is_secret_variable(name)
    return MASK if is_secret else self.text(value)


def read_config(workdir: Path) -> Masked:
  """Returns the configuration of a run folder; empty if it cannot be read."""
  try:
    config = json_text.parsed((workdir / "config.json").read_bytes())
  except (OSError, ValueError):
    config = {}
  return Masked(config if isinstance(config, dict) else {})


def shown_error(error: BaseException, secrets: Iterable[str] = ()) -> str:
  """Returns an exception as one line of printable characters, without secrets.

  If user code raised it, the line begins with file and line of that code.
  """
  text = errors.place_and_reason(error)
  for secret in {*secrets, *of_environment()}:
    text = redaction.without(text, secret)
  text = _QUERY.sub(rf"\g<1>{MASK}", _USER.sub(MASK, text))
  return redaction.shown(text)


def _is_secret_variable(name: str) -> bool:
  """Whether a name in capitals, as of environment variables, speaks of a secret."""
  if name != name.upper() or _NOT_SECRET.search(name):
    return False
  return bool(_SECRET_VARIABLE.search(name))
