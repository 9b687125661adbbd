"""Opens the tokenizer of a model folder, possibly untrusted, within limits (I/O)."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.errors import ExpectedFailure
from grpo_jax.models import files
from grpo_jax.models.chat import text_bounds
from grpo_jax.models.errors import MissingModel, ModelError
from grpo_jax.models.fields import Fields

_SETTINGS = (
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "generation_config.json",
  "config.json",
)
_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model")
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_LISTED = 12  # files of a folder that a message lists.
UNKNOWN = "\0"  # token of all text in which `finder` finds nothing.
_SHOWN = 400  # characters of another library's error that are shown.


class TokenizerFailure(ExpectedFailure, ValueError):
  """A tokenizer fails on a string; others may work."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
  """Raises TokenizerFailure for whatever a tokenizer raises within the block.

  Panics of its Rust library are not an Exception: they would end the run. That library prints the
  message of a panic on standard error, but no backtrace (`RUST_BACKTRACE`, see `_auto_tokenizer`).
  """
  try:
    yield
  except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
    raise
  except BaseException as error:
    raise TokenizerFailure(f"the tokenizer fails on a string: {_reason(error)}") from error


@dataclasses.dataclass(frozen=True)
class OpenedTokenizer:
  """A transformers tokenizer, and its chat template."""

  backend: Any
  template: str | None  # None: it has no template.
  template_file: str  # where the template is found, for errors.
  tools_template: str | None = None  # another one for conversations with tools; None: the same.
  # Templates of the folder by their names, these two ("default", "tool_use") and others; empty:
  # another template was given.
  named: Mapping[str, str] = dataclasses.field(default_factory=dict)


def open_folder(directory: str | Path, *, chat_template: str | None = None) -> OpenedTokenizer:
  """Opens the tokenizer of a local Hugging Face folder; code in the folder is never run.

  Args:
    directory: Folder with tokenizer.json (or anything that AutoTokenizer reads).
    chat_template: Name of a .jinja file, or the template itself; None: the tokenizer's own.

  Raises:
    MissingModel: The folder or the template file does not exist.
    ModelError: A file is too large, broken, or not supported by transformers.
  """
  directory = Path(directory)
  if not directory.is_dir():
    raise MissingModel(f"no tokenizer folder {directory}")
  if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZERS):
    present = ", ".join(sorted(each.name for each in directory.iterdir())[:_LISTED])
    raise MissingModel(
      f"there is no tokenizer in {directory}: it has none of {', '.join(_TOKENIZERS)}, only"
      f" {present or 'nothing'}; copy the tokenizer's files of the model into it"
    )
  _check_files(directory)
  backend = _backend(directory)
  if chat_template is None:
    found = _own_templates(backend, directory)
    file = _template_file(directory)
    return OpenedTokenizer(backend, found.get("default"), file, found.get("tool_use"), found)
  if chat_template.endswith(".jinja"):
    file = Path(chat_template)
    if not file.is_file():
      raise MissingModel(f"no chat template file {chat_template}")
    text = files.read_text(file, max_bytes=files.TEMPLATE_BYTES)
    return OpenedTokenizer(backend, text, chat_template)
  return OpenedTokenizer(backend, chat_template, "model.chat_template (the option)")


def description(backend: Any) -> dict[str, Any] | None:
  """Returns the content of a tokenizer.json; None for a tokenizer of another kind."""
  fast = getattr(backend, "backend_tokenizer", None)
  return None if fast is None else files.json_object(fast.to_str().encode(), "tokenizer")


def finder(tokens: Sequence[Any], normalizer: Any) -> Any:
  """Returns a tokenizer that knows nothing but these added tokens; other text is `UNKNOWN`.

  Args:
    tokens: Added tokens, as transformers' `added_tokens_decoder` has them.
    normalizer: Normalizer of their tokenizer; None: it has none.
  """
  from tokenizers import AddedToken, Tokenizer, models

  found = Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
  if normalizer is not None:
    found.normalizer = normalizer
  flags = ("single_word", "lstrip", "rstrip", "normalized")
  found.add_tokens(
    [AddedToken(t.content, **{name: getattr(t, name) for name in flags}) for t in tokens]
  )
  return found


