"""Checks of single fields of a config: their types and ranges, by dotted name. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_jax import environments
from grpo_jax.config import other_programs, removed, sections
from grpo_jax.config.options import OPEN, OPTIONS
from grpo_jax.values import checked, names

STAND_IN = "(any word)"  # see `stand_ins`.
_BELOW_OPEN = tuple(f"{name}." for name in OPEN)


def wrong(fields: Mapping[str, Any]) -> dict[str, str]:
  """Returns messages, by name, for known fields that have the wrong type, are out of range, or have
  a value that is called otherwise now."""
  found = {name: _wrong(name, value) for name, value in fields.items() if name in OPTIONS}
  return {name: problem for name, problem in found.items() if problem}


def _wrong(name: str, value: Any) -> str | None:
  if isinstance(value, str) and (now := removed.present_name(name, value)) != value:
    return f"{name}={value!r} is now {now!r}"
  return OPTIONS[name].kind.problem(name, value)


def stand_ins(name: str) -> tuple[Any, Any]:
  """Returns two valid values of a field, with which rules about other fields can be tried.

  They differ if possible: a complaint that appears with both does not depend on this field.
  """
  kind = OPTIONS[name].kind
  some = (
    None,
    *kind.words,
    8,
    1,
    0.5,
    False,
    True,
    (),
    (8,),
    (0.0, 1.0),
    (STAND_IN,),
    {},
    10**6,
    STAND_IN,
  )
  fitting = [value for value in some if kind.fits(value)]
  return fitting[0], fitting[-1]


def problems(
  fields: Mapping[str, Any], place_of: Callable[[str], str] = lambda name: ""
) -> Iterator[str]:
  """Yields a message for every field that is unknown, has the wrong type or is out of range.

  Args:
    fields: Values by dotted name, from `configuration.plain_fields`.
    place_of: Function that returns "file:line: " where a field is set; "" if it is not known.
  """
  yield from wrong(fields).values()
  of_environments: dict[str, dict[str, Any]] = {}
  for name, value in fields.items():
    section, _, rest = name.partition(".")
    if section == "environments" and rest:
      environment, _, setting = rest.partition(".")
      if not setting and value:  # an empty section has no settings.
        yield f"{name} must be a mapping of settings, got {checked.shown(value)}"
      elif setting:
        of_environments.setdefault(environment, {})[setting] = value
    elif name not in OPTIONS and not name.startswith(_BELOW_OPEN):
      is_empty = isinstance(value, Mapping) and not value
      if not is_empty:
        close = names.nearest_field(name, OPTIONS, cutoff=0.8)
        hint = other_programs.hint(name) or names.did_you_mean(close)
        unknown = f"there is no field {name!r}{hint}, but it is set to {checked.shown(value)}"
        yield place_of(name) + (sections.left_out(name) or unknown)
  for environment, settings in of_environments.items():
    yield from environments.problems(environment, settings)
