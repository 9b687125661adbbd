"""Tools from Python functions: the schema is that of the type hints and the docstring.

def search(query: str, limit: int = 5) -> list[str]:
  '''Searches the library.

  Args:
    query: Words to search for.
    limit: Largest number of results.
  '''
"""

import asyncio
import concurrent.futures
import dataclasses
import inspect
import re
import threading
import typing
from collections.abc import Callable, Coroutine, Mapping
from types import ModuleType
from typing import Any, cast

import pydantic
import typing_extensions
from pydantic import json_schema

from grpo_jax.environments.hanging import Hanging

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
_SECTION = re.compile(
  r"(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|Attributes):$"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_PARAM = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)")
_FIELD = re.compile(r":(param|return|returns|raise|raises|type|rtype)\b")


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
  """A tool that a model may call."""

  name: str
  description: str
  parameters: Mapping[str, Any]  # JSON schema, an object.
  # Function from arguments that fit the schema to a result of any type.
  run: Callable[[Mapping[str, Any]], Coroutine[Any, Any, Any]]
  hanging: Hanging = dataclasses.field(default_factory=Hanging)  # threads of its calls.

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise ValueError(f"the name of a tool is letters, digits and _ . / -, got {self.name!r}")

  @property
  def declaration(self) -> dict[str, Any]:
    """What the chat template receives."""
    function = {
      "name": self.name,
      "description": self.description,
      "parameters": dict(self.parameters),
    }
    return {"type": "function", "function": function}


def tools_in(module: ModuleType) -> list[Tool]:
  """Returns the tools of a module: its public functions, in the order of the file.

  Functions that the module imports are not among them, unless `__all__` lists them.

  Raises:
    ValueError: There is no public function, or one has no schema.
  """
  members = vars(module)
  named = members.get("__all__")
  found = [
    value
    for name, value in members.items()
    if inspect.isfunction(value)
    and (
      name in named if named is not None else name[0] != "_" and value.__module__ == module.__name__
    )
  ]
  if not found:
    raise ValueError(f"the module {module.__name__} has no public function to be a tool")
  return [tool_of(function) for function in found]


class WrongArguments(ValueError):
  """Arguments of a call that cannot be converted to the types of the hints."""


class _Schema(json_schema.GenerateJsonSchema):
  """Writes no titles, which repeat names: the model reads every token."""

  def sort(self, value: Any, parent_key: str | None = None) -> Any:
    return value  # the type comes first, as a reader expects it.

  def field_title_should_be_set(self, schema: Any) -> bool:
    return False

  def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
    made = super().generate(schema, mode)
    for part in (made, *made.get("$defs", {}).values()):
      part.pop("title", None)
    return made