def vocab_size(backend: Any) -> int:
  """Returns the number of ids, added tokens included; every id is smaller."""
  return max(len(backend), max(backend.get_vocab().values(), default=0) + 1)


def _check_files(directory: Path) -> None:
  """Raises ModelError for a file that is too large, or does not match its name."""
  for name in _SETTINGS:
    if (directory / name).exists():
      files.read_json(directory / name)
  for name in _VOCABULARIES:
    if (directory / name).exists():
      files.require(directory / name, max_bytes=files.VOCABULARY_BYTES)
  for file in (*directory.glob("*.jinja"), *directory.glob("additional_chat_templates/*")):
    files.require(file, max_bytes=files.TEMPLATE_BYTES)
  if (directory / "chat_template.json").exists():
    files.read_json(directory / "chat_template.json", max_bytes=files.TEMPLATE_BYTES)
  if (directory / "tokenizer.json").exists():
    _check_tokenizer(directory / "tokenizer.json")


def _check_tokenizer(file: Path) -> None:
  """Checks the parts of a tokenizer.json that the reading library does not check."""
  content = files.read_json(file, max_bytes=files.VOCABULARY_BYTES)
  fields = Fields(content, str(file))
  if not fields.section("model"):
    raise fields.wrong("model", "an object with a vocabulary")
  if text_bounds.is_bomb(content):
    raise ModelError(
      f"{file}: its normalizer turns one character into {text_bounds.growth(content)}, step by step"
    )


def _backend(directory: Path) -> Any:
  auto_tokenizer = _auto_tokenizer()
  try:
    backend = auto_tokenizer.from_pretrained(
      str(directory), local_files_only=True, trust_remote_code=False
    )
    vocab_size(backend)
    backend.decode(backend.encode("a", add_special_tokens=False))  # settings may fail only here.
    return backend
  except (KeyboardInterrupt, SystemExit, GeneratorExit):
    raise
  # Broken files raise various errors; panics of the Rust library are not an Exception.
  except BaseException as error:
    message = f"transformers cannot read a tokenizer in {directory}: {_reason(error)}"
    raise ModelError(message) from error


def _reason(error: BaseException) -> str:
  return " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]


def _auto_tokenizer() -> Any:
  """Imports transformers without its advice to install PyTorch, which is not needed here."""
  name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
  before = os.environ.get(name)
  os.environ[name] = "1"
  os.environ["RUST_BACKTRACE"] = "0"  # panics of the tokenizers' library are errors like others.
  try:
    from transformers import AutoTokenizer
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before
  return AutoTokenizer


def _own_templates(backend: Any, directory: Path) -> dict[str, str]:
  """Returns the folder's chat templates by name; a single one is named "default", as one of many
  must be."""
  found = backend.chat_template
  named = found if isinstance(found, Mapping) else {"default": found}
  if "default" not in named:
    raise ModelError(
      f"{_template_file(directory)}: has the chat templates {sorted(map(str, named))} and none"
      " named default; give one as model.chat_template"
    )
  for template in named.values():
    _check_template(template, directory)
  return {str(name): template for name, template in named.items() if template}


def _check_template(template: Any, directory: Path) -> None:
  if template is not None and not isinstance(template, str):
    raise ModelError(
      f"{_template_file(directory)}: chat_template must be a string, got"
      f" {files.described(template)}"
    )
  if template and len(template) > files.TEMPLATE_BYTES:
    raise ModelError(
      f"{_template_file(directory)}: the chat template has {len(template)} characters; at most"
      f" {files.TEMPLATE_BYTES} are read"
    )


def _template_file(directory: Path) -> str:
  names = [name for name in _TEMPLATE_FILES if (directory / name).exists()]
  return str(directory / (names[0] if names else _TEMPLATE_FILES[-1]))
