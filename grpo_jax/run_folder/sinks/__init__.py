"""The sinks of a run, by name: one file each in this folder, or the dotted path of your own.

A function `make(opening, **options)` or a class makes a sink; see `base.Opening` and
`base.Sink`, and "Sinks" in docs/metrics.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_jax import registry
from grpo_jax.errors import ExpectedFailure
from grpo_jax.run_folder.options import LoggingOptions, WandbOptions
from grpo_jax.run_folder.sinks.background import Guarded
from grpo_jax.run_folder.sinks.base import Opening, Sink, StepRollouts
from grpo_jax.run_folder.sinks.tracking import TRACKERS, missing_package
from grpo_jax.values.options import values

__all__ = [
  "TRACKERS",
  "Choice",
  "Opening",
  "Sink",
  "SinkError",
  "StepRollouts",
  "make",
  "problems",
]

# A name, or a mapping with "name" and the keyword arguments of the sink's `make`.
Choice = str | Mapping[str, Any]

NEEDED = "jsonl"  # what resumed runs and the report read.
METHODS = ("write", "write_rollouts", "close")
_SHARED = ("background", "base", "masking", "tracking")  # modules of this folder that are no sinks.


class SinkError(ExpectedFailure, ValueError):
  """A sink cannot be found or opened, or does not take these options."""


def make(
  choices: Sequence[Choice], opening: Opening, *, timeout_s: float = LoggingOptions.timeout_s
) -> list[Sink]:
  """Opens the sinks of a run, in their order.

  Trackers and users' own sinks work in threads of their own. If one fails or hangs later, that is
  logged and it is not used again: an unreachable server must not end a run.

  Args:
    choices: Names of modules of this folder, or dotted paths; mappings if they have options.
    opening: Run for which the sinks are opened.
    timeout_s: Seconds after which a call of a user's own sink counts as hanging.

  Raises:
    SinkError: A sink cannot be opened.
    WriteError: A file in the run folder cannot be written.
  """
  if found := list(problems(choices)):
    raise SinkError("; ".join(found))
  return [_made(*split(choice), opening, timeout_s) for choice in choices]


def problems(choices: Sequence[Choice], wandb: WandbOptions | None = None) -> Iterator[str]:
  """Yields what is wrong with the names and the options of sinks; none is opened.

  Args:
    choices: Names of sinks, as for `make`.
    wandb: Section `logging.wandb` of a config.
  """
  names = [split(choice)[0] for choice in choices]
  if NEEDED not in names:
    yield f"logging.sinks must name {NEEDED!r}: reports and resumed runs read metrics.jsonl"
  for name in sorted({name for name in names if names.count(name) > 1}):
    yield f"logging.sinks names {name!r} twice"
  if wandb is not None and "wandb" not in names:
    for field, value in values(wandb).items():
      if value != getattr(WandbOptions, field):
        yield f"logging.wandb.{field}={value!r} has no effect: add 'wandb' to logging.sinks"
  for name, options in map(split, choices):
    yield from missing_package(name)
    if name in _own() and not options:
      continue  # not imported before it is needed: tensorboardX imports torch, if it is installed.
    try:
      maker = _maker(name)
      registry.check_arguments(f"sink {name!r}", maker, options, usual=["opening"])
      if isinstance(maker, type):
        _check_methods(name, maker, maker.__name__)
    except (ValueError, TypeError) as error:
      yield f"logging.sinks: {error}"


def split(choice: Choice) -> tuple[str, dict[str, Any]]:
  """Returns the name of a sink and its options."""
  if isinstance(choice, str):
    return choice, {}
  options = dict(choice)
  return options.pop("name"), options


def _own() -> list[str]:
  """Returns the names of the sinks of this folder."""
  return [name for name in registry.modules(__name__) if name not in _SHARED]


def _made(name: str, options: Mapping[str, Any], opening: Opening, timeout_s: float) -> Sink:
  try:
    sink = registry.called(f"{name!r} cannot be opened", _maker(name), opening=opening, **options)
  except ValueError as error:
    raise SinkError(f"logging.sinks: {error}") from error
  _check_methods(name, sink, type(sink).__name__)
  return sink if name in _own() else Guarded(name, sink, timeout_s=timeout_s)


def _maker(name: str) -> Callable[..., Any]:
  """Returns the function or class that a name refers to."""
  found = registry.module_or_member(__name__, name, hidden=_SHARED)
  maker = found if callable(found) else getattr(found, "make", None)
  if not callable(maker):
    raise ValueError(f"module {name!r} has no function make(opening, **options)")
  return maker


def _check_methods(name: str, made: Any, kind: str) -> None:
  missing = [method for method in METHODS if not callable(getattr(made, method, None))]
  if missing:
    raise SinkError(
      f"{name!r} returns {kind}, which has no {' and no '.join(missing)}: derive it from"
      " grpo_jax.run_folder.sinks.Sink"
    )
