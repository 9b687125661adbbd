"""What both kinds of environments have in common: rows, and attempts at them."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from grpo_jax.environments.base import Endpoint, StepResult
from grpo_jax.errors import ExpectedFailure

# In place of a prompt, where the environment opens the conversation.
PLACEHOLDER = "(the environment opens the conversation)"


class PackageError(ExpectedFailure, ValueError):
  """The package, or an environment of it, cannot be used as it is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersOptions:
  """Options of the environments; see `verifiers.make`."""

  harness: str | Mapping[str, Any] | None = None
  env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  max_turns: int | None = None
  solved_reward: float | None = None


@runtime_checkable
class Tasks(Protocol):
  """The tasks of an environment, by number."""

  def __len__(self) -> int: ...

  def row(self, number: int) -> dict[str, Any]:
    """Returns the fields of a row: `messages`, and `expected_answer` if there is one."""
    ...


@runtime_checkable
class Running(Protocol):
  """An environment that makes attempts. All calls are made in one event loop."""

  async def start(self) -> None:
    """Prepares what all attempts need; called once, before the first."""
    ...

  async def attempt(self, number: int, endpoint: Endpoint) -> StepResult:
    """Makes an attempt at a task.

    Raises:
      EnvironmentFailure: The environment reports an error, or cannot be learned from.
    """
    ...

  async def close(self) -> None:
    """Frees what `start` made."""
    ...


def package(name: str) -> Any:
  """Imports a module of the package, or of what it needs.

  Raises:
    PackageError: The module is not installed.
  """
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not f"{name}.".startswith(f"{error.name}."):
      raise
    raise PackageError(
      f"the package {name.partition('.')[0]} is not installed: pip install verifiers"
    ) from error


def plain(messages: str | Sequence[Any] | None, system: str | None = None) -> list[dict[str, Any]]:
  """Returns the prompt of a task as messages with text: the row shows it and is found by it.

  What the policy reads is sent by the environment itself; parts that are not text are named here.
  """
  given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages or ()
  found = [{"role": "system", "content": system}] if system else []
  for message in given:
    fields = message if isinstance(message, Mapping) else message.model_dump()
    found.append({"role": fields["role"], "content": _text(fields.get("content"))})
  if all(message["role"] == "system" for message in found):
    found.append({"role": "user", "content": PLACEHOLDER})
  return found


def _text(content: Any) -> str:
  if isinstance(content, str) or content is None:
    return content or ""
  parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
  return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in parts)