def tool_of(function: Callable[..., Any]) -> Tool:
  """Returns the tool that a function is; it may be a coroutine function.

  Raises:
    ValueError: A parameter has no type hint, or one without a schema; or the function takes
      positional-only or any arguments.
  """
  name = getattr(function, "__name__", None) or type(function).__name__
  where = f"the tool {getattr(function, '__module__', '')}.{name}"
  description, of_arguments = described(inspect.getdoc(function) or "")
  fields = {
    parameter.name: _field(parameter, hint, of_arguments.get(parameter.name))
    for parameter, hint in _typed_parameters(function, where)
  }
  # Any: type checkers know only classes whose fields are written out.
  typed_dict: Any = cast(Any, typing_extensions.TypedDict)(name, fields)
  typed_dict.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")
  adapter = pydantic.TypeAdapter(typed_dict)
  hanging = Hanging()

  async def run(arguments: Mapping[str, Any]) -> Any:
    try:
      typed = adapter.validate_python(dict(arguments))
    except pydantic.ValidationError as error:
      wrong = error.errors(include_url=False, include_input=False)[0]
      raise WrongArguments(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error
    return await _called(function, typed, hanging)

  made = adapter.json_schema(schema_generator=_Schema)
  made.pop("additionalProperties")  # `schemas.problem` refuses other names, with the nearest one.
  made.setdefault("required", [])
  keys = ("type", "properties", "required", "$defs")  # a chat template writes them in this order.
  parameters = {key: made[key] for key in keys if key in made}
  return Tool(name, description, parameters, run, hanging)


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
  """Returns the type of one argument; a description in the hint comes before the docstring's."""
  notes = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
  own = next((note for note in notes if isinstance(note, str)), None)
  if own is None and any(getattr(note, "description", None) for note in notes):
    description = None  # pydantic.Field has it.
  shown: dict[str, Any] = {}
  if isinstance(parameter.default, str | int | float | bool):
    shown["default"] = parameter.default
  field = pydantic.Field(description=own or description, json_schema_extra=shown)
  is_required = parameter.default is parameter.empty
  mark = typing_extensions.Required if is_required else typing_extensions.NotRequired
  return mark[typing.Annotated[hint, field]]


def _typed_parameters(
  function: Callable[..., Any], where: str
) -> list[tuple[inspect.Parameter, Any]]:
  try:
    parameters = inspect.signature(function).parameters.values()
    known = typing.get_type_hints(_hinted(function), include_extras=True)
  except (NameError, TypeError, ValueError) as error:
    raise ValueError(f"{where}: its signature cannot be read: {error}") from error
  found = []
  for parameter in parameters:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
      raise ValueError(f"{where}: {parameter} cannot be given by name, as calls give arguments")
    if parameter.name not in known:
      raise ValueError(f"{where}: the parameter {parameter.name!r} needs a type hint")
    hint = known[parameter.name]
    try:
      pydantic.TypeAdapter(hint).json_schema()
    except (pydantic.errors.PydanticUserError, NameError) as error:
      place, reason = f"{where}, parameter {parameter.name!r}", str(error).splitlines()[0]
      raise ValueError(f"{place}: no JSON schema: {reason}") from error
    found.append((parameter, hint))
  return found


def _hinted(function: Callable[..., Any]) -> Any:
  """Returns what has the type hints: a function, or the method of an object that can be called."""
  is_function = inspect.isroutine(function) or inspect.isclass(function)
  return function if is_function else type(function).__call__


async def _called(
  function: Callable[..., Any], arguments: Mapping[str, Any], hanging: Hanging
) -> Any:
  """Calls a function: in a thread of its own, so that it may block, unless it is a coroutine."""
  if inspect.iscoroutinefunction(_hinted(function)):
    return await function(**arguments)
  future: concurrent.futures.Future[Any] = concurrent.futures.Future()
  future.set_running_or_notify_cancel()

  def body() -> None:
    try:
      future.set_result(function(**arguments))
    except BaseException as error:  # also SystemExit: a tool must not end the run.
      future.set_exception(error)

  thread = threading.Thread(target=body, daemon=True, name="tool")
  thread.start()
  try:
    result = await asyncio.wrap_future(future)
  except asyncio.CancelledError:  # given up, or out of time.
    hanging.leave(thread)
    raise
  return await result if inspect.isawaitable(result) else result


def described(docstring: str) -> tuple[str, dict[str, str]]:
  """Returns the description of a function, and those of its arguments.

  Args:
    docstring: Docstring without indentation, in Google's style, or with `:param name: text`.
  """
  text: list[str] = []
  arguments: dict[str, list[str]] = {}
  current, section, margin = text, "", 0
  for line in docstring.splitlines():
    words, indent = line.strip(), len(line) - len(line.lstrip())
    if indent == 0 and (heading := _SECTION.match(words)):
      section, current, margin = heading[1], [], 0
    elif indent == 0 and _FIELD.match(words):
      found = _PARAM.match(words)
      section, current = "fields", [found[2]] if found else []
      if found:
        arguments[found[1]] = current
    elif section not in ("", "fields") and words and indent == 0:  # text after a section.
      section, current = "", text
      text.append(words)
    elif section in ("Args", "Arguments", "Parameters") and words:
      margin = margin or indent
      found = _ARGUMENT.match(words) if indent == margin else None
      if found:
        current = arguments[found[1]] = [found[2]]
      else:
        current.append(words)
    else:
      current.append(words)
  return _joined(text), {name: " ".join(filter(None, lines)) for name, lines in arguments.items()}


def _joined(lines: list[str]) -> str:
  """Returns text whose lines are joined within paragraphs."""
  paragraphs = re.split(r"\n{2,}", "\n".join(lines).strip())
  return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
